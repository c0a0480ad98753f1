package launch

import "syscall"

// attributes give a rank a process group of its own and its death with the launcher. The signal comes when the thread that
// started the process ends, so that thread must last as long.
func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
