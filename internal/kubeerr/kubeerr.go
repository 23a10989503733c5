// Package kubeerr describes failed requests to an API server in words for people. The errors of
// client libraries also contain details of the request and the socket, which belong only in logs.
package kubeerr

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Plain returns err with a text for people. If there was no response, the text is a sentence with
// server as its subject. If err is a response of the server, its text is unchanged. The result
// unwraps to err, which logs should print.
func Plain(server string, err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, part := range unanswered(err) {
		if what, ok := Cause(part); ok {
			text = strings.ReplaceAll(text, part.Error(), server+" "+what)
		}
	}
	if text == err.Error() {
		return err
	}
	return &plain{text, err}
}

type plain struct {
	text string
	err  error
}

func (p *plain) Error() string { return p.text }
func (p *plain) Unwrap() error { return p.err }

// unanswered returns those errors in the tree of err that represent a request or watch without a
// response. If controller-runtime added a prefix to such an error, such as "failed to get server
// groups", the result includes the prefix. None of our own errors has such a prefix.
func unanswered(err error) []error {
	switch e := err.(type) { //nolint:errorlint // it walks the tree itself
	case *url.Error:
		return []error{e}
	case interface{ Unwrap() error }:
		all := unanswered(e.Unwrap())
		if len(all) > 0 && strings.HasPrefix(err.Error(), "failed to ") {
			return []error{err}
		}
		return all
	case interface{ Unwrap() []error }:
		var all []error
		for _, one := range e.Unwrap() {
			all = append(all, unanswered(one)...)
		}
		return all
	}
	if _, ok := brokenWatch(err); ok {
		return []error{err}
	}
	return nil
}

// Cause returns the reason why a server did not answer, such as "does not answer in time". The same
// reason always has the same text, without local port numbers and times. Cause returns false if err
// is a response, or if it cannot determine the reason.
func Cause(err error) (string, bool) {
	var (
		name    *net.DNSError
		invalid x509.CertificateInvalidError
		network *net.OpError
		number  syscall.Errno
		timeout interface{ Timeout() bool }
	)
	broken, watch := brokenWatch(err)
	text := err.Error()
	switch {
	case errors.As(err, &name):
		return fmt.Sprintf("has a name that does not resolve: %s: %s", name.Name, name.Err), true
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired: // replace the library's text, which contains the time
		return fmt.Sprintf("has a certificate that is valid only from %s to %s",
			invalid.Cert.NotBefore.Format(time.RFC3339), invalid.Cert.NotAfter.Format(time.RFC3339)), true
	case errors.As(err, &network) && errors.As(err, &number): // a number without a network error may come from a file operation
		return "does not answer: " + number.Error(), true
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "does not answer in time", true
	case strings.Contains(text, "connection lost"): // the server does not answer HTTP/2 pings
		return "stopped answering: the connection was lost", true
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), strings.Contains(text, "GOAWAY"):
		return "closes the connection", true
	case watch:
		return "sends data that cannot be decoded: " + broken, true
	}
	return "", false
}

// clientWatchDecoding marks a Status with code 500 that client-go itself creates when the stream of
// a watch breaks (newStreamWatcher in rest/request.go). Such a Status is no response of the server.
const clientWatchDecoding metav1.CauseType = "ClientWatchDecoding"

// brokenWatch returns the reason why the stream of a watch broke.
func brokenWatch(err error) (string, bool) {
	cause, ok := apierrors.StatusCause(err, clientWatchDecoding)
	return strings.TrimPrefix(cause.Message, "unable to decode an event from the watch stream: "), ok
}

// Answered reports whether err is a response of the server.
func Answered(err error) bool {
	var status apierrors.APIStatus
	_, broken := brokenWatch(err)
	return errors.As(err, &status) && !broken
}
