package redact

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"
)

const (
	token   = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.eyJpc3MiOiJrdWJlcm5ldGVzIiwic3ViIjoieCJ9.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
	pemText = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBtzYXJlZmFsc2UvYW5kK25vdEFLZXlBdEFsbEJ1dEl0TG9va3NM\naWtlT25l\n-----END EC PRIVATE KEY-----\n"
)

func wireguardKeys(t testing.TB) (private, public []byte) {
	t.Helper()
	seed := make([]byte, 32)
	_, _ = rand.Read(seed)
	seed[0] &= 248
	seed[31] = seed[31]&127 | 64
	k, err := ecdh.X25519().NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	return seed, k.PublicKey().Bytes()
}

// forms returns the forms in which the output must not contain a secret.
func forms(secret []byte) map[string]string {
	all := map[string]string{"plain": string(secret), "hex": hex.EncodeToString(secret), "HEX": strings.ToUpper(hex.EncodeToString(secret))}
	for name, e := range map[string]*base64.Encoding{"base64": base64.StdEncoding, "raw base64": base64.RawStdEncoding, "URL base64": base64.RawURLEncoding} {
		all[name] = e.EncodeToString(secret)
	}
	return all
}

// Text that looks like a secret is removed without being registered.
func TestTextThatLooksLikeASecretIsHidden(t *testing.T) {
	private, _ := wireguardKeys(t)
	key := base64.StdEncoding.EncodeToString(private)
	kubeconfig := "users:\n- name: x\n  user:\n    client-key-data: " + base64.StdEncoding.EncodeToString([]byte(pemText)) + "\n    token: opaque-token-123\n"
	r := &Redactor{}
	for name, secret := range map[string]string{"a token": token, "a PEM": pemText, "a WireGuard key": key, "a kubeconfig": kubeconfig} {
		for form, text := range forms([]byte(secret)) {
			for where, document := range map[string]string{
				"a line":     "before " + text + " after\n",
				"JSON":       fmt.Sprintf(`{"a":{"b":%q}}`, text),
				"YAML":       "data:\n  x: " + text + "\n  y: 1\n",
				"two levels": "data: " + base64.StdEncoding.EncodeToString([]byte("see "+text)) + "\n",
			} {
				got := string(r.Text([]byte(document)))
				if strings.Contains(got, text) || !strings.Contains(got, Mark) {
					t.Errorf("%s as %s in %s: %s", name, form, where, got)
				}
			}
		}
	}
	if got := string(r.Text([]byte(hex.EncodeToString(private)))); got != Mark {
		t.Errorf("the octets of a key: %s", got)
	}
	for _, text := range []string{"password: hunter22", `"PGPASSWORD":"hunter22"`, "--auth-token=hunter22", "Authorization: Bearer hunter22222", "https://me:hunter22@example.com/",
		"DB_PASSWORD=hunter22", `{\"private_key\":\"hunter22\"}`} {
		if got := string(r.Text([]byte(text))); strings.Contains(got, "hunter") {
			t.Errorf("%s: %s", text, got)
		}
	}
}

func TestRegisteredSecretsAreHiddenInEveryEncoding(t *testing.T) {
	r := &Redactor{}
	r.Secret([]byte("no-pattern-knows-this"))
	for form, text := range forms([]byte("no-pattern-knows-this")) {
		if got := string(r.Text([]byte("a " + text + " b"))); strings.Contains(got, text) {
			t.Errorf("as %s: %s", form, got)
		}
	}
	for shift := range 5 {
		inner := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("#", shift) + "no-pattern-knows-this" + "and more"))
		got := r.Text([]byte(`"` + inner + `"`))
		raw, _ := base64.StdEncoding.DecodeString(strings.Trim(string(got), `"`))
		if bytes.Contains(raw, []byte("knows-this")) {
			t.Errorf("inside of base64, at %d: %s", shift, got)
		}
	}
}

