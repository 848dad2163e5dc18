package config

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ParseSplitKeys reads --region-split-keys: keys separated by commas, in any order. A key that
// begins with 0x is hexadecimal; any other is taken as it stands, except that a backslash
// introduces \xNN (one byte), \, (a comma) or \\ (a backslash). The result is sorted; an empty
// key and a key given twice are errors, because no region could lie between them.
func ParseSplitKeys(s string) ([][]byte, error) {
	if s == "" {
		return nil, nil
	}
	var keys [][]byte
	for rest, more := s, true; more; {
		var key []byte
		var err error
		key, rest, more, err = nextSplitKey(rest)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	slices.SortFunc(keys, bytes.Compare)
	for i := 1; i < len(keys); i++ {
		if bytes.Equal(keys[i-1], keys[i]) {
			return nil, fmt.Errorf("split key %s is given twice", formatSplitKey(keys[i]))
		}
	}
	return keys, nil
}

// nextSplitKey takes one key off s; more says whether a comma followed it.
func nextSplitKey(s string) (key []byte, rest string, more bool, err error) {
	if strings.HasPrefix(s, "0x") {
		digits := s[2:]
		if i := strings.IndexByte(digits, ','); i >= 0 {
			digits, rest, more = digits[:i], digits[i+1:], true
		}
		if key, err = hex.DecodeString(digits); err != nil || len(key) == 0 {
			return nil, "", false, fmt.Errorf("%q is not a hexadecimal key", "0x"+digits)
		}
		return key, rest, more, nil
	}
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == ',':
			rest, more = s[i+1:], true
		case s[i] != '\\':
			key = append(key, s[i])
			continue
		case i+1 < len(s) && (s[i+1] == ',' || s[i+1] == '\\'):
			key = append(key, s[i+1])
			i++
			continue
		case i+3 < len(s) && s[i+1] == 'x':
			b, perr := strconv.ParseUint(s[i+2:i+4], 16, 8)
			if perr != nil {
				return nil, "", false, fmt.Errorf("bad escape %q in a split key", s[i:i+4])
			}
			key = append(key, byte(b))
			i += 3
			continue
		default:
			return nil, "", false, fmt.Errorf(`bad escape at %q in a split key (use \xNN, \, or \\)`, s[i:])
		}
		break
	}
	if len(key) == 0 {
		return nil, "", false, fmt.Errorf("a split key is empty")
	}
	return key, rest, more, nil
}

// FormatSplitKeys writes keys so that ParseSplitKeys reads them back.
func FormatSplitKeys(keys [][]byte) string {
	parts := make([]string, len(keys))
	for i, k := range keys {
		parts[i] = formatSplitKey(k)
	}
	return strings.Join(parts, ",")
}

func formatSplitKey(k []byte) string {
	if bytes.HasPrefix(k, []byte("0x")) || bytes.ContainsFunc(k, func(r rune) bool {
		return r < ' ' || r > '~' || r == ',' || r == '\\'
	}) {
		return "0x" + hex.EncodeToString(k)
	}
	return string(k)
}
