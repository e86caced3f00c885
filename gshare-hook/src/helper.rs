//! The helper thread: leases, measurements, memory, and the daemon.
//!
//! One thread per process, signals blocked, asleep unless something is under way. In each turn it takes what the daemon
//! said and what the program's threads ask, looks which measurements have come in, corrects the account, lets credit in,
//! and decides what to say. It owns everything here, so there is nothing to lock; what the launch path sees of it is the
//! credit in the [`LaunchGate`](gshare_core::gate::LaunchGate).
//!
//! # Leases
//! ```text
//! a thread waits        ─▶ TokenRequest                Grant ─▶ credit, up to the in-flight bound, more as work completes
//! budget nearly spent   ─▶ TokenRequest ahead          Grant ─▶ the same lease, longer
//! budget spent, expired ─▶ no more credit; when what is queued has drained to [`REMAINDER`], now and then to nothing
//!                          ([`Turns::ends_first`]): TokenReturn, with the GPU time used as far as it is measured, and
//!                          whether another is wanted (a kernel that runs is waited for: whoever is let in behind it would
//!                          measure its end as his own; the daemon's grace bounds the wait)
//! nothing launched for [`IDLE`] and nothing queued ─▶ TokenReturn
//! ```
//! Near the expiry the in-flight bound shrinks with the time that is left, so that the queue drains by then.
//!
//! # Work that waits for work
//! A stream may wait for another one (`cuStreamWaitValue`, a host function, a kernel that spins) into which the program has yet
//! to launch. If what waits fills the in-flight bound, that launch would wait for ever. So when a thread waits under an open lease
//! and nothing has completed for [`OVERDUE`] beyond the time by which it should have, one launch is let in beyond the bound.
//!
//! # Without a daemon
//! With policy *open* the process keeps its last part of the share by its own clock ([`LocalShare`]), and allocates within its
//! last part of the memory: parts of the processes of a run add up to the limits of the run. With *closed* launches wait,
//! and fail after [`CLOSED_WAIT`], however often a daemon is reached meanwhile that does not greet. A daemon that says nothing
//! for [`SILENCE`] while a thread waits is asked by a second connection whether it is there: if it does not greet, it is as good
//! as gone (one that is stopped keeps its sockets). A device that the daemon refuses goes on like that alone, and is not attached
//! again. The connection is tried again with a jittered delay; the hook then says Hello and Attach again and re-states the memory
//! it holds.

mod explain;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use gshare_core::gate::{LeaseLedger, LocalShare, Settlement};
use gshare_core::scale::ServiceClass;
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, Duration, LeaseId, Quota, ResourceSpec, SmShare, Timestamp};
use gshare_meter::cost::{Row, Suspicion, surely};
use gshare_meter::cycle::Cycles;
use gshare_meter::timing::{Behind, Coverage, Overlap, Turns, taken};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::clock;
use crate::context::Progress;
use crate::control::{CONTROL, State};
use crate::gate::{Device, How, Pending, SHORT_NS, ThreadRecord};
use crate::lifecycle::{self, Answer, Request, Runtime};
use crate::transport::Connection;

/// In-flight bound before the daemon has named one.
const IN_FLIGHT: Duration = Duration::from_millis(4);
/// What may still be queued when a lease is given back: what the hand-over takes where the CPUs are busy too. With less
/// the device runs dry between two holders.
const REMAINDER: u64 = 500_000;
/// No launch is taken for shorter than this because the call that made it took time, in ns.
const LEAST: u64 = 1_000;
/// A pause of the device's that is longer than this was idle time, in ns.
const IDLE_GAP: u64 = 20_000;
/// How long a lease is kept while nothing is launched, in ns.
const IDLE: u64 = 3_000_000;
/// How long one is kept whose last work is known to be over, however long it is since that was launched, in ns.
const DONE: u64 = 1_000_000;
/// How much time segments may take beyond what they are charged before a launch is measured alone, in ns; and how much after many
/// such measurements that only showed what was known.
const UNPROVEN: u64 = 1_000_000;
const MOST_UNPROVEN: u64 = 16_000_000;
/// How much longer than predicted a closed lease waits for its queue to drain before it is returned all the same, in ns.
const DRAIN: u64 = 3_000_000;
/// What may be queued where the cost of a kernel is not known yet, in ns.
const UNKNOWN: u64 = 1_000_000_000;
/// How long work in flight may be overdue before one more launch is let in, and then the next, in ns. A window: who uses that to
/// queue more than he should gets a launch of it.
const OVERDUE: u64 = 100_000_000;
/// How often a lease is looked at that is used, in ns: each look takes a CPU from the program where all are busy. The shorter
/// one where threads wait, and where launching cycles are told apart.
const LOOK: u64 = 1_000_000;
const CYCLE_LOOK: u64 = 300_000;
/// How often usage is reported, in ns.
const REPORT: u64 = 10_000_000;
/// How long ago is lately, in ns.
const RECENT: u64 = 50_000_000;
/// How long a run may stand still before its launches are taken for done, in ns.
const STALE: u64 = 3_000_000;
/// How long launches wait without a daemon under the closed policy before they fail, in ns.
const CLOSED_WAIT: u64 = 5_000_000_000;
/// Window of the local clock before the daemon has named one.
const LOCAL_WINDOW: Duration = Duration::from_millis(100);
/// First and longest delay between two attempts to connect, in ns.
const RECONNECT: (u64, u64) = (10_000_000, 250_000_000);
/// How long the daemon may take to say Welcome, in ns.
const WELCOME: u64 = 1_000_000_000;

/// How long a daemon may say nothing while a thread waits for it before it is asked whether it is there, in ns.
const SILENCE: u64 = 3_000_000_000;
/// How often its answer to that is looked for, in ns.
const PROBE_LOOK: u64 = 20_000_000;

/// The namespace of processes that a machine starts with.
const FIRST_SPACE: u64 = 0xEFFF_FFFC;

/// Runs until the process ends or the hook stands aside.
pub(crate) fn run(runtime: &'static Runtime) {
    relax();
    let mut helper = Helper {
        runtime,
        link: Link::Down { retry_at: 0, outage: Outage { since: clock::now_ns(), delay: RECONNECT.0 } },
        devices: Vec::new(),
        jitter: clock::now_ns() | 1,
        told: false,
        heard: 0,
        probe: None,
        syncing: Lately::default(),
        launching: Lately::default(),
        class: None,
    };
    helper.connect(clock::now_ns());
    loop {
        let now = clock::now_ns();
        runtime.beat.store(now, Ordering::Relaxed);
        helper.serve(runtime.take_requests());
        helper.listen();
        helper.connect(now);
        let sleep = helper.turn(now);
        // The state is Armed while the first device is being attached.
        if CONTROL.state() == State::Off as u32 {
            return;
        }
        if !helper.sleep(sleep) {
            return lifecycle::stand_aside(lifecycle::CLOSED);
        }
    }
}

