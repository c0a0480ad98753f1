//go:build cgo

package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// value is what element i of a tensor must hold at a step: bits that no two tensors, elements or steps share by chance.
func value(t Info, i int, step int64) float32 {
	h := uint32(2166136261)
	for _, b := range []byte(t.Name) {
		h = (h ^ uint32(b)) * 16777619
	}
	h = (h ^ uint32(t.Kind)) * 16777619
	h = (h ^ uint32(step)) * 16777619
	h = (h ^ uint32(i)) * 16777619
	v := float32(h>>8) / (1 << 16)
	if storedBF16(t) {
		v = math.Float32frombits(math.Float32bits(v) &^ 0xFFFF)
	}
	return v
}

// storedBF16 says which tensors of smallModel are stored in 2 bytes.
func storedBF16(t Info) bool { return t.Name == "model.cube" && t.Kind != Weight }

func full(t Info, step int64) []float32 {
	data := make([]float32, t.Shape[0]*t.rowLen())
	for i := range data {
		data[i] = value(t, i, step)
	}
	return data
}

// cut gives rank's slice when rows are dealt out over world ranks as evenly as can be.
func cut(t Info, data []float32, rank, world int) Slice {
	from, to := t.Shape[0]*rank/world, t.Shape[0]*(rank+1)/world
	n := t.rowLen()
	s := Slice{Name: t.Name, Kind: t.Kind, Shape: t.Shape, Row0: from, Rows: to - from, Data: data[from*n : to*n]}
	if storedBF16(t) {
		s.BF16 = upperHalves(s.Data)
		s.Data = nil
	}
	return s
}

func upperHalves(x []float32) []uint16 {
	y := make([]uint16, len(x))
	for i, v := range x {
		y[i] = uint16(math.Float32bits(v) >> 16)
	}
	return y
}

func smallModel() []Info {
	var ts []Info
	for _, p := range []Info{
		{Name: "model.embed_tokens.weight", Shape: []int{7, 3}},
		{Name: "model.layers.0.mlp.gate.weight", Shape: []int{5, 4}},
		{Name: "model.norm.weight", Shape: []int{3}},
		{Name: "model.cube", Shape: []int{4, 2, 3}},
	} {
		for k := Weight; k < numKinds; k++ {
			ts = append(ts, Info{p.Name, k, p.Shape})
		}
	}
	return append(ts, Info{"model.layers.0.mlp.gate.e_score_correction_bias", Weight, []int{5}})
}

