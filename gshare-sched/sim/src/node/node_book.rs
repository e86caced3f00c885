//! The book of checks, which compares the record of devices and frames with the promises.
//!
//! # Checks
//! | rule | claim |
//! |---|---|
//! | shares | each instance with enough work gets its share of the measured GPU time: see [`share_report`](super::share_report) |
//! | rate | while a daemon serves it, an instance and all processes of its name take at most its limit, plus the allowance below |
//! | memory | an instance's processes never hold more device memory than its limit, with or without a daemon |
//! | wait | no thread waits for credit longer than [`NodeBook::bound`] |
//! | answer | each question of a thread, and each frame in need of one, gets its answer in time, or its connection closes |
//! | memory | on a node with parking, while no daemon or connection fails: grants never exceed the device's memory, and no reservation within a guarantee is denied |
//! | parking | a program that misses its memory has it again within [`NodeBook::away_bound`]; between two of its returns lies its residence; it answers each order |
//! | account | a process is charged the GPU time of its kernels: see [`accounts`](super::accounts) |
//! | turn | a turn ends once, and only for the client of its grant; totals never shrink |
//!
//! The checkers of the token scheduler's calls are separate ([`check`](crate::token::check)): SMs are never oversold and no budget
//! exceeds a limit.
//!
//! The rate's allowance is two windows of the limit, since any interval may begin within a window; one request that was missed and is
//! made good; one token held beyond its expiry; time charged ahead of its use, by a token that ended unheard or a measurement corrected
//! later; and, for each process, two kernels and its work in flight. Long kernels of a function known as short are left out: a meter
//! cannot tell one long kernel from the end of another process's turn, and believes the eighth in a row.
//!
//! # Bound of a wait
//! With `m` processes in the instance, request `r`, limit `L`, kernels of `k`, a window `W`, `n` instances on the device and turns
//! of `t = min(12 ms, L W)`, the bound is `m * (2 W + (2 k + in flight / 2) / L + t / r) + n * 12 ms`. A process waits for its
//! siblings' turns, for the next window once its limit is used, for the overrun of its last kernels, until its request has caught
//! up with its last turn, and for a token with its slack of each other instance.
//!
//! Some times do not count towards a wait (they are **excused**), since no daemon can keep the bound in them:
//! - while a process is stopped;
//! - during a long kernel, and until its overrun is repaid;
//! - without a daemon, until processes have connected again and have repaid their debts, since their kernels waited for each other
//!   on the device meanwhile;
//! - with a stopped daemon, until a process gives it up (4.4 s). A process can notice a stopped daemon only while it waits for an
//!   answer, so these 4.4 s begin with the later of the wait and the stop.

mod disturbance;
mod memory_returns;

use super::accounts::{AccountFigures, Accounts};
use super::hooked_process::copy_of;
use super::node_plan::{Program, Shape};
use super::share_report::{ShareReport, Shares};
use crate::token::account::Windows;
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, ConnId, Duration, ResourceSpec, Timestamp, UseState};
use gshare_meter::Ticket;
use std::collections::{BTreeMap, VecDeque};

/// The longest wait of a question for its answer while the daemon works. A round of questions to others takes 0.2 s, the wait for
/// processes of an earlier daemon up to 1 s, and a reservation may stand behind another reservation.
const ANSWERED_IN: Duration = Duration::from_millis(2_600);
/// The length of a token with its slack.
const TURN: Duration = Duration::from_millis(12);
/// The time until processes give a silent daemon up: 3 s of silence, 1 s of waiting for a probe, and a look.
pub(super) const GIVEN_UP: Duration = Duration::from_millis(4_400);
/// A kernel longer than this is a fault, and not a part of a program.
pub(super) const LONG: Duration = Duration::from_millis(25);

/// A violation, and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) at: Timestamp,
    pub(super) rule: &'static str,
    pub(super) what: String,
}

