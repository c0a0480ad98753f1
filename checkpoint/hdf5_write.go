//go:build cgo

package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"gonum.org/v1/hdf5"
)

// writeHDF5 writes the file of a rank. The caller holds the library (see [withHDF5]) and removes what a failure leaves.
func writeHDF5(path string, rank int, parts []Slice, meta *Meta) (err error) {
	file, err := hdf5.CreateFile(path, hdf5.F_ACC_EXCL)
	if err != nil {
		return errors.New("create")
	}
	defer closing(file, "the file", &err)
	root, err := file.OpenGroup("/")
	if err != nil {
		return fmt.Errorf("open /: %w", err)
	}
	defer closing(root, "/", &err)
	if err := writeHeader(root, rank); err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	if meta != nil {
		if err := writeState(file, meta); err != nil {
			return fmt.Errorf("write /state: %w", err)
		}
	}
	if len(parts) == 0 {
		return nil
	}
	groups, err := createKindGroups(file)
	if err != nil {
		return err
	}
	for i := range parts {
		s := &parts[i]
		if s.Rows == 0 {
			continue
		}
		step("write", path)
		if err = writeSlice(&groups[s.Kind].CommonFG, s); err != nil {
			err = fmt.Errorf("write %v: %w", Info{s.Name, s.Kind, s.Shape}, err)
			break
		}
	}
	for k, g := range groups {
		closing(g, kindGroups[k], &err)
	}
	step("close", path)
	return err
}

func createKindGroups(file *hdf5.File) (groups [numKinds]*hdf5.Group, err error) {
	parent, err := file.CreateGroup("/optimizer")
	if err != nil {
		return groups, fmt.Errorf("create /optimizer: %w", err)
	}
	defer closing(parent, "/optimizer", &err)
	for k, path := range kindGroups {
		if groups[k], err = file.CreateGroup(path); err != nil {
			for _, g := range groups[:k] {
				g.Close()
			}
			return groups, fmt.Errorf("create %s: %w", path, err)
		}
	}
	return groups, nil
}

func writeHeader(root *hdf5.Group, rank int) error {
	if err := writeStringAttr(root.Identifier, "format", formatName); err != nil {
		return err
	}
	if err := writeInt(root, "version", FormatVersion); err != nil {
		return err
	}
	return writeInt(root, "rank", int64(rank))
}

type stateInt struct {
	name  string
	value int64
}

// stateInts are the signed integer attributes of /state, in the order written.
func stateInts(m *Meta) []stateInt {
	return []stateInt{
		{"step", m.Step}, {"global_step", m.GlobalStep}, {"tokens", m.Tokens}, {"samples", m.Samples},
		{"params", m.Params}, {"active_params", m.ActiveParams},
		{"mesh_world", int64(m.Mesh.World)}, {"mesh_pipeline", int64(m.Mesh.Pipeline)},
		{"mesh_data", int64(m.Mesh.Data)}, {"mesh_expert", int64(m.Mesh.Expert)},
	}
}

// stateTexts are the string attributes of /state, in the order written.
func stateTexts(m *Meta) [][2]string {
	return [][2]string{{"engine", m.Engine}, {"stage", m.Stage}, {"data", m.Data}}
}

type stateBlob struct {
	name string
	data []byte
}

// stateBlobs are the byte datasets of /state; an empty one is not stored.
func stateBlobs(m *Meta) []stateBlob { return []stateBlob{{"rng", m.RNG}, {"tokenizer", m.Tokenizer}} }

func extraKeys(m *Meta) []string {
	keys := make([]string, 0, len(m.Extra))
	for k := range m.Extra {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func writeState(file *hdf5.File, m *Meta) (err error) {
	g, err := file.CreateGroup("/state")
	if err != nil {
		return err
	}
	defer closing(g, "/state", &err)
	for _, a := range stateTexts(m) {
		if err := writeStringAttr(g.Identifier, a[0], a[1]); err != nil {
			return fmt.Errorf("%s: %w", a[0], err)
		}
	}
	for _, a := range stateInts(m) {
		if err := writeInt(g, a.name, a.value); err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
	}
	if err := writeUint(g, "seed", m.Seed); err != nil {
		return fmt.Errorf("seed: %w", err)
	}
	if err := writeText(&g.CommonFG, "config", m.Config); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	for _, b := range stateBlobs(m) {
		if len(b.data) == 0 {
			continue
		}
		if err := writeBytes(&g.CommonFG, b.name, b.data); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
	}
	extra, err := g.CreateGroup("extra")
	if err != nil {
		return fmt.Errorf("extra: %w", err)
	}
	defer closing(extra, "extra", &err)
	for _, k := range extraKeys(m) {
		var text bytes.Buffer
		if err := json.Compact(&text, m.Extra[k]); err != nil { // as it will stand in the manifest
			return fmt.Errorf("extra/%s: %w", k, err)
		}
		if err := writeText(&extra.CommonFG, k, text.String()); err != nil {
			return fmt.Errorf("extra/%s: %w", k, err)
		}
	}
	return nil
}
