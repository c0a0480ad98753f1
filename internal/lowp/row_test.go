package lowp

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
)

func TestUse(t *testing.T) {
	if got := Active(); got != Impls()[0] {
		t.Errorf("Active() = %q before any Use, want the best, %q", got, Impls()[0])
	}
	if last := Impls()[len(Impls())-1]; last != "portable" {
		t.Errorf("last implementation is %q, want portable", last)
	}
	before := Active()
	restore, ok := Use("portable")
	if !ok || Active() != "portable" {
		t.Errorf("Use(portable): ok %v, Active %q", ok, Active())
	}
	restore()
	if Active() != before {
		t.Errorf("restore left %q, want %q", Active(), before)
	}
	if _, ok := Use("sse9"); ok || Active() != before {
		t.Errorf("Use of an unknown name: ok %v, Active %q", ok, Active())
	}
}

// All codes at all positions of a row, with scales of all magnitudes, against the definition.
func TestDecodePanel(t *testing.T) {
	const rows = 3
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	scales := []float32{1, 0.37, 0x1p-127, 0x1p-130, 3e-45, 0x1p119, 0x1p120, 0x1.8p126, math.MaxFloat32, inf, nan, -2, 0}
	for _, f := range formats {
		d := definitions[f]
		value := func(c uint16) float32 {
			v := float32(d.value(int(c) & (d.magnitudes() - 1)))
			if int(c) >= d.magnitudes() {
				v = -v
			}
			return v
		}
		eachImpl(t, f.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(15, 16))
			for cols := range 131 {
				stride, ld := f.RowBytes(cols)+3, cols+2
				src := make([]byte, max(0, (rows-1)*stride+f.RowBytes(cols)))
				dst := make([]float32, rows*ld)
				for i := range src {
					src[i] = byte(r.Uint32())
				}
				byRow, byCol := make([]float32, 2*rows), make([]float32, max(1, cols))
				for i := range byRow {
					byRow[i] = scales[r.IntN(len(scales))]
				}
				for i := range byCol {
					byCol[i] = scales[r.IntN(len(scales))]
				}
				check := func(name string, scale func(i, j int) float32) {
					t.Helper()
					for at, v := range dst {
						i, j := at/ld, at%ld
						if j >= cols {
							if v != 0 {
								t.Fatalf("%s: value %d, %d of %d columns was written", name, i, j, cols)
							}
							continue
						}
						c := code(f, src[i*stride:], j)
						if want := value(c) * scale(i, j); !same(v, want) {
							t.Fatalf("%s: code %#x at %d, %d times %v is %v, want %v", name, c, i, j, scale(i, j), v, want)
						}
					}
					clear(dst)
				}
				DecodePanel(f, dst, ld, src, stride, nil, 0, rows, cols)
				check("plain", func(i, j int) float32 { return 1 })
				if f == BF16 {
					continue // has no scales
				}
				DecodePanel(f, dst, ld, src, stride, byRow, 2, rows, cols)
				check("by row", func(i, j int) float32 { return byRow[2*i] })
				DecodePanel(f, dst, ld, src, stride, byRow, 0, rows, cols)
				check("one", func(i, j int) float32 { return byRow[0] })
				DecodePanelCols(f, dst, ld, src, stride, byCol, rows, cols)
				check("by column", func(i, j int) float32 { return byCol[j] })
				if cols > 0 {
					DecodeRow(f, dst[:cols], src)
					for j := range cols {
						if want := value(code(f, src, j)); !same(dst[j], want) {
							t.Fatalf("row: code %d is %v, want %v", j, dst[j], want)
						}
					}
				}
			}
		})
	}
}

// Rows longer than one call of assembly, and than a chunk, whose ends must meet.
func TestLongRows(t *testing.T) {
	const n = 2*callValues + 77
	x := values(rand.New(rand.NewPCG(17, 18)), n, true)
	for _, f := range formats {
		eachImpl(t, f.String(), func(t *testing.T) {
			row, y := make([]byte, f.RowBytes(n)), make([]float32, n)
			EncodeRow(f, row, x, false)
			DecodeRow(f, y, row)
			for i, v := range x {
				if c := f.Encode(v, false); code(f, row, i) != c || !same(y[i], f.Decode(c)) {
					t.Fatalf("value %d, %v, has code %#x, want %#x, and comes back as %v", i, v, code(f, row, i), c, y[i])
				}
			}
			m := New(Quant{Format: f}, 1, n, nil)
			if f != BF16 {
				m = New(Quant{Format: f, Scale: ScaleF32}, 1, n, nil)
			}
			Quantize(m, x, n)
			Dequantize(y, n, m)
			for i := range x {
				if !same(y[i], m.At(0, i)) {
					t.Fatalf("value %d of a matrix is %v, want %v", i, y[i], m.At(0, i))
				}
			}
		})
	}
}

// FuzzRow compares every implementation with the scalar encoding, bytes being floats.
func FuzzRow(f *testing.F) {
	seed := make([]byte, 4*70)
	for i := range 70 {
		binary.LittleEndian.PutUint32(seed[4*i:], math.Float32bits(float32(i-30)/7))
	}
	f.Add(seed, uint8(0), uint8(128))
	f.Fuzz(func(t *testing.T, data []byte, format, width uint8) {
		fm := Format(format % 4)
		x := make([]float32, len(data)/4)
		for i := range x {
			x[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		for _, impl := range Impls() {
			restore, _ := Use(impl)
			row := make([]byte, fm.RowBytes(len(x)))
			for _, saturate := range []bool{false, true} {
				EncodeRow(fm, row, x, saturate)
				for i, v := range x {
					if want := fm.Encode(v, saturate); code(fm, row, i) != want {
						t.Fatalf("%s, %v: %v is %#x, want %#x", impl, fm, v, code(fm, row, i), want)
					}
				}
			}
			q := Quant{Format: fm, Scale: ScaleKind(width % 4), TileRows: 1, TileCols: int(width)}
			if fm == BF16 {
				q.Scale = ScaleNone
			}
			m := guarded(q, 1, len(x), nil)
			Quantize(m, x, len(x))
			if len(x) > 0 {
				checkQuantized(t, m, x, len(x))
			}
			restore()
		}
	})
}
