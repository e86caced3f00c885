//! The schedule against a brute-force model that goes from nanosecond to nanosecond.
#![allow(unsafe_code)] // the state is made of zeroes

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;

use proptest::prelude::*;

use super::engine::{Engine, SimError};
use super::layout::{Locked, MemKind, Open, RING, Work};

const SMS: u32 = 10;
const CAPS: [u32; 3] = [10, 4, 7];
const STREAMS_EACH: usize = 2;
const EVENTS: usize = 4;

/// An engine over memory of its own.
struct Bench {
    locked: *mut Locked,
    open: *mut Open,
}

impl Bench {
    fn new(gpus: u32) -> Self {
        // SAFETY: all zeroes is a valid state; the allocator gives fresh pages without touching them.
        unsafe {
            let locked = alloc_zeroed(Layout::new::<Locked>()).cast::<Locked>();
            let open = alloc_zeroed(Layout::new::<Open>()).cast::<Open>();
            assert!(!locked.is_null() && !open.is_null());
            (*locked).gpus_len = gpus;
            for g in 0..gpus as usize {
                (*locked).gpus[g].sms = SMS;
                (*locked).gpus[g].sm_free = SMS;
                (*locked).gpus[g].mem_total = 1000;
            }
            Self { locked, open }
        }
    }

    fn engine(&mut self) -> Engine<'_> {
        // SAFETY: both were allocated in `new` and are borrowed with `self`.
        unsafe { Engine { l: &mut *self.locked, o: &*self.open } }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with these layouts.
        unsafe {
            dealloc(self.locked.cast(), Layout::new::<Locked>());
            dealloc(self.open.cast(), Layout::new::<Open>());
        }
    }
}

// --- The model -------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
enum Head {
    None,
    Ready,
    Running { end: u64, order: u64 },
    ReadyCopy,
    Blocked,
    Host,
}

#[derive(Debug)]
struct ModelStream {
    proc: usize,
    items: VecDeque<Work>,
    completed: u64,
    head: Head,
}

#[derive(Debug, Default)]
struct ModelProc {
    ready: VecDeque<usize>,
    kernels: u64,
    kernel_ns: u64,
    busy_ns: u64,
    sm_ns: u64,
}

/// One GPU played tick by tick with plain lists.
#[derive(Debug)]
struct Model {
    time: u64,
    order: u64,
    streams: Vec<ModelStream>,
    procs: Vec<ModelProc>,
    turns: VecDeque<usize>,
    copies: [VecDeque<usize>; 2],
    blocked: Vec<usize>,
    events: [(u64, u64); EVENTS],
}

fn cut(proc: usize, work: Work) -> Work {
    match work {
        Work::Kernel { sms, ns } if sms > CAPS[proc] => {
            let ns = (ns * u64::from(sms)).div_ceil(u64::from(CAPS[proc]));
            Work::Kernel { sms: CAPS[proc], ns }
        }
        other => other,
    }
}

impl Model {
    fn new() -> Self {
        let streams = (0..CAPS.len() * STREAMS_EACH).map(|s| ModelStream {
            proc: s / STREAMS_EACH,
            items: VecDeque::new(),
            completed: 0,
            head: Head::None,
        });
        Self {
            time: 0,
            order: 0,
            streams: streams.collect(),
            procs: CAPS.iter().map(|_| ModelProc::default()).collect(),
            turns: VecDeque::new(),
            copies: [VecDeque::new(), VecDeque::new()],
            blocked: Vec::new(),
            events: [(0, 0); EVENTS],
        }
    }

    fn running_sms(&self, of: Option<usize>) -> u32 {
        let mut sum = 0;
        for s in &self.streams {
            if let (Head::Running { .. }, Some(Work::Kernel { sms, .. })) = (s.head, s.items.front())
                && of.is_none_or(|p| p == s.proc)
            {
                sum += sms;
            }
        }
        sum
    }

