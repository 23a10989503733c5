package main

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/cli"
)

func newGenkeyCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "genkey",
		Short:   "Print a new WireGuard private key",
		Example: "  (umask 077; isthmus genkey > private.key)",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var key [32]byte
			if _, err := rand.Read(key[:]); err != nil {
				return err
			}
			// Clamp the key as wg(8) does before it prints one (RFC 7748, section 5).
			key[0] &= 248
			key[31] = key[31]&127 | 64
			_, err := fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(key[:]))
			return err
		},
	}
}

func newPubkeyCommand() *cobra.Command {
	var tunnels int
	cmd := &cobra.Command{
		Use:   "pubkey",
		Short: "Read a WireGuard private key and print its public key",
		Long: `Read a WireGuard private key and print its public key. A gateway with several tunnels
derives a key for each tunnel from the private key. --tunnels prints their public keys in
order, one a line. In the backend_config of the peers' TunnelEndpoints, the field publicKey
contains the first key. The field tunnels contains the other keys with their ports:
"PORT:KEY,PORT:KEY".`,
		Example: "  isthmus pubkey < private.key",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if tunnels < 1 || tunnels > fabric.MaxTunnels {
				return cli.Usage("--tunnels %d: want 1 to %d", tunnels, fabric.MaxTunnels)
			}
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), 1024))
			if err != nil {
				return err
			}
			key, err := fabric.ParseKey(strings.TrimSpace(string(text)))
			if err != nil {
				return cli.Usage("standard input: the key %w", err)
			}
			for _, public := range fabric.PublicKeys(key, tunnels) {
				if _, err := fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(public[:])); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&tunnels, "tunnels", 1, "number of tunnels of the gateway, 1 to 16")
	return cmd
}
