//! The schedule of the simulated device; its caller supplies the time.
//!
//! # Problem
//! Streams of many processes hold kernels, copies, event records, waits and host functions. Given the time of every push, the exact start
//! and end of every entry must follow, without a thread for the device.
//!
//! # Terms
//! *Entry*: one thing in a stream, at a *position* which never repeats. *Head*: the oldest entry not yet done. *Demand*: SMs a kernel
//! occupies from start to end. *Cap*: most SMs of a process at once (MPS). *Turn list*: processes with a ready kernel, in the order of
//! their turns. All lists lie in one *queue*: a new member joins at its end.
//!
//! # Algorithm
//! [`Engine::advance`] jumps from one completion to the next until `now`. At each instant T, in this order:
//! 1. every kernel or copy with its end at T completes, oldest start first;
//! 2. each stream concerned consumes its entries without duration (records, satisfied waits, kernels of 0 ns) and then shows its head: a
//!    kernel joins the tail of its process's ready list, and the process, if it is not there, the tail of the turn list; a copy joins its
//!    engine's list; a wait joins the blocked list;
//! 3. blocked streams with a satisfied wait do the same, in the order in which they blocked;
//! 4. free copy engines take the front of their list; then processes are served from the front of the turn list: a process without room
//!    under its own cap is passed over and keeps its turn, a kernel too wide for the free SMs stops the round (so narrow kernels cannot
//!    starve a wide one), and any other process starts its kernel and goes to the tail if it has more.
//!
//! Example, 10 SMs: A queues three kernels of 10 SMs x 4 ns, B one of 10 SMs x 2 ns, all at 0. A runs 0-4, B 4-6 (its turn was first), A
//! 6-10 and 10-14.
//!
//! # Invariants
//! [`Engine::check`]: demand of running kernels + free SMs = SMs of the GPU; no process above its cap; one running entry per stream; memory
//! used = sum over processes. All but rings, positions, run intervals and accounts is derived, so [`Engine::rebuild`] restores it after a
//! death in the middle of a change.
//!
//! # Cost
//! O(running + queue x processes served or passed over) per completion, at 8 bytes an entry of the queue; nothing while the queue is empty.
//!
//! # Differences from hardware
//! All processes run side by side as under MPS; without MPS real GPUs slice time between contexts. A kernel occupies its SMs as a block
//! from start to end, and starts only when all of them are free.

mod memory;

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::compiler_fence;

use super::layout::{
    Busy, EVENTS, Item, Locked, MAX_GPUS, MEM_KINDS, Open, PROC_FREE, PROC_GONE, PROC_LIVE, PROCS, Proc,
    ProcGpu, Queued, RING, SHARED, STREAMS, Stream, StreamState, Work,
};
use super::padded;

const NO_POSITION: u64 = u64::MAX;

/// The list of blocked streams.
const BLOCKED: u32 = 0;

/// The turn list of a GPU.
fn turns(gpu: usize) -> u32 {
    1 + gpu as u32
}

/// The list of the streams with a copy for an engine.
fn copies(gpu: usize, engine: usize) -> u32 {
    turns(MAX_GPUS) + (gpu * 2 + engine) as u32
}

/// The list of a process's streams with a kernel.
fn ready(p: usize, gpu: usize) -> u32 {
    copies(MAX_GPUS, 0) + (p * MAX_GPUS + gpu) as u32
}

/// Why the device refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SimError {
    /// The stream holds [`RING`] pending entries.
    #[error("the stream has 1024 pending entries")]
    RingFull,
    /// Every process, stream, event or sharing slot of the device file is taken.
    #[error("no free {0} slot in the device file")]
    NoSlot(&'static str),
    /// The GPU's memory lacks room for the bytes.
    #[error("{asked} bytes asked, {free} free")]
    OutOfMemory { asked: u64, free: u64 },
    /// A shared allocation, or the process of a stream, has gone.
    #[error("the shared allocation or the stream's process is gone")]
    Gone,
}

type Result<T> = std::result::Result<T, SimError>;

/// The device's state, borrowed for one change. Every method takes the time; an earlier time than the last counts as the last.
pub(crate) struct Engine<'a> {
    pub(crate) l: &'a mut Locked,
    pub(crate) o: &'a Open,
}

