package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"moetor/comm"
)

// A frame is a header of headerBytes and the payload of one message. The header's own checksum is judged before its length
// is believed; it covers the payload's checksum, so together they cover every byte.
//
//	offset  bytes
//	     0      4  magic "MOEF"
//	     4      1  version
//	     5      1  kind: 0 message, 1 farewell
//	     6      2  zero
//	     8      4  tag
//	    12      4  number of the frame on this connection, from 0
//	    16      8  length of the payload in bytes
//	    24      4  CRC-32C of the payload
//	    28      4  CRC-32C of the 28 bytes before
//
// All numbers are little-endian. The last frame of a rank that closes is a farewell: its tag is one more than the rank
// that it lost first or waited for in vain, 0 if none, and it has no payload. A stream that ends without it is of a rank that died.
const (
	headerBytes  = 32
	frameMagic   = "MOEF"
	frameVersion = 1

	// smallPayload: up to this a payload passes through the connection's own buffer.
	smallPayload = 4 << 10
	// growBytes is the most memory taken for a payload before any of it has arrived.
	growBytes = 1 << 20

	kindMessage  = 0
	kindFarewell = 1
)

// A farewell ends the stream of a rank that has closed its transport.
type farewell struct{ lost int } // the rank that it lost first, or -1

func (f *farewell) Error() string { return comm.ErrPeerClosed.Error() }
func (f *farewell) Unwrap() error { return comm.ErrPeerClosed }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type header struct {
	kind   byte
	tag    comm.Tag
	seq    uint32
	length uint64
	sum    uint32 // of the payload
}

func (h *header) encode(b *[headerBytes]byte) {
	le := binary.LittleEndian
	copy(b[:], frameMagic)
	b[4], b[5], b[6], b[7] = frameVersion, h.kind, 0, 0
	le.PutUint32(b[8:], uint32(h.tag))
	le.PutUint32(b[12:], h.seq)
	le.PutUint64(b[16:], h.length)
	le.PutUint32(b[24:], h.sum)
	le.PutUint32(b[28:], crc32.Checksum(b[:28], castagnoli))
}

// decode accepts exactly what encode wrote as frame number seq, with a payload of at most limit bytes.
func (h *header) decode(b *[headerBytes]byte, seq uint32, limit uint64) error {
	le := binary.LittleEndian
	if string(b[:4]) != frameMagic {
		return fmt.Errorf("corrupt frame %d: begins with %x, not %x", seq, b[:4], frameMagic)
	}
	if got, want := crc32.Checksum(b[:28], castagnoli), le.Uint32(b[28:]); got != want {
		return fmt.Errorf("corrupt frame %d: checksum of the header is %08x, the header says %08x", seq, got, want)
	}
	if b[4] != frameVersion {
		return fmt.Errorf("frame %d has version %d, this program knows %d", seq, b[4], frameVersion)
	}
	if b[5] > kindFarewell {
		return fmt.Errorf("frame %d is of kind %d, this program knows 0 to %d", seq, b[5], kindFarewell)
	}
	*h = header{b[5], comm.Tag(le.Uint32(b[8:])), le.Uint32(b[12:]), le.Uint64(b[16:]), le.Uint32(b[24:])}
	if h.seq != seq {
		return fmt.Errorf("frame %d with tag %d where frame %d was due", h.seq, h.tag, seq)
	}
	if h.kind == kindFarewell && h.length != 0 {
		return fmt.Errorf("frame %d is a farewell of %d bytes, want none", seq, h.length)
	}
	if h.length > limit {
		return fmt.Errorf("message with tag %d announces %d bytes, the limit is %d", h.tag, h.length, limit)
	}
	return nil
}

// A reader takes frames from a connection and hands the messages to a mailbox.
type reader struct {
	r     io.Reader // buffered
	from  int
	box   *comm.Mailbox
	limit uint64
	// deadline makes reads fail at that time, or never if it is zero.
	deadline func(time.Time) error

	seq   uint32
	head  [headerBytes]byte
	small [smallPayload]byte
	wake  func() // ends a read into the buffer of a receiver that no longer waits
	woken atomic.Bool
}

func newReader(r io.Reader, from int, box *comm.Mailbox, limit uint64, deadline func(time.Time) error) *reader {
	f := &reader{r: r, from: from, box: box, limit: limit, deadline: deadline}
	f.wake = func() {
		f.woken.Store(true)
		_ = deadline(time.Unix(1, 0))
	}
	return f
}

