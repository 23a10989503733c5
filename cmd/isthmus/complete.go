package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cluster"
)

// completionTime is how long shell completion waits for the API server before it completes
// nothing.
const completionTime = 2 * time.Second

// withPrefix returns the words that begin with prefix, as a completion.
func withPrefix(words []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var fit []string
	for _, w := range words {
		if strings.HasPrefix(w, prefix) {
			fit = append(fit, w)
		}
	}
	return fit, cobra.ShellCompDirectiveNoFileComp
}

// completeAccess adds completion to the flags of addAccessFlags.
func completeAccess(cmd *cobra.Command, a *cluster.Access, prefix string) {
	contexts := func(cmd *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
		file := a.Kubeconfig
		if file == "" && prefix != "" {
			file, _ = cmd.Flags().GetString("kubeconfig") // --kubeconfig is also the default for the other cluster
		}
		return withPrefix(cluster.Contexts(file), begin)
	}
	_ = cmd.RegisterFlagCompletionFunc(prefix+"context", contexts) // fails only if the flag does not exist
}

// completePeering completes the name of a Peering or of its peer.
func completePeering(a *cluster.Access) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
		c, err := cluster.Connect(*a)
		if len(args) > 0 || err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
		defer cancel()
		names, err := cluster.Names(ctx, c)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return withPrefix(names, begin)
	}
}
