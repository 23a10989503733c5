package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/cluster"
)

// completionTime is how long completion waits for the API server. After that it completes nothing.
const completionTime = 2 * time.Second

// words returns those that start with begin.
func words(all []string, begin string) ([]string, cobra.ShellCompDirective) {
	var fit []string
	for _, w := range all {
		if strings.HasPrefix(w, begin) {
			fit = append(fit, w)
		}
	}
	return fit, cobra.ShellCompDirectiveNoFileComp
}

// completeAccess completes the flags that addAccessFlags has added.
func completeAccess(cmd *cobra.Command, a *cluster.Access, prefix string) {
	contexts := func(cmd *cobra.Command, _ []string, begin string) ([]string, cobra.ShellCompDirective) {
		file := a.Kubeconfig
		if file == "" && prefix != "" {
			file, _ = cmd.Flags().GetString("kubeconfig") // --kubeconfig counts for both clusters
		}
		return words(cluster.Contexts(file), begin)
	}
	_ = cmd.RegisterFlagCompletionFunc(prefix+"context", contexts) // fails only for a flag that does not exist
}

// completePeering completes the name of a Peering or of a peer.
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
		return words(names, begin)
	}
}