/// Looks up what this thread will call of the driver. Later on the loader's lock may be held by a thread that waits for this
/// one: by a library's constructor that launches.
pub(crate) fn look_up() {
    use crate::driver::pointer;
    use gshare_cuda_abi::index as of;
    let called = [
        of::cuThreadExchangeStreamCaptureMode,
        of::cuCtxSetCurrent,
        of::cuEventQuery,
        of::cuEventElapsedTime,
    ];
    for index in called {
        let _ = pointer(index);
    }
}

/// Lets this thread use events while other threads capture, and wake on time.
fn relax() {
    #![allow(unsafe_code)] // one call to the driver, one to the kernel
    let mut mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
    if let Some(exchange) = crate::driver::real!(cuThreadExchangeStreamCaptureMode) {
        // SAFETY: a valid in-out pointer; the mode is this thread's own.
        let _ = unsafe { exchange(&raw mut mode) };
    }
    // SAFETY: sets the timer slack and the name of this thread.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000);
        libc::prctl(libc::PR_SET_NAME, c"gshare".as_ptr());
    }
}

#[derive(Debug)]
enum Link {
    Up(Connection),
    /// Hello was said; Welcome must come by then.
    Greeting(Connection, u64, Outage),
    Down {
        retry_at: u64,
        outage: Outage,
    },
}

/// A time without a daemon that serves this process.
#[derive(Clone, Copy, Debug)]
struct Outage {
    since: u64,
    /// How long to wait after the next attempt that fails.
    delay: u64,
}

/// How many of some counters have moved lately.
#[derive(Debug, Default)]
struct Lately {
    counts: Vec<u64>,
    since: u64,
    before: usize,
}

impl Lately {
    /// Takes the counters as they are now; gives how many have moved in the last [`RECENT`] or the one before.
    fn look(&mut self, now: u64, counts: &[u64]) -> usize {
        let moved =
            counts.iter().enumerate().filter(|&(at, count)| self.counts.get(at) != Some(count)).count();
        let most = moved.max(self.before);
        if now - self.since > RECENT {
            (self.counts, self.since, self.before) = (counts.to_owned(), now, moved);
        }
        most
    }
}

#[derive(Debug)]
struct Helper {
    runtime: &'static Runtime,
    link: Link,
    devices: Vec<Account>,
    jitter: u64,
    told: bool,
    /// When the daemon was last heard, and a second connection that asks whether it is there, with the time by which it must say.
    heard: u64,
    probe: Option<(Connection, u64)>,
    /// How many threads wait for the device, and how many launch.
    syncing: Lately,
    launching: Lately,
    /// What the daemon's configuration says of this process.
    class: Option<ServiceClass>,
}

/// Where a device's credit comes from.
#[derive(Debug)]
enum Source {
    /// Attach was said, or will be.
    None,
    Daemon(ClientId),
    /// Its own clock; the number of the next lease.
    Local(LocalShare, u64),
}

/// A reservation of so many bytes, some of which were missing when the daemon was asked.
#[derive(Debug)]
struct Shortage {
    bytes: u64,
    missing: u64,
    answer: Answer,
}

/// One device's account.
#[derive(Debug)]
struct Account {
    device: &'static Device,
    uuid: [u8; 16],
    attached: Option<Answer>,
    source: Source,
    spec: ResourceSpec,
    window: Duration,
    bound: Duration,
    ledger: LeaseLedger,
    coverage: Coverage,
    /// Until when the device is known to have worked for this process.
    worked_until: u64,
    /// What its turns waited for the end of others' lately.
    behind: Behind,
    turns: Turns,
    overlap: Overlap,
    running: VecDeque<Pending>,
    /// Rows whose last samples were above their cost and may have been too long.
    suspicions: HashMap<Row, Suspicion>,
    /// Rows of which a launch was measured because of a doubt.
    proven: HashSet<Row>,
    expires: u64,
    /// A token was requested and neither granted nor given up.
    asked: bool,
    /// A lease that is closed and waits for its queue to drain; until when.
    owed: Option<(Settlement, u64)>,
    /// The last lease of this daemon's that was closed.
    closed: Option<LeaseId>,
    /// Reservations that wait for the daemon.
    memory: VecDeque<Shortage>,
    /// Looks at the instance's other processes that wait for the daemon, and what it has said so far.
    views: VecDeque<Answer>,
    members: Vec<(u32, u64)>,
    /// What was asked between Attach and its answer.
    later: Vec<Request>,
    /// The memory that the daemon knows to be in use, while there is no limit.
    stated: u64,
    /// The daemon has none of this device: it is not attached any more.
    refused: Option<RefusalCode>,
    /// Launches seen so far, and when they last changed.
    launches: (u64, u64),
    cycles: Cycles,
    reported: (u64, Duration),
    /// Credit that threads hold for launches to come, in ns.
    prepaid: u64,
    /// Per thread and run: what is open, and since when it has been that.
    still: Vec<[(u64, u64); 4]>,
    /// Time that segments took beyond what they were charged, since one of their launches was last measured alone, and how much it may
    /// be before the next one is, in ns.
    unproven: u64,
    may_be_unproven: u64,
    /// Several threads launch: what one launch takes may hold another's.
    crowded: bool,
    /// When something last completed, and when a launch was last let in because nothing did.
    moved: u64,
    let_in: u64,
    /// When a token was last asked for, and until when the daemon gives none.
    asked_at: u64,
    throttled: u64,
}

impl Helper {
    /// `false`: nobody can wake this thread any more.
    fn sleep(&self, nanos: u64) -> bool {
        let wait = Timespec {
            tv_sec: (nanos / 1_000_000_000).cast_signed(),
            tv_nsec: (nanos % 1_000_000_000).cast_signed(),
        };
        let bell = PollFd::new(&self.runtime.bell, PollFlags::IN);
        let _ = match &self.link {
            Link::Up(connection) | Link::Greeting(connection, ..) => {
                poll(&mut [bell, PollFd::new(connection, PollFlags::IN)], Some(&wait))
            }
            Link::Down { .. } => poll(&mut [bell], Some(&wait)),
        };
        let ours = self.runtime.bell.is_ours();
        if ours {
            let _ = rustix::io::read(&self.runtime.bell, &mut [0u8; 8]);
        }
        ours
    }

