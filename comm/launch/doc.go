// Package launch starts the ranks of one host and looks after them, and tells a rank who it is.
//
// # Starting ranks
//
// Run starts Job.Size copies of a command with the MOETOR_* variables below, lets rank 0 talk to the terminal, keeps what
// every rank prints in LogDir/rank-K.out, and returns when all have ended. When one fails, it ends the others (SIGTERM, then
// SIGKILL after Job.Grace) and returns the failure that came first: an error that a rank reported, or a death without a
// report. A rank that reports a *comm.PeerError about another rank follows that one's failure and is not taken for the cause
// while there is a better one. Ranks die with the launcher, however it ends (Linux), and each has a process group of its
// own, so that Ctrl-C on the terminal reaches the launcher alone.
//
// With Job.CoresPerRank every rank has processors of its own (Linux): the launcher's thread is bound while it starts one, and a
// process inherits that. Ranks of other launchers are bound, or not, by those.
//
// The first SIGINT, SIGTERM or SIGHUP (the terminal is gone; not under nohup) that the launcher gets goes on to every rank as
// SIGINT, once: ranks finish the step, write a checkpoint and exit with 3; those that have not met yet give up. The second
// kills them.
//
// # Being a rank
//
// FromEnv reads rank and size from the environment, from the first of these that is there:
//
//	moetor    MOETOR_RANK MOETOR_WORLD_SIZE MOETOR_LOCAL_RANK MOETOR_LOCAL_SIZE MOETOR_NODE MOETOR_NODES
//	torchrun  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
//	openmpi   OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
//	pmi       PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS (MPICH, Intel MPI)
//	slurm     SLURM_PROCID SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID SLURM_NODEID
//	none      one rank
//
// Launchers nest (mpirun in a Slurm job), so variables of a later line may disagree with those of the one that is taken.
// Within a line they may not.
//
// The transport is MOETOR_TRANSPORT, else shm where all ranks share the host (Linux), else tcp.
//
// Over tcp, rank 0 listens at MOETOR_RENDEZVOUS, else MASTER_ADDR:MASTER_PORT (under torchrun's agent, which listens on that
// port itself, the next port), else, in a Slurm job, the first host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST at port
// 20000 + (SLURM_JOB_ID + SLURM_STEP_ID) mod 20000. MOETOR_SECRET must be the same random string for all ranks, and under a
// launcher other than this package's the user sets it: whatever could be derived from the job's variables, other users of
// the cluster can derive as well.
//
// Over shm, the segment is MOETOR_SHM_PATH, which this package's launcher makes. Under other launchers its name comes from
// the job's id (TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid, SLURM_JOB_ID), and the rank with CreateShm
// makes it.
//
// A rank tells the launcher of its steps with Progress and of the error it ends with by Report, through a pipe whose number
// is MOETOR_REPORT_FD. Under other launchers both do nothing.
package launch
