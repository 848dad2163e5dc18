package bench

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// Bar draws progress on a terminal; anywhere else it is silent.
type Bar struct {
	out   io.Writer
	title string
	phase string
	bar   *progressbar.ProgressBar
}

// NewBar returns a bar that draws on w if that is a terminal.
func NewBar(w io.Writer) *Bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return &Bar{}
	}
	return &Bar{out: w}
}

// Title names what comes next.
func (b *Bar) Title(s string) { b.title, b.phase = s, "" }

// barSteps is the resolution of the bar.
const barSteps = 1000

// Show is an Observer's Progress.
func (b *Bar) Show(p Progress) {
	if b.out == nil {
		return
	}
	if b.bar == nil || p.Phase != b.phase {
		b.Clear()
		b.phase = p.Phase
		b.bar = progressbar.NewOptions(barSteps, progressbar.OptionSetWriter(b.out), progressbar.OptionSetWidth(24),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(false), progressbar.OptionThrottle(50*time.Millisecond))
	}
	text := p.Phase
	if b.title != "" {
		text = b.title + ": " + text
	}
	if p.Phase == PhaseMeasure {
		text += fmt.Sprintf(", %.0f/s, p99 %s", p.PerSecond, formatMS(ms(int64(p.P99))))
		if p.Failed > 0 {
			text += fmt.Sprintf(", %d failed", p.Failed)
		}
	}
	b.bar.Describe(text)
	_ = b.bar.Set(int(p.Done * barSteps)) // a terminal that is gone is no reason to stop
}

// Clear removes the bar, so that something else can be printed.
func (b *Bar) Clear() {
	if b.bar != nil {
		_ = b.bar.Clear()
		b.bar = nil
	}
}
