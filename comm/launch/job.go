package launch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Job is what Run starts on this host. Command, Size and, with more than one node, Rendezvous and Secret must be set.
type Job struct {
	Command []string // program and arguments of every rank
	Env     []string // further variables, NAME=value; the process's own come first
	Dir     string   // working directory; empty: this process's

	Size      int // ranks on this host
	Node      int // this host among Nodes
	Nodes     int // 0 means 1
	FirstRank int // 0 means Node*Size
	WorldSize int // 0 means Nodes*Size

	// CoresPerRank binds local rank i to processors [i*CoresPerRank, (i+1)*CoresPerRank) of Cores(), and with it all threads
	// that it will have. 0, and any number on systems other than Linux: a rank runs wherever this process may.
	CoresPerRank int

	Transport  string // shm, tcp, mpi; empty: shm where Segment is set and there is one node, else tcp
	Rendezvous string // HOST:PORT where rank 0 listens; empty on one node: a free port of 127.0.0.1, bound before any rank starts
	Secret     string // empty on one node: random
	// Segment makes the shared memory for size ranks. remove is called when all ranks have ended; by then the ranks have
	// normally removed it themselves.
	Segment func(size int) (path string, remove func() error, err error)

	LogDir string    // for rank-K.out, what rank K prints; empty: not kept
	Stdout io.Writer // of rank 0; nil: dropped
	Stderr io.Writer // of rank 0, and the launcher's own words; nil: dropped

	Grace time.Duration // from SIGTERM to SIGKILL when a rank has failed; 0 means 2 s

	Restarts    int      // how often to start again after a failure; exit codes 2 and 3 are none
	RestartArgs []string // further arguments then, such as --resume
}

// DefaultGrace is how long ranks get to end by themselves once one of them has failed.
const DefaultGrace = 2 * time.Second

// ErrInterrupted is returned by Run when a second interrupt ended the ranks at once, or the first before they were ready for
// it. A rank that gives up because of an interrupt reports it.
var ErrInterrupted = errors.New("interrupted: ranks were ended without a checkpoint")

// ErrUnbegun is ErrInterrupted where no rank had told of a step.
var ErrUnbegun = fmt.Errorf("%w, before their first step", ErrInterrupted)

func (j *Job) check() error {
	if j.Nodes == 0 {
		j.Nodes = 1
	}
	if j.WorldSize == 0 {
		j.WorldSize = j.Nodes * j.Size
	}
	if j.FirstRank == 0 {
		j.FirstRank = j.Node * j.Size
	}
	if j.Grace == 0 {
		j.Grace = DefaultGrace
	}
	if j.Transport == "" {
		j.Transport = "tcp"
		if j.Segment != nil && j.Nodes == 1 && runtime.GOOS == "linux" {
			j.Transport = "shm"
		}
	}
	if j.Stdout == nil {
		j.Stdout = io.Discard
	}
	if j.Stderr == nil {
		j.Stderr = io.Discard
	}
	switch {
	case len(j.Command) == 0:
		return errors.New("launch: no command")
	case j.Size < 1:
		return fmt.Errorf("launch: %d ranks: want at least 1", j.Size)
	case j.Nodes < 1 || j.Node < 0 || j.Node >= j.Nodes:
		return fmt.Errorf("launch: node %d of %d: want a node from 0 to one below their number", j.Node, j.Nodes)
	case j.FirstRank < 0 || j.FirstRank+j.Size > j.WorldSize:
		return fmt.Errorf("launch: ranks %d to %d do not fit in a world of %d", j.FirstRank, j.FirstRank+j.Size-1, j.WorldSize)
	case !slices.Contains([]string{"shm", "tcp", "mpi"}, j.Transport):
		return fmt.Errorf("launch: transport %s is unknown; known: shm, tcp, mpi", j.Transport)
	case j.Transport == "shm" && j.Nodes > 1:
		return fmt.Errorf("launch: transport shm connects the ranks of one host, not of %d nodes; use tcp", j.Nodes)
	case j.Transport == "shm" && j.Segment == nil:
		return errors.New("launch: transport shm without a function that makes the segment")
	case j.Nodes > 1 && j.Rendezvous == "":
		return fmt.Errorf("launch: %d nodes need a rendezvous HOST:PORT, the same on each", j.Nodes)
	case j.Nodes > 1 && j.Secret == "":
		return fmt.Errorf("launch: %d nodes need a secret, the same on each; set %s", j.Nodes, envSecret)
	case j.CoresPerRank < 0 || j.CoresPerRank > 0 && runtime.GOOS == "linux" && j.Size*j.CoresPerRank > len(Cores()):
		return fmt.Errorf("launch: %d ranks with %d cores each: this process may use %d", j.Size, j.CoresPerRank, len(Cores()))
	case j.Restarts < 0:
		return fmt.Errorf("launch: %d restarts: want 0 or more", j.Restarts)
	case j.Grace < 0:
		return fmt.Errorf("launch: grace of %v", j.Grace)
	}
	if j.Rendezvous != "" {
		if err := checkAddress(j.Rendezvous); err != nil {
			return fmt.Errorf("launch: rendezvous %s: %w", j.Rendezvous, err)
		}
	}
	return nil
}

