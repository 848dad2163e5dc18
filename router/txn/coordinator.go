// Package txn coordinates one attempt of a transaction over several regions (architecture 7).
//
// Coordinator is pure: it is told what happened and says what to do next. It owns no goroutine,
// clock or connection, and does not evaluate: package router drives it with real calls, the
// simulator with packets that get lost. Rule names (T1, T2 ...) refer to docs/ordering.md.
//
// The life of an attempt:
//
//	lock      everywhere at once where nobody is in the way; else region after region, in the order
//	          of keys, waiting for whoever is (T5)
//	evaluate  at a read point taken once every lock is held: nobody can change what is locked, so
//	          what is read there is what the commit will find
//	prepare   everybody at once, those who are only read too (T2)
//	decided   by a cut of pd; the first participant that hears it tells (T3)
//
// There is no commit request and nothing to make durable here: a coordinator may vanish at any
// step. Before the prepares its locks run out; after them the participants are committed if all
// prepared, or have pd abort the attempt (T6).
package txn

import (
	"errors"
	"slices"

	"braid/mvcc"
	"braid/region/regionpb"
)

// Kind is what an Action asks for.
type Kind uint8

const (
	// Lock asks participant Part for its locks, without waiting for other attempts if the
	// coordinator is Eager; its end is told to Locked.
	Lock Kind = iota + 1
	// Evaluate takes a read point and evaluates there; its end is told to Evaluated.
	Evaluate
	// Prepare asks participant Part to prepare; its end is told to Prepared.
	Prepare
	// Release gives up the locks of participant Part. Nobody waits for it.
	Release
	// AskAbort asks pd to abort the attempt and how it was decided; its end is told to Asked.
	AskAbort
	// Done ends the attempt; Result says how.
	Done
)

// Action is something to do now.
type Action struct {
	Kind Kind
	Part int // Lock, Prepare, Release
}

// Outcome is how an attempt ended.
type Outcome uint8

const (
	// Open: it has not.
	Open Outcome = iota
	// Committed at Result.Rev.
	Committed
	// Nothing: it changes nothing, and what was read at the read point is the answer (C-7).
	Nothing
	// Retry: certainly not executed, now or later; a fresh attempt may fare better (T4).
	Retry
	// Failed: certainly not executed, and Result.Err is the answer.
	Failed
	// Unknown: it may have been executed, or may be later.
	Unknown
)

func (o Outcome) String() string {
	return [...]string{"open", "committed", "nothing", "retry", "failed", "unknown"}[o]
}

// Result is the end of an attempt.
type Result struct {
	Outcome Outcome
	Rev     mvcc.Revision // Committed
	Err     error         // what led to any other but Nothing; may be nil
}

type partState uint8

const (
	idle partState = iota
	locking
	unlocked // refused, or the answer is lost
	locked
	preparing
	unsure  // the prepare may have been done
	refused // certainly not prepared
)

// Coordinator is one attempt. Its owner calls it from one goroutine.
type Coordinator struct {
	parts  []partState
	ids    []regionpb.LockID
	eager  bool
	asked  bool
	result Result

	// SkipReaders is a test hook that drops T2: only participants with effects prepare.
	SkipReaders bool
	// Unordered is a test hook that drops the order of T5: an eager coordinator waits for others.
	Unordered bool
}

// New returns a coordinator of an attempt with n participants, at least one, in the order of their
// keys. An eager one takes all locks at the same time, which saves a round for each participant,
// and waits for no other attempt, because two of them could wait for each other; it ends with
// LockBusy where it would have to. An attempt that is not eager may follow it.
func New(n int, eager bool) *Coordinator {
	return &Coordinator{parts: make([]partState, n), ids: make([]regionpb.LockID, n), eager: eager}
}

// Eager says that locks are to be refused rather than waited for.
func (c *Coordinator) Eager() bool { return c.eager && !c.Unordered }

// Result is how the attempt ended.
func (c *Coordinator) Result() Result { return c.result }

// LockID is the grant of a participant that is locked.
func (c *Coordinator) LockID(part int) regionpb.LockID { return c.ids[part] }

// Start begins.
func (c *Coordinator) Start() []Action {
	if !c.eager {
		c.parts[0] = locking
		return []Action{{Lock, 0}}
	}
	out := make([]Action, len(c.parts))
	for i := range c.parts {
		c.parts[i] = locking
		out[i] = Action{Lock, i}
	}
	return out
}

// Locked is the end of a Lock.
func (c *Coordinator) Locked(part int, id regionpb.LockID, err error) []Action {
	if c.result.Outcome != Open || c.parts[part] != locking {
		return nil
	}
	switch {
	case err != nil && !c.eager:
		// Its answer may be all that was lost, so it is released too.
		return c.giveUp(c.notExecuted(err))
	case err != nil:
		c.parts[part] = unlocked
		if c.result.Err == nil || errors.Is(c.result.Err, regionpb.ErrorOf(regionpb.LockBusy)) {
			c.result.Err = err
		}
	default:
		c.parts[part], c.ids[part] = locked, id
	}
	if c.eager {
		// The others are waited for, as a request that overtakes its release would stay granted.
		if slices.Contains(c.parts, locking) {
			return nil
		}
		if c.result.Err != nil {
			return c.giveUp(c.notExecuted(c.result.Err))
		}
		return []Action{{Kind: Evaluate}}
	}
	if part+1 < len(c.parts) {
		c.parts[part+1] = locking
		return []Action{{Lock, part + 1}}
	}
	return []Action{{Kind: Evaluate}}
}

