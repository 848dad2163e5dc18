package config

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"
)

// Fate says what giving a flag does.
type Fate uint8

const (
	// Implemented: the flag does what it does in etcd.
	Implemented Fate = iota
	// Inert: accepted with a warning; the thing it tunes does not exist here.
	Inert
	// Later: refused unless it is given its default, because what it asks for is not built yet
	// and pretending would break a promise.
	Later
)

func (f Fate) String() string { return [...]string{"implemented", "inert", "later"}[f] }

// Kind is the type of a flag's value as the help text names it.
type Kind uint8

const (
	String Kind = iota
	Int
	Uint
	Bool
	Duration
	List
)

func (k Kind) String() string {
	return [...]string{"string", "int", "uint", "bool", "duration", "list"}[k]
}

// Flag is one row of the table.
type Flag struct {
	Name    string
	Kind    Kind
	Default string
	Usage   string
	Fate    Fate
	// Why is shown when an inert or later flag is given.
	Why string
	// also lists values of a later flag, besides the default, that ask for nothing.
	also []string
	// choices are the only values that a flag without effect accepts; empty: any of its kind.
	choices []string
	// note says what the user has to know about a value, "" for nothing; may be nil.
	note func(v string) string
	// hidden flags are for tests and left out of the help text.
	hidden bool
	value  value // nil for flags that Parse handles itself and for those without effect
}

// Env is the environment variable of the flag.
func (f *Flag) Env() string {
	return "ETCD_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// deprecated is a note for whatever value is given: what etcd says of the flag, word for word.
func deprecated(text string) func(string) string {
	return func(string) string { return text }
}

// check parses v by kind only, so that inert and later flags still refuse nonsense.
func (f *Flag) check(v string) error {
	if len(f.choices) > 0 && !slices.Contains(f.choices, v) {
		return fmt.Errorf("invalid value %q", v)
	}
	var err error
	switch f.Kind {
	case Int:
		_, err = strconv.ParseInt(v, 0, 64)
	case Uint:
		_, err = strconv.ParseUint(v, 0, 64)
	case Bool:
		_, err = strconv.ParseBool(v)
	case Duration:
		_, err = time.ParseDuration(v)
	}
	return parseError(err)
}

// apply gives the flag the value v.
func (f *Flag) apply(c *Config, v string) error {
	if err := f.check(v); err != nil {
		return fmt.Errorf("invalid value %q for --%s: %w", v, f.Name, err)
	}
	switch f.Fate {
	case Later:
		if v != f.Default && !slices.Contains(f.also, v) {
			return fmt.Errorf("--%s=%s is refused: %s", f.Name, v, f.Why)
		}
	case Inert:
		if c.Inert == nil {
			c.Inert = map[string]string{}
		}
		c.Inert[f.Name] = v
	}
	if f.value != nil {
		if err := f.value.set(c, v); err != nil {
			return fmt.Errorf("invalid value %q for --%s: %w", v, f.Name, parseError(err))
		}
	}
	return nil
}

// field makes a log field of the flag's value.
func (f *Flag) field(v string) zap.Field {
	switch f.Kind {
	case Int, Uint:
		if n, err := strconv.ParseInt(v, 0, 64); err == nil {
			return zap.Int64(f.Name, n)
		}
	case Bool:
		if b, err := strconv.ParseBool(v); err == nil {
			return zap.Bool(f.Name, b)
		}
	case List:
		if v == "" {
			return zap.Strings(f.Name, []string{})
		}
		return zap.Strings(f.Name, strings.Split(v, ","))
	}
	return zap.String(f.Name, v)
}

// parseError strips the function name and the value from a strconv error; the caller names both
// the flag and the value.
func parseError(err error) error {
	if ne, ok := err.(*strconv.NumError); ok {
		return ne.Err
	}
	return err
}

// value ties a flag to a field of Config, in both directions.
type value interface {
	set(c *Config, v string) error
	get(c *Config) string
}

type field[T any] struct {
	at    func(c *Config) *T
	parse func(string) (T, error)
	print func(T) string
}

func (f field[T]) set(c *Config, v string) error {
	t, err := f.parse(v)
	if err == nil {
		*f.at(c) = t
	}
	return err
}

func (f field[T]) get(c *Config) string { return f.print(*f.at(c)) }

func text(at func(c *Config) *string) value {
	return field[string]{at, func(s string) (string, error) { return s, nil }, func(s string) string { return s }}
}

// oneOf is a text that must be one of the choices.
func oneOf(at func(c *Config) *string, choices ...string) value {
	return field[string]{at, func(s string) (string, error) {
		if !slices.Contains(choices, s) {
			return "", fmt.Errorf("must be one of %s", strings.Join(choices, ", "))
		}
		return s, nil
	}, func(s string) string { return s }}
}

func boolean(at func(c *Config) *bool) value {
	return field[bool]{at, strconv.ParseBool, strconv.FormatBool}
}

// inverted is a flag that is on by default: the field says that it is off, so that its zero value
// is the default.
func inverted(at func(c *Config) *bool) value {
	return field[bool]{at, func(s string) (bool, error) {
		b, err := strconv.ParseBool(s)
		return !b, err
	}, func(off bool) string { return strconv.FormatBool(!off) }}
}

// number must be positive: 0 would be taken for "use the default".
func number[T uint | uint32](at func(c *Config) *T, bits int) value {
	return field[T]{at, func(s string) (T, error) {
		n, err := strconv.ParseUint(s, 0, bits)
		if err == nil && n == 0 {
			err = fmt.Errorf("must be greater than 0")
		}
		return T(n), err
	}, func(n T) string { return strconv.FormatUint(uint64(n), 10) }}
}

// interval is a duration where the command line's 0 means "off"; off is stored as -1 because a
// zero field means "use the default".
func interval(at func(c *Config) *time.Duration) value {
	return field[time.Duration]{at, func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err == nil && d <= 0 {
			d = -1
		}
		return d, err
	}, func(d time.Duration) string {
		if d < 0 {
			return "0s"
		}
		return d.String()
	}}
}

