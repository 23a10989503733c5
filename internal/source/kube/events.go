package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

const (
	// repeatInterval is the interval at which an Event is repeated while its cause lasts. The API
	// server deletes Events after an hour.
	repeatInterval = 10 * time.Minute
	maxNote        = 1024 // the API server's limit for a note
)

// PodEvents records Events of a component's own Pod. Each call writes its Event before it returns,
// because a component with a fatal problem exits next. Its methods may be called concurrently. The
// methods of a nil PodEvents do nothing.
type PodEvents struct {
	api       client.Client
	component string
	about     corev1.ObjectReference

	mu   sync.Mutex
	last string // reason and note of the last Event
	sent time.Time
}

// NewPodEvents returns the PodEvents of a Pod. If uid is empty, `kubectl get events` shows the
// Events, but `kubectl describe pod` does not.
func NewPodEvents(config *rest.Config, component, namespace, pod string, uid types.UID) (*PodEvents, error) {
	scheme := runtime.NewScheme()
	if err := eventsv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Timeout = writeTimeout
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("path to the API server: %w", err)
	}
	return &PodEvents{api: api, component: component,
		about: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: pod, UID: uid}}, nil
}

// Warn records a problem. Callers repeat the call while the problem lasts. A repeated call writes
// the Event again only after repeatInterval.
func (e *PodEvents) Warn(ctx context.Context, reason, note string) error {
	return e.record(ctx, corev1.EventTypeWarning, reason, note)
}

// Note records, once, an event that is not a problem.
func (e *PodEvents) Note(ctx context.Context, reason, note string) error {
	if e == nil {
		return nil
	}
	return e.named(e.write(ctx, corev1.EventTypeNormal, reason, cut(note, maxNote), time.Now()))
}

// Mended records the end of the last problem. It does nothing if there was no problem.
func (e *PodEvents) Mended(ctx context.Context, note string) error {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	quiet := e.last == ""
	e.mu.Unlock()
	if quiet {
		return nil
	}
	err := e.record(ctx, corev1.EventTypeNormal, isthmus.EventApplied, note)
	e.mu.Lock()
	e.last = ""
	e.mu.Unlock()
	return err
}

func (e *PodEvents) record(ctx context.Context, kind, reason, note string) error {
	if e == nil {
		return nil
	}
	note = cut(strings.ToValidUTF8(note, "?"), maxNote)
	now := time.Now()
	if !e.due(reason+note, now) {
		return nil
	}
	err := e.write(ctx, kind, reason, note, now)
	if err != nil {
		e.mu.Lock()
		e.last = "" // the write failed: try again
		e.mu.Unlock()
	}
	return e.named(err)
}

func (e *PodEvents) named(err error) error {
	if err != nil {
		err = fmt.Errorf("event of Pod %s/%s: %w", e.about.Namespace, e.about.Name, err)
	}
	return err
}

// due returns false if the same message was sent less than repeatInterval ago. Otherwise it records
// the message as sent and returns true.
func (e *PodEvents) due(message string, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.last == message && now.Sub(e.sent) < repeatInterval {
		return false
	}
	e.last, e.sent = message, now
	return true
}

// write creates the Event, or increments its count if it exists.
func (e *PodEvents) write(ctx context.Context, kind, reason, note string, now time.Time) error {
	hash := fnv.New64a()
	fmt.Fprintf(hash, "%s\n%s", reason, note)
	host, _ := os.Hostname() // an empty name is rejected, and the error says so
	event := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: e.about.Namespace, Name: fmt.Sprintf("%s.%016x", strings.TrimRight(e.about.Name[:min(len(e.about.Name), 200)], "-."), hash.Sum64())},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: "isthmus.net/" + e.component, ReportingInstance: cut(e.component+"-"+host, 128),
		Action: "Run", Type: kind, Reason: reason, Note: note, Regarding: e.about,
	}
	err := e.api.Create(ctx, event)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	patch, err := json.Marshal(map[string]any{"series": eventsv1.EventSeries{Count: 2, LastObservedTime: metav1.NewMicroTime(now)}})
	if err != nil {
		return err
	}
	return e.api.Patch(ctx, event, client.RawPatch(types.MergePatchType, patch))
}
