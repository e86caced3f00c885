//! The layout of the mapped device file: a header, a part guarded by the lock, and a part of atomics that
//! every process may read.
//!
//! Every structure is valid when all its bytes are zero, so a fresh sparse file needs no initialisation
//! beyond its header. List links are index + 1, with 0 for "none".

use std::sync::atomic::AtomicU64;

/// Most GPUs in one device file.
pub(crate) const MAX_GPUS: usize = 16;
/// Most processes attached at once, counting the last ones that have left and are kept for their figures.
pub(crate) const PROCS: usize = 256;
/// Most streams open at once over all processes.
pub(crate) const STREAMS: usize = 4096;
/// Pending entries per stream; on hardware a channel holds about as many launches.
pub(crate) const RING: usize = 1024;
/// Most events alive at once over all processes.
pub(crate) const EVENTS: usize = 65_536;
/// Most allocations shared between processes (exported handles) at once.
pub(crate) const SHARED: usize = 4096;
/// Counters of launches that cost nothing, one cache line per thread.
pub(crate) const SHARDS: usize = 64;

/// The use of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum MemKind {
    /// A context's own memory (code, stacks, heaps).
    Context = 0,
    /// Plain and pitched allocations.
    Plain = 1,
    /// Managed allocations.
    Managed = 2,
    /// Memory that stream-ordered pools hold, in use or kept for later.
    Pool = 3,
    /// Physical handles of the virtual memory API.
    Vmm = 4,
    /// Arrays and mipmapped arrays.
    Array = 5,
    /// Memory that graphs allocate.
    Graph = 6,
}

/// Number of [`MemKind`]s.
pub(crate) const MEM_KINDS: usize = 7;

/// The names of the kinds, in order.
pub(crate) const MEM_KIND_NAMES: [&str; MEM_KINDS] =
    ["context", "plain", "managed", "pool", "vmm", "array", "graph"];

pub(crate) const KERNEL: u32 = 1;
pub(crate) const COPY: u32 = 2;
pub(crate) const RECORD: u32 = 3;
pub(crate) const WAIT: u32 = 4;
pub(crate) const HOST: u32 = 5;

/// One entry of a stream.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Item {
    pub(crate) kind: u32,
    /// Kernel: SMs it occupies. Copy: its engine.
    pub(crate) sm: u32,
    /// How long it occupies them.
    pub(crate) ns: u64,
    /// Record: event slot. Wait: stream slot. Copy: bytes.
    pub(crate) a: u64,
    /// Record: sequence number. Wait: position.
    pub(crate) b: u64,
    /// Sum of `ns` of all entries of this stream up to and with this one.
    pub(crate) cum: u64,
}

