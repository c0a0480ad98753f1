package launch

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// The variables that Run sets for its ranks. See the package comment.
const (
	envRank         = "MOETOR_RANK"
	envSize         = "MOETOR_WORLD_SIZE"
	envLocalRank    = "MOETOR_LOCAL_RANK"
	envLocalSize    = "MOETOR_LOCAL_SIZE"
	envNode         = "MOETOR_NODE"
	envNodes        = "MOETOR_NODES"
	envRendezvous   = "MOETOR_RENDEZVOUS"
	envRendezvousFD = "MOETOR_RENDEZVOUS_FD"
	envSecret       = "MOETOR_SECRET"
	envShmPath      = "MOETOR_SHM_PATH"
	envTransport    = "MOETOR_TRANSPORT"
	envReportFD     = "MOETOR_REPORT_FD"
)

// Rank says which rank a process is and how it reaches the others.
type Rank struct {
	Rank, Size           int // in the world
	LocalRank, LocalSize int // among the ranks of this host
	Node, Nodes          int // hosts
	Rendezvous           string
	Secret               string
	ShmPath              string // segment of the shm transport
	CreateShm            bool   // this rank makes the segment: no launcher of ours has
	Transport            string // shm, tcp or mpi; inproc where there is one rank
	Source               string // whose variables: moetor, torchrun, openmpi, pmi, slurm, none

	listenFD int
}

// Listener is the socket that the launcher has bound for rank 0 at the rendezvous, or nil: then rank 0 listens itself.
func (r Rank) Listener() net.Listener {
	if r.listenFD == 0 {
		return nil
	}
	f := os.NewFile(uintptr(r.listenFD), "rendezvous")
	if f == nil {
		return nil
	}
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil
	}
	return l
}

// A scheme is one launcher's names for rank and place. A name may list alternatives, the first that is set counts.
type scheme struct {
	source               string
	rank, size           string
	localRank, localSize string
	node, nodes          string
	both                 bool // size alone is an incomplete setting, not somebody else's variable
}

