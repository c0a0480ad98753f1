package shm

import (
	"encoding/binary"
	"fmt"

	"moetor/comm"
)

// A fragment in a ring is a header of 16 bytes and its payload, padded to 16:
//
//	0  tag
//	4  kind (upper two bits) and bytes of payload (lower thirty)
//	8  bytes of the whole message
//
// Rings are powers of two, so a header never wraps; a payload may.
const (
	fragmentHeader = 16
	maxFragment    = 64 << 10

	kindMore  = 0 // continues the message
	kindFirst = 1 // begins a message
	kindAbort = 2 // the sender gave the message up; what came of it is void
)

type fragment struct {
	tag   comm.Tag
	kind  uint32
	total uint64
	n     int
}

// producer is the sending end of a ring. One goroutine at a time.
type producer struct {
	*ringControl
	data []byte
	seen uint64 // tail when last looked at
}

// maxPayload is the most payload that one fragment carries. A quarter of the ring keeps both ends of it busy.
func (p *producer) maxPayload() int { return min(maxFragment, len(p.data)/4) }

// room tells whether a fragment with n bytes of payload fits.
func (p *producer) room(n int) bool {
	need := uint64(fragmentHeader + roundUp(n, fragmentHeader))
	head := p.head.Load()
	if uint64(len(p.data))-(head-p.seen) >= need {
		return true
	}
	p.seen = p.tail.Load()
	return uint64(len(p.data))-(head-p.seen) >= need
}

// put publishes a fragment for which there is room.
func (p *producer) put(tag comm.Tag, kind uint32, total int, payload []byte) {
	head := p.head.Load()
	mask := uint64(len(p.data) - 1)
	h := p.data[head&mask:]
	binary.NativeEndian.PutUint32(h, uint32(tag))
	binary.NativeEndian.PutUint32(h[4:], kind<<30|uint32(len(payload)))
	binary.NativeEndian.PutUint64(h[8:], uint64(total))
	at := (head + fragmentHeader) & mask
	if n := copy(p.data[at:], payload); n < len(payload) {
		copy(p.data, payload[n:])
	}
	p.head.Store(head + fragmentHeader + uint64(roundUp(len(payload), fragmentHeader)))
}

// consumer is the receiving end of a ring. One goroutine at a time.
type consumer struct {
	*ringControl
	data []byte
}

func (c *consumer) empty() bool { return c.head.Load() == c.tail.Load() }

// next returns the oldest fragment and its payload in two parts (the second is empty unless the payload wraps). They are
// valid until advance. ok is false when the ring is empty.
func (c *consumer) next() (f fragment, a, b []byte, ok bool, err error) {
	head, tail := c.head.Load(), c.tail.Load()
	if head == tail {
		return f, nil, nil, false, nil
	}
	mask := uint64(len(c.data) - 1)
	h := c.data[tail&mask:]
	word := binary.NativeEndian.Uint32(h[4:])
	f = fragment{
		tag:   comm.Tag(binary.NativeEndian.Uint32(h)),
		kind:  word >> 30,
		total: binary.NativeEndian.Uint64(h[8:]),
		n:     int(word & (1<<30 - 1)),
	}
	used := head - tail
	if need := uint64(fragmentHeader + roundUp(f.n, fragmentHeader)); used > uint64(len(c.data)) || need > used {
		return f, nil, nil, false, fmt.Errorf("ring is damaged: fragment of %d bytes where %d are in use", need, used)
	}
	at := (tail + fragmentHeader) & mask
	if end := int(at) + f.n; end > len(c.data) {
		return f, c.data[at:], c.data[:end-len(c.data)], true, nil
	}
	return f, c.data[at : int(at)+f.n], nil, true, nil
}

// advance frees the fragment that next returned and tells whether at least half of the ring is free now.
func (c *consumer) advance(f fragment) (halfFree bool) {
	tail := c.tail.Load() + uint64(fragmentHeader+roundUp(f.n, fragmentHeader))
	c.tail.Store(tail)
	return c.head.Load()-tail <= uint64(len(c.data)/2)
}