    /// Does what the program's threads ask.
    fn serve(&mut self, requests: Vec<Request>) {
        for request in requests {
            match request {
                Request::Attach(device, uuid, answer) => {
                    let mut account = Account::new(device, uuid, self.runtime.config.spec);
                    account.attached = Some(answer);
                    if let Link::Up(connection) = &mut self.link {
                        let sent = connection.send(&account.attach());
                        self.devices.push(account);
                        self.lose_on_error(sent);
                    } else {
                        self.devices.push(account);
                    }
                }
                Request::Memory(device, bytes, answer) => self.reserve(device, bytes, answer),
                Request::View(device, answer) => self.view(device, answer),
                Request::Release(device, bytes) => {
                    let Some(account) = self.devices.iter_mut().find(|a| core::ptr::eq(a.device, device))
                    else {
                        continue;
                    };
                    if account.is_unanswered() && matches!(self.link, Link::Up(_)) {
                        account.later.push(Request::Release(device, bytes));
                    } else if let Source::Daemon(client) = account.source {
                        self.say(&ToDaemon::MemoryRelease { client, bytes: Bytes(bytes) });
                    }
                }
            }
        }
    }

    /// Takes memory for a thread that waits for it, asking the daemon for what is missing.
    fn reserve(&mut self, device: &'static Device, bytes: u64, answer: Answer) {
        let Some(account) = self.devices.iter_mut().find(|a| core::ptr::eq(a.device, device)) else { return };
        if account.is_unanswered() && matches!(self.link, Link::Up(_)) {
            return account.later.push(Request::Memory(device, bytes, answer));
        }
        let Err(missing) = device.memory.reserve(bytes) else {
            return reserved(self.runtime, device, bytes, &answer);
        };
        match (&mut self.link, &account.source) {
            (Link::Up(connection), &Source::Daemon(client)) if account.spec.memory().is_some() => {
                account.memory.push_back(Shortage { bytes, missing, answer });
                let wish = Bytes(missing.saturating_add(device.memory.chunk()));
                let sent = connection.send(&ToDaemon::MemoryReserve { client, bytes: Bytes(missing), wish });
                self.lose_on_error(sent);
            }
            _ => account.reserve_locally(self.runtime, bytes, &answer),
        }
    }

    /// Asks the daemon what the instance's other processes use.
    fn view(&mut self, device: &'static Device, answer: Answer) {
        let account = self.devices.iter_mut().find(|a| core::ptr::eq(a.device, device));
        if let Some(account) = account
            && let Source::Daemon(client) = account.source
            && let Link::Up(connection) = &mut self.link
        {
            account.views.push_back(answer);
            let sent = connection.send(&ToDaemon::MemoryQuery { client });
            self.lose_on_error(sent);
        } else {
            answer.give(false);
        }
    }

    fn lose_on_error(&mut self, sent: std::io::Result<()>) {
        if let Err(_gone) = sent {
            // It may have said why.
            self.listen();
            self.lose(clock::now_ns());
        }
    }

    fn say(&mut self, message: &ToDaemon) {
        self.note_said(message, clock::now_ns());
        if let Link::Up(connection) = &mut self.link {
            let sent = connection.send(message);
            self.lose_on_error(sent);
        }
    }

    /// The connection is gone: what was asked will not be answered.
    fn lose(&mut self, now: u64) {
        let welcomed = matches!(self.link, Link::Up(_));
        let mut outage = match self.link {
            Link::Up(_) => Outage { since: now, delay: RECONNECT.0 },
            Link::Greeting(.., outage) => outage,
            Link::Down { .. } => return,
        };
        if let Link::Up(connection) = &mut self.link {
            for message in connection.end() {
                // A part that shrank before the end has been given to another process.
                if let ToClient::MemoryPart { client, bytes } = message {
                    self.set_part(client, bytes);
                }
            }
        }
        (self.class, self.probe) = (None, None);
        let mut later = Vec::new();
        for account in &mut self.devices {
            if account.refused.take_if(|code| !is_final(*code)).is_some() {
                outage.delay = RECONNECT.1;
            }
            later.append(&mut account.later);
            for Shortage { bytes, answer, .. } in core::mem::take(&mut account.memory) {
                account.reserve_locally(self.runtime, bytes, &answer);
            }
            account.members.clear();
            for answer in account.views.drain(..) {
                answer.give(false);
            }
            if matches!(account.source, Source::Daemon(_)) {
                account.source = Source::None;
                account.asked = false;
                (account.owed, account.closed) = (None, None);
                account.ledger.close(&account.device.gate);
            }
        }
        self.back_off(now, outage);
        self.note_lost(welcomed, now);
        self.serve(later);
    }

    /// The next attempt comes a while later, and the one after that later still.
    fn back_off(&mut self, now: u64, Outage { since, delay }: Outage) {
        self.jitter = self.jitter.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let retry_at = now + delay / 2 + (self.jitter >> 33) % delay;
        self.link = Link::Down { retry_at, outage: Outage { since, delay: (delay * 2).min(RECONNECT.1) } };
    }

    /// Connects when it is time, and gives up on a daemon that does not greet.
    fn connect(&mut self, now: u64) {
        match &self.link {
            Link::Up(_) => {}
            Link::Greeting(_, by, _) if now < *by => {}
            Link::Greeting(..) => self.lose(now),
            &Link::Down { retry_at, .. } if now < retry_at => {}
            &Link::Down { outage, .. } => match Connection::open(&self.runtime.config.socket) {
                Ok(mut connection) => {
                    // A daemon that refuses who comes has said so and closed, perhaps before these: that is heard next.
                    let _ = connection.send(&hello(self.runtime));
                    if let Some(class) = self.runtime.config.class {
                        let _ = connection.send(&ToDaemon::Class { class });
                    }
                    self.link = Link::Greeting(connection, now + WELCOME, outage);
                    self.note_connected();
                }
                Err(error) => {
                    self.back_off(now, outage);
                    self.note_not_connected(&error, now);
                }
            },
        }
    }

    /// Does what the daemon says.
    fn listen(&mut self) {
        loop {
            let (Link::Up(connection) | Link::Greeting(connection, ..)) = &mut self.link else { return };
            match connection.receive() {
                Ok(Some(message)) => {
                    self.heard = clock::now_ns();
                    self.hear(message);
                }
                Ok(None) => return,
                Err(_) => return self.lose(clock::now_ns()),
            }
        }
    }