// Evaluated is the end of an Evaluate: writes says which participants have effects.
func (c *Coordinator) Evaluated(writes []bool, err error) []Action {
	if c.result.Outcome != Open {
		return nil
	}
	if err != nil {
		return c.giveUp(Result{Outcome: Failed, Err: err})
	}
	any := false
	for _, w := range writes {
		any = any || w
	}
	if !any {
		return c.giveUp(Result{Outcome: Nothing})
	}
	var out []Action
	for i := range c.parts {
		if c.SkipReaders && !writes[i] {
			c.parts[i] = refused
			continue
		}
		c.parts[i] = preparing
		out = append(out, Action{Prepare, i})
	}
	return out
}

// Prepared is the end of a Prepare: the commit's revision, or an error.
func (c *Coordinator) Prepared(part int, rev mvcc.Revision, err error) []Action {
	if c.result.Outcome != Open || c.parts[part] != preparing {
		return nil
	}
	var re *regionpb.Error
	switch {
	case err == nil:
		return c.end(Result{Outcome: Committed, Rev: rev})
	case errors.Is(err, regionpb.ErrorOf(regionpb.Aborted)):
		// Because this coordinator asked for it, maybe, and has a better reason than that.
		if c.final() {
			return c.end(c.notExecuted(c.result.Err))
		}
		return c.end(Result{Outcome: Retry, Err: err})
	case errors.As(err, &re) && re.NotExecuted(), errors.Is(err, ErrNotSent):
		// Without this participant there will never be a commit. Those that are prepared need not
		// wait until they ask for themselves.
		if !c.final() {
			c.result.Err = err
		}
		c.parts[part] = refused
		return c.ask()
	}
	c.parts[part] = unsure
	if c.result.Err == nil || !slices.Contains(c.parts, refused) {
		c.result.Err = err
	}
	for _, p := range c.parts {
		if p == preparing {
			return nil // somebody else may still tell
		}
	}
	return c.ask()
}

// final says whether a participant has refused for a reason that ends more than this attempt.
func (c *Coordinator) final() bool {
	return slices.Contains(c.parts, refused) && c.result.Err != nil && c.notExecuted(c.result.Err).Outcome == Failed
}

// ask has pd abort the attempt, and tell how it was decided if it is too late for that.
func (c *Coordinator) ask() []Action {
	if c.asked {
		return nil
	}
	c.asked = true
	return []Action{{Kind: AskAbort}}
}

// Asked is the end of an AskAbort: nil with the commit's revision, an Aborted error, or any other
// when pd could not tell.
func (c *Coordinator) Asked(rev mvcc.Revision, err error) []Action {
	if c.result.Outcome != Open {
		return nil
	}
	cause := c.result.Err
	switch {
	case err == nil:
		return c.end(Result{Outcome: Committed, Rev: rev})
	case errors.Is(err, regionpb.ErrorOf(regionpb.Aborted)):
		return c.end(c.notExecuted(cause))
	}
	for _, p := range c.parts {
		if p == refused && !c.SkipReaders {
			return c.end(c.notExecuted(cause))
		}
	}
	// Decided and forgotten, or pd cannot be reached: never "aborted" (rules, section 3).
	return c.end(Result{Outcome: Unknown, Err: cause})
}

// GiveUp ends the attempt because its time is up; what is locked and not prepared is released.
func (c *Coordinator) GiveUp(err error) []Action {
	if c.result.Outcome != Open {
		return nil
	}
	for _, p := range c.parts {
		if p >= preparing {
			return c.end(Result{Outcome: Unknown, Err: err})
		}
	}
	return c.giveUp(Result{Outcome: Failed, Err: err})
}

// notExecuted is the result of an error after which the attempt can never commit.
func (c *Coordinator) notExecuted(err error) Result {
	if errors.Is(err, regionpb.ErrorOf(regionpb.TooManyRequests)) || errors.Is(err, regionpb.ErrorOf(regionpb.TooLarge)) {
		return Result{Outcome: Failed, Err: err} // repeating would add to it, or end the same way
	}
	return Result{Outcome: Retry, Err: err}
}

// giveUp releases everything before anything was prepared.
func (c *Coordinator) giveUp(res Result) []Action {
	var out []Action
	for i, p := range c.parts {
		if p == locking || p == unlocked || p == locked {
			out = append(out, Action{Release, i})
		}
	}
	return append(out, c.end(res)...)
}

func (c *Coordinator) end(res Result) []Action {
	c.result = res
	return []Action{{Kind: Done}}
}

// ErrNotSent is wrapped by the error of a request that never left its node.
var ErrNotSent = errors.New("txn: request was not sent")
