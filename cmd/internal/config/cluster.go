package config

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
)

// Member is one voter of the initial cluster.
type Member struct {
	ID       uint64
	Name     string
	PeerURLs []string // sorted
}

// Members returns the initial cluster in ascending order of ids. Ids are etcd's: the first eight
// bytes of the SHA-1 of the sorted peer URLs followed by the cluster token, so that every member
// of a cluster computes the same ones without talking to the others.
func (c *Config) Members() []Member {
	ms := make([]Member, 0, len(c.InitialCluster))
	for name, us := range c.InitialCluster {
		ms = append(ms, Member{ID: memberID(us, c.InitialClusterToken), Name: name, PeerURLs: sortedURLs(us)})
	}
	slices.SortFunc(ms, func(a, b Member) int {
		if a.ID != b.ID {
			if a.ID < b.ID {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
	return ms
}

// MemberID is this node's id, 0 when its name is not in the initial cluster (Validate says so).
func (c *Config) MemberID() uint64 {
	us, ok := c.InitialCluster[c.Name]
	if !ok {
		return 0
	}
	return memberID(us, c.InitialClusterToken)
}

// ClusterID is the hash of all member ids, etcd's way.
func (c *Config) ClusterID() uint64 {
	h := sha1.New()
	for _, m := range c.Members() {
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], m.ID)
		h.Write(b[:])
	}
	return binary.BigEndian.Uint64(h.Sum(nil))
}

func memberID(us types.URLs, token string) uint64 {
	sum := sha1.Sum([]byte(strings.Join(sortedURLs(us), "") + token))
	return binary.BigEndian.Uint64(sum[:])
}

func sortedURLs(us types.URLs) []string {
	s := us.StringSlice()
	slices.Sort(s)
	return s
}

// resolveTimeout bounds the name lookups of one Validate.
const resolveTimeout = 5 * time.Second

// sameAddresses says whether two lists of URLs are the same once their host names are resolved.
func sameAddresses(a, b types.URLs) bool {
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	resolve := func(us types.URLs) ([]string, bool) {
		var out []string
		for _, u := range us {
			if !isUnix(u) && net.ParseIP(u.Hostname()) == nil {
				ips, err := net.DefaultResolver.LookupIP(ctx, "ip4", u.Hostname())
				if err != nil || len(ips) == 0 {
					return nil, false
				}
				u.Host = net.JoinHostPort(ips[0].String(), u.Port())
			}
			out = append(out, u.String())
		}
		slices.Sort(out)
		return out, true
	}
	ra, aok := resolve(a)
	rb, bok := resolve(b)
	return aok && bok && slices.Equal(ra, rb)
}

// checkCluster finds what is wrong with the initial cluster, in etcd's words where etcd has some.
func (c *Config) checkCluster() (errs []error) {
	own, ok := c.InitialCluster[c.Name]
	if !ok {
		return append(errs, fmt.Errorf("couldn't find local name %q in the initial cluster configuration %q: "+
			"add %s=<peer URL> to --initial-cluster or correct --name", c.Name, c.InitialCluster.String(), c.Name))
	}
	listed, advertised := sortedURLs(own), sortedURLs(c.InitialAdvertisePeerURLs)
	if !slices.Equal(listed, advertised) && sameAddresses(own, c.InitialAdvertisePeerURLs) {
		advertised = listed // localhost and 127.0.0.1 are one place, as in etcd
	}
	for _, u := range listed {
		if !slices.Contains(advertised, u) {
			errs = append(errs, fmt.Errorf("--initial-cluster has %s=%s but missing from --initial-advertise-peer-urls=%s",
				c.Name, u, strings.Join(advertised, ",")))
		}
	}
	for _, u := range advertised {
		if !slices.Contains(listed, u) {
			errs = append(errs, fmt.Errorf("--initial-advertise-peer-urls has %s but missing from --initial-cluster=%s",
				u, types.URLsMap{c.Name: own}.String()))
		}
	}
	seen := map[string]string{}
	for _, m := range c.Members() {
		for _, u := range m.PeerURLs {
			if _, dup := seen[u]; dup {
				errs = append(errs, fmt.Errorf("initial cluster %s has duplicate url", c.InitialCluster))
				return errs
			}
			seen[u] = m.Name
		}
	}
	return errs
}