    fn hear(&mut self, message: ToClient) {
        self.note_heard(&message);
        let now = clock::now_ns();
        match message {
            ToClient::Welcome { .. } => {
                // What was given back before Attach says what is in use must not be given back after it again.
                self.serve(self.runtime.take_requests());
                let nobody = Link::Down { retry_at: 0, outage: Outage { since: now, delay: RECONNECT.0 } };
                let (Link::Greeting(mut connection, ..) | Link::Up(mut connection)) =
                    core::mem::replace(&mut self.link, nobody)
                else {
                    return;
                };
                let mut wanted = self.devices.iter_mut().filter(|account| account.refused.is_none());
                let sent = wanted.try_for_each(|account| connection.send(&account.attach()));
                self.link = Link::Up(connection);
                self.lose_on_error(sent);
            }
            ToClient::Refused { code, text } => {
                let up = matches!(self.link, Link::Up(_));
                // Attachments are answered in order.
                let device = self.devices.iter_mut().find(|account| account.is_unanswered());
                if let Some(account) = device.filter(|_| up && is_of_a_device(code)) {
                    account.refused = Some(code);
                    account.spec = self.runtime.config.spec;
                    if is_final(code) || !core::mem::replace(&mut self.told, true) {
                        let ordinal = account.device.ordinal;
                        lifecycle::tell(&format!("the daemon refused device {ordinal}: {text} ({code:?})"));
                    }
                    let later = core::mem::take(&mut account.later);
                    return self.serve(later);
                }
                if !core::mem::replace(&mut self.told, true) {
                    lifecycle::tell(&format!("the daemon refused this process: {text} ({code:?})"));
                }
                self.lose(now);
                if let Link::Down { retry_at, outage } = &mut self.link {
                    (*retry_at, outage.delay) = (now + RECONNECT.1, RECONNECT.1);
                }
            }
            ToClient::Class { class } => self.class = Some(class),
            ToClient::Attached { ordinal, client, spec, window, in_flight, .. } => {
                let ordinal = i32::try_from(ordinal).unwrap_or(-1);
                if let Some(account) = self.devices.iter_mut().find(|a| a.device.ordinal == ordinal) {
                    account.source = Source::Daemon(client);
                    account.window = window;
                    account.bound = if in_flight.is_zero() { IN_FLIGHT } else { in_flight };
                    let surplus = account.adopt(spec);
                    account.device.memory.served();
                    account.opened();
                    let later = core::mem::take(&mut account.later);
                    self.serve(later);
                    self.give_back(client, surplus);
                }
            }
            ToClient::Grant { client, lease, budget, expires } => {
                let Some(account) = self.account_of(client) else { return };
                // An extension that has crossed the return of its lease is nobody's: the daemon has taken that for returned.
                if account.closed.is_some_and(|closed| lease <= closed) {
                    return;
                }
                account.asked = false;
                account.expires = expires.as_nanos();
                let owed = account.owed.take().map(|(settlement, _)| account.ledger.revise(settlement));
                // The end of the last lease has left a bound that would let next to nothing in.
                account.bound_in_flight(now);
                let replaced = account.ledger.grant(&account.device.gate, lease, budget);
                account.closed = replaced.map(|settlement| settlement.lease).or(account.closed);
                account.device.wake();
                for settlement in owed.into_iter().chain(replaced) {
                    self.say_return(client, settlement, false);
                }
            }
            ToClient::Revoke { client, lease, .. } => {
                let Some(account) = self.account_of(client) else { return };
                account.asked = false;
                let owed = account.owed.take_if(|(settlement, _)| settlement.lease == lease);
                let open = account.ledger.lease() == Some(lease);
                let closed = if open { account.ledger.close(&account.device.gate) } else { None };
                account.closed = account.closed.max(Some(lease));
                // A revoked lease was charged its budget: what was used may be more.
                let owed = owed.map(|(settlement, _)| account.ledger.revise(settlement));
                for settlement in owed.into_iter().chain(closed) {
                    self.say_return(client, settlement, false);
                }
            }
            ToClient::ShareChanged { client, spec } => {
                if let Some(account) = self.account_of(client) {
                    let surplus = account.adopt(spec);
                    self.give_back(client, surplus);
                }
            }
            ToClient::MemoryGrant { client, bytes } => {
                if let Some(account) = self.account_of(client) {
                    let device = account.device;
                    device.memory.grant(bytes);
                    if let Some(Shortage { bytes, answer, .. }) = account.memory.pop_front() {
                        self.reserve(device, bytes, answer);
                    }
                }
            }
            ToClient::MemoryDeny { client, .. } => {
                let runtime = self.runtime;
                if let Some(account) = self.account_of(client)
                    && let Some(Shortage { bytes, missing, answer }) = account.memory.pop_front()
                {
                    let device = account.device;
                    // Another thread may have freed some meanwhile.
                    match device.memory.reserve(bytes) {
                        Ok(()) => reserved(runtime, device, bytes, &answer),
                        Err(less) if less < missing => self.reserve(device, bytes, answer),
                        Err(_) => {
                            answer.give(false);
                        }
                    }
                }
            }
            ToClient::MemoryPart { client, bytes } => self.set_part(client, bytes),
            ToClient::MemoryAsk { client, round, recall } => {
                if let Some(account) = self.account_of(client) {
                    let memory = &account.device.memory;
                    let surplus = if recall == 0 { Bytes::ZERO } else { memory.recall() };
                    let used = Bytes(memory.used());
                    if surplus > Bytes::ZERO {
                        self.say(&ToDaemon::MemoryRelease { client, bytes: surplus });
                    }
                    self.say(&ToDaemon::MemoryUsed { client, round, used });
                }
            }
            ToClient::MemoryMember { client, pid, used } => {
                if let Some(account) = self.account_of(client) {
                    account.members.push((pid, used.0));
                }
            }
            ToClient::MemoryView { client } => {
                if let Some(account) = self.account_of(client) {
                    account.device.memory.set_siblings(core::mem::take(&mut account.members));
                    if let Some(answer) = account.views.pop_front() {
                        answer.give(true);
                    }
                }
            }
            // A throttled request stays in the daemon's line: it is granted without asking again.
            _ => {}
        }
    }

    /// What [`Account::adopt`] gave, back to the daemon.
    fn give_back(&mut self, client: ClientId, surplus: Option<Bytes>) {
        match surplus {
            Some(Bytes::ZERO) => {}
            Some(bytes) => self.say(&ToDaemon::MemoryRelease { client, bytes }),
            None => {
                self.lose(clock::now_ns());
                if let Link::Down { retry_at, .. } = &mut self.link {
                    *retry_at = 0;
                }
            }
        }
    }

