package replication

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// maxAnswer bounds one response of a peer's API server, in octets after decompression. A watch that
// reaches the bound is restarted. etcd accepts objects below 1.5 MiB, and the objects that we write
// are far smaller.
const maxAnswer = 4 << 20

var errAnswerTooLong = fmt.Errorf("sent more than %d MiB at once", maxAnswer>>20)

// A link is a client of a peer's API server. It accesses NetworkConfigs and PeerServices in one
// namespace, and can request a token and read the certificate authority.
type link struct {
	identity
	namespace    string
	configs      rest.Interface // client for net.liqo.io/v1alpha1
	peerServices rest.Interface // client for isthmus.net/v1alpha1; a peer that uses Liqo does not serve it
	core         rest.Interface // client for v1
	pool         *pool
}

// newLink returns a link. It sends no request itself. The caller must close the link.
func newLink(p *pool, id identity, namespace string) (*link, error) {
	transport, err := p.get(id.endpoint)
	if err != nil {
		return nil, err
	}
	l := &link{identity: id, namespace: namespace, pool: p}
	client := &http.Client{
		Transport: guarded{next: transport, token: id.token, limit: maxAnswer},
		// With redirects, the peer could send our token, or requests from inside our network, to any
		// server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	large := *client
	large.Transport = guarded{next: transport, token: id.token, limit: maxServicesAnswer}
	var errs [3]error
	l.configs, errs[0] = restClient(id.server, v1alpha1.GroupVersion, client)
	l.core, errs[1] = restClient(id.server, schema.GroupVersion{Version: "v1"}, client)
	l.peerServices, errs[2] = restClient(id.server, isthmus.GroupVersion, &large)
	if err := errors.Join(errs[:]...); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *link) close() { l.pool.put(l.endpoint) }

// codecs and parameters encode and decode all kinds that a link accesses.
var codecs, parameters = func() (serializer.CodecFactory, runtime.ParameterCodec) {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, isthmus.AddToScheme, authv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err) // two kinds have the same name
		}
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return serializer.NewCodecFactory(s), runtime.NewParameterCodec(s)
}()

func restClient(server string, gv schema.GroupVersion, c *http.Client) (rest.Interface, error) {
	path := "/apis"
	if gv.Group == "" {
		path = "/api"
	}
	return rest.RESTClientForConfigAndClient(&rest.Config{
		Host: server, APIPath: path, QPS: -1, WarningHandler: rest.NoWarnings{},
		ContentConfig: rest.ContentConfig{GroupVersion: &gv, NegotiatedSerializer: codecs.WithoutConversion()},
	}, c)
}

// request prepares a request for the NetworkConfigs. The client does not retry, because the worker
// does.
func (l *link) request(verb string) *rest.Request {
	return l.configs.Verb(verb).Namespace(l.namespace).Resource("networkconfigs").MaxRetries(0)
}

// feed returns a feed of the NetworkConfigs that the cluster origin replicated to the peer.
func (l *link) feed(origin, peer string) feed {
	labels := v1alpha1.LabelOriginID + "=" + origin + "," + v1alpha1.LabelRemoteID + "=" + peer + "," + v1alpha1.LabelReplicated + "=true"
	return feed{
		list: func(ctx context.Context, o metav1.ListOptions) ([]client.Object, metav1.ListInterface, error) {
			o.LabelSelector = labels
			var list v1alpha1.NetworkConfigList
			err := l.request(http.MethodGet).VersionedParams(&o, parameters).Do(ctx).Into(&list)
			all := make([]client.Object, 0, min(len(list.Items), maxListed))
			for i := range list.Items {
				if len(all) < maxListed { // the server may ignore the limit of the list
					all = append(all, &list.Items[i])
				}
			}
			return all, &list, err
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector, o.Watch = labels, true
			return l.request(http.MethodGet).VersionedParams(&o, parameters).Watch(ctx)
		},
	}
}

func (l *link) get(ctx context.Context, name string) (*v1alpha1.NetworkConfig, error) {
	var found v1alpha1.NetworkConfig
	return &found, l.request(http.MethodGet).Name(name).Do(ctx).Into(&found)
}

func (l *link) create(ctx context.Context, o *v1alpha1.NetworkConfig) (*v1alpha1.NetworkConfig, error) {
	var made v1alpha1.NetworkConfig
	return &made, l.request(http.MethodPost).Body(o).Do(ctx).Into(&made)
}

func (l *link) update(ctx context.Context, o *v1alpha1.NetworkConfig) (*v1alpha1.NetworkConfig, error) {
	var made v1alpha1.NetworkConfig
	return &made, l.request(http.MethodPut).Name(o.Name).Body(o).Do(ctx).Into(&made)
}

func (l *link) delete(ctx context.Context, name string, uid types.UID) error {
	return l.request(http.MethodDelete).Name(name).Body(metav1.NewPreconditionDeleteOptions(string(uid))).Do(ctx).Error()
}

// tokenLife is the life that we request for a new token. Some API servers shorten it.
const tokenLife = 90 * 24 * time.Hour