#[derive(Debug)]
struct InstanceEntry {
    gpu: usize,
    shape: Shape,
    spec: ResourceSpec,
    allocated: u64,
    /// The connection of a living process broke, so its memory may have been given away.
    broken: bool,
    processes: usize,
    /// GPU time beyond the rate of the limit at the last look, and the allowance.
    level: u64,
    /// The part of `level` due to long kernels, less their repayment.
    excess: u64,
    /// The time charged to its processes ahead of its use, when `level` was last 0.
    ahead: u64,
    levelled: Timestamp,
    longest: u64,
    /// Nothing is compared before this time.
    calm_from: Timestamp,
    measured: bool,
    excused: Vec<(Timestamp, Timestamp)>,
    /// The times without the memory of a process on the device, in which threads wait for it and not for credit.
    parked: Vec<(Timestamp, Timestamp)>,
}

#[derive(Debug, Default)]
struct ProcessEntry {
    instance: usize,
    keen: bool,
    /// The process leaves the device idle while it holds a token.
    pauses: bool,
    /// The last long kernel of the process was of a new function.
    strange: bool,
    attached: bool,
    stopped: bool,
    gone: bool,
    ever_served: bool,
    /// The process started without a daemon, and knew of no siblings then.
    alone: bool,
    /// The total as charged when the instance's `level` was last 0, the kernels since, and the part of the charge ahead of its use.
    charged: u64,
    ran: u64,
    ahead: u64,
    allocated: u64,
    waits: Option<Timestamp>,
    /// Start of an order to park, until the memory is back.
    away: Option<Timestamp>,
    /// Its return has failed for want of room, as without a daemon, and it tries again by itself.
    tries_again: bool,
    /// A thread waits for the memory since then.
    misses: Option<Timestamp>,
    /// The last return to this daemon, and the length of its copy.
    returned: Option<(Timestamp, Duration)>,
    questions: BTreeMap<Ticket, Timestamp>,
}

#[derive(Debug, Default)]
struct GpuEntry {
    memory: u64,
    allocated: u64,
    windows: Option<Windows>,
    era: u64,
    calm_from: Timestamp,
    excused: Vec<(Timestamp, Timestamp)>,
    /// The last long kernel on the device: its length, and the latest time of its end.
    long: (Duration, Timestamp),
    /// The longest copy of a process's memory, and the number of processes that can be parked.
    copies: (Duration, u64),
}

/// The frames without an answer so far on one connection.
#[derive(Debug, Default)]
struct Pending {
    hello: Option<Timestamp>,
    attaches: VecDeque<Timestamp>,
    reservations: VecDeque<Timestamp>,
    queries: VecDeque<Timestamp>,
    /// Orders to park or to return.
    parks: VecDeque<Timestamp>,
    /// For each client: its ended turns, its reported total, and whether it may launch in this turn.
    clients: BTreeMap<ClientId, (u32, Duration, bool)>,
}

/// Figures of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// The number of waits for credit.
    pub waits: u64,
    /// The longest wait, in per cent of its bound.
    pub worst_wait_percent: u64,
    /// The number of allocations.
    pub allocations: u64,
    /// The most device memory of an instance, in per cent of its limit.
    pub worst_memory_percent: u64,
    /// The number of granted tokens.
    pub leases: u64,
    /// The number of frames in both directions.
    pub frames: u64,
    /// The number of answered questions and frames.
    pub answers: u64,
    /// The number of ended kernels.
    pub kernels: u64,
    /// The number of doubled frames.
    pub doubled: u64,
    /// The number of returns of parked memory.
    pub returns: u64,
    /// The longest wait for parked memory, in per cent of its bound.
    pub worst_away_percent: u64,
    /// The figures of the accounts.
    pub accounts: AccountFigures,
}

impl Figures {
    /// Merges another run's figures into these figures.
    pub fn add(&mut self, other: &Self) {
        self.waits += other.waits;
        self.worst_wait_percent = self.worst_wait_percent.max(other.worst_wait_percent);
        self.allocations += other.allocations;
        self.worst_memory_percent = self.worst_memory_percent.max(other.worst_memory_percent);
        self.leases += other.leases;
        self.frames += other.frames;
        self.answers += other.answers;
        self.kernels += other.kernels;
        self.doubled += other.doubled;
        self.returns += other.returns;
        self.worst_away_percent = self.worst_away_percent.max(other.worst_away_percent);
        self.accounts.add(&other.accounts);
    }
}

