package comm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestMessageKindsDiffer(t *testing.T) {
	// The three kinds of message are told apart by length alone.
	if noteBytes > inlineBytes || noteBytes == messageBytes || messageBytes <= inlineBytes {
		t.Fatal("a note could be taken for a header or a payload")
	}
	for n := 2; n <= 64; n++ {
		for _, size := range []int{1, 4, 8} {
			// The shortest slice that a long all-reduce sends.
			length := n*wholeBytes/size + 1
			if least := length / n * size; least <= inlineBytes {
				t.Errorf("all-reduce of %d elements of %d bytes on %d members sends a slice of %d bytes", length, size, n, least)
			}
		}
	}
	for _, n := range []int{1, chunkBytes - 1, chunkBytes, chunkBytes + 1, 2*chunkBytes - 1, 2 * chunkBytes, 5*chunkBytes + 3} {
		count, at := 0, 0
		for c := range chunks(n, chunkBytes) {
			if c.lo != at || c.hi-c.lo < min(n, chunkBytes) || c.hi-c.lo >= 2*chunkBytes {
				t.Errorf("chunk %v of %d", c, n)
			}
			at = c.hi
			count++
		}
		if at != n || count != chunkCount(n, chunkBytes) {
			t.Errorf("%d chunks end at %d of %d, want %d chunks", count, at, n, chunkCount(n, chunkBytes))
		}
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	want := call{op: opAllToAll, elem: elemFloat64, red: Max, seq: 1 << 60, group: 2 << 60, count: 3 << 60, layout: 4 << 59, expect: 5 << 58,
		root: 6, send: 7, recv: 8}
	b := make([]byte, messageBytes)
	want.encode(b)
	var got call
	if err := got.decode(b); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	b[0]++
	if err := got.decode(b); err == nil {
		t.Error("header with another magic number passed")
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(make([]byte, messageBytes))
	b := make([]byte, messageBytes)
	(&call{op: opBroadcast, elem: elemInt32, root: 1 << 63}).encode(b)
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		b := make([]byte, messageBytes)
		copy(b, in)
		var c call
		if c.decode(b) == nil {
			_ = c.describe([]int{3, 4})
			again := make([]byte, messageBytes)
			var d call
			c.encode(again)
			if err := d.decode(again); err != nil || c != d || !c.agrees(&d) {
				t.Fatalf("%+v became %+v (%v)", c, d, err)
			}
		}
		note := make([]byte, noteBytes)
		copy(note, in)
		if _, text, ok := decodeNote(note); ok && len(text) > noteText {
			t.Fatalf("text of %d bytes", len(text))
		}
	})
}

func TestNote(t *testing.T) {
	note := make([]byte, noteBytes)
	for _, text := range []string{"", "short", strings.Repeat("é", 500)} {
		encodeNote(note, -1, text)
		culprit, got, ok := decodeNote(note)
		if !ok || culprit != -1 || got != text && !(strings.HasSuffix(got, "é...") && strings.HasPrefix(text, strings.TrimSuffix(got, "..."))) {
			t.Errorf("%q came as %q from %d", text, got, culprit)
		}
	}
	if _, _, ok := decodeNote(make([]byte, noteBytes)); ok {
		t.Error("zeros passed for a note")
	}
}

func TestErrorTexts(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&PeerError{2, "all-reduce", 17, ErrPeerClosed}, "rank 2 lost during all-reduce #17: connection closed"},
		{&PeerError{2, "receive", 0, ErrPeerClosed}, "rank 2 lost during receive: connection closed"},
		{&PeerError{2, "barrier", 3, &timeoutError{time.Second}}, "rank 2 gave no answer to barrier #3 within 1s"},
		{&PeerError{2, "barrier", 3, &noteError{1, "rank 2 lost"}}, "barrier #3 stopped, rank 1 reports: rank 2 lost"},
		{&LengthError{1, 9, 8, 12}, "message from rank 1 with tag 9 has 12 bytes, the receiver expects 8"},
		{CheckRank(4, 4), "no rank 4 among 4 ranks"},
	} {
		if c.err.Error() != c.want {
			t.Errorf("%q, want %q", c.err, c.want)
		}
	}
	if err := error(&PeerError{2, "barrier", 3, &timeoutError{time.Second}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error("a time-out is not context.DeadlineExceeded")
	}
}

func TestElementTypes(t *testing.T) {
	type mine float32 // named types count as what they are made of
	for _, c := range []struct {
		got  elem
		want string
	}{
		{elemOf[float32](), "float32"}, {elemOf[mine](), "float32"}, {elemOf[float64](), "float64"},
		{elemOf[int32](), "int32"}, {elemOf[int64](), "int64"}, {elemOf[uint8](), "uint8"},
	} {
		if c.got.String() != c.want {
			t.Errorf("%v, want %s", c.got, c.want)
		}
	}
	x := []float32{1, -2}
	if got := fmt.Sprintf("%x", bytesOf(x)); got != "0000803f000000c0" {
		t.Errorf("bytes of %v are %s", x, got)
	}
	if y := viewOf[float32](bytesOf(x)); len(y) != 2 || &y[0] != &x[0] {
		t.Errorf("view of the bytes of %v is %v", x, y)
	}
	if len(bytesOf([]int64(nil))) != 0 || len(viewOf[int64](nil)) != 0 {
		t.Error("nothing has bytes")
	}
}

func TestCombine(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct{ a, x, want float64 }{
		{1, 2, 2}, {2, 1, 2}, {-inf, -3, -3}, {nan, 1, nan}, {1, nan, nan}, {nan, inf, nan}, {inf, nan, nan},
	} {
		acc := []float64{c.a}
		combine(acc, []float64{c.x}, Max)
		if acc[0] != c.want && !(acc[0] != acc[0] && c.want != c.want) {
			t.Errorf("max(%v, %v) = %v", c.a, c.x, acc[0])
		}
	}
}
