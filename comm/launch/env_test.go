package launch

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
)

func getenv(vars string) func(string) string {
	m := map[string]string{}
	for v := range strings.FieldsSeq(vars) {
		name, value, _ := strings.Cut(v, "=")
		m[name] = value
	}
	return func(name string) string { return m[name] }
}

func TestFromEnv(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the transports expected here are those of Linux")
	}
	uid := os.Getuid()
	for _, c := range []struct {
		vars string
		want Rank
	}{
		{"", Rank{Size: 1, LocalSize: 1, Nodes: 1, Transport: "inproc", Source: "none"}},
		{"MOETOR_RANK=2 MOETOR_WORLD_SIZE=4 MOETOR_LOCAL_RANK=2 MOETOR_LOCAL_SIZE=4 MOETOR_NODE=0 MOETOR_NODES=1 " +
			"MOETOR_TRANSPORT=shm MOETOR_SHM_PATH=/dev/shm/x MOETOR_SECRET=s",
			Rank{Rank: 2, Size: 4, LocalRank: 2, LocalSize: 4, Nodes: 1, Transport: "shm", ShmPath: "/dev/shm/x", Secret: "s", Source: "moetor"}},
		{"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_SHM_PATH=/dev/shm/x",
			Rank{Size: 2, LocalSize: 2, Nodes: 1, Transport: "shm", ShmPath: "/dev/shm/x", Source: "moetor"}},
		// By hand, one rank per host.
		{"MOETOR_RANK=1 MOETOR_WORLD_SIZE=2 MOETOR_RENDEZVOUS=a:1 MOETOR_SECRET=s",
			Rank{Rank: 1, Size: 2, LocalSize: 1, Node: 1, Nodes: 2, Transport: "tcp", Rendezvous: "a:1", Secret: "s", Source: "moetor"}},
		// Our own variables win over those of a launcher around ours.
		{"MOETOR_RANK=1 MOETOR_WORLD_SIZE=2 MOETOR_SHM_PATH=x RANK=0 WORLD_SIZE=7 SLURM_PROCID=5 SLURM_NTASKS=6",
			Rank{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Transport: "shm", ShmPath: "x", Source: "moetor"}},
		// torchrun on two hosts: its agent listens on MASTER_PORT.
		{"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 " +
			"TORCHELASTIC_RUN_ID=none MOETOR_SECRET=s",
			Rank{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, Node: 1, Nodes: 2, Transport: "tcp", Rendezvous: "10.0.0.1:29501", Secret: "s", Source: "torchrun"}},
		{"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2000 TORCHELASTIC_RUN_ID=a/b TORCHELASTIC_RESTART_COUNT=3",
			Rank{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Transport: "shm", Rendezvous: "127.0.0.1:2001",
				ShmPath: fmt.Sprintf("moetor-%d-torchrun-2000.a_b.3", uid), Source: "torchrun"}},
		// The same style set by hand.
		{"RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=2000 MOETOR_TRANSPORT=tcp MOETOR_SECRET=s",
			Rank{Size: 2, LocalSize: 2, Nodes: 1, Transport: "tcp", Rendezvous: "localhost:2000", Secret: "s", Source: "torchrun"}},
		{"RANK=3 WORLD_SIZE=4 MASTER_ADDR=::1 MOETOR_TRANSPORT=tcp MOETOR_SECRET=s",
			Rank{Rank: 3, Size: 4, LocalRank: 3, LocalSize: 4, Nodes: 1, Transport: "tcp", Rendezvous: "[::1]:29500", Secret: "s", Source: "torchrun"}},
		{"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_MCA_ess_base_jobid=123",
			Rank{Size: 3, LocalSize: 3, Nodes: 1, Transport: "shm", ShmPath: fmt.Sprintf("moetor-%d-openmpi-123", uid), CreateShm: true, Source: "openmpi"}},
		// mpirun in the batch script of a Slurm job: the script's own SLURM_PROCID is 0.
		{"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 " +
			"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=40007 SLURM_JOB_NODELIST=n[08-09] MOETOR_SECRET=s",
			Rank{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, Node: 1, Nodes: 2, Transport: "tcp", Rendezvous: "n08:20007", Secret: "s", Source: "openmpi"}},
		{"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MOETOR_SHM_PATH=p",
			Rank{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Transport: "shm", ShmPath: "p", Source: "pmi"}},
		// srun --mpi=pmi2 says where the rank is in Slurm's words.
		{"PMI_RANK=3 PMI_SIZE=4 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 " +
			"SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=7 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=a,b MOETOR_SECRET=s",
			Rank{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, Node: 1, Nodes: 2, Transport: "tcp", Rendezvous: "a:20009", Secret: "s", Source: "pmi"}},
		// Unequal hosts: three tasks on the first, one on the second.
		{"SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_STEP_TASKS_PER_NODE=3,1 " +
			"SLURM_JOB_ID=1 SLURM_JOB_NODELIST=rack[1-2]n[001-002] MASTER_PORT=99 MOETOR_SECRET=s",
			Rank{Rank: 3, Size: 4, LocalSize: 1, Node: 1, Nodes: 2, Transport: "tcp", Rendezvous: "rack1n001:99", Secret: "s", Source: "slurm"}},
		{"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NNODES=1 SLURM_JOB_ID=5 SLURM_STEP_ID=1 SLURM_JOB_NODELIST=h",
			Rank{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Nodes: 1, Transport: "shm", Rendezvous: "h:20006",
				ShmPath: fmt.Sprintf("moetor-%d-slurm-5.1", uid), Source: "slurm"}},
		// An interactive allocation sets the number of tasks without being one.
		{"SLURM_NTASKS=4 SLURM_JOB_ID=5", Rank{Size: 1, LocalSize: 1, Nodes: 1, Transport: "inproc", Source: "none"}},
	} {
		got, err := FromEnv(getenv(c.vars))
		if err != nil || got != c.want {
			t.Errorf("%s\n got %+v, %v\nwant %+v", c.vars, got, err, c.want)
		}
	}
}

