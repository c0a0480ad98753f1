package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Layout of the mapped file, in the byte order of the host:
//
//	0          header
//	4096       slot of rank 0, slot of rank 1, ... 256 bytes each
//	(page)     rings: from 0 to 1, from 0 to 2, ..., from size-1 to size-2, each a ringControl and its bytes
//
// Words that different processes write lie at least 128 bytes apart (two cache lines: adjacent lines are prefetched in pairs).
const (
	magic    = 0x6d6f65746f72_0001 // "moetor", version of the layout
	pageSize = 4096                // alignment inside the file only; any page size of the machine does
)

type header struct {
	magic    uint64
	total    uint64 // bytes of the file
	ring     uint64 // bytes of one ring's data
	ranks    uint32
	_        [100]byte
	attached atomic.Uint32 // ranks that have opened everything; the last one removes the directory
}

// States of a slot.
const (
	slotFree uint32 = iota
	slotClaimed
	slotAttached
	slotClosed
)

type slot struct {
	state     atomic.Uint32
	pid       atomic.Uint32
	start     atomic.Uint64 // start time of the process in clock ticks, against reuse of pid
	namespace atomic.Uint64 // inode of the process's PID namespace: pids of another one mean nothing here
	_         [104]byte
	sleeping  atomic.Uint32 // 1: the rank sleeps on its bell, or is about to after one more look
	_         [124]byte
}

type ringControl struct {
	head    atomic.Uint64 // bytes ever written; the producer's
	_       [120]byte
	tail    atomic.Uint64 // bytes ever read; the consumer's
	_       [120]byte
	waiting atomic.Uint32 // 1: the producer wants to hear of new room
	_       [124]byte
}

const (
	slotBytes    = int(unsafe.Sizeof(slot{}))
	controlBytes = int(unsafe.Sizeof(ringControl{}))
)

func roundUp(n, to int) int { return (n + to - 1) / to * to }

func ringsOffset(size int) int { return roundUp(pageSize+size*slotBytes, pageSize) }

func segmentBytes(size, ring int) int {
	return ringsOffset(size) + size*(size-1)*(controlBytes+ring)
}

// segment is one process's mapping.
type segment struct {
	mem  []byte
	size int
	ring int
}

func (s *segment) header() *header { return (*header)(unsafe.Pointer(&s.mem[0])) }

func (s *segment) slot(rank int) *slot {
	return (*slot)(unsafe.Pointer(&s.mem[pageSize+rank*slotBytes]))
}

// pair gives the ring from one rank to another. from != to.
func (s *segment) pair(from, to int) (*ringControl, []byte) {
	i := from*(s.size-1) + to
	if to > from {
		i--
	}
	off := ringsOffset(s.size) + i*(controlBytes+s.ring)
	data := off + controlBytes
	return (*ringControl)(unsafe.Pointer(&s.mem[off])), s.mem[data : data+s.ring : data+s.ring]
}

// Create makes a segment for the given number of ranks at path: a directory that must not exist yet, or a bare name for
// one under Dir. It appears complete or not at all. Only the calling user can attach.
func Create(path string, size int, o Options) (err error) {
	dir, err := resolve(path)
	if err != nil {
		return err
	}
	if size < 1 || size > MaxRanks {
		return fmt.Errorf("shm: segment for %d ranks: want 1 to %d", size, MaxRanks)
	}
	ring, fixed, err := o.ring(size)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(dir); err == nil {
		return fmt.Errorf("shm: segment %s exists already: another job uses it, or remove it", dir)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".moetor-new-*")
	if err != nil {
		return fmt.Errorf("shm: create segment: %w", err)
	}
	defer func() {
		if err != nil {
			os.RemoveAll(tmp)
		}
	}()
	for r := range size {
		if err := unix.Mkfifo(filepath.Join(tmp, bellPrefix+strconv.Itoa(r)), 0o600); err != nil {
			return fmt.Errorf("shm: create segment %s: named pipe: %w", dir, err)
		}
	}
	for {
		err = fill(filepath.Join(tmp, segmentFile), size, ring)
		if err == nil || fixed || ring <= minRing || !errors.Is(err, unix.ENOSPC) {
			break
		}
		ring /= 2 // a small /dev/shm is no reason to fail
	}
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("shm: no room for the %d bytes of a segment for %d ranks in %s: %w",
			segmentBytes(size, ring), size, filepath.Dir(dir), err)
	}
	if err != nil {
		return fmt.Errorf("shm: create segment %s: %w", dir, err)
	}
	// Renaming onto an existing segment fails, for that is a directory which is not empty.
	if err := os.Rename(tmp, dir); err != nil {
		return fmt.Errorf("shm: create segment: %w", err)
	}
	return nil
}

// fill writes an empty segment. It reserves every page, for a store to a page that the file system cannot give is a
// SIGBUS in the middle of a run.
func fill(path string, size, ring int) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	total := segmentBytes(size, ring)
	if err := f.Truncate(int64(total)); err != nil {
		return err
	}
	err = unix.EINTR
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(f.Fd()), 0, 0, int64(total))
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		f.Truncate(0)
		return err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	h := (*header)(unsafe.Pointer(&mem[0]))
	h.magic, h.total, h.ring, h.ranks = magic, uint64(total), uint64(ring), uint32(size)
	return unix.Munmap(mem)
}

// openSegment maps an existing segment and checks that it is one for size ranks.
func openSegment(dir string, size int) (*segment, error) {
	f, err := os.OpenFile(filepath.Join(dir, segmentFile), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Size() < pageSize {
		return nil, fmt.Errorf("shm: %s is no segment: %d bytes", dir, fi.Size())
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(fi.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shm: map segment %s: %w", dir, err)
	}
	s := &segment{mem: mem, size: size}
	h := s.header()
	switch {
	case h.magic != magic:
		err = fmt.Errorf("shm: %s is no segment of this version: magic %#x, want %#x", dir, h.magic, uint64(magic))
	case int(h.ranks) != size:
		err = fmt.Errorf("shm: segment %s is for %d ranks, this rank was started as one of %d", dir, h.ranks, size)
	case h.ring < minRing || h.ring > maxRing || h.ring&(h.ring-1) != 0 ||
		h.total != uint64(fi.Size()) || segmentBytes(size, int(h.ring)) != int(fi.Size()):
		err = fmt.Errorf("shm: segment %s is damaged: %d bytes, header says %d with rings of %d", dir, fi.Size(), h.total, h.ring)
	}
	if err != nil {
		unix.Munmap(mem)
		return nil, err
	}
	s.ring = int(h.ring)
	return s, nil
}

func (s *segment) close() error {
	mem := s.mem
	s.mem = nil
	return unix.Munmap(mem)
}