// save writes a checkpoint with world writers, all at once as the ranks of one process would.
func save(root, stage string, step int64, ts []Info, world int, content int64) error {
	dir := Dir(root, stage, step)
	if err := Begin(dir); err != nil {
		return err
	}
	meta := testMeta(stage, step, world)
	files, errs := make([]File, world), make([]error, world)
	var wg sync.WaitGroup
	for rank := range world {
		wg.Go(func() {
			var parts []Slice
			for _, t := range ts {
				parts = append(parts, cut(t, full(t, content), rank, world))
			}
			m := meta
			if rank != 0 {
				m = nil
			}
			files[rank], errs[rank] = WriteRank(dir, rank, parts, m)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	slices.Reverse(files) // Commit must not depend on the order of arrival
	return Commit(dir, meta, files)
}

func mustSave(t *testing.T, root, stage string, step int64, world int) {
	t.Helper()
	if err := save(root, stage, step, smallModel(), world, step); err != nil {
		t.Fatal(err)
	}
}

func mustOpen(t *testing.T, dir string) *Reader {
	t.Helper()
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// holds compares every tensor of a checkpoint with what it must contain, bit for bit.
func holds(r *Reader, ts []Info, content int64) error {
	if err := r.Check(ts); err != nil {
		return err
	}
	for _, t := range ts {
		want := full(t, content)
		got := make([]float32, len(want))
		if err := r.Read(t.Name, t.Kind, 0, t.Shape[0], got); err != nil {
			return err
		}
		if i := differ(got, want); i >= 0 {
			return fmt.Errorf("%v[%d] = %v, want %v", t, i, got[i], want[i])
		}
	}
	return nil
}

func differ(a, b []float32) int {
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			return i
		}
	}
	return -1
}

func TestReadAtAnyCut(t *testing.T) { // P20
	for _, world := range []int{1, 2, 3, 8} { // 8 writers: most have no rows of most tensors
		root := t.TempDir()
		mustSave(t, root, "pretrain", 3, world)
		r := mustOpen(t, Dir(root, "pretrain", 3))
		if err := r.Verify(context.Background()); err != nil {
			t.Fatal(err)
		}
		for _, ti := range smallModel() {
			want, n := full(ti, 3), ti.rowLen()
			for from := 0; from <= ti.Shape[0]; from++ {
				for to := from; to <= ti.Shape[0]; to++ {
					// A guard value behind the destination must survive.
					buf := make([]float32, (to-from)*n+1)
					buf[len(buf)-1] = -7
					if err := r.Read(ti.Name, ti.Kind, from, to-from, buf[:len(buf)-1]); err != nil {
						t.Fatal(err)
					}
					if i := differ(buf[:len(buf)-1], want[from*n:to*n]); i >= 0 || buf[len(buf)-1] != -7 {
						t.Fatalf("world %d, %v rows %d..%d: differs at %d", world, ti, from, to, i)
					}
				}
			}
		}
	}
}

func TestMetaComesBack(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "sft-2", 123456789, 2) // nine digits, and a stage name like a step
	r := mustOpen(t, filepath.Join(root, "sft-2-123456789"))
	got, want := r.Meta(), *testMeta("sft-2", 123456789, 2)
	want.Extra["losses"] = json.RawMessage(`[1.5,1.25]`)
	g, _ := json.Marshal(got)
	w, _ := json.Marshal(want)
	if string(g) != string(w) {
		t.Errorf("got  %s\nwant %s", g, w)
	}
	if got.Seed != math.MaxUint64-3 || string(got.Tokenizer) != "tok\x00en" || string(got.RNG) != "\x00\x01\xff" {
		t.Errorf("seed %d, tokenizer %q, rng %q", got.Seed, got.Tokenizer, got.RNG)
	}
	if info, ok := r.Lookup("model.cube", ExpAvgSq); !ok || !slices.Equal(info.Shape, []int{4, 2, 3}) {
		t.Errorf("Lookup: %v %v", info, ok)
	}
	if len(r.Tensors()) != len(smallModel()) {
		t.Errorf("%d tensors, want %d", len(r.Tensors()), len(smallModel()))
	}
}

func TestExpertsKeepTheirNumbers(t *testing.T) { // P21
	const experts = 60
	root := t.TempDir()
	dir := Dir(root, "pretrain", 1)
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	name := func(e int) string { return fmt.Sprintf("model.layers.1.mlp.experts.%d.up_proj.weight", e) }
	meta := testMeta("pretrain", 1, 2)
	var files []File
	for rank := range 2 {
		var parts []Slice
		for e := rank * 30; e < rank*30+30; e++ {
			data := slices.Repeat([]float32{float32(e)}, 6)
			parts = append(parts, Slice{name(e), Weight, []int{2, 3}, 0, 2, data, nil})
		}
		m := meta
		if rank == 1 {
			m = nil
		}
		f, err := WriteRank(dir, rank, parts, m)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if err := Commit(dir, meta, files); err != nil {
		t.Fatal(err)
	}
	r := mustOpen(t, dir)
	if n := len(r.Tensors()); n != experts {
		t.Errorf("%d distinct experts, want %d", n, experts)
	}
	for i, s := range r.Files()[1].Slices {
		if s.Name != name(30+i) {
			t.Errorf("rank 1, slice %d is %s, want %s", i, s.Name, name(30+i))
		}
	}
	for _, ranks := range []int{1, 4} {
		for rank := range ranks {
			for e := rank * experts / ranks; e < (rank+1)*experts/ranks; e++ {
				got := make([]float32, 6)
				if err := r.Read(name(e), Weight, 0, 2, got); err != nil {
					t.Fatal(err)
				}
				if differ(got, slices.Repeat([]float32{float32(e)}, 6)) >= 0 {
					t.Errorf("expert %d holds %v", e, got)
				}
			}
		}
	}
}

func TestEveryBitPatternSurvives(t *testing.T) { // P04: the bias is FP32 in the file
	rng := rand.New(rand.NewPCG(1, 2))
	bits := []uint32{0, 1 << 31, 1, 0x007fffff, 0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001, 0xffffffff,
		math.Float32bits(40840), math.Float32bits(1.0 / 3), math.Float32bits(0.001)}
	for len(bits) < 1000 {
		bits = append(bits, rng.Uint32())
	}
	data := make([]float32, len(bits))
	for i, b := range bits {
		data[i] = math.Float32frombits(b)
	}
	dir := Dir(t.TempDir(), "pretrain", 1)
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	const name = "model.layers.3.mlp.gate.e_score_correction_bias"
	meta := testMeta("pretrain", 1, 1)
	f, err := WriteRank(dir, 0, []Slice{{name, Weight, []int{len(data)}, 0, len(data), data, nil}}, meta)
	if err != nil {
		t.Fatal(err)
	}
	if err := Commit(dir, meta, []File{f}); err != nil {
		t.Fatal(err)
	}
	got := make([]float32, len(data))
	if err := mustOpen(t, dir).Read(name, Weight, 0, len(data), got); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if math.Float32bits(got[i]) != bits[i] {
			t.Errorf("%08x came back as %08x", bits[i], math.Float32bits(got[i]))
		}
	}
}

// TestElementTypes: BF16 survives in every bit pattern, is read as FP32 without loss, and is what FP32 is rounded to; a
// tensor may be of both types, by slice.
func TestElementTypes(t *testing.T) {
	const n = 1 << 16
	narrow, wide := make([]uint16, n), make([]float32, n)
	for i := range n {
		narrow[i] = uint16(i)
		wide[i] = float32(i) * (1 + 0x1p-9) // between two BF16 values, for all but a few
	}
	dir := Dir(t.TempDir(), "pretrain", 1)
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	meta := testMeta("pretrain", 1, 2)
	shape := []int{2 * n}
	var files []File
	for rank, moment := range []Slice{
		{Name: "w", Kind: ExpAvg, Shape: shape, Rows: n, BF16: narrow},
		{Name: "w", Kind: ExpAvg, Shape: shape, Row0: n, Rows: n, Data: wide},
	} {
		weight := Slice{Name: "w", Kind: Weight, Shape: shape, Row0: n * rank, Rows: n, Data: wide}
		f, err := WriteRank(dir, rank, []Slice{weight, moment}, map[int]*Meta{0: meta}[rank])
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	if saved := files[1].Size - files[0].Size; saved < 2*n-8192 || saved > 2*n { // less the /state of rank 0
		t.Errorf("BF16 saves %d bytes of %d values", saved, n)
	}
	if err := Commit(dir, meta, files); err != nil {
		t.Fatal(err)
	}
	r := mustOpen(t, dir)
	if err := r.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
	from, to := 5, 2*n-3
	as32, as16 := make([]float32, to-from), make([]uint16, to-from)
	if err := errors.Join(r.Read("w", ExpAvg, from, to-from, as32), r.ReadBF16("w", ExpAvg, from, to-from, as16)); err != nil {
		t.Fatal(err)
	}
	for i := from; i < to; i++ {
		got32, got16 := math.Float32bits(as32[i-from]), as16[i-from]
		want32, want16 := uint32(i)<<16, uint16(i)
		if i >= n {
			want32 = math.Float32bits(wide[i-n])
			want16 = uint16(want32 >> 16)
			if rest := want32 & 0xFFFF; rest > 0x8000 || rest == 0x8000 && want16&1 == 1 {
				want16++
			}
		}
		if got32 != want32 || got16 != want16 {
			t.Fatalf("value %d is %08x as FP32 and %04x as BF16, want %08x and %04x", i, got32, got16, want32, want16)
		}
	}
	wantError(t, r.ReadBF16("w", ExpAvg, 0, 2, make([]uint16, 3)), "2 values", "has 3")
}

func TestConcurrentReaders(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 4)
	r := mustOpen(t, Dir(root, "pretrain", 1))
	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = holds(r, smallModel(), 1) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// TestFilesAreReleased: HDF5 keeps a file open as long as any object of it is, so a forgotten handle shows here.
func TestFilesAreReleased(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 2)
	r, err := Open(Dir(root, "pretrain", 1))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Verify(context.Background()), holds(r, smallModel(), 1), r.Close()); err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc")
	}
	for _, fd := range fds {
		if to, _ := os.Readlink("/proc/self/fd/" + fd.Name()); strings.HasPrefix(to, root) {
			t.Errorf("%s is still open", to)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 2)
	r := mustOpen(t, Dir(root, "pretrain", 1))
	for _, c := range []struct {
		name       string
		kind       Kind
		row0, rows int
		dst        int
		say        []string
	}{
		{"model.nothing", Weight, 0, 1, 3, []string{"weight model.nothing", "no such tensor"}},
		{"model.layers.0.mlp.gate.e_score_correction_bias", ExpAvg, 0, 1, 1, []string{"exp_avg", "no such tensor"}},
		{"model.embed_tokens.weight", Weight, 5, 3, 9, []string{"rows 5..8", "[7 3]"}},
		{"model.embed_tokens.weight", Weight, -1, 1, 3, []string{"rows -1..0"}},
		{"model.embed_tokens.weight", Weight, 1, -1, 0, []string{"rows 1..0"}},
		{"model.embed_tokens.weight", Weight, 0, 7, 20, []string{"21 values", "has 20"}},
	} {
		wantError(t, r.Read(c.name, c.kind, c.row0, c.rows, make([]float32, c.dst)), c.say...)
	}
}

