package version

import (
	"strings"
	"testing"

	etcd "go.etcd.io/etcd/api/v3/version"
)

func TestEtcdVersionIsTheModules(t *testing.T) {
	if Etcd != etcd.Version {
		t.Errorf("we serve etcd %s and link its api %s: raise the constant once the difference has been read", Etcd, etcd.Version)
	}
}

// TestTextIsParsedByEtcdsFramework reads the text as the e2e framework does.
func TestTextIsParsedByEtcdsFramework(t *testing.T) {
	text := Get().String()
	var found string
	for _, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(line, "etcd Version:") {
			found = strings.TrimSpace(strings.SplitAfter(line, ":")[1])
		}
	}
	if found != Etcd || !strings.HasPrefix(text, "braid Version: ") {
		t.Errorf("found version %q in:\n%s", found, text)
	}
}