// next moves one message. The error is comm.ErrPeerClosed itself when the stream ended between two frames, and a *farewell
// when the peer has closed its transport.
func (f *reader) next() error {
	if n, err := io.ReadFull(f.r, f.head[:]); err != nil {
		switch {
		case n > 0:
			return cutOff(err, "in the header of a message")
		case err == io.EOF:
			return comm.ErrPeerClosed
		}
		return closedBy(err)
	}
	var h header
	if err := h.decode(&f.head, f.seq, f.limit); err != nil {
		return err
	}
	f.seq++
	if h.kind == kindFarewell {
		return &farewell{int(int32(h.tag)) - 1}
	}
	if h.length <= smallPayload {
		p := f.small[:h.length]
		if _, err := io.ReadFull(f.r, p); err != nil {
			return h.cutOff(err, 0)
		}
		if err := h.check(p); err != nil {
			return err
		}
		f.box.Put(h.tag, p)
		return nil
	}
	if r := f.box.Claim(h.tag, int(h.length), f.wake); r != nil {
		return f.fill(&h, r)
	}
	return f.store(&h, nil)
}

// farewellFrame is the last frame of a connection.
func farewellFrame(seq uint32, lost int) []byte {
	h := header{kind: kindFarewell, tag: comm.Tag(lost + 1), seq: seq}
	var b [headerBytes]byte
	h.encode(&b)
	return b[:]
}

// fill reads the payload into the buffer of a receiver that waits for it.
func (f *reader) fill(h *header, r *comm.Receive) error {
	p := r.Bytes()
	n, err := io.ReadFull(f.r, p)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && f.box.Canceled(r):
		// The receiver takes its buffer back; the stream must go on with the next frame all the same.
		part := append(make([]byte, 0, max(n, growBytes)), p[:n]...)
		f.box.Release(r)
		if err := f.calm(); err != nil {
			return err
		}
		return f.store(h, part)
	case err != nil:
		err = h.cutOff(err, n)
	default:
		err = h.check(p)
	}
	if err != nil {
		f.box.Complete(r, &comm.PeerError{Rank: f.from, Op: "receive", Err: err})
		return err
	}
	f.box.Complete(r, nil)
	return f.calm()
}

// calm lets reads go on after a wake, which may have come when the payload was already complete.
func (f *reader) calm() error {
	if f.woken.Swap(false) {
		return f.deadline(time.Time{})
	}
	return nil
}

// store reads the payload, of which part has arrived already, into memory of its own and leaves it in the mailbox. Memory
// grows with what has arrived, not with what was announced.
func (f *reader) store(h *header, part []byte) error {
	n := int(h.length)
	buf := f.box.Buffer(h.tag, n)
	if buf != nil {
		buf = append(buf[:0], part...)
	} else if buf = part; cap(buf) == 0 {
		buf = make([]byte, 0, min(n, growBytes))
	}
	for len(buf) < n {
		if len(buf) == cap(buf) {
			bigger := make([]byte, len(buf), min(n, 2*cap(buf)))
			copy(bigger, buf)
			buf = bigger
		}
		at := len(buf)
		buf = buf[:min(n, cap(buf))]
		if got, err := io.ReadFull(f.r, buf[at:]); err != nil {
			return h.cutOff(err, at+got)
		}
	}
	if err := h.check(buf); err != nil {
		return err
	}
	f.box.Deliver(h.tag, buf)
	return nil
}

func (h *header) check(p []byte) error {
	if got := crc32.Checksum(p, castagnoli); got != h.sum {
		return fmt.Errorf("corrupt message with tag %d of %d bytes: its checksum is %08x, %08x was sent", h.tag, h.length, got, h.sum)
	}
	return nil
}

func (h *header) cutOff(err error, got int) error {
	return cutOff(err, fmt.Sprintf("after %d of %d bytes of a message with tag %d", got, h.length, h.tag))
}

func cutOff(err error, where string) error { return fmt.Errorf("%w %s", closedBy(err), where) }

// closedBy is comm.ErrPeerClosed with what the operating system says about it, without the addresses.
func closedBy(err error) error {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return comm.ErrPeerClosed
	}
	return fmt.Errorf("%w (%w)", comm.ErrPeerClosed, err)
}
