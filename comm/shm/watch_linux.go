package shm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// watcher notices the end of another process.
type watcher struct {
	mu    sync.Mutex
	pidfd *os.File // nil: none, or not to be had
	stop  bool
}

// watch tells p when the process that holds its slot ends.
func (p *peer) watch() {
	pid, start := int(p.slot.pid.Load()), p.slot.start.Load()
	if pid == os.Getpid() {
		return // ranks of one process end together
	}
	w := &p.watcher
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stop {
		return
	}
	if fd, err := unix.PidfdOpen(pid, 0); err == nil {
		if unix.SetNonblock(fd, true) == nil {
			w.pidfd = os.NewFile(uintptr(fd), "pidfd")
		} else {
			unix.Close(fd)
		}
	}
	// With the descriptor in hand the process cannot be exchanged for another any more.
	if !alive(pid, start) {
		p.t.background.Go(p.died)
		return
	}
	p.t.background.Go(func() {
		if p.waitExit(pid, start) {
			p.died()
		}
	})
}

// waitExit returns true when the process has ended, false when the transport closes first.
func (p *peer) waitExit(pid int, start uint64) bool {
	if f := p.watcher.pidfd; f != nil {
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool {
				fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
				n, err := unix.Poll(fds, 0)
				return n > 0 && err == nil
			})
		}
		if err == nil {
			return true
		}
		// Closed, or a kernel whose pidfd cannot be polled.
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-p.t.closing:
			return false
		case <-tick.C:
			if !alive(pid, start) {
				return true
			}
		}
	}
}

// unwatch ends the watch; closing is closed by now.
func (p *peer) unwatch() {
	w := &p.watcher
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stop = true
	if w.pidfd != nil {
		w.pidfd.Close()
	}
}

// alive tells whether the process that started at start still runs. A zombie does not.
func alive(pid int, start uint64) bool {
	state, began, err := processStat(pid)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return false
	}
	if err != nil {
		return unix.Kill(pid, 0) != unix.ESRCH
	}
	return began == start && state != 'Z' && state != 'X'
}

func startTime(pid int) (uint64, error) {
	_, start, err := processStat(pid)
	return start, err
}

// processStat reads the state and the start time (in clock ticks since boot) of a process: fields 3 and 22 of
// /proc/PID/stat, proc(5).
func processStat(pid int) (state byte, start uint64, err error) {
	name := "/proc/" + strconv.Itoa(pid) + "/stat"
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, err
	}
	// Field 2 is the command in parentheses, which may hold anything, parentheses too.
	i := bytes.LastIndexByte(b, ')')
	fields := bytes.Fields(b[i+1:])
	if i < 0 || len(fields) < 20 {
		return 0, 0, fmt.Errorf("%s: unexpected form", name)
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("%s: start time: %w", name, err)
	}
	return fields[0][0], start, nil
}

func pidNamespace() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, fmt.Errorf("read PID namespace: %w", err)
	}
	return st.Ino, nil
}