/// The book. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct NodeBook {
    window: Duration,
    in_flight: Duration,
    wrong: Option<Wrong>,
    instances: Vec<InstanceEntry>,
    processes: Vec<ProcessEntry>,
    gpus: Vec<GpuEntry>,
    conns: BTreeMap<ConnId, Pending>,
    /// The time from which the daemon has worked without a stop.
    daemon_since: Option<Timestamp>,
    /// The stops of daemons, from stop to continuation.
    silences: Vec<(Timestamp, Timestamp)>,
    pub(super) shares: Shares,
    pub(super) accounts: Accounts,
    pub(super) figures: Figures,
    /// Whether the daemon knows all memory in use throughout the run.
    pub(super) memory_is_known: bool,
}

impl NodeBook {
    pub(super) fn new(window: Duration, in_flight: Duration, error_max: u64) -> Self {
        let (daemon_since, shares) = (Some(Timestamp::ZERO), Shares::new(error_max));
        let accounts = Accounts::new(window, in_flight);
        Self { window, in_flight, daemon_since, shares, accounts, ..Self::default() }
    }

    // ---- what there is --------------------------------------------------------------------------------------------------

    pub(super) fn add_gpu(&mut self, memory: Bytes) {
        self.gpus.push(GpuEntry { memory: memory.0, ..GpuEntry::default() });
    }

    pub(super) fn add_instance(&mut self, gpu: usize, shape: Shape, spec: ResourceSpec) {
        self.instances.push(InstanceEntry {
            gpu,
            shape,
            spec,
            allocated: 0,
            broken: false,
            processes: 0,
            level: 0,
            excess: 0,
            ahead: 0,
            levelled: Timestamp::ZERO,
            longest: 0,
            calm_from: Timestamp::ZERO,
            measured: false,
            excused: Vec::new(),
            parked: Vec::new(),
        });
    }

    pub(super) fn add_process(&mut self, instance: usize, program: &Program) {
        self.instances[instance].processes += 1;
        self.accounts.add_process(program, self.instances[instance].spec.quota().limit());
        if program.weights > Bytes::ZERO {
            let (longest, count) = &mut self.gpus[self.instances[instance].gpu].copies;
            (*longest, *count) = ((*longest).max(copy_of(program.weights)), *count + 1);
        }
        self.processes.push(ProcessEntry {
            instance,
            keen: program.keeps_busy(),
            pauses: program.synchronises,
            ..ProcessEntry::default()
        });
    }

    /// Starts a process; `alone` means no daemon is there.
    pub(super) fn starts(&mut self, process: usize, alone: bool) {
        self.processes[process].alone = alone;
    }

    /// Notes a violation; only the first violation counts.
    pub(super) fn fail(&mut self, at: Timestamp, rule: &'static str, what: impl FnOnce() -> String) {
        if self.wrong.is_none() {
            self.wrong = Some(Wrong { at, rule, what: what() });
        }
    }

    /// Notes a violation, if the check has found one.
    pub(super) fn checked(&mut self, at: Timestamp, rule: &'static str, checked: Result<(), String>) {
        if let Err(what) = checked {
            self.fail(at, rule, || what);
        }
    }

    pub(super) fn wrong(&self) -> Option<&Wrong> {
        self.wrong.as_ref()
    }

    // ---- frames ---------------------------------------------------------------------------------------------------------

    pub(super) fn said(&mut self, now: Timestamp, conn: ConnId, process: usize, frame: &ToDaemon) {
        self.figures.frames += 1;
        let pending = self.conns.entry(conn).or_default();
        let mut wrong = None;
        match *frame {
            ToDaemon::Hello { .. } => pending.hello = Some(now),
            ToDaemon::Attach { used, .. } => {
                pending.attaches.push_back(now);
                self.accounts.said(process, used);
            }
            ToDaemon::MemoryReserve { .. } => pending.reservations.push_back(now),
            ToDaemon::MemoryQuery { .. } => pending.queries.push_back(now),
            ToDaemon::Parking { .. } => pending.parks.clear(),
            ToDaemon::Use { client, turn, used, state, .. } => {
                self.accounts.said(process, used);
                let (over, said, allowed) = pending.clients.entry(client).or_default();
                let ends = turn == *over + 1 && *allowed;
                if used < *said {
                    wrong = Some(format!("process {process} says {used} after {said}"));
                } else if turn != *over && !ends {
                    wrong = Some(format!("process {process} is in turn {turn}, and {over} were over"));
                } else if (ends || !*allowed) && matches!(state, UseState::Holds | UseState::Extends) {
                    wrong =
                        Some(format!("process {process} says {state:?} in turn {turn}, and holds nothing"));
                }
                (*over, *said, *allowed) = (turn, used, *allowed && !ends);
            }
            _ => {}
        }
        if let Some(what) = wrong {
            self.fail(now, "turn", || what);
        }
    }

