//! The schedule of the simulated device: what runs when, told the time.
//!
//! # Problem
//! Streams of many processes hold kernels, copies, event records, waits and host functions. Given the time of
//! every push, the exact start and end of every entry must follow, without a thread that plays the device.
//!
//! # Terms
//! *Entry*: one thing in a stream, at a *position* that never repeats. *Head*: the oldest entry not yet done.
//! *Demand*: SMs a kernel occupies from start to end. *Cap*: most SMs a process may occupy at once (MPS).
//! *Turn list*: processes with a ready kernel, in the order of their turns.
//!
//! # Algorithm
//! [`Engine::advance`] jumps from one completion to the next until `now`. At each instant T, in this order:
//! 1. every kernel or copy that ends at T completes, oldest start first;
//! 2. each stream concerned consumes what takes no time (records, satisfied waits, kernels of 0 ns) and then
//!    shows its head: a kernel joins the tail of its process's ready list, and the process, if it is not
//!    there, the tail of the turn list; a copy joins its engine's list; a wait joins the blocked list;
//! 3. blocked streams whose wait is satisfied do the same, in the order in which they blocked;
//! 4. free copy engines take the front of their list; then processes are served from the front of the turn
//!    list: one that has no room under its own cap is passed over and keeps its turn, one whose
//!    kernel does not fit into the free SMs stops the round (so narrow kernels cannot starve a wide one),
//!    any other starts its kernel and goes to the tail if it has more.
//!
//! Example, 10 SMs: A queues three kernels of 10 SMs x 4 ns, B one of 10 SMs x 2 ns, all at 0.
//! A runs 0-4, B 4-6 (its turn was first), A 6-10 and 10-14.
//!
//! # Invariants
//! [`Engine::check`]: demand of running kernels + free SMs = SMs of the GPU; no process above its cap;
//! one running entry per stream; memory used = sum over processes. All but rings, positions, run intervals and accounts
//! is derived, so [`Engine::rebuild`] restores it when a process died in the middle of a change.
//!
//! # Cost
//! O(running + processes passed over) per completion; nothing while nothing is queued.
//!
//! # Differences from hardware
//! All processes run side by side as under MPS; without MPS real GPUs slice time between contexts. A kernel
//! occupies its SMs as a block from start to end, and starts only when all of them are free.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::layout::{
    Busy, COPY, EVENTS, HOST, Item, KERNEL, List, Locked, MEM_KINDS, MemKind, Open, PROC_FREE, PROC_GONE,
    PROC_LIVE, PROCS, ProcGpu, RECORD, RING, SHARED, STREAMS, SharedAlloc, Stream, StreamState, WAIT,
};

const NO_POSITION: u64 = u64::MAX;

/// The work that a stream is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Occupy `sms` SMs for `ns`. A demand above the process's cap is cut to it and takes proportionally longer.
    Kernel { sms: u32, ns: u64 },
    /// Occupy a copy engine for `ns`: 0 towards the device, on it, or memset; 1 towards the host. The bytes are for the account only.
    Copy { engine: u32, bytes: u64, ns: u64 },
    /// Note the time at which record number `sequence` of the event in a slot is reached; the event is complete when the highest has been.
    Record { event: u32, sequence: u64 },
    /// Wait until the stream in another slot has completed the entry at `position`.
    Wait { stream: u32, position: u64 },
    /// Wait until an event's record number `sequence` is reached; for events of other processes.
    WaitEvent { event: u32, sequence: u64 },
    /// Wait until the owner says [`Engine::host_done`].
    Host,
}

/// Why the device refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SimError {
    /// The stream holds [`RING`] entries that are not done.
    #[error("the stream has 1024 pending entries")]
    RingFull,
    /// Every process, stream, event or sharing slot of the device file is taken.
    #[error("no free {0} slot in the device file")]
    NoSlot(&'static str),
    /// The GPU's memory does not hold the bytes asked for.
    #[error("{asked} bytes asked, {free} free")]
    OutOfMemory { asked: u64, free: u64 },
    /// A shared allocation, or the process of a stream, is no longer there.
    #[error("the shared allocation or the stream's process is gone")]
    Gone,
}

