package pd

import (
	"slices"

	"braid/pd/order"
	"braid/pd/pdpb"
	"braid/raftstore/raftid"
)

// Sender carries frames to the order.Client of another store, in order. It must not block; false
// says that the frame was dropped (queue full, store unknown or down). A dropped frame is a hole
// in the numbers that the store notices, so nothing is repeated here.
type Sender interface {
	SendFrame(to raftid.StoreID, frame []byte) bool
}

// dropsMax is how many frames in a row may be dropped before a stream is forgotten. Its store
// hears nothing then, and subscribes anew, here or elsewhere (S5).
const dropsMax = 16

// feed keeps the streams of a pd member. A cut costs the streams of the regions that moved and
// nothing else: there is a list of subscribers for each region, and streams that have nothing to
// say are not visited. It is owned by the replica's owner. Bounded by one stream per store and one
// subscription per region and stream.
type feed struct {
	self     raftid.StoreID
	life     uint64
	streams  map[raftid.StoreID]*stream
	byRegion map[pdpb.RegionID][]*stream
	touched  []*stream
	wanting  []*stream // asked for a mark that is not applied here yet
	buf      []byte
}

// stream is what one store is told.
type stream struct {
	store   raftid.StoreID
	session uint64
	seq     uint64
	subs    map[pdpb.RegionID]struct{}
	acks    []order.Ack
	items   []pdpb.Item
	touched bool
	sent    pdpb.Cut // the newest mark sent
	want    pdpb.Cut // a mark at or above it was asked for (S4)
	waiting bool     // in feed.wanting
	drops   int
}

func newFeed(self raftid.StoreID, life uint64) *feed {
	return &feed{self: self, life: life, streams: map[raftid.StoreID]*stream{}, byRegion: map[pdpb.RegionID][]*stream{}}
}

func (f *feed) touch(s *stream) {
	if !s.touched {
		s.touched = true
		f.touched = append(f.touched, s)
	}
}

func (f *feed) wait(s *stream) {
	if !s.waiting {
		s.waiting = true
		f.wanting = append(f.wanting, s)
	}
}

// subscribe changes a stream. What it acknowledges is the state of core, which is the state of
// the frame that carries the acknowledgement or an earlier one whose later items are in the frame.
func (f *feed) subscribe(core *order.Core, from raftid.StoreID, req *order.Subscribe) {
	s := f.streams[from]
	if s != nil && req.Session < s.session {
		return // late
	}
	if req.Close {
		if s != nil && s.session == req.Session {
			f.drop(s)
		}
		return
	}
	if s == nil || req.Session > s.session {
		if s != nil {
			f.drop(s)
		}
		s = &stream{store: from, session: req.Session, subs: map[pdpb.RegionID]struct{}{}}
		f.streams[from] = s
	}
	for _, id := range req.Remove {
		f.remove(s, id)
	}
	for _, a := range req.Add {
		f.ack(core, s, a.Region, a.Have)
	}
	f.touch(s)
}

// ack subscribes a region, or acknowledges it once more. A region that pd does not know is not
// acknowledged: the store asks again.
func (f *feed) ack(core *order.Core, s *stream, id pdpb.RegionID, have uint64) {
	pos, ok := core.Position(id)
	if !ok {
		return
	}
	if _, ok := s.subs[id]; !ok {
		s.subs[id] = struct{}{}
		f.byRegion[id] = append(f.byRegion[id], s)
	}
	s.acks = append(s.acks, order.Ack{Region: id, Newest: pos.Newest, Upto: pos.Upto})
	s.items = core.AppendItems(s.items, id, have)
}

func (f *feed) remove(s *stream, id pdpb.RegionID) {
	if _, ok := s.subs[id]; !ok {
		return
	}
	delete(s.subs, id)
	list := f.byRegion[id]
	if i := slices.Index(list, s); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	if len(list) == 0 {
		delete(f.byRegion, id)
	} else {
		f.byRegion[id] = list
	}
}

func (f *feed) drop(s *stream) {
	for id := range s.subs {
		f.remove(s, id)
	}
	delete(f.streams, s.store)
	if i := slices.Index(f.touched, s); i >= 0 {
		f.touched = slices.Delete(f.touched, i, i+1)
	}
}

// cut hands a cut's items to the streams of their regions.
func (f *feed) cut(res *order.CutResult) {
	for i := range res.Items {
		for _, s := range f.byRegion[res.Items[i].Region] {
			s.items = append(s.items, res.Items[i])
			f.touch(s)
		}
	}
	for _, s := range f.wanting {
		s.waiting = false
		if f.streams[s.store] == s {
			f.touch(s)
		}
	}
	f.wanting = f.wanting[:0]
	// In process a mark costs a function call, and saves a reader on this store from asking.
	if s := f.streams[f.self]; s != nil {
		f.touch(s)
	}
}

// wantMark takes a reader's request for a mark at or above cut. A mark that was sent before is
// sent once more: should its frame have been lost, the next one shows it.
func (f *feed) wantMark(now pdpb.Cut, from raftid.StoreID, session uint64, cut pdpb.Cut) {
	s := f.streams[from]
	if s == nil || s.session != session {
		return
	}
	if s.want = max(s.want, cut); cut <= now {
		f.touch(s)
	} else {
		f.wait(s)
	}
}

// jumped tells that the state was replaced by a snapshot: items may have been skipped, so every
// subscription is acknowledged anew, with all that is retained.
func (f *feed) jumped(core *order.Core) {
	for _, s := range f.streams {
		s.acks, s.items = nil, nil
		for id := range s.subs {
			f.ack(core, s, id, 0)
		}
		slices.SortFunc(s.acks, func(a, b order.Ack) int { return int(int64(a.Region - b.Region)) })
		slices.SortFunc(s.items, func(a, b pdpb.Item) int {
			if a.Region != b.Region {
				return int(int64(a.Region - b.Region))
			}
			return int(int64(a.N - b.N))
		})
		f.touch(s)
	}
	f.sortTouched()
}

// all makes every stream say something: the idle mark (S4), or news about the leader.
func (f *feed) all() {
	for _, s := range f.streams {
		f.touch(s)
	}
	f.sortTouched()
}

// sortTouched makes the order of frames independent of the order in which a map gives its keys, so
// that simulations repeat.
func (f *feed) sortTouched() {
	slices.SortFunc(f.touched, func(a, b *stream) int { return int(int64(a.store - b.store)) })
}

// flush sends one frame to each touched stream.
func (f *feed) flush(mark pdpb.Mark, role order.Role, dir uint64, local func(*order.Frame), remote Sender) {
	touched := f.touched
	f.touched = nil
	for _, s := range touched {
		s.touched = false
		s.seq++
		fr := &order.Frame{Session: s.session, Seq: s.seq, Life: f.life, Role: role, Dir: dir, Acks: s.acks, Items: s.items, Mark: mark}
		s.acks, s.items = nil, nil
		s.sent = mark.Cut
		if s.store == f.self {
			if local != nil {
				local(fr)
			}
		} else {
			f.buf = fr.Append(f.buf[:0])
			if remote != nil && remote.SendFrame(s.store, append([]byte(nil), f.buf...)) {
				s.drops = 0
			} else if s.drops++; s.drops >= dropsMax {
				f.drop(s)
			}
		}
		if s.want > mark.Cut && f.streams[s.store] == s {
			f.wait(s)
		}
	}
}