func TestFromEnvRefuses(t *testing.T) {
	for vars, want := range map[string]string{
		"RANK=4 WORLD_SIZE=4":                    "RANK=4 is not below WORLD_SIZE=4",
		"RANK=0":                                 "RANK=0 is set, but WORLD_SIZE is not",
		"WORLD_SIZE=4":                           "WORLD_SIZE=4 is set, but RANK is not",
		"RANK=first WORLD_SIZE=4":                "RANK=first is not a whole number",
		"RANK=-1 WORLD_SIZE=4":                   "RANK=-1 is not a number from 0",
		"RANK=0 WORLD_SIZE=0":                    "WORLD_SIZE=0 is not a number from 1",
		"RANK=0 WORLD_SIZE=9999999":              "WORLD_SIZE=9999999",
		"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3": "LOCAL_WORLD_SIZE=3 is above WORLD_SIZE=2",
		"RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2":                        "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_NODES=3":                           "MOETOR_NODES=3 is above MOETOR_WORLD_SIZE=2",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_NODE=2 MOETOR_NODES=2":             "MOETOR_NODE=2 is not below MOETOR_NODES=2",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_TRANSPORT=ib":                      "MOETOR_TRANSPORT=ib is unknown",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_TRANSPORT=inproc":                  "MOETOR_TRANSPORT=inproc cannot connect 2 processes",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_RENDEZVOUS=head":                   "MOETOR_RENDEZVOUS=head: want HOST:PORT",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_RENDEZVOUS=h:0":                    `MOETOR_RENDEZVOUS=h:0: "0" is no port`,
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2":                                          "set MOETOR_RENDEZVOUS",
		"MOETOR_RANK=0 MOETOR_WORLD_SIZE=2 MOETOR_TRANSPORT=shm MOETOR_LOCAL_SIZE=2": "set MOETOR_SHM_PATH",
		"RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MOETOR_TRANSPORT=shm":                "connects the 2 ranks of this host, not all 4",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=x":                            "MASTER_PORT=x is not a whole number",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000":                        "MASTER_PORT=70000 is no port",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_RUN_ID=1":  "MASTER_PORT=65535 leaves no port",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h":                                          "set MOETOR_SECRET",
		"PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2":                                    "set MOETOR_SHM_PATH",
		"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2":                              "OMPI_COMM_WORLD_RANK=2 is not below OMPI_COMM_WORLD_SIZE=2",
		"SLURM_PROCID=0": "SLURM_PROCID=0 is set, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not",
		"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_JOB_ID=x SLURM_JOB_NODELIST=a,b":     "SLURM_JOB_ID=x",
		"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n[1-":    "SLURM_JOB_NODELIST=n[1-: host list: a bracket",
		"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NODEID=0 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=2(y2)": "SLURM_TASKS_PER_NODE=2(y2)",
	} {
		_, err := FromEnv(getenv(vars))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\n got %v\nwant %s", vars, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one line: %q", vars, err)
		}
	}
}

func TestHostList(t *testing.T) {
	for list, want := range map[string]string{
		"n1":                   "n1",
		"n[001-004,7],m2":      "n001 n002 n003 n004 n7 m2",
		"n[8-11]":              "n8 n9 n10 n11",
		"n[098-101]":           "n098 n099 n100 n101",
		"a,b-c,d.e":            "a b-c d.e",
		"r[1-2]n[01-02]x,z[3]": "r1n01x r1n02x r2n01x r2n02x z3",
	} {
		if got, err := hostList(list); err != nil || !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%s: %v, %v; want %s", list, got, err, want)
		}
	}
	for _, list := range []string{"", ",", "a,", "n[", "n]", "n[[1]]", "n[]", "n[2-1]", "n[a]", "n[1-2-3]", "n[0-99999999]", "n[-1]",
		"a[0-999]b[0-999]"} {
		if got, err := hostList(list); err == nil {
			t.Errorf("%q: %d hosts, want an error", list, len(got))
		}
	}
}

func FuzzHostList(f *testing.F) {
	for _, s := range []string{"n[001-004,7],m2", "r[1-2]n[01-02]", "n[", "a,,b", "x]y["} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := hostList(list)
		if err == nil && len(hosts) == 0 {
			t.Errorf("%q: no host and no error", list)
		}
	})
}