var schemes = []scheme{
	{"moetor", envRank, envSize, envLocalRank, envLocalSize, envNode, envNodes, true},
	{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", true},
	{"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
		"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "", "", false},
	{"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "", false},
	slurm,
}

var slurm = scheme{"slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
	"SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES", false}

// environ reads variables and keeps the first error.
type environ struct {
	getenv func(string) string
	err    error
}

func (e *environ) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

// find returns the first of the names that is set, and its value.
func (e *environ) find(names string) (name, value string) {
	for _, n := range strings.Fields(names) {
		if v := e.getenv(n); v != "" {
			return n, v
		}
	}
	return "", ""
}

// number reads a whole number of at least least, or returns otherwise where none of the names is set.
func (e *environ) number(names string, least, otherwise int) (n int, name string) {
	name, v := e.find(names)
	if name == "" {
		return otherwise, ""
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		e.fail("%s=%s is not a whole number", name, v)
		return otherwise, name
	}
	if n < least || n > 1<<20 {
		e.fail("%s=%d is not a number from %d to %d", name, n, least, 1<<20)
	}
	return n, name
}

// FromEnv tells which rank this process is. Its one error names the variables at fault and their values.
func FromEnv(getenv func(string) string) (Rank, error) {
	e := &environ{getenv: getenv}
	r := e.place()
	if e.err == nil {
		e.reach(&r)
	}
	if e.err != nil {
		return Rank{}, fmt.Errorf("rank from environment (%s): %w", r.Source, e.err)
	}
	return r, nil
}

// place finds rank, size and host.
func (e *environ) place() Rank {
	for _, s := range schemes {
		rank, _ := e.find(s.rank)
		size, sv := e.find(s.size)
		switch {
		case rank == "" && size != "" && s.both:
			e.fail("%s=%s is set, but %s is not", size, sv, s.rank)
			return Rank{Source: s.source}
		case rank == "":
			continue
		}
		return e.placeBy(s)
	}
	return Rank{Size: 1, LocalSize: 1, Nodes: 1, Source: "none"}
}

func (e *environ) placeBy(s scheme) Rank {
	r := Rank{Source: s.source}
	var rankName, sizeName, localName, localSizeName, nodeName, nodesName string
	r.Rank, rankName = e.number(s.rank, 0, 0)
	r.Size, sizeName = e.number(s.size, 1, 0)
	if sizeName == "" {
		e.fail("%s=%d is set, but %s is not", rankName, r.Rank, strings.Join(strings.Fields(s.size), " or "))
	}
	if e.err == nil && r.Rank >= r.Size {
		e.fail("%s=%d is not below %s=%d", rankName, r.Rank, sizeName, r.Size)
	}
	if s.source == "pmi" && e.getenv(s.localRank) == "" && e.getenv(slurm.rank) == e.getenv(s.rank) {
		s.localRank, s.node, s.nodes = slurm.localRank, slurm.node, slurm.nodes // srun --mpi=pmi2
	}
	r.LocalRank, localName = e.number(s.localRank, 0, 0)
	r.LocalSize, localSizeName = e.number(s.localSize, 1, 0)
	r.Node, nodeName = e.number(s.node, 0, 0)
	r.Nodes, nodesName = e.number(s.nodes, 1, 0)
	if e.err != nil {
		return r
	}
	if localSizeName == "" && nodeName != "" && s.node == slurm.node {
		r.LocalSize = e.slurmTasks(r.Node)
	}
	switch { // what was not said follows from the rest
	case r.LocalSize > 0:
	case nodesName != "" && r.Nodes == 1, r.Size == 1, loopback(e.getenv("MASTER_ADDR")), e.getenv(envShmPath) != "":
		r.LocalSize = r.Size
		if localName == "" {
			r.LocalRank = r.Rank
		}
	case nodesName != "" && r.Size%r.Nodes == 0:
		r.LocalSize = r.Size / r.Nodes
	default:
		r.LocalSize = 1 + r.LocalRank // alone on the host as far as anyone says
	}
	if localName == "" && r.LocalSize > 1 && r.LocalSize < r.Size {
		r.LocalRank = r.Rank % r.LocalSize
	} else if localName == "" && r.LocalSize == r.Size {
		r.LocalRank = r.Rank
	}
	if nodesName == "" {
		r.Nodes = (r.Size + r.LocalSize - 1) / r.LocalSize
	}
	if nodeName == "" {
		r.Node = min(r.Rank/r.LocalSize, r.Nodes-1)
	}
	say := func(name, what string) string {
		if name == "" {
			return what
		}
		return name
	}
	switch {
	case r.LocalSize > r.Size:
		e.fail("%s=%d is above %s=%d", say(localSizeName, "local size"), r.LocalSize, sizeName, r.Size)
	case r.LocalRank >= r.LocalSize:
		e.fail("%s=%d is not below %s=%d", say(localName, "local rank"), r.LocalRank, say(localSizeName, "local size"), r.LocalSize)
	case r.Nodes > r.Size:
		e.fail("%s=%d is above %s=%d", say(nodesName, "number of nodes"), r.Nodes, sizeName, r.Size)
	case r.Node >= r.Nodes:
		e.fail("%s=%d is not below %s=%d", say(nodeName, "node"), r.Node, say(nodesName, "number of nodes"), r.Nodes)
	}
	return r
}

// reach finds the transport and its addresses.
func (e *environ) reach(r *Rank) {
	r.Transport = e.getenv(envTransport)
	if known := []string{"", "shm", "tcp", "mpi", "inproc"}; !slices.Contains(known, r.Transport) {
		e.fail("%s=%s is unknown; known: %s", envTransport, r.Transport, strings.Join(known[1:], ", "))
		return
	}
	if r.Transport == "inproc" && r.Size > 1 {
		e.fail("%s=inproc cannot connect %d processes", envTransport, r.Size)
		return
	}
	r.Secret = e.getenv(envSecret)
	r.ShmPath = e.getenv(envShmPath)
	if r.Size == 1 && r.ShmPath == "" { // nobody to meet
		r.Transport = "inproc"
	}
	r.listenFD, _ = e.number(envRendezvousFD, 3, 0)
	r.Rendezvous = e.rendezvous(*r)
	if e.err != nil {
		return
	}
	local := r.LocalSize == r.Size
	switch {
	case r.Transport != "":
	case r.ShmPath != "", local && runtime.GOOS == "linux" && (r.Source != "moetor" || r.Rendezvous == ""):
		r.Transport = "shm"
	default:
		r.Transport = "tcp"
	}
	switch r.Transport {
	case "shm":
		if !local {
			e.fail("shared memory connects the %d ranks of this host, not all %d; set %s=tcp", r.LocalSize, r.Size, envTransport)
			return
		}
		if r.ShmPath == "" {
			r.ShmPath = e.shmName(*r)
			r.CreateShm = r.LocalRank == 0
		}
		if r.ShmPath == "" {
			e.fail("no name for the shared memory of %d ranks; set %s to the same path in all of them, or %s=tcp",
				r.Size, envShmPath, envTransport)
		}
	case "tcp":
		if r.Size > 1 && r.Rendezvous == "" {
			e.fail("no address at which rank 0 of %d listens; set %s=HOST:PORT in all ranks", r.Size, envRendezvous)
		} else if r.Size > 1 && r.Secret == "" {
			e.fail("tcp between %d ranks needs a secret; set %s to the same random string in all of them (openssl rand -hex 32)",
				r.Size, envSecret)
		}
	}
}

// rendezvous is the address of rank 0, or "" where nothing says it.
func (e *environ) rendezvous(r Rank) string {
	if v := e.getenv(envRendezvous); v != "" {
		if err := checkAddress(v); err != nil {
			e.fail("%s=%s: %w", envRendezvous, v, err)
		}
		return v
	}
	port, portName := e.number("MASTER_PORT", 1, 29500) // torch's own default
	if port > 65535 {
		e.fail("MASTER_PORT=%d is no port", port)
		return ""
	}
	if host := e.getenv("MASTER_ADDR"); host != "" {
		if e.getenv("TORCHELASTIC_RUN_ID") != "" { // the agent's store listens on the port itself
			if port++; port > 65535 {
				e.fail("MASTER_PORT=%d leaves no port above it for rank 0", port-1)
			}
		}
		return net.JoinHostPort(host, strconv.Itoa(port))
	}
	if r.Source == "moetor" || r.Size == 1 {
		return ""
	}
	name, list := e.find("SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_NODELIST")
	if name == "" {
		return ""
	}
	hosts, err := hostList(list)
	if err != nil {
		e.fail("%s=%s: %w", name, list, err)
		return ""
	}
	if portName == "" {
		job, jobName := e.slurmID("SLURM_JOB_ID SLURM_JOBID")
		step, _ := e.slurmID("SLURM_STEP_ID SLURM_STEPID")
		if jobName == "" {
			return ""
		}
		port = int(20000 + (job+step)%20000)
	}
	return net.JoinHostPort(hosts[0], strconv.Itoa(port))
}

func (e *environ) slurmID(names string) (uint64, string) {
	name, v := e.find(names)
	if name == "" {
		return 0, ""
	}
	n, err := strconv.ParseUint(v, 10, 32)
	if err != nil {
		e.fail("%s=%s is not a whole number", name, v)
	}
	return n, name
}

// shmName is a name that the ranks of this job share and no other job has, or "".
func (e *environ) shmName(r Rank) string {
	var id []string
	add := func(names string) bool {
		_, v := e.find(names)
		if v != "" {
			id = append(id, v)
		}
		return v != ""
	}
	known := false
	switch r.Source {
	case "torchrun":
		// A run id is "none" unless the user gives one; the port tells jobs of one host apart.
		known = add("MASTER_PORT")
		add("TORCHELASTIC_RUN_ID")
		add("TORCHELASTIC_RESTART_COUNT")
	case "openmpi":
		known = add("PMIX_NAMESPACE OMPI_MCA_ess_base_jobid")
	case "pmi", "slurm":
		known = add("SLURM_JOB_ID SLURM_JOBID")
		add("SLURM_STEP_ID SLURM_STEPID")
	}
	if !known {
		return ""
	}
	plain := strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' {
			return c
		}
		return '_'
	}, strings.Join(id, "."))
	return fmt.Sprintf("moetor-%d-%s-%s", os.Getuid(), r.Source, plain)
}

func loopback(host string) bool {
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}

// checkAddress refuses what cannot be the host and port of a rendezvous.
func checkAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return fmt.Errorf("want HOST:PORT")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%q is no port from 1 to 65535", port)
	}
	return nil
}
