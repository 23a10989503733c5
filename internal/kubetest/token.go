package kubetest

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
)

// DatedToken returns a copy of a ServiceAccount token with other dates, in seconds since 1970. The
// API server itself issues no token with a date in the past, and none that is valid for less than
// ten minutes.
func (s *Server) DatedToken(token string, issued, expires int64) (string, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return "", fmt.Errorf("a token of %d parts; want 3 (RFC 7519)", len(parts))
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return "", fmt.Errorf("payload of the token: %w", err)
	}
	var claims map[string]any
	if err := json.Unmarshal(payload, &claims); err != nil {
		return "", fmt.Errorf("payload of the token: %w", err)
	}
	claims["iat"], claims["nbf"], claims["exp"] = issued, issued, expires
	if payload, err = json.Marshal(claims); err != nil {
		return "", err
	}
	text := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"ES256"}`)) + "." + base64.RawURLEncoding.EncodeToString(payload)
	hash := sha256.Sum256([]byte(text))
	r, v, err := ecdsa.Sign(rand.Reader, s.tokenKey, hash[:])
	if err != nil {
		return "", err
	}
	var signature [64]byte // r and s as 32 octets each: RFC 7518, section 3.4
	r.FillBytes(signature[:32])
	v.FillBytes(signature[32:])
	return text + "." + base64.RawURLEncoding.EncodeToString(signature[:]), nil
}
