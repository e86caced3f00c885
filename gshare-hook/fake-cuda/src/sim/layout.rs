//! The layout of the mapped device file: a header, a part guarded by the lock, and a part of atomics readable by every process.
//!
//! Every structure is valid with all its bytes zero, so a fresh sparse file needs no initialisation beyond its header. An index + 1 leaves
//! 0 for "none".

use std::sync::atomic::AtomicU64;

/// Most GPUs in one device file.
pub(crate) const MAX_GPUS: usize = 16;
/// Most processes attached at once, including the last few which have left and are kept for their figures.
pub(crate) const PROCS: usize = 256;
/// Most streams open at once over all processes.
pub(crate) const STREAMS: usize = 4096;
/// Pending entries per stream, about as many as launches in a hardware channel.
pub(crate) const RING: usize = 1024;
/// Most events alive at once over all processes.
pub(crate) const EVENTS: usize = 65_536;
/// Most allocations shared between processes (exported handles) at once.
pub(crate) const SHARED: usize = 4096;
/// Counters of free launches, one cache line per thread.
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

/// Work for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Work {
    /// Occupy `sms` SMs for `ns`. A demand above the process's cap is cut to the cap and takes proportionally longer.
    Kernel { sms: u32, ns: u64 },
    /// Occupy a copy engine for `ns`: 0 towards the device, on it, or memset; 1 towards the host. The bytes are for the account only.
    Copy { engine: u32, bytes: u64, ns: u64 },
    /// Note the time at which record number `sequence` of a slot's event is reached; the event is complete when its highest record is.
    Record { event: u32, sequence: u64 },
    /// Wait until the stream in another slot has completed the entry at `position`.
    Wait { stream: u32, position: u64 },
    /// Wait until an event's record number `sequence` is reached; for events of other processes.
    WaitEvent { event: u32, sequence: u64 },
    /// Wait until the owner says `Engine::host_done`.
    Host,
}

impl Work {
    /// Time on SMs or on a copy engine, in ns.
    pub(crate) fn ns(self) -> u64 {
        if let Self::Kernel { ns, .. } | Self::Copy { ns, .. } = self { ns } else { 0 }
    }

    /// The work under a cap of SMs: a cut kernel takes proportionally longer.
    pub(crate) fn capped(self, most: u32) -> Self {
        match self {
            Self::Kernel { sms, ns } if sms > most => {
                let longer = (u128::from(ns) * u128::from(sms)).div_ceil(u128::from(most.max(1)));
                Self::Kernel { sms: most.max(1), ns: u64::try_from(longer).unwrap_or(u64::MAX / 4) }
            }
            other => other,
        }
    }

    pub(crate) fn sms(self) -> u32 {
        if let Self::Kernel { sms, .. } = self { sms } else { 0 }
    }
}

/// One entry of a stream.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Item {
    pub(crate) work: Work,
    /// Sum of the times of all entries of this stream up to and including this entry.
    pub(crate) cum: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum StreamState {
    Idle = 0,
    /// The head is a kernel or a copy in wait for its turn.
    Ready = 1,
    /// The head occupies SMs or a copy engine.
    Running = 2,
    /// The head waits for another stream.
    Blocked = 3,
    /// The head waits for the host.
    Host = 4,
}

#[repr(C)]
pub(crate) struct Stream {
    /// Process slot + 1; 0 = free.
    pub(crate) owner: u32,
    pub(crate) gpu: u32,
    pub(crate) closing: u32,
    pub(crate) state: u32,
    pub(crate) tail: u64,
    /// `cum` of the last entry pushed and of the last entry completed.
    pub(crate) cum_tail: u64,
    pub(crate) cum_done: u64,
    /// The running entry: its position, start and end. Valid if `run_pos == completed` and the state is Running.
    pub(crate) run_pos: u64,
    pub(crate) run_start: u64,
    pub(crate) run_end: u64,
    pub(crate) run_order: u64,
    /// Time at which the head became ready, blocked or was handed to the host.
    pub(crate) since: u64,
    pub(crate) ring: [Item; RING],
}

/// A stream or a process in one of the queue's lists.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Queued {
    pub(crate) list: u32,
    pub(crate) what: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ProcGpu {
    pub(crate) sm_cap: u32,
    pub(crate) sm_used: u32,
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
    /// Distinguishes programs with one pid: in different PID namespaces, or before and after exec.
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
    /// The stream + 1 that holds each copy engine.
    pub(crate) copy_busy: [u32; 2],
    pub(crate) busy: Busy,
}

/// Time with at least one kernel running, of a GPU or of a process on it. The buckets hold about the last second for utilisation: bucket t
/// / 2^24 ns lies at its number mod 64.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Busy {
    pub(crate) running: u64,
    /// Start of the present interval.
    pub(crate) since: u64,
    /// Sum up to the start, in ns.
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
    /// Slot + 1 of the process charged for the bytes; 0 = free.
    pub(crate) payer: u32,
    /// References each process holds.
    pub(crate) refs: [u16; PROCS],
}

/// State read and written only under the lock.
#[repr(C)]
pub(crate) struct Locked {
    pub(crate) time: u64,
    pub(crate) last_sweep: u64,
    pub(crate) gpus_len: u32,
    pub(crate) running_len: u32,
    pub(crate) queue_len: u32,
    pub(crate) stream_high: u32,
    pub(crate) event_high: u32,
    pub(crate) order: u64,
    /// Times a lock was found held by a dead process, so that the derived state was rebuilt.
    pub(crate) repairs: u64,
    pub(crate) gpus: [Gpu; MAX_GPUS],
    pub(crate) procs: [Proc; PROCS],
    pub(crate) running: [u32; STREAMS],
    /// A stream is in at most one list, a process in at most one list of each GPU.
    pub(crate) queue: [Queued; STREAMS + PROCS * MAX_GPUS],
    pub(crate) event_owner: [u32; EVENTS],
    pub(crate) shared: [SharedAlloc; SHARED],
    pub(crate) streams: [Stream; STREAMS],
}

#[repr(C, align(64))]
pub(crate) struct OpenStream {
    /// Entries completed since the slot was first used; an entry at position p is done when this is > p.
    ///
    /// The number never falls, not even with a new owner of the slot, so (slot, position) names an entry for ever.
    pub(crate) completed: AtomicU64,
}

#[repr(C)]
pub(crate) struct OpenEvent {
    /// Highest reached record number, and its time.
    pub(crate) done: AtomicU64,
    pub(crate) time: AtomicU64,
    /// Highest queued record number (for events opened by several processes).
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
}

/// Atomics read without the lock.
#[repr(C)]
pub(crate) struct Open {
    pub(crate) procs: [OpenProc; PROCS],
    pub(crate) streams: [OpenStream; STREAMS],
    pub(crate) events: [OpenEvent; EVENTS],
    /// For each GPU 1 while it is lost, as if off the bus; the schedule goes on all the same.
    pub(crate) lost: [AtomicU64; MAX_GPUS],
}
