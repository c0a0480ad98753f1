package checkpoint

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
)

func testMeta(stage string, step int64, world int) *Meta {
	return &Meta{
		Engine: "test", Stage: stage, Step: step, GlobalStep: step + 5, Tokens: step * 4096, Samples: step * 16,
		Seed: math.MaxUint64 - 3, RNG: []byte{0, 1, 255}, Data: "sha256:ab", Tokenizer: []byte("tok\x00en"),
		Config: "run:\n  out: runs/żółw\n", Params: 12345, ActiveParams: 2345, Mesh: Mesh{World: world, Pipeline: 1, Data: world, Expert: 1},
		Extra: map[string]json.RawMessage{"losses": json.RawMessage(`[ 1.5, 1.25 ]`), "note": json.RawMessage(`"<a>"`)},
	}
}

// wantError checks that an error is one line and has all the given parts.
func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
	if strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "code -1") {
		t.Errorf("error %q: want one line that says the cause", err)
	}
}

// TestSealLeavesItsInput: the bytes behind a body in the same array are somebody else's.
func TestSealLeavesItsInput(t *testing.T) {
	array := []byte(strings.Repeat("x", 300))
	sealed := seal(array[:100])
	if string(array) != strings.Repeat("x", 300) {
		t.Errorf("the caller's memory became %q", array)
	}
	if len(sealed) != 100+sealLen || string(sealed[:100]) != string(array[:100]) {
		t.Errorf("sealed %q", sealed)
	}
}

// FuzzManifest: run it by a number of executions (-fuzztime 500000x). Up to Go 1.26 a time limit may end a sound run with
// "context deadline exceeded" on a busy machine (go.dev/issue/75804); a true finding always leaves a file in testdata.
func FuzzManifest(f *testing.F) {
	m := &manifest{Format: formatName, Version: FormatVersion, Meta: *testMeta("pretrain", 1, 1), Files: []File{{
		Name: fileName(0), Size: 10, SHA256: strings.Repeat("ab", 32),
		Slices: []SliceInfo{{Info{"a", Weight, []int{3, 2}}, dtypeF32, 0, 3}, {Info{"a", ExpAvg, []int{3, 2}}, dtypeF32, 0, 3}},
	}}}
	data, err := encodeManifest(m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data, false)
	f.Add(data[:len(data)-sealLen], true)
	f.Add([]byte(`{"format":"moetor-checkpoint","version":1,"files":[{"slices":[{"shape":[-1]}]}]`), true)
	f.Fuzz(func(t *testing.T, data []byte, sealed bool) {
		if sealed {
			data = seal(data)
		}
		m, err := decodeManifest(data)
		if err != nil {
			return
		}
		// Whatever is accepted covers every tensor once, and survives being written again.
		ts, err := m.index()
		if err != nil {
			t.Fatal(err)
		}
		for _, ti := range ts {
			rows := 0
			for _, p := range ti.pieces {
				rows += p.Rows
			}
			if rows != ti.Shape[0] {
				t.Fatalf("%v has %d rows", ti.Info, rows)
			}
		}
		again, err := encodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		if m2, err := decodeManifest(again); err != nil || !slices.EqualFunc(m.Files, m2.Files, func(a, b File) bool { return a.SHA256 == b.SHA256 }) {
			t.Fatalf("written again: %v", err)
		}
	})
}
