package engine

import (
	"encoding/binary"
	"fmt"
	"io"
)

// sum is the state of one merge of running totals.
type sum int64

func appendSum(dst []byte, n int64) []byte { return binary.AppendVarint(dst, n) }

func decodeSum(enc []byte) (int64, error) {
	x, n := binary.Varint(enc)
	if n != len(enc) {
		return 0, fmt.Errorf("%w: sum % x", errBadValue, enc)
	}
	return x, nil
}

func (s *sum) MergeNewer(value []byte) error {
	x, err := decodeSum(value)
	*s += sum(x)
	return err
}

func (s *sum) MergeOlder(value []byte) error { return s.MergeNewer(value) }

func (s *sum) Finish(bool) ([]byte, io.Closer, error) { return appendSum(nil, int64(*s)), nil, nil }
