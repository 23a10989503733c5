//go:build race

package crd

// raceEnabled: the rules' interpreter then takes a hundred times as long.
const raceEnabled = true