func TestWriteRankRefuses(t *testing.T) {
	dir := Dir(t.TempDir(), "pretrain", 1)
	meta := testMeta("pretrain", 1, 1)
	_, err := WriteRank(dir, 0, nil, meta)
	wantError(t, err, "Begin")
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	bad := func(change func(m *Meta)) *Meta {
		m := *meta
		change(&m)
		return &m
	}
	one := []float32{1, 2, 3, 4}
	for _, c := range []struct {
		rank int
		part Slice
		meta *Meta
		say  []string
	}{
		{0, Slice{"w", Weight, []int{2, 2}, 0, 2, one, nil}, nil, []string{"rank 0"}},
		{1, Slice{"w", Weight, []int{2, 2}, 0, 2, one, nil}, meta, []string{"rank 1"}},
		{-1, Slice{"w", Weight, []int{2, 2}, 0, 2, one, nil}, nil, []string{"rank -1"}},
		{1, Slice{"w", Weight, []int{2, 2}, 1, 2, one, nil}, nil, []string{"weight w[2 2]", "rows 1..3"}},
		{1, Slice{"w", Weight, []int{2, 2}, 0, 1, one, nil}, nil, []string{"weight w[2 2]", "4 values", "want 2"}},
		{1, Slice{"w", Weight, nil, 0, 1, one[:1], nil}, nil, []string{"0 dims"}},
		{1, Slice{"w", Weight, []int{2, 0}, 0, 2, nil, nil}, nil, []string{"impossible shape"}},
		{1, Slice{"w", Weight, []int{1 << 40, 1 << 40}, 0, 0, nil, nil}, nil, []string{"impossible shape"}},
		{1, Slice{"a/b", Weight, []int{4}, 0, 4, one, nil}, nil, []string{"a/b"}},
		{1, Slice{"", Weight, []int{4}, 0, 4, one, nil}, nil, []string{`""`}},
		{1, Slice{"w", Kind(9), []int{4}, 0, 4, one, nil}, nil, []string{"kind", "9"}},
		{1, Slice{"w", Weight, []int{4}, 0, 4, nil, make([]uint16, 4)}, nil, []string{"weight w[4]", "BF16"}},
		{1, Slice{"w", ExpAvg, []int{4}, 0, 4, nil, make([]uint16, 3)}, nil, []string{"exp_avg w[4]", "3 values", "want 4"}},
		{1, Slice{"w", ExpAvg, []int{4}, 0, 4, one[:2], make([]uint16, 2)}, nil, []string{"exp_avg w[4]", "of one type"}},
		{0, Slice{}, bad(func(m *Meta) { m.Stage = "../x" }), []string{"../x"}},
		{0, Slice{}, bad(func(m *Meta) { m.Step = -1 }), []string{"step=-1"}},
		{0, Slice{}, bad(func(m *Meta) { m.Config = "a\x00b" }), []string{"config"}},
		{0, Slice{}, bad(func(m *Meta) { m.Extra = map[string]json.RawMessage{"x": json.RawMessage(`{`)} }), []string{`"x"`, "JSON"}},
	} {
		_, err := WriteRank(dir, c.rank, []Slice{c.part}, c.meta)
		wantError(t, err, c.say...)
	}
	s := Slice{"w", Weight, []int{8}, 0, 4, one, nil}
	_, err = WriteRank(dir, 1, []Slice{s, {"w", Weight, []int{8}, 4, 4, one, nil}}, nil)
	wantError(t, err, "weight w[8]", "two slices")
	left, _ := os.ReadDir(dir + partialSuffix)
	if len(left) != 0 {
		t.Errorf("refused writes left %v", left)
	}
	if _, err := WriteRank(dir, 1, []Slice{s}, nil); err != nil {
		t.Fatal(err)
	}
	_, err = WriteRank(dir, 1, []Slice{s}, nil)
	wantError(t, err, "already")
}

