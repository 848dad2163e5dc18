package transport

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"

	"google.golang.org/grpc/mem"
)

// A message of frames is a version byte and then frames: kind byte, uvarint length, payload.
const framesVersion = 1

type frame struct {
	kind    Kind
	payload []byte
}

// frameOverhead is the most a frame takes beside its payload.
const frameOverhead = 1 + binary.MaxVarintLen64

// sendQueue holds frames for a peer: two lanes, the first goes first. A lane that is full, or a
// peer that is away, refuses frames.
type sendQueue struct {
	some chan struct{} // has a token when there may be frames

	mu    sync.Mutex
	lanes [2]lane
	limit int // bytes in each lane
	up    bool
}

type lane struct {
	frames []frame
	bytes  int
}

func newSendQueue(limit int) *sendQueue {
	return &sendQueue{some: make(chan struct{}, 1), limit: limit}
}

// setUp opens the queue for frames; closing it drops what is in it.
func (q *sendQueue) setUp(up bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.up = up
	if !up {
		q.lanes = [2]lane{}
	}
}

func (q *sendQueue) push(f frame) bool {
	q.mu.Lock()
	l := &q.lanes[f.kind.lane()]
	n := len(f.payload) + frameOverhead
	ok := q.up && (l.bytes+n <= q.limit || l.bytes == 0) && n < maxMessageBytes
	if ok {
		l.frames = append(l.frames, f)
		l.bytes += n
	}
	q.mu.Unlock()
	if ok {
		signal(q.some)
	}
	return ok
}

// gather lets who is ready to run add to what is about to be sent: a message costs about the same
// whatever it carries, much more than the wait. On an idle machine there is none.
func gather() { runtime.Gosched() }

// signal leaves a token unless there is one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// takeFrames removes frames of about max bytes, urgent ones first, at least one if there is any.
func (q *sendQueue) takeFrames(max int) []frame {
	q.mu.Lock()
	defer q.mu.Unlock()
	var out []frame
	size := 0
	for i := range q.lanes {
		l := &q.lanes[i]
		n := 0
		for n < len(l.frames) && (size == 0 || size+len(l.frames[n].payload) <= max) {
			size += len(l.frames[n].payload) + frameOverhead
			l.bytes -= len(l.frames[n].payload) + frameOverhead
			n++
		}
		if n > 0 && out == nil && n == len(l.frames) {
			out, l.frames = l.frames, nil
			continue
		}
		out = append(out[:len(out):len(out)], l.frames[:n]...)
		if n == len(l.frames) {
			l.frames = nil
		} else {
			l.frames = l.frames[n:]
			signal(q.some)
		}
	}
	return out
}

// take encodes frames into one message; nil when there are none.
func (q *sendQueue) take() (mem.Buffer, int) {
	fs := q.takeFrames(batchBytes)
	if len(fs) == 0 {
		return nil, 0
	}
	size := 1
	for _, f := range fs {
		size += len(f.payload) + frameOverhead
	}
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	b := append((*buf)[:0], framesVersion)
	for _, f := range fs {
		b = append(b, byte(f.kind))
		b = binary.AppendUvarint(b, uint64(len(f.payload)))
		b = append(b, f.payload...)
	}
	*buf = b
	return mem.NewBuffer(buf, pool), len(b)
}

// eachFrame calls f for every frame of a message. Payloads refer to the message.
func eachFrame(b []byte, f func(Kind, []byte)) error {
	if len(b) == 0 || b[0] != framesVersion {
		return fmt.Errorf("transport: malformed frames: version")
	}
	for b = b[1:]; len(b) > 0; {
		kind := Kind(b[0])
		n, w := binary.Uvarint(b[1:])
		if w <= 0 || n > uint64(len(b)-1-w) {
			return fmt.Errorf("transport: malformed frames: length")
		}
		end := 1 + w + int(n)
		f(kind, b[1+w:end:end])
		b = b[end:]
	}
	return nil
}
