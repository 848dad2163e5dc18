package config

import (
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// UsageError is a command line that cannot be understood; the program exits with status 2, as
// etcd does. Every other error of Parse is a configuration error: status 1.
type UsageError struct{ Msg string }

func (e *UsageError) Error() string { return e.Msg }

// Notice is something Parse has to say before there is a logger.
type Notice struct {
	Level  zapcore.Level
	Text   string
	Fields []zap.Field
}

// Parsed is the outcome of Parse.
type Parsed struct {
	Config  *Config // filled in, not validated; nil when Help or Version is set
	File    string  // where the configuration was read from, "" for flags and environment
	Notices []Notice
	Help    bool
	Version bool
}

// Parse reads the command line (without the program's name) and the environment ("K=V" strings).
// A flag wins over its environment variable, which wins over the default; a flag given twice has
// its last value. With --config-file or ETCD_CONFIG_FILE all other flags and variables are
// ignored, as in etcd.
func Parse(args, environ []string) (*Parsed, error) {
	given, order, err := parseFlags(args)
	if err != nil {
		return nil, err
	}
	p := &Parsed{}
	if given["help"] == "true" {
		p.Help = true
		return p, nil
	}
	if given["version"] == "true" {
		p.Version = true
		return p, nil
	}
	env := environment(environ)
	file, ok := given["config-file"]
	if !ok {
		file = env["ETCD_CONFIG_FILE"]
	}
	c := &Config{}
	if file != "" {
		p.File = file
		err = p.readFile(c, file)
	} else {
		err = p.readFlags(c, given, order, env)
	}
	if err != nil {
		return nil, err
	}
	c.Fill()
	p.Config = c
	return p, nil
}

// collector is the pflag.Value of every flag: it notes what was given and decides nothing.
type collector struct {
	flag  *Flag
	given map[string]string
	order *[]string
}

func (v *collector) String() string { return v.flag.Default }
func (v *collector) Type() string   { return v.flag.Kind.String() }
func (v *collector) Set(s string) error {
	if err := v.flag.check(s); err != nil {
		return err
	}
	if _, again := v.given[v.flag.Name]; !again {
		*v.order = append(*v.order, v.flag.Name)
	}
	v.given[v.flag.Name] = s
	return nil
}

// flagSet returns a pflag set with a row for every flag of the table; the values given are stored
// in the map under the flags' names.
func flagSet(given map[string]string, order *[]string) *pflag.FlagSet {
	fs := pflag.NewFlagSet("braid", pflag.ContinueOnError)
	fs.SortFlags = false
	fs.Usage = func() {}
	for i := range Table {
		f := &Table[i]
		pf := fs.VarPF(&collector{f, given, order}, f.Name, "", f.Usage)
		if f.Kind == Bool {
			pf.NoOptDefVal = "true"
		}
	}
	help := &Flag{Name: "help", Kind: Bool, Default: "false"}
	fs.VarPF(&collector{help, given, order}, "help", "h", "Print this text.").NoOptDefVal = "true"
	return fs
}

// parseFlags returns the values given on the command line and the order in which flags appeared.
func parseFlags(args []string) (map[string]string, []string, error) {
	given := map[string]string{}
	var order []string
	fs := flagSet(given, &order)
	if err := fs.Parse(longNames(args)); err != nil {
		return nil, nil, usageError(err)
	}
	if fs.NArg() > 0 {
		return nil, nil, &UsageError{fmt.Sprintf("%q is not a valid flag", fs.Arg(0))}
	}
	return given, order, nil
}

// longNames turns -name into --name for names of the table: etcd accepts both.
func longNames(args []string) []string {
	out := make([]string, len(args))
	copy(out, args)
	for i, a := range out {
		if a == "--" {
			break
		}
		if len(a) > 2 && a[0] == '-' && a[1] != '-' {
			name, _, _ := strings.Cut(a[1:], "=")
			if name == "help" || Lookup(name) != nil || (name[0] != 'h' && Nearest(name) != "") {
				out[i] = "-" + a
			}
		}
	}
	return out
}

func usageError(err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		name := unknown.GetSpecifiedName()
		msg := fmt.Sprintf("unknown flag --%s", name)
		if near := Nearest(name); near != "" {
			msg += fmt.Sprintf("; did you mean --%s?", near)
		}
		return &UsageError{msg + " (braid --help lists all flags)"}
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		return &UsageError{fmt.Sprintf("invalid value %q for flag -%s: %v", invalid.GetValue(), invalid.GetFlag().Name, errors.Unwrap(invalid))}
	}
	return &UsageError{err.Error()}
}

