package config

import (
	"encoding/json"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"go.uber.org/zap"
	"sigs.k8s.io/yaml"
)

// readYAML applies a configuration file: flag names as keys, and the TLS settings of clients and
// peers in two blocks. As in etcd a file that sets listen-client-urls only still advertises the
// default, and durations may be nanoseconds.
func (p *Parsed) readYAML(c *Config, text []byte) error {
	raw, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}
	var top map[string]any
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.UseNumber() // a quota does not fit in a float
	if err := dec.Decode(&top); err != nil {
		return fmt.Errorf("the file must be a mapping of flag names to values: %w", err)
	}
	for _, key := range sortedKeys(top) {
		v := top[key]
		switch key {
		case "client-transport-security":
			err = p.readSecurity(c, key, "", v)
		case "peer-transport-security":
			err = p.readSecurity(c, key, "peer-", v)
		case "discovery-config":
			err = fmt.Errorf("discovery-config is refused: %s", whyDiscovery)
		default:
			err = p.readKey(c, key, key, v)
		}
		if err != nil {
			return err
		}
	}
	if len(c.AdvertiseClientURLs) == 0 {
		return Lookup("advertise-client-urls").apply(c, defaultClientURL)
	}
	return nil
}

// readKey applies one key; flag is the name of the flag that it stands for.
func (p *Parsed) readKey(c *Config, key, flag string, v any) error {
	f := Lookup(flag)
	if f == nil || flag == "config-file" || flag == "version" {
		msg := "unknown key in the configuration file is ignored"
		if near := Nearest(flag); near != "" {
			msg += "; did you mean " + near + "?"
		}
		p.warn(msg, zap.String("key", key))
		return nil
	}
	s, err := scalar(f, v)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if s == "" && f.Kind != String && f.Kind != List || v == nil {
		return nil // "key:" without a value
	}
	if s == "" && f.Default != "" {
		return nil // etcd's sample file writes "" for "the default"
	}
	return p.apply(c, f, s)
}

// readSecurity applies one of the two TLS blocks.
func (p *Parsed) readSecurity(c *Config, block, prefix string, v any) error {
	if v == nil {
		return nil
	}
	m, ok := v.(map[string]any)
	if !ok {
		return fmt.Errorf("invalid %s: it must be a mapping", block)
	}
	for _, key := range sortedKeys(m) {
		name := prefix + key
		switch key {
		case "allowed-cn", "allowed-hostname":
			name = prefix + "cert-" + key
			if prefix == "" {
				name = "client-cert-" + key
			}
		}
		// Two settings of client connections have no flag of their own in etcd either.
		switch {
		case prefix == "" && key == "allowed-cn":
			f := Flag{Name: name, Kind: List, value: list(func(c *Config) *[]string { return &c.ClientTLS.AllowedCNs })}
			s, err := scalar(&f, m[key])
			if err != nil {
				return fmt.Errorf("%s.%s: %w", block, key, err)
			}
			if err := f.apply(c, s); err != nil {
				return err
			}
		case prefix == "" && key == "skip-client-san-verification":
			b, ok := m[key].(bool)
			if !ok {
				return fmt.Errorf("%s.%s must be true or false", block, key)
			}
			c.ClientTLS.SkipClientSANVerify = b
		default:
			if err := p.readKey(c, block+"."+key, name, m[key]); err != nil {
				return err
			}
		}
	}
	return nil
}

// scalar writes a YAML value the way the command line would.
func scalar(f *Flag, v any) (string, error) {
	switch t := v.(type) {
	case nil:
		return "", nil
	case string:
		return t, nil
	case bool:
		return strconv.FormatBool(t), nil
	case json.Number:
		if f.Kind == Duration {
			return t.String() + "ns", nil
		}
		return t.String(), nil
	case []any:
		if f.Kind != List {
			return "", fmt.Errorf("must not be a list")
		}
		parts := make([]string, len(t))
		for i, e := range t {
			s, ok := e.(string)
			if !ok {
				return "", fmt.Errorf("must be a list of strings")
			}
			parts[i] = s
		}
		return strings.Join(parts, ","), nil
	}
	return "", fmt.Errorf("must not be a mapping")
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