impl Item {
    pub(crate) fn new(kind: u32, sm: u32, ns: u64, a: u64, b: u64) -> Self {
        Self { kind, sm, ns, a, b, cum: 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum StreamState {
    Idle = 0,
    /// Its head is a kernel in its process's ready list.
    Ready = 1,
    /// Its head occupies SMs or a copy engine.
    Running = 2,
    /// Its head waits for another stream.
    Blocked = 3,
    /// Its head waits for the host.
    Host = 4,
    /// Its head is a copy in a copy engine's list.
    ReadyCopy = 5,
}

#[repr(C)]
pub(crate) struct Stream {
    /// Process slot + 1; 0 = free.
    pub(crate) owner: u32,
    pub(crate) gpu: u32,
    pub(crate) closing: u32,
    pub(crate) state: u32,
    /// Link in the list that the state says.
    pub(crate) next: u32,
    pub(crate) next_free: u32,
    pub(crate) tail: u64,
    /// `cum` of the last entry pushed and of the last entry completed.
    pub(crate) cum_tail: u64,
    pub(crate) cum_done: u64,
    /// The entry that runs: its position, start and end. Valid when `run_pos == completed` and the state is Running.
    pub(crate) run_pos: u64,
    pub(crate) run_start: u64,
    pub(crate) run_end: u64,
    pub(crate) run_order: u64,
    /// When the head became ready, blocked or was handed to the host.
    pub(crate) since: u64,
    pub(crate) ring: [Item; RING],
}

/// Streams that wait for the same, through their `next`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct List {
    pub(crate) head: u32,
    pub(crate) tail: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ProcGpu {
    pub(crate) sm_cap: u32,
    pub(crate) sm_used: u32,
    pub(crate) ready: List,
    pub(crate) queued: u32,
    pub(crate) next: u32,
    pub(crate) mem: [u64; MEM_KINDS],
    pub(crate) mem_peak: u64,
    pub(crate) kernels: u64,
    pub(crate) kernel_ns: u64,
    pub(crate) sm_ns: u64,
    pub(crate) queue_wait_ns: u64,
    pub(crate) copies: u64,
    pub(crate) copy_ns: u64,
    pub(crate) copy_bytes: u64,
    pub(crate) busy: Busy,
}

pub(crate) const PROC_FREE: u32 = 0;
pub(crate) const PROC_LIVE: u32 = 1;
pub(crate) const PROC_GONE: u32 = 2;

#[repr(C)]
pub(crate) struct Proc {
    pub(crate) state: u32,
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    /// Tells programs of the same pid apart: of different PID namespaces, or before and after exec.
    pub(crate) image: u64,
    pub(crate) attached_at: u64,
    pub(crate) gone_at: u64,
    pub(crate) name: [u8; 16],
    pub(crate) gpus: [ProcGpu; MAX_GPUS],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Gpu {
    pub(crate) sms: u32,
    pub(crate) sm_free: u32,
    pub(crate) mem_total: u64,
    pub(crate) mem_used: u64,
    /// Processes with a ready kernel, in the order of their turns.
    pub(crate) turn_head: u32,
    pub(crate) turn_tail: u32,
    /// Copy engines: what waits for each, and the stream + 1 that holds it.
    pub(crate) copies: [List; 2],
    pub(crate) copy_busy: [u32; 2],
    pub(crate) busy: Busy,
}

/// Time with at least one kernel running, of a GPU or of a process on it. What there was of it in about the last second is kept for
/// utilisation: bucket t / 2^24 ns lies at its number mod 64.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Busy {
    pub(crate) running: u64,
    /// When the first of those that run began.
    pub(crate) since: u64,
    /// Sum up to then, in ns.
    pub(crate) ns: u64,
    pub(crate) bucket: [u64; 64],
    pub(crate) in_bucket: [u64; 64],
}

impl Default for Busy {
    fn default() -> Self {
        Self { running: 0, since: 0, ns: 0, bucket: [0; 64], in_bucket: [0; 64] }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SharedAlloc {
    pub(crate) bytes: u64,
    pub(crate) generation: u32,
    pub(crate) gpu: u32,
    pub(crate) kind: u32,
    /// Process slot + 1 whose account carries the bytes; 0 = free.
    pub(crate) payer: u32,
    /// References each process holds.
    pub(crate) refs: [u16; PROCS],
}

/// Everything that is read and written under the lock only.
#[repr(C)]
pub(crate) struct Locked {
    pub(crate) time: u64,
    pub(crate) last_sweep: u64,
    pub(crate) gpus_len: u32,
    pub(crate) running_len: u32,
    pub(crate) blocked: List,
    pub(crate) order: u64,
    pub(crate) stream_high: u32,
    pub(crate) stream_free: u32,
    pub(crate) event_high: u32,
    pub(crate) event_free: u32,
    /// How often a lock was found held by a dead process and the derived state was built again.
    pub(crate) repairs: u64,
    pub(crate) gpus: [Gpu; MAX_GPUS],
    pub(crate) procs: [Proc; PROCS],
    pub(crate) running: [u32; STREAMS],
    pub(crate) event_owner: [u32; EVENTS],
    pub(crate) event_next: [u32; EVENTS],
    pub(crate) shared: [SharedAlloc; SHARED],
    pub(crate) streams: [Stream; STREAMS],
}

#[repr(C)]
pub(crate) struct OpenStream {
    /// Entries completed since the slot was first used; an entry at position p is done when this is > p.
    ///
    /// It never goes back, also when the slot changes hands, so (slot, position) names an entry for ever.
    pub(crate) completed: AtomicU64,
    pub(crate) pad: [u64; 7],
}

#[repr(C)]
pub(crate) struct OpenEvent {
    /// Highest record sequence number that was reached, and when.
    pub(crate) done: AtomicU64,
    pub(crate) time: AtomicU64,
    /// Highest record sequence number that was queued (for events opened by several processes).
    pub(crate) issued: AtomicU64,
    pub(crate) pad: u64,
}

#[repr(C, align(64))]
pub(crate) struct Shard {
    pub(crate) launches: AtomicU64,
}

#[repr(C)]
pub(crate) struct OpenProc {
    pub(crate) shards: [Shard; SHARDS],
    /// Times the process had to wait for the device: for a full ring, or in a synchronising call.
    pub(crate) ring_full: AtomicU64,
    pub(crate) host_waits: AtomicU64,
    pub(crate) host_wait_ns: AtomicU64,
    pub(crate) pad: [u64; 5],
}

/// Atomics that are read without the lock.
#[repr(C)]
pub(crate) struct Open {
    pub(crate) procs: [OpenProc; PROCS],
    pub(crate) streams: [OpenStream; STREAMS],
    pub(crate) events: [OpenEvent; EVENTS],
    /// For each GPU 1 while it is lost, as if it had fallen off the bus; the schedule goes on all the same.
    pub(crate) lost: [AtomicU64; MAX_GPUS],
}
