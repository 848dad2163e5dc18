package bench

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// wellFormed reads a picture to its end.
func wellFormed(t *testing.T, picture string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(picture))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, picture)
		}
	}
}

func TestPlot(t *testing.T) {
	full := &Report{Load: "a <load> & more", Series: []Point{{0, 1, 100, 1, 5, 0}, {1, 2, 200, 2, 9, 0}},
		Kinds: []KindReport{{Kind: "put", Distribution: []Quantile{{0, 0.1}, {50, 1}, {99, 9}, {100, 10}}}}}
	for _, reports := range [][]*Report{{full}, {full, full}, {{}}} {
		var b strings.Builder
		if err := Plot(&b, []string{"one", "two"}, reports); err != nil {
			t.Fatal(err)
		}
		wellFormed(t, b.String())
		if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Error("a coordinate is no number")
		}
		if reports[0] == full && !strings.Contains(b.String(), "a &lt;load&gt; &amp; more: throughput") {
			t.Error("the load is not named")
		}
	}
	// Names of stores go into the key; the legend beside the charts has room for a letter.
	long := strings.Repeat("http://127.0.0.1:2379,", 9)
	var two strings.Builder
	if err := Plot(&two, []string{long, long}, []*Report{full, full}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{">A</text>", ">B p99</text>", ">A put</text>", ">B: http://127.0.0.1:2379,"} {
		if !strings.Contains(two.String(), want) {
			t.Errorf("%s is missing", want)
		}
	}
	texts := regexp.MustCompile(`<text x="([0-9.]+)" y="[0-9.]+" text-anchor="start"[^>]*>([^<]*)<`).FindAllStringSubmatch(two.String(), -1)
	for _, m := range texts {
		if x, err := strconv.ParseFloat(m[1], 64); err != nil || x+6.5*float64(utf8.RuneCountInString(m[2])) > plotWidth {
			t.Errorf("%q at %s passes the edge: %v", m[2], m[1], err)
		}
	}
	var b strings.Builder
	if err := PlotRatios(&b, "ratios", []Bars{{Name: "x", Spread: Spread{0.5, 0.001, 900}, Goal: 1.1}}); err != nil {
		t.Fatal(err)
	}
	wellFormed(t, b.String())
}

func TestScales(t *testing.T) {
	for _, most := range []float64{0, 0.003, 1, 7, 99, 12345, math.Inf(1)} {
		s := linear(most)
		if n := len(s.ticks); n < 2 || n > 12 || !math.IsInf(most, 0) && s.most < most {
			t.Errorf("up to %g: %d ticks up to %g", most, n, s.most)
		}
	}
	s := logarithmic(0.03, 40)
	s.from, s.to = 0, 100
	if s.least != 0.01 || s.most != 100 || len(s.ticks) != 5 || math.Abs(s.at(1)-50) > 0.01 {
		t.Errorf("%+v", s)
	}
	if s := logarithmic(0, 0); !(s.least < s.most) {
		t.Errorf("%+v", s)
	}
}

func TestSpread(t *testing.T) {
	if s := SpreadOf([]float64{3, 1, 2, 10}); s != (Spread{2.5, 1, 10}) {
		t.Error(s)
	}
	if s := SpreadOf(nil); s != (Spread{}) {
		t.Error(s)
	}
	if s := RatioOf([]float64{1, 2, 0, 9}, []float64{2, 2, 5, 3, 4}); s != (Spread{1, 0.5, 3}) {
		t.Error(s)
	}
}
