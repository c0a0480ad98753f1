package tcp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"moetor/comm"
)

const testLimit = 1 << 20

func noDeadline(time.Time) error { return nil }

func frame(tag comm.Tag, seq uint32, p []byte) []byte {
	h := header{kindMessage, tag, seq, uint64(len(p)), crc32.Checksum(p, castagnoli)}
	var b [headerBytes]byte
	h.encode(&b)
	return append(b[:], p...)
}

// TestFrameBytes pins the format. The checksums come from the published check value of CRC-32C, for the text "123456789",
// and for the header from a bitwise CRC written here.
func TestFrameBytes(t *testing.T) {
	got := frame(0x01020304, 5, []byte("123456789"))
	head, _ := hex.DecodeString("4d4f4546" + "01" + "000000" + "04030201" + "05000000" + "0900000000000000" + "839206e3")
	crc := ^uint32(0)
	for _, b := range head {
		crc ^= uint32(b)
		for range 8 {
			crc = crc>>1 ^ 0x82f63b78*(crc&1)
		}
	}
	crc = ^crc
	want := append(head, byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24))
	want = append(want, "123456789"...)
	if !bytes.Equal(got, want) {
		t.Errorf("frame is\n%x, want\n%x", got, want)
	}
}

// TestAnnouncedLength has a frame announce a gigabyte and then end: no memory is taken for what never comes.
func TestAnnouncedLength(t *testing.T) {
	h := header{tag: 1, length: 1 << 30}
	var b [headerBytes]byte
	h.encode(&b)
	stream := append(b[:], make([]byte, 100_000)...)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f := newReader(bytes.NewReader(stream), 1, comm.NewMailbox(1), 1<<30, noDeadline)
	err := f.next()
	runtime.ReadMemStats(&after)
	if !errors.Is(err, comm.ErrPeerClosed) || !strings.Contains(err.Error(), "after 100000 of 1073741824 bytes") {
		t.Errorf("got %v", err)
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > 4*growBytes {
		t.Errorf("took %d bytes of memory for 100,000 that came", took)
	}
}

// FuzzReader feeds the reader any bytes: it hands out only what was framed, never panics, and always ends.
func FuzzReader(f *testing.F) {
	f.Add([]byte{}, uint16(0))
	f.Add(frame(1, 0, []byte("hello")), uint16(0))
	f.Add(append(frame(1, 0, nil), frame(2, 1, make([]byte, 5000))...), uint16(3))
	f.Add(append(frame(1, 0, []byte("x")), frame(2, 7, nil)...), uint16(0))
	f.Add(frame(1, 0, bytes.Repeat([]byte("ab"), 4000))[:6000], uint16(9))
	big := header{length: testLimit + 1}
	var b [headerBytes]byte
	big.encode(&b)
	f.Add(b[:], uint16(0))
	f.Add(append(frame(1, 0, nil), farewellFrame(1, 2)...), uint16(0))
	f.Fuzz(func(t *testing.T, stream []byte, repair uint16) {
		if repair&1 == 1 && len(stream) >= headerBytes { // let damaged headers pass their own checksum
			head := [headerBytes]byte(stream)
			crc := crc32.Checksum(head[:28], castagnoli)
			stream = append([]byte{}, stream...)
			stream[28], stream[29], stream[30], stream[31] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
		}
		box := comm.NewMailbox(3)
		r := newReader(bytes.NewReader(stream), 3, box, testLimit, noDeadline)
		rest := stream
		for seq := uint32(0); ; seq++ {
			err := r.next()
			var h header
			whole := len(rest) >= headerBytes && h.decode((*[headerBytes]byte)(rest), seq, testLimit) == nil &&
				uint64(len(rest)-headerBytes) >= h.length && h.check(rest[headerBytes:][:h.length]) == nil
			var bye *farewell
			if errors.As(err, &bye) && whole && h.kind == kindFarewell {
				return
			}
			if (err == nil) != whole {
				t.Fatalf("frame %d: error %v, but whole is %v", seq, err, whole)
			}
			if err != nil {
				if err == comm.ErrPeerClosed && len(rest) > 0 {
					t.Fatalf("%d bytes before the end, the reader says all is well", len(rest))
				}
				return
			}
			got := make([]byte, h.length)
			if err := box.Recv(t.Context(), h.tag, got); err != nil || !bytes.Equal(got, rest[headerBytes:][:h.length]) {
				t.Fatalf("frame %d: wrong message (%v)", seq, err)
			}
			rest = rest[headerBytes+h.length:]
		}
	})
}

// FuzzProof feeds both sides of the proof, and what follows it, any bytes.
func FuzzProof(f *testing.F) {
	f.Add([]byte(greeting + strings.Repeat("n", nonceBytes+2*proofBytes)))
	f.Add([]byte("\x00\xff\xff\xff\xff"))
	f.Add([]byte("\x01\x02\x00\x00\x00no"))
	f.Fuzz(func(t *testing.T, in []byte) {
		conn := func() io.ReadWriter {
			return struct {
				io.Reader
				io.Writer
			}{bytes.NewReader(in), io.Discard}
		}
		if proveDialer(conn(), testSecret) == nil || proveListener(conn(), testSecret) == nil {
			t.Fatal("fixed bytes passed for a proof of a fresh challenge")
		}
		who, err := readIntroduction(conn())
		if err == nil && len(who.addr) > maxAddr {
			t.Fatalf("address of %d bytes", len(who.addr))
		}
		if body, err := readReply(conn()); err == nil && len(body) > len(in) {
			t.Fatal("reply longer than what came")
		}
	})
}

// TestAbandonedReceive cancels receivers while their message is arriving: they return at once, and the message, which is
// then complete, serves the next one.
func TestAbandonedReceive(t *testing.T) {
	ts := connect(t, 2)
	defer ts[0].Close()
	defer ts[1].Close()
	const length = 8 << 20
	p := make([]byte, length)
	for i := range p {
		p[i] = byte(i>>8) ^ byte(i)
	}
	for round := range 12 {
		ctx, cancel := context.WithCancel(t.Context())
		got := make([]byte, length)
		done := make(chan error, 1)
		go func() { done <- ts[1].Recv(ctx, 0, 4, got) }()
		sent := make(chan error, 1)
		go func() { sent <- ts[0].Send(t.Context(), 1, 4, p) }()
		time.Sleep(time.Duration(round) * 300 * time.Microsecond)
		cancel()
		err := <-done
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("round %d: %v", round, err)
			}
			for i := range got {
				got[i] = 0xee // the buffer is ours again
			}
			got = make([]byte, length)
			if err := ts[1].Recv(t.Context(), 0, 4, got); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		if !bytes.Equal(got, p) {
			t.Fatalf("round %d: damaged message", round)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
	}
}
