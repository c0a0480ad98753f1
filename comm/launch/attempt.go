package launch

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"
)

const (
	// settle is how long the launcher waits for the rank that others name before it takes one of those for the cause.
	settle = time.Second
	// pipeDelay is how long output is awaited from what a rank left behind.
	pipeDelay = 500 * time.Millisecond
	// stuck is how long a killed process gets to go away.
	stuck = 2 * time.Second
)

// attempt is one start of the job.
type attempt struct {
	job        *Job
	number     int
	signals    <-chan os.Signal
	interrupts int

	ranks   []*state
	procs   []*exec.Cmd
	outputs []*output
	pipes   []*os.File // the launcher's ends of the ranks' pipes
	events  chan event
	quit    chan struct{} // closed when nobody takes events any more
	ending  bool          // ranks have been told to end
	endedAt time.Time     // when
	killed  bool          // and were then killed
}

// event is news of a rank: a line from its pipe, or its end.
type event struct {
	local int
	note  *note
	state *os.ProcessState
}

func (a *attempt) run(ctx context.Context) (code int, err error) {
	p, err := a.job.prepare()
	if err != nil {
		return 1, err
	}
	defer func() {
		if removeErr := p.remove(); removeErr != nil && err == nil {
			code, err = 1, fmt.Errorf("launch: %w", removeErr)
		}
	}()
	a.events, a.quit = make(chan event), make(chan struct{})
	done := make(chan struct{})
	started := make(chan error)
	ended := make(chan struct{})
	go func() {
		// Ranks get their death signal when the thread that started them ends, so that thread stays until they are gone.
		// They inherit what it is bound to.
		runtime.LockOSThread()
		defer close(ended)
		defer runtime.UnlockOSThread()
		started <- a.start(p)
		<-done
	}()
	defer func() {
		close(a.quit)
		close(done)
		<-ended
		a.close()
	}()
	err = <-started
	if p.listener != nil {
		p.listener.Close() // rank 0's from here on
	}
	if err != nil {
		a.signal(syscall.SIGKILL, everyone)
		a.await(time.After(stuck))
		return 1, err
	}
	return a.supervise(ctx)
}

// start starts all ranks.
func (a *attempt) start(p places) error {
	for local := range a.job.Size {
		if err := a.startRank(local, p); err != nil {
			return fmt.Errorf("launch: start rank %d: %w", a.job.FirstRank+local, err)
		}
	}
	return nil
}

func (a *attempt) startRank(local int, p places) error {
	j := a.job
	rank := j.FirstRank + local
	o := &output{}
	if j.LogDir != "" {
		f, err := os.OpenFile(filepath.Join(j.LogDir, fmt.Sprintf("rank-%d.out", rank)),
			os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		o.file = f
		if a.number > 0 {
			fmt.Fprintf(f, "--- start %d ---\n", a.number+1)
		}
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer write.Close()
	args := j.Command[1:]
	if a.number > 0 {
		args = append(args[:len(args):len(args)], j.RestartArgs...)
	}
	c := exec.Command(j.Command[0], args...)
	c.Dir = j.Dir
	c.Env = append(j.environment(local, p), envReportFD+"=3")
	c.ExtraFiles = []*os.File{write}
	if p.listener != nil && rank == 0 {
		c.Env = append(c.Env, envRendezvousFD+"=4")
		c.ExtraFiles = append(c.ExtraFiles, p.listener)
	}
	out, errs := stream{o: o}, stream{o: o, errors: true}
	if rank == 0 {
		out.terminal, errs.terminal = j.Stdout, j.Stderr
	}
	c.Stdout, c.Stderr = out, errs
	c.SysProcAttr = attributes()
	c.WaitDelay = pipeDelay
	start := c.Start
	if n := j.CoresPerRank; n > 0 {
		cores := Cores()[local*n:][:n]
		start = func() error { return onCores(cores, c.Start) }
	}
	if err := start(); err != nil {
		read.Close()
		if o.file != nil {
			o.file.Close()
		}
		return err
	}
	a.ranks = append(a.ranks, &state{rank: rank})
	a.procs = append(a.procs, c)
	a.outputs = append(a.outputs, o)
	a.pipes = append(a.pipes, read)
	go a.watch(local, c, read)
	return nil
}

// watch turns what comes of a rank into events, its end last.
func (a *attempt) watch(local int, c *exec.Cmd, pipe *os.File) {
	told := make(chan struct{})
	go func() {
		defer close(told)
		lines := bufio.NewReader(pipe)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return // the last writer is gone; half a line is of a rank that was killed
			}
			var n note
			if json.Unmarshal(line, &n) == nil {
				a.tell(event{local: local, note: &n})
			}
		}
	}()
	c.Wait()                                      // its error repeats what ProcessState says
	syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // what the rank may have started and left
	select {
	case <-told:
	case <-time.After(pipeDelay):
		pipe.SetReadDeadline(time.Now())
		<-told
	}
	a.tell(event{local: local, state: c.ProcessState})
}

