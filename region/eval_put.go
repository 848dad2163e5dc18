package region

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"braid/region/regionpb"
)

// checkPut refuses a put with a lease that does not exist and one that wants to keep a part of a
// key that does not exist.
func (e *evaluator) checkPut(r *pb.PutRequest) *regionpb.Error {
	if r.GetLease() != 0 {
		if fault := e.checkLease(r.GetLease()); fault != nil || e.err != nil {
			return fault
		}
	}
	if r.GetIgnoreValue() || r.GetIgnoreLease() {
		if _, ok := e.look(r.GetKey()); !ok {
			return regionpb.ErrorOf(regionpb.KeyNotFound)
		}
	}
	return nil
}

// put runs a put and fills in resp.
func (e *evaluator) put(r *pb.PutRequest, resp *pb.PutResponse) {
	read := e.look
	if r.GetPrevKv() || r.GetIgnoreValue() {
		read = e.get
	}
	prev, exists := read(r.GetKey())
	if e.stopped() {
		return
	}
	own := revision{num: &e.cmd.num}
	next := pending{mod: own, create: own, version: 1, lease: r.GetLease(), value: r.GetValue()}
	effect := regionpb.Effect{Key: r.GetKey(), CreateKind: regionpb.CreateNew}
	if exists {
		next.version, next.create = prev.version+1, prev.create
		effect.CreateKind = regionpb.CreateResolve
		if create, ok := prev.create.value(); ok {
			effect.CreateKind, effect.Create = regionpb.CreateKnown, create
		}
	}
	if r.GetIgnoreValue() {
		next.value = prev.value
	}
	if r.GetIgnoreLease() {
		next.lease = prev.lease // it is attached already, whatever is known of the lease here
	}
	effect.Version, effect.Value, effect.Lease = next.version, next.value, next.lease
	if exists && prev.lease != next.lease {
		effect.Detach = prev.lease
	}
	if r.GetPrevKv() && exists {
		resp.PrevKv = e.kv(r.GetKey(), &prev)
	}
	e.write(effect, next)
	e.stamp(&resp.Header.Revision)
}

// write makes an effect of the command visible to what is evaluated after it.
func (e *evaluator) write(f regionpb.Effect, p pending) {
	e.cmd.effects = append(e.cmd.effects, f)
	e.cmd.bytes += f.Size()
	e.ov.put(f.Key, p)
}
