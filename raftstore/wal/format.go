package wal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
)

// The physical format. All integers are little-endian; varints are encoding/binary's.
//
// A segment is a file named by its number, 16 hexadecimal digits and ".wal". Its first block
// holds the segment header, batches follow, each beginning at a multiple of alignBytes:
//
//	segment header  version 1 | magic 7 | log id 8 | segment 8 | crc 4
//	batch           version 1 | magic 3 | payload length 4 | log id 8 | run 8 | segment 8 |
//	                offset 4 | synced offset 4 | synced segment 8 | oldest segment 4 |
//	                records 4 | previous header's crc 4 | payload crc 4 | reserved 4 |
//	                header crc 4 | payload
//
// See the package comment for what each field is there to catch.
const (
	formatVersion = 1
	segmentMagic  = "raidwal"
	batchMagic    = "bat"

	// blockBytes is the page size the writer pads to, so that a write never makes the kernel
	// read the rest of a page of a recycled segment first.
	blockBytes = 4096
	// alignBytes is where batches may begin: a sector, so that one that was synced is never
	// written again.
	alignBytes = 512

	segmentHeaderBytes = 28
	batchHeaderBytes   = 72
	segmentSuffix      = ".wal"
	// batchBytesMax bounds what a header may claim as its payload's length.
	batchBytesMax = 1<<31 - 1<<20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

// place is a position in the physical log.
type place struct {
	seg uint32
	off uint32
}

func (p place) less(q place) bool { return p.seg < q.seg || p.seg == q.seg && p.off < q.off }

// CorruptError says that a part of the log that had been synced does not read back as it was
// written. The log refuses to open, or to read the entry: leaving it out could break a promise.
type CorruptError struct {
	File   string
	Offset int64
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("wal: damage in %s at offset %d: %s", e.File, e.Offset, e.Reason)
}

func segmentName(n uint32) string { return fmt.Sprintf("%016x%s", n, segmentSuffix) }

func parseSegmentName(name string) (uint32, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 16 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	return uint32(n), err == nil && n > 0
}

// appendSegmentHeader returns a whole block.
func appendSegmentHeader(b []byte, logID uint64, seg uint32) []byte {
	start := len(b)
	b = append(b, formatVersion)
	b = append(b, segmentMagic...)
	b = binary.LittleEndian.AppendUint64(b, logID)
	b = binary.LittleEndian.AppendUint64(b, uint64(seg))
	b = binary.LittleEndian.AppendUint32(b, crc(b[start:]))
	return append(b, make([]byte, blockBytes-segmentHeaderBytes)...)
}

// decodeSegmentHeader returns ok=false for what is not a header, and an error for a header of a
// version that this program does not know.
func decodeSegmentHeader(b []byte) (logID, seg uint64, ok bool, err error) {
	if len(b) < segmentHeaderBytes || string(b[1:8]) != segmentMagic {
		return 0, 0, false, nil
	}
	if crc(b[:24]) != binary.LittleEndian.Uint32(b[24:]) {
		return 0, 0, false, nil
	}
	if b[0] != formatVersion {
		return 0, 0, false, fmt.Errorf("wal: format version %d, this program knows %d", b[0], formatVersion)
	}
	return binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:]), true, nil
}

type batchHeader struct {
	payloadBytes int
	logID        uint64 // of the log since its creation: another log's file is no part of it
	run          uint64 // random, new at each Open: no two runs write the same header
	at           place  // where the batch is: stale contents of a recycled segment do not fit
	synced       place  // everything below was known to be durable when this was written (B10)
	oldest       uint32 // the log may begin there: earlier segments hold nothing live
	records      uint32
	prev         uint32 // header crc of the batch before: a batch cut off once never comes back
	payloadCRC   uint32
}

// put writes the header into b, which is batchHeaderBytes long, and returns its crc.
func (h *batchHeader) put(b []byte) uint32 {
	b[0] = formatVersion
	copy(b[1:4], batchMagic)
	le := binary.LittleEndian
	le.PutUint32(b[4:], uint32(h.payloadBytes))
	le.PutUint64(b[8:], h.logID)
	le.PutUint64(b[16:], h.run)
	le.PutUint64(b[24:], uint64(h.at.seg))
	le.PutUint32(b[32:], h.at.off)
	le.PutUint32(b[36:], h.synced.off)
	le.PutUint64(b[40:], uint64(h.synced.seg))
	le.PutUint32(b[48:], h.oldest)
	le.PutUint32(b[52:], h.records)
	le.PutUint32(b[56:], h.prev)
	le.PutUint32(b[60:], h.payloadCRC)
	le.PutUint32(b[64:], 0) // reserved
	c := crc(b[:68])
	le.PutUint32(b[68:], c)
	return c
}

// writtenFor says whether a header, whole or damaged, is one of this log written for this place.
func writtenFor(b []byte, logID uint64, at place) bool {
	le := binary.LittleEndian
	return len(b) >= batchHeaderBytes && b[0] == formatVersion && string(b[1:4]) == batchMagic &&
		le.Uint64(b[8:]) == logID && le.Uint64(b[24:]) == uint64(at.seg) && le.Uint32(b[32:]) == at.off
}

// decodeBatchHeader returns the header in b if it is one of this log written for this place.
func decodeBatchHeader(b []byte, logID uint64, at place) (h batchHeader, headerCRC uint32, ok bool) {
	if !writtenFor(b, logID, at) {
		return h, 0, false
	}
	le := binary.LittleEndian
	headerCRC = le.Uint32(b[68:])
	if crc(b[:68]) != headerCRC {
		return h, 0, false
	}
	h = batchHeader{
		payloadBytes: int(le.Uint32(b[4:])),
		logID:        logID,
		run:          le.Uint64(b[16:]),
		at:           at,
		synced:       place{seg: uint32(le.Uint64(b[40:])), off: le.Uint32(b[36:])},
		oldest:       le.Uint32(b[48:]),
		records:      le.Uint32(b[52:]),
		prev:         le.Uint32(b[56:]),
		payloadCRC:   le.Uint32(b[60:]),
	}
	return h, headerCRC, h.payloadBytes <= batchBytesMax
}
