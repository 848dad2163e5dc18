package region

import "braid/mvcc"

// recordID is a mvcc.RecordKey that can be compared.
type recordID struct {
	kind mvcc.RecordKind
	at   string
	id   int64
}

func idOf(k mvcc.RecordKey) recordID { return recordID{k.Kind, string(k.At), k.ID} }

// pendingRecord is a record that has been evaluated and not applied; an empty value says removed.
type pendingRecord struct {
	value []byte
	entry uint64 // raft index of the entry it is of; 0 while that entry is being built
}

// recordOverlay is the overlay's part for records of the system space. They have neither order nor
// revisions, so it is a map; the rest is as with keys.
type recordOverlay struct {
	pending map[recordID]pendingRecord
	log     []recordUndo // writes since the last commit
	fifo    []recordDone // committed ones, in log order
}

type recordUndo struct {
	id  recordID
	old pendingRecord
	had bool
}

type recordDone struct {
	id    recordID
	index uint64
}

// get returns a pending record; false when what is applied counts.
func (o *recordOverlay) get(k mvcc.RecordKey) ([]byte, bool) {
	if len(o.pending) == 0 {
		return nil, false
	}
	p, ok := o.pending[idOf(k)]
	return p.value, ok
}

func (o *recordOverlay) put(k mvcc.RecordKey, value []byte) {
	if o.pending == nil {
		o.pending = map[recordID]pendingRecord{}
	}
	id := idOf(k)
	old, had := o.pending[id]
	o.log = append(o.log, recordUndo{id, old, had})
	o.pending[id] = pendingRecord{value: value}
}

func (o *recordOverlay) rollback(mark int) {
	for i := len(o.log) - 1; i >= mark; i-- {
		if u := &o.log[i]; u.had {
			o.pending[u.id] = u.old
		} else {
			delete(o.pending, u.id)
		}
	}
	o.log = o.log[:mark]
}

func (o *recordOverlay) commit(index uint64) {
	for i := range o.log {
		id := o.log[i].id
		p := o.pending[id]
		p.entry = index
		o.pending[id] = p
		o.fifo = append(o.fifo, recordDone{id, index})
	}
	o.log = o.log[:0]
}

func (o *recordOverlay) prune(index uint64) {
	n := 0
	for ; n < len(o.fifo) && o.fifo[n].index <= index; n++ {
		if p, ok := o.pending[o.fifo[n].id]; ok && p.entry != 0 && p.entry <= index {
			delete(o.pending, o.fifo[n].id)
		}
	}
	o.fifo = append(o.fifo[:0], o.fifo[n:]...)
}

func (o *recordOverlay) reset() {
	clear(o.pending)
	o.log, o.fifo = o.log[:0], o.fifo[:0]
}
