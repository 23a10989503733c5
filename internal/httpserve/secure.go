package httpserve

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Secure is the access control of a server. A nil Secure permits everything.
type Secure struct {
	TLS *tls.Config
	// Guard wraps a handler with a check that rejects unauthorized requests.
	Guard func(http.Handler) http.Handler
}

// Guarded returns h wrapped by Guard.
func (s *Secure) Guarded(h http.Handler) http.Handler {
	if s == nil {
		return h
	}
	return s.Guard(h)
}

// The file names of a certificate, as in a Secret of type kubernetes.io/tls.
const (
	certFile = "tls.crt"
	keyFile  = "tls.key"
)

// TLS returns a server's configuration with the certificate in dir (tls.crt, tls.key). It reloads
// the files when they change. If dir is empty, it creates a self-signed certificate. Clients cannot
// verify such a certificate, but TLS still protects against eavesdroppers.
func TLS(dir string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	if dir == "" {
		own, err := selfSigned(time.Now())
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{own}
		return config, nil
	}
	c := &certificate{dir: dir}
	if _, err := c.get(nil); err != nil {
		return nil, err
	}
	config.GetCertificate = c.get
	return config, nil
}

// certificate is a certificate that is reloaded from a directory.
type certificate struct {
	dir string

	mu    sync.Mutex
	pair  *tls.Certificate // nil: not read yet
	times [2]time.Time     // modification times of the files that pair was read from
}

// get reloads the files if they have changed. While they are invalid, it returns the last valid
// certificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	names, times := [2]string{filepath.Join(c.dir, certFile), filepath.Join(c.dir, keyFile)}, [2]time.Time{}
	for i, name := range names {
		if info, err := os.Stat(name); err == nil {
			times[i] = info.ModTime()
		}
	}
	if c.pair != nil && times == c.times {
		return c.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(names[0], names[1])
	switch {
	case err == nil:
		c.pair, c.times = &pair, times
	case c.pair == nil:
		return nil, fmt.Errorf("certificate in %s: %w", c.dir, err)
	}
	return c.pair, nil
}

// selfSigned creates a certificate for this host.
func selfSigned(now time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	name, err := os.Hostname()
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0), // clocks differ; a restart creates a new certificate
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{name, "localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
