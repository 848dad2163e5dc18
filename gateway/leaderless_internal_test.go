package gateway

import (
	"context"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/metadata"
)

// TestLeaderless: a stream ends after it has missed a leader three times in a row, of the placement
// group or of what it needs itself, and other streams go on.
func TestLeaderless(t *testing.T) {
	requires := metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader))
	open := func(l *leaderless, ctx context.Context, led func() bool) (func() bool, func()) {
		ch, done := l.channel(ctx, led)
		return func() bool {
			select {
			case <-ch:
				return true
			default:
				return false
			}
		}, done
	}
	var l leaderless
	region := true
	plain, _ := open(&l, requires, nil)
	watch, _ := open(&l, requires, func() bool { return region })
	other, _ := open(&l, t.Context(), func() bool { return false })
	gone, done := open(&l, requires, nil)
	done()
	look := func(leader, regionLed, wantPlain, wantWatch bool) {
		t.Helper()
		region = regionLed
		l.look(leader)
		if plain() != wantPlain || watch() != wantWatch || other() || gone() {
			t.Errorf("ended: %v, %v, others %v, %v; want %v, %v", plain(), watch(), other(), gone(), wantPlain, wantWatch)
		}
	}
	look(true, false, false, false)
	look(true, false, false, false)
	look(true, true, false, false) // it has one again
	look(true, false, false, false)
	look(true, false, false, false)
	look(true, false, false, true)
	look(false, true, false, true)
	look(false, true, false, true)
	look(false, true, true, true)
	if len(l.streams) != 0 {
		t.Errorf("%d streams are kept", len(l.streams))
	}
}
