package bench

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// svg is a picture in the making. A plotting library would link its fonts into every node; axes,
// lines and bars need none of it, and a viewer brings its own fonts.
type svg struct {
	body          strings.Builder
	width, height float64
}

// Sizes of a picture, in pixels.
const (
	plotWidth    = 820.0
	chartHeight  = 260.0
	marginLeft   = 70.0
	marginRight  = 150.0 // the legend's
	marginTop    = 34.0
	marginBottom = 42.0
	keyHeight    = 18.0 // of a line of the key
	keyTextMax   = 110  // characters of it that fit
)

// letter is what a curve or a column is called whose name is too long.
func letter(i int) string { return string(rune('A' + i)) }

// shorten cuts a text to at most so many characters.
func shorten(text string, most int) string {
	if r := []rune(text); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return text
}

// palette has colours that are told apart with any kind of sight (after Okabe and Ito).
var palette = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442"}

func colour(i int) string { return palette[i%len(palette)] }

func (s *svg) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(&s.body, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">%s</text>\n", x, y, anchor, class, html.EscapeString(text))
}

func (s *svg) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(&s.body, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, class)
}

func (s *svg) rect(x, y, w, h float64, fill string) {
	fmt.Fprintf(&s.body, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, w, h, fill)
}

func (s *svg) path(points [][2]float64, stroke string) {
	if len(points) == 0 {
		return
	}
	s.body.WriteString("<polyline fill=\"none\" stroke-width=\"1.5\" stroke=\"" + stroke + "\" points=\"")
	for _, p := range points {
		fmt.Fprintf(&s.body, "%.1f,%.1f ", p[0], p[1])
	}
	s.body.WriteString("\"/>\n")
}

