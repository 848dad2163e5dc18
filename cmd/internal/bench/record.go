package bench

import (
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Latencies are kept between a microsecond and two minutes; what is beyond counts as the bound.
const (
	latencyMin = time.Microsecond
	latencyMax = 2 * time.Minute
)

func newHistogram(digits int) *hdrhistogram.Histogram {
	return hdrhistogram.New(int64(latencyMin), int64(latencyMax), digits)
}

// record adds a latency; within the bounds the histogram cannot refuse it.
func record(h *hdrhistogram.Histogram, d time.Duration) {
	_ = h.RecordValue(int64(min(max(d, latencyMin), latencyMax)))
}

const (
	// shardCount divides a recorder, so that a thousand clients neither share one lock nor have a
	// histogram each, which would be larger than a server.
	shardCount = 16
	// errorKindsMax bounds the texts that are told apart; the others count as "other errors".
	errorKindsMax = 20
	otherErrors   = "other errors"
)

// recorder takes the outcomes of all clients of a run. Its methods may be called by any goroutine.
type recorder struct {
	kinds  []string
	shards [shardCount]shard
}

// shard is one part of a recorder.
type shard struct {
	mu     sync.Mutex
	kinds  []kindRecord            // guarded by mu; one a kind
	window *hdrhistogram.Histogram // guarded by mu; requests since the last roll
	failed int64                   // guarded by mu; since the last roll
	errors map[string]int64        // guarded by mu
}

// kindRecord is what a shard knows of one kind.
type kindRecord struct {
	latency *hdrhistogram.Histogram
	ended   int64 // within the measured time, whenever they began: this is the throughput
}

func newRecorder(kinds []string) *recorder {
	r := &recorder{kinds: kinds}
	for i := range r.shards {
		s := &r.shards[i]
		s.kinds = make([]kindRecord, len(kinds))
		for j := range s.kinds {
			s.kinds[j].latency = newHistogram(3)
		}
		s.window = newHistogram(2)
		s.errors = map[string]int64{}
	}
	return r
}

// outcome is how one request ended.
type outcome struct {
	kind    int
	latency time.Duration
	timed   bool // it began in the measured time: its latency counts
	ended   bool // it ended in the measured time: it counts for the throughput
	err     string
	event   bool // an event of a watch: not one of the requests that are drawn over time
}

// add records an outcome on behalf of a client.
func (r *recorder) add(client int, o outcome) {
	if !o.timed && !o.ended {
		return
	}
	s := &r.shards[client%shardCount]
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.err != "" {
		if _, known := s.errors[o.err]; !known && len(s.errors) >= errorKindsMax {
			o.err = otherErrors
		}
		s.errors[o.err]++
		s.failed++
		return
	}
	k := &s.kinds[o.kind]
	if o.ended {
		k.ended++
	}
	if o.timed {
		record(k.latency, o.latency)
		if !o.event {
			record(s.window, o.latency)
		}
	}
}

// point is a stretch of time of a run.
type point struct {
	from, to time.Duration // since the begin of the measured time
	latency  *hdrhistogram.Histogram
	failed   int64
}

// roll returns what happened since the last roll.
func (r *recorder) roll(from, to time.Duration) point {
	p := point{from: from, to: to, latency: newHistogram(2)}
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		p.latency.Merge(s.window)
		s.window.Reset()
		p.failed += s.failed
		s.failed = 0
		s.mu.Unlock()
	}
	return p
}

// totals merges the shards; histograms are in the order of the kinds.
func (r *recorder) totals() (kinds []kindRecord, errors map[string]int64) {
	kinds = make([]kindRecord, len(r.kinds))
	for i := range kinds {
		kinds[i].latency = newHistogram(3)
	}
	errors = map[string]int64{}
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		for j := range s.kinds {
			kinds[j].latency.Merge(s.kinds[j].latency)
			kinds[j].ended += s.kinds[j].ended
		}
		for text, n := range s.errors {
			errors[text] += n
		}
		s.mu.Unlock()
	}
	return kinds, errors
}

// seriesMax bounds the points of a series; when it is full, neighbours are merged.
const seriesMax = 120

// series collects points; a run of any length has at most seriesMax of them.
type series struct {
	points []point
	per    int // points of the recorder that make one here
	filled int // of them in the last one
}

// add appends a point that follows the last one.
func (s *series) add(p point) {
	s.per = max(s.per, 1)
	if n := len(s.points); n > 0 && s.filled < s.per {
		s.points[n-1] = s.points[n-1].with(p)
		s.filled++
		return
	}
	if len(s.points) == seriesMax {
		for i := range seriesMax / 2 {
			s.points[i] = s.points[2*i].with(s.points[2*i+1])
		}
		s.points = s.points[:seriesMax/2]
		s.per *= 2
	}
	s.points, s.filled = append(s.points, p), 1
}

// with returns the point that covers both.
func (p point) with(next point) point {
	p.latency.Merge(next.latency)
	p.to, p.failed = next.to, p.failed+next.failed
	return p
}
