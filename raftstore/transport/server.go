package transport

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

const (
	serviceName    = "braid.peer.v1.Peer"
	methodFrames   = "/" + serviceName + "/Frames"
	methodCalls    = "/" + serviceName + "/Calls"
	methodSnapshot = "/" + serviceName + "/Snapshot"
)

// ServerOptions are what a gRPC server needs to carry a transport: message sizes and windows
// fit for frames, and probes that end the streams of a host that vanished.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes), grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.InitialWindowSize(streamWindowBytes), grpc.InitialConnWindowSize(connWindowBytes),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
	}
}

// peerServer is what gRPC checks a service against.
type peerServer interface{ enter() bool }

// Register adds the transport's service to a server made with ServerOptions.
func (t *Transport) Register(s grpc.ServiceRegistrar) {
	stream := func(name string, f func(p *peer, s grpc.ServerStream) error) grpc.StreamDesc {
		return grpc.StreamDesc{StreamName: name, ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			return t.accept(s, f)
		}}
	}
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: serviceName,
		HandlerType: (*peerServer)(nil),
		Streams: []grpc.StreamDesc{
			stream("Frames", t.serveFrames), stream("Calls", t.serveCalls), stream("Snapshot", t.serveSnapshot),
		},
	}, t)
}

// accept shakes hands and lets f have the stream until it ends or the transport closes. RecvMsg
// cannot be interrupted but by returning, so f runs beside it.
func (t *Transport) accept(s grpc.ServerStream, f func(*peer, grpc.ServerStream) error) error {
	if !t.enter() {
		return status.Error(codes.Unavailable, "the node is starting or stopping")
	}
	done := make(chan error, 1)
	go func() {
		defer t.leave()
		done <- func() error {
			var b []byte
			if err := s.RecvMsg(&b); err != nil {
				return err
			}
			p, err := t.greet(b)
			if err != nil {
				return err
			}
			if err := s.SendMsg(t.hello(p.id)); err != nil {
				return err
			}
			return f(p, s)
		}()
	}()
	select {
	case err := <-done:
		return err
	case <-t.ctx.Done():
		// Returning ends the stream and with it the goroutine's RecvMsg; Close waits for it.
		return status.Error(codes.Unavailable, "the node is stopping")
	}
}

// serveFrames hands frames to their receivers, in order, and answers pings. What raft has to say on a
// store that counts as down, because it does not answer us, is dropped: it would make a leader of it
// that nobody can answer.
func (t *Transport) serveFrames(p *peer, s grpc.ServerStream) error {
	defer p.lost(p.joined())
	pong := []byte{framesVersion}
	for {
		var b []byte
		if err := s.RecvMsg(&b); err != nil {
			return err
		}
		p.heard()
		t.received(p.id, len(b))
		pings := 0
		err := eachFrame(b, func(kind Kind, payload []byte) {
			switch h := t.frames[kind]; {
			case kind == kindPing:
				pings++
			case h == nil || kind.raft() && !p.alive.Load():
			default:
				h(p.id, payload)
			}
		})
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		if pings > 0 {
			if err := s.SendMsg(pong); err != nil {
				return err
			}
		}
	}
}

var errUnknownStore = errors.New("unknown store")

func unknownMethod(m Method) error { return fmt.Errorf("transport: nobody handles method %d", m) }
