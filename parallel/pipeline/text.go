package pipeline

import (
	"fmt"
	"io"
	"strconv"
	"strings"
)

// maxText bounds what Parse reads: far more than any real schedule, little enough to hold in memory.
const maxText = 64 << 20

// String prints the schedule as text that Parse reads back to an equal schedule:
//
//	owner 0 1
//	micros 2
//	0: 0F0 0SA0 0F1 0SA1 0RG0 0B0 0RG1 0B1
//	1: 1RA0 1F0 1B0 1SG0 1RA1 1F1 1B1 1SG1
//
// owner gives the rank of every stage; then follows one line per rank.
func (s Schedule) String() string {
	var b strings.Builder
	b.WriteString("owner")
	for _, r := range s.Owner {
		fmt.Fprintf(&b, " %d", r)
	}
	fmt.Fprintf(&b, "\nmicros %d\n", s.Micros)
	for r, l := range s.Lists {
		fmt.Fprintf(&b, "%d:", r)
		if len(l) > 0 {
			b.WriteByte(' ')
			b.WriteString(join(l, " "))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Parse reads the text of String. Blank lines, and the rest of a line after '#', are ignored. It checks the form and the
// plan; whether the schedule can run is for Simulate to say. Errors name the line.
func Parse(r io.Reader) (Schedule, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxText+1))
	if err != nil {
		return Schedule{}, fmt.Errorf("schedule: %w", err)
	}
	if len(text) > maxText {
		return Schedule{}, fmt.Errorf("schedule: longer than %d bytes", maxText)
	}
	var (
		s      Schedule
		lists  = map[int][]Action{}
		n      int
		owner  bool
		micros bool
	)
	for line := range strings.Lines(string(text)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		switch head := fields[0]; {
		case head == "owner":
			if owner {
				return Schedule{}, fmt.Errorf("schedule line %d: owner is given twice", n)
			}
			owner = true
			for _, f := range fields[1:] {
				r, err := number(f)
				if err != nil {
					return Schedule{}, fmt.Errorf("schedule line %d: owner: %w", n, err)
				}
				s.Owner = append(s.Owner, r)
			}
		case head == "micros":
			if micros || len(fields) != 2 {
				return Schedule{}, fmt.Errorf("schedule line %d: want one line with one number of micros", n)
			}
			micros = true
			if s.Micros, err = number(fields[1]); err != nil {
				return Schedule{}, fmt.Errorf("schedule line %d: micros: %w", n, err)
			}
		case strings.HasSuffix(head, ":"):
			r, err := number(strings.TrimSuffix(head, ":"))
			if err != nil {
				return Schedule{}, fmt.Errorf("schedule line %d: rank: %w", n, err)
			}
			if _, ok := lists[r]; ok {
				return Schedule{}, fmt.Errorf("schedule line %d: rank %d is given twice", n, r)
			}
			list := make([]Action, len(fields)-1)
			for i, f := range fields[1:] {
				if list[i], err = ParseAction(f); err != nil {
					return Schedule{}, fmt.Errorf("schedule line %d: rank %d, position %d: %w", n, r, i+1, err)
				}
			}
			lists[r] = list
		default:
			return Schedule{}, fmt.Errorf("schedule line %d: %q is neither owner, micros nor a rank such as \"0:\"", n, head)
		}
	}
	switch {
	case !owner:
		return Schedule{}, fmt.Errorf("schedule: the line \"owner\" is missing")
	case !micros:
		return Schedule{}, fmt.Errorf("schedule: the line \"micros\" is missing")
	}
	s.Ranks = len(lists)
	s.Lists = make([][]Action, s.Ranks)
	for r := range s.Lists {
		list, ok := lists[r]
		if !ok {
			return Schedule{}, fmt.Errorf("schedule: %d ranks have a line, but rank %d has none", s.Ranks, r)
		}
		s.Lists[r] = list
	}
	if err := s.Plan.Check(); err != nil {
		return Schedule{}, fmt.Errorf("schedule: %w", err)
	}
	return s, nil
}

// ParseAction reads the text of Action.String.
func ParseAction(text string) (Action, error) {
	isDigit := func(r rune) bool { return r >= '0' && r <= '9' }
	notDigit := func(r rune) bool { return !isDigit(r) }
	bad := fmt.Errorf("%q is no action, want stage, operation, micro-batch such as 2F0 or 1SG3", text)
	i := strings.IndexFunc(text, notDigit)
	if i < 0 {
		return Action{}, bad
	}
	j := strings.IndexFunc(text[i:], isDigit)
	if j < 0 {
		return Action{}, bad
	}
	stage, err1 := number(text[:i])
	micro, err2 := number(text[i+j:])
	if err1 != nil || err2 != nil {
		return Action{}, bad
	}
	for o, code := range opCode {
		if code == text[i:i+j] {
			return Action{Op(o), stage, micro}, nil
		}
	}
	return Action{}, fmt.Errorf("%q: unknown operation %q, known are: %s", text, text[i:i+j], strings.Join(opCode[:], " "))
}

// number reads a decimal without sign and without leading zeros, so that there is one way to write a schedule.
func number(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || strconv.Itoa(n) != text || n < 0 {
		return 0, fmt.Errorf("%q is not a number from 0", text)
	}
	return n, nil
}
