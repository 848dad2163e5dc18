package sim

// aim biases a schedule. Rules that random schedules seldom touch have one of their own. Numbers
// of faults are chances of 10,000 steps, those of work are of 1,000.
type aim struct {
	crash, partition, transfer, stopClock int
	fence, compact                        int
	restart                               int // of 1,000 steps of a store that is down

	ops, reads int // of 1,000 steps
	locals     int // one in so many steps has a serializable read
	txns       int // of 1,000 steps
	burst      int // clients that come at once, at most
	hot        int // of 100 requests, for two keys
	tick       int // one in so many steps is a tick of a store
	logFlush   int // of 1,000 steps
	flush      int // of the engine, of 1,000 steps
	reconcile  int // one in so many steps with news from the directory is heard

	loss, late int  // one packet in so many is lost, overtaken
	remote     bool // stores follow the members of other stores instead of their own
	hole       int  // one in so many cuts that forget is followed by a hole in a stream
	deaf       int  // one in so many cuts with items is heard by one store only, for some frames
	raftLoss   int  // one in so many messages of regions' groups is lost
	installs   int  // one in so many installations is followed by a crash
	pd         int  // of 100 faults, against pd's leader
	wait       int  // one in so many stale stores reads while it is cut off
	checkpoint uint64
	oneGroup   bool // single-group mode
	single     bool // one store, where one sync covers an entry and its cut (A1)
	watches    int  // of 1,000 steps
	leases     int  // of 1,000 steps
	anew       int  // of 100 leases whose time is up and that a client ends at the same moment, to grant them anew
	leave      int  // one in so many clients of leases that are not renewed goes to another store
	depose     int  // leaders that are deposed and do not know
	// lag is for how many steps a watch may stay with a store that lags (W2), 0 for any: until the store
	// knows that it hears of no leader, and its gateway has waited for three election timeouts more.
	lag    int
	window int // bytes of events that a store keeps for its watches
	// quiet is how many steps at the end have no faults, so that whatever is asked for then must end
	// soon (see progress.go), and wide of 100 transactions lock all keys of their regions. patience is
	// how much longer locks last than elsewhere: so long that nothing is saved by their end.
	quiet, wide, patience int
	rush                  bool // but commands stand back for less than it takes to order one
	regions               int  // 0: as many as elsewhere
	live                  int  // transactions over regions at a time
	writes                int  // of 100 keys of a transaction over regions; the others are only read
}

var plain = aim{
	crash: 20, partition: 20, transfer: 40, stopClock: 10, fence: 15, compact: 15, restart: 25, live: 5, writes: 50,
	ops: 220, reads: 60, locals: 12, txns: 40, burst: 3, hot: 20, tick: 4, logFlush: 400, flush: 30, reconcile: 3,
	loss: 80, late: 25, hole: 40, installs: 12, pd: 25, wait: 3, checkpoint: 40, watches: 40, leases: 30, anew: 5, leave: 15, window: 16 << 10,
}

func vary(f func(*aim)) aim {
	a := plain
	f(&a)
	return a
}

// aimNames are the aims in the order in which seeds use them.
var aimNames = []string{"", "partition", "oracle", "snapshot", "crash", "stream", "forget", "bootstrap", "fence", "transfer", "hot", "txns", "fencedtxns", "watch", "snaptxns", "one", "leases", "deposed", "cutoff", "onegroup", "snapreads", "locks", "wide", "rush"}