impl Busy {
    fn note(&mut self, mut from: u64, to: u64) {
        from = from.max(to.saturating_sub(64 << 24));
        while from < to {
            let bucket = from >> 24;
            let end = ((bucket + 1) << 24).min(to);
            let i = (bucket % 64) as usize;
            if self.bucket[i] != bucket {
                self.bucket[i] = bucket;
                self.in_bucket[i] = 0;
            }
            self.in_bucket[i] += end - from;
            from = end;
        }
    }

    /// Notes the start of a kernel at `t`. An interval already begun goes on.
    fn begin(&mut self, t: u64) {
        self.running += 1;
        if self.running == 1 && self.since == 0 {
            self.since = t;
        }
    }

    /// Notes the end of a kernel; the last kernel's end adds the interval to the account.
    fn end(&mut self, t: u64) {
        self.running -= 1;
        if self.running == 0 {
            let since = std::mem::take(&mut self.since);
            self.ns += t - since;
            self.note(since, t);
        }
    }

    /// Time with a kernel running up to `now`, in ns.
    pub(crate) fn total(&self, now: u64) -> u64 {
        self.ns + if self.running > 0 { now - self.since } else { 0 }
    }

    /// Busy ns in the 59 whole buckets before `now`, as percent of them.
    pub(crate) fn percent(&self, now: u64) -> u32 {
        let mut copy = *self;
        if self.running > 0 {
            copy.note(self.since, now);
        }
        let last = now >> 24;
        let recent = last.saturating_sub(59)..last;
        let buckets = copy.bucket.iter().zip(copy.in_bucket).filter(|(bucket, _)| recent.contains(*bucket));
        let percent = buckets.map(|(_, ns)| ns).sum::<u64>() * 100 / (59 << 24);
        u32::try_from(percent.min(100)).unwrap_or(100)
    }
}