    /// Finds out whether a daemon is there that says nothing while a thread waits for it.
    fn probe(&mut self, now: u64) {
        if let Some((probe, by)) = &mut self.probe {
            match probe.receive() {
                // Whatever it says.
                Ok(Some(_)) => (self.heard, self.probe) = (now, None),
                Ok(None) if now < *by => {}
                Ok(None) | Err(_) => self.lose(now),
            }
            return;
        }
        let waits = |account: &Account| {
            let waiting = account.device.waiting.load(Ordering::Acquire) > 0;
            account.is_unanswered() || !account.memory.is_empty() || account.asked && waiting
        };
        if !matches!(self.link, Link::Up(_)) || !self.devices.iter().any(waits) {
            // The time counts from when somebody begins to wait.
            self.heard = now;
        } else if now.saturating_sub(self.heard) > SILENCE {
            let opened = Connection::open(&self.runtime.config.socket).and_then(|mut probe| {
                probe.send(&hello(self.runtime))?;
                Ok(probe)
            });
            match opened {
                Ok(probe) => self.probe = Some((probe, now + WELCOME)),
                Err(_) => self.lose(now),
            }
        }
    }

    fn set_part(&mut self, client: ClientId, part: Bytes) {
        if let Some(account) = self.account_of(client) {
            account.device.memory.set_part(part);
        }
    }

    fn account_of(&mut self, client: ClientId) -> Option<&mut Account> {
        self.devices.iter_mut().find(|a| matches!(a.source, Source::Daemon(id) if id == client))
    }

    fn say_return(&mut self, client: ClientId, settlement: Settlement, again: bool) {
        let Settlement { lease, used } = settlement;
        self.say(&ToDaemon::TokenReturn { client, lease, used, again: again.into() });
    }

    /// Accounts, decides, speaks; gives how long there is nothing to do, in ns.
    fn turn(&mut self, now: u64) -> u64 {
        let mut sleep = match &self.link {
            Link::Up(_) if self.probe.is_some() => PROBE_LOOK,
            Link::Up(_) => 1_000_000_000,
            Link::Greeting(_, by, _) => by.saturating_sub(now),
            Link::Down { retry_at, .. } => retry_at.saturating_sub(now),
        };
        self.probe(now);
        self.settle_without_daemon(now);
        let threads = self.runtime.threads();
        let launched: Vec<u64> =
            threads.iter().map(|thread| thread.launches.load(Ordering::Relaxed)).collect();
        let all_launches = launched.iter().sum();
        let crowded = self.launching.look(now, &launched) > 1;
        self.runtime.contexts.end_overdue_holds(now);
        let several = self.runtime.sole_device().is_none();
        let class = self.class.or(self.runtime.config.class);
        let slo_sensitive = class.is_some_and(ServiceClass::is_slo_sensitive);
        let synced: Vec<u64> = threads.iter().map(|thread| thread.syncs.load(Ordering::Relaxed)).collect();
        let syncs = synced.iter().sum();
        let waiting_threads = self.syncing.look(now, &synced);
        for index in 0..self.devices.len() {
            let account = &mut self.devices[index];
            // What is launched on one device says nothing about another.
            let launches =
                if several { account.device.launches.load(Ordering::Relaxed) } else { all_launches };
            if launches != account.launches.0 {
                account.launches = (launches, now);
            }
            let all = account.overlap.look(now, waiting_threads);
            account.device.measures_all.store(all, Ordering::Relaxed);
            account.crowded = crowded;
            account.explain(&self.link, self.runtime.config.on_loss, now);
            account.collect(now);
            account.presume(&threads, now);
            account.unstick(now);
            let mut said = account.decide(now);
            if slo_sensitive && let Source::Daemon(client) = account.source {
                let waiting = account.device.waiting.load(Ordering::Acquire) > 0;
                let cycle = account.cycles.look(now, launches, syncs, waiting);
                said.extend(cycle.map(|cycle| cycle.report(client)));
            }
            let longest = if slo_sensitive { CYCLE_LOOK } else { LOOK };
            sleep = sleep.min(account.next_look(now, longest));
            if account.device.waiting.load(Ordering::Acquire) > 0 {
                account.device.wake();
            }
            for message in said {
                self.say(&message);
            }
        }
        sleep.max(20_000)
    }

    /// What a device lives on while there is no daemon.
    fn settle_without_daemon(&mut self, now: u64) {
        let since = if let Link::Down { outage, .. } = &self.link { Some(outage.since) } else { None };
        for account in &mut self.devices {
            // No daemon is going to come for a device that was refused.
            let Some(since) = account.refused.map(|_| 0).or(since) else { continue };
            if !matches!(account.source, Source::None) {
                continue;
            }
            // A process that never had a daemon has only the environment's word: no time limit means none.
            match self.runtime.config.on_loss {
                OnDaemonLoss::Open => {
                    let limit = account.spec.quota().limit();
                    let share = LocalShare::new(Timestamp::from_nanos(now), limit, account.window);
                    account.source = Source::Local(share, 1);
                    account.adopt(account.spec);
                    account.device.free_running.store(limit == Quota::WHOLE, Ordering::Release);
                    CONTROL.update();
                }
                OnDaemonLoss::Closed if now.saturating_sub(since) > CLOSED_WAIT => {
                    account.device.shut.store(true, Ordering::Release);
                    account.device.wake();
                }
                OnDaemonLoss::Closed => {
                    account.adopt(account.spec);
                    account.device.free_running.store(false, Ordering::Release);
                    CONTROL.update();
                }
            }
            if let Some(answer) = account.attached.take() {
                answer.give(false);
            }
        }
    }
}

/// Hands memory that was reserved to the thread that waits for it; gives the memory back if the thread does not wait any more.
fn reserved(runtime: &Runtime, device: &'static Device, bytes: u64, answer: &Answer) {
    if !answer.give(true) {
        runtime.release(device.ordinal, bytes);
    }
}

/// Whether a refusal answers the attachment of a device.
fn is_of_a_device(code: RefusalCode) -> bool {
    is_final(code) || code == RefusalCode::Full
}

/// Whether asking again is in vain.
fn is_final(code: RefusalCode) -> bool {
    matches!(code, RefusalCode::UnknownDevice | RefusalCode::BadSpec)
}

