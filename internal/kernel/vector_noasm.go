//go:build !amd64 || purego

package kernel

// This build has no vector routines, and no implementation that would call them.

func expVectors(lanes, *float32, *float32, float32, float32, *float32, int)          {}
func maxVectors(lanes, *float32, *float32, int)                                      {}
func swiGLUVectors(lanes, *float32, *float32, *float32, int)                         {}
func swiGLUGradVectors(lanes, *float32, *float32, *float32, *float32, *float32, int) {}
func adamWVectors(lanes, *float32, *float32, *float32, *float32, *float32, int)      {}
