package main

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// shrink looks for a shorter sequence that still makes the stores differ, within the given time.
// Each attempt runs on fresh stores. It returns the smallest found and the difference it shows.
func shrink(ctx context.Context, setup Setup, sequence []Request, found *Difference, budget time.Duration) ([]Request, *Difference, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	best, diff := sequence, found
	// try reports whether candidate differs, and keeps it if so.
	try := func(candidate []Request) (bool, error) {
		session, err := NewSession(ctx, setup)
		if err != nil {
			return false, err
		}
		d, err := session.Run(ctx, candidate)
		if err = errors.Join(err, session.Close()); err != nil || d == nil {
			return false, err
		}
		if d.Request.Method != found.Request.Method || d.Store != found.Store || (d.Why == "") != (found.Why == "") {
			return false, nil // another difference: that is a story of its own
		}
		best, diff = candidate, d
		return true, nil
	}
	err := shrinkBy(best, try, func() []Request { return best })
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // out of budget: what there is will do
	}
	return best, diff, err
}

// shrinkBy tries, in the order that pays: only the last requests; leaving out pieces, halves first;
// leaving out parts of the messages.
func shrinkBy(sequence []Request, try func([]Request) (bool, error), best func() []Request) error {
	for n := 1; n < len(sequence); n *= 4 {
		if ok, err := try(sequence[len(sequence)-n:]); err != nil {
			return err
		} else if ok {
			break
		}
	}
	for piece := len(best()) / 2; piece > 0; piece /= 2 {
		for at := 0; at+piece <= len(best()); {
			current := best()
			without := append(append([]Request{}, current[:at]...), current[at+piece:]...)
			if len(without) == 0 {
				break
			}
			ok, err := try(without)
			if err != nil {
				return err
			}
			if !ok {
				at += piece
			}
		}
	}
	for i := range best() {
		if err := shrinkMessage(i, try, best); err != nil {
			return err
		}
	}
	return nil
}

// shrinkMessage clears top-level fields of request i and drops elements of its lists while the
// difference stays.
func shrinkMessage(i int, try func([]Request) (bool, error), best func() []Request) error {
	fields := best()[i].Msg.ProtoReflect().Descriptor().Fields()
	for f := range fields.Len() {
		field := fields.Get(f)
		edits := []func(m protoreflect.Message) bool{func(m protoreflect.Message) bool {
			had := m.Has(field)
			m.Clear(field)
			return had
		}}
		if field.IsList() {
			for at := best()[i].Msg.ProtoReflect().Get(field).List().Len() - 1; at >= 0; at-- {
				edits = append(edits, func(m protoreflect.Message) bool { return dropElement(m, field, at) })
			}
		}
		for _, edit := range edits {
			candidate := append([]Request{}, best()...)
			msg := proto.Clone(candidate[i].Msg)
			if !edit(msg.ProtoReflect()) {
				continue
			}
			candidate[i].Msg = msg
			if _, err := try(candidate); err != nil {
				return err
			}
		}
	}
	return nil
}

func dropElement(m protoreflect.Message, field protoreflect.FieldDescriptor, at int) bool {
	list := m.Get(field).List()
	if at >= list.Len() || list.Len() < 2 {
		return false
	}
	list = m.Mutable(field).List()
	for i := at; i+1 < list.Len(); i++ {
		list.Set(i, list.Get(i+1))
	}
	list.Truncate(list.Len() - 1)
	return true
}