impl Engine<'_> {
    pub(crate) fn stream(&mut self, s: u32) -> &mut Stream {
        &mut self.l.streams[s as usize]
    }

    /// Entries of the stream that are done.
    pub(crate) fn completed(&self, s: u32) -> u64 {
        self.o.streams[s as usize].completed.load(Relaxed)
    }

    /// Whether the stream's GPU is lost.
    pub(crate) fn is_lost(&self, s: u32) -> bool {
        self.o.lost[self.l.streams[s as usize].gpu as usize].load(Relaxed) != 0
    }

    fn set_state(&mut self, s: u32, state: StreamState) {
        self.stream(s).state = state as u32;
    }

    fn is(&self, s: u32, state: StreamState) -> bool {
        self.l.streams[s as usize].state == state as u32
    }

    fn owner(&self, s: u32) -> usize {
        self.l.streams[s as usize].owner as usize - 1
    }

    /// The account of the stream's process on the stream's GPU.
    fn account(&mut self, s: u32) -> &mut ProcGpu {
        let (p, gpu) = (self.owner(s), self.stream(s).gpu as usize);
        &mut self.l.procs[p].gpus[gpu]
    }

    /// Brings the schedule to `now`.
    pub(crate) fn advance(&mut self, now: u64) {
        while let Some(end) = self.next_end().filter(|end| *end <= now) {
            self.l.time = self.l.time.max(end);
            self.complete_at(end);
        }
        self.l.time = self.l.time.max(now);
        #[cfg(debug_assertions)]
        self.check();
    }

    /// The next end of a kernel or copy.
    fn next_end(&self) -> Option<u64> {
        self.running().map(|(_, stream)| stream.run_end).min()
    }

    /// The streams with a running head, by their places in the list of such streams.
    fn running(&self) -> impl Iterator<Item = (usize, &Stream)> {
        let running = &self.l.running[..self.l.running_len as usize];
        running.iter().map(|s| &self.l.streams[*s as usize]).enumerate()
    }

    fn complete_at(&mut self, t: u64) {
        // Completions of one instant are handled in the order in which they started.
        let mut settled = Vec::new();
        loop {
            let ended = self.running().filter(|(_, stream)| stream.run_end == t);
            let Some((_, i)) = ended.map(|(i, stream)| (stream.run_order, i)).min() else { break };
            let s = self.l.running[i];
            self.l.running_len -= 1;
            self.l.running[i] = self.l.running[self.l.running_len as usize];
            self.release(s, t);
            self.set_state(s, StreamState::Idle);
            self.bump(s);
            settled.push(s);
        }
        // All of them complete before any stream goes on.
        for s in settled {
            self.settle(s, t);
        }
        self.unblock(t);
        self.dispatch(t);
    }

    /// Gives back the resources of the running entry, and accounts for the time until `t`.
    fn release(&mut self, s: u32, t: u64) {
        let work = self.head(s).work;
        let gpu = self.stream(s).gpu as usize;
        let ran = t - self.stream(s).run_start;
        let own = self.account(s);
        if let Work::Copy { engine, bytes, .. } = work {
            own.copies += 1;
            own.copy_ns += ran;
            own.copy_bytes += bytes;
            self.l.gpus[gpu].copy_busy[engine as usize % 2] = 0;
            return;
        }
        own.kernels += 1;
        own.kernel_ns += ran;
        own.sm_ns += ran * u64::from(work.sms());
        own.sm_used -= work.sms();
        own.busy.end(t);
        let g = &mut self.l.gpus[gpu];
        g.sm_free += work.sms();
        g.busy.end(t);
    }

    pub(super) fn head(&self, s: u32) -> Item {
        let position = self.completed(s);
        self.l.streams[s as usize].ring[(position % RING as u64) as usize]
    }

    /// Whether the work waits for nothing any more.
    fn satisfied(&self, work: Work) -> bool {
        match work {
            Work::Wait { stream, position } => self.completed(stream) > position,
            Work::WaitEvent { event, sequence } => {
                self.o.events[event as usize].done.load(Relaxed) >= sequence
            }
            _ => true,
        }
    }

    /// Completes the stream's head.
    fn bump(&mut self, s: u32) {
        self.stream(s).cum_done = self.head(s).cum;
        self.o.streams[s as usize].completed.store(self.completed(s) + 1, Release);
    }

    /// Consumes entries without duration, and puts the stream into the state and the list of its next head.
    fn settle(&mut self, s: u32, t: u64) {
        loop {
            if self.completed(s) == self.stream(s).tail {
                self.set_state(s, StreamState::Idle);
                if self.stream(s).closing != 0 {
                    self.free_stream(s);
                }
                return;
            }
            let work = self.head(s).work;
            let gpu = self.stream(s).gpu as usize;
            match work {
                Work::Record { event, sequence } => self.reach(event, sequence, t),
                Work::Wait { .. } | Work::WaitEvent { .. } => {
                    if !self.satisfied(work) {
                        return self.enqueue(s, t, StreamState::Blocked, BLOCKED);
                    }
                }
                Work::Host => {
                    self.stream(s).since = t;
                    self.set_state(s, StreamState::Host);
                    return;
                }
                Work::Copy { engine, ns: 1.., .. } => {
                    return self.enqueue(s, t, StreamState::Ready, copies(gpu, engine as usize % 2));
                }
                Work::Copy { bytes, .. } => {
                    let account = self.account(s);
                    account.copies += 1;
                    account.copy_bytes += bytes;
                }
                Work::Kernel { ns: 1.., .. } => {
                    let p = self.owner(s);
                    if self.first(ready(p, gpu), 0).is_none() {
                        self.append(turns(gpu), p as u32);
                    }
                    return self.enqueue(s, t, StreamState::Ready, ready(p, gpu));
                }
                Work::Kernel { .. } => self.account(s).kernels += 1,
            }
            self.bump(s);
        }
    }

    /// Shows the stream's new head, and starts work freed by it.
    fn go_on(&mut self, s: u32, t: u64) {
        self.settle(s, t);
        self.unblock(t);
        self.dispatch(t);
    }

    /// Notes the wait of the stream's head since `t`, and puts the stream at the end of the list of such streams.
    fn enqueue(&mut self, s: u32, t: u64, state: StreamState, list: u32) {
        self.stream(s).since = t;
        self.set_state(s, state);
        self.append(list, s);
    }

    /// Puts a stream or a process at the end of a list.
    fn append(&mut self, list: u32, what: u32) {
        self.l.queue[self.l.queue_len as usize] = Queued { list, what };
        self.l.queue_len += 1;
    }

    /// The first member of a list from a place of the queue on: its place, and the stream or process.
    fn first(&self, list: u32, from: usize) -> Option<(usize, u32)> {
        let queue = &self.l.queue[..self.l.queue_len as usize];
        let place = from + queue.get(from..)?.iter().position(|queued| queued.list == list)?;
        Some((place, queue[place].what))
    }

    /// Takes the stream or process at a place of the queue out of its list.
    fn unqueue(&mut self, place: usize) {
        self.l.queue.copy_within(place + 1..self.l.queue_len as usize, place);
        self.l.queue_len -= 1;
    }

    /// Notes a record as reached, or passed over.
    fn reach(&self, event: u32, sequence: u64, t: u64) {
        let event = &self.o.events[event as usize];
        if sequence > event.done.load(Relaxed) {
            event.time.store(t, Relaxed);
            event.done.store(sequence, Release);
        }
    }

    /// Releases every blocked stream with a satisfied wait, until none is left.
    fn unblock(&mut self, t: u64) {
        let mut from = 0;
        while let Some((place, s)) = self.first(BLOCKED, from) {
            from = place + 1;
            if self.satisfied(self.head(s).work) {
                self.unqueue(place);
                self.set_state(s, StreamState::Idle);
                self.settle(s, t);
                // A stream before this one may have waited for this one's last entry.
                from = 0;
            }
        }
    }

    fn dispatch(&mut self, t: u64) {
        for gpu in 0..self.l.gpus_len as usize {
            for e in 0..2 {
                if self.l.gpus[gpu].copy_busy[e] == 0
                    && let Some((place, s)) = self.first(copies(gpu, e), 0)
                {
                    self.unqueue(place);
                    self.start(s, t);
                }
            }
            self.serve_turns(gpu, t);
        }
    }

    fn serve_turns(&mut self, gpu: usize, t: u64) {
        let mut from = 0;
        while let Some((turn, p)) = self.first(turns(gpu), from) {
            let list = ready(p as usize, gpu);
            let Some((place, s)) = self.first(list, 0) else { return };
            let (sms, account) = (self.head(s).work.sms(), &self.l.procs[p as usize].gpus[gpu]);
            if account.sm_used + sms > account.sm_cap {
                from = turn + 1;
                continue;
            }
            if sms > self.l.gpus[gpu].sm_free {
                return;
            }
            // The process's turn is over; with more kernels it joins the end.
            self.unqueue(turn.max(place));
            self.unqueue(turn.min(place));
            if self.first(list, 0).is_some() {
                self.append(turns(gpu), p);
            }
            let waited = t - self.stream(s).since;
            self.account(s).queue_wait_ns += waited;
            self.start(s, t);
            from = 0;
        }
    }

    /// The stream's head starts to run.
    fn start(&mut self, s: u32, t: u64) {
        let (position, ns, order) = (self.completed(s), self.head(s).work.ns(), self.l.order);
        self.l.order += 1;
        let stream = self.stream(s);
        stream.run_start = t;
        stream.run_end = t.saturating_add(ns).min(u64::MAX - 1);
        stream.run_order = order;
        stream.run_pos = position;
        self.run(s);
    }

    /// Occupies the resources of the stream's head, and adds the stream to the list of running heads.
    fn run(&mut self, s: u32) {
        let work = self.head(s).work;
        let (gpu, start) = (self.stream(s).gpu as usize, self.stream(s).run_start);
        if let Work::Copy { engine, .. } = work {
            self.l.gpus[gpu].copy_busy[engine as usize % 2] = s + 1;
        } else {
            let account = self.account(s);
            account.sm_used += work.sms();
            account.busy.begin(start);
            let g = &mut self.l.gpus[gpu];
            g.sm_free = g.sm_free.saturating_sub(work.sms());
            g.busy.begin(start);
        }
        self.set_state(s, StreamState::Running);
        self.l.running[self.l.running_len as usize] = s;
        self.l.running_len += 1;
    }

    /// Appends work to a stream and returns its position. `RingFull` leaves everything unchanged; `Gone` means a detached process, such as
    /// a process which closed the device file under the driver.
    pub(crate) fn push(&mut self, now: u64, s: u32, work: Work) -> Result<u64> {
        self.advance(now);
        if self.stream(s).owner == 0 {
            return Err(SimError::Gone);
        }
        let t = self.l.time;
        let position = self.stream(s).tail;
        let done = self.completed(s);
        if position - done >= RING as u64 {
            return Err(SimError::RingFull);
        }
        let (p, gpu) = (self.owner(s), self.stream(s).gpu as usize);
        let work = match work {
            Work::Kernel { sms, ns } => {
                let sms = sms.clamp(1, self.l.gpus[gpu].sms.max(1));
                Work::Kernel { sms, ns }.capped(self.l.procs[p].gpus[gpu].sm_cap)
            }
            other => other,
        };
        if let Work::Record { event, sequence } = work {
            self.o.events[event as usize].issued.fetch_max(sequence, Relaxed);
        }
        let stream = self.stream(s);
        stream.cum_tail = stream.cum_tail.wrapping_add(work.ns());
        stream.ring[(position % RING as u64) as usize] = Item { work, cum: stream.cum_tail };
        // The entry exists from the move of the tail on: a process killed before this line has pushed nothing.
        compiler_fence(Release);
        stream.tail = position + 1;
        if position == done {
            self.go_on(s, t);
        }
        Ok(position)
    }

    /// Completes the host entry at the stream's head.
    pub(crate) fn host_done(&mut self, now: u64, s: u32) {
        self.advance(now);
        let t = self.l.time;
        if self.is(s, StreamState::Host) {
            self.set_state(s, StreamState::Idle);
            self.bump(s);
            self.go_on(s, t);
        }
    }

    /// Whether the head of the stream is the host entry at `position`.
    pub(crate) fn host_reached(&self, s: u32, position: u64) -> bool {
        self.completed(s) == position && self.is(s, StreamState::Host)
    }

    /// A time before which the entry at `position` cannot be done, regardless of the other processes. `None`: the entry waits for a host,
    /// so no bound exists.
    pub(crate) fn not_before(&self, s: u32, position: u64, depth: u32) -> Option<u64> {
        let stream = &self.l.streams[s as usize];
        let done = self.completed(s);
        if done > position {
            return Some(self.l.time);
        }
        let target = stream.ring[(position % RING as u64) as usize].cum;
        let rest = target.wrapping_sub(stream.cum_done);
        if self.is(s, StreamState::Running) {
            return Some(stream.run_end.saturating_add(rest.saturating_sub(self.head(s).work.ns())));
        }
        if self.is(s, StreamState::Host) {
            return None;
        }
        let mut from = self.l.time;
        if self.is(s, StreamState::Blocked) && depth > 0 {
            let Work::Wait { stream, position } = self.head(s).work else { return None };
            from = from.max(self.not_before(stream, position, depth - 1)?);
        }
        Some(from.saturating_add(rest))
    }

    // --- Processes -------------------------------------------------------------------------------

    /// Adds a process with its cap of SMs on each GPU.
    pub(crate) fn attach(
        &mut self,
        now: u64,
        pid: u32,
        start_time: u64,
        image: u64,
        name: &[u8],
        cap: impl Fn(u32) -> u32,
    ) -> Result<u32> {
        self.advance(now);
        let procs = &self.l.procs;
        let gone = (0..PROCS).filter(|&p| procs[p].state == PROC_GONE);
        let slot = (0..PROCS)
            .find(|&p| procs[p].state == PROC_FREE)
            .or_else(|| gone.min_by_key(|&p| procs[p].gone_at))
            .ok_or(SimError::NoSlot("process"))?;
        let mut gpus = [ProcGpu::default(); MAX_GPUS];
        for (account, gpu) in gpus.iter_mut().zip(&self.l.gpus[..self.l.gpus_len as usize]) {
            account.sm_cap = cap(gpu.sms).clamp(1, gpu.sms.max(1));
        }
        let open = &self.o.procs[slot];
        let launches = open.shards.iter().map(|shard| &shard.launches);
        for counter in launches.chain([&open.ring_full, &open.host_waits, &open.host_wait_ns]) {
            counter.store(0, Relaxed);
        }
        let (state, name, attached_at, gone_at) = (PROC_FREE, padded(name), self.l.time, 0);
        self.l.procs[slot] = Proc { state, pid, start_time, image, attached_at, gone_at, name, gpus };
        // A process that is killed before this line has not attached.
        compiler_fence(Release);
        self.l.procs[slot].state = PROC_LIVE;
        u32::try_from(slot).map_err(|_| SimError::NoSlot("process"))
    }

    /// Removes a process: its queued work vanishes, its running work stops now, its memory returns, its events count as reached.
    pub(crate) fn detach(&mut self, now: u64, p: u32) {
        self.advance(now);
        let t = self.l.time;
        let p = p as usize;
        if self.l.procs[p].state != PROC_LIVE {
            return;
        }
        for s in 0..self.l.stream_high {
            if self.l.streams[s as usize].owner as usize == p + 1 {
                self.drop_queue(s, t);
                self.stream(s).closing = 1;
            }
        }
        for e in 0..self.l.event_high as usize {
            if self.l.event_owner[e] as usize == p + 1 {
                self.o.events[e].time.store(t, Relaxed);
                self.o.events[e].done.store(u64::MAX, Release);
                self.l.event_owner[e] = 0;
            }
        }
        let proc = &mut self.l.procs[p];
        proc.gone_at = t;
        proc.state = PROC_GONE;
        for account in &mut proc.gpus {
            account.mem = [0; MEM_KINDS];
        }
        for id in 0..SHARED {
            self.l.shared[id].refs[p] = 0;
            if self.l.shared[id].payer as usize == p + 1 {
                self.move_payer(id);
            }
        }
        self.rebuild();
    }

    /// Marks everything in the stream as done without running it.
    fn drop_queue(&mut self, s: u32, t: u64) {
        if self.is(s, StreamState::Running) && self.stream(s).run_pos == self.completed(s) {
            self.release(s, t);
        }
        let tail = self.stream(s).tail;
        for position in self.completed(s)..tail {
            let item = self.stream(s).ring[(position % RING as u64) as usize];
            if let Work::Record { event, sequence } = item.work {
                self.reach(event, sequence, t);
            }
        }
        let stream = self.stream(s);
        stream.state = StreamState::Idle as u32;
        stream.run_pos = NO_POSITION;
        stream.cum_done = stream.cum_tail;
        self.o.streams[s as usize].completed.store(tail, Release);
    }

    /// Processes that are attached: (slot, pid, image).
    pub(crate) fn live(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        (0_u32..).zip(&self.l.procs).filter(|(_, p)| p.state == PROC_LIVE).map(|(i, p)| (i, p.pid, p.image))
    }

    /// Builds every list and sum from rings, positions, run intervals and accounts.
    pub(crate) fn rebuild(&mut self) {
        let t = self.l.time;
        for g in 0..self.l.gpus_len as usize {
            let used: u64 = (0..PROCS).map(|p| self.l.procs[p].gpus[g].mem.iter().sum::<u64>()).sum();
            let gpu = &mut self.l.gpus[g];
            gpu.sm_free = gpu.sms;
            gpu.mem_used = used;
            gpu.copy_busy = [0; 2];
            gpu.busy.running = 0;
        }
        for proc in &mut self.l.procs {
            for account in &mut proc.gpus[..self.l.gpus_len as usize] {
                account.sm_used = 0;
                account.busy.running = 0;
            }
        }
        self.l.running_len = 0;
        self.l.queue_len = 0;
        // Keeps the order of turns: streams go on in the order in which they became ready.
        let mut waiting: Vec<(u64, u32)> = Vec::new();
        for s in (0..self.l.stream_high).rev() {
            let stream = &self.l.streams[s as usize];
            let owner = (stream.owner as usize).checked_sub(1).and_then(|p| self.l.procs.get(p));
            if owner.is_none_or(|owner| owner.state != PROC_LIVE) {
                self.o.streams[s as usize].completed.store(stream.tail, Release);
                self.free_stream(s);
                continue;
            }
            let done = self.completed(s);
            let runs = stream.run_pos == done && done < stream.tail && stream.run_start <= stream.run_end;
            let since = if stream.state == StreamState::Idle as u32 { t } else { stream.since };
            if runs {
                self.run(s);
            } else {
                waiting.push((since, s));
            }
        }
        for gpu in &mut self.l.gpus[..self.l.gpus_len as usize] {
            if gpu.busy.running == 0 {
                let since = std::mem::take(&mut gpu.busy.since);
                if since < t && since != 0 {
                    gpu.busy.ns += t - since;
                    gpu.busy.note(since, t);
                }
            }
        }
        waiting.sort_unstable();
        for (since, s) in waiting {
            self.set_state(s, StreamState::Idle);
            self.settle(s, t);
            if self.stream(s).state != StreamState::Idle as u32 {
                self.stream(s).since = since;
            }
        }
        self.unblock(t);
        self.dispatch(t);
    }

    // --- Streams and events ----------------------------------------------------------------------

    /// Opens a stream of process `p` on a GPU.
    pub(crate) fn open_stream(&mut self, p: u32, gpu: u32) -> Result<u32> {
        let l = &mut *self.l;
        let s = take_slot(&mut l.stream_high, STREAMS, "stream", |s| l.streams[s].owner == 0)?;
        let stream = self.stream(s);
        stream.gpu = gpu;
        stream.closing = 0;
        stream.state = StreamState::Idle as u32;
        stream.cum_done = stream.cum_tail;
        stream.run_pos = NO_POSITION;
        stream.owner = p + 1;
        Ok(s)
    }

    /// Closes a stream: queued work still runs, then the slot is free.
    pub(crate) fn close_stream(&mut self, now: u64, s: u32) {
        self.advance(now);
        self.stream(s).closing = 1;
        if self.completed(s) == self.stream(s).tail {
            self.free_stream(s);
        }
    }

    fn free_stream(&mut self, s: u32) {
        let stream = self.stream(s);
        stream.owner = 0;
        stream.closing = 0;
        stream.state = StreamState::Idle as u32;
    }

    /// Position the next entry of the stream will have.
    #[cfg(test)]
    pub(crate) fn tail(&self, s: u32) -> u64 {
        self.l.streams[s as usize].tail
    }

    /// Takes an event slot for process `p`. Sequence numbers continue from the slot's last owner, so the queued records of this owner do no
    /// harm.
    pub(crate) fn open_event(&mut self, p: u32) -> Result<u32> {
        let l = &mut *self.l;
        let e = take_slot(&mut l.event_high, EVENTS, "event", |e| l.event_owner[e] == 0)?;
        self.l.event_owner[e as usize] = p + 1;
        let event = &self.o.events[e as usize];
        event.done.fetch_min(event.issued.load(Relaxed), Relaxed);
        Ok(e)
    }

    /// Gives an event slot back; its queued records still run.
    pub(crate) fn close_event(&mut self, e: u32) {
        self.l.event_owner[e as usize] = 0;
    }

    /// Panics if an invariant does not hold. Debug builds call it after every advance.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check(&self) {
        for g in 0..self.l.gpus_len as usize {
            let gpu = &self.l.gpus[g];
            let mut by_proc = std::collections::BTreeMap::new();
            for &s in &self.l.running[..self.l.running_len as usize] {
                assert!(self.is(s, StreamState::Running), "a running entry's stream runs");
                if self.l.streams[s as usize].gpu as usize == g {
                    *by_proc.entry(self.owner(s)).or_insert(0) += self.head(s).work.sms();
                }
            }
            let used: u32 = by_proc.values().sum();
            assert_eq!(used + gpu.sm_free, gpu.sms, "running demand and free SMs make the GPU");
            for (p, sms) in by_proc {
                let account = &self.l.procs[p].gpus[g];
                assert!(sms <= account.sm_cap && sms == account.sm_used, "a process keeps to its cap");
            }
            assert!(gpu.mem_used <= gpu.mem_total, "memory used fits");
        }
    }
}

/// The first free slot; slots from `high` on were never used.
fn take_slot(
    high: &mut u32,
    most: usize,
    what: &'static str,
    is_free: impl Fn(usize) -> bool,
) -> Result<u32> {
    let slot = (0..*high).find(|slot| is_free(*slot as usize)).unwrap_or(*high);
    if slot as usize == most {
        return Err(SimError::NoSlot(what));
    }
    *high = (*high).max(slot + 1);
    Ok(slot)
}
