package sim

import (
	"braid/pd"
	"braid/pd/order"
	"braid/raftstore"
	"braid/region"
	"braid/watchsvc"
)

// mutants are the rules that a run drops, by layer.
type mutants struct {
	raft          raftstore.Mutants
	region        region.Mutants
	order         order.Mutants
	pd            pd.Mutants
	sharedFsync   bool
	storeMark     bool
	ingestNoFlush bool
	skipReaders   bool
	watch         watchsvc.Mutants
	noReset       bool
	noIndex       bool
	removeFirst   bool
	noExtend      bool
	noConfirm     bool
	renewEnding   bool
	anyTerm       bool
	noReread      bool
	anyGrant      bool
	noReplace     bool
	noMeta        bool
	noIndexQuorum bool
	unordered     bool
	registerHeld  bool
}

// Mutant is a rule dropped on purpose, the aim that shows its loss, and the symptoms by which the
// loss counts as noticed: one of these texts is in the violation.
type Mutant struct {
	Name, Rule, Aim string
	Symptoms        []string
	set             func(*mutants)
}

// Mutants are all rules that can be dropped; each must be caught by one of its symptoms.
var Mutants = []Mutant{
	{"evalearly", "E2", "", []string{"evaluated on another state", "a sequential store"},
		func(m *mutants) { m.region.EvalEarly = true }},
	{"recentstays", "E2", "transfer", []string{"evaluated on another state", "follows version", "a sequential store"},
		func(m *mutants) { m.region.RecentStays = true }},
	{"forward", "E1", "transfer", []string{"evaluated on another state", "follows version", "a sequential store", "a revision that was never given", "this replica counts"},
		func(m *mutants) { m.region.Forward, m.raft.Forward = true, true }},
	{"commitfromitem", "O1", "partition", []string{"I6", "I3", "I8", "this replica counts"},
		func(m *mutants) { m.region.CommitFromItem = true }},
	{"sealuncommitted", "P4", "forget", []string{"LIVENESS"},
		func(m *mutants) { m.region.SealUncommitted = true }},
	{"truncapplied", "D6", "crash", []string{"entries are missing"},
		func(m *mutants) { m.region.TruncApplied = true }},
	{"snapnocum", "D1", "snapshot", []string{"this replica counts"},
		func(m *mutants) { m.region.SnapNoCum = true }},
	{"delta", "P1", "", []string{"this replica counts", "I1"},
		func(m *mutants) { m.order.Delta, m.pd.Delta = true, true }},
	{"fromidx", "P2", "", []string{"LIVENESS"},
		func(m *mutants) { m.region.FromIdx = true }},
	{"noquorum", "S1", "oracle", []string{"I2: read"},
		func(m *mutants) { m.pd.ReadPointWithoutQuorum = true }},
	{"storemark", "S2", "stream", []string{"I4"},
		func(m *mutants) { m.storeMark = true; m.order.PerStoreMark = true }},
	{"lrev", "S1", "stream", []string{"I4"},
		func(m *mutants) { m.region.LRevision = true }},
	{"sharedfsync", "A1", "partition", []string{"I8: op", "this replica counts", "LIVENESS", "the log has term"},
		func(m *mutants) { m.sharedFsync = true }},
	{"sealping", "O2", "", []string{"B2", "LIVENESS"},
		func(m *mutants) { m.region.SealPing = true }},
	{"ingestnoflush", "D3", "snapshot", []string{"entries are missing", "I3", "hole"},
		func(m *mutants) { m.ingestNoFlush = true }},
	{"nouninit", "B6", "bootstrap", []string{"LIVENESS"},
		func(m *mutants) { m.raft.NoUninitialisedVoters = true }},
	{"nofence", "F2", "fence", []string{"F2"},
		func(m *mutants) { m.region.NoFence, m.order.NoFence, m.pd.NoFence = true, true, true }},
	{"earlyack", "I8", "crash", []string{"I8"},
		func(m *mutants) { m.raft.EarlyAcknowledge = true }},
	{"earlyread", "A13", "oracle", []string{"I2: read"},
		func(m *mutants) { m.pd.EarlyRead = true }},
	{"forgetall", "P4", "stream", []string{"LIVENESS"},
		func(m *mutants) { m.order.ForgetAll, m.pd.ForgetAll = true, true }},
	{"nolockcheck", "T1", "txns", []string{"serializability", "evaluated on another state"},
		func(m *mutants) { m.region.NoLockCheck = true }},
	{"roskip", "T2", "txns", []string{"serializability"},
		func(m *mutants) { m.skipReaders = true }},
	{"level", "P2", "txns", []string{"which is not prepared here", "atomicity", "I3: attempt", "T3"},
		func(m *mutants) { m.region.FactsAsLevel, m.pd.FactsAsLevel = true, true }},
	{"decfirst", "P3", "txns", []string{"I1", "serializability", "which is not prepared here", "LIVENESS"},
		func(m *mutants) { m.region.DecisionsFirst, m.pd.DecisionsFirst = true, true }},
	{"lockunordered", "T5", "locks", []string{"PROGRESS"},
		func(m *mutants) { m.unordered = true }},
	{"lockanyage", "T5", "wide", []string{"PROGRESS"},
		func(m *mutants) { m.region.LocksAnyAge = true }},
	{"lockagedfirst", "T5", "rush", []string{"PROGRESS"},
		func(m *mutants) { m.region.AgedGoFirst = true }},
	{"snapnoprep", "D1", "snapshot", []string{"which is not prepared here"},
		func(m *mutants) { m.region.SnapNoPrepared = true }},
	{"fencekeepslocks", "F3", "fencedtxns", []string{"F3"},
		func(m *mutants) { m.region.FenceKeepsLocks = true }},
	{"sourcecursor", "W1", "watch", []string{"I7"},
		func(m *mutants) { m.watch.SourceCursor = true }},
	{"noreplace", "W2", "cutoff", []string{"W2"},
		func(m *mutants) { m.noReplace = true }},
	{"onenometa", "D1", "onegroup", []string{"was not ordered", "I2: read"},
		func(m *mutants) { m.noMeta = true }},
	{"onenoquorum", "S1", "onegroup", []string{"I2: read"},
		func(m *mutants) { m.noIndexQuorum = true }},
	{"noreset", "W3", "watch", []string{"I7"},
		func(m *mutants) { m.noReset = true }},
	{"snapfloorlate", "C1", "snapreads", []string{"I4", "I7"},
		func(m *mutants) { m.region.SnapFloorLate = true }},
	{"localordinals", "R1", "txns", []string{"holds", "I7"},
		func(m *mutants) { m.region.LocalOrdinals = true }},
	{"noindex", "R2", "watch", []string{"I7"},
		func(m *mutants) { m.noIndex = true }},
	{"removefirst", "C1", "snapreads", []string{"I4", "I7"},
		func(m *mutants) { m.removeFirst = true }},
	{"leaseonespan", "L1", "leases", []string{"L2"},
		func(m *mutants) { m.region.LeaseOneSpan = true }},
	{"leasenolock", "L2", "leases", []string{"L2"},
		func(m *mutants) { m.region.LeaseNoLock = true }},
	{"leasenoreread", "L2", "leases", []string{"L2"},
		func(m *mutants) { m.noReread = true }},
	{"leasetokens", "L3", "leases", []string{"L2"},
		func(m *mutants) { m.region.LeaseTokensStay = true }},
	{"leaseattachfirst", "L3", "leases", []string{"L2"},
		func(m *mutants) { m.region.LeaseAttachFirst = true }},
	{"leaseregisterheld", "L4", "locks", []string{"PROGRESS"},
		func(m *mutants) { m.registerHeld = true }},
	{"leasenoextend", "L6", "deposed", []string{"L5"},
		func(m *mutants) { m.noExtend = true }},
	{"leasenoconfirm", "L6", "deposed", []string{"L5", "L6"},
		func(m *mutants) { m.noConfirm = true }},
	{"leaseanyterm", "L5", "deposed", []string{"L5"},
		func(m *mutants) { m.anyTerm = true }},
	{"leaserenewending", "L5", "leases", []string{"L5"},
		func(m *mutants) { m.renewEnding = true }},
	{"leaseanygrant", "L7", "leases", []string{"L5"},
		func(m *mutants) { m.anyGrant = true }},
}

func mutantByName(name string) (mutants, bool) {
	m := mutants{}
	m.pd.DecidedMax = 6 // so that schedules reach what is forgotten
	if name == "" {
		return m, true
	}
	for _, x := range Mutants {
		if x.Name == name {
			x.set(&m)
			return m, true
		}
	}
	return m, false
}
