package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// cpu returns the CPU time of a process's live threads. It omits threads that have ended, but
// threads of a Go program hardly ever end.
func cpu(pid int) (sum time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, name := range files {
		b, _ := os.ReadFile(name)
		if fields := strings.Fields(string(b)); len(fields) == 3 {
			n, _ := strconv.ParseInt(fields[0], 10, 64)
			sum += time.Duration(n)
		}
	}
	return sum
}

// memory returns a value of /proc/PID/status, such as VmRSS, in octets.
func memory(pid int, name string) (n int) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name+":" {
			n, _ = strconv.Atoi(fields[1])
		}
	}
	return n << 10
}

// A tap is a proxy in front of the API server. It counts the octets in both directions.
type tap struct {
	listener net.Listener
	to       string
	read     atomic.Int64 // octets that the process received, including TLS
	sent     atomic.Int64
}

func newTap(to string) (*tap, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	t := &tap{listener: l, to: to}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go t.carry(c)
		}
	}()
	return t, nil
}

func (t *tap) carry(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp4", t.to)
	if err != nil {
		return
	}
	defer s.Close()
	go func() {
		_, _ = io.Copy(counting{s, &t.sent}, c)
		s.Close()
	}()
	_, _ = io.Copy(counting{c, &t.read}, s)
}

// counting is a writer that counts the octets written through it.
type counting struct {
	io.Writer
	n *atomic.Int64
}

func (c counting) Write(b []byte) (int, error) {
	n, err := c.Writer.Write(b)
	c.n.Add(int64(n))
	return n, err
}

// auditPolicy makes the API server log the requests of one user. %q is the user.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [%q]
- level: None
`

// auditedRequests counts the requests in an audit log: watches when they start, other requests when
// they end.
func auditedRequests(path string) (watches, others int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	for lines := bufio.NewReader(f); ; {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return watches, others, nil
		}
		if err != nil {
			return 0, 0, err
		}
		var event struct{ Verb, Stage string }
		if err := json.Unmarshal(line, &event); err != nil {
			return 0, 0, fmt.Errorf("%s: %w", path, err)
		}
		switch {
		case event.Verb == "watch" && event.Stage == "ResponseStarted":
			watches++
		case event.Verb != "watch" && event.Stage == "ResponseComplete":
			others++
		}
	}
}
