//go:build !amd64 || purego

package kernel

// This build has no vector routines, and no implementation that would call them.

func expVectors(lanes, *float32, *float32, float32, float32, *float32, int)          {}
func maxVectors(lanes, *float32, *float32, int)                                      {}
func swiGLUVectors(lanes, *float32, *float32, *float32, int)                         {}
func swiGLUGradVectors(lanes, *float32, *float32, *float32, *float32, *float32, int) {}
func adamWVectors(lanes, *float32, *float32, *float32, *float32, *float32, int)      {}
func adamWBF16Vectors(lanes, *float32, *float32, *float32, *uint16, *uint16, int)    {}
func addVectors(lanes, *float32, *float32, int)                                      {}
func axpyVectors(lanes, *float32, float32, *float32, int)                            {}
func scaledVectors(lanes, *float32, float32, *float32, int)                          {}
func finiteVectors(lanes, *float32, *float32, int)                                   {}
func maxRowsVectors(lanes, *float32, *float32, int, int, int)                        {}
func expRowsVectors(lanes, *float32, *float32, *float32, int, int, int)              {}
func scaleRowsVectors(lanes, *float32, int, *float32, int, *float32, int, int)       {}
func gradRowsVectors(lanes, *float32, *float32, *float32, *float32, int, int, int)   {}
func rmsNormVectors(lanes, *float32, *float32, *float32, float32, int)               {}
func rmsNormGradVectors(lanes, *float32, *float32, *float32, *float32, *float32, float32, float32, int) {
}
func sumSquaresVectors(lanes, *float64, *float32, int)                      {}
func dotVectors(lanes, *float64, *float32, *float32, int)                   {}
func dotWeightedVectors(lanes, *float64, *float32, *float32, *float32, int) {}

// pause gives way to the other thread of the core, where there is an instruction for it.
func pause() {}
