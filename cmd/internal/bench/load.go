package bench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Load says what is sent, not how often or by how many.
type Load struct {
	Name      string // for the report
	Mix       []Share
	Keys      Keys
	ValueSize int   // bytes
	RangeKeys int64 // keys a range covers
	Page      int64 // keys a page of the kind list has at most
	TxnKeys   int   // puts of the kind txn
	TxnParts  int   // equal parts of the key space over which they are spread
	LeaseTTL  int64 // seconds
	// Watchers receive events while the requests are sent: watcher i watches part
	// i modulo WatchParts of the key space.
	Watchers   int
	WatchParts int
}

// Share is a kind of request and how often it is sent, relative to the others.
type Share struct {
	Kind   string
	Weight int
}

// Limits of a load; beyond them it measures the client.
const (
	valueSizeMax = 64 << 20
	watchersMax  = 100_000
	txnKeysMax   = 10_000
)

// Defaults fills in what was left zero.
func (l *Load) Defaults() {
	def := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&l.Keys.Space, 100_000)
	def(&l.RangeKeys, 1000)
	def(&l.Page, 500)
	def(&l.LeaseTTL, 60)
	if l.Keys.Size == 0 {
		l.Keys.Size = 16
	}
	if l.Keys.Dist.Kind == "" {
		l.Keys.Dist.Kind = Uniform
	}
	if l.ValueSize == 0 {
		l.ValueSize = 256
	}
	if l.TxnKeys == 0 {
		l.TxnKeys = 10
	}
	if l.TxnParts == 0 {
		l.TxnParts = 1
	}
	if l.WatchParts == 0 {
		l.WatchParts = 1
	}
	if l.Name == "" {
		l.Name = formatMix(l.Mix)
	}
}

// Validate says what is wrong with the load.
func (l *Load) Validate() error {
	errs := []error{l.Keys.Validate()}
	within := func(what string, v, least, most int64) {
		if v < least || v > most {
			errs = append(errs, fmt.Errorf("%s must be between %d and %d, not %d", what, least, most, v))
		}
	}
	within("the size of a value", int64(l.ValueSize), 1, valueSizeMax)
	within("the keys of a range", l.RangeKeys, 1, l.Keys.Space)
	within("the keys of a page", l.Page, 1, 1<<31)
	within("the keys of a transaction", int64(l.TxnKeys), 1, min(txnKeysMax, l.Keys.Space))
	within("the parts of a transaction", int64(l.TxnParts), 1, int64(l.TxnKeys))
	within("the number of watchers", int64(l.Watchers), 0, watchersMax)
	within("the parts that are watched", int64(l.WatchParts), 1, l.Keys.Space)
	within("the time to live of a lease", l.LeaseTTL, 1, 9_000_000_000)
	if l.Watchers > 0 && l.ValueSize < stampSize {
		errs = append(errs, fmt.Errorf("values need %d bytes when they are watched: they carry the time", stampSize))
	}
	if len(l.Mix) == 0 {
		errs = append(errs, errors.New("nothing is to be sent"))
	}
	for _, s := range l.Mix {
		if kindOf(s.Kind) == nil {
			errs = append(errs, fmt.Errorf("there is no request %q: %s", s.Kind, strings.Join(KindNames(), ", ")))
		}
		within("the weight of "+s.Kind, int64(s.Weight), 1, 1_000_000)
	}
	return errors.Join(errs...)
}

// ParseMix reads NAME=WEIGHT,..., for example put=1,get=9.
func ParseMix(s string) ([]Share, error) {
	var mix []Share
	for part := range strings.SplitSeq(s, ",") {
		name, weight, ok := strings.Cut(part, "=")
		n, err := strconv.Atoi(weight)
		if !ok || err != nil || n < 1 {
			return nil, fmt.Errorf("%q is not NAME=WEIGHT with a weight of at least 1", part)
		}
		if slices.ContainsFunc(mix, func(s Share) bool { return s.Kind == name }) {
			return nil, fmt.Errorf("%s is named twice", name)
		}
		mix = append(mix, Share{name, n})
	}
	return mix, nil
}

func formatMix(mix []Share) string {
	if len(mix) == 1 {
		return mix[0].Kind
	}
	parts := make([]string, len(mix))
	for i, s := range mix {
		parts[i] = fmt.Sprintf("%s=%d", s.Kind, s.Weight)
	}
	return strings.Join(parts, ",")
}

// wheel draws from a mix: n in [0, total) falls to the share that covers it.
type wheel struct {
	until []int // cumulative weights
}

func newWheel(mix []Share) wheel {
	var w wheel
	sum := 0
	for _, s := range mix {
		sum += s.Weight
		w.until = append(w.until, sum)
	}
	return w
}

func (w wheel) total() int { return w.until[len(w.until)-1] }

// at is the index of the share that covers n.
func (w wheel) at(n int) int {
	i, found := slices.BinarySearch(w.until, n)
	if found {
		i++
	}
	return i
}
