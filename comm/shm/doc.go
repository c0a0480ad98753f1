// Package shm is the transport between the ranks of one host: bytes move through memory that all ranks map, never through
// a socket.
//
// A segment is a directory, normally in /dev/shm, with one file that every rank maps and one named pipe per rank. The file
// holds, for every ordered pair of ranks, a ring with a single producer and a single consumer. A message is cut into
// fragments of at most 64 KiB (and a quarter of the ring), each published by one atomic store, so messages larger than the
// ring flow through it and a reader never sees half a fragment. A cancelled send ends its message with a fragment that says
// so; the stream stays usable.
//
// Every rank has one progress goroutine that empties its incoming rings into queues by sender and tag, or straight into
// the buffer of a Recv that waits already. So a send waits only while its ring is full and the receiving process does not
// get to run, never for a Recv. The price is memory: messages that nobody asks for pile up at the receiver.
//
// # Waiting
//
// A wait looks at the ring a few times (not at all when there are more ranks than processors; the count adapts to whether
// looking helped) and then sleeps. A sleeping rank says so in the header; the next one that has news for it writes a byte
// into its pipe. The pipe is read through Go's poller, so a waiting rank keeps neither a thread nor a P. A futex would: a
// goroutine in FUTEX_WAIT holds its P until the runtime's monitor takes it away, up to 10 ms later, and with one or two Ps
// per rank that is the time of the computation the transport should overlap with. (Two processes, GOMAXPROCS=1, each
// computing 200 µs per message, a progress goroutine each: 497 µs a round with a futex, 261 µs with a pipe.)
//
// # Ends
//
// Every rank writes its process id and that process's start time into the header, and watches the others by pidfd (by
// /proc where that is not to be had). A rank that dies, or closes its transport, fails what waits for it with a
// *comm.PeerError that wraps ErrPeerDied or comm.ErrPeerClosed; messages that had arrived whole before can still be received.
//
// The last rank to attach removes the directory. From then on the segment lives as long as a process maps it, and nothing
// is left behind even when every rank is killed. Whoever called Create calls Remove for the case that not all attached.
//
// The transport needs Linux. Elsewhere the package compiles, and Create and Attach say so.
package shm
