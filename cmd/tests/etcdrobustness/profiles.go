package main

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/traffic"
)

// profile is one of etcd's traffic profiles, with the keys at which its key space is split here.
type profile struct {
	name    string
	traffic traffic.Traffic
	load    traffic.Profile
	splits  []string
	// spans says that it has transactions over several keys.
	spans bool
}

var (
	// Keys of etcd's own traffic are key0, key1, ... with numbers that grow as keys are deleted.
	etcdSplits = []string{"key2", "key4", "key6", "key8"}
	// Those of Kubernetes' end in five random letters or digits. compact_rev_key is in the last region.
	kubernetesSplits = []string{
		"/registry/pods/default/M", "/registry/pods/default/a", "/registry/pods/default/i", "/registry/pods/default/q",
	}

	load   = traffic.Profile{KeyValue: &traffic.KeyValueHigh, Watch: &traffic.WatchDefault, Compaction: &traffic.CompactionDefault}
	medium = traffic.Profile{KeyValue: &traffic.KeyValueMedium, Watch: &traffic.WatchDefault, Compaction: &traffic.CompactionDefault}
	// often compacts as often as the suite allows.
	often = traffic.Profile{KeyValue: &traffic.KeyValueMedium, Watch: &traffic.WatchDefault, Compaction: &traffic.CompactionFrequent}
)

// profiles are those of the suite.
var profiles = []profile{
	{name: "EtcdPut", traffic: traffic.EtcdPut, load: load, splits: etcdSplits, spans: true},
	{name: "EtcdPutDeleteLease", traffic: traffic.EtcdPutDeleteLease, load: medium, splits: etcdSplits, spans: true},
	{name: "EtcdDelete", traffic: traffic.EtcdDelete, load: load, splits: etcdSplits},
	{name: "KubernetesHigh", traffic: traffic.Kubernetes, load: load, splits: kubernetesSplits},
	{name: "KubernetesLow", traffic: traffic.Kubernetes, load: often, splits: kubernetesSplits},
	{name: "KubernetesCreateDelete", traffic: traffic.KubernetesCreateDelete, load: load, splits: kubernetesSplits},
}

// regionOf is the region, by place, that holds a key.
func (p *profile) regionOf(key string) int {
	for i, s := range p.splits {
		if bytes.Compare([]byte(key), []byte(s)) < 0 {
			return i
		}
	}
	return len(p.splits)
}

// spread counts what a committed order wrote into each region.
type spread struct {
	writes, spanning []int // by region; spanning: in transactions that wrote to other regions too
}

func (s *spread) add(o *spread) {
	if s.writes == nil {
		s.writes, s.spanning = make([]int, len(o.writes)), make([]int, len(o.writes))
	}
	for i := range o.writes {
		s.writes[i] += o.writes[i]
		s.spanning[i] += o.spanning[i]
	}
}

func (p *profile) spread(requests []model.EtcdRequest) *spread {
	s := &spread{writes: make([]int, len(p.splits)+1), spanning: make([]int, len(p.splits)+1)}
	for _, r := range requests {
		if r.Type != model.Txn {
			continue
		}
		touched := map[int]bool{}
		for _, op := range r.Txn.OperationsOnSuccess {
			switch op.Type {
			case model.PutOperation:
				touched[p.regionOf(op.Put.Key)] = true
			case model.DeleteOperation:
				touched[p.regionOf(op.Delete.Key)] = true
			}
		}
		for region := range touched {
			s.writes[region]++
			if len(touched) > 1 {
				s.spanning[region]++
			}
		}
	}
	return s
}

// tally sums up the rounds of a profile; of the rates it keeps the lowest.
type tally struct {
	rounds, calls, events, compactions int
	unknown, executed                  int
	writesPerSecond                    float64
	pause                              time.Duration // the longest
	changed                            int
	spread                             spread
	ended                              int
	faults                             map[fault]int
}

func (t *tally) add(r *round) {
	t.rounds++
	t.calls += r.calls
	t.unknown += r.unknown
	t.executed += r.executed
	t.pause = max(t.pause, r.pause)
	t.events += r.events
	t.compactions += r.compactions
	t.changed += len(r.changed)
	t.ended += r.ended
	if t.writesPerSecond == 0 || r.writesPerSecond < t.writesPerSecond {
		t.writesPerSecond = r.writesPerSecond
	}
	t.spread.add(r.spread)
	if t.faults == nil {
		t.faults = map[fault]int{}
	}
	t.faults[r.fault]++
}

func (t *tally) line(p profile) string {
	var by []string
	for _, f := range faults {
		if n := t.faults[f]; n > 0 {
			by = append(by, fmt.Sprintf("%s %d", f, n))
		}
	}
	return fmt.Sprintf("%s: %d rounds: %d calls (%d writes without an answer, %d of them executed), at least %.0f acknowledged writes/s before a fault, %d events at watchers, %d compactions, %d leader changes\n"+
		"  writes per region %v, of them in transactions over several regions %v\n  faults: %s; longest pause of writes %s; records ended by a snapshot: %d",
		p.name, t.rounds, t.calls, t.unknown, t.executed, t.writesPerSecond, t.events, t.compactions, t.changed, t.spread.writes, t.spread.spanning, strings.Join(by, ", "), t.pause.Round(time.Millisecond), t.ended)
}

// idle says which region nothing was written to: then the run proves less than it claims.
func (t *tally) idle(p profile) string {
	for i := range t.spread.writes {
		if t.spread.writes[i] == 0 {
			return fmt.Sprintf("nothing was written to region %d", i)
		}
		if p.spans && t.spread.spanning[i] == 0 {
			return fmt.Sprintf("no transaction over several regions wrote to region %d", i)
		}
	}
	return ""
}
