package config

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// setMemberLocalAddr is the one of etcd's feature gates that means something here.
const setMemberLocalAddr = "SetMemberLocalAddr"

// idleGates are etcd 3.7.3's other feature gates, and why each has no effect.
var idleGates = map[string]string{
	"StopGRPCServiceOnDefrag":      "a defragmentation has nothing to do",
	"InitialCorruptCheck":          whyHashCheck,
	"CompactHashCheck":             whyHashCheck,
	"TxnModeWriteWithSharedBuffer": whyBolt,
	"LeaseCheckpoint":              "the time that leases have left is always stored",
	"LeaseCheckpointPersist":       "the time that leases have left is always stored",
	"FastLeaseKeepAlive":           "renewals take no raft round",
	"PriorityRequest":              "there are no priorities among requests",
}

// featureGates reads a list of NAME=BOOL into what was set, by name.
func featureGates(s string) (map[string]bool, error) {
	var set map[string]bool
	for pair := range strings.SplitSeq(s, ",") {
		if pair = strings.TrimSpace(pair); pair == "" {
			continue
		}
		name, v, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("missing bool value for %s", name)
		}
		on, err := strconv.ParseBool(strings.TrimSpace(v))
		if err != nil {
			return nil, fmt.Errorf("invalid value of %s=%s", name, v)
		}
		name = strings.TrimSpace(name)
		if _, idle := idleGates[name]; !idle && name != setMemberLocalAddr {
			return nil, fmt.Errorf("unrecognized feature gate: %s", name)
		}
		if set == nil {
			set = map[string]bool{}
		}
		set[name] = on
	}
	return set, nil
}

func formatGates(set map[string]bool) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(set)) {
		list = append(list, name+"="+strconv.FormatBool(set[name]))
	}
	return strings.Join(list, ",")
}

// idleGateNote says which of the gates in v have no effect, and why.
func idleGateNote(v string) string {
	set, err := featureGates(v)
	if err != nil {
		return "" // refused
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if why := idleGates[name]; why != "" {
			list = append(list, name+": "+why)
		}
	}
	if len(list) == 0 {
		return ""
	}
	return "feature gates without effect: " + strings.Join(list, "; ")
}

// PeerLocalAddr is the address that peers are to be dialed from: with SetMemberLocalAddr the first
// address, not a loopback or unspecified one, among the advertised peer URLs. The invalid Addr
// leaves the choice to the system. It matters on a machine with several addresses where peers
// compare the address of the caller with its certificate.
func (c *Config) PeerLocalAddr() netip.Addr {
	if !c.FeatureGates[setMemberLocalAddr] {
		return netip.Addr{}
	}
	for _, u := range c.InitialAdvertisePeerURLs {
		if a, err := netip.ParseAddr(u.Hostname()); err == nil && !a.IsLoopback() && !a.IsUnspecified() {
			return a
		}
	}
	return netip.Addr{}
}
