package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"moetor/comm"
)

var (
	// ErrPeerDied is wrapped by the *comm.PeerError of a rank whose process ended without closing its transport. That of a
	// rank that closed wraps comm.ErrPeerClosed.
	ErrPeerDied = errors.New("process died")

	errPeerClosed = &closedError{}
)

const (
	// MaxRanks is the most ranks a segment takes.
	MaxRanks = 1024

	minRing     = 16 << 10
	maxRing     = 1 << 30
	defaultRing = 1 << 20
	// defaultTotal bounds the rings together: containers commonly get a /dev/shm of 64 MiB.
	defaultTotal = 60 << 20
)

// closedError is comm.ErrPeerClosed in the words of this transport, which has no connections.
type closedError struct{}

func (*closedError) Error() string { return "it closed its transport" }
func (*closedError) Unwrap() error { return comm.ErrPeerClosed }

// Options are the sizes of a segment.
type Options struct {
	// RingBytes is the room for messages in flight from one rank to one other: a power of two from 16 KiB to 1 GiB.
	// 0 chooses: 1 MiB, less where the rings of all pairs would pass 60 MiB together or the file system lacks the room.
	RingBytes int
}

func (o Options) ring(size int) (bytes int, fixed bool, err error) {
	if o.RingBytes != 0 {
		r := o.RingBytes
		if r < minRing || r > maxRing || r&(r-1) != 0 {
			return 0, false, fmt.Errorf("shm: ring of %d bytes: want a power of two from %d to %d", r, minRing, maxRing)
		}
		return r, true, nil
	}
	r := defaultRing
	for r > minRing && size*(size-1)*r > defaultTotal {
		r /= 2
	}
	return r, false, nil
}

// resolve gives a segment's directory: a bare name stands for one under Dir.
func resolve(path string) (string, error) {
	if path == "" || path == "." || path == ".." {
		return "", fmt.Errorf("shm: %q is no path for a segment", path)
	}
	if !strings.ContainsRune(path, filepath.Separator) {
		return filepath.Join(Dir(), path), nil
	}
	return filepath.Clean(path), nil
}

// Dir is where segments given by a bare name live: /dev/shm, or the directory for temporary files where there is none.
func Dir() string {
	if fi, err := os.Stat("/dev/shm"); err == nil && fi.IsDir() {
		return "/dev/shm"
	}
	return os.TempDir()
}

// Remove deletes a segment that Create made. It is no error when the segment is gone already. Ranks that have attached
// are not disturbed. A directory that holds anything but a segment is refused.
func Remove(path string) error {
	dir, err := resolve(path)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("shm: remove segment: %w", err)
	}
	for _, e := range entries {
		if e.Name() != segmentFile && !strings.HasPrefix(e.Name(), bellPrefix) {
			return fmt.Errorf("shm: %s is no segment (it holds %s): not removed", dir, e.Name())
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("shm: remove segment: %w", err)
	}
	return nil
}

const (
	segmentFile = "segment"
	bellPrefix  = "bell-"
)
