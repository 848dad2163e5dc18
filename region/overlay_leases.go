package region

// leaseOverlay is the overlay's part that finds the keys of a lease: every attachment that an entry
// in flight makes, also those that a later pending version takes back. Until such an entry is applied,
// applied state will still come to show what only it says; who reads there must wait for it.
//
// An attachment stands in byLease, under its lease in the order of making, from put until prune.
type leaseOverlay struct {
	byLease map[int64][][]byte
	log     []int64     // leases of attachments since the last commit
	fifo    []leaseDone // of committed ones, in log order
}

type leaseDone struct {
	lease int64
	index uint64
}

// put notes that a pending version attaches a key.
func (o *leaseOverlay) put(lease int64, key []byte) {
	if o.byLease == nil {
		o.byLease = map[int64][][]byte{}
	}
	o.byLease[lease] = append(o.byLease[lease], key)
	o.log = append(o.log, lease)
}

// pending says whether an entry in flight attaches a key to a lease.
func (o *leaseOverlay) pending(lease int64) bool { return len(o.byLease[lease]) > 0 }

func (o *leaseOverlay) rollback(mark int) {
	for i := len(o.log) - 1; i >= mark; i-- {
		list := o.byLease[o.log[i]]
		o.set(o.log[i], list[:len(list)-1])
	}
	o.log = o.log[:mark]
}

func (o *leaseOverlay) commit(index uint64) {
	for _, lease := range o.log {
		o.fifo = append(o.fifo, leaseDone{lease, index})
	}
	o.log = o.log[:0]
}

func (o *leaseOverlay) prune(index uint64) {
	n := 0
	for ; n < len(o.fifo) && o.fifo[n].index <= index; n++ {
		lease := o.fifo[n].lease
		o.set(lease, o.byLease[lease][1:])
	}
	if n > 0 {
		o.fifo = o.fifo[:copy(o.fifo, o.fifo[n:])]
	}
}

func (o *leaseOverlay) set(lease int64, list [][]byte) {
	if len(list) == 0 {
		delete(o.byLease, lease)
	} else {
		o.byLease[lease] = list
	}
}

func (o *leaseOverlay) reset() {
	clear(o.byLease)
	o.log, o.fifo = o.log[:0], o.fifo[:0]
}
