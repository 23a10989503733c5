// Package redact removes secrets from texts that people will show to others. It removes registered
// secrets, and text that looks like a secret, in plain form, in base64 and in hexadecimal.
package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
)

// Mark replaces a removed text.
const Mark = "[REDACTED]"

// A Redactor removes secrets. The zero value recognizes only text that looks like a secret. After
// all secrets have been added, its methods may be called concurrently.
type Redactor struct {
	known  map[string]bool // every form of the registered secrets
	order  []string        // the keys of known, the longest first
	public map[string]bool // WireGuard public keys, which look like private ones
}

// minLength is the minimum length of a secret to remove, in octets. Shorter secrets may also occur
// inside words.
const minLength = 8

// Secret registers a secret. In a PEM text, each long line of the body is also a secret of its own.
func (r *Redactor) Secret(value []byte) {
	value = bytes.TrimSpace(value)
	if len(value) < minLength {
		return
	}
	forms := []string{string(value), hex.EncodeToString(value), strings.ToUpper(hex.EncodeToString(value))}
	for _, e := range encodings {
		forms = append(forms, e.EncodeToString(value))
	}
	if raw, ok := decoded(string(value)); ok && len(raw) >= minLength { // such as a key in base64, which other programs print in hexadecimal
		forms = append(forms, hex.EncodeToString(raw), strings.ToUpper(hex.EncodeToString(raw)))
	}
	// If a larger text that contains the value is encoded in base64, the value has one of three
	// forms, depending on its offset. Leave out the first and last characters of each form, because
	// they also depend on the neighbouring octets.
	for shift := range 3 {
		inner := base64.StdEncoding.EncodeToString(append(make([]byte, shift), value...))
		inner = strings.TrimRight(inner, "=")
		if from, to := (shift*8+5)/6, len(inner)-2; to-from >= 2*minLength {
			forms = append(forms, inner[from:to])
		}
	}
	forms = append(forms, strings.ReplaceAll(string(value), "\n", `\n`))
	if bytes.HasPrefix(value, []byte("-----BEGIN ")) {
		for line := range strings.Lines(string(value)) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "-----") && len(line) >= 4*minLength {
				forms = append(forms, line)
			}
		}
	}
	if r.known == nil {
		r.known = make(map[string]bool)
	}
	for _, f := range forms {
		if len(f) >= minLength && !r.known[f] {
			r.known[f] = true
			r.order = append(r.order, f)
		}
	}
	slices.SortFunc(r.order, func(a, b string) int { return len(b) - len(a) })
}

// Public registers a WireGuard public key, so that it is not removed.
func (r *Redactor) Public(key string) {
	if r.public == nil {
		r.public = make(map[string]bool)
	}
	r.public[key] = true
}

var encodings = []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding}

func decoded(text string) ([]byte, bool) {
	for _, e := range encodings {
		if raw, err := e.DecodeString(text); err == nil {
			return raw, true
		}
	}
	return nil, false
}

// Patterns of text that looks like a secret.
var (
	// Without an END line, the match ends at the first character that cannot belong to a key. A
	// file with many BEGIN lines takes no excessive time, because no part of the pattern looks far
	// ahead.
	pemKey = regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:(?:\s|\\[nr])+[A-Za-z-]+: [^\n\\]*)*[A-Za-z0-9+/=\s\\]*(?:-----END [A-Z0-9 ]*PRIVATE KEY-----)?`)
	jwt    = regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?`)
	bearer = regexp.MustCompile(`(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{8,}`)
	// A field whose name shows that its value is secret, in YAML, JSON, an environment or a header.
	// A value may begin with a slash, because one in 64 base64 texts does. Names of fields for
	// paths, such as privateKeyFile, do not match. Several names may precede a value if all fields
	// except the last are empty.
	secretField = regexp.MustCompile(`(?i)((?:(?:[\w.-]*(?:password|passwd|secret[_-]?key|client-key-data|private[_-]?key|gateway[_-]?key|preshared[_-]?key|access[_-]?key|api[_-]?key|auth[_-]?token|id-token|refresh-token)|\btoken)\\?["']?\s*[:=]\s*\\?["']?)+)[^\s"'\\,}\[]{4,}`)
	userinfo    = regexp.MustCompile(`(://)[^/\s:@"']+:[^/\s@"']+@`)
	// Text that may encode 32 octets, the length of WireGuard's keys, or more.
	blob       = regexp.MustCompile(`[A-Za-z0-9+/_-]{40,}={0,2}`)
	onlyDigits = regexp.MustCompile(`^[0-9a-fA-F]+$`)
	digits     = regexp.MustCompile(`(?:sha256:)?\b[0-9a-fA-F]{64,}\b`)
)

// Text returns a copy of text without secrets. It does not modify its argument.
func (r *Redactor) Text(text []byte) []byte { return r.text(text, 3) }

// text implements Text. It decodes at most depth levels of nested encoding.
func (r *Redactor) text(text []byte, depth int) []byte {
	out := text
	for _, secret := range r.order {
		out = bytes.ReplaceAll(out, []byte(secret), []byte(Mark))
	}
	mark := []byte(Mark)
	out = pemKey.ReplaceAll(out, mark)
	out = jwt.ReplaceAll(out, mark)
	out = bearer.ReplaceAll(out, []byte("$1 "+Mark))
	out = secretField.ReplaceAll(out, []byte("${1}"+Mark))
	out = userinfo.ReplaceAll(out, []byte("$1"+Mark+"@"))
	if depth == 0 {
		return out
	}
	out = digits.ReplaceAllFunc(out, func(found []byte) []byte {
		if bytes.HasPrefix(found, []byte("sha256:")) { // it is the digest of an image
			return found
		}
		raw := make([]byte, len(found)/2)
		_, _ = hex.Decode(raw, found[:len(found)/2*2]) // all characters are hexadecimal digits
		key := len(raw) == 32 && clamped(raw) && !r.public[base64.StdEncoding.EncodeToString(raw)]
		if key || r.hides(raw, depth) {
			return mark
		}
		return found
	})
	return blob.ReplaceAllFunc(out, func(found []byte) []byte {
		if r.public[string(found)] || onlyDigits.Match(found) {
			return found
		}
		raw, ok := decoded(string(found))
		switch {
		case !ok:
			return found
		case len(found) == 44 && len(raw) == 32 && clamped(raw), r.hides(raw, depth):
			return mark
		}
		return found
	})
}

// hides reports whether decoded octets contain a secret.
func (r *Redactor) hides(raw []byte, depth int) bool { return !bytes.Equal(r.text(raw, depth-1), raw) }

// clamped reports whether 32 octets have the form of an X25519 private key (RFC 7748, section 5),
// as wg(8) and Isthmus create it. One public key in 16 has this form, too.
func clamped(key []byte) bool { return key[0]&7 == 0 && key[31]&0xc0 == 0x40 }
