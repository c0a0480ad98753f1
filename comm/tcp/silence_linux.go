package tcp

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// limitSilence sets how long what is sent may go without an acknowledgement, and with it how long keep-alive probes may.
func limitSilence(c *net.TCPConn, limit time.Duration) {
	raw, err := c.SyscallConn()
	if limit <= 0 || err != nil {
		return
	}
	// A kernel that refuses keeps its own limits.
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
	})
}