/// Who this process is. Its number is one of its own namespace: the first of every container is 1.
fn hello(runtime: &Runtime) -> ToDaemon {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Field 2 is the program's name in parentheses and may hold anything; field 22 is the start time.
    let (head, tail) = stat.rsplit_once(") ").unwrap_or(("", ""));
    let program = head.split_once(" (").map_or_else(String::new, |(_, name)| name.to_owned());
    let pid_start = tail.split(' ').nth(19).and_then(|field| field.parse().ok()).unwrap_or(0);
    let pid = std::process::id();
    // As in "pid:[4026531836]".
    let space = std::fs::read_link("/proc/self/ns/pid").ok();
    let space =
        space.and_then(|space| space.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok());
    let space = space.unwrap_or(FIRST_SPACE);
    let place = if space == FIRST_SPACE { String::new() } else { format!("@{space}") };
    let config = &runtime.config;
    ToDaemon::Hello {
        pid_start,
        pid,
        // Start times differ in their low bits, namespaces and process numbers are below 2^32 and 2^22.
        run: config.run.unwrap_or(pid_start ^ space << 32 ^ u64::from(pid).rotate_right(22)),
        name: config.name.clone().unwrap_or_else(|| format!("{program}-{pid}{place}")),
        program,
        spec: config.spec,
        on_loss: config.on_loss,
    }
}

impl Account {
    fn new(device: &'static Device, uuid: [u8; 16], spec: ResourceSpec) -> Self {
        Self {
            device,
            uuid,
            attached: None,
            source: Source::None,
            spec,
            window: LOCAL_WINDOW,
            bound: IN_FLIGHT,
            ledger: LeaseLedger::new(IN_FLIGHT),
            coverage: Coverage::new(),
            worked_until: 0,
            behind: Behind::default(),
            turns: Turns::default(),
            overlap: Overlap::default(),
            running: VecDeque::new(),
            suspicions: HashMap::new(),
            proven: HashSet::new(),
            expires: 0,
            asked: false,
            owed: None,
            closed: None,
            memory: VecDeque::new(),
            views: VecDeque::new(),
            members: Vec::new(),
            later: Vec::new(),
            stated: 0,
            refused: None,
            launches: (0, 0),
            cycles: Cycles::default(),
            reported: (0, Duration::ZERO),
            prepaid: 0,
            still: Vec::new(),
            unproven: 0,
            may_be_unproven: UNPROVEN,
            crowded: false,
            moved: 0,
            let_in: 0,
            asked_at: 0,
            throttled: 0,
        }
    }

    /// Whether the daemon has not said yet what becomes of this device.
    fn is_unanswered(&self) -> bool {
        !matches!(self.source, Source::Daemon(_)) && self.refused.is_none()
    }

    fn attach(&mut self) -> ToDaemon {
        self.stated = self.device.memory.restate();
        ToDaemon::Attach {
            ordinal: self.device.ordinal.unsigned_abs(),
            device: self.uuid,
            device_memory: Bytes(self.device.memory.total()),
            allocated: Bytes(self.stated),
            part: self.device.memory.part(),
        }
    }

    /// A spec from the daemon, or the last one known. Gives what of the memory granted before is to be given back; `None`
    /// if what is in use must be stated again, for the daemon was not told of it while there was no limit.
    fn adopt(&mut self, spec: ResourceSpec) -> Option<Bytes> {
        let quota = spec.quota();
        let whole = quota.request() == Quota::WHOLE && spec.sm() == SmShare::WHOLE;
        self.device.free_running.store(whole, Ordering::Release);
        CONTROL.update();
        self.spec = spec;
        let memory = &self.device.memory;
        let before = memory.limit();
        if before == spec.memory().map(|bytes| bytes.0) && self.attached.is_none() {
            return Some(Bytes::ZERO);
        }
        let surplus = memory.limit_to(spec.memory());
        match (before, spec.memory()) {
            (None, Some(_)) if memory.used() != self.stated => None,
            (None, _) => Some(Bytes::ZERO),
            (Some(_), Some(_)) => Some(surplus),
            (Some(_), None) => {
                self.stated = memory.used();
                Some(surplus)
            }
        }
    }

    /// The daemon knows the device: launches may go on.
    fn opened(&mut self) {
        // A lease of the local clock ends here.
        self.ledger.close(&self.device.gate);
        self.asked = false;
        self.device.shut.store(false, Ordering::Release);
        self.device.wake();
        if let Some(answer) = self.attached.take() {
            answer.give(true);
        }
    }

    /// Takes memory for a thread within the process's own part, while no daemon can be asked.
    fn reserve_locally(&self, runtime: &Runtime, bytes: u64, answer: &Answer) {
        let memory = &self.device.memory;
        if let Err(missing) = memory.reserve(bytes) {
            if missing <= memory.within_part() {
                memory.grant(Bytes(missing));
            }
            if memory.reserve(bytes).is_err() {
                answer.give(false);
                return;
            }
        }
        reserved(runtime, self.device, bytes, answer);
    }

