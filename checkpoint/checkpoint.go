// Package checkpoint writes and reads the state of a training run: weights, optimizer moments, positions and the
// resolved configuration, in HDF5 files that h5dump and h5py read too.
//
// A checkpoint is a directory named STAGE-STEP (eight digits) that holds one HDF5 file per rank and a manifest. The
// manifest is written last and holds the size and the SHA-256 of every file and the place of every slice; without a
// manifest there is no checkpoint. docs/format/checkpoint.md draws every path and the order of writes.
//
// The package moves no data between ranks. The duties of its caller, in order:
//
//  1. Rank 0 calls [Begin]; then all ranks wait for each other.
//  2. Every rank calls [WriteRank] with the slices it owns (none is legal), so that each row of each tensor is written
//     by exactly one rank. Rank 0 passes the [Meta].
//  3. Rank 0 gathers the returned [File] values (they marshal to JSON) and calls [Commit], then [Prune].
//     After an error on any rank it calls [Discard] instead; earlier checkpoints are untouched.
//
// To load, rank 0 calls [OpenLatest] and tells the others the directory, which they [Open]. Then every rank calls
// [Reader.Check] with the tensors it knows of, and [Reader.Read] for the rows it wants: reading does not depend on how
// the writers had cut the tensors. All ranks of a run must see the same directory (one host, or a shared file system).
//
// HDF5 is reached through cgo; libhdf5-dev and a C compiler are all that a Debian or Ubuntu machine needs. On macOS
// with Homebrew, tell cgo where the library is:
//
//	brew install hdf5
//	export CGO_CFLAGS="-I$(brew --prefix hdf5)/include" CGO_LDFLAGS="-L$(brew --prefix hdf5)/lib"
//
// A build without cgo compiles and lists, checks and prunes checkpoints by their manifests, but refuses to read or
// write a tensor.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// FormatVersion is the version of the layout that this package writes, and the only one it reads.
const FormatVersion = 1

// formatName stands in every file, so that a lone one can be told from other HDF5 and JSON files.
const formatName = "moetor-checkpoint"

// ErrNotFound is wrapped by [OpenLatest] when no directory holds a complete checkpoint.
var ErrNotFound = errors.New("no complete checkpoint")

// A Kind says which of a parameter's tensors a slice belongs to.
type Kind uint8

const (
	Weight   Kind = iota // FP32 master weights; also the router's e_score_correction_bias
	ExpAvg               // first moment of Adam
	ExpAvgSq             // second moment of Adam
	numKinds
)

var (
	kindNames  = [numKinds]string{"weight", "exp_avg", "exp_avg_sq"}
	kindGroups = [numKinds]string{"/model", "/optimizer/exp_avg", "/optimizer/exp_avg_sq"}
)

func (k Kind) String() string {
	if k >= numKinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kindNames[k]
}

// MarshalText writes the name used in the manifest.
func (k Kind) MarshalText() ([]byte, error) {
	if k >= numKinds {
		return nil, fmt.Errorf("checkpoint: unknown kind of tensor %d", uint8(k))
	}
	return []byte(kindNames[k]), nil
}

// UnmarshalText reads the name used in the manifest.
func (k *Kind) UnmarshalText(text []byte) error {
	for i, name := range kindNames {
		if string(text) == name {
			*k = Kind(i)
			return nil
		}
	}
	return fmt.Errorf("checkpoint: unknown kind of tensor %q", text)
}

// An Info names a tensor of a checkpoint. Shape is the global shape, whoever holds its rows.
type Info struct {
	Name  string `json:"name"`
	Kind  Kind   `json:"kind"`
	Shape []int  `json:"shape"`
}

func (t Info) String() string { return fmt.Sprintf("%s %s%v", t.Kind, t.Name, t.Shape) }

// rowLen is the number of elements of one row (index 0 fixed).
func (t Info) rowLen() int {
	n := 1
	for _, d := range t.Shape[1:] {
		n *= d
	}
	return n
}

// A Want is a tensor that a loader asks for; see [Reader.Check].
type Want = Info

// A Slice is a range of rows of one tensor, to be written.
type Slice struct {
	Name  string // Hugging Face deepseek_v3 name
	Kind  Kind
	Shape []int     // global shape, at least one dim
	Row0  int       // first row of Data in the global tensor
	Rows  int       // number of rows; 0 writes nothing
	Data  []float32 // row-major, Rows x product of Shape[1:]
	BF16  []uint16  // instead of Data, of a moment: BF16 values, stored as they are
}

// Element types of a dataset. A reader that does not know one refuses the manifest.
const (
	dtypeF32  = "F32"  // float32
	dtypeBF16 = "BF16" // uint16: the upper half of a float32; HDF5 has no such number
)

// dtype is the element type in which the slice is stored.
func (s *Slice) dtype() string {
	if s.BF16 != nil {
		return dtypeBF16
	}
	return dtypeF32
}

// A SliceInfo is the manifest's record of a written slice.
type SliceInfo struct {
	Info
	DType string `json:"dtype"` // "F32" or "BF16"
	Row0  int    `json:"row0"`
	Rows  int    `json:"rows"`
}

