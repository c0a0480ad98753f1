package launch

import (
	"fmt"
	"math/bits"
	"syscall"

	"golang.org/x/sys/unix"
)

// attributes give a rank a process group of its own and its death with the launcher. The signal comes when the thread that
// started the process ends, so that thread must last as long.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// Cores lists the processors that the calling thread may use, in the order of their numbers; nil where the system does not
// tell.
func Cores() (cores []int) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil
	}
	for i := range len(set) * bits.UintSize {
		if set.IsSet(i) {
			cores = append(cores, i)
		}
	}
	return cores
}

// onCores calls f with the calling thread bound to some cores, which a process that f starts inherits from its first
// instruction on. The caller has locked the thread: from such a one the Go runtime makes no other threads.
func onCores(cores []int, f func() error) error {
	var before, set unix.CPUSet
	for _, c := range cores {
		set.Set(c)
	}
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("bind to cores: %w", err)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("bind to cores %v: %w", cores, err)
	}
	err := f()
	if restoreErr := unix.SchedSetaffinity(0, &before); err == nil && restoreErr != nil {
		err = fmt.Errorf("unbind the launcher: %w", restoreErr)
	}
	return err
}