    fn advance(&mut self, now: u64) {
        while self.time < now {
            // The tick from `time` to `time + 1` passes.
            for p in 0..CAPS.len() {
                let sms = self.running_sms(Some(p));
                let kernels = self.streams.iter().filter(|s| {
                    s.proc == p
                        && matches!(s.head, Head::Running { .. })
                        && matches!(s.items.front(), Some(Work::Kernel { .. }))
                });
                self.procs[p].kernel_ns += kernels.count() as u64;
                self.procs[p].busy_ns += u64::from(sms > 0);
                self.procs[p].sm_ns += u64::from(sms);
            }
            assert!(self.running_sms(None) <= SMS);
            self.time += 1;
            let mut ended: Vec<(u64, usize)> = Vec::new();
            for (i, s) in self.streams.iter().enumerate() {
                if let Head::Running { end, order } = s.head
                    && end == self.time
                {
                    ended.push((order, i));
                }
            }
            ended.sort_unstable();
            for (_, s) in &ended {
                self.pop(*s);
            }
            for (_, s) in &ended {
                self.settle(*s);
            }
            self.unblock();
            self.dispatch();
        }
    }

    fn pop(&mut self, s: usize) {
        let stream = &mut self.streams[s];
        if let Some(Work::Kernel { .. }) = stream.items.pop_front() {
            self.procs[stream.proc].kernels += 1;
        }
        stream.completed += 1;
        stream.head = Head::None;
    }

    fn settle(&mut self, s: usize) {
        while let Some(work) = self.streams[s].items.front().copied() {
            let proc = self.streams[s].proc;
            match work {
                Work::Record { event, sequence } => {
                    let e = &mut self.events[event as usize];
                    if sequence > e.0 {
                        *e = (sequence, self.time);
                    }
                }
                Work::Wait { stream, position } if self.streams[stream as usize].completed <= position => {
                    self.streams[s].head = Head::Blocked;
                    self.blocked.push(s);
                    return;
                }
                Work::Host => {
                    self.streams[s].head = Head::Host;
                    return;
                }
                Work::Copy { engine, ns, .. } if ns > 0 => {
                    self.streams[s].head = Head::ReadyCopy;
                    self.copies[engine as usize].push_back(s);
                    return;
                }
                Work::Kernel { ns, .. } if ns > 0 => {
                    self.streams[s].head = Head::Ready;
                    self.procs[proc].ready.push_back(s);
                    if !self.turns.contains(&proc) {
                        self.turns.push_back(proc);
                    }
                    return;
                }
                _ => {}
            }
            self.pop(s);
        }
    }

    fn unblock(&mut self) {
        while let Some(i) = self.blocked.iter().position(|s| match self.streams[*s].items.front() {
            Some(Work::Wait { stream, position }) => self.streams[*stream as usize].completed > *position,
            _ => false,
        }) {
            let s = self.blocked.remove(i);
            self.settle(s);
        }
    }

    fn start(&mut self, s: usize, ns: u64) {
        self.streams[s].head = Head::Running { end: self.time + ns, order: self.order };
        self.order += 1;
    }

    fn dispatch(&mut self) {
        for engine in 0..2_u32 {
            let busy = self.streams.iter().any(|s| {
                matches!(s.head, Head::Running { .. })
                    && matches!(s.items.front(), Some(Work::Copy { engine: e, .. }) if *e == engine)
            });
            if !busy
                && let Some(s) = self.copies[engine as usize].pop_front()
                && let Some(Work::Copy { ns, .. }) = self.streams[s].items.front().copied()
            {
                self.start(s, ns);
            }
        }
        'round: loop {
            for i in 0..self.turns.len() {
                let p = self.turns[i];
                let s = self.procs[p].ready[0];
                let Some(Work::Kernel { sms, ns }) = self.streams[s].items.front().copied() else {
                    unreachable!()
                };
                if self.running_sms(Some(p)) + sms > CAPS[p] {
                    continue;
                }
                if self.running_sms(None) + sms > SMS {
                    return;
                }
                self.turns.remove(i);
                self.procs[p].ready.pop_front();
                if !self.procs[p].ready.is_empty() {
                    self.turns.push_back(p);
                }
                self.start(s, ns);
                continue 'round;
            }
            return;
        }
    }

    fn push(&mut self, s: usize, work: Work) {
        let idle = self.streams[s].items.is_empty();
        let work = cut(self.streams[s].proc, work);
        self.streams[s].items.push_back(work);
        if idle {
            self.settle(s);
            self.unblock();
            self.dispatch();
        }
    }

    fn host_done(&mut self, s: usize) {
        if matches!(self.streams[s].head, Head::Host) {
            self.pop(s);
            self.settle(s);
            self.unblock();
            self.dispatch();
        }
    }
}