func (a *attempt) tell(e event) {
	select {
	case a.events <- e:
	case <-a.quit:
	}
}

func (a *attempt) close() {
	for i := range a.procs {
		a.pipes[i].Close()
		if f := a.outputs[i].file; f != nil {
			f.Close()
		}
	}
}

// supervise follows the ranks to their end.
func (a *attempt) supervise(ctx context.Context) (int, error) {
	var timer <-chan time.Time // the next thing that is due: settle, then grace, then stuck
	cancelled := ctx.Done()
	end := func() {
		a.ending, a.endedAt = true, time.Now()
		a.signal(syscall.SIGTERM, func(s *state) bool { return s.report == nil }) // who reported is on its way out
		timer = time.After(a.job.Grace)
	}
	kill := func() {
		if !a.ending {
			a.ending, a.endedAt = true, time.Now()
		}
		a.killed = true
		a.signal(syscall.SIGKILL, everyone)
		timer = time.After(stuck)
	}
	for !a.allExited() {
		select {
		case e := <-a.events:
			a.take(e)
			if a.ending || cause(a.ranks, a.job.FirstRank) == nil {
				continue
			}
			if waitsFor(a.ranks, a.job.FirstRank) == nil {
				end()
			} else if timer == nil {
				timer = time.After(settle)
			}
		case <-timer:
			switch {
			case a.killed:
				return 1, a.stuckError()
			case a.ending:
				kill()
			default:
				end()
			}
		case <-a.signals:
			a.interrupts++
			if a.interrupts == 1 {
				a.signal(syscall.SIGINT, everyone)
			} else {
				kill()
			}
		case <-cancelled:
			cancelled = nil
			if !a.ending {
				end()
			}
		}
	}
	return a.result(ctx)
}

// await drops the events of ranks until they have exited, or too late.
func (a *attempt) await(late <-chan time.Time) {
	for !a.allExited() {
		select {
		case e := <-a.events:
			a.take(e)
		case <-late:
			return
		}
	}
}

// take notes an event. What happens once the launcher ends the ranks is no failure of theirs.
func (a *attempt) take(e event) {
	s := a.ranks[e.local]
	if n := e.note; n != nil {
		s.step = max(s.step, n.Step)
		if n.Error == "" || s.report != nil {
			return
		}
		s.report = n
		when := n.Time // by the clock of this host, better than the order in which pipes are read
		if when.IsZero() {
			when = time.Now()
		}
		if s.failed.IsZero() && (!a.ending || when.Before(a.endedAt)) {
			s.failed = when
		}
		return
	}
	s.exited = true
	s.code = e.state.ExitCode()
	if ws, ok := e.state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		s.signal = ws.Signal()
	}
	if !a.ending && s.failed.IsZero() && !s.ok() {
		s.failed = time.Now()
	}
}

func (a *attempt) allExited() bool {
	for _, s := range a.ranks {
		if !s.exited {
			return false
		}
	}
	return true
}

func everyone(*state) bool { return true }

// signal sends to the ranks among those that still run; a kill goes to what they have started as well.
func (a *attempt) signal(sig syscall.Signal, to func(*state) bool) {
	for i, s := range a.ranks {
		if s.exited || !to(s) {
			continue
		}
		a.procs[i].Process.Signal(sig)
		if sig == syscall.SIGKILL {
			syscall.Kill(-a.procs[i].Process.Pid, sig)
		}
	}
}

func (a *attempt) stuckError() error {
	for i, s := range a.ranks {
		if !s.exited {
			return fmt.Errorf("launch: rank %d (process %d) was killed and does not end", s.rank, a.procs[i].Process.Pid)
		}
	}
	return errors.New("launch: ranks do not end")
}

// result is the outcome once all ranks have exited.
func (a *attempt) result(ctx context.Context) (int, error) {
	if a.interrupts > 1 || a.interrupts > 0 && slices.ContainsFunc(a.ranks, (*state).interrupted) {
		if slices.ContainsFunc(a.ranks, func(s *state) bool { return s.step > 0 }) {
			return 1, ErrInterrupted
		}
		return 1, ErrUnbegun
	}
	if c := cause(a.ranks, a.job.FirstRank); c != nil {
		o := a.outputs[c.rank-a.job.FirstRank]
		f := c.failure()
		f.Crash = o.crash()
		if f.Err == "" && c.rank != 0 { // rank 0 has said on the terminal what it had to say
			o.show(a.job.Stderr, c.rank)
		}
		if f.Code == 2 && f.Crash == "" { // a Go program that panics exits with 2 as well
			return 2, f
		}
		return 1, f
	}
	if ctx.Err() != nil {
		return 1, context.Cause(ctx)
	}
	code := 0
	for _, s := range a.ranks {
		if s.code == 3 {
			code = 3
		}
	}
	return code, nil
}