    pub(super) fn told(&mut self, now: Timestamp, conn: ConnId, frame: &ToClient) {
        self.figures.frames += 1;
        let Some(pending) = self.conns.get_mut(&conn) else { return };
        let asked = match frame {
            ToClient::Welcome { .. } => pending.hello.take(),
            ToClient::Refused { .. } | ToClient::Unserved { .. } => {
                pending.hello.take().or_else(|| pending.attaches.pop_front())
            }
            ToClient::Attached { .. } => pending.attaches.pop_front(),
            ToClient::MemoryGrant { .. } | ToClient::MemoryDeny { .. } => pending.reservations.pop_front(),
            ToClient::MemoryView { .. } => pending.queries.pop_front(),
            ToClient::Park { .. } => return pending.parks.push_back(now),
            ToClient::Allow { client, turn, until, .. } => {
                let (over, _, allowed) = pending.clients.entry(*client).or_default();
                if turn == over && *until > now {
                    self.figures.leases += u64::from(!*allowed);
                    *allowed = true;
                }
                return;
            }
            _ => return,
        };
        match asked {
            Some(asked) => self.was_answered(now, asked, frame.label()),
            None => {
                self.fail(now, "answer", || format!("{} on {conn}, which was not asked for", frame.label()));
            }
        }
    }

    fn was_answered(&mut self, now: Timestamp, asked: Timestamp, what: &str) {
        self.figures.answers += 1;
        if let Some(since) = self.daemon_since
            && now.saturating_since(asked.max(since)) > ANSWERED_IN
        {
            let took = now.saturating_since(asked);
            self.fail(now, "answer", || format!("{what} took {took}"));
        }
    }

    /// Forgets a connection closed by the daemon, and its unanswered frames.
    pub(super) fn closed(&mut self, conn: ConnId) {
        self.conns.remove(&conn);
    }

    /// Notes a question of a process's thread to its helper.
    pub(super) fn asked(&mut self, now: Timestamp, process: usize, ticket: Ticket) {
        self.processes[process].questions.insert(ticket, now);
    }

    /// Notes the helper's answer.
    pub(super) fn answered(&mut self, now: Timestamp, process: usize, ticket: Ticket) {
        if self.processes[process].questions.remove(&ticket).is_none() {
            self.fail(now, "answer", || format!("process {process}: {ticket:?} is answered twice"));
        }
        self.figures.answers += 1;
    }

    // ---- memory ---------------------------------------------------------------------------------------------------------

    /// Allocates granted memory at the driver. `false` means the device has no more memory.
    pub(super) fn allocate(&mut self, now: Timestamp, process: usize, bytes: u64) -> bool {
        let entry = &mut self.processes[process];
        let (number, instance) = (entry.instance, &mut self.instances[entry.instance]);
        let gpu = &mut self.gpus[instance.gpu];
        if gpu.allocated + bytes > gpu.memory {
            let (of, memory, parks) = (gpu.allocated, gpu.memory, gpu.copies.1 > 0);
            if parks && self.memory_is_known {
                self.fail(now, "memory", || {
                    format!("process {process} was granted {bytes} B beside {of} B of {memory} B")
                });
            }
            return false;
        }
        gpu.allocated += bytes;
        entry.allocated += bytes;
        instance.allocated += bytes;
        self.figures.allocations += 1;
        let (held, limit) = (instance.allocated, instance.spec.memory());
        if let Some(limit) = limit.filter(|_| !instance.broken) {
            let percent = held * 100 / limit.0.max(1);
            self.figures.worst_memory_percent = self.figures.worst_memory_percent.max(percent);
            if held > limit.0 {
                let each: Vec<String> = (0..)
                    .zip(&self.processes)
                    .filter(|(_, entry)| entry.instance == number && entry.allocated > 0)
                    .map(|(process, entry)| format!("process {process} {}", Bytes(entry.allocated)))
                    .collect();
                self.fail(now, "memory", || {
                    format!("instance {number} holds {} of {limit}: {}", Bytes(held), each.join(", "))
                });
            }
        }
        true
    }