// Run starts the ranks and returns when all have ended, with the exit code for the launcher: 0 when all ranks were done, 3
// when they stopped after a checkpoint, 2 when a rank refused its configuration, else 1. The error is a *Failure that names
// the rank, ErrInterrupted or ErrUnbegun, that of ctx, or says why the job could not start. It comes within Grace and three seconds of a
// rank's death. Cancelling ctx ends the ranks as a failure does.
//
// While it runs, Run takes the process's SIGINT, SIGTERM and SIGHUP, see the package comment.
func Run(ctx context.Context, j Job) (code int, err error) {
	if err := j.check(); err != nil {
		return 2, err
	}
	if j.LogDir != "" {
		if err := os.MkdirAll(j.LogDir, 0o755); err != nil {
			return 2, fmt.Errorf("launch: %w", err)
		}
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	defer signal.Stop(signals)
	for try := 0; ; try++ {
		a := attempt{job: &j, number: try, signals: signals}
		code, err = a.run(ctx)
		var f *Failure
		if code != 1 || !errors.As(err, &f) || a.interrupts > 0 || ctx.Err() != nil || try == j.Restarts {
			return code, err
		}
		fmt.Fprintf(j.Stderr, "launch: %v; starting again (%d of %d)\n", f, try+1, j.Restarts)
	}
}

// places is what one attempt's ranks meet at.
type places struct {
	listener *os.File // rank 0's socket, or nil
	env      []string
	remove   func() error
}

// prepare makes a meeting place that is free and cannot be taken before the ranks are there.
func (j *Job) prepare() (_ places, err error) {
	p := places{remove: func() error { return nil }}
	secret := j.Secret
	if secret == "" {
		var b [32]byte
		rand.Read(b[:])
		secret = hex.EncodeToString(b[:])
	}
	if j.WorldSize == 1 { // nobody to meet
		return p, nil
	}
	p.env = append(p.env, envTransport+"="+j.Transport, envSecret+"="+secret)
	switch {
	case j.Transport == "shm":
		path, remove, err := j.Segment(j.Size)
		if err != nil {
			return p, fmt.Errorf("launch: %w", err)
		}
		p.remove = remove
		p.env = append(p.env, envShmPath+"="+path)
	case j.Rendezvous != "":
		p.env = append(p.env, envRendezvous+"="+j.Rendezvous)
	default:
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return p, fmt.Errorf("launch: no free port for the rendezvous: %w", err)
		}
		defer l.Close()
		if p.listener, err = l.(*net.TCPListener).File(); err != nil {
			return p, fmt.Errorf("launch: rendezvous: %w", err)
		}
		p.env = append(p.env, envRendezvous+"="+l.Addr().String())
	}
	return p, nil
}

// environment is that of one rank, without a trace of a launcher that this one may run under.
func (j *Job) environment(local int, p places) []string {
	var env []string
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		switch name {
		case envRank, envSize, envLocalRank, envLocalSize, envNode, envNodes, envRendezvous, envRendezvousFD,
			envSecret, envShmPath, envTransport, envReportFD:
		default:
			env = append(env, v)
		}
	}
	env = append(env, j.Env...)
	env = append(env, p.env...)
	for name, n := range map[string]int{
		envRank: j.FirstRank + local, envSize: j.WorldSize, envLocalRank: local, envLocalSize: j.Size,
		envNode: j.Node, envNodes: j.Nodes,
	} {
		env = append(env, name+"="+strconv.Itoa(n))
	}
	return env
}
