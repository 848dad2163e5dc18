package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
)

// Keys is a key space: Space keys of Size bytes each, a prefix and a number in decimal digits, so
// that their order is the order of their numbers and a part of the space is a range of keys.
type Keys struct {
	Prefix string
	Size   int   // bytes of a key, prefix included
	Space  int64 // how many keys there are
	Step   int64 // between the numbers of neighbours; 0 is 1: few keys can cover a large space
	Dist   Dist
}

// Validate says what is wrong with the key space.
func (k *Keys) Validate() error {
	if k.Space < 1 {
		return errors.New("the key space needs at least one key")
	}
	if need := len(k.Prefix) + len(strconv.FormatInt((k.Space-1)*max(k.Step, 1), 10)); k.Size < need {
		return fmt.Errorf("keys of %d bytes are too short: prefix %q and the numbers of %d keys need %d", k.Size, k.Prefix, k.Space, need)
	}
	return nil
}

// Key is the key with a number in [0, Space].
func (k *Keys) Key(n int64) string {
	b := make([]byte, k.Size)
	copy(b, k.Prefix)
	n *= max(k.Step, 1)
	for i := k.Size - 1; i >= len(k.Prefix); i-- {
		b[i] = byte('0' + n%10)
		n /= 10
	}
	return string(b)
}

// Splits returns the keys that divide the space into regions of equal size.
func (k *Keys) Splits(regions int) []string {
	var splits []string
	for i := 1; i < regions; i++ {
		splits = append(splits, k.Key(k.Space*int64(i)/int64(regions)))
	}
	return splits
}

// Distributions of keys.
const (
	Uniform    = "uniform"    // each key as often as any other
	Sequential = "sequential" // one after the other, all clients together, then from the start
	Zipf       = "zipf"       // popularity falls with the rank; ranks are scattered over the space
	Hot        = "hot"        // a share of the requests goes to the first part of the space
)

// Dist says how keys are chosen.
type Dist struct {
	Kind     string
	Exponent float64 // Zipf: above 1
	Share    float64 // Hot: of the requests, 0 to 1
	Part     float64 // Hot: of the key space, 0 to 1
}

// ParseDist reads uniform, sequential, zipf[:EXPONENT] or hot[:SHARE:PART].
func ParseDist(s string) (Dist, error) {
	kind, rest, given := strings.Cut(s, ":")
	number := func(s string, above, to float64) (float64, error) {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || !(f > above && f <= to) {
			return 0, fmt.Errorf("%q is not a number above %g and up to %g", s, above, to)
		}
		return f, nil
	}
	d := Dist{Kind: kind}
	var err error
	switch kind {
	case Uniform, Sequential:
		if given {
			err = fmt.Errorf("%s takes no parameter", kind)
		}
	case Zipf:
		d.Exponent = 1.1
		if given {
			d.Exponent, err = number(rest, 1, 100)
		}
	case Hot:
		d.Share, d.Part = 0.9, 0.1
		if given {
			share, part, ok := strings.Cut(rest, ":")
			if !ok {
				err = errors.New("hot takes two parameters, hot:SHARE:PART")
				break
			}
			var err2 error
			d.Share, err = number(share, 0, 1)
			d.Part, err2 = number(part, 0, 1)
			err = errors.Join(err, err2)
		}
	default:
		err = fmt.Errorf("there is no distribution %q: uniform, sequential, zipf[:EXPONENT] or hot[:SHARE:PART]", kind)
	}
	return d, err
}

func (d Dist) String() string {
	switch d.Kind {
	case Zipf:
		return fmt.Sprintf("zipf:%g", d.Exponent)
	case Hot:
		return fmt.Sprintf("hot:%g:%g", d.Share, d.Part)
	}
	return d.Kind
}

// Chooser draws key numbers for one client. It is used by one goroutine.
type Chooser struct {
	keys *Keys
	rng  *rand.Rand
	zipf *rand.Zipf
	next *atomic.Int64 // Sequential: shared by all clients
}

// Chooser returns the chooser of a client; the same seed draws the same keys. Clients of one run
// share next.
func (k *Keys) Chooser(seed uint64, next *atomic.Int64) *Chooser {
	c := &Chooser{keys: k, rng: rand.New(rand.NewPCG(seed, 0x62656e6368)), next: next}
	if k.Dist.Kind == Zipf {
		c.zipf = rand.NewZipf(c.rng, k.Dist.Exponent, 1, uint64(k.Space-1))
	}
	return c
}

// Next draws the number of a key.
func (c *Chooser) Next() int64 {
	space := c.keys.Space
	switch c.keys.Dist.Kind {
	case Sequential:
		return (c.next.Add(1) - 1) % space
	case Zipf:
		return scatter(int64(c.zipf.Uint64()), space)
	case Hot:
		if hot := max(int64(float64(space)*c.keys.Dist.Part), 1); c.rng.Float64() < c.keys.Dist.Share {
			return c.rng.Int64N(hot)
		}
	}
	return c.rng.Int64N(space)
}

// scatter is a permutation of [0, space) that puts neighbours far from each other: without it all
// popular keys of a Zipf distribution would be in one region.
func scatter(n, space int64) int64 {
	step := space*618/1000 | 1 // near the golden section, where multiples spread best
	for gcd(step, space) != 1 {
		step += 2
	}
	// The product may pass 64 bits only for spaces above 2^31, which is not a key space to fill.
	return n % space * (step % space) % space
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
