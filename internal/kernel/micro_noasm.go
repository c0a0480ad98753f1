//go:build !amd64 || purego

package kernel

// vectorImpls returns nothing: this build has the portable implementation only.
func vectorImpls() []impl { return nil }
