package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/verify"
)

func TestContinuousVerifyReturnsTheExpectedExitCode(t *testing.T) {
	for _, c := range []struct {
		name   string
		losses []verify.Loss
		err    error
		code   int
	}{
		{"all arrived", []verify.Loss{{Sent: 9}}, nil, cli.Fine},
		{"all that was sent arrived", []verify.Loss{{Sent: 9, NotAsked: 3}, {NotAsked: 12}}, nil, cli.Fine},
		{"something was lost", []verify.Loss{{Sent: 9}, {Sent: 9, Lost: 1}}, nil, cli.Problem},
		{"nothing was sent", []verify.Loss{{NotAsked: 9}}, nil, cli.Wrong},
		{"interrupted at once", nil, nil, cli.Wrong},
		{"Pods are left", []verify.Loss{{Sent: 9}}, fmt.Errorf("Pods are left: %w", context.Canceled), cli.Problem},
		{"no Pods", nil, errors.New("no Pods"), cli.Problem},
	} {
		root := &cobra.Command{Use: "isthmus", RunE: func(*cobra.Command, []string) error { return lossError(c.losses, c.err) }}
		if got := cli.Run(root, nil, nil, io.Discard, io.Discard); got != c.code {
			t.Errorf("%s: exit code %d, want %d", c.name, got, c.code)
		}
	}
}