    /// The connection of a living process breaks.
    pub(super) fn broken(&mut self, process: usize) {
        self.instances[self.processes[process].instance].broken = true;
    }

    pub(super) fn free(&mut self, process: usize, bytes: u64) {
        let entry = &mut self.processes[process];
        let instance = &mut self.instances[entry.instance];
        entry.allocated -= bytes;
        instance.allocated -= bytes;
        self.gpus[instance.gpu].allocated -= bytes;
    }

    /// The number of processes so far.
    pub(super) fn processes(&self) -> usize {
        self.processes.len()
    }

    /// Whether a daemon has served the process at any time.
    pub(super) fn ever_served(&self, process: usize) -> bool {
        self.processes[process].ever_served
    }

    // ---- waits ----------------------------------------------------------------------------------------------------------

    pub(super) fn waits(&mut self, now: Timestamp, process: usize) {
        self.processes[process].waits.get_or_insert(now);
    }

    pub(super) fn stops_waiting(&mut self, now: Timestamp, process: usize) {
        let Some(since) = self.processes[process].waits.take() else { return };
        self.judge_wait(now, process, since);
    }

    // ---- bounds ---------------------------------------------------------------------------------------------------------

    /// The longest allowed wait of a process's thread.
    fn bound(&self, process: usize) -> Duration {
        let instance = &self.instances[self.processes[process].instance];
        let limit = u64::from(instance.spec.quota().limit().get()).max(1);
        let others = self.instances.iter().filter(|other| other.gpu == instance.gpu).count() as u64;
        let kernels = 2 * instance.longest + self.in_flight.as_nanos() / 2;
        let request = u64::from(instance.spec.quota().request().get()).max(1);
        let turn = TURN.min(instance.spec.quota().limit().of(self.window)).as_nanos();
        let own = 2 * self.window.as_nanos()
            + kernels.saturating_mul(10_000) / limit
            + turn.saturating_mul(10_000) / request;
        let bound = (instance.processes.max(1) as u64).saturating_mul(own) + others * TURN.as_nanos();
        Duration::from_nanos(bound)
    }

    /// The part of a wait that counts.
    fn counted(
        &self,
        now: Timestamp,
        process: usize,
        since: Timestamp,
        more: &[(Timestamp, Timestamp)],
    ) -> Duration {
        let entry = &self.instances[self.processes[process].instance];
        let excused = entry.excused.iter().chain(&self.gpus[entry.gpu].excused).chain(more);
        let mut excused: Vec<_> = excused.copied().collect();
        excused.extend(self.silences.iter().map(|&(from, until)| {
            let given_up = from.max(since).saturating_add(GIVEN_UP);
            (from, until.min(given_up).saturating_add(self.window))
        }));
        excused.sort_unstable();
        // The gaps between the excused intervals are the part of the wait that counts.
        let (mut at, mut waited) = (since, 0);
        for (from, until) in excused {
            waited += from.min(now).saturating_since(at).as_nanos();
            at = at.max(until);
        }
        Duration::from_nanos(waited + now.saturating_since(at).as_nanos())
    }

    fn judge_wait(&mut self, now: Timestamp, process: usize, since: Timestamp) {
        let mut parked = self.instances[self.processes[process].instance].parked.clone();
        parked.extend(self.processes[process].away.map(|from| (from, now)));
        let waited = self.counted(now, process, since, &parked).as_nanos();
        let bound = self.bound(process);
        self.figures.waits += 1;
        let percent = waited * 100 / bound.as_nanos().max(1);
        self.figures.worst_wait_percent = self.figures.worst_wait_percent.max(percent);
        if waited > bound.as_nanos() {
            let (waited, whole) = (Duration::from_nanos(waited), now.saturating_since(since));
            self.fail(now, "wait", || {
                format!("process {process} has waited for credit since {since}, {whole}, of which {waited} count: more than {bound}")
            });
        }
    }

