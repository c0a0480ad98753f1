package launch

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// tailLines is how much of a rank's stderr is shown when it died without reporting an error.
const tailLines = 20

// output takes what one rank prints: into its file, to the terminal where the rank may talk, and the end of stderr into
// memory.
type output struct {
	mu   sync.Mutex
	file *os.File // nil: not kept
	tail tail
}

// stream is one of the two outputs of a rank.
type stream struct {
	o        *output
	terminal io.Writer // nil: not shown
	errors   bool
}

func (s stream) Write(p []byte) (int, error) {
	s.o.mu.Lock()
	defer s.o.mu.Unlock()
	// A full disk or a closed terminal must not stop a rank, so errors of either end here.
	if s.o.file != nil {
		s.o.file.Write(p)
	}
	if s.terminal != nil {
		s.terminal.Write(p)
	}
	if s.errors {
		s.o.tail.write(p)
	}
	return len(p), nil
}

// tail keeps the last lines, or from the first line of a crash on the first ones.
type tail struct {
	part    []byte
	lines   []string
	crashed bool
}

func (t *tail) write(p []byte) {
	for {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			t.part = append(t.part, p[:min(len(p), max(0, 4096-len(t.part)))]...)
			return
		}
		t.add(string(append(t.part, p[:i]...)))
		t.part, p = t.part[:0], p[i+1:]
	}
}

func (t *tail) add(line string) {
	if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") || strings.HasPrefix(line, "SIG") {
		if !t.crashed {
			t.lines, t.crashed = nil, true
		}
	}
	if len(t.lines) == tailLines {
		if t.crashed {
			return
		}
		t.lines = append(t.lines[:0], t.lines[1:]...)
	}
	t.lines = append(t.lines, line)
}

// crash is the first line of a crash, or "".
func (o *output) crash() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.tail.crashed {
		return ""
	}
	return o.tail.lines[0]
}

// show prints the tail, each line with the rank in front.
func (o *output) show(w io.Writer, rank int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, line := range o.tail.lines {
		fmt.Fprintf(w, "[rank %d] %s\n", rank, line)
	}
	if len(o.tail.part) > 0 {
		fmt.Fprintf(w, "[rank %d] %s\n", rank, o.tail.part)
	}
}
