package main

import (
	"errors"
	"syscall"
)

// flockDir takes the lock of a directory: one holder, until it lets go or its process ends, however that happens. It leaves
// nothing in the file system. syscall.EWOULDBLOCK says that somebody else holds it.
func flockDir(dir string) (unlock func(), err error) {
	fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		syscall.Close(fd)
		return nil, err
	}
	return func() { syscall.Close(fd) }, nil
}

// lockDir takes the run directory for this process, so that two runs cannot write into one. A file system without locks on
// directories gives none, and no error.
func lockDir(dir string) (unlock func(), err error) {
	unlock, err = flockDir(dir)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, usagef("%s: a run is going on in it; end that one first, or choose another directory with --out", dir)
	}
	if err != nil {
		return func() {}, nil
	}
	return unlock, nil
}
