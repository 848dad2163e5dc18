package main

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// tally is what a load says of itself: the key=value pairs of each of its steps, and the rest.
type tally struct {
	steps  map[string]map[string]string
	watch  map[string]string
	others []string // the lines that only trouble brings
}

// stepNames maps the beginnings of a load's lines to the names used here, one per step.
var stepNames = []struct{ prefix, name string }{
	{"create ", "create"},
	{"list consistent", "list"},
	{"read-your-writes", "read"},
	{"list limit=250", "pages"},
	{"list RV=0", "versions"},
	{"update with optimistic lock", "update"},
	{"conflict", "conflict"},
	{"1000 events", "events"},
	{"leaderelection (", "election"},
	{"informer caught up", "informer"},
	{"deletecollection", "delete"},
}

var (
	pair = regexp.MustCompile(`([A-Za-z-]+)=(-?[0-9]+)`)
	four = regexp.MustCompile(`(\d+)/(\d+)/(\d+)/(\d+) `)
	// logged is a line of the client library's own log.
	logged = regexp.MustCompile(`^[IWE]\d{4} `)
)

func parseTally(log string) tally {
	t := tally{steps: map[string]map[string]string{}}
lines:
	for line := range strings.Lines(log) {
		line = strings.TrimRight(line, "\n")
		if logged.MatchString(line) {
			continue
		}
		values := map[string]string{}
		for _, m := range pair.FindAllStringSubmatch(line, -1) {
			values[m[1]] = m[2]
		}
		for _, s := range stepNames {
			if strings.HasPrefix(line, s.prefix) {
				if m := four.FindStringSubmatch(line); m != nil {
					values["any"], values["exact"], values["fresh"], values["label"] = m[1], m[2], m[3], m[4]
				}
				t.steps[s.name] = values
				continue lines
			}
		}
		switch {
		case strings.HasPrefix(line, "watch: "):
			t.watch = values
		case strings.TrimSpace(line) != "":
			t.others = append(t.others, line)
		}
	}
	return t
}

// What a load does besides creating, updating once and deleting each of its n objects.
const (
	loadRereads    = 200 // updates, each followed by a consistent list
	loadIncrements = 320 // of one more object, by 16 writers
	loadPage       = 250
)

// closedByItself is in the line that a load prints when it closes its own watch while an event is on the
// way; what it had counted until then is judged.
const closedByItself = "http2: response body closed"

// judge compares what a load of n objects saw with what it did. With unanswered, requests may have
// failed (a node was killed under them): each of those was executed or not, and every count must be
// explained by one of the two and agree with the others.
func judge(log string, n int, unanswered bool) error {
	t := parseTally(log)
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	get := func(step, name string) int {
		values := t.steps[step]
		if step == "watch" {
			values = t.watch
		}
		v, err := strconv.Atoi(values[name])
		if err != nil {
			wrong("no %s in the line of %q", name, step)
			return -1
		}
		return v
	}
	is := func(step, name string, want int) {
		if got := get(step, name); got != want {
			wrong("%s: %s is %d, want %d", step, name, got, want)
		}
	}
	between := func(step, name string, least, most int) {
		if got := get(step, name); got < least || got > most {
			wrong("%s: %s is %d, want %d to %d", step, name, got, least, most)
		}
	}
	if !unanswered {
		for _, step := range []string{"create", "update", "events"} {
			is(step, "errs", 0)
		}
		for _, line := range t.others {
			if !strings.Contains(line, closedByItself) {
				wrong("it says: %s", line)
			}
		}
	}
	failedCreates, failedUpdates := get("create", "errs"), get("update", "errs")
	between("list", "items", n-failedCreates, n)
	items := get("list", "items")
	is("read", "stale", 0)
	is("pages", "items", items)
	is("pages", "pages", (items+loadPage-1)/loadPage)
	remaining := items - loadPage
	if remaining <= 0 {
		remaining = -1 // a list of one page says nothing of it
	}
	is("pages", "firstRemaining", remaining)
	for _, name := range []string{"any", "exact", "fresh"} {
		is("versions", name, items)
	}
	between("versions", "label", n/10-failedCreates, n/10)
	is("versions", "exact-too-new", 0)
	is("conflict", "value", loadIncrements)
	is("informer", "informer", items)
	is("delete", "left", 0)
	is("delete", "informer", 0)
	is("watch", "added", items+1)
	is("watch", "deleted", items+1)
	between("watch", "modified", n-failedUpdates+loadRereads+loadIncrements, n+loadRereads+loadIncrements)
	is("watch", "out-of-order", 0)
	if strings.Contains(log, "page rv changed") {
		wrong("pages of one list are of different revisions")
	}
	return errors.Join(errs...)
}

// reads counts consistent reads by what answered them: the watch cache, or the store after the cache
// did not become complete in time.
type reads struct{ cache, store int }

// parseReads sums apiserver_watch_cache_consistent_read_total over all resources.
func parseReads(metrics string) reads {
	var r reads
	for labels, value := range samples(metrics, "apiserver_watch_cache_consistent_read_total") {
		if strings.Contains(labels, `fallback="true"`) {
			r.store += value
		} else {
			r.cache += value
		}
	}
	return r
}

var kindLabels = regexp.MustCompile(`group="([^"]*)",resource="([^"]*)",status="([^"]*)"`)

// judgeCaches wants the cache of every kind of objects, configmaps among them, to have been found
// equal to the store, and none to differ. A comparison that could not be made is an error only when
// no later one could.
func judgeCaches(metrics string) error {
	equal, other := map[string]bool{}, map[string]string{}
	count := map[string]int{}
	for labels, n := range samples(metrics, "apiserver_storage_consistency_checks_total") {
		m := kindLabels.FindStringSubmatch(labels)
		if m == nil || n == 0 {
			continue
		}
		kind, status := strings.Trim(m[1]+"/"+m[2], "/"), m[3]
		count[status] += n
		if status == "success" {
			equal[kind] = true
		} else {
			other[kind] = status
		}
	}
	fmt.Printf("caches compared with the store: %d kinds of objects; equal %d times, different %d, not compared %d\n",
		len(equal), count["success"], count["failure"], count["error"])
	var errs []error
	for kind, status := range other {
		if status == "failure" || !equal[kind] {
			errs = append(errs, fmt.Errorf("the cache of %s: %s", kind, status))
		}
	}
	if !equal["configmaps"] {
		errs = append(errs, errors.New("the cache of configmaps was not compared"))
	}
	return errors.Join(errs...)
}

// samples yields the labels and the value of each sample of a counter.
func samples(metrics, name string) func(func(string, int) bool) {
	return func(yield func(string, int) bool) {
		for line := range strings.Lines(metrics) {
			rest, ok := strings.CutPrefix(line, name+"{")
			if !ok {
				continue
			}
			labels, text, ok := strings.Cut(rest, "} ")
			value, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if ok && err == nil && !yield(labels, int(value)) {
				return
			}
		}
	}
}
