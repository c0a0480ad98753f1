//go:build !amd64 || purego

package lowp

// This build has no vector routines, and no implementation that would call them.

func vectorImpls() []impl { return nil }

func decodeVectors(lanes, Format, *float32, int, *byte, int, *float32, int, int, int) {}
func decodeColsVectors(lanes, Format, *float32, int, *byte, int, *float32, int, int)  {}
func encodeVectors(lanes, Format, *byte, int, *float32, int, *float32, int, int, int) {}
func encodeColsVectors(lanes, Format, *byte, int, *float32, int, *float32, int, int)  {}
func amaxTilesVectors(lanes, *uint32, int, *float32, int, int, int)                   {}
func amaxColsVectors(lanes, *uint32, *float32, int, int, int)                         {}