    /// Excuses waits on a device for `lasts` after `from`.
    pub(super) fn excuse(&mut self, gpu: usize, from: Timestamp, lasts: Duration) {
        self.gpus[gpu].excused.push((from, from.saturating_add(lasts)));
    }

    pub(super) fn excuse_all(&mut self, from: Timestamp, lasts: Duration) {
        (0..self.gpus.len()).for_each(|gpu| self.excuse(gpu, from, lasts));
    }

    /// Notes a stop of the daemon for `lasts`.
    pub(super) fn daemon_is_silent(&mut self, from: Timestamp, lasts: Duration) {
        self.silences.push((from, from.saturating_add(lasts)));
    }

    pub(super) fn excuse_instance(&mut self, process: usize, from: Timestamp, lasts: Duration) {
        let instance = self.processes[process].instance;
        self.instances[instance].excused.push((from, from.saturating_add(lasts)));
    }

    // ---- GPU time -------------------------------------------------------------------------------------------------------

    /// Notes the launch of a kernel of this length; `strange` means the process never launched its function before.
    pub(super) fn launched(&mut self, now: Timestamp, process: usize, length: Duration, strange: bool) {
        let number = self.processes[process].instance;
        let gpu = self.instances[number].gpu;
        self.accounts.launched(process, length, length > LONG && !strange);
        if length > LONG {
            self.processes[process].strange = strange;
            let limit = u64::from(self.instances[number].spec.quota().limit().get()).max(1);
            let repaid = Duration::from_nanos(length.as_nanos().saturating_mul(10_000) / limit);
            let settles = length.saturating_mul(2).saturating_add(self.window.saturating_mul(10));
            self.gpus[gpu].long = (length, now.saturating_add(length.saturating_mul(2)));
            self.excuse(gpu, now, length.saturating_mul(2).saturating_add(self.window));
            self.instances[number].excused.push((now, now.saturating_add(settles).saturating_add(repaid)));
            self.disturb_gpu(now, gpu, settles);
            let until = now.saturating_add(settles).saturating_add(repaid);
            self.instances[number].calm_from = self.instances[number].calm_from.max(until);
            self.end_calm(now, number);
            self.recompute(now, number);
        } else {
            let entry = &mut self.instances[number];
            entry.longest = entry.longest.max(length.as_nanos());
        }
    }

    /// Notes the launch of a kernel of unknown cost. Behind another process's long kernel, one measurement covers both kernels, and
    /// the process is charged for both.
    pub(super) fn launched_unknown(&mut self, now: Timestamp, process: usize) {
        let number = self.processes[process].instance;
        let (length, until) = self.gpus[self.instances[number].gpu].long;
        if now < until {
            let limit = u64::from(self.instances[number].spec.quota().limit().get()).max(1);
            let repaid = Duration::from_nanos(length.as_nanos().saturating_mul(10_000) / limit);
            let lasts = repaid.saturating_add(self.window.saturating_mul(10));
            self.instances[number].excused.push((now, now.saturating_add(lasts)));
            self.instances[number].calm_from =
                self.instances[number].calm_from.max(now.saturating_add(lasts));
            self.end_calm(now, number);
            self.recompute(now, number);
        }
    }