// TestCommitRefuses: what the ranks wrote must be every row once.
func TestCommitRefuses(t *testing.T) {
	type parts = [][]Slice
	w := func(name string, kind Kind, shape []int, row0, rows int) Slice {
		n := 1
		for _, d := range shape[1:] {
			n *= d
		}
		return Slice{name, kind, shape, row0, rows, make([]float32, rows*n), nil}
	}
	s7 := []int{7, 2}
	for _, c := range []struct {
		what  string
		parts parts
		say   []string
	}{
		{"gap between", parts{{w("a", Weight, s7, 0, 3)}, {w("a", Weight, s7, 4, 3)}}, []string{"weight a[7 2]", "rows 3..4 are in no file"}},
		{"gap at the start", parts{{}, {w("a", Weight, s7, 1, 6)}}, []string{"rows 0..1 are in no file"}},
		{"gap at the end", parts{{w("a", Weight, s7, 0, 3)}, {w("a", Weight, s7, 3, 3)}}, []string{"rows 6..7 are in no file"}},
		{"overlap", parts{{w("a", Weight, s7, 0, 4)}, {w("a", Weight, s7, 3, 4)}}, []string{"rows 3..4 are stored twice", "rank-0000.h5 and rank-0001.h5"}},
		{"stored by two", parts{{w("a", Weight, s7, 0, 7)}, {w("a", Weight, s7, 0, 7)}}, []string{"rows 0..7 are stored twice"}},
		{"shapes", parts{{w("a", Weight, s7, 0, 3)}, {w("a", Weight, []int{7, 3}, 3, 4)}}, []string{"weight a[7 2]", "[7 3]"}},
		{"shape of a moment", parts{{w("a", Weight, s7, 0, 7), w("a", ExpAvg, []int{7, 3}, 0, 7)}, {}}, []string{"exp_avg a[7 3]", "[7 2]"}},
		{"moment alone", parts{{w("a", ExpAvgSq, s7, 0, 7)}, {}}, []string{"exp_avg_sq a[7 2]", "no weight"}},
		{"two at once", parts{{w("a", Weight, s7, 0, 3), w("b", Weight, s7, 0, 3)}, {}}, []string{"weight a", "weight b"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			root := t.TempDir()
			dir := Dir(root, "pretrain", 1)
			if err := Begin(dir); err != nil {
				t.Fatal(err)
			}
			meta := testMeta("pretrain", 1, 2)
			var files []File
			for rank, p := range c.parts {
				m := meta
				if rank > 0 {
					m = nil
				}
				f, err := WriteRank(dir, rank, p, m)
				if err != nil {
					t.Fatal(err)
				}
				files = append(files, f)
			}
			wantError(t, Commit(dir, meta, files), c.say...)
			_, _, err := OpenLatest(root, "pretrain")
			if !errors.Is(err, ErrNotFound) {
				t.Errorf("after a refused commit: %v", err)
			}
			if err := Discard(dir); err != nil {
				t.Error(err)
			}
			if left, _ := os.ReadDir(root); len(left) != 0 {
				t.Errorf("Discard left %v", left)
			}
		})
	}
	root := t.TempDir()
	dir := Dir(root, "pretrain", 1)
	if err := Begin(dir); err != nil {
		t.Fatal(err)
	}
	meta := testMeta("pretrain", 1, 2)
	f0, err := WriteRank(dir, 0, nil, meta)
	if err != nil {
		t.Fatal(err)
	}
	f1, err := WriteRank(dir, 1, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, Commit(dir, meta, []File{f0}), "1 files", "mesh.world=2")
	wantError(t, Commit(dir, meta, []File{f0, f0}), "rank 0")
	wantError(t, Commit(Dir(root, "pretrain", 2), meta, []File{f0, f1}), "pretrain-00000001")
	if err := os.Truncate(filepath.Join(dir+partialSuffix, f1.Name), f1.Size-1); err != nil {
		t.Fatal(err)
	}
	wantError(t, Commit(dir, meta, []File{f0, f1}), "rank-0001.h5", fmt.Sprint(f1.Size))
}

