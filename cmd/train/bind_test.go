package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"moetor/comm/launch"
)

func TestCoresPerRank(t *testing.T) {
	for _, c := range []struct {
		bind                  string
		ranks, threads, cores int
		want                  int // -1: refused
	}{
		{"auto", 2, 0, 2, 1},
		{"auto", 2, 1, 2, 1},
		{"auto", 3, 0, 8, 2},
		{"auto", 2, 1, 4, 0}, // cores left to others
		{"auto", 4, 0, 2, 0}, // too few cores
		{"auto", 2, 2, 2, 0},
		{"auto", 1, 0, 4, 0}, // nothing to keep apart
		{"auto", 2, 0, 0, 0}, // no cores of its own
		{"cores", 2, 1, 4, 1},
		{"cores", 1, 0, 4, 4},
		{"cores", 2, 2, 2, -1},
		{"cores", 4, 0, 2, -1},
		{"cores", 2, 0, 0, -1},
		{"none", 2, 0, 2, 0},
	} {
		got, err := coresPerRank(c.bind, c.ranks, c.threads, c.cores)
		if err != nil {
			got = -1
		}
		if got != c.want {
			t.Errorf("%+v: %d (%v)", c, got, err)
		}
	}
}

// TestBind: ranks say in their logs which cores they have; the number of threads does not depend on that.
func TestBind(t *testing.T) {
	cores := launch.Cores()
	if len(cores) < 2 || ownCores() == 0 {
		t.Skip("no cores of its own for each of two ranks")
	}
	config := tinyConfig(t)
	share := len(cores) / 2
	for _, bind := range []string{"auto", "none"} {
		dir := t.TempDir()
		mustTrain(t, "launch", "-n", "2", "--config", config, "--out", dir, "--set", "stages.0.steps=2", "--bind", bind)
		for rank := range 2 {
			own := cores
			if bind == "auto" {
				own = cores[rank*share:][:share]
			}
			text := fmt.Sprint(own)
			if len(own) > 1 { // the log quotes what has spaces
				text = strconv.Quote(text)
			}
			want := fmt.Sprintf("threads=%d cores=%s\n", share, text)
			if b, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank-%d.log", rank))); err != nil || !strings.Contains(string(b), want) {
				t.Errorf("--bind %s: rank %d: no %q in %s (%v)", bind, rank, want, b, err)
			}
		}
	}
}
