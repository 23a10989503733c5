package replication

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func (w *worker) secretFeed() feed {
	secrets := w.r.secrets.Secrets(w.peer.LocalNamespace)
	only := "metadata.name=" + w.peer.IdentitySecret // RBAC treats this selector as a request for one object
	return feed{
		list: func(ctx context.Context, o metav1.ListOptions) ([]client.Object, metav1.ListInterface, error) {
			o.FieldSelector = only
			list, err := secrets.List(ctx, o)
			if err != nil {
				return nil, nil, err
			}
			all := make([]client.Object, len(list.Items))
			for i := range list.Items {
				all[i] = &list.Items[i]
			}
			return all, list, nil
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only
			return secrets.Watch(ctx, o)
		},
	}
}

// connect makes a link for an identity. After the given delay, it lists and watches the copies over
// that link. pause counts failures, including those of earlier links. If the identity is for
// another API server, connect drops the known copies.
func (w *worker) connect(ctx context.Context, id identity, delay time.Duration, pause *backoff) error {
	next, err := newLink(&w.r.pool, id, w.peer.RemoteNamespace)
	if err != nil {
		return err
	}
	if w.link != nil && w.link.server != id.server {
		w.copies, w.listed = nil, false
	}
	w.disconnect()
	ctx, cancel := context.WithCancel(ctx)
	changes, finished := make(chan change), make(chan struct{})
	go func() {
		defer close(finished)
		select {
		case <-time.After(delay):
			w.pace().follow(ctx, next.feed(w.r.opts.ClusterID, w.peer.ID), pause, deliver(ctx, changes))
		case <-ctx.Done():
		}
	}()
	var sharing sync.WaitGroup
	if w.r.opts.Services || w.r.opts.Withdraw {
		sharing.Go(func() {
			select {
			case <-time.After(delay):
				(&sharer{w: w, link: next}).run(ctx)
			case <-ctx.Done():
			}
		})
	}
	w.link, w.remote, w.pause = next, changes, pause
	w.unlink = func() {
		cancel()
		<-finished
		sharing.Wait()
		next.close()
	}
	return nil
}

// disconnect closes the link, if one exists.
func (w *worker) disconnect() {
	if w.link == nil {
		return
	}
	w.unlink()
	w.link, w.unlink, w.remote, w.up, w.retry = nil, nil, nil, false, time.Time{}
}

// takeRemote applies a change from the peer's API server.
func (w *worker) takeRemote(c change) {
	switch {
	case c.err != nil:
		w.up = false
		w.blame(c.err)
	case c.full:
		w.up, w.listed = true, true
		w.copies = make(map[string]*v1alpha1.NetworkConfig, len(c.all))
		for _, o := range c.all {
			w.keep(o)
		}
	case c.deleted:
		delete(w.copies, c.object.GetName())
	default:
		w.keep(c.object)
	}
	if c.err == nil {
		w.accepted()
	}
}

// A remoteError is an error of the peer's API server or of the connection to it.
type remoteError struct{ err error }

func (e *remoteError) Error() string { return e.err.Error() }

func (e *remoteError) Unwrap() error { return e.err }

func remotely(err error) error {
	if err == nil {
		return nil
	}
	return &remoteError{err}
}