var aims = map[string]aim{
	"": plain,
	// Long partitions and many elections: deposed leaders that do not know.
	"partition": vary(func(a *aim) { a.partition, a.transfer, a.stopClock, a.crash, a.reads = 100, 60, 40, 10, 120 }),
	// The same around pd's leader, with reads under way.
	"oracle": vary(func(a *aim) {
		a.partition, a.transfer, a.stopClock, a.crash, a.reads, a.pd, a.wait = 90, 60, 60, 20, 300, 80, 1
	}),
	// Logs that are cut short, snapshots, crashes around their installation.
	"snapshot": vary(func(a *aim) {
		a.flush, a.crash, a.partition, a.installs, a.checkpoint, a.compact = 120, 50, 60, 2, 8, 40
	}),
	// The same, with compactions and many who read old revisions in between.
	"snapreads": vary(func(a *aim) {
		a.flush, a.crash, a.partition, a.installs, a.checkpoint, a.compact, a.locals = 120, 30, 80, 20, 8, 80, 2
	}),
	// State that is seldom flushed and stores that crash often.
	"crash": vary(func(a *aim) { a.flush, a.crash, a.logFlush, a.restart = 6, 90, 200, 60 }),
	// Streams that lose frames, above all after items were forgotten: resubscriptions.
	"stream": vary(func(a *aim) { a.remote, a.loss, a.late, a.hole, a.reads, a.crash = true, 25, 10, 2, 250, 30 }),
	// Items that one leader has, seals and reports, and then dies with.
	"forget": vary(func(a *aim) {
		a.remote, a.deaf, a.raftLoss, a.crash, a.transfer, a.partition, a.restart = true, 3, 3, 60, 80, 60, 60
	}),
	// Replicas that hear of their region from its leader before they hear of it from pd.
	"bootstrap": vary(func(a *aim) { a.reconcile, a.crash, a.late = 300, 60, 10 }),
	// Fences and compactions under load.
	"fence": vary(func(a *aim) { a.fence, a.compact, a.ops, a.burst = 250, 120, 300, 4 }),
	// Leaders that move under load, with much in flight.
	"transfer": vary(func(a *aim) { a.transfer, a.ops, a.burst, a.hot, a.pd, a.logFlush = 250, 400, 6, 60, 5, 250 }),
	// Many transactions over several regions for few keys, leaders that move and fences.
	"txns": vary(func(a *aim) { a.txns, a.ops, a.hot, a.transfer, a.fence, a.crash = 200, 250, 70, 90, 40, 30 }),
	// Transactions over several regions, few keys and many fences.
	"fencedtxns": vary(func(a *aim) { a.txns, a.ops, a.burst, a.hot, a.fence = 250, 350, 5, 75, 250 }),
	// Snapshots among transactions over several regions: items that only decide.
	"snaptxns": vary(func(a *aim) {
		a.flush, a.crash, a.partition, a.installs, a.checkpoint = 120, 50, 60, 4, 8
		a.txns, a.ops, a.hot, a.window = 250, 120, 60, 4<<10
	}),
	// One store, which crashes with what its disk had queued in any state of being written.
	"one": vary(func(a *aim) {
		a.single, a.crash, a.flush, a.logFlush, a.restart, a.txns = true, 60, 12, 200, 80, 80
	}),
	// Many watches that come, go and move, compactions and snapshots under them, little memory.
	"watch": vary(func(a *aim) {
		a.watches, a.window, a.compact, a.flush, a.crash, a.installs, a.loss = 200, 4<<10, 60, 90, 40, 8, 40
	}),
	// Stores that are cut off for long, with watches at them, and little else.
	"cutoff": vary(func(a *aim) {
		a.watches, a.partition, a.crash, a.stopClock, a.transfer, a.pd, a.loss, a.ops, a.lag = 40, 10, 1, 0, 10, 0, 200, 120, 500
	}),
	// Leases whose time is kept by leaders that come and go.
	"leases": vary(func(a *aim) {
		a.leases, a.transfer, a.partition, a.stopClock, a.crash, a.ops, a.txns = 150, 80, 60, 0, 30, 250, 60
		a.anew = 20
	}),
	// The same, and leaders that are deposed while they are cut off and their clocks stand still: they
	// do not hear of it, and their clients go on to talk to them.
	"deposed": vary(func(a *aim) {
		a.leases, a.leave, a.depose, a.partition, a.stopClock, a.crash, a.transfer, a.ops, a.txns = 250, 30, 60, 0, 0, 5, 0, 150, 20
		a.anew = 3
	}),
	// Transactions and ends of leases that are in each other's way, and in the end no faults that would
	// excuse one that does not get on.
	"locks": vary(func(a *aim) {
		a.quiet, a.wide, a.patience, a.live = 2600, 10, 20, 4
		a.txns, a.hot, a.ops, a.leases, a.watches, a.reads = 200, 60, 100, 150, 5, 20
	}),
	// Many small transactions that seldom meet, and now and then one that meets them all.
	"wide": vary(func(a *aim) {
		a.quiet, a.wide, a.patience, a.regions, a.live, a.writes = 2600, 2, 20, 2, 16, 10
		a.txns, a.hot, a.ops, a.leases, a.watches, a.reads = 600, 0, 30, 0, 5, 20
	}),
	// Few transactions among many commands for the same keys, which soon stand back no longer.
	"rush": vary(func(a *aim) {
		a.quiet, a.patience, a.regions, a.live, a.rush = 2600, 20, 2, 3, true
		a.txns, a.hot, a.ops, a.burst, a.leases, a.watches, a.reads = 60, 60, 300, 3, 0, 5, 20
	}),
	// The store in single-group mode: one log for everything, and what happens to its leader.
	"onegroup": vary(func(a *aim) {
		a.oneGroup, a.pd, a.txns, a.fence, a.compact, a.flush, a.crash, a.partition, a.reads, a.wait = true, 0, 0, 40, 40, 60, 40, 60, 150, 1
	}),
	// Many requests for few keys: pipelined entries, compares that wait (E4).
	"hot": vary(func(a *aim) { a.ops, a.burst, a.hot, a.logFlush = 400, 6, 85, 250 }),
}