/// The device's state, borrowed for one change. Every method takes the time; a time before the last one counts as the last one.
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

    /// One more kernel runs from `t` on.
    fn begin(&mut self, t: u64) {
        self.running += 1;
        if self.running == 1 {
            self.since = t;
        }
    }

    /// One kernel less runs; the time since the first of them is accounted for when it was the last.
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
    /// Time up to which the schedule has been worked out.
    pub(crate) fn time(&self) -> u64 {
        self.l.time
    }

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

    /// What the stream's process has of the stream's GPU.
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

    /// The next instant at which something ends by itself.
    pub(crate) fn next_end(&self) -> Option<u64> {
        self.running().map(|(_, stream)| stream.run_end).min()
    }

    /// The streams whose heads run, by their places in that list.
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
            self.finish_run(s, t);
            settled.push(s);
        }
        // All complete before any goes on.
        for s in settled {
            self.stream(s).next = 0;
            self.settle(s, t);
        }
        self.unblock(t);
        self.dispatch(t);
    }

    /// The stream's running entry has ended: accounts, resources, position.
    fn finish_run(&mut self, s: u32, t: u64) {
        let item = self.head(s);
        self.release(s, item, t);
        self.set_state(s, StreamState::Idle);
        self.bump(s, item);
    }

    /// Gives back what the running entry occupies, and accounts for the time until `t`.
    fn release(&mut self, s: u32, item: Item, t: u64) {
        let gpu = self.stream(s).gpu as usize;
        let ran = t - self.stream(s).run_start;
        let own = self.account(s);
        if item.kind == COPY {
            own.copies += 1;
            own.copy_ns += ran;
            own.copy_bytes += item.a;
            self.l.gpus[gpu].copy_busy[item.sm as usize % 2] = 0;
            return;
        }
        own.kernels += 1;
        own.kernel_ns += ran;
        own.sm_ns += ran * u64::from(item.sm);
        own.sm_used -= item.sm;
        own.busy.end(t);
        let g = &mut self.l.gpus[gpu];
        g.sm_free += item.sm;
        g.busy.end(t);
    }

    fn head(&self, s: u32) -> Item {
        let position = self.completed(s);
        self.l.streams[s as usize].ring[(position % RING as u64) as usize]
    }

    /// Whether what a wait entry waits for has happened. (`sm` tells waits for events from waits for streams.)
    fn satisfied(&self, item: Item) -> bool {
        if item.sm == 1 {
            self.o.events[item.a as usize % EVENTS].done.load(Relaxed) >= item.b
        } else {
            self.completed(stream_index(item.a)) > item.b
        }
    }

    fn bump(&mut self, s: u32, item: Item) {
        self.stream(s).cum_done = item.cum;
        self.o.streams[s as usize].completed.store(self.completed(s) + 1, Release);
    }

    /// Consumes what takes no time, and puts the stream into the state and the list that its head asks for.
    fn settle(&mut self, s: u32, t: u64) {
        loop {
            if self.completed(s) == self.stream(s).tail {
                self.set_state(s, StreamState::Idle);
                if self.stream(s).closing != 0 {
                    self.free_stream(s);
                }
                return;
            }
            let item = self.head(s);
            let gpu = self.stream(s).gpu as usize;
            match item.kind {
                RECORD => self.reach(item, t),
                WAIT => {
                    if !self.satisfied(item) {
                        return self.enqueue(s, t, StreamState::Blocked, |l| &mut l.blocked);
                    }
                }
                HOST => {
                    self.stream(s).since = t;
                    self.set_state(s, StreamState::Host);
                    return;
                }
                COPY if item.ns > 0 => {
                    let e = item.sm as usize % 2;
                    return self.enqueue(s, t, StreamState::ReadyCopy, |l| &mut l.gpus[gpu].copies[e]);
                }
                COPY => {
                    let account = self.account(s);
                    account.copies += 1;
                    account.copy_bytes += item.a;
                }
                KERNEL if item.ns > 0 => {
                    let p = self.owner(s);
                    self.enqueue(s, t, StreamState::Ready, |l| &mut l.procs[p].gpus[gpu].ready);
                    return self.take_turn(p, gpu);
                }
                _ => self.account(s).kernels += 1,
            }
            self.bump(s, item);
        }
    }

    /// Shows the stream's new head, and starts what this lets go.
    fn go_on(&mut self, s: u32, t: u64) {
        self.settle(s, t);
        self.unblock(t);
        self.dispatch(t);
    }

    /// Notes that the stream's head waits since `t`, and puts the stream at the tail of the list of such streams.
    fn enqueue(&mut self, s: u32, t: u64, state: StreamState, list: impl FnOnce(&mut Locked) -> &mut List) {
        let stream = self.stream(s);
        stream.since = t;
        stream.state = state as u32;
        stream.next = 0;
        let list = list(self.l);
        match std::mem::replace(&mut list.tail, s + 1) {
            0 => list.head = s + 1,
            last => self.stream(last - 1).next = s + 1,
        }
    }

    /// Takes the first stream out of its list; whether there are more in it.
    fn dequeue(&mut self, s: u32, list: impl FnOnce(&mut Locked) -> &mut List) -> bool {
        let next = self.stream(s).next;
        let list = list(self.l);
        *list = List { head: next, tail: if next == 0 { 0 } else { list.tail } };
        next != 0
    }

    /// Notes a record that is reached, or passed over.
    fn reach(&self, record: Item, t: u64) {
        let event = &self.o.events[record.a as usize % EVENTS];
        if record.b > event.done.load(Relaxed) {
            event.time.store(t, Relaxed);
            event.done.store(record.b, Release);
        }
    }

    /// Puts the process at the tail of the turn list unless it is in it.
    fn take_turn(&mut self, p: usize, gpu: usize) {
        let account = &mut self.l.procs[p].gpus[gpu];
        if account.queued != 0 {
            return;
        }
        account.queued = 1;
        account.next = 0;
        let link = link(p);
        let tail = self.l.gpus[gpu].turn_tail;
        if tail == 0 {
            self.l.gpus[gpu].turn_head = link;
        } else {
            self.l.procs[tail as usize - 1].gpus[gpu].next = link;
        }
        self.l.gpus[gpu].turn_tail = link;
    }

    /// Lets go every blocked stream whose wait is satisfied, until none is.
    fn unblock(&mut self, t: u64) {
        loop {
            let mut before = 0;
            let mut at = self.l.blocked.head;
            while at != 0 {
                let s = at - 1;
                let item = self.head(s);
                let next = self.stream(s).next;
                if self.satisfied(item) {
                    if before == 0 {
                        self.l.blocked.head = next;
                    } else {
                        self.stream(before - 1).next = next;
                    }
                    if self.l.blocked.tail == at {
                        self.l.blocked.tail = before;
                    }
                    self.stream(s).next = 0;
                    self.set_state(s, StreamState::Idle);
                    self.settle(s, t);
                    break;
                }
                before = at;
                at = next;
            }
            if at == 0 {
                return;
            }
        }
    }

    fn dispatch(&mut self, t: u64) {
        for gpu in 0..self.l.gpus_len as usize {
            for e in 0..2 {
                let at = self.l.gpus[gpu].copies[e].head;
                if at != 0 && self.l.gpus[gpu].copy_busy[e] == 0 {
                    let s = at - 1;
                    self.dequeue(s, |l| &mut l.gpus[gpu].copies[e]);
                    self.l.gpus[gpu].copy_busy[e] = at;
                    let item = self.head(s);
                    self.start(s, item, t);
                }
            }
            self.serve_turns(gpu, t);
        }
    }

    fn serve_turns(&mut self, gpu: usize, t: u64) {
        let mut before = 0_u32;
        let mut at = self.l.gpus[gpu].turn_head;
        while at != 0 {
            let p = at as usize - 1;
            let account = self.l.procs[p].gpus[gpu];
            let s = account.ready.head - 1;
            let item = self.head(s);
            if account.sm_used + item.sm > account.sm_cap {
                before = at;
                at = account.next;
                continue;
            }
            if item.sm > self.l.gpus[gpu].sm_free {
                return;
            }
            // Out of the turn list, and to its tail again if there is more.
            if before == 0 {
                self.l.gpus[gpu].turn_head = account.next;
            } else {
                self.l.procs[before as usize - 1].gpus[gpu].next = account.next;
            }
            if self.l.gpus[gpu].turn_tail == at {
                self.l.gpus[gpu].turn_tail = before;
            }
            let account = &mut self.l.procs[p].gpus[gpu];
            account.queued = 0;
            account.next = 0;
            if self.dequeue(s, |l| &mut l.procs[p].gpus[gpu].ready) {
                self.take_turn(p, gpu);
            }
            self.occupy(s, item, t);
            self.start(s, item, t);
            before = 0;
            at = self.l.gpus[gpu].turn_head;
        }
    }

    fn occupy(&mut self, s: u32, item: Item, t: u64) {
        let gpu = self.stream(s).gpu as usize;
        let waited = t - self.stream(s).since;
        let account = self.account(s);
        account.queue_wait_ns += waited;
        account.sm_used += item.sm;
        account.busy.begin(t);
        let g = &mut self.l.gpus[gpu];
        g.sm_free -= item.sm;
        g.busy.begin(t);
    }

    fn start(&mut self, s: u32, item: Item, t: u64) {
        let position = self.completed(s);
        let order = self.l.order;
        self.l.order += 1;
        let stream = self.stream(s);
        stream.next = 0;
        stream.run_start = t;
        stream.run_end = t.saturating_add(item.ns).min(u64::MAX - 1);
        stream.run_order = order;
        stream.run_pos = position;
        stream.state = StreamState::Running as u32;
        self.l.running[self.l.running_len as usize] = s;
        self.l.running_len += 1;
    }

    /// Appends work to a stream and returns its position. `RingFull` leaves everything as it was; `Gone` means that the stream's
    /// process was detached, as one is that has closed the device file under the driver.
    pub(crate) fn push(&mut self, now: u64, s: u32, work: Work) -> Result<u64, SimError> {
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
        let mut item = match work {
            Work::Kernel { sms, ns } => {
                let cap = self.l.procs[p].gpus[gpu].sm_cap.max(1);
                let sms = sms.clamp(1, self.l.gpus[gpu].sms.max(1));
                let longer = (u128::from(ns) * u128::from(sms)).div_ceil(u128::from(cap));
                let ns = if sms > cap { u64::try_from(longer).unwrap_or(u64::MAX / 4) } else { ns };
                Item::new(KERNEL, sms.min(cap), ns, 0, 0)
            }
            Work::Copy { engine, bytes, ns } => Item::new(COPY, engine % 2, ns, bytes, 0),
            Work::Record { event, sequence } => Item::new(RECORD, 0, 0, u64::from(event), sequence),
            Work::Wait { stream, position } => Item::new(WAIT, 0, 0, u64::from(stream), position),
            Work::WaitEvent { event, sequence } => Item::new(WAIT, 1, 0, u64::from(event), sequence),
            Work::Host => Item::new(HOST, 0, 0, 0, 0),
        };
        if let Work::Record { event, sequence } = work {
            self.o.events[event as usize % EVENTS].issued.fetch_max(sequence, Relaxed);
        }
        item.cum = self.stream(s).cum_tail.wrapping_add(item.ns);
        let stream = self.stream(s);
        stream.ring[(position % RING as u64) as usize] = item;
        stream.cum_tail = item.cum;
        // The entry exists once the tail has moved: a process killed before this line has pushed nothing.
        std::sync::atomic::compiler_fence(Release);
        stream.tail = position + 1;
        if position == done {
            self.go_on(s, t);
        }
        Ok(position)
    }

    /// The host entry at the stream's head is done.
    pub(crate) fn host_done(&mut self, now: u64, s: u32) {
        self.advance(now);
        let t = self.l.time;
        if self.is(s, StreamState::Host) {
            let item = self.head(s);
            self.set_state(s, StreamState::Idle);
            self.bump(s, item);
            self.go_on(s, t);
        }
    }

    /// Whether the head of the stream is the host entry at `position`.
    pub(crate) fn host_reached(&self, s: u32, position: u64) -> bool {
        self.completed(s) == position && self.is(s, StreamState::Host)
    }

    /// A time before which the entry at `position` cannot be done, for anything that the other processes do.
    /// `None`: it waits for a host, nothing can be said.
    pub(crate) fn not_before(&self, s: u32, position: u64, depth: u32) -> Option<u64> {
        let stream = &self.l.streams[s as usize];
        let done = self.completed(s);
        if done > position {
            return Some(self.l.time);
        }
        let target = stream.ring[(position % RING as u64) as usize].cum;
        let rest = target.wrapping_sub(stream.cum_done);
        if self.is(s, StreamState::Running) {
            let head = self.head(s);
            return Some(stream.run_end.saturating_add(rest.saturating_sub(head.ns)));
        }
        if self.is(s, StreamState::Host) {
            return None;
        }
        let mut from = self.l.time;
        if self.is(s, StreamState::Blocked) && depth > 0 {
            let head = self.head(s);
            if head.sm == 1 {
                return None;
            }
            from = from.max(self.not_before(stream_index(head.a), head.b, depth - 1)?);
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
    ) -> Result<u32, SimError> {
        self.advance(now);
        let procs = &self.l.procs;
        let gone = (0..PROCS).filter(|&p| procs[p].state == PROC_GONE);
        let slot = (0..PROCS)
            .find(|&p| procs[p].state == PROC_FREE)
            .or_else(|| gone.min_by_key(|&p| procs[p].gone_at))
            .ok_or(SimError::NoSlot("process"))?;
        let (time, gpus) = (self.l.time, &self.l.gpus[..self.l.gpus_len as usize]);
        let caps: Vec<u32> = gpus.iter().map(|g| cap(g.sms).clamp(1, g.sms.max(1))).collect();
        let open = &self.o.procs[slot];
        let launches = open.shards.iter().map(|shard| &shard.launches);
        for counter in launches.chain([&open.ring_full, &open.host_waits, &open.host_wait_ns]) {
            counter.store(0, Relaxed);
        }
        let proc = &mut self.l.procs[slot];
        proc.state = PROC_FREE;
        for (account, cap) in proc.gpus.iter_mut().zip(caps) {
            *account = ProcGpu { sm_cap: cap, ..ProcGpu::default() };
        }
        proc.pid = pid;
        proc.start_time = start_time;
        proc.image = image;
        proc.attached_at = time;
        proc.gone_at = 0;
        proc.name = [0; 16];
        let len = name.len().min(15);
        proc.name[..len].copy_from_slice(&name[..len]);
        proc.state = PROC_LIVE;
        u32::try_from(slot).map_err(|_| SimError::NoSlot("process"))
    }

    /// Removes a process: what it queued vanishes, what it runs stops now, its memory returns, its events count as reached.
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
                self.move_payer(id, None);
            }
        }
        self.rebuild();
    }

    /// Marks everything in the stream as done without running it.
    fn drop_queue(&mut self, s: u32, t: u64) {
        if self.is(s, StreamState::Running) && self.stream(s).run_pos == self.completed(s) {
            let item = self.head(s);
            self.release(s, item, t);
        }
        let tail = self.stream(s).tail;
        for position in self.completed(s)..tail {
            let item = self.stream(s).ring[(position % RING as u64) as usize];
            if item.kind == RECORD {
                self.reach(item, t);
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

    /// Builds every list and sum again from rings, positions, run intervals and accounts.
    pub(crate) fn rebuild(&mut self) {
        let t = self.l.time;
        for g in 0..self.l.gpus_len as usize {
            let used: u64 = (0..PROCS).map(|p| self.l.procs[p].gpus[g].mem.iter().sum::<u64>()).sum();
            let gpu = &mut self.l.gpus[g];
            gpu.sm_free = gpu.sms;
            gpu.mem_used = used;
            gpu.turn_head = 0;
            gpu.turn_tail = 0;
            gpu.copies = [List::default(); 2];
            gpu.copy_busy = [0; 2];
            gpu.busy.running = 0;
        }
        for proc in &mut self.l.procs {
            for account in &mut proc.gpus[..self.l.gpus_len as usize] {
                account.sm_used = 0;
                account.busy.running = 0;
                account.ready = List::default();
                account.queued = 0;
                account.next = 0;
            }
        }
        self.l.running_len = 0;
        self.l.blocked = List::default();
        self.l.stream_free = 0;
        // The order of turns is kept: streams go on in the order in which they became ready.
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
                self.resume(s);
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
            self.stream(s).next = 0;
            self.settle(s, t);
            if self.stream(s).state != StreamState::Idle as u32 {
                self.stream(s).since = since;
            }
        }
        self.unblock(t);
        self.dispatch(t);
        self.l.event_free = 0;
        for e in (0..self.l.event_high as usize).rev() {
            if self.l.event_owner[e] == 0 {
                self.l.event_next[e] = self.l.event_free;
                self.l.event_free = link(e);
            }
        }
    }

    /// Takes a running entry into the lists again, without changing its interval.
    fn resume(&mut self, s: u32) {
        let item = self.head(s);
        let gpu = self.stream(s).gpu as usize;
        let start = self.stream(s).run_start;
        // An interval that has begun goes on.
        let begun = |since: u64| if since == 0 { start } else { since };
        if item.kind == COPY {
            self.l.gpus[gpu].copy_busy[item.sm as usize % 2] = s + 1;
        } else {
            let account = self.account(s);
            account.sm_used += item.sm;
            account.busy.begin(begun(account.busy.since));
            let g = &mut self.l.gpus[gpu];
            g.sm_free = g.sm_free.saturating_sub(item.sm);
            g.busy.begin(begun(g.busy.since));
        }
        self.stream(s).state = StreamState::Running as u32;
        self.stream(s).next = 0;
        self.l.running[self.l.running_len as usize] = s;
        self.l.running_len += 1;
    }

    // --- Streams and events ----------------------------------------------------------------------

    /// Opens a stream of process `p` on a GPU.
    pub(crate) fn open_stream(&mut self, p: u32, gpu: u32) -> Result<u32, SimError> {
        let l = &mut *self.l;
        let next = |s: usize| l.streams[s].next_free;
        let s = take_slot(&mut l.stream_free, &mut l.stream_high, STREAMS, "stream", next)?;
        let stream = self.stream(s);
        stream.gpu = gpu;
        stream.closing = 0;
        stream.state = StreamState::Idle as u32;
        stream.next = 0;
        stream.next_free = 0;
        stream.cum_done = stream.cum_tail;
        stream.run_pos = NO_POSITION;
        stream.owner = p + 1;
        Ok(s)
    }

    /// Closes a stream: what is queued still runs, then the slot is free.
    pub(crate) fn close_stream(&mut self, now: u64, s: u32) {
        self.advance(now);
        self.stream(s).closing = 1;
        if self.completed(s) == self.stream(s).tail {
            self.free_stream(s);
        }
    }

    fn free_stream(&mut self, s: u32) {
        let free = self.l.stream_free;
        let stream = self.stream(s);
        stream.owner = 0;
        stream.closing = 0;
        stream.state = StreamState::Idle as u32;
        stream.next = 0;
        stream.next_free = free;
        self.l.stream_free = s + 1;
    }

    /// Position the next entry of the stream will have.
    #[cfg(test)]
    pub(crate) fn tail(&self, s: u32) -> u64 {
        self.l.streams[s as usize].tail
    }

    /// Takes an event slot for process `p`. Returns it and the last sequence number used: the next record has one more.
    pub(crate) fn open_event(&mut self, p: u32) -> Result<(u32, u64), SimError> {
        let l = &mut *self.l;
        let next = |e: usize| l.event_next[e];
        let e = take_slot(&mut l.event_free, &mut l.event_high, EVENTS, "event", next)?;
        self.l.event_owner[e as usize] = p + 1;
        self.l.event_next[e as usize] = 0;
        // Sequence numbers go on where the slot's last owner stopped, so that his queued records do no harm.
        let event = &self.o.events[e as usize];
        let issued = event.issued.load(Relaxed);
        event.done.fetch_min(issued, Relaxed);
        Ok((e, issued))
    }

    /// Gives an event slot back; records that are queued for it still run.
    pub(crate) fn close_event(&mut self, e: u32) {
        self.l.event_owner[e as usize] = 0;
        self.l.event_next[e as usize] = self.l.event_free;
        self.l.event_free = e + 1;
    }

    // --- Memory ----------------------------------------------------------------------------------

    /// Charges bytes on a GPU to process `p`.
    pub(crate) fn charge(&mut self, p: u32, gpu: u32, kind: MemKind, bytes: u64) -> Result<(), SimError> {
        let g = &self.l.gpus[gpu as usize];
        let free = g.mem_total.saturating_sub(g.mem_used);
        if bytes > free {
            return Err(SimError::OutOfMemory { asked: bytes, free });
        }
        self.count(p as usize, gpu as usize, kind as usize, bytes);
        Ok(())
    }

    /// Takes a charge back.
    pub(crate) fn refund(&mut self, p: u32, gpu: u32, kind: MemKind, bytes: u64) {
        self.uncount(p as usize, gpu as usize, kind as usize, bytes);
    }

    fn count(&mut self, p: usize, gpu: usize, kind: usize, bytes: u64) {
        let account = &mut self.l.procs[p].gpus[gpu];
        account.mem[kind] += bytes;
        account.mem_peak = account.mem_peak.max(account.mem.iter().sum());
        self.l.gpus[gpu].mem_used += bytes;
    }

    fn uncount(&mut self, p: usize, gpu: usize, kind: usize, bytes: u64) {
        let account = &mut self.l.procs[p].gpus[gpu];
        let bytes = bytes.min(account.mem[kind]);
        account.mem[kind] -= bytes;
        self.l.gpus[gpu].mem_used -= bytes;
    }

    /// (free, total) bytes of a GPU.
    pub(crate) fn memory(&self, gpu: u32) -> (u64, u64) {
        let g = &self.l.gpus[gpu as usize];
        (g.mem_total - g.mem_used, g.mem_total)
    }

    /// Makes bytes that `p` pays for known to other processes; `p` holds one reference. Returns (slot, generation).
    pub(crate) fn share(
        &mut self,
        p: u32,
        gpu: u32,
        kind: MemKind,
        bytes: u64,
    ) -> Result<(u32, u32), SimError> {
        let id = (0..SHARED).find(|&i| self.l.shared[i].payer == 0).ok_or(SimError::NoSlot("sharing"))?;
        let entry = &mut self.l.shared[id];
        entry.bytes = bytes;
        entry.gpu = gpu;
        entry.kind = kind as u32;
        entry.generation = entry.generation.wrapping_add(1);
        entry.refs = [0; PROCS];
        entry.refs[p as usize] = 1;
        entry.payer = p + 1;
        Ok((link(id) - 1, entry.generation))
    }

    /// A shared allocation that is still there.
    fn shared(&mut self, id: u32, generation: u32) -> Option<&mut SharedAlloc> {
        let entry = self.l.shared.get_mut(id as usize);
        entry.filter(|entry| entry.payer != 0 && entry.generation == generation)
    }

    /// Takes one more reference to a shared allocation.
    pub(crate) fn join(&mut self, p: u32, id: u32, generation: u32) -> Result<(), SimError> {
        let refs = &mut self.shared(id, generation).ok_or(SimError::Gone)?.refs[p as usize];
        *refs = refs.saturating_add(1);
        Ok(())
    }

    /// Drops a reference; the last one of all processes returns the memory, and if the payer leaves before, another holder pays.
    pub(crate) fn leave(&mut self, p: u32, id: u32, generation: u32) {
        let Some(entry) = self.shared(id, generation) else { return };
        let Some(left) = entry.refs[p as usize].checked_sub(1) else { return };
        entry.refs[p as usize] = left;
        if left == 0 && entry.payer == p + 1 {
            self.move_payer(id as usize, Some(p));
        }
    }

    /// The payer has dropped its last reference: the account moves to another holder, or the bytes return.
    fn move_payer(&mut self, id: usize, payer: Option<u32>) {
        let entry = self.l.shared[id];
        let (gpu, kind) = (entry.gpu as usize, entry.kind as usize % MEM_KINDS);
        let heir = (0..PROCS).find(|&q| entry.refs[q] > 0 && self.l.procs[q].state == PROC_LIVE);
        if let Some(p) = payer {
            self.uncount(p as usize, gpu, kind, entry.bytes);
        }
        match heir {
            Some(q) => {
                self.count(q, gpu, kind, entry.bytes);
                self.l.shared[id].payer = link(q);
            }
            None => self.l.shared[id].payer = 0,
        }
    }

    /// Panics if an invariant does not hold. Debug builds call it after every advance.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check(&self) {
        for g in 0..self.l.gpus_len as usize {
            let gpu = &self.l.gpus[g];
            let mut used = 0;
            let mut by_proc = std::collections::BTreeMap::new();
            for i in 0..self.l.running_len as usize {
                let s = self.l.running[i];
                let stream = &self.l.streams[s as usize];
                assert!(self.is(s, StreamState::Running), "a running entry's stream runs");
                if stream.gpu as usize == g && self.head(s).kind == KERNEL {
                    used += self.head(s).sm;
                    *by_proc.entry(self.owner(s)).or_insert(0) += self.head(s).sm;
                }
            }
            assert_eq!(used + gpu.sm_free, gpu.sms, "running demand and free SMs make the GPU");
            for (p, sms) in by_proc {
                let account = &self.l.procs[p].gpus[g];
                assert!(sms <= account.sm_cap && sms == account.sm_used, "a process keeps to its cap");
            }
            assert!(gpu.mem_used <= gpu.mem_total, "memory used fits");
        }
    }
}

/// A slot that was given back (links are index + 1), or one that was never used.
fn take_slot(
    free: &mut u32,
    high: &mut u32,
    most: usize,
    what: &'static str,
    next: impl FnOnce(usize) -> u32,
) -> Result<u32, SimError> {
    if let Some(slot) = free.checked_sub(1) {
        *free = next(slot as usize);
        return Ok(slot);
    }
    if *high as usize == most {
        return Err(SimError::NoSlot(what));
    }
    *high += 1;
    Ok(*high - 1)
}

fn stream_index(a: u64) -> u32 {
    (a % STREAMS as u64) as u32
}

fn link(index: usize) -> u32 {
    index as u32 + 1
}