func TestCheckNamesEveryDifference(t *testing.T) { // P23
	root := t.TempDir()
	mustSave(t, root, "pretrain", 1, 2)
	r := mustOpen(t, Dir(root, "pretrain", 1))
	want := smallModel()
	if err := r.Check(want); err != nil {
		t.Fatal(err)
	}
	edit := func(f func(ts []Info) []Info) []Info { return f(slices.Clone(want)) }
	dropped := edit(func(ts []Info) []Info { return ts[1:] })
	wantError(t, r.Check(dropped), "1 extra: weight model.embed_tokens.weight")
	renamed := edit(func(ts []Info) []Info { ts[0].Name = "model.other"; return ts })
	wantError(t, r.Check(renamed), "1 missing: weight model.other", "1 extra: weight model.embed_tokens.weight")
	reshaped := edit(func(ts []Info) []Info { ts[1].Shape = []int{3, 7}; return ts })
	wantError(t, r.Check(reshaped), "exp_avg model.embed_tokens.weight is [7 3] in the checkpoint, [3 7] in the model")
	all := edit(func(ts []Info) []Info {
		ts[1].Shape = []int{3, 7}
		return append(ts[:len(ts)-1], Info{"new.a", Weight, []int{1}}, Info{"new.b", Weight, []int{1}})
	})
	wantError(t, r.Check(all), "2 missing: weight new.a; weight new.b", "1 extra: weight model.layers.0.mlp.gate.e_score", "1 of another shape")

	weights := slices.DeleteFunc(slices.Clone(want), func(t Info) bool { return t.Kind != Weight })
	if err := r.Check(weights); err != nil {
		t.Errorf("weights alone: %v", err)
	}
	var many []Info
	for i := range 37 {
		many = append(many, Info{fmt.Sprintf("m.%02d", i), Weight, []int{1}})
	}
	wantError(t, r.Check(append(many, want...)), "37 missing", "m.09; and 27 more")

	p, err := r.CheckPartial(renamed)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Initial) != 1 || p.Initial[0].Name != "model.other" || len(p.Unused) != 1 || p.Unused[0].Name != "model.embed_tokens.weight" {
		t.Errorf("partial: %+v", p)
	}
	_, err = r.CheckPartial(reshaped)
	wantError(t, err, "[7 3]", "[3 7]")
	_, err = r.CheckPartial(many)
	wantError(t, err, "none of the 37")
}