// Text that people need to find a fault is kept.
func TestOrdinaryTextIsKept(t *testing.T) {
	_, public := wireguardKeys(t)
	key := base64.StdEncoding.EncodeToString(public)
	r := &Redactor{}
	r.Public(key)
	r.Secret([]byte("short")) // too short to be removed
	text := "publicKey: " + key + "\nimage: x@sha256:" + strings.Repeat("0a", 32) + "\npodCIDR: 10.0.0.0/8\ntokenSecret: {name: a, key: token}\nprivateKeyFile: /etc/key\n" +
		"uid: 11111111-1111-4111-8111-111111111111\nserviceAccountToken:\n  path: token\nshort and sweet\nmessage: the token of the peer expires 2026-12-01\n" +
		"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
	if got := string(r.Text([]byte(text))); got != text {
		t.Errorf("got:\n%s\nwant:\n%s", got, text)
	}
}

// Logs are large, and may contain text from attackers.
func TestHostileTextsTakeBoundedTime(t *testing.T) {
	for _, piece := range []string{"aB3+", "eyJ-----BEGIN PRIVATE KEY-----token=", "eyJabcdefgh.a", "://a:", "password", "0a", "-----BEGIN PRIVATE KEY-----\nProc-Type: 4"} {
		text := bytes.Repeat([]byte(piece), 200_000/len(piece))
		done := make(chan struct{})
		go func() { (&Redactor{}).Text(text); close(done) }()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatalf("%q, again and again, takes more than a minute", piece)
		}
	}
}

func FuzzRedact(f *testing.F) {
	f.Add([]byte("hunter2222"), []byte("before "), []byte(" after"), uint8(0))
	f.Add([]byte(token), []byte("token: "), []byte("\n"), uint8(2))
	f.Add([]byte("hunter2222"), []byte("map["), []byte("]"), uint8(1))
	f.Fuzz(func(t *testing.T, secret, before, after []byte, form uint8) {
		if len(bytes.TrimSpace(secret)) < minLength || bytes.Contains([]byte(Mark), bytes.TrimSpace(secret)) || len(secret) > 1<<10 {
			t.Skip()
		}
		secret = bytes.TrimSpace(secret)
		r := &Redactor{}
		r.Secret(secret)
		text := [][]byte{secret, []byte(hex.EncodeToString(secret)), []byte(base64.StdEncoding.EncodeToString(secret))}[form%3]
		in := bytes.Join([][]byte{before, text, after}, nil)
		kept := bytes.Clone(in)
		out := r.Text(in)
		if bytes.Contains(out, text) && !bytes.Contains(before, text) && !bytes.Contains(after, text) {
			t.Errorf("%q is still in %q", text, out)
		}
		if !bytes.Equal(in, kept) {
			t.Error("the input was changed")
		}
		name := []string{"presharedKey=", "gatewayKey: "}[form%2]
		text = []byte(base64.StdEncoding.EncodeToString(secret))
		out = new(Redactor).Text(bytes.Join([][]byte{before, []byte("\n" + name + "/"), text, after}, nil))
		if bytes.Contains(out, text) && !bytes.Contains(before, text) && !bytes.Contains(after, text) {
			t.Errorf("%q of %s is still in %q", text, name, out)
		}
	})
}

func TestAValueThatBeginsLikeAPathIsHidden(t *testing.T) {
	const key = "/LEWVMYgZjUd+2SMfcoL7r0eWSOzjJB4ZcC1ryibMKw="
	for _, text := range []string{`"privateKey":"` + key + `"`, "map[presharedKey:" + key + "]", "presharedKey=" + key + ";", "(presharedKey=" + key + ")", "presharedKey=" + key + ".",
		"gatewayKey: " + key, "gateway_key=" + key + "].", "gateway-key: " + key, "password: /LEWVMYgZ", "password: /LEWVMYgZ)"} {
		if out := string(new(Redactor).Text([]byte(text))); strings.Contains(out, "LEWVMYgZ") || !strings.Contains(out, Mark) {
			t.Errorf("%s: %s", text, out)
		}
	}
	for _, text := range []string{"privateKeyFile: /var/lib/isthmus/private.key", `"nextPrivateKeyFile":"/var/lib/isthmus/next.key"`, "password_dir=/etc/passwords"} {
		if out := string(new(Redactor).Text([]byte(text))); out != text {
			t.Errorf("%s: %s", text, out)
		}
	}
}