func (s *svg) writeTo(w io.Writer) error {
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f">
<style>text{font:12px sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}.axis{stroke:#333}.grid{stroke:#ddd}</style>
<rect width="100%%" height="100%%" fill="#fff"/>
%s</svg>
`, s.width, s.height, s.width, s.height, s.body.String())
	return err
}

// scale maps values to pixels.
type scale struct {
	least, most float64 // values, least < most
	from, to    float64 // pixels
	log         bool
	ticks       []tick
}

type tick struct {
	at    float64
	label string
}

// linear returns a scale from 0 to at least most with ticks at round values.
func linear(most float64) scale {
	if most <= 0 || math.IsNaN(most) || math.IsInf(most, 0) {
		most = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(most/4)))
	for _, m := range []float64{1, 2, 5, 10} {
		if most/(step*m) <= 5 {
			step *= m
			break
		}
	}
	s := scale{most: math.Ceil(most/step) * step}
	for i := 0; float64(i)*step <= s.most*1.0001; i++ {
		s.ticks = append(s.ticks, tick{float64(i) * step, trimNumber(float64(i) * step)})
	}
	return s
}

// logarithmic returns a scale that covers both values with ticks at powers of ten.
func logarithmic(least, most float64) scale {
	if !(least > 0) {
		least = 0.001
	}
	s := scale{least: math.Pow(10, math.Floor(math.Log10(least))), most: math.Pow(10, math.Ceil(math.Log10(max(most, least)))), log: true}
	if s.most <= s.least {
		s.most = s.least * 10
	}
	for v := s.least; v <= s.most*1.0001; v *= 10 {
		s.ticks = append(s.ticks, tick{v, trimNumber(v)})
	}
	return s
}

func (s scale) at(v float64) float64 {
	share := (v - s.least) / (s.most - s.least)
	if s.log {
		share = math.Log(max(v, s.least)/s.least) / math.Log(s.most/s.least)
	}
	return s.from + share*(s.to-s.from)
}

// trimNumber prints a tick's value.
func trimNumber(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%gM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%gk", v/1e3)
	}
	return fmt.Sprintf("%.4g", v)
}

// curve is one line of a chart.
type curve struct {
	name   string
	points [][2]float64
}

// chart draws curves in a strip of the picture that begins at top. The scales' pixels are set here.
func (s *svg) chart(top float64, title, xName, yName string, x, y scale, curves []curve) {
	left, right := marginLeft, s.width-marginRight
	upper, lower := top+marginTop, top+chartHeight-marginBottom
	x.from, x.to, y.from, y.to = left, right, lower, upper
	s.text(left, top+20, "start", "title", title)
	for _, t := range y.ticks {
		s.line(left, y.at(t.at), right, y.at(t.at), "grid")
		s.text(left-6, y.at(t.at)+4, "end", "", t.label)
	}
	for _, t := range x.ticks {
		s.line(x.at(t.at), lower, x.at(t.at), lower+4, "axis")
		s.text(x.at(t.at), lower+17, "middle", "", t.label)
	}
	s.line(left, lower, right, lower, "axis")
	s.line(left, upper, left, lower, "axis")
	s.text((left+right)/2, lower+34, "middle", "", xName)
	fmt.Fprintf(&s.body, "<text transform=\"translate(14 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n", (upper+lower)/2, html.EscapeString(yName))
	for i, c := range curves {
		pixels := make([][2]float64, len(c.points))
		for j, p := range c.points {
			pixels[j] = [2]float64{x.at(p[0]), y.at(p[1])}
		}
		s.path(pixels, colour(i))
		if c.name == "" {
			continue
		}
		at := upper + 8 + 18*float64(i)
		s.rect(right+10, at-8, 10, 10, colour(i))
		s.text(right+26, at+1, "start", "", c.name)
	}
}

// Plot draws reports of one load: throughput and latency over time and the distribution of the
// latency. Curves of several reports have a letter each; a key above says the names, which are too
// long for the legend.
func Plot(w io.Writer, names []string, reports []*Report) error {
	s := &svg{width: plotWidth}
	top := 0.0
	if len(reports) > 1 {
		for i, name := range names {
			top += keyHeight
			s.text(marginLeft, top+4, "start", "", letter(i)+": "+shorten(name, keyTextMax))
		}
	}
	s.height = top + 3*chartHeight + 10
	var rates, medians, tails, distribution []curve
	var end, rateMost, latencyMost, least, most float64
	for i, r := range reports {
		name := ""
		if len(reports) > 1 {
			name = letter(i)
		}
		rate, p50, p99 := curve{name: name}, curve{name: strings.TrimSpace(name + " p50")}, curve{name: strings.TrimSpace(name + " p99")}
		for _, p := range r.Series {
			at := (p.From + p.To) / 2
			rate.points = append(rate.points, [2]float64{at, p.PerSecond})
			p50.points = append(p50.points, [2]float64{at, p.P50})
			p99.points = append(p99.points, [2]float64{at, p.P99})
			end, rateMost, latencyMost = max(end, p.To), max(rateMost, p.PerSecond), max(latencyMost, p.P99)
		}
		rates, medians, tails = append(rates, rate), append(medians, p50), append(tails, p99)
		for _, k := range r.Kinds {
			c := curve{name: strings.TrimSpace(name + " " + k.Kind)}
			for _, q := range k.Distribution {
				if q.Percent >= 99.999 {
					break
				}
				c.points = append(c.points, [2]float64{1 / (1 - q.Percent/100), q.MS})
				if least == 0 || q.MS < least {
					least = q.MS
				}
				most = max(most, q.MS)
			}
			if len(c.points) > 0 {
				distribution = append(distribution, c)
			}
		}
	}
	time := linear(end)
	s.chart(top, reports[0].Load+": throughput", "seconds", "per second", time, linear(rateMost), rates)
	s.chart(top+chartHeight, "latency", "seconds", "ms", time, linear(latencyMost), append(medians, tails...))
	percent := scale{least: 1, most: 1e5, log: true, ticks: []tick{{1, "0"}, {2, "50 %"}, {10, "90 %"}, {100, "99 %"}, {1000, "99.9 %"}, {1e4, "99.99 %"}}}
	s.chart(top+2*chartHeight, "distribution of the latency", "share of the requests that took less", "ms", percent, logarithmic(least, most), distribution)
	return s.writeTo(w)
}

// Bars is one ratio of a picture of ratios.
type Bars struct {
	Name   string
	Spread Spread
	Goal   float64 // drawn as a mark; 0: none
	Good   bool
}

// PlotRatios draws ratios as bars from 1, on a logarithmic axis, with the spread as a line.
func PlotRatios(w io.Writer, title string, bars []Bars) error {
	const rowHeight, nameWidth = 20.0, 380.0
	s := &svg{width: plotWidth + 120, height: marginTop + marginBottom + rowHeight*float64(len(bars))}
	least, most := 0.5, 2.0
	for _, b := range bars {
		least, most = min(least, b.Spread.Least), max(most, b.Spread.Most)
	}
	x := scale{least: max(least, 0.01), most: min(most, 100), from: nameWidth, to: s.width - 70, log: true}
	for _, t := range []float64{0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100} {
		if t >= x.least && t <= x.most {
			x.ticks = append(x.ticks, tick{t, trimNumber(t)})
		}
	}
	pixel := func(v float64) float64 { return x.at(min(max(v, x.least), x.most)) }
	s.text(10, 20, "start", "title", title)
	lower := marginTop + rowHeight*float64(len(bars))
	for _, t := range x.ticks {
		s.line(pixel(t.at), marginTop, pixel(t.at), lower, "grid")
		s.text(pixel(t.at), lower+17, "middle", "", t.label)
	}
	for i, b := range bars {
		y := marginTop + rowHeight*float64(i)
		fill := palette[1]
		if b.Good {
			fill = palette[2]
		}
		from, to := pixel(1), pixel(b.Spread.Median)
		s.rect(min(from, to), y+4, max(to-from, from-to, 1), rowHeight-8, fill)
		s.line(pixel(b.Spread.Least), y+rowHeight/2, pixel(b.Spread.Most), y+rowHeight/2, "axis")
		if b.Goal > 0 {
			s.rect(pixel(b.Goal)-1, y+1, 2, rowHeight-2, palette[6])
		}
		s.text(nameWidth-10, y+14, "end", "", b.Name)
		s.text(s.width-10, y+14, "end", "", fmt.Sprintf("%.2f", b.Spread.Median))
	}
	s.line(pixel(1), marginTop, pixel(1), lower, "axis")
	legend := "green: better; line: the spread of the rounds"
	if slices.ContainsFunc(bars, func(b Bars) bool { return b.Goal > 0 }) {
		legend = "green: goal met, or better where there is none; black mark: the goal; line: the spread of the rounds"
	}
	s.text(nameWidth, lower+34, "start", "", legend)
	return s.writeTo(w)
}