// --- Operations ------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Pass(u64),
    Kernel(usize, u32, u64),
    Copy(usize, u32, u64),
    Record(usize, u32),
    Wait(usize, usize),
    Host(usize),
    HostDone(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let s = 0..CAPS.len() * STREAMS_EACH;
    prop_oneof![
        4 => (0_u64..12).prop_map(Op::Pass),
        8 => (s.clone(), 1_u32..=SMS, 0_u64..9).prop_map(|(s, sms, ns)| Op::Kernel(s, sms, ns)),
        2 => (s.clone(), 0_u32..2, 0_u64..6).prop_map(|(s, e, ns)| Op::Copy(s, e, ns)),
        2 => (s.clone(), 0_u32..EVENTS as u32).prop_map(|(s, e)| Op::Record(s, e)),
        2 => (s.clone(), s.clone()).prop_map(|(s, on)| Op::Wait(s, on)),
        1 => s.clone().prop_map(Op::Host),
        2 => s.prop_map(Op::HostDone),
    ]
}

fn opened(bench: &mut Bench) -> Vec<u32> {
    let mut e = bench.engine();
    let mut streams = Vec::new();
    for (p, cap) in CAPS.iter().enumerate() {
        let slot = e.attach(0, p as u32 + 1, 0, 0, b"p", |_| *cap).unwrap();
        streams.extend((0..STREAMS_EACH).map(|_| e.open_stream(slot, 0).unwrap()));
    }
    for _ in 0..EVENTS {
        e.open_event(0).unwrap();
    }
    streams
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Same completions, same event times, same accounts as the tick-by-tick model, at every step.
    #[test]
    fn schedule_equals_the_model(ops in prop::collection::vec(op(), 1..60), lazy in any::<bool>()) {
        let mut bench = Bench::new(1);
        let streams = opened(&mut bench);
        let mut model = Model::new();
        let mut now = 0;
        let mut sequence = 0;
        for op in ops.into_iter().chain([Op::Pass(500), Op::HostDone(0)]) {
            let mut e = bench.engine();
            let push = match op {
                Op::Pass(ns) => {
                    now += ns;
                    model.advance(now);
                    if lazy {
                        // Free launches leave the device alone: the next push must find the same state.
                        continue;
                    }
                    e.advance(now);
                    None
                }
                Op::Kernel(s, sms, ns) => Some((s, Work::Kernel { sms, ns })),
                Op::Copy(s, engine, ns) => Some((s, Work::Copy { engine, bytes: ns, ns })),
                Op::Record(s, event) => {
                    sequence += 1;
                    Some((s, Work::Record { event, sequence }))
                }
                Op::Wait(s, on) => {
                    // The target is an entry pushed before, as for any program.
                    let tail = model.streams[on].completed + model.streams[on].items.len() as u64;
                    if on == s || tail == 0 {
                        continue;
                    }
                    Some((s, Work::Wait { stream: streams[on], position: tail - 1 }))
                }
                Op::Host(s) => Some((s, Work::Host)),
                Op::HostDone(s) => {
                    model.host_done(s);
                    e.host_done(now, streams[s]);
                    None
                }
            };
            if let Some((s, work)) = push {
                let position = e.push(now, streams[s], work).unwrap();
                prop_assert_eq!(position, model.streams[s].completed + model.streams[s].items.len() as u64);
                let as_model = match work {
                    Work::Wait { stream, position } => {
                        Work::Wait { stream: streams.iter().position(|x| *x == stream).unwrap() as u32, position }
                    }
                    other => other,
                };
                model.push(s, as_model);
            }
            e.check();
            for (i, s) in streams.iter().enumerate() {
                prop_assert_eq!(e.completed(*s), model.streams[i].completed, "stream {} at {}", i, now);
            }
            for (i, (done, time)) in model.events.iter().enumerate() {
                let event = &e.o.events[i];
                prop_assert_eq!(event.done.load(std::sync::atomic::Ordering::Relaxed), *done);
                prop_assert_eq!(event.time.load(std::sync::atomic::Ordering::Relaxed), *time);
            }
            let truth = e.truth(now);
            prop_assert_eq!(truth.gpus[0].sms_busy, model.running_sms(None));
            for (p, of_model) in model.procs.iter().enumerate() {
                let account = &truth.processes[p].gpus[0];
                let ours = (account.kernels, account.kernel_ns, account.busy_ns, account.sm_ns);
                prop_assert_eq!(ours, (of_model.kernels, of_model.kernel_ns, of_model.busy_ns, of_model.sm_ns));
            }
        }
    }

    /// After a repair at any point, and after a process vanished, the rest runs to its end.
    #[test]
    fn repair_and_death_lose_nothing_of_the_others(
        ops in prop::collection::vec(op(), 1..60),
        repair_at in 0_usize..60,
        die_at in 0_usize..60,
    ) {
        let mut bench = Bench::new(1);
        let streams = opened(&mut bench);
        let mut e = bench.engine();
        let mut now = 0;
        let mut pushed = [0_u64; CAPS.len() * STREAMS_EACH];
        let mut dead = false;
        e.charge(1, 0, MemKind::Plain, 300).unwrap();
        for (i, op) in ops.into_iter().enumerate() {
            if i == repair_at {
                // The state after EOWNERDEAD: derived state is not trusted.
                e.l.gpus[0].sm_free = 99;
                e.l.queue_len = 0;
                e.l.running_len = 0;
                e.rebuild();
                e.check();
            }
            if i == die_at {
                e.detach(now, 1);
                dead = true;
            }
            let s = match op {
                Op::Pass(ns) => {
                    now += ns;
                    e.advance(now);
                    continue;
                }
                Op::Kernel(s, ..) | Op::Copy(s, ..) | Op::Record(s, _) | Op::Wait(s, _) | Op::Host(s) | Op::HostDone(s) => s,
            };
            if dead && s / STREAMS_EACH == 1 {
                continue;
            }
            let work = match op {
                Op::Kernel(_, sms, ns) => Work::Kernel { sms, ns },
                Op::Copy(_, engine, ns) => Work::Copy { engine, bytes: ns, ns },
                Op::Wait(_, on) if on != s && pushed[on] > 0 => {
                    Work::Wait { stream: streams[on], position: pushed[on] - 1 }
                }
                _ => continue,
            };
            e.push(now, streams[s], work).unwrap();
            pushed[s] += 1;
            e.check();
        }
        e.detach(now, 1);
        e.advance(now + 10_000);
        for (i, s) in streams.iter().enumerate() {
            prop_assert_eq!(e.completed(*s), pushed[i], "stream {}", i);
        }
        prop_assert_eq!(e.memory(0), (1000, 1000));
        prop_assert_eq!(e.l.gpus[0].sm_free, SMS);
    }

    /// A lower bound for the end of an entry is never later than its end.
    #[test]
    fn not_before_is_a_lower_bound(ops in prop::collection::vec(op(), 1..40)) {
        let mut bench = Bench::new(1);
        let streams = opened(&mut bench);
        let mut e = bench.engine();
        let mut now = 0;
        let mut claims: Vec<(u32, u64, u64)> = Vec::new();
        for op in ops {
            let (s, work) = match op {
                Op::Pass(ns) => {
                    now += ns;
                    e.advance(now);
                    continue;
                }
                Op::Kernel(s, sms, ns) => (s, Work::Kernel { sms, ns }),
                Op::Copy(s, engine, ns) => (s, Work::Copy { engine, bytes: 0, ns }),
                Op::Wait(s, on) if on != s && e.tail(streams[on]) > 0 => {
                    (s, Work::Wait { stream: streams[on], position: e.tail(streams[on]) - 1 })
                }
                _ => continue,
            };
            let position = e.push(now, streams[s], work).unwrap();
            claims.extend(e.not_before(streams[s], position, 8).map(|t| (streams[s], position, t)));
        }
        for t in now..now + 2_000 {
            e.advance(t);
            for (s, position, bound) in &claims {
                prop_assert!(e.completed(*s) <= *position || t >= *bound, "done at {t}, bound {bound}");
            }
            if claims.iter().all(|(s, position, _)| e.completed(*s) > *position) {
                break;
            }
        }
    }
}