// slack is an interval that must not be negative.
func slack(at func(c *Config) *time.Duration) value {
	f := interval(at).(field[time.Duration])
	off := f.parse
	f.parse = func(s string) (time.Duration, error) {
		if d, err := time.ParseDuration(s); err == nil && d < 0 {
			return 0, fmt.Errorf("must not be negative")
		}
		return off(s)
	}
	return f
}

// duration must not be negative; 0 means the default, as in etcd.
func duration(at func(c *Config) *time.Duration) value {
	return field[time.Duration]{at, func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err == nil && d < 0 {
			err = fmt.Errorf("must not be negative")
		}
		return d, err
	}, time.Duration.String}
}

func list(at func(c *Config) *[]string) value {
	return field[[]string]{at, func(s string) ([]string, error) {
		var out []string
		for _, e := range strings.Split(s, ",") {
			if e = strings.TrimSpace(e); e != "" && !slices.Contains(out, e) {
				out = append(out, e)
			}
		}
		return out, nil
	}, func(l []string) string { return strings.Join(l, ",") }}
}

// urls is a list of URLs, sorted and without repetitions; only some may be empty.
func urls(at func(c *Config) *[]url.URL, mayBeEmpty bool) value {
	return field[[]url.URL]{at, func(s string) ([]url.URL, error) {
		if strings.TrimSpace(s) == "" {
			if mayBeEmpty {
				return nil, nil
			}
			return nil, fmt.Errorf("at least one URL is needed")
		}
		us, err := types.NewURLs(strings.Split(s, ","))
		if err != nil {
			return nil, err
		}
		return slices.CompactFunc([]url.URL(us), func(a, b url.URL) bool { return a.String() == b.String() }), nil
	}, func(us []url.URL) string { return types.URLs(us).String() }}
}

func urlsMap(at func(c *Config) *types.URLsMap) value {
	return field[types.URLsMap]{at, func(s string) (types.URLsMap, error) {
		if strings.TrimSpace(s) == "" {
			return nil, nil
		}
		return types.NewURLsMap(s)
	}, func(m types.URLsMap) string { return m.String() }}
}

func splitKeys(at func(c *Config) *[][]byte) value {
	return field[[][]byte]{at, ParseSplitKeys, FormatSplitKeys}
}
