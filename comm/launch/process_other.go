//go:build !linux

package launch

import "syscall"

// attributes give a rank a process group of its own. Nothing here ends it with the launcher; it ends when it loses a rank
// that the launcher no longer connects, or when the user ends it.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// Cores is nil: this system does not tell which processors a thread may use.
func Cores() []int { return nil }

// onCores calls f: this system does not bind.
func onCores(_ []int, f func() error) error { return f() }
