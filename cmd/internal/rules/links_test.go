package rules

import (
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// root is the repository, seen from this folder.
const root = "../../.."

var (
	link    = regexp.MustCompile(`\[[^\]]*\]\(([^)\s]+)\)`)
	fence   = regexp.MustCompile("(?ms)^```.*?^```")
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	notSlug = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// anchors returns the anchors that a Markdown viewer makes of the headings.
func anchors(text string) map[string]bool {
	m := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		s := notSlug.ReplaceAllString(strings.ToLower(h[1]), "")
		m[strings.ReplaceAll(strings.TrimSpace(s), " ", "-")] = true
	}
	return m
}

// brokenLinks returns the relative links of a document that lead nowhere.
func brokenLinks(path string) ([]string, int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, 0, err
	}
	text := fence.ReplaceAllString(string(b), "")
	var broken []string
	n := 0
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		u, err := url.Parse(m[1])
		if err != nil {
			broken = append(broken, m[1])
			continue
		}
		if u.Scheme != "" {
			continue
		}
		n++
		target := path
		if u.Path != "" {
			target = filepath.Join(filepath.Dir(path), filepath.FromSlash(u.Path))
		}
		fi, err := os.Stat(target)
		if err != nil {
			broken = append(broken, m[1])
			continue
		}
		if u.Fragment != "" && !fi.IsDir() {
			tb, err := os.ReadFile(target)
			if err != nil {
				return nil, n, err
			}
			if !anchors(string(tb))[u.Fragment] {
				broken = append(broken, m[1])
			}
		}
	}
	return broken, n, nil
}

func TestDocumentLinks(t *testing.T) {
	docs, links := 0, 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin" || d.Name() == "testdata" || strings.HasSuffix(d.Name(), ".braid")) {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".md") {
			return nil
		}
		docs++
		broken, n, err := brokenLinks(path)
		if err != nil {
			return err
		}
		links += n
		for _, b := range broken {
			t.Errorf("%s: %s leads nowhere", path, b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if docs < 8 || links < 10 {
		t.Errorf("only %d documents with %d links were found", docs, links)
	}
}

// TestBrokenLinksAreSeen plants some.
func TestBrokenLinksAreSeen(t *testing.T) {
	dir := t.TempDir()
	text := "# Top\n## A heading, here\n[ok](a.md) [ok](#a-heading-here) [ok](https://x.example/y) [gone](b.md) [gone](a.md#no)\n```\n[code](c.md)\n```\n"
	path := filepath.Join(dir, "a.md")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	broken, _, err := brokenLinks(path)
	if err != nil || strings.Join(broken, " ") != "b.md a.md#no" {
		t.Errorf("broken links %q, %v", broken, err)
	}
}
