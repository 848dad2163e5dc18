package region

import (
	"slices"

	"braid/pd/pdpb"
)

// startReport makes an empty report from the applied position; extend adds what is committed.
func (in *Intake) startReport() {
	in.rep = pdpb.Report{
		Region: in.desc.ID, Incarnation: in.desc.Incarnation,
		From: in.upto, Upto: in.upto, UptoTerm: in.uptoTerm, Cum: in.cum, Sealed: in.sealed,
	}
	in.scanned = in.index
}

// extend adds the entries up to what may be reported.
func (in *Intake) extend() {
	to := in.committed
	if in.shared {
		to = in.Last()
	}
	for in.scanned < min(to, in.Last()) {
		e := in.at(in.scanned + 1)
		in.scanned++
		if e.sealMax > in.rep.Sealed {
			in.rep.Sealed = e.sealMax
		}
		if e.silent {
			continue
		}
		in.rep.Upto, in.rep.UptoTerm, in.rep.Cum = e.index, e.term, in.rep.Cum+e.count
		// A void entry consumes nothing, so it may join any run; its own stamp could be out of
		// order.
		if n := len(in.rep.Runs); n > 0 && (in.rep.Runs[n-1].Stamp == e.fence || e.void || e.meta) {
			in.rep.Runs[n-1].Index, in.rep.Runs[n-1].Cum = e.index, in.rep.Cum
		} else {
			in.rep.Runs = append(in.rep.Runs, pdpb.Run{Index: e.index, Stamp: e.fence, Cum: in.rep.Cum})
		}
		in.rep.Facts = append(in.rep.Facts, e.facts...)
	}
}

// Report states what is committed (P1, P2): it covers (up-to of the last applied item, last
// committed entry that is not silent]. changed tells whether it says more than the last one.
func (in *Intake) Report() (rep pdpb.Report, changed bool) {
	if in.scanned < in.index {
		// Entries were applied before they were ever reported, their items came first.
		in.startReport()
	}
	in.extend()
	in.rep.From = in.upto
	for len(in.rep.Runs) > 0 && in.rep.Runs[0].Index <= in.upto {
		in.rep.Runs = in.rep.Runs[1:]
	}
	for len(in.rep.Facts) > 0 && in.rep.Facts[0].Index <= in.upto {
		in.rep.Facts = in.rep.Facts[1:]
	}
	rep = in.rep
	rep.Runs, rep.Facts = slices.Clone(in.rep.Runs), slices.Clone(in.rep.Facts)
	if in.mut.FromIdx {
		rep.From = in.index
	}
	if in.mut.SealUncommitted {
		rep.Sealed = max(rep.Sealed, in.SealedInLog())
	}
	key := reportKey{rep.Upto, rep.UptoTerm, rep.Sealed}
	changed = key != in.last
	in.last = key
	return rep, changed
}
