package engine

import (
	"context"
	"fmt"
	"io"

	"braid/mvcc"
)

// Export streams every version of span, in bounded memory, for an Import on another store. The
// revision index is not sent: it follows from the versions. The position is sent by the caller,
// who reads it from the same Snapshot.
func (s *Snapshot) Export(ctx context.Context, span mvcc.Span, w io.Writer) error {
	out, err := newStreamWriter(w, span)
	if err == nil {
		n := 0
		err = s.eachVersion(span, func(key, value []byte) error {
			if n++; n%indexPollEvery == 0 {
				if err := ctx.Err(); err != nil {
					return err
				}
			}
			return out.add(key, value)
		})
	}
	if err == nil {
		err = out.close()
	}
	if err != nil {
		return fmt.Errorf("engine: export %v: %w", span, err)
	}
	return nil
}
