package main

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/fabric"
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
			// As wg(8) prints it: clamped (RFC 7748, section 5).
			key[0] &= 248
			key[31] = key[31]&127 | 64
			_, err := fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(key[:]))
			return err
		},
	}
}

func newPubkeyCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "pubkey",
		Short:   "Read a WireGuard private key and print its public key",
		Example: "  isthmus pubkey < private.key",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := io.ReadAll(io.LimitReader(cmd.InOrStdin(), 1024))
			if err != nil {
				return err
			}
			key, err := fabric.ParseKey(strings.TrimSpace(string(text)))
			if err != nil {
				return &codeError{exitUsage, fmt.Errorf("the key read %w", err)}
			}
			private, err := ecdh.X25519().NewPrivateKey(key[:])
			if err != nil {
				return &codeError{exitUsage, fmt.Errorf("the key read: %w", err)}
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), base64.StdEncoding.EncodeToString(private.PublicKey().Bytes()))
			return err
		},
	}
}
