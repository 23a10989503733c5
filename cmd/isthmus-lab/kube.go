package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/kubetest"
)

func newKubeCommand() *cobra.Command {
	var nodes, oldest bool
	cmd := &cobra.Command{
		Use:   "kube",
		Short: "Build etcd, kube-apiserver and kube-controller-manager, and print their directory",
		Long: `Build etcd, kube-apiserver and kube-controller-manager from source if they are missing,
and print their directory. This takes some minutes, once, and needs a checkout of the
source. --nodes also builds kube-scheduler, kubelet and kube-proxy, in a separate
directory. --oldest builds the oldest version of Kubernetes that Isthmus supports, in
another directory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			build := kubetest.Build
			switch {
			case nodes:
				build = kubetest.BuildNodes
			case oldest:
				build = kubetest.BuildOldest
			}
			dir, err := build(cmd.Context(), cmd.ErrOrStderr())
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), dir)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&nodes, "nodes", false, "build the programs of nodes too")
	cmd.Flags().BoolVar(&oldest, "oldest", false, "build the oldest version that Isthmus supports")
	cmd.MarkFlagsMutuallyExclusive("nodes", "oldest")
	return cmd
}