#[test]
fn the_example_of_the_essay() {
    let mut bench = Bench::new(1);
    let mut e = bench.engine();
    let a = e.attach(0, 1, 0, 0, b"a", |_| SMS).unwrap();
    let b = e.attach(0, 2, 0, 0, b"b", |_| SMS).unwrap();
    let (sa, sb) = (e.open_stream(a, 0).unwrap(), e.open_stream(b, 0).unwrap());
    for _ in 0..3 {
        e.push(0, sa, Work::Kernel { sms: 10, ns: 4 }).unwrap();
    }
    e.push(0, sb, Work::Kernel { sms: 10, ns: 2 }).unwrap();
    let mut at = Vec::new();
    for t in 0..=14 {
        e.advance(t);
        at.push((e.completed(sa), e.completed(sb)));
    }
    assert_eq!(
        (at[3], at[4], at[5], at[6], at[10], at[14]),
        ((0, 0), (1, 0), (1, 0), (1, 1), (2, 1), (3, 1))
    );
}

#[test]
fn a_wide_kernel_is_not_starved_by_narrow_ones() {
    let mut bench = Bench::new(1);
    let mut e = bench.engine();
    let wide = e.attach(0, 1, 0, 0, b"wide", |_| SMS).unwrap();
    let wide = e.open_stream(wide, 0).unwrap();
    let narrow: Vec<u32> = (0..4)
        .map(|i| {
            let p = e.attach(0, 2 + i, 0, 0, b"narrow", |_| SMS).unwrap();
            e.open_stream(p, 0).unwrap()
        })
        .collect();
    for s in &narrow {
        for _ in 0..100 {
            e.push(0, *s, Work::Kernel { sms: 2, ns: 7 }).unwrap();
        }
    }
    e.push(1, wide, Work::Kernel { sms: 10, ns: 5 }).unwrap();
    // The wide kernel starts as soon as the work running at its turn has ended.
    e.advance(7 + 5);
    assert_eq!(e.completed(wide), 1);
}

