//go:build cgo

package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func names(t *testing.T, root string) string {
	t.Helper()
	dirs, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, d := range dirs {
		list = append(list, d.Name())
	}
	return strings.Join(list, " ")
}

func TestPrune(t *testing.T) {
	root := t.TempDir()
	for step := int64(1); step <= 5; step++ {
		mustSave(t, root, "pretrain", step, 2)
	}
	mustSave(t, root, "sft", 1, 1)
	for _, name := range []string{"pretrain-00000009.partial", "pretrain-00000010", "other", "pretrain-7", "sft-00000002.partial"} {
		if err := os.Mkdir(filepath.Join(root, name), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := Prune(root, "pretrain", 2); err != nil {
		t.Fatal(err)
	}
	// 10 is not complete, so it neither counts nor goes; what is not ours, or of another stage, is left alone.
	want := "other pretrain-00000004 pretrain-00000005 pretrain-00000010 pretrain-7 sft-00000001 sft-00000002.partial"
	if got := names(t, root); got != want {
		t.Errorf("left %s\nwant %s", got, want)
	}
	wantError(t, Prune(root, "pretrain", 0), "keep=0")

	// keep=1 with a damaged newest one: the sound one stays.
	flip(t, filepath.Join(Dir(root, "pretrain", 5), fileName(0)), 5000)
	wantError(t, Prune(root, "pretrain", 1), "older ones stay", "pretrain-00000005", "damaged")
	r, skipped, err := OpenLatest(root, "pretrain")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := holds(r, smallModel(), 4); err != nil {
		t.Error(err)
	}
	if len(skipped) != 2 || !strings.Contains(skipped[0], "pretrain-00000010") || !strings.Contains(skipped[1], "pretrain-00000005") {
		t.Errorf("skipped %q", skipped)
	}
}

func TestOpenLatest(t *testing.T) {
	root := filepath.Join(t.TempDir(), "none")
	_, _, err := OpenLatest(root, "pretrain")
	if !errors.Is(err, ErrNotFound) {
		t.Errorf("no directory: %v", err)
	}
	wantError(t, err, "of stage pretrain", root)
	mustSave(t, root, "pretrain", 99, 1)
	mustSave(t, root, "pretrain", 100_000_000, 1) // sorts before 99 as text
	mustSave(t, root, "sft", 1, 1)
	for _, c := range []struct{ stage, want string }{{"pretrain", "pretrain-100000000"}, {"sft", "sft-00000001"}, {"", "pretrain-100000000"}} {
		r, skipped, err := OpenLatest(root, c.stage)
		if err != nil || len(skipped) > 0 {
			t.Fatal(skipped, err)
		}
		if filepath.Base(r.Dir()) != c.want {
			t.Errorf("stage %q: %s, want %s", c.stage, r.Dir(), c.want)
		}
		r.Close()
	}
	// A copy under another name opens by name, but is not taken for the step it claims.
	if err := os.Rename(Dir(root, "pretrain", 99), Dir(root, "sft", 7)); err != nil {
		t.Fatal(err)
	}
	r, skipped, err := OpenLatest(root, "sft")
	if err != nil || len(skipped) != 1 || !strings.Contains(skipped[0], "holds stage pretrain step 99") {
		t.Fatal(skipped, err)
	}
	r.Close()
	mustOpen(t, Dir(root, "sft", 7))
}

// TestSameStepAgain: a run that resumed from an earlier checkpoint comes past the same step again.
func TestSameStepAgain(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 3)
	if err := save(root, "pretrain", 1, smallModel(), 2, 50); err != nil { // another mesh, too
		t.Fatal(err)
	}
	if got := names(t, root); got != "pretrain-00000001" {
		t.Errorf("left %s", got)
	}
	dir := Dir(root, "pretrain", 1)
	r := mustOpen(t, dir)
	if err := errors.Join(holds(r, smallModel(), 50), r.Verify(context.Background())); err != nil {
		t.Error(err)
	}
	if len(r.Files()) != 2 || exists(filepath.Join(dir, fileName(2))) {
		t.Errorf("files of the earlier save are left")
	}
	// A refused second save leaves the first in place.
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	if err := Commit(dir, testMeta("pretrain", 1, 1), []File{{Name: fileName(0), SHA256: strings.Repeat("0", 64), Size: 1}}); err == nil {
		t.Error("a file that was never written was committed")
	}
	if err := holds(mustOpen(t, dir), smallModel(), 50); err != nil {
		t.Error(err)
	}
	// An incomplete one in the way is replaced.
	if err := os.Remove(filepath.Join(dir, manifestName)); err != nil {
		t.Fatal(err)
	}
	mustSave(t, root, "pretrain", 1, 1)
	if err := holds(mustOpen(t, dir), smallModel(), 1); err != nil {
		t.Error(err)
	}
}

func TestOtherToolsReadTheFiles(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 3, 2)
	dir := Dir(root, "pretrain", 3)
	t.Run("h5dump", func(t *testing.T) {
		if _, err := exec.LookPath("h5dump"); err != nil {
			t.Skip("h5dump is not installed")
		}
		for rank := range 2 {
			out, err := exec.Command("h5dump", "-H", filepath.Join(dir, fileName(rank))).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for _, want := range []string{`GROUP "exp_avg_sq"`, `DATASET "model.layers.0.mlp.gate.e_score_correction_bias"`, "H5T_IEEE_F32LE", "H5T_STD_U16LE"} {
				if !strings.Contains(string(out), want) {
					t.Errorf("rank %d: no %s in %s", rank, want, out)
				}
			}
		}
	})
	t.Run("h5py", func(t *testing.T) {
		python := ""
		for _, p := range []string{"/usr/bin/python3", "python3"} {
			if exec.Command(p, "-c", "import h5py").Run() == nil {
				python = p
				break
			}
		}
		if python == "" {
			t.Skip("h5py is not installed")
		}
		// The script joins the slices by their attributes and prints what it finds, for this test to judge.
		const script = `
import sys, json, h5py
out = {"tensors": {}, "kinds": [], "bf16": 0}
for path in sys.argv[1:]:
    with h5py.File(path, "r") as f:
        assert f.attrs["format"] == "moetor-checkpoint" and f.attrs["version"] == 1
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            for name, d in f[kind].items():
                values = d[()]
                if d.attrs["dtype"] == "BF16":
                    assert d.dtype == "<u2" and kind != "model"
                    values = (values.astype("<u4") << 16).view("<f4")
                    out["bf16"] += 1
                else:
                    assert d.dtype == "<f4" and d.attrs["dtype"] == "F32"
                t = out["tensors"].setdefault(kind + "/" + name, {"shape": d.attrs["shape"].tolist(), "rows": []})
                t["rows"].append([int(d.attrs["row0"]), values.ravel().tolist()])
        if "state" in f:
            s = f["state"]
            out["state"] = {k: (v if isinstance(v, str) else int(v)) for k, v in s.attrs.items()}
            out["config"] = s["config"].asstr()[()]
            out["tokenizer"] = s["tokenizer"][()].tolist()
            out["losses"] = json.loads(s["extra/losses"].asstr()[()])
print(json.dumps(out))
`
		out, err := exec.Command(python, "-c", script, filepath.Join(dir, fileName(0)), filepath.Join(dir, fileName(1))).Output()
		if err != nil {
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				t.Fatalf("%v: %s", err, exit.Stderr)
			}
			t.Fatal(err)
		}
		var got struct {
			Tensors map[string]struct {
				Shape []int
				Rows  [][2]json.RawMessage
			}
			BF16      int
			State     map[string]any
			Config    string
			Tokenizer []int
			Losses    []float64
		}
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if got.BF16 != 4 { // both moments of one tensor on two ranks
			t.Errorf("%d datasets in BF16, want 4", got.BF16)
		}
		if len(got.Tensors) != len(smallModel()) {
			t.Errorf("%d tensors, want %d", len(got.Tensors), len(smallModel()))
		}
		for _, ti := range smallModel() {
			group := map[Kind]string{Weight: "model/", ExpAvg: "optimizer/exp_avg/", ExpAvgSq: "optimizer/exp_avg_sq/"}[ti.Kind]
			tensor := got.Tensors[group+ti.Name]
			if fmt.Sprint(tensor.Shape) != fmt.Sprint(ti.Shape) {
				t.Errorf("%v: shape %v", ti, tensor.Shape)
			}
			found := make([]float32, ti.Shape[0]*ti.rowLen())
			for _, r := range tensor.Rows {
				var row0 int
				var data []float32
				if err := errors.Join(json.Unmarshal(r[0], &row0), json.Unmarshal(r[1], &data)); err != nil {
					t.Fatal(err)
				}
				copy(found[row0*ti.rowLen():], data)
			}
			if i := differ(found, full(ti, 3)); i >= 0 {
				t.Errorf("%v: differs at %d", ti, i)
			}
		}
		for k, v := range map[string]any{"stage": "pretrain", "step": 3.0, "global_step": 8.0, "tokens": 12288.0, "samples": 48.0,
			"mesh_world": 2.0, "params": 12345.0, "active_params": 2345.0} {
			if got.State[k] != v {
				t.Errorf("state %s = %v, want %v", k, got.State[k], v)
			}
		}
		if want := "run:\n  out: runs/żółw\n"; got.Config != want {
			t.Errorf("config %q, want %q", got.Config, want)
		}
		if len(got.Tokenizer) != 6 || got.Tokenizer[3] != 0 || len(got.Losses) != 2 || got.Losses[1] != 1.25 {
			t.Errorf("tokenizer %v, losses %v", got.Tokenizer, got.Losses)
		}
	})
}
