//go:build !linux

package shm

import (
	"context"
	"errors"

	"moetor/comm"
)

var errNeedsLinux = errors.New("shared-memory transport needs Linux; use --transport tcp")

// Create refuses: the transport needs Linux.
func Create(path string, size int, o Options) error { return errNeedsLinux }

// Attach refuses: the transport needs Linux.
func Attach(ctx context.Context, path string, rank, size int) (comm.Transport, error) {
	return nil, errNeedsLinux
}
