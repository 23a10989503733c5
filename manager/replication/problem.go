package replication

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/inband"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
)

// diagnose returns the cause of a failed request to the peer's API server: a reason of package
// apis/isthmus/v1alpha1, and a text with the server's response or behaviour. The text contains
// neither our ports nor times, so it is the same for every attempt.
func diagnose(err error) (reason, text string) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || !kubeerr.Answered(err) {
		return isthmus.ReasonUnreachable, cause(err)
	}
	answer := "says: " + quote(message(status.Status()))
	switch code := status.Status().Code; {
	case code == http.StatusUnauthorized:
		return isthmus.ReasonUnauthorized, answer
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), missingNamespace(status):
		return isthmus.ReasonNamespaceGone, answer
	case code == http.StatusForbidden:
		return isthmus.ReasonForbidden, answer
	case code == http.StatusTooManyRequests, code >= 500, code < 400:
		return isthmus.ReasonUnreachable, answer
	default: // 422, 400, 404 without the CRD, 409, 413, ...
		return isthmus.ReasonRefusedByPeer, answer
	}
}

// message returns the server's message. If an object is invalid, it sorts the causes, because the
// server lists them in random order.
func message(s metav1.Status) string {
	if s.Reason != metav1.StatusReasonInvalid || s.Details == nil || len(s.Details.Causes) < 2 {
		return s.Message
	}
	var faults []string
	for _, c := range s.Details.Causes {
		faults = append(faults, c.Field+": "+c.Message)
	}
	slices.Sort(faults)
	return fmt.Sprintf("%s %q is invalid: %s", s.Details.Kind, s.Details.Name, strings.Join(faults, ", "))
}

func missingNamespace(s apierrors.APIStatus) bool {
	d := s.Status().Details
	return s.Status().Code == http.StatusNotFound && d != nil && d.Kind == "namespaces"
}

// cause returns the constant part of a network error.
func cause(err error) string {
	if errors.Is(err, errAnswerTooLong) {
		return errAnswerTooLong.Error()
	}
	if refused := (*inband.RefusedError)(nil); errors.As(err, &refused) {
		return "is unreachable: " + quote(refused.Reason)
	}
	if what, ok := kubeerr.Cause(err); ok {
		return quote(what)
	}
	if cert := (*tls.CertificateVerificationError)(nil); errors.As(err, &cert) {
		return "has a certificate that the CA in the Secret does not verify: " + quote(cert.Err.Error())
	}
	for next := err; next != nil; next = errors.Unwrap(next) {
		err = next
	}
	return "does not answer: " + quote(err.Error())
}

// maxQuote bounds quoted text of an API server, in octets. It leaves room for the remedy in the
// message of a condition.
const maxQuote = 450

// quote makes text from a peer safe for a message: one line of bounded length.
func quote(s string) string {
	if len(s) > 4*maxQuote {
		s = s[:4*maxQuote]
	}
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}), " ")
	if len(s) > maxQuote {
		s = strings.ToValidUTF8(s[:maxQuote], "") + "…"
	}
	return s
}

// remedies has the remedy for each reason.
var remedies = map[string]string{
	isthmus.ReasonUnauthorized:  "the identity was revoked or has expired: run isthmus peer again, or put a new identity into the Secret",
	isthmus.ReasonForbidden:     "the peer must have our Role for networkconfigs in this namespace (isthmus peer repairs it), and quota for one; retrying",
	isthmus.ReasonNamespaceGone: "the peer un-peered, or its tenant namespace was deleted: run isthmus peer again, or isthmus unpeer",
	isthmus.ReasonRefusedByPeer: "its CRD, an admission policy or a webhook rejects our object: run `isthmus install` there, unless it runs Liqo",
	isthmus.ReasonUnreachable:   "retrying at least every 30 seconds",
}

// failure returns the condition after a failed request to the server.
func failure(server string, err error) Condition {
	reason, text := diagnose(err)
	remedy := remedies[reason]
	if cert := (*tls.CertificateVerificationError)(nil); errors.As(err, &cert) {
		remedy = "if its CA has changed, run isthmus peer again with a kubeconfig that has the new CA; otherwise, the connection may be intercepted"
	}
	if apierrors.IsAlreadyExists(err) { // the object exists, but our watch does not show it
		remedy = "the existing object is the peer's own: delete it there"
	}
	return Condition{metav1.ConditionFalse, reason, fmt.Sprintf("%s %s; %s", server, text, remedy)}
}

// breaks reports whether the reason is about the identity or the connection, and not about one
// request.
func breaks(reason string) bool {
	return reason == isthmus.ReasonUnauthorized || reason == isthmus.ReasonUnreachable
}
