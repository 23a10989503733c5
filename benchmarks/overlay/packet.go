package main

import (
	"os"
	"strconv"
	"strings"
)

// busySeconds is what all processors have done but idle, since the machine started: of what the
// kernel does for others no process has the account.
func busySeconds() float64 {
	stat, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(stat), "\n")
	var ticks float64
	for i, field := range strings.Fields(line) {
		if i == 1 || i == 2 || i == 3 || i == 6 || i == 7 { // user, nice, system, irq, softirq
			n, _ := strconv.ParseFloat(field, 64)
			ticks += n
		}
	}
	return ticks / 100 // USER_HZ is 100 on every Linux architecture that Go knows
}
