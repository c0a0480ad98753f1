package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

const manifestName = "manifest.json"

// A manifest is the content of manifest.json, less its last key: sha256, the hash of all bytes before it (see seal).
type manifest struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	Meta    Meta   `json:"meta"`
	Files   []File `json:"files"` // by rank
}

func fileName(rank int) string { return fmt.Sprintf("rank-%04d.h5", rank) }

// The seal is the end of a manifest: `,"sha256":"<64 hex digits>"}` and a newline. Its length is fixed, so the hashed
// part is known without parsing, and a cut or a flipped bit anywhere in the file is seen, in white space too.
const (
	sealHead = `,"sha256":"`
	sealTail = "\"}\n"
	sealLen  = len(sealHead) + 2*sha256.Size + len(sealTail)
)

func encodeManifest(m *manifest) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(m); err != nil {
		return nil, err
	}
	return seal(bytes.TrimSuffix(buf.Bytes(), []byte("}\n"))), nil
}

// seal gives body and its seal in new memory: what stands behind body in its array is not touched.
func seal(body []byte) []byte {
	sum := sha256.Sum256(body)
	return fmt.Appendf(slices.Clip(body), "%s%s%s", sealHead, hex.EncodeToString(sum[:]), sealTail)
}

var errSeal = errors.New("damaged or cut off (its own SHA-256 does not match)")

func decodeManifest(data []byte) (*manifest, error) {
	// A later version may seal itself otherwise, so the version is told first where it can be read at all.
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	readable := json.Unmarshal(data, &head) == nil
	if readable && head.Format == formatName && head.Version != FormatVersion {
		return nil, fmt.Errorf("format version %d is unknown, this program reads version %d", head.Version, FormatVersion)
	}
	if len(data) < sealLen {
		return nil, errSeal
	}
	if body := data[:len(data)-sealLen]; !bytes.Equal(seal(body), data) {
		return nil, errSeal
	}
	var m manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, err
	}
	if m.Format != formatName {
		return nil, fmt.Errorf("format %q, want %q", m.Format, formatName)
	}
	return &m, m.validate()
}

// validate checks all that can be checked without the files: names, ranges, and that the slices of every tensor cover
// it once. It holds for what Commit writes and, because a manifest may come from anywhere, for what Open reads.
func (m *manifest) validate() error {
	if err := m.Meta.validate(); err != nil {
		return err
	}
	if len(m.Files) == 0 {
		return errors.New("no files")
	}
	if w := m.Meta.Mesh.World; w > 0 && len(m.Files) != w {
		return fmt.Errorf("%d files, but mesh.world=%d: every rank writes one", len(m.Files), w)
	}
	for i, f := range m.Files {
		if f.Rank != i {
			return fmt.Errorf("file %d of %d is of rank %d: want each rank once", i, len(m.Files), f.Rank)
		}
		if f.Name != fileName(f.Rank) {
			return fmt.Errorf("rank %d: file %q, want %q", f.Rank, f.Name, fileName(f.Rank))
		}
		if _, err := hex.DecodeString(f.SHA256); err != nil || len(f.SHA256) != 2*sha256.Size || f.Size <= 0 {
			return fmt.Errorf("%s: no valid size and SHA-256", f.Name)
		}
		for _, s := range f.Slices {
			if err := s.validate(); err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
			if s.Rows == 0 {
				return fmt.Errorf("%s: %v: slice without rows", f.Name, s.Info)
			}
		}
	}
	_, err := m.index()
	return err
}

type tensorKey struct {
	name string
	kind Kind
}

// A piece is a slice and the file that holds it.
type piece struct {
	SliceInfo
	file int // index in manifest.Files
}

// A placed tensor is its shape and the pieces that make it up, by row.
type placed struct {
	Info
	pieces []piece
}

// index gathers the pieces of every tensor, sorted by name and kind, and refuses gaps, overlaps, unequal shapes and
// moments without a weight, each by name.
func (m *manifest) index() ([]placed, error) {
	at := map[tensorKey]int{}
	var all []placed
	var bad problems
	for fi, f := range m.Files {
		for _, s := range f.Slices {
			key := tensorKey{s.Name, s.Kind}
			i, ok := at[key]
			if !ok {
				i = len(all)
				at[key] = i
				all = append(all, placed{Info: s.Info})
			}
			if !slices.Equal(all[i].Shape, s.Shape) {
				bad.addf("%v: %s says its shape is %v", all[i].Info, f.Name, s.Shape)
				continue
			}
			all[i].pieces = append(all[i].pieces, piece{s, fi})
		}
	}
	slices.SortFunc(all, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
	})
	for i, t := range all {
		slices.SortFunc(t.pieces, func(a, b piece) int { return cmp.Or(cmp.Compare(a.Row0, b.Row0), cmp.Compare(a.file, b.file)) })
		next, last := 0, ""
		for _, p := range t.pieces {
			name := m.Files[p.file].Name
			switch {
			case p.Row0 < next:
				bad.addf("%v: rows %d..%d are stored twice, in %s and %s", t.Info, p.Row0, min(next, p.Row0+p.Rows), last, name)
			case p.Row0 > next:
				bad.addf("%v: rows %d..%d are in no file", t.Info, next, p.Row0)
			}
			next, last = max(next, p.Row0+p.Rows), name
		}
		if next < t.Shape[0] {
			bad.addf("%v: rows %d..%d are in no file", t.Info, next, t.Shape[0])
		}
		if t.Kind == Weight {
			continue
		}
		// Sorted by name and kind: the weight stands first among the tensors of its name.
		w := i
		for w > 0 && all[w-1].Name == t.Name {
			w--
		}
		if all[w].Kind != Weight {
			bad.addf("%v: has no weight", t.Info)
		} else if !slices.Equal(all[w].Shape, t.Shape) {
			bad.addf("%v: its weight has shape %v", t.Info, all[w].Shape)
		}
	}
	return all, bad.err()
}
