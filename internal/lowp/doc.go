// Package lowp holds numbers of few bits: their encodings, and matrices of them with scales, as DeepSeek-V3 (report,
// section 3.3) stores operands of matrix products. Nothing here multiplies matrices: package kernel does.
//
// # Reading order
//
// format.go has the encodings and the scalar conversions, which are the specification. scale.go chooses scales. matrix.go
// says what is where in a [Matrix]; quantize.go goes over its tiles. row.go converts codes without scales. grid.go is what
// all of them are made of: loops over rows of codes, each with its plain body and its vector routine. impl.go and
// vector_amd64.go choose and bind those. lowp_amd64.s and lowp_decl_amd64.go are written by _gen and never edited. stats.go
// looks at the damage.
//
// # Use
//
// A [Quant] says how an operand is stored: format, kind of scale, tile. [Quant.CodeBytes] and [Quant.ScaleCount] say how
// much memory that takes; the caller has it (or calls [New]) and fills a [Matrix]:
//
//	Quantize(m, x, ld)             // all of it
//	QuantizeRow(m, i, x)           // one row, for tiles one row high: a producer quantises what it has just made
//	QuantizeStrip(m, i, x, ld)     // the rows of one row of tiles: what a thread takes
//	Dequantize(x, ld, m)           // the way back; DequantizePart for a rectangle
//	Requantize(dst, src)           // from one tiling to another, through a few tiles of float32; RequantizeStrip
//
// Below the matrices stand [EncodeRow], [DecodeRow] and [DecodePanel], below them [Format.Encode] and [Format.Decode].
// [Measure] and [Matrix.FirstNonFinite] say what became of the values, on request.
//
// # Tiles and scales
//
// A tile has one scale s. A code stands for x/s, divided and rounded once to float32 and then once to the format, as in
// DeepSeek's kernel.py; multiplying by 1/s instead, as DeepGEMM does, can give the neighbouring code unless s is a power of
// two. A value is code times s, rounded to float32.
//
// 1x128 (activations and gradients), 128x128 (weights), 128x1 (both sides of a weight gradient), 1x32 (MX) and the whole
// matrix are the tiles in use; any other works. Scales stand row-major, one row for each row of tiles, and a tile at the
// right or lower edge is just smaller: nothing is padded, and no value outside a matrix is read.
//
// # Contracts
//
// A code depends on the values of its tile and nothing else: not on the position of the tile, on threads, or on the
// implementation. All implementations give the same bits.
//
// A NaN stays a NaN, and an infinity stays one, or becomes NaN where the format has none: what broke in a computation must
// not come out of a matrix as a sound number. Its tile is lost (see [ScaleKind.Scale]); other tiles are not touched. Finite
// values saturate, but only without scales, or as part of a lost tile: else the scale has made room for the largest.
//
// Slices too short for a shape are bugs and panic with the routine's name and both numbers. A warm call allocates nothing.
package lowp