    /// Counts an ended kernel of a process. `spent`: the process's total by its own measurement.
    pub(super) fn ran(&mut self, process: usize, spent: Duration, started: Timestamp, ended: Timestamp) {
        self.figures.kernels += 1;
        self.accounts.ran(process, ended.saturating_since(started), spent);
        let number = self.processes[process].instance;
        let gpu = &self.gpus[self.instances[number].gpu];
        if let Some(windows) = gpu.windows {
            self.shares.ran(number, gpu.era, windows, started, ended);
        }
        self.drain(ended, number);
        let length = ended.saturating_since(started).as_nanos();
        let (window, in_flight) = (self.window, self.in_flight);
        let entry = &mut self.instances[number];
        if self.processes[process].alone || !self.processes[process].attached {
            return;
        }
        if entry.level == 0 {
            entry.ahead = 0;
            for own in self.processes.iter_mut().filter(|own| own.instance == number) {
                (own.charged, own.ran, own.ahead) = (0, 0, 0);
            }
            for (of, charged, spent) in self.accounts.totals() {
                let own = &mut self.processes[of];
                if own.instance == number {
                    own.charged = charged.as_nanos();
                    own.ahead = charged.saturating_sub(spent).as_nanos();
                    entry.ahead += own.ahead;
                }
            }
        } else {
            // A measurement may correct the use of that time later.
            let own = &mut self.processes[process];
            own.ran += length;
            let ahead = own.charged.saturating_sub(spent.as_nanos().saturating_sub(own.ran)).max(own.ahead);
            entry.ahead += ahead - core::mem::replace(&mut own.ahead, ahead);
        }
        if length <= LONG.as_nanos() {
            entry.level += length;
        } else if self.processes[process].strange && !self.processes[process].gone {
            // A killed process reports no length of this kernel, so no account holds it.
            (entry.level, entry.excess) = (entry.level + length, entry.excess + length);
        }
        let quota = entry.spec.quota();
        let members = entry.processes.max(1) as u64;
        let limit = quota.limit().of(window);
        let allowed = limit.as_nanos() * 2
            + quota.request().of(window).as_nanos()
            + limit.min(TURN).as_nanos()
            + members * (2 * entry.longest + in_flight.as_nanos())
            + entry.ahead
            + entry.excess;
        if entry.level > allowed {
            let (level, allowed) = (Duration::from_nanos(entry.level), Duration::from_nanos(allowed));
            self.fail(ended, "rate", || {
                format!("instance {number} is {level} beyond the rate of its limit, of {allowed} allowed (process {process}, limit {quota})")
            });
        }
    }

    fn drain(&mut self, now: Timestamp, number: usize) {
        let entry = &mut self.instances[number];
        let passed = now.saturating_since(entry.levelled);
        let drained = entry.spec.quota().limit().of(passed).as_nanos();
        (entry.level, entry.excess) =
            (entry.level.saturating_sub(drained), entry.excess.saturating_sub(drained));
        entry.levelled = entry.levelled.max(now);
    }

    /// Forgets the part of an instance's overuse, at most `most`, without a process to report it.
    pub(super) fn forgive(&mut self, now: Timestamp, number: usize, most: Duration) {
        self.drain(now, number);
        let entry = &mut self.instances[number];
        entry.level = entry.level.saturating_sub(most.as_nanos());
    }

    pub(super) fn forgive_all(&mut self, now: Timestamp) {
        for number in 0..self.instances.len() {
            self.forgive(now, number, Duration::from_secs(1_000));
        }
    }

    /// Notes the windows of a device in the present scheduler.
    pub(super) fn windows(&mut self, gpu: usize, windows: Option<Windows>) {
        let entry = &mut self.gpus[gpu];
        let same = |a: &Windows, b: &Windows| a.origin == b.origin;
        if let (Some(now), before) = (windows, entry.windows)
            && !before.is_some_and(|before| same(&before, &now))
        {
            entry.era += 1;
            entry.windows = windows;
        }
    }

    // ---- calm -----------------------------------------------------------------------------------------------------------

    /// Notes the beginning of the daemon's service for a process.
    pub(super) fn attached(&mut self, now: Timestamp, process: usize) {
        let entry = &mut self.processes[process];
        (entry.attached, entry.ever_served, entry.returned) = (true, true, None);
        let instance = entry.instance;
        self.disturb_elastic(now, self.instances[instance].gpu);
        self.recompute(now, instance);
    }

    /// Notes the end of the daemon's service for a process.
    pub(super) fn detached(&mut self, now: Timestamp, process: usize) {
        let entry = &mut self.processes[process];
        if core::mem::take(&mut entry.attached) {
            self.accounts.apart(now, process);
            let instance = entry.instance;
            self.disturb_elastic(now, self.instances[instance].gpu);
            self.recompute(now, instance);
        }
    }

    pub(super) fn stopped(&mut self, now: Timestamp, process: usize, stopped: bool) {
        let entry = &mut self.processes[process];
        entry.stopped = stopped;
        let instance = entry.instance;
        self.end_calm(now, instance);
        self.disturb_elastic(now, self.instances[instance].gpu);
        self.recompute(now, instance);
    }

