package tcp

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Before anything else both ends of a connection prove that they hold the secret of the run. All messages of the proof have
// a fixed size, and nothing that a stranger sends is read beyond them:
//
//	dialer    -> listener   greeting, nonce_d
//	listener  -> dialer     greeting, nonce_l
//	dialer    -> listener   HMAC-SHA256(secret, "dialer"   nonce_d nonce_l)
//	listener  -> dialer     verdict,  HMAC-SHA256(secret, "listener" nonce_d nonce_l), zeros if the dialer's proof is wrong
//
// This keeps strangers and other runs out. It neither hides nor signs what follows: over a network that is not trusted, use
// a tunnel.
const (
	greeting   = "MOETOR\x00\x01" // the last byte is the version of the protocol
	nonceBytes = 32
	helloBytes = len(greeting) + nonceBytes
	proofBytes = sha256.Size

	// proofTime is how long a connection may take for its proof and its introduction.
	proofTime = 10 * time.Second
)

var (
	errSecret  = errors.New("secret differs")
	errForeign = errors.New("something other than a moetor rank is there")
	errVersion = errors.New("all hosts need the same program")
)

func proof(secret []byte, side string, dialer, listener []byte) []byte {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(side))
	mac.Write(dialer)
	mac.Write(listener)
	return mac.Sum(nil)
}

func newHello() []byte {
	b := append(make([]byte, 0, helloBytes), greeting...)
	b = b[:helloBytes]
	rand.Read(b[len(greeting):]) // never fails
	return b
}

func checkGreeting(b []byte) error {
	last := len(greeting) - 1
	if string(b[:last]) != greeting[:last] {
		return errForeign
	}
	if b[last] != greeting[last] {
		return fmt.Errorf("protocol version %d there, %d here: %w", b[last], greeting[last], errVersion)
	}
	return nil
}

// proveDialer is the dialer's side of the proof.
func proveDialer(c io.ReadWriter, secret []byte) error {
	mine, theirs := newHello(), make([]byte, helloBytes)
	if _, err := c.Write(mine); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, theirs); err != nil {
		return err
	}
	if err := checkGreeting(theirs); err != nil {
		return err
	}
	dialer, listener := mine[len(greeting):], theirs[len(greeting):]
	if _, err := c.Write(proof(secret, "dialer", dialer, listener)); err != nil {
		return err
	}
	verdict := make([]byte, 1+proofBytes)
	if _, err := io.ReadFull(c, verdict); err != nil {
		return err
	}
	if verdict[0] != 1 || !hmac.Equal(verdict[1:], proof(secret, "listener", dialer, listener)) {
		return errSecret
	}
	return nil
}

// proveListener is the listener's side of the proof.
func proveListener(c io.ReadWriter, secret []byte) error {
	mine, theirs := newHello(), make([]byte, helloBytes)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return err
	}
	if err := checkGreeting(theirs); err != nil {
		return err
	}
	if _, err := c.Write(mine); err != nil {
		return err
	}
	dialer, listener := theirs[len(greeting):], mine[len(greeting):]
	got, verdict := make([]byte, proofBytes), make([]byte, 1+proofBytes)
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !hmac.Equal(got, proof(secret, "dialer", dialer, listener)) {
		_, _ = c.Write(verdict) // tell, if it listens; the connection ends either way
		return errSecret
	}
	verdict[0] = 1
	copy(verdict[1:], proof(secret, "listener", dialer, listener))
	_, err := c.Write(verdict)
	return err
}

// An introduction follows the proof, from the dialer. It has a fixed size.
type introduction struct {
	rank, size int
	addr       string // where the dialer listens for others; empty between two ranks that are not rank 0
}

const (
	maxAddr    = 255
	introBytes = 4 + 4 + 1 + maxAddr

	// maxReply bounds the answer to an introduction.
	maxReply = 16 << 20
)

func (i introduction) write(w io.Writer) error {
	if len(i.addr) > maxAddr {
		return fmt.Errorf("address %q is longer than %d bytes", i.addr, maxAddr)
	}
	b := make([]byte, introBytes)
	binary.LittleEndian.PutUint32(b, uint32(i.rank))
	binary.LittleEndian.PutUint32(b[4:], uint32(i.size))
	b[8] = byte(len(i.addr))
	copy(b[9:], i.addr)
	_, err := w.Write(b)
	return err
}

func readIntroduction(r io.Reader) (i introduction, err error) {
	b := make([]byte, introBytes)
	if _, err := io.ReadFull(r, b); err != nil {
		return i, err
	}
	i.rank = int(int32(binary.LittleEndian.Uint32(b)))
	i.size = int(int32(binary.LittleEndian.Uint32(b[4:])))
	i.addr = string(b[9:][:b[8]])
	return i, nil
}

// writeReply answers an introduction: with an error for the dialer, or with what it needs to know.
func writeReply(w io.Writer, failure error, body []byte) error {
	b := make([]byte, 5, 5+len(body))
	if failure != nil {
		b[0], body = 1, []byte(failure.Error())
	}
	binary.LittleEndian.PutUint32(b[1:], uint32(len(body)))
	_, err := w.Write(append(b, body...))
	return err
}

// refusal is an error that the other end sent as its reply.
type refusal string

func (r refusal) Error() string { return string(r) }

func readReply(r io.Reader) ([]byte, error) {
	var b [5]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(b[1:])
	if n > maxReply {
		return nil, fmt.Errorf("reply announces %d bytes, the limit is %d", n, maxReply)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	if b[0] != 0 {
		return nil, refusal(body)
	}
	return body, nil
}

// hurry ends all reads and writes of c at the end of ctx, or after limit if that is sooner and not 0. release undoes it.
func hurry(ctx context.Context, c net.Conn, limit time.Duration) (release func()) {
	if limit > 0 {
		_ = c.SetDeadline(time.Now().Add(limit))
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return func() {
		if stop() {
			_ = c.SetDeadline(time.Time{})
		}
	}
}
