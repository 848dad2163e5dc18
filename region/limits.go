package region

// Limits bound what a replica holds. When a limit on waiting requests is reached, new ones are
// refused with TooManyRequests; when one on what is in flight is reached, requests wait in the
// queue.
type Limits struct {
	// QueueCountMax, QueueBytesMax bound requests that wait for evaluation.
	QueueCountMax int
	QueueBytesMax int
	// InflightEntriesMax, InflightBytesMax bound proposed entries that are not applied yet:
	// their encodings and the answers that wait for them.
	InflightEntriesMax int
	InflightBytesMax   int
	// EntryCommandsMax, EntryBytesMax bound one entry; a command that is larger alone gets an
	// entry of its own.
	EntryCommandsMax int
	EntryBytesMax    int
	// CommandBytesMax bounds what one command changes: a larger one is refused for good (TooLarge), since
	// its entry would fit into no message to a follower, and nothing after it would ever be committed.
	// Below the transport's 256 MiB by more than the rest of an entry.
	CommandBytesMax int
	// PipelineCommandsMin is how many commands must wait for a leader to propose an entry while an
	// earlier one is not committed. Fewer wait for that: the round under way is the batch window of
	// the next one, because what a round costs hardly depends on what it carries.
	PipelineCommandsMin int
	// TurnKeysMax bounds the keys that evaluation looks at in one call of Work, a kilobyte of value
	// counting as one more; a command that alone needs more is evaluated beside the group.
	TurnKeysMax int
	// TurnBytesMax is the size of an item that is applied beside the group.
	TurnBytesMax int
	// ProposalsMax bounds the entries proposed in one call of Work.
	ProposalsMax int
	// SealsMax bounds the seals of one entry.
	SealsMax int
	// SealDelayTicks is how long an idle leader waits before it proposes an entry that only
	// seals (B2).
	SealDelayTicks int
	// ApplyBytesMax is where a call of Work stops adding items to its batch. One item is never
	// divided.
	ApplyBytesMax int
	// WindowBytesMax bounds the payloads kept in memory of entries that wait for their item;
	// those beyond are read from the log again.
	WindowBytesMax int
	// ItemsMax bounds the items that wait for their entries; a further one is dropped, and pd's
	// client delivers it again when the replica asks (Wanted).
	ItemsMax int
	// LocksMax bounds the attempts over several regions that hold or wait for locks here, and their
	// requests; more are refused. For what ends locks there is more room (endsRoom).
	LocksMax int
	// LockTicksMax is how long a lock lasts whose coordinator does not prepare; LockWaitTicksMax how
	// long an attempt waits for one before it is refused.
	LockTicksMax     int
	LockWaitTicksMax int
	// AbortTicks is how long a prepared attempt waits for its decision before this region asks pd
	// for an abort, and between repetitions (T6); a new leader asks after a quarter of it.
	AbortTicks int
	// StandBackTicks is how long a command stands back for attempts that wait for locks and came after it.
	StandBackTicks int
	// PrepareBytesMax bounds one attempt's part here: a larger one is refused for good (TooLarge). It
	// is one entry, and it is in the position, which is written with every batch, until it is decided.
	// PreparedBytesMax bounds what is prepared at a time; more is refused, unless it is alone.
	PrepareBytesMax  int
	PreparedBytesMax int
	// ReadBytesMax, ReadKeysMax bound one reply to a read.
	ReadBytesMax int
	ReadKeysMax  int
}

// DefaultLimits is for production, TinyLimits makes every limit bite in tests.
var (
	DefaultLimits = Limits{
		QueueCountMax: 16 << 10, QueueBytesMax: 64 << 20,
		InflightEntriesMax: 1 << 10, InflightBytesMax: 64 << 20,
		EntryCommandsMax: 512, EntryBytesMax: 512 << 10, CommandBytesMax: 192 << 20,
		PipelineCommandsMin: 128, TurnKeysMax: 16 << 10, TurnBytesMax: 1 << 20, ProposalsMax: 8, SealsMax: 64, SealDelayTicks: 3,
		ApplyBytesMax: 4 << 20, WindowBytesMax: 32 << 20, ItemsMax: 64 << 10,
		LocksMax: 4096, LockTicksMax: 30, LockWaitTicksMax: 50, AbortTicks: 20, StandBackTicks: 3, PrepareBytesMax: 64 << 20, PreparedBytesMax: 64 << 20,
		ReadBytesMax: 4 << 20, ReadKeysMax: 100_000,
	}
	TinyLimits = Limits{
		QueueCountMax: 8, QueueBytesMax: 4 << 10,
		InflightEntriesMax: 3, InflightBytesMax: 4 << 10,
		EntryCommandsMax: 3, EntryBytesMax: 256, CommandBytesMax: 4 << 10,
		PipelineCommandsMin: 2, TurnKeysMax: 24, TurnBytesMax: 512, ProposalsMax: 1, SealsMax: 2, SealDelayTicks: 1,
		ApplyBytesMax: 128, WindowBytesMax: 256, ItemsMax: 4,
		LocksMax: 4, LockTicksMax: 8, LockWaitTicksMax: 20, AbortTicks: 6, StandBackTicks: 2, PrepareBytesMax: 4 << 10, PreparedBytesMax: 256,
		ReadBytesMax: 64, ReadKeysMax: 3,
	}
)

// withDefaults fills in zero fields.
func (l Limits) withDefaults() Limits {
	d := DefaultLimits
	for _, f := range [...]struct{ v, def *int }{
		{&l.QueueCountMax, &d.QueueCountMax}, {&l.QueueBytesMax, &d.QueueBytesMax},
		{&l.InflightEntriesMax, &d.InflightEntriesMax}, {&l.InflightBytesMax, &d.InflightBytesMax},
		{&l.EntryCommandsMax, &d.EntryCommandsMax}, {&l.EntryBytesMax, &d.EntryBytesMax}, {&l.CommandBytesMax, &d.CommandBytesMax},
		{&l.PipelineCommandsMin, &d.PipelineCommandsMin}, {&l.TurnKeysMax, &d.TurnKeysMax}, {&l.TurnBytesMax, &d.TurnBytesMax},
		{&l.ProposalsMax, &d.ProposalsMax}, {&l.SealsMax, &d.SealsMax}, {&l.SealDelayTicks, &d.SealDelayTicks},
		{&l.ApplyBytesMax, &d.ApplyBytesMax}, {&l.WindowBytesMax, &d.WindowBytesMax}, {&l.ItemsMax, &d.ItemsMax},
		{&l.LocksMax, &d.LocksMax}, {&l.LockTicksMax, &d.LockTicksMax}, {&l.LockWaitTicksMax, &d.LockWaitTicksMax},
		{&l.AbortTicks, &d.AbortTicks}, {&l.StandBackTicks, &d.StandBackTicks}, {&l.PrepareBytesMax, &d.PrepareBytesMax}, {&l.PreparedBytesMax, &d.PreparedBytesMax},
		{&l.ReadBytesMax, &d.ReadBytesMax}, {&l.ReadKeysMax, &d.ReadKeysMax},
	} {
		if *f.v == 0 {
			*f.v = *f.def
		}
	}
	return l
}
