package inproc_test

import (
	"testing"

	"moetor/comm"
	"moetor/comm/commtest"
	"moetor/comm/inproc"
)

func TestTransport(t *testing.T) {
	commtest.Run(t, func(t *testing.T, n int) []comm.Transport { return inproc.New(n) })
}

func BenchmarkTransport(b *testing.B) {
	commtest.Bench(b, func(b *testing.B, n int) []comm.Transport { return inproc.New(n) })
}
