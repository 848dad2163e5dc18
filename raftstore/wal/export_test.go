package wal

import "fmt"

// Totals returns the counters, also after Close.
func (l *Log) Totals() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}

// DecodeRecord is for the fuzz test. It returns how far it came.
func DecodeRecord(payload []byte) (int, error) {
	var c change
	return decodeRecord(payload, 0, &c)
}

// DecodeBatchHeader is for the fuzz test.
func DecodeBatchHeader(b []byte, logID uint64, seg, off uint32) bool {
	h, _, ok := decodeBatchHeader(b, logID, place{seg, off})
	return ok && h.payloadBytes >= 0
}

// Dump prints the batches and records in a segment's bytes, from the first batch on until one is
// not valid by itself.
func Dump(b []byte, num uint32) string {
	id, seg, ok, err := decodeSegmentHeader(b)
	out := fmt.Sprintf("segment %d: header of %d, ok=%v, err=%v\n", num, seg, ok, err)
	off := uint32(blockBytes)
	for int(off) < len(b) {
		h, _, ok := decodeBatchHeader(b[off:], id, place{num, off})
		if !ok {
			break
		}
		payload := b[off+batchHeaderBytes:][:h.payloadBytes]
		out += fmt.Sprintf("  %d: batch of %d bytes, %d records, synced %d:%d, oldest %d, first=%v, checksum ok=%v\n",
			off, h.payloadBytes, h.records, h.synced.seg, h.synced.off, h.oldest, h.prev == 0, crc(payload) == h.payloadCRC)
		for at := 0; at < len(payload); {
			var c change
			next, err := decodeRecord(payload, at, &c)
			if err != nil {
				out += fmt.Sprintf("    %v\n", err)
				break
			}
			out += fmt.Sprintf("    %d: %s\n", at, c.String())
			at = next
		}
		off += uint32(alignUp(int64(batchHeaderBytes+h.payloadBytes), alignBytes))
	}
	return out
}

func (c *change) String() string {
	out := fmt.Sprintf("group %d", c.group)
	if c.kind == kindRewrite {
		out += " again"
	}
	for _, r := range c.destroy {
		out += fmt.Sprintf(" destroyed=%d", r)
	}
	if c.reset != nil {
		out += fmt.Sprintf(" reset=%v", *c.reset)
	}
	if k := c.checkpoint; k != nil {
		out += fmt.Sprintf(" checkpoint=%v %v %q", k.Position, k.ConfState.GetVoters(), k.Data)
	}
	for _, e := range c.entries {
		out += fmt.Sprintf(" %d/%d@%d+%d", e.index, e.term, e.off, e.len)
	}
	if c.hard != nil {
		out += fmt.Sprintf(" hard=%v", *c.hard)
	}
	if c.truncate != nil {
		out += fmt.Sprintf(" start=%v", *c.truncate)
	}
	return out
}
