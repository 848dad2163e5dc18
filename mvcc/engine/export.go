package engine

import (
	"context"
	"fmt"
	"io"

	"braid/mvcc"
)

// Export streams every version of span and its records of the system space, in bounded memory, for
// an Import on another store. The indexes of revisions and leases are not sent: they follow from
// the versions. The position is sent by the caller,
// who reads it from the same Snapshot.
func (s *Snapshot) Export(ctx context.Context, span mvcc.Span, w io.Writer) error {
	out, err := newStreamWriter(w, span)
	if err == nil {
		n := 0
		add := func(key, value []byte) error {
			if n++; n%indexPollEvery == 0 {
				if err := ctx.Err(); err != nil {
					return err
				}
			}
			return out.add(key, value)
		}
		for _, kind := range mvcc.RecordKinds {
			if err == nil {
				err = s.eachRecord(kind, span, func(key, value []byte) (bool, error) { return true, add(key, value) })
			}
		}
		if err == nil {
			err = s.eachVersion(span, add)
		}
	}
	if err == nil {
		err = out.close()
	}
	if err != nil {
		return fmt.Errorf("engine: export %v: %w", span, err)
	}
	return nil
}
