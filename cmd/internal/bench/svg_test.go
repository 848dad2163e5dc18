package bench

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
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
	full := &Report{Series: []Point{{0, 1, 100, 1, 5, 0}, {1, 2, 200, 2, 9, 0}},
		Kinds: []KindReport{{Kind: "put", Distribution: []Quantile{{0, 0.1}, {50, 1}, {99, 9}, {100, 10}}}}}
	for _, reports := range [][]*Report{{full}, {full, full}, {{}}} {
		var b strings.Builder
		if err := Plot(&b, "a <load> & more", []string{"one", "two"}, reports); err != nil {
			t.Fatal(err)
		}
		wellFormed(t, b.String())
		if strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Error("a coordinate is no number")
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
