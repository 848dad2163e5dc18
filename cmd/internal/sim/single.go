package sim

import (
	"errors"
	"slices"
	"time"

	"braid/pd"
	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
	"braid/region"
	"braid/region/regionpb"
)

// oracle is how a store knows the order: pd's stream, or in a single-group store its own log.
type oracle interface {
	ReadPointFunc(done func(pdpb.ReadPoint, error))
	ProposeFunc(e order.Event, done func(order.EventResult, error))
	Mark() pdpb.Mark
	WantMark(cut pdpb.Cut)
	StandsStillSince() (time.Duration, bool)
	Directory() *order.Directory
	Tick(now time.Duration)
}

var _ oracle = (*order.Client)(nil)

// singleGroup is the one group of a single-group store.
const singleGroup = raftid.FirstRegion

// orderGroup is the group whose log holds the cuts.
func (w *World) orderGroup() raftid.GroupID {
	if w.aim.oneGroup {
		return singleGroup
	}
	return raftid.PDGroup
}

// ownOracle is the oracle of a store in single-group mode: pd.Single, driven by the store's replica as
// the product's shell drives it.
type ownOracle struct {
	s    *store
	core *pd.Single
	// As of the newest command or load.
	directory *order.Directory
	newest    pdpb.Mark
	points    []ownPoint // wait until their index is applied
}

type ownPoint struct {
	index uint64
	done  func(pdpb.ReadPoint, error)
}

func (s *store) newOwnOracle() *ownOracle {
	o := &ownOracle{s: s}
	o.core = pd.NewSingle(pd.SingleConfig{
		Bootstrap: s.w.boot, Origin: uint64(s.id)<<32 + s.life, Mutants: s.w.mut.order,
		OnCut: func(index, term uint64, p *order.CutProposal, res *order.CutResult) {
			s.w.check.cutApplied(s, index, term, &pd.Entry{Cut: p}, pd.Result{Cut: res})
		},
		OnChange: func(m *pd.Machine) {
			if o.directory == nil || o.directory.Version != m.Version() {
				o.directory, s.dirNews = m.Directory(), true
			}
			o.newest = m.Core().Mark()
		},
	})
	return o
}

// ownMachine is pd.Single as the store's replica calls it.
type ownMachine struct{ o *ownOracle }

func (m ownMachine) ApplyMeta(index, term uint64, payload []byte) {
	m.o.core.ApplyMeta(index, term, payload)
}

// AppendState implements region.MetaMachine.
func (m ownMachine) AppendState(b []byte) []byte {
	if m.o.s.w.mut.noMeta {
		return b
	}
	return m.o.core.AppendState(b)
}

// LoadState implements region.MetaMachine.
func (m ownMachine) LoadState(state []byte, _ *region.Position) error { return m.o.core.Load(state) }

func (o *ownOracle) replica() *region.Replica {
	if g := o.s.groups[singleGroup]; g != nil {
		return g.replica
	}
	return nil
}

// ReadPointFunc is a ReadIndex.
func (o *ownOracle) ReadPointFunc(done func(pdpb.ReadPoint, error)) {
	if _, leads := o.replica().Leader(); leads && o.s.w.mut.noIndexQuorum {
		o.points = append(o.points, ownPoint{0, done})
		return
	}
	o.replica().ReadIndex(func(index uint64, err error) {
		if err != nil {
			done(pdpb.ReadPoint{}, err)
			return
		}
		o.points = append(o.points, ownPoint{index, done})
	})
}

// step answers whose index is applied.
func (o *ownOracle) step() {
	for _, p := range slices.Clone(o.points) {
		if at, ok := o.replica().PointAt(p.index); ok {
			o.points = o.points[:copy(o.points, o.points[1:])]
			p.done(at, nil)
		} else {
			return
		}
	}
}

// ProposeFunc puts an event into the log if this store leads.
func (o *ownOracle) ProposeFunc(e order.Event, done func(order.EventResult, error)) {
	payload, id := o.core.Command(e)
	o.replica().ProposeMeta(payload, func(err error) {
		res, ok := o.core.Take(id)
		switch {
		case err == nil && ok:
			done(res, res.Err())
		case err == nil:
			done(order.EventResult{}, regionpb.ErrorOf(regionpb.Unknown))
		default:
			done(order.EventResult{}, err)
		}
	})
}

// Mark is what is applied here.
func (o *ownOracle) Mark() pdpb.Mark {
	r := o.replica()
	if r == nil {
		return pdpb.Mark{Floor: order.NoFloor}
	}
	p := r.Applied()
	return pdpb.Mark{Cut: p.Cut, Rev: p.Revision, Floor: o.newest.Floor, Fence: o.newest.Fence}
}

// WantMark does nothing: what is applied is complete.
func (o *ownOracle) WantMark(pdpb.Cut) {}

// StandsStillSince says nothing: a store without a leader shows by its region.
func (o *ownOracle) StandsStillSince() (time.Duration, bool) { return 0, false }

// Directory is the machine's.
func (o *ownOracle) Directory() *order.Directory { return o.directory }

// Tick does nothing: the group's clock is the replica's.
func (o *ownOracle) Tick(time.Duration) {}

// startSingle starts the one replica, or makes it as the flags of the store describe it.
func (s *store) startSingle() error {
	s.own = s.newOwnOracle()
	s.oracle = s.own
	if data, ok := s.engine.Positions()[uint64(singleGroup)]; ok {
		pos, err := regionpb.DecodePosition(data)
		if err != nil {
			return err
		}
		return s.startRegion(pos, false)
	}
	return s.create(*s.w.region(0))
}

// create makes a replica that the store has not, flushed before it votes (D4).
func (s *store) create(d pdpb.Descriptor) error {
	log, pos := s.disk.Log(d.ID), region.InitialPosition(d, 1)
	if log.LastIndex() > 0 || log.Hard().Term > 0 {
		return s.startRegion(pos, true)
	}
	b := s.engine.NewBatch()
	if err := errors.Join(b.SetPosition(uint64(d.ID), pos.Append(nil)), b.Commit(), b.Close()); err != nil {
		return err
	}
	s.engine.Flush()
	return s.startRegion(pos, false)
}
