package gateway

import (
	"context"
	"time"
	"unicode/utf8"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
)

// unary runs before every unary method.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := s.checkMetadata(ctx, "unary"); err != nil {
		return nil, err
	}
	start := time.Now()
	resp, err := handler(ctx, req)
	took := time.Since(start)
	s.metrics.observe(info.FullMethod, err, took)
	if took > s.cfg.WarnDuration {
		s.metrics.slow.Inc()
		s.logSlow(ctx, info.FullMethod, req, resp, start, took, err)
	}
	return resp, err
}

// stream runs before every streaming method.
func (s *Server) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := s.checkMetadata(ss.Context(), "stream"); err != nil {
		return err
	}
	return handler(srv, ss)
}

// checkMetadata looks at what etcd's clients send beside the request: the version of their API, and
// whether they would rather have an error than wait for a leader.
func (s *Server) checkMetadata(ctx context.Context, kind string) error {
	client := "unknown"
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataClientAPIVersionKey); len(v) > 0 {
		client = v[0]
	}
	if !utf8.ValidString(client) {
		return rpctypes.ErrGRPCInvalidClientAPIVersion
	}
	s.metrics.countClient(kind, client)
	if requiresLeader(ctx) && s.cfg.Cluster.Leader() == 0 {
		return rpctypes.ErrGRPCNoLeader
	}
	return nil
}

// logSlow says what took long; never what keys or values were.
func (s *Server) logSlow(ctx context.Context, method string, req, resp any, start time.Time, took time.Duration, err error) {
	fields := []zap.Field{
		zap.Time("start time", start), zap.Duration("time spent", took), zap.String("response type", method), zap.Error(err),
	}
	if p, ok := peer.FromContext(ctx); ok {
		fields = append(fields, zap.String("remote", p.Addr.String()))
	}
	if m, ok := req.(proto.Message); ok {
		fields = append(fields, zap.Int("request size", proto.Size(m)))
	}
	if m, ok := resp.(proto.Message); ok && err == nil {
		fields = append(fields, zap.Int("response size", proto.Size(m)))
	}
	s.cfg.Logger.Warn("request stats", fields...)
}