    /// Notes the end of a process, which frees its memory and its open questions. `in_order`: not by a kill.
    pub(super) fn gone(&mut self, now: Timestamp, process: usize, in_order: bool) {
        let served = in_order && self.processes[process].attached;
        let checked = self.accounts.ends(process, served);
        self.checked(now, "account", checked);
        self.detached(now, process);
        // The siblings of a killed process may use the unreported time of its last token again.
        let number = self.processes[process].instance;
        self.end_calm(now, number);
        self.recompute(now, number);
        let entry = &mut self.processes[process];
        (entry.gone, entry.waits, entry.misses) = (true, None, None);
        entry.questions.clear();
        let (bytes, instance) = (core::mem::take(&mut entry.allocated), entry.instance);
        let instance = &mut self.instances[instance];
        instance.allocated -= bytes;
        instance.processes -= 1;
        self.gpus[instance.gpu].allocated -= bytes;
    }

    // ---- end ------------------------------------------------------------------------------------------------------------

    /// Ends the run: judges all open waits, and compares the shares.
    pub(super) fn close(&mut self, end: Timestamp) -> ShareReport {
        for process in 0..self.processes.len() {
            let entry = &self.processes[process];
            if let Some(since) = entry.waits.filter(|_| !entry.stopped) {
                self.judge_wait(end, process, since);
            }
            if let Some(since) = self.processes[process].misses.filter(|_| !self.processes[process].stopped) {
                self.judge_miss(end, process, since);
            }
            let asked = self.processes[process].questions.iter().next().map(|(ticket, at)| (*ticket, *at));
            if let Some((ticket, at)) = asked
                && !self.processes[process].stopped
                && let Some(since) = self.daemon_since
                && end.saturating_since(at.max(since)) > ANSWERED_IN
            {
                self.fail(end, "answer", || {
                    format!("process {process}: {ticket:?}, asked at {at}, has no answer")
                });
            }
        }
        if let Some(since) = self.daemon_since {
            for (conn, pending) in &self.conns {
                let queues = [&pending.attaches, &pending.reservations, &pending.queries, &pending.parks];
                let oldest = queues.iter().filter_map(|queue| queue.front()).chain(&pending.hello).min();
                if let Some(&asked) = oldest
                    && end.saturating_since(asked.max(since)) > ANSWERED_IN
                    && self.wrong.is_none()
                {
                    let what = format!("a frame of {asked} on {conn} has no answer");
                    self.wrong = Some(Wrong { at: end, rule: "answer", what });
                }
            }
        }
        match self.shares.compare(end) {
            Ok(report) => report,
            Err((report, what)) => {
                self.fail(end, "shares", || what);
                report
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Quota, QuotaRange, SmShare};

    /// Whether the book accepts a wait with this beginning and end after the stop of a daemon, which lasts 6 s.
    fn accepts(begins: Duration, ends: Duration) -> bool {
        let mut book = NodeBook::new(Duration::from_millis(100), Duration::from_millis(5), 0);
        let quota = QuotaRange::new(Quota::WHOLE, Quota::WHOLE).unwrap();
        let spec = ResourceSpec::new(quota, SmShare::WHOLE, None).unwrap();
        let moment = (Duration::from_millis(1), Duration::from_millis(1));
        let program = Program {
            kernel: moment,
            functions: 1,
            spread_percent: 0,
            synchronises: true,
            pause: moment,
            silences: false,
            allocates: false,
            weights: Bytes::ZERO,
        };
        book.add_gpu(Bytes::from_gib(16));
        book.add_instance(0, Shape::Any, spec);
        book.add_process(0, &program);
        let stopped = Timestamp::from_nanos(1_000_000_000);
        book.daemon_is_silent(stopped, Duration::from_secs(6));
        book.waits(stopped.saturating_add(begins), 0);
        book.stops_waiting(stopped.saturating_add(ends), 0);
        book.wrong().is_none()
    }

    #[test]
    fn a_stopped_daemon_is_given_up_by_each_process_from_when_it_waits() {
        let [begun, late] = [Duration::ZERO, Duration::from_secs(3)];
        assert!(accepts(begun, Duration::from_millis(4_500)));
        assert!(!accepts(begun, Duration::from_millis(6_100)), "nothing excuses it from 4.5 s on");
        assert!(accepts(late, Duration::from_millis(6_100)), "the process could give the daemon up at 7.4 s");
        assert!(!accepts(late, Duration::from_millis(7_500)), "the daemon is back at 6 s");
    }
}
