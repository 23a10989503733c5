package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/cli"
)

func TestRouteAgentNamesTheMissingFlag(t *testing.T) {
	t.Setenv("NODE_NAME", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "want --node-name NAME, or NODE_NAME in the environment"},
		{[]string{"--node-name", "n1", "--log-level", "loud"}, `--log-level "loud": want debug, info, warn or error`},
		{[]string{"--node-name", "n1"}, "this process does not run in a Pod (KUBERNETES_SERVICE_HOST is not set); want --kubeconfig FILE"},
		{[]string{"--node-name", "n1", "--kubeconfig", "/nonexistent"}, "kubeconfig: "},
	} {
		var out, errs bytes.Buffer
		code := run(append([]string{"route-agent"}, tc.args...), strings.NewReader(""), &out, &errs)
		if code != cli.Wrong || !strings.Contains(errs.String(), tc.want) {
			t.Errorf("%v: code %d, %s", tc.args, code, &errs)
		}
	}
}