func TestEqualStatesGiveEqualBytes(t *testing.T) { // P22: a save is a function of the state alone
	a, b := t.TempDir(), t.TempDir()
	mustSave(t, a, "pretrain", 5, 2)
	// HDF5 would stamp whole seconds.
	waitForNextSecond()
	mustSave(t, b, "pretrain", 5, 2)
	for _, name := range []string{fileName(0), fileName(1), manifestName} {
		x, err := os.ReadFile(filepath.Join(Dir(a, "pretrain", 5), name))
		if err != nil {
			t.Fatal(err)
		}
		y, err := os.ReadFile(filepath.Join(Dir(b, "pretrain", 5), name))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(x, y) {
			t.Errorf("%s differs", name)
		}
	}
}

func TestInspect(t *testing.T) {
	root := t.TempDir()
	mustSave(t, root, "pretrain", 2, 2)
	dir := Dir(root, "pretrain", 2)
	s, err := Inspect(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(out, &keys); err != nil {
		t.Fatal(err)
	}
	for k, v := range map[string]any{"step": 2.0, "stage": "pretrain", "tokens": 8192.0, "params": 12345.0, "active_params": 2345.0, "ok": true} {
		if keys[k] != v {
			t.Errorf("%s = %v, want %v", k, keys[k], v)
		}
	}
	if len(s.Files) != 2 {
		t.Errorf("files: %v", s.Files)
	}
	flip(t, filepath.Join(dir, fileName(1)), -1)
	s, err = Inspect(context.Background(), dir)
	if err != nil || s.OK || !s.Files[0].OK || s.Files[1].OK || !strings.Contains(s.Files[1].Error, "rank-0001.h5: damaged") {
		t.Errorf("damaged: %+v, %v", s, err)
	}
	_, err = Inspect(context.Background(), root)
	wantError(t, err, "no manifest.json")
	_, err = Inspect(context.Background(), filepath.Join(root, "none"))
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Inspect(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// flip changes one bit of a byte of a file; a negative position counts from the end.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if at < 0 {
		at += len(data)
	}
	data[at] ^= 1 << (at % 8)
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
}
