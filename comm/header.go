package comm

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// Three kinds of message pass between two members on the group's tag, told apart by their length alone:
//
//   - the header of a collective, always messageBytes long: what the sender was asked to do, and behind it the data for this
//     receiver when that is at most inlineBytes;
//   - a payload, always longer than inlineBytes;
//   - a note, always noteBytes long: the sender gave up, and why. It takes the place of whatever was due next.
//
// Every member sends its header to every other one and reads all of theirs before it sends a payload, so all members judge
// by the same headers and come to the same verdict, and nothing is ever summed that does not belong together.
const (
	headerBytes  = 96
	inlineBytes  = 416
	messageBytes = headerBytes + inlineBytes
	noteBytes    = 400
	noteText     = noteBytes - 12

	headerMagic = 0x4c4c4f43 // "COLL"
	noteMagic   = 0x45544f4e // "NOTE"
)

// opcode is the operation in a header.
type opcode uint8

const (
	opBarrier opcode = 1 + iota
	opAllReduce
	opReduceScatter
	opAllGather
	opAllToAll
	opBroadcast
	opGatherBytes
)

var opNames = [...]string{"operation 0", "barrier", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "gather"}

func (o opcode) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// A call is what one member was asked to do: the content of a header.
type call struct {
	op    opcode
	elem  elem
	red   Reduction
	size  int    // bytes of an element, not sent
	seq   uint64 // counts the collectives of the group from 1
	group uint64 // hash of the members in order
	count uint64 // elements in all; may differ between members in all-to-all and gather
	// layout is a hash of the counts per member, which all must pass alike. In all-to-all it is a weighted sum of what this
	// member sends, and expect the same sum of what it awaits: over all members the two totals agree exactly if every
	// pair does (but for a chance of 2^-64), so each member can tell without seeing the counts of the others.
	layout, expect uint64
	root           uint64 // position in the group
	send, recv     uint64 // elements this member sends to, and awaits from, the receiver of the header
}

func (c *call) encode(b []byte) {
	le := binary.LittleEndian
	clear(b[:headerBytes])
	le.PutUint32(b, headerMagic)
	b[4], b[5], b[6] = byte(c.op), byte(c.elem), byte(c.red)
	le.PutUint64(b[8:], c.seq)
	le.PutUint64(b[16:], c.group)
	le.PutUint64(b[24:], c.count)
	le.PutUint64(b[32:], c.layout)
	le.PutUint64(b[40:], c.expect)
	le.PutUint64(b[48:], c.root)
	le.PutUint64(b[56:], c.send)
	le.PutUint64(b[64:], c.recv)
}

func (c *call) decode(b []byte) error {
	le := binary.LittleEndian
	if le.Uint32(b) != headerMagic {
		return fmt.Errorf("message of %d bytes is not the header of a collective; is the group's tag used by someone else?", len(b))
	}
	*c = call{
		op: opcode(b[4]), elem: elem(b[5]), red: Reduction(b[6]),
		seq: le.Uint64(b[8:]), group: le.Uint64(b[16:]), count: le.Uint64(b[24:]),
		layout: le.Uint64(b[32:]), expect: le.Uint64(b[40:]), root: le.Uint64(b[48:]),
		send: le.Uint64(b[56:]), recv: le.Uint64(b[64:]),
	}
	return nil
}

// agrees says whether two members were asked for the same collective.
func (c *call) agrees(d *call) bool {
	if c.op != d.op || c.elem != d.elem || c.red != d.red || c.seq != d.seq || c.group != d.group || c.root != d.root {
		return false
	}
	switch c.op {
	case opAllToAll, opGatherBytes:
		return true
	}
	return c.count == d.count && c.layout == d.layout
}

// describe names the operation, its number, size and type. ranks gives the world rank of the root.
func (c *call) describe(ranks []int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v #%d", c.op, c.seq)
	switch c.op {
	case opBarrier:
	case opGatherBytes:
		fmt.Fprintf(&b, " of %d bytes", c.count)
	default:
		fmt.Fprintf(&b, " of %d %v", c.count, c.elem)
	}
	switch c.op {
	case opAllReduce, opReduceScatter:
		fmt.Fprintf(&b, " (%v)", c.red)
	case opBroadcast:
		if c.root < uint64(len(ranks)) {
			fmt.Fprintf(&b, " from rank %d", ranks[c.root])
		}
	}
	return b.String()
}

// describeAll lists the calls of the members with the given ranks, out of all of the group; like calls together.
func describeAll(calls []call, ranks, all []int) string {
	texts := make([]string, len(calls))
	for j := range calls {
		texts[j] = calls[j].describe(all)
	}
	for j, text := range slices.Clone(texts) { // equal words for unlike calls would explain nothing
		c := &calls[j]
		for k := range calls {
			d := &calls[k]
			if c.agrees(d) || text != d.describe(all) {
				continue
			}
			if c.group != d.group {
				texts[j] += fmt.Sprintf(" (in group %x of other ranks)", c.group)
			} else {
				texts[j] += fmt.Sprintf(" (split %x among the ranks)", c.layout)
			}
			break
		}
	}
	var b strings.Builder
	done := make([]bool, len(calls))
	for j := range calls {
		if done[j] {
			continue
		}
		var who []string
		for k := j; k < len(calls); k++ {
			if texts[k] == texts[j] {
				done[k] = true
				who = append(who, fmt.Sprint(ranks[k]))
			}
		}
		if b.Len() > 0 {
			b.WriteString("; ")
		}
		plural := ""
		if len(who) > 1 {
			plural = "s"
		}
		fmt.Fprintf(&b, "rank%s %s: %s", plural, strings.Join(who, ","), texts[j])
	}
	return b.String()
}

// A note tells the other members that the sender gave up. culprit is the world rank at fault.
func encodeNote(b []byte, culprit int, text string) {
	le := binary.LittleEndian
	clear(b)
	if len(text) > noteText {
		text = strings.ToValidUTF8(text[:noteText-3], "") + "..."
	}
	le.PutUint32(b, noteMagic)
	le.PutUint32(b[4:], uint32(culprit))
	le.PutUint32(b[8:], uint32(len(text)))
	copy(b[12:], text)
}

func decodeNote(b []byte) (culprit int, text string, ok bool) {
	le := binary.LittleEndian
	n := le.Uint32(b[8:])
	if le.Uint32(b) != noteMagic || n > noteText {
		return 0, "", false
	}
	return int(int32(le.Uint32(b[4:]))), string(b[12 : 12+n]), true
}

// mix is the finaliser of SplitMix64, a bijection whose output bits all depend on all input bits.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func hashInts(x []int) uint64 {
	h := mix(uint64(len(x)))
	for _, v := range x {
		h = mix(h ^ uint64(v))
	}
	return h
}