#[test]
fn a_full_ring_refuses_and_changes_nothing() {
    let mut bench = Bench::new(1);
    let mut e = bench.engine();
    let p = e.attach(0, 1, 0, 0, b"p", |_| SMS).unwrap();
    let s = e.open_stream(p, 0).unwrap();
    for _ in 0..RING {
        e.push(0, s, Work::Kernel { sms: 1, ns: 10 }).unwrap();
    }
    assert_eq!(e.push(0, s, Work::Kernel { sms: 1, ns: 10 }), Err(SimError::RingFull));
    assert_eq!(e.tail(s), RING as u64);
    assert_eq!(e.push(10, s, Work::Kernel { sms: 1, ns: 10 }), Ok(RING as u64));
}

#[test]
fn memory_is_exact_and_shared_bytes_move_to_an_heir() {
    let mut bench = Bench::new(1);
    let mut e = bench.engine();
    let a = e.attach(0, 1, 0, 0, b"a", |_| SMS).unwrap();
    let b = e.attach(0, 2, 0, 0, b"b", |_| SMS).unwrap();
    e.charge(a, 0, MemKind::Vmm, 600).unwrap();
    assert_eq!(e.charge(b, 0, MemKind::Plain, 401), Err(SimError::OutOfMemory { asked: 401, free: 400 }));
    assert_eq!(e.memory(0), (400, 1000));
    let (id, generation) = e.share(a, 0, MemKind::Vmm, 600).unwrap();
    e.join(b, id, generation).unwrap();
    e.detach(5, a);
    assert_eq!(e.memory(0), (400, 1000), "b holds it still");
    assert_eq!(e.truth(5).processes[1].gpus[0].memory_used_bytes, 600);
    e.leave(b, id, generation);
    assert_eq!(e.memory(0), (1000, 1000));
    assert_eq!(e.join(b, id, generation), Err(SimError::Gone));
}
