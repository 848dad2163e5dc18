package pdpb

import (
	"reflect"
	"testing"

	"braid/mvcc"
)

func TestRoundTrip(t *testing.T) {
	it := Item{Region: 7, Incarnation: 1<<32 - 1, N: 3, Cut: 1 << 60, Upto: 9, UptoTerm: 2, Cum: 8, Count: 1, Base: -5, Fence: 6,
		Decisions: []Decision{{Attempt: 4}, {Attempt: 1 << 50, Commit: true, Rev: 17}}}
	if got, rest, err := DecodeItem(it.Append(nil)); err != nil || len(rest) != 0 || !got.Equal(&it) {
		t.Errorf("item %v: %v %v", &got, rest, err)
	}
	rep := Report{Region: 7, Incarnation: 1, From: 2, Upto: 9, UptoTerm: 3, Cum: 5, Runs: []Run{{4, 0, 1}, {9, 2, 5}}, Sealed: 11,
		Facts: []Fact{{Index: 4, Attempt: 8, Participants: []RegionID{7, 9}}, {Index: 9, Stamp: 2, Attempt: 1 << 40, Participants: []RegionID{2, 7}, Writes: true}}}
	if got, rest, err := DecodeReport(rep.Append(nil)); err != nil || len(rest) != 0 || !reflect.DeepEqual(got, rep) {
		t.Errorf("report %v: %v %v", &got, rest, err)
	}
	mark := Mark{Cut: 4, Rev: 9, Floor: -1, Fence: 2}
	if got, rest, err := DecodeMark(mark.Append(nil)); err != nil || len(rest) != 0 || got != mark {
		t.Errorf("mark %v: %v %v", got, rest, err)
	}
	rp := ReadPoint{Cut: 4, Rev: 9, Floor: -1}
	if got, rest, err := DecodeReadPoint(rp.Append(nil)); err != nil || len(rest) != 0 || got != rp {
		t.Errorf("read point %v: %v %v", got, rest, err)
	}
	st := Store{ID: 1 << 63, Name: "n", PeerURLs: []string{"http://a", ""}, ClientURLs: []string{"http://b"}}
	if got, rest, err := DecodeStore(st.Append(nil)); err != nil || len(rest) != 0 || !reflect.DeepEqual(got, st) {
		t.Errorf("store %v: %v %v", &got, rest, err)
	}
	// "No upper bound" and "empty span" are different.
	for _, end := range [][]byte{nil, {}, {0}, []byte("z")} {
		d := Descriptor{ID: 2, Span: mvcc.Span{Start: []byte("a"), End: end}, Epoch: 3, Incarnation: 4, Peers: []Peer{{1, 2}, {3, 4}}, StartIndex: 5, StartTerm: 6}
		if got, rest, err := DecodeDescriptor(d.Append(nil)); err != nil || len(rest) != 0 || !reflect.DeepEqual(got, d) {
			t.Errorf("descriptor %v: %v %v", &got, rest, err)
		}
	}
}

func TestVersionIsChecked(t *testing.T) {
	it := Item{Region: 7}
	b := it.Append(nil)
	b[0]++
	if _, _, err := DecodeItem(b); err == nil {
		t.Error("an item of another version was taken")
	}
}

// FuzzDecode: decoders never panic, and what they take survives a second round.
func FuzzDecode(f *testing.F) {
	it := Item{Region: 7, N: 3, Base: -5, Decisions: []Decision{{Attempt: 4, Commit: true, Rev: 17}}}
	rep := Report{Region: 7, Upto: 9, Cum: 5, Runs: []Run{{9, 2, 5}}, Facts: []Fact{{Index: 9, Attempt: 8, Participants: []RegionID{7, 9}}}}
	d := Descriptor{ID: 2, Peers: []Peer{{1, 2}}}
	st := Store{ID: 1, PeerURLs: []string{"a"}}
	f.Add(it.Append(nil))
	f.Add(rep.Append(nil))
	f.Add(d.Append(nil))
	f.Add(st.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, _, err := DecodeItem(b); err == nil {
			if w, _, err := DecodeItem(v.Append(nil)); err != nil || !w.Equal(&v) {
				t.Fatalf("item %v %v: %v", &v, &w, err)
			}
		}
		if v, _, err := DecodeReport(b); err == nil {
			if w, _, err := DecodeReport(v.Append(nil)); err != nil || !reflect.DeepEqual(w, v) {
				t.Fatalf("report %v %v: %v", &v, &w, err)
			}
		}
		if v, _, err := DecodeDescriptor(b); err == nil {
			if w, _, err := DecodeDescriptor(v.Append(nil)); err != nil || !reflect.DeepEqual(w, v) {
				t.Fatalf("descriptor %v %v: %v", &v, &w, err)
			}
		}
		if v, _, err := DecodeStore(b); err == nil {
			if w, _, err := DecodeStore(v.Append(nil)); err != nil || !reflect.DeepEqual(w, v) {
				t.Fatalf("store %v %v: %v", &v, &w, err)
			}
		}
	})
}
