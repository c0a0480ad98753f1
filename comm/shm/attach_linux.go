package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"moetor/comm"

	"golang.org/x/sys/unix"
)

// Attach joins a segment as one of its ranks. It waits until the segment exists and all ranks have attached; when ctx ends
// first, the error names the ranks that are missing. The last rank to attach removes the segment's directory.
func Attach(ctx context.Context, path string, rank, size int) (_ comm.Transport, err error) {
	dir, err := resolve(path)
	if err != nil {
		return nil, err
	}
	if size < 1 || size > MaxRanks || rank < 0 || rank >= size {
		return nil, fmt.Errorf("shm: rank %d of %d: want a rank below the size and a size from 1 to %d", rank, size, MaxRanks)
	}
	seg, err := waitSegment(ctx, dir, size)
	if err != nil {
		return nil, err
	}
	t := &transport{
		rank: rank, size: size, seg: seg, slot: seg.slot(rank),
		peers:   make([]*peer, size),
		bells:   make([]int, size),
		closing: make(chan struct{}),
	}
	if size <= runtime.NumCPU() {
		t.maxSpin = 200
	}
	for r := range t.bells {
		t.bells[r] = -1
	}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	for r := range size {
		t.peers[r] = newPeer(t, r)
	}
	if err := t.openBells(dir); err != nil {
		return nil, err
	}
	if err := t.claim(); err != nil {
		return nil, err
	}
	t.background.Go(t.progress)
	if int(seg.header().attached.Add(1)) == size {
		if err := Remove(dir); err != nil {
			return nil, err
		}
	}
	if err := t.waitPeers(ctx, dir); err != nil {
		return nil, err
	}
	return t, nil
}

// waitSegment opens the segment as soon as it exists.
func waitSegment(ctx context.Context, dir string, size int) (*segment, error) {
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		seg, err := openSegment(dir, size)
		if err == nil {
			return seg, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("shm: segment %s does not exist (is it made by this job's launcher, and on this host?): %w",
				dir, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

func (t *transport) openBells(dir string) error {
	open := func(r int) (int, error) {
		name := filepath.Join(dir, bellPrefix+strconv.Itoa(r))
		// For reading and writing, so that neither end has to come first and no reader sees an end of file.
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("shm: open %s: %w", name, err)
		}
		return fd, nil
	}
	for r := range t.size {
		fd, err := open(r)
		if err != nil {
			return err
		}
		// The bells of others stay out of the poller: it would wake this process for bytes that are not for it.
		t.bells[r] = fd
	}
	fd, err := open(t.rank)
	if err != nil {
		return err
	}
	t.bell = os.NewFile(uintptr(fd), "bell") // non-blocking, hence polled
	return nil
}

// claim takes this rank's slot.
func (t *transport) claim() error {
	pid := os.Getpid()
	start, err := startTime(pid)
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	ns, err := pidNamespace()
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	if !t.slot.state.CompareAndSwap(slotFree, slotClaimed) {
		return fmt.Errorf("shm: rank %d is taken by process %d: two processes were started with the same rank",
			t.rank, t.slot.pid.Load())
	}
	t.slot.pid.Store(uint32(pid))
	t.slot.start.Store(start)
	t.slot.namespace.Store(ns)
	t.slot.state.Store(slotAttached)
	t.claimed = true
	return nil
}

// waitPeers waits until every rank has attached and puts a watch on each as it appears.
func (t *transport) waitPeers(ctx context.Context, dir string) error {
	ns := t.slot.namespace.Load()
	watched := make([]bool, t.size)
	watched[t.rank] = true
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		var missing []string
		for r, p := range t.peers {
			if watched[r] {
				continue
			}
			if p.slot.state.Load() < slotAttached {
				missing = append(missing, strconv.Itoa(r))
				continue
			}
			if theirs := p.slot.namespace.Load(); theirs != ns {
				return fmt.Errorf("shm: ranks %d and %d run in different PID namespaces and cannot watch each other; "+
					"use --transport tcp", t.rank, r)
			}
			p.watch()
			watched[r] = true
		}
		if len(missing) == 0 {
			return nil
		}
		for r, p := range t.peers {
			if watched[r] && errors.Is(p.goneErr(), ErrPeerDied) {
				return p.lost("attach")
			}
		}
		select {
		case <-ctx.Done():
			noun := "ranks"
			if len(missing) == 1 {
				noun = "rank"
			}
			return fmt.Errorf("shm: %s %s of %d did not attach to %s: %w",
				noun, strings.Join(missing, ", "), t.size, dir, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}