    /// Takes in what has completed.
    fn collect(&mut self, now: u64) {
        let device = self.device;
        let fresh = core::mem::take(&mut *device.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.running.extend(fresh);
        let settled = device.settled.swap(0, Ordering::AcqRel);
        let refused = Duration::from_nanos(device.refused.swap(0, Ordering::AcqRel));
        if settled > 0 {
            let charged = Duration::from_nanos(self.overlap.of(settled));
            self.ledger.completed(&device.gate, Duration::from_nanos(settled), charged);
        }
        if !refused.is_zero() {
            self.ledger.completed(&device.gate, refused, Duration::ZERO);
        }
        let mut learned = false;
        let before = self.running.len();
        let oldest = self.running.iter().map(|pending| pending.opened).min().unwrap_or(u64::MAX);
        let mut waiting = VecDeque::with_capacity(before);
        for pending in core::mem::take(&mut self.running) {
            let charged = pending.predicted + pending.carried;
            let measured = match pending.context.progress(pending.pair) {
                Progress::Running => {
                    waiting.push_back(pending);
                    continue;
                }
                Progress::Lost => {
                    if let Some(row) = pending.row {
                        device.costs.not_measured(row);
                    }
                    charged
                }
                Progress::Ran(start, end) => {
                    learned |= pending.row.is_some();
                    let whole = self.measure(&pending, start, end, oldest);
                    // What was taken for done is charged.
                    whole.saturating_sub(pending.presumed) + pending.carried
                }
            };
            self.ledger.completed(
                &device.gate,
                Duration::from_nanos(charged),
                Duration::from_nanos(measured),
            );
        }
        if waiting.len() < before {
            self.moved = now;
        }
        self.running = waiting;
        if learned {
            device.wake();
        }
    }

    /// Lets one launch in when a thread waits for credit and what is in flight is overdue: it may wait for that launch.
    fn unstick(&mut self, now: u64) {
        if self.running.is_empty() || self.device.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        let in_flight = if self.of_unknown_cost() { UNKNOWN } else { self.in_flight() };
        let due = self.began_at(now).max(self.moved).saturating_add(in_flight);
        if now > due.max(self.let_in).saturating_add(OVERDUE) && self.ledger.let_one_in(&self.device.gate) {
            self.let_in = now;
            self.device.wake();
        }
    }

    /// What a segment that ran from `start` to `end` costs in all; learns from it. Nothing that runs was launched before `oldest`.
    fn measure(&mut self, pending: &Pending, start: u64, end: u64, oldest: u64) -> u64 {
        let length = end.saturating_sub(start);
        // The device was idle for us before: the interval may hold the end of another process's turn. What is over after its own
        // turn was handed over may hold the beginning of one. Keeping a stream waiting made the device idle by itself.
        let held = pending.how == How::Held;
        let after_idle = self.is_first(if held { pending.opened } else { start });
        let shared = after_idle || self.turns.outlasted(pending.opened, end) || (held && self.crowded);
        self.worked_until = self.worked_until.max(end);
        let start = start + pending.gap.min(length.saturating_sub(LEAST));
        let length = end.saturating_sub(start);
        let known = pending.row.and_then(|row| self.device.costs.known(row));
        if let Some(row) = pending.row {
            let room = self.coverage.room(start, end);
            self.learn(pending, row, length, room, shared);
            self.doubt_unproven(pending, row);
        }
        if let Some(known) = known.filter(|_| pending.dense && after_idle) {
            let launches = u64::from(pending.launches);
            self.behind.seen(length.saturating_sub(known * launches).min(REMAINDER));
        }
        let predicted = match pending.row.and_then(|row| self.device.costs.known(row)) {
            Some(cost) => cost * u64::from(pending.launches.max(1)),
            None => pending.predicted + pending.presumed,
        };
        let dense = pending.dense && (!shared || (known.is_none() && pending.row.is_some()));
        let growth = self.coverage.add(start, end, taken(length, predicted, dense), oldest);
        self.overlap.seen(pending.opened, pending.predicted + pending.presumed, growth);
        growth
    }

    /// Learns what a launch of a row costs from a segment of this length, of which `room` was nobody else's; all in ns. Every segment
    /// is an upper bound; only a dense one tells that a cost has risen, and no more than that if others may have `shared` it.
    fn learn(&mut self, pending: &Pending, row: Row, length: u64, room: u64, shared: bool) {
        let costs = &self.device.costs;
        let launches = u64::from(pending.launches.max(1));
        let sample = length / launches;
        let Some(known) = costs.known(row) else {
            self.suspicions.insert(row, Suspicion::of_first(pending.dense && shared));
            self.proven.remove(&row);
            return costs.learn(row, sample);
        };
        let asked = matches!(pending.how, How::Alone | How::Held) && costs.is_doubted(row);
        if asked || pending.how == How::Held {
            self.proven.insert(row);
        }
        if asked {
            costs.not_measured(row);
            let confirmed = sample <= known + known / 4 + LEAST;
            self.may_be_unproven =
                if confirmed { (2 * self.may_be_unproven).min(MOST_UNPROVEN) } else { UNPROVEN };
        }
        // Several streams that are never empty: launches of others lie between these.
        let mingled =
            self.crowded && pending.how == How::Segment && pending.dense && self.proven.contains(&row);
        if asked && !shared || pending.how == How::Held && sample <= known {
            self.suspicions.remove(&row);
            costs.set(row, sample);
            costs.learn(row, sample);
        } else if sample > known && pending.dense && shared && !mingled {
            if let Some(proven) = self.suspicions.entry(row).or_default().add(surely(sample, REMAINDER)) {
                costs.set(row, proven.max(known));
            }
        } else if sample > known && (!pending.dense || mingled) {
            // The stream may have run dry in between, or the kernel has become longer: now and then it is asked.
            self.unproven += room.saturating_sub(known * launches);
            if self.unproven > self.may_be_unproven {
                self.unproven = 0;
                costs.doubt(row);
            }
        } else {
            match self.suspicions.remove(&row) {
                Some(Suspicion { cost_itself: true, .. }) if sample < known => costs.set(row, sample),
                _ => costs.learn(row, sample),
            }
        }
    }

    /// What was learned about a short launch may be the time of its call, unless one was measured to find that out: the next one is.
    fn doubt_unproven(&self, pending: &Pending, row: Row) {
        let costs = &self.device.costs;
        let short = costs.known(row).is_some_and(|cost| cost <= SHORT_NS);
        let of_calls = !pending.dense || pending.launches == 1 || self.crowded;
        if short && of_calls && !self.proven.contains(&row) && !costs.is_doubted(row) {
            costs.doubt(row);
        }
    }

    /// GPU time that is queued now: what is in flight, less what the device must have done since it was last heard of.
    fn queued(&self, now: u64) -> u64 {
        self.queued_of(self.in_flight(), now)
    }

    /// The same, where `in_flight` is.
    fn queued_of(&self, in_flight: u64, now: u64) -> u64 {
        if self.of_unknown_cost() {
            // What it was charged is a guess: only its end will tell.
            return in_flight.max(UNKNOWN);
        }
        if self.running.is_empty() {
            in_flight
        } else {
            in_flight.saturating_sub(now.saturating_sub(self.began_at(now)))
        }
    }

    /// Whether the cost of anything that runs is a guess.
    fn of_unknown_cost(&self) -> bool {
        let unknown =
            |pending: &Pending| pending.row.is_some_and(|row| self.device.costs.known(row).is_none());
        self.running.iter().any(unknown)
    }

    /// Whether work that came at `start` is the first of a turn.
    fn is_first(&self, start: u64) -> bool {
        start > self.worked_until + IDLE_GAP
    }

    /// When the oldest piece of work that is not known to be over began, at the latest.
    fn began_at(&self, now: u64) -> u64 {
        let Some(pending) = self.running.front() else { return now };
        let behind = if self.is_first(pending.opened) { self.behind.most() } else { 0 };
        self.worked_until.max(pending.opened.saturating_add(behind)).min(now)
    }

    /// Launches whose thread has gone elsewhere with its segment open are taken for done after a while.
    fn presume(&mut self, threads: &[&'static ThreadRecord], now: u64) {
        self.still.resize(threads.len(), [(0, now); 4]);
        self.prepaid = 0;
        for (thread, still) in threads.iter().zip(&mut self.still) {
            for (index, (open, seen)) in thread.open_runs(self.device).into_iter().zip(still).enumerate() {
                self.prepaid += open.prepaid;
                let rest = open.predicted.saturating_sub(open.presumed);
                if open.predicted != seen.0 {
                    *seen = (open.predicted, now);
                } else if rest > 0 && now - seen.1 > STALE.max(2 * rest) {
                    thread.presume_done(index, open.predicted);
                    let rest = Duration::from_nanos(rest);
                    self.ledger.completed(&self.device.gate, rest, rest);
                }
            }
        }
    }

    /// GPU time launched and not known to have completed, in ns.
    fn in_flight(&self) -> u64 {
        self.launched_of(self.ledger.in_flight(&self.device.gate))
    }

    /// What of the time in flight, as the ledger has it, is of launches and not prepaid for them, in ns.
    fn launched_of(&self, in_flight: Duration) -> u64 {
        in_flight.as_nanos().saturating_sub(self.prepaid)
    }

    /// Whether the program is going to launch more, as far as can be told: it waits for credit, or for what it launched, or has
    /// just done either.
    fn wants_more(&self, now: u64) -> bool {
        let waits = self.device.waiting.load(Ordering::Acquire) > 0 || self.in_flight() > 0;
        waits || now - self.launches.1 < IDLE || now.saturating_sub(self.worked_until) < DONE
    }

    /// What to say to the daemon now.
    fn decide(&mut self, now: u64) -> Vec<ToDaemon> {
        match self.source {
            Source::None => Vec::new(),
            Source::Daemon(client) => self.decide_with_daemon(client, now),
            Source::Local(..) => {
                self.decide_locally(now);
                Vec::new()
            }
        }
    }

    /// Nothing may be queued that would not be over when the lease expires; gives how long that is, in ns.
    fn bound_in_flight(&mut self, now: u64) -> u64 {
        let left = self.expires.saturating_sub(now);
        let bound = self.bound.min(Duration::from_nanos(left));
        // What is prepaid is in flight for the ledger, but not on the device.
        self.ledger.set_in_flight_bound(bound.saturating_add(Duration::from_nanos(self.prepaid)));
        left
    }

    fn decide_with_daemon(&mut self, client: ClientId, now: u64) -> Vec<ToDaemon> {
        let mut said = Vec::new();
        let gate = &self.device.gate;
        if self.device.free_running.load(Ordering::Acquire) {
            return said;
        }
        let wants = self.wants_more(now);
        if let Some((settlement, by)) = self.owed {
            let queued = self.queued(now);
            let over = self.running.is_empty() || !self.turns.ends_first();
            if (queued <= REMAINDER && over) || now >= by {
                self.turns.hand_over(now);
                self.owed = None;
                let Settlement { lease, used } = self.ledger.revise(settlement);
                self.asked = wants;
                said.push(ToDaemon::TokenReturn { client, lease, used, again: wants.into() });
            }
            return said;
        }
        let Some(lease) = self.ledger.lease() else {
            if !self.asked && self.device.waiting.load(Ordering::Acquire) > 0 {
                self.asked = true;
                said.push(ToDaemon::TokenRequest { client });
            }
            return said;
        };
        let left = self.bound_in_flight(now);
        let unspent = self.ledger.unspent(gate).as_nanos();
        // Threads go on spending meanwhile: what a kernel spends is to be found queued, too.
        let spent =
            self.ledger.in_flight_if_spent(gate).map(|time| self.queued_of(self.launched_of(time), now));
        if left == 0 || !wants || spent.is_some_and(|queued| queued <= REMAINDER) {
            if let Some(settlement) = self.ledger.close(gate) {
                // Until then the device works for this process: whoever is let in earlier waits behind it, and measures
                // that as its own.
                self.owed = Some((settlement, now + self.queued(now) + DRAIN));
                self.closed = Some(settlement.lease);
                said.extend(self.decide_with_daemon(client, now));
            }
            return said;
        }
        let asks =
            !self.asked && wants && (unspent <= self.bound.as_nanos() || left <= self.bound.as_nanos());
        // A kernel that is longer than what was left of the budget counts when more is asked for.
        let overruns = asks && unspent == 0;
        if overruns || now >= self.reported.0 + REPORT {
            let used = self.ledger.used(gate);
            let waited = Duration::from_nanos(self.device.waited_ns.load(Ordering::Relaxed));
            if used != self.reported.1 {
                said.push(ToDaemon::Usage { client, lease, used, launches: self.launches.0, waited });
            }
            self.reported = (now, used);
        }
        if asks {
            self.asked = true;
            said.push(ToDaemon::TokenRequest { client });
        }
        said
    }

    fn decide_locally(&mut self, now: u64) {
        let wants = self.wants_more(now);
        let gate = &self.device.gate;
        self.ledger.set_in_flight_bound(self.bound.saturating_add(Duration::from_nanos(self.prepaid)));
        let in_flight = self.ledger.in_flight_if_spent(gate).map(|time| self.launched_of(time));
        let Source::Local(share, next) = &mut self.source else { return };
        if self.ledger.lease().is_some() {
            let spent = in_flight.is_some_and(|in_flight| in_flight <= REMAINDER);
            if (now >= self.expires || spent || !wants)
                && let Some(settlement) = self.ledger.close(gate)
            {
                share.charge(settlement.used);
            }
        }
        if self.ledger.lease().is_none() && wants {
            let (budget, until) = share.budget(Timestamp::from_nanos(now));
            self.expires = until.as_nanos();
            if !budget.is_zero() {
                self.ledger.grant(gate, LeaseId(*next), budget);
                *next += 1;
            }
        }
    }

    /// How long this device has nothing to do, in ns; at most `longest` while a lease is used.
    fn next_look(&self, now: u64, longest: u64) -> u64 {
        let in_flight = self.in_flight();
        let waiting = self.device.waiting.load(Ordering::Acquire) > 0;
        if self.device.free_running.load(Ordering::Acquire) {
            return u64::MAX;
        }
        let until_expiry = self.expires.saturating_sub(now).max(50_000);
        let queued = self.queued(now);
        let credit = u64::try_from(self.device.gate.left_ns()).unwrap_or(0);
        if self.ledger.lease().is_some() && !waiting && queued < UNKNOWN && credit > REMAINDER {
            // Launches go on for so long without this thread, and who finds nothing left wakes it.
            return credit.clamp(CYCLE_LOOK, longest).min(until_expiry);
        }
        if !self.running.is_empty() || self.owed.is_some() {
            // Look again about when the oldest piece should be done, soon enough to keep the device busy.
            return queued.saturating_sub(REMAINDER).clamp(50_000, CYCLE_LOOK);
        }
        if self.ledger.lease().is_some() {
            return if in_flight > 0 || waiting { CYCLE_LOOK } else { LOOK }.min(until_expiry);
        }
        match self.source {
            // The next window of the local clock.
            Source::Local(..) if waiting => self.expires.saturating_sub(now).clamp(50_000, 10_000_000),
            _ if in_flight > 0 => 1_000_000,
            _ => u64::MAX,
        }
    }
}
