package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/internal/kubetest"
)

func newKubeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "kube",
		Short: "Build etcd, kube-apiserver and kube-controller-manager, and print where they are",
		Long: `Build etcd, kube-apiserver and kube-controller-manager from source where they are
missing, and print the folder that has them. That takes some minutes, once, and works
in a checkout of the source.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := kubetest.Build(cmd.Context(), cmd.ErrOrStderr())
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), dir)
			}
			return err
		},
	}
}
