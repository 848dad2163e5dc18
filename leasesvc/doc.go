// Package leasesvc keeps the time of leases: it ends those whose time is up, renews those whose
// owners are alive, and records what long ones have left.
//
// What a lease is, and which keys it has, is in the regions (package region); this package only has
// timers. They run on the node that leads the region with the lease's record, and on no other. Core
// is the part that decides, and is pure; Service gives it the time, tells it what the replicas here
// apply and lead, carries out what it says, and passes renewals on to the node whose timers they
// concern, in batches.
//
// The life of a lease's timer: the record's region begins to lead a term here (Lead), its records
// are read (Loaded) while changes arrive (Changed); renewals move the deadline; at the deadline the
// lease is revoked by a command that only the leader of this term may execute (L5), and is gone when
// that is applied; when the term ends (End), the next leader begins anew, with more time, never
// with less.
//
// Service owns its goroutines and the core, which is under its mutex; Close ends and awaits them.
package leasesvc
