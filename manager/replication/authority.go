package replication

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Bounds of the certificate authority that a peer publishes, because we store it in a Secret.
// During a rotation there are two certificates.
const (
	maxAuthority    = 64 << 10 // octets
	maxCertificates = 16
)

// followAuthority copies the certificate authority that the peer publishes into the identity
// Secret. It does so only over a connection that the present authority verifies.
//
// It adopts the new authority only if that authority verifies the same API server: behind a load
// balancer, the server's certificate may be from another authority. Therefore it can follow a
// rotation only while both authorities are valid.
func (w *worker) followAuthority(ctx context.Context) {
	if now := time.Now(); w.link.ca == "" || w.link.user == "" || now.Before(w.authority) {
		return // the system's authorities verify the server, or the Secret is from Liqo
	}
	w.authority = time.Now().Add(w.r.pace.authority)
	ctx, cancel := context.WithTimeout(ctx, 2*w.r.pace.request)
	defer cancel()
	published, err := w.link.publishedAuthority(ctx)
	if err != nil {
		w.log.Debug("cannot read the peer's certificate authority", "error", err) // the peer uses Liqo, or does not permit the read
		return
	}
	if err := w.adopt(ctx, published); err != nil {
		w.log.Warn("cannot adopt the peer's new certificate authority", "error", err)
	}
}

func (w *worker) adopt(ctx context.Context, published string) error {
	have, _ := certificates(w.link.ca)
	want, err := certificates(published)
	if err != nil {
		return fmt.Errorf("ConfigMap %s of the peer: %w", isthmus.ConfigMapRootCA, err)
	}
	if slices.Equal(have, want) {
		return nil
	}
	id := w.link.identity
	id.ca = published
	next, err := newLink(&w.r.pool, id, w.peer.RemoteNamespace)
	if err != nil {
		return err
	}
	defer next.close()
	if again, err := next.publishedAuthority(ctx); err != nil || again != published {
		w.log.Debug("the peer publishes an authority that does not verify its API server", "error", err)
		return nil
	}
	config, err := clientcmd.Load(w.secret.Data[isthmus.SecretKubeconfig])
	if err != nil || config.Contexts[config.CurrentContext] == nil || config.Clusters[config.Contexts[config.CurrentContext].Cluster] == nil {
		return errors.New("the Secret is not a kubeconfig") // it was a kubeconfig when the link was made
	}
	config.Clusters[config.Contexts[config.CurrentContext].Cluster].CertificateAuthorityData = []byte(published)
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	if err := w.replaceKubeconfig(ctx, kubeconfig); err != nil {
		w.authority = time.Now().Add(w.r.pace.renew) // try again soon, because the Secret may have changed in the meantime
		return err
	}
	w.log.Info("adopted the peer's new certificate authority", "certificates", len(want))
	return nil
}

// certificates returns the certificates in a PEM text, sorted and without duplicates.
func certificates(text string) (all []string, err error) {
	if len(text) > maxAuthority {
		return nil, fmt.Errorf("%d octets; want at most %d", len(text), maxAuthority)
	}
	for block, rest := pem.Decode([]byte(text)); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			return nil, errors.New("holds something that is not a certificate")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(all)+1, err)
		}
		all = append(all, string(block.Bytes))
	}
	if len(all) == 0 || len(all) > maxCertificates {
		return nil, fmt.Errorf("%d certificates; want 1 to %d", len(all), maxCertificates)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}
