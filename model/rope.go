package model

import "math"

// rope is rotary position embedding (Su et al., 2021) on interleaved pairs: columns 2j and 2j+1 turn by
// position * theta^(-2j/columns). The angles are computed in float64 and their cosine and sine kept as float32.
type rope struct {
	half     int
	cos, sin []float32 // [positions, half]
}

func newRope(positions, columns int, theta float64) *rope {
	p := &rope{half: columns / 2}
	p.cos, p.sin = make([]float32, positions*p.half), make([]float32, positions*p.half)
	for t := range positions {
		for j := range p.half {
			sin, cos := math.Sincos(float64(t) * math.Pow(theta, -2*float64(j)/float64(columns)))
			p.cos[t*p.half+j], p.sin[t*p.half+j] = float32(cos), float32(sin)
		}
	}
	return p
}

// rotate turns x in place to a position: (a, b) becomes (a cos - b sin, a sin + b cos).
func (p *rope) rotate(x []float32, position int32) {
	cos, sin := p.at(position)
	for j, c := range cos {
		a, b := x[2*j], x[2*j+1]
		x[2*j], x[2*j+1] = a*c-b*sin[j], a*sin[j]+b*c
	}
}

// unrotate is the backward of rotate: a rotation's transpose turns back.
func (p *rope) unrotate(dx []float32, position int32) {
	cos, sin := p.at(position)
	for j, c := range cos {
		a, b := dx[2*j], dx[2*j+1]
		dx[2*j], dx[2*j+1] = a*c+b*sin[j], b*c-a*sin[j]
	}
}

func (p *rope) at(position int32) (cos, sin []float32) {
	i := int(position) * p.half
	return p.cos[i : i+p.half], p.sin[i : i+p.half]
}
