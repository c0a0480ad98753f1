package lowp

import "sync/atomic"

// lanes is the number of float32 values of a vector register.
type lanes int

const (
	scalar  lanes = 0
	lanes8  lanes = 8
	lanes16 lanes = 16
)

type impl struct {
	name    string
	vectors lanes // scalar: plain Go
}

// impls are what this processor can run, best first; the portable one is always last.
var impls = append(vectorImpls(), impl{name: "portable"})

var active = func() *atomic.Pointer[impl] {
	p := new(atomic.Pointer[impl])
	p.Store(&impls[0])
	return p
}()

// Impls names the implementations in this binary ("portable", "avx2", "avx512") that this processor can run, best first.
func Impls() []string {
	names := make([]string, len(impls))
	for i, m := range impls {
		names[i] = m.name
	}
	return names
}

// Use makes an implementation the active one; ok is false, and nothing changes, if Impls does not name it. restore brings
// back the one before. All implementations give the same bits.
func Use(name string) (restore func(), ok bool) {
	for i := range impls {
		if impls[i].name == name {
			before := active.Swap(&impls[i])
			return func() { active.Store(before) }, true
		}
	}
	return func() {}, false
}

// Active names the implementation in use: the best one, unless Use chose another.
func Active() string { return active.Load().name }
