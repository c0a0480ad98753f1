//go:build !linux

package launch

import "syscall"

// attributes give a rank a process group of its own. Nothing here ends it with the launcher; it ends when it loses a rank
// that the launcher no longer connects, or when the user ends it.
func attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
