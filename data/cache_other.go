//go:build !linux && !darwin

package data

import (
	"errors"
	"os"
)

// mapFile reads a whole file where it cannot be mapped.
func mapFile(path string) (b []byte, unmap func() error, err error) {
	b, err = os.ReadFile(path)
	return b, func() error { return nil }, err
}

func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
