package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"gopkg.in/natefinch/lumberjack.v2"
)

// Special values of --log-outputs.
const (
	logDefault = "default" // stderr
	logStderr  = "stderr"
	logStdout  = "stdout"
	logJournal = "systemd/journal"
)

// BuildLogger makes the logger that the configuration asks for: etcd's encoder and field names,
// one line per message. The function it returns flushes and closes what was opened.
func (c *Config) BuildLogger() (*zap.Logger, func(), error) {
	level, err := zapcore.ParseLevel(c.LogLevel)
	if err != nil {
		return nil, nil, fmt.Errorf("--log-level: %w", err)
	}
	ec := logutil.DefaultZapLoggerConfig.EncoderConfig
	enc := zapcore.NewJSONEncoder(ec)
	if c.LogFormat == logutil.ConsoleLogFormat {
		enc = zapcore.NewConsoleEncoder(ec)
	}
	sink, closeSink, err := c.logSink()
	if err != nil {
		return nil, nil, err
	}
	// etcd's sampling: of one message, the first 100 in a second and then every hundredth, so that
	// a fault that repeats itself does not become a flood.
	core := zapcore.NewSamplerWithOptions(zapcore.NewCore(enc, sink, zap.NewAtomicLevelAt(level)), time.Second, 100, 100)
	lg := zap.New(core, zap.AddCaller(), zap.AddStacktrace(zapcore.DPanicLevel), zap.ErrorOutput(zapcore.Lock(os.Stderr)))
	return lg, func() {
		_ = lg.Sync() // stderr may not support it
		closeSink()
	}, nil
}

// logSink opens the outputs.
func (c *Config) logSink() (zapcore.WriteSyncer, func(), error) {
	var files []string
	var sinks []zapcore.WriteSyncer
	for _, out := range c.LogOutputs {
		switch out {
		case logDefault, logStderr, logStdout, logJournal:
			if len(c.LogOutputs) > 1 && (out == logDefault || out == logJournal) {
				return nil, nil, fmt.Errorf("multi logoutput for %q is not supported yet", out)
			}
		default:
			files = append(files, out)
		}
		switch out {
		case logDefault, logStderr:
			sinks = append(sinks, zapcore.Lock(os.Stderr))
		case logStdout:
			sinks = append(sinks, zapcore.Lock(os.Stdout))
		case logJournal:
			if !journal.Enabled() {
				return nil, nil, fmt.Errorf("--log-outputs=%s: there is no journal on this machine", out)
			}
			sinks = append(sinks, zapcore.AddSync(journalWriter{}))
		}
	}
	closeFiles := func() {}
	switch {
	case c.EnableLogRotation:
		if len(files) != 1 {
			return nil, nil, errors.New("--log-outputs requires a single file path when --log-rotate-config-json is defined")
		}
		rot := &lumberjack.Logger{}
		if err := json.Unmarshal([]byte(c.LogRotationJSON), rot); err != nil {
			return nil, nil, fmt.Errorf("invalid log rotation config: %w", err)
		}
		rot.Filename = files[0]
		sinks = append(sinks, zapcore.AddSync(rot))
		closeFiles = func() { _ = rot.Close() } // the last line is written; nobody is left to tell
	case len(files) > 0:
		s, closeAll, err := zap.Open(files...)
		if err != nil {
			return nil, nil, fmt.Errorf("--log-outputs: %w", err)
		}
		sinks = append(sinks, s)
		closeFiles = closeAll
	}
	return zapcore.NewMultiWriteSyncer(sinks...), closeFiles, nil
}

// journalWriter sends each line to systemd's journal with the priority of its level. A line that
// is not JSON (--log-format=console) has priority "info".
type journalWriter struct{}

func (journalWriter) Write(line []byte) (int, error) {
	var l struct {
		Level  zapcore.Level `json:"level"`
		Caller string        `json:"caller"`
	}
	pri := journal.PriInfo
	if json.Unmarshal(line, &l) == nil {
		switch l.Level {
		case zapcore.DebugLevel:
			pri = journal.PriDebug
		case zapcore.WarnLevel:
			pri = journal.PriWarning
		case zapcore.ErrorLevel:
			pri = journal.PriErr
		case zapcore.DPanicLevel, zapcore.PanicLevel, zapcore.FatalLevel:
			pri = journal.PriCrit
		}
	}
	err := journal.Send(string(line), pri, map[string]string{"PACKAGE": l.Caller, "SYSLOG_IDENTIFIER": "braid"})
	if err != nil {
		return os.Stderr.Write(line)
	}
	return len(line), nil
}