// publishedAuthority returns the certificate authority that the peer's API server publishes, in
// PEM. Kubernetes writes that authority into a ConfigMap in every namespace.
func (l *link) publishedAuthority(ctx context.Context) (string, error) {
	b, err := l.core.Get().Namespace(l.namespace).Resource("configmaps").Name(isthmus.ConfigMapRootCA).MaxRetries(0).DoRaw(ctx)
	if err != nil {
		return "", err
	}
	var published struct {
		Data map[string]string `json:"data"`
	}
	if err := json.Unmarshal(b, &published); err != nil {
		return "", fmt.Errorf("ConfigMap %s: %w", isthmus.ConfigMapRootCA, err)
	}
	return published.Data["ca.crt"], nil
}

// newToken requests a token for the same account and audience, bound to the same Secret.
func (l *link) newToken(ctx context.Context, old serviceToken) (string, error) {
	seconds := int64(tokenLife / time.Second)
	request := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{Audiences: old.audiences, ExpirationSeconds: &seconds}}
	if old.secret != "" {
		request.Spec.BoundObjectRef = &authv1.BoundObjectReference{
			Kind: "Secret", APIVersion: "v1", Name: old.secret, UID: types.UID(old.secretUID),
		}
	}
	var answer authv1.TokenRequest
	err := l.core.Post().Namespace(old.namespace).Resource("serviceaccounts").Name(old.account).SubResource("token").
		Body(request).MaxRetries(0).Do(ctx).Into(&answer)
	return answer.Status.Token, err
}

// guarded adds the token to each request and bounds each response.
type guarded struct {
	next  http.RoundTripper
	token string
	limit int
}

func (g guarded) RoundTrip(req *http.Request) (*http.Response, error) {
	if g.token != "" {
		req = req.Clone(req.Context())
		req.Header.Set("Authorization", "Bearer "+g.token)
	}
	resp, err := g.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	resp.Body = &bounded{ReadCloser: resp.Body, left: g.limit}
	return resp, nil
}

// bounded limits a response body: after left more octets, reads fail.
type bounded struct {
	io.ReadCloser
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errAnswerTooLong
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// A pool shares connections between all links to an endpoint, and closes them when the last of
// these links closes. The zero value is empty. Its methods may be called concurrently.
type pool struct {
	inBand func(ctx context.Context, peer string) (net.Conn, error) // Options.InBand

	mu    sync.Mutex
	users map[endpoint]*users
}

type users struct {
	transport *http.Transport
	number    int
	connect   func(ctx context.Context, network, address string) (net.Conn, error)

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// dial tracks a connection until it is closed. The transport does not close a connection at once
// after a cancelled request, and no connection may outlive its identity.
func (u *users) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := u.connect(ctx, network, address)
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.conns == nil { // the last link was closed in the meantime
		c.Close()
		return nil, net.ErrClosed
	}
	u.conns[c] = struct{}{}
	return tracked{c, u}, nil
}

func (u *users) close() {
	u.transport.CloseIdleConnections()
	u.mu.Lock()
	defer u.mu.Unlock()
	for c := range u.conns {
		c.Close()
	}
	u.conns = nil
}

type tracked struct {
	net.Conn
	by *users
}

func (t tracked) Close() error {
	t.by.mu.Lock()
	delete(t.by.conns, t.Conn)
	t.by.mu.Unlock()
	return t.Conn.Close()
}

func (p *pool) get(e endpoint) (http.RoundTripper, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if u := p.users[e]; u != nil {
		u.number++
		return u.transport, nil
	}
	config, err := e.tlsConfig()
	if err != nil {
		return nil, err
	}
	proxy := http.ProxyFromEnvironment
	if e.proxy != "" {
		u, err := url.Parse(e.proxy)
		if err != nil {
			return nil, err
		}
		proxy = http.ProxyURL(u)
	}
	if p.users == nil {
		p.users = map[endpoint]*users{}
	}
	u := &users{number: 1, conns: map[net.Conn]struct{}{}, connect: (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext}
	if e.inBand != "" {
		proxy = nil
		u.connect = func(ctx context.Context, _, _ string) (net.Conn, error) {
			if p.inBand == nil {
				return nil, errors.New("this manager does not use the tunnel")
			}
			return p.inBand(ctx, e.inBand)
		}
	}
	u.transport = &http.Transport{
		Proxy: proxy, TLSClientConfig: config, ForceAttemptHTTP2: true, DialContext: u.dial,
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: 10 * time.Second, IdleConnTimeout: 90 * time.Second,
		MaxIdleConnsPerHost: 2, MaxResponseHeaderBytes: 64 << 10,
		// Pings detect a peer that hangs or whose packets are lost. Without pings, a watch would
		// wait for ever.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second},
	}
	p.users[e] = u
	return u.transport, nil
}

func (p *pool) put(e endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if u := p.users[e]; u != nil {
		if u.number--; u.number == 0 {
			delete(p.users, e)
			u.close()
		}
	}
}
