package bench

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

func TestKeysAreInOrderAndOfTheirSize(t *testing.T) {
	k := Keys{Prefix: "b/", Size: 16, Space: 1000}
	if err := k.Validate(); err != nil {
		t.Fatal(err)
	}
	last := ""
	for n := range k.Space {
		key := k.Key(n)
		if len(key) != 16 || !strings.HasPrefix(key, "b/") || key <= last {
			t.Fatalf("key %d is %q after %q", n, key, last)
		}
		last = key
	}
	if got, want := k.Splits(4), []string{k.Key(250), k.Key(500), k.Key(750)}; !slices.Equal(got, want) {
		t.Errorf("splits %q, want %q", got, want)
	}
	if k.Splits(1) != nil {
		t.Error("one region needs no split")
	}
	short := Keys{Prefix: "b/", Size: 4, Space: 1000}
	if short.Validate() == nil {
		t.Error("three digits and two letters do not fit into four bytes")
	}
}

func TestParseDist(t *testing.T) {
	for s, want := range map[string]string{
		"uniform": "uniform", "sequential": "sequential", "zipf": "zipf:1.1", "zipf:1.5": "zipf:1.5",
		"hot": "hot:0.9:0.1", "hot:0.5:0.01": "hot:0.5:0.01",
	} {
		if d, err := ParseDist(s); err != nil || d.String() != want {
			t.Errorf("%s: %v, %v", s, d, err)
		}
	}
	for _, s := range []string{"", "gauss", "uniform:1", "zipf:1", "zipf:x", "hot:1", "hot:0:1", "hot:2:0.5"} {
		if d, err := ParseDist(s); err == nil {
			t.Errorf("%s gives %v", s, d)
		}
	}
}

// draw counts what a distribution gives.
func draw(t *testing.T, dist string, space int64, n int) []int {
	t.Helper()
	d, err := ParseDist(dist)
	if err != nil {
		t.Fatal(err)
	}
	k := Keys{Size: 8, Space: space, Dist: d}
	var next atomic.Int64
	c := k.Chooser(1, &next)
	counts := make([]int, space)
	for range n {
		counts[c.Next()]++
	}
	return counts
}

func TestDistributions(t *testing.T) {
	const n = 100_000
	uniform := draw(t, "uniform", 10, n)
	if least, most := slices.Min(uniform), slices.Max(uniform); least < n/10*9/10 || most > n/10*11/10 {
		t.Errorf("uniform: %d", uniform)
	}
	sequential := draw(t, "sequential", 10, n)
	if slices.Min(sequential) != n/10 || slices.Max(sequential) != n/10 {
		t.Errorf("sequential: %d", sequential)
	}
	hot := draw(t, "hot:0.8:0.1", 100, n)
	first := 0
	for _, c := range hot[:10] {
		first += c
	}
	// The cold rest falls on the whole space, the hot part included.
	if want := n * 82 / 100; first < want*97/100 || first > want*103/100 {
		t.Errorf("hot: %d of %d in the first tenth, want about %d", first, n, want)
	}
	zipf := draw(t, "zipf:1.2", 1000, n)
	sorted := slices.Sorted(slices.Values(zipf))
	if top := sorted[999]; top < n/10 || top < 10*sorted[900] {
		t.Errorf("zipf: the most popular key has %d, the hundredth %d", top, sorted[900])
	}
	// The ten most popular keys must not be neighbours.
	var popular []int
	for i, c := range zipf {
		if c >= sorted[990] {
			popular = append(popular, i*8/1000)
		}
	}
	if regions := len(slices.Compact(popular)); regions < 4 {
		t.Errorf("the ten most popular keys are in %d of 8 parts", regions)
	}
}

func TestScatterIsAPermutation(t *testing.T) {
	for _, space := range []int64{1, 2, 3, 10, 16, 997, 1000, 65536} {
		seen := make([]bool, space)
		for n := range space {
			s := scatter(n, space)
			if s < 0 || s >= space || seen[s] {
				t.Fatalf("space %d: %d goes to %d", space, n, s)
			}
			seen[s] = true
		}
	}
}

func TestSameSeedSameKeys(t *testing.T) {
	k := Keys{Size: 8, Space: 1 << 20, Dist: Dist{Kind: Uniform}}
	a, b, c := k.Chooser(7, nil), k.Chooser(7, nil), k.Chooser(8, nil)
	differ := false
	for range 20 {
		x, y, z := a.Next(), b.Next(), c.Next()
		if x != y {
			t.Fatal("the same seed draws other keys")
		}
		differ = differ || x != z
	}
	if !differ {
		t.Error("two clients draw the same keys")
	}
}