// A File is what [WriteRank] reports of the file it wrote and [Commit] puts into the manifest.
type File struct {
	Name   string      `json:"name"` // within the checkpoint's directory
	Rank   int         `json:"rank"`
	Size   int64       `json:"size"`   // bytes
	SHA256 string      `json:"sha256"` // of the whole file, in hex
	Slices []SliceInfo `json:"slices"`
}

// A Mesh records the layout of the ranks that wrote a checkpoint. A reader need not have the same.
type Mesh struct {
	World    int `json:"world"`
	Pipeline int `json:"pipeline"`
	Data     int `json:"data"`
	Expert   int `json:"expert"`
}

// A Meta is the state of a run beside its tensors. It stands in the manifest and, readable by h5py, in group /state of
// rank 0's file.
type Meta struct {
	Engine       string `json:"engine"`      // version of the engine that wrote it
	Stage        string `json:"stage"`       // name of the stage
	Step         int64  `json:"step"`        // optimizer steps done in this stage
	GlobalStep   int64  `json:"global_step"` // optimizer steps done in all stages
	Tokens       int64  `json:"tokens"`      // tokens trained on in this stage
	Samples      int64  `json:"samples"`     // data position: global index of the next sample
	Seed         uint64 `json:"seed"`
	RNG          []byte `json:"rng,omitempty"`       // state of the random number generator, in the trainer's form
	Data         string `json:"data"`                // fingerprint of the data
	Tokenizer    []byte `json:"tokenizer,omitempty"` // the tokenizer itself, so that a checkpoint can be used alone
	Config       string `json:"config"`              // resolved configuration, YAML
	Params       int64  `json:"params"`
	ActiveParams int64  `json:"active_params"` // parameters that take part in one token
	Mesh         Mesh   `json:"mesh"`
	// Extra is the trainer's own state, by key.
	Extra map[string]json.RawMessage `json:"extra,omitempty"`
}

var stageName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

func (m *Meta) validate() error {
	switch {
	case !stageName.MatchString(m.Stage):
		return fmt.Errorf("stage name %q: want letters, digits, '.', '_' and '-' only, as it names a directory", m.Stage)
	case m.Step < 0 || m.GlobalStep < 0 || m.Tokens < 0 || m.Samples < 0:
		return fmt.Errorf("negative count: step=%d global_step=%d tokens=%d samples=%d", m.Step, m.GlobalStep, m.Tokens, m.Samples)
	}
	for _, s := range []struct{ key, text string }{{"engine", m.Engine}, {"data", m.Data}, {"config", m.Config}} {
		if strings.ContainsRune(s.text, 0) || !utf8.ValidString(s.text) {
			return fmt.Errorf("%s is not text in UTF-8 without zero bytes, as HDF5 and JSON both need it", s.key)
		}
	}
	for key, v := range m.Extra {
		if err := validName(key); err != nil {
			return fmt.Errorf("key of extra state: %w", err)
		}
		if !json.Valid(v) || !utf8.Valid(v) {
			return fmt.Errorf("extra state %q is not valid JSON", key)
		}
	}
	return nil
}

// maxElems bounds the elements of a tensor, so that sizes in bytes cannot overflow.
const maxElems = 1 << 56

// validName refuses what HDF5 would take for a path or cut short.
func validName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > 1024 || strings.ContainsAny(name, "/\x00") || !utf8.ValidString(name) {
		return fmt.Errorf("%q cannot name an object of an HDF5 file", name)
	}
	return nil
}

func (t Info) validate() error {
	if err := validName(t.Name); err != nil {
		return err
	}
	if t.Kind >= numKinds {
		return fmt.Errorf("%s: unknown kind of tensor %d", t.Name, uint8(t.Kind))
	}
	if len(t.Shape) == 0 || len(t.Shape) > 32 { // 32 is HDF5's limit
		return fmt.Errorf("%v: has %d dims, want 1 to 32", t, len(t.Shape))
	}
	n := 1
	for _, d := range t.Shape {
		if d < 1 || d > maxElems/n {
			return fmt.Errorf("%v: impossible shape", t)
		}
		n *= d
	}
	return nil
}

func (s SliceInfo) validate() error {
	if err := s.Info.validate(); err != nil {
		return err
	}
	switch {
	case s.DType != dtypeF32 && s.DType != dtypeBF16:
		return fmt.Errorf("%v: element type %q, this version knows %s and %s", s.Info, s.DType, dtypeF32, dtypeBF16)
	case s.DType != dtypeF32 && s.Kind == Weight:
		return fmt.Errorf("%v: element type %s, but master weights are %s", s.Info, s.DType, dtypeF32)
	}
	if s.Row0 < 0 || s.Rows < 0 || s.Row0 > s.Shape[0]-s.Rows {
		return fmt.Errorf("%v: rows %d..%d are outside the tensor", s.Info, s.Row0, s.Row0+s.Rows)
	}
	return nil
}

// A problems list gathers complaints into one line, the first few in full and the rest as a count.
type problems struct {
	list []string
	more int
}

const maxProblems = 10

func (p *problems) addf(format string, args ...any) {
	if len(p.list) == maxProblems {
		p.more++
		return
	}
	p.list = append(p.list, fmt.Sprintf(format, args...))
}

func (p *problems) String() string {
	s := strings.Join(p.list, "; ")
	if p.more > 0 {
		s += fmt.Sprintf("; and %d more", p.more)
	}
	return s
}

func (p *problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	return errors.New(p.String())
}
