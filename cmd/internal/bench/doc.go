// Package bench measures stores that speak etcd's v3 API: it sends loads through clientv3 and says
// what they took. It knows braid only where a comparison starts clusters (package compare below
// it); everything else works against any such store.
//
// What decides is pure: Keys names and draws keys, pace is the schedule, recorder and series sum up
// what was seen, Report says it. Run is the shell around them. It owns all goroutines of a run: one
// a client, one a watcher. Clients write their outcomes to the recorder; the goroutine that called
// Run keeps the time, tells the observer and sums up.
//
// Life of a run: connect, fill the key space if the load reads, start watchers, start clients, warm
// up, measure, tell the clients to stop, wait for the requests under way, report. An interrupted
// run goes the same way from where it is.
package bench
