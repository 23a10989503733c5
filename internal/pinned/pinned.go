// Package pinned secures connections between processes of one installation. The processes have the
// gateways' WireGuard private key in common.
package pinned

import (
	"crypto"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
)

// Config returns the TLS configuration for both sides of a connection. Each side proves that it has
// a key, which Config derives from the WireGuard private key and the purpose. In TLS 1.3,
// signatures of clients differ from those of servers, so an attacker cannot send a side's own
// signature back to it.
func Config(private [32]byte, purpose string) (*tls.Config, error) {
	if private == [32]byte{} { // everybody knows the zero key
		return nil, errors.New("the private key of the gateways is not known yet")
	}
	seed, err := hkdf.Key(sha256.New, private[:], nil, purpose, ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	form := x509.Certificate{SerialNumber: big.NewInt(1)}
	cert, err := x509.CreateCertificate(rand.Reader, &form, &form, key.Public(), crypto.Signer(key))
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}},
		ClientAuth:   tls.RequireAnyClientCert,
		// There is no server name and no CA: VerifyConnection compares the public key, and TLS proves
		// that the other side has the private key.
		InsecureSkipVerify:     true,
		SessionTicketsDisabled: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) > 0 {
				if public, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey); ok && public.Equal(key.Public()) {
					return nil
				}
			}
			return errors.New("the other gateway or manager has another key")
		},
	}, nil
}
