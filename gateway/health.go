package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
)

// healthBody is what /health answers.
type healthBody struct {
	Health string `json:"health"`
	Reason string `json:"reason"`
}

// serveHealth is etcd's oldest health page: alarms, leader and one read.
func (s *Server) serveHealth(w http.ResponseWriter, r *http.Request) {
	if !onlyGet(w, r) {
		return
	}
	h := healthBody{Health: "true"}
	if reason := s.unhealthy(r); reason != "" {
		h = healthBody{Health: "false", Reason: reason}
	}
	body, err := json.Marshal(h)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if h.Health != "true" {
		s.metrics.healthFailures.Inc()
		s.cfg.Logger.Warn("/health error", zap.ByteString("output", body))
		http.Error(w, string(body), http.StatusServiceUnavailable)
		return
	}
	s.metrics.healthSuccess.Inc()
	w.WriteHeader(http.StatusOK)
	w.Write(body)
}

// NotReady answers for a node that has no quorum yet: /health as etcd's does, everything else that
// MetricsHandler would answer with the same status.
func NotReady() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if onlyGet(w, r) {
			http.Error(w, `{"health":"false","reason":"RAFT NO LEADER"}`, http.StatusServiceUnavailable)
		}
	})
}

// unhealthy returns the reason why this member is not healthy, "" when it is.
func (s *Server) unhealthy(r *http.Request) string {
	excluded := excludedBy(r)
	serializable := r.URL.Query().Get("serializable") == "true"
	for _, a := range s.cfg.Cluster.Alarms() {
		if excluded[a.Alarm.String()] {
			continue
		}
		switch a.Alarm {
		case pb.AlarmType_NOSPACE:
			return "ALARM NOSPACE"
		case pb.AlarmType_CORRUPT:
			return "ALARM CORRUPT"
		}
		return "ALARM UNKNOWN"
	}
	if !serializable && s.cfg.Cluster.Leader() == 0 {
		return "RAFT NO LEADER"
	}
	if err := s.readCheck(serializable)(r.Context()); err != nil {
		return "RANGE ERROR:" + reasonOf(err)
	}
	return ""
}

// reasonOf prints an error as etcd's own errors print.
func reasonOf(err error) string {
	text := toStatus(err).Error()
	if _, desc, ok := strings.Cut(text, " desc = "); ok {
		return desc
	}
	return text
}

// readCheck reads a key that cannot exist. When the time is up that says so in etcd's words, whether
// the router noticed first or this check: they have the same time.
func (s *Server) readCheck(serializable bool) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		rctx, cancel := context.WithTimeout(ctx, s.cfg.RequestTimeout)
		defer cancel()
		_, err := s.cfg.KV.Range(rctx, &pb.RangeRequest{KeysOnly: true, Limit: 1, Serializable: serializable})
		return timeUp(err, rctx, ctx)
	}
}

// check is one of the named checks behind /livez and /readyz.
type check struct {
	name string
	run  func(ctx context.Context) error
}

func (s *Server) livez() []check {
	return []check{{"serializable_read", s.readCheck(true)}}
}

func (s *Server) readyz() []check {
	return []check{
		{"data_corruption", func(context.Context) error {
			for _, a := range s.cfg.Cluster.Alarms() {
				if a.Alarm == pb.AlarmType_CORRUPT {
					return fmt.Errorf("alarm activated: %s", a.Alarm)
				}
			}
			return nil
		}},
		{"serializable_read", s.readCheck(true)},
		{"linearizable_read", s.readCheck(false)},
		{"non_learner", func(context.Context) error {
			if s.cfg.Cluster.IsLearner() {
				return fmt.Errorf("not supported for learner")
			}
			return nil
		}},
	}
}

// handleChecks installs a page for all checks of a kind and one for each of them.
func (s *Server) handleChecks(mux *http.ServeMux, kind string, checks []check) {
	mux.HandleFunc("/"+kind, func(w http.ResponseWriter, r *http.Request) {
		excluded := excludedBy(r)
		wanted := make([]check, 0, len(checks))
		for _, c := range checks {
			if !excluded[c.name] {
				wanted = append(wanted, c)
			}
			delete(excluded, c.name)
		}
		if len(excluded) > 0 {
			// An unknown name is no error, so that probes work across versions.
			s.cfg.Logger.Warn("some health checks cannot be excluded", zap.Int("unknown", len(excluded)))
		}
		s.serveChecks(w, r, kind, wanted)
	})
	for _, c := range checks {
		mux.HandleFunc("/"+kind+"/"+c.name, func(w http.ResponseWriter, r *http.Request) {
			s.serveChecks(w, r, kind, []check{c})
		})
	}
}

func (s *Server) serveChecks(w http.ResponseWriter, r *http.Request, kind string, checks []check) {
	if !onlyGet(w, r) {
		return
	}
	var report strings.Builder
	failed := false
	for _, c := range checks {
		result, value := "success", 1.0
		if err := c.run(r.Context()); err != nil {
			failed, result, value = true, "error", 0
			fmt.Fprintf(&report, "[-]%s failed: %s\n", c.name, reasonOf(err))
		} else {
			fmt.Fprintf(&report, "[+]%s ok\n", c.name)
		}
		s.metrics.checks.WithLabelValues(kind, c.name).Set(value)
		s.metrics.checksTotal.WithLabelValues(kind, c.name, result).Inc()
	}
	if failed {
		s.cfg.Logger.Warn("health check failed", zap.String("path", r.URL.Path), zap.String("reason", report.String()))
		http.Error(w, report.String(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if _, verbose := r.URL.Query()["verbose"]; verbose {
		fmt.Fprint(w, report.String())
	}
	fmt.Fprint(w, "ok\n")
}

// excludedBy returns the names in the query's "exclude" parameters.
func excludedBy(r *http.Request) map[string]bool {
	set := make(map[string]bool)
	for _, name := range r.URL.Query()["exclude"] {
		if name != "" {
			set[name] = true
		}
	}
	return set
}

func onlyGet(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet {
		return true
	}
	w.Header().Set("Allow", http.MethodGet)
	http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
	return false
}

// anyOf says whether a list is empty, holds "*", or holds the value.
func anyOf(list []string, value string) bool {
	return len(list) == 0 || slices.Contains(list, "*") || slices.Contains(list, value)
}