// readFlags applies the command line and the environment.
func (p *Parsed) readFlags(c *Config, given map[string]string, order []string, env map[string]string) error {
	for _, name := range order {
		if err := p.apply(c, Lookup(name), given[name]); err != nil {
			return err
		}
	}
	used := map[string]bool{"ETCD_UNSUPPORTED_ARCH": true}
	for i := range Table {
		f := &Table[i]
		v := env[f.Env()]
		if v == "" {
			continue
		}
		used[f.Env()] = true
		if f.Name == "version" {
			p.warn("cannot set special environment variable", zap.String("key", f.Env()), zap.String("value", v))
			continue
		}
		if _, ok := given[f.Name]; ok {
			p.warn("environment variable is shadowed by the command-line flag", zap.String("environment-variable", f.Env()))
			continue
		}
		if err := p.apply(c, f, v); err != nil {
			return fmt.Errorf("%s: %w", f.Env(), err)
		}
		p.Notices = append(p.Notices, Notice{zapcore.InfoLevel, "recognized and used environment variable",
			[]zap.Field{zap.String("variable-name", f.Env()), zap.String("variable-value", v)}})
	}
	var unknown []string
	for k := range env {
		if !used[k] {
			unknown = append(unknown, k)
		}
	}
	sort.Strings(unknown)
	for _, k := range unknown {
		p.warn("unrecognized environment variable", zap.String("environment-variable", k+"="+env[k]))
	}
	return nil
}

// apply gives one flag its value and notes what the user has to know about it.
func (p *Parsed) apply(c *Config, f *Flag, v string) error {
	if err := f.apply(c, v); err != nil {
		return err
	}
	if f.Fate == Inert {
		p.warn("flag is accepted but has no effect: "+f.Why, zap.String("flag", f.Name), zap.String("value", v))
	}
	if f.note != nil {
		if text := f.note(v); text != "" {
			p.warn(text, zap.String("flag", f.Name), zap.String("value", v))
		}
	}
	return nil
}

func (p *Parsed) warn(text string, fields ...zap.Field) {
	p.Notices = append(p.Notices, Notice{zapcore.WarnLevel, text, fields})
}

// environment keeps the variables that begin with ETCD_.
func environment(environ []string) map[string]string {
	env := map[string]string{}
	for _, kv := range environ {
		k, v, ok := strings.Cut(kv, "=")
		if ok && strings.HasPrefix(k, "ETCD_") {
			env[k] = v
		}
	}
	return env
}

// Nearest returns the flag whose name is closest to name, "" when none is close: at most two
// edits, or a third of the name's length for long ones.
func Nearest(name string) string {
	best, bestD := "", max(2, len(name)/3)+1
	for i := range Table {
		if f := &Table[i]; f.Why != whyOldName {
			if d := EditDistance(name, f.Name); d < bestD {
				best, bestD = f.Name, d
			}
		}
	}
	return best
}

// EditDistance is the number of single-byte insertions, deletions and replacements, and swaps of
// neighbours, that turn a into b.
func EditDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(a)][len(b)]
}

// Usage is the text of --help.
func Usage() string {
	var b strings.Builder
	heading := map[string]string{
		"name": "Member:", "initial-advertise-peer-urls": "Clustering:", "region-split-keys": "Regions:",
		"cert-file": "Security:", "logger": "Logging:", "enable-pprof": "Serving:",
		"quota-backend-bytes":    "Refused until built (other values than the default):",
		"warning-apply-duration": "Accepted for etcd's sake, without effect:", "config-file": "Other:",
	}
	for i := range Table {
		f := &Table[i]
		if f.hidden || f.Why == whyOldName {
			continue
		}
		if h := heading[f.Name]; h != "" {
			fmt.Fprintf(&b, "\n%s\n", h)
		}
		fmt.Fprintf(&b, "  --%s", f.Name)
		if f.Kind != Bool {
			fmt.Fprintf(&b, " %s", f.Kind)
		}
		if f.Default != "" && f.Default != "false" {
			fmt.Fprintf(&b, " (default %s)", f.Default)
		}
		fmt.Fprintf(&b, "\n        %s", f.Usage)
		if f.Fate != Implemented {
			fmt.Fprintf(&b, " [%s: %s]", f.Fate, f.Why)
		}
		b.WriteByte('\n')
	}
	return strings.TrimPrefix(b.String(), "\n")
}

// readFile applies a YAML file.
func (p *Parsed) readFile(c *Config, path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("--config-file: %w", err)
	}
	if err := p.readYAML(c, b); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	p.Notices = append(p.Notices, Notice{zapcore.InfoLevel,
		"loaded server configuration, other configuration command line flags and environment variables will be ignored if provided",
		[]zap.Field{zap.String("path", path)}})
	return nil
}
