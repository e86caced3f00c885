//! The accounts of GPU time: the daemon's charge for each process, compared with the device's own record.
//!
//! # Claims
//! The device records the kernels of a process, the process states totals of its use, and the daemon charges by the frames it receives.
//!
//! 1. **Frames.** The charge follows from the frames that reached the daemon, to the nanosecond: the largest total heard, or the
//!    largest total of a token that ended unheard. An instance is charged the sum over its processes. A doubled, late or stray
//!    frame changes nothing.
//! 2. **Never less.** A process that ends in good order was charged at least the GPU time of its kernels. With kernels of constant
//!    length this holds to the nanosecond; a spread of `s` per cent may cost `2 s` per cent, the error of a prediction. While
//!    processes take turns, it is charged at most its queue and one kernel more. Without turns, measurements hold others' kernels.
//! 3. **Killed.** The daemon charges the token of a killed process in full. Only the launch beyond the token and the launch of
//!    unknown cost stay unheard, so the charge lacks at most two kernels.
//! 4. **One report more.** When a process attaches again, its totals cover all use up to the end of its last turn that the daemon
//!    has heard of. So a disconnect charges at most that which was said or allowed since: one report.
//! 5. **Nothing invented.** A process states no permission beyond its tokens and, without a daemon, its limit by its own clock.
//!
//! A daemon's end ends its accounts. Long kernels of functions known as short are left out, as for the rate ([`book`](super::book)).

use super::node_book::LONG;
use super::node_plan::Program;
use gshare_core::{ClientId, ConnId, Duration, Quota, Timestamp};
use std::collections::BTreeMap;

/// A process, by the device and by its own statements.
#[derive(Debug, Default)]
struct Owner {
    spread_percent: u64,
    window_limit: Duration,
    /// GPU time of its ended kernels, and the length of its longest kernel.
    worked: Duration,
    longest: Duration,
    /// Queued long kernels of functions known as short.
    left_out: Vec<Duration>,
    /// Its kernels have any length under one function.
    uncompared: bool,
    /// Its total by its own measurement when its last kernel ended, and its last stated total.
    spent: Duration,
    said: Duration,
    gone: bool,
    /// When it last lost its connection.
    apart_since: Timestamp,
    /// The end of its last attachment to this daemon: the total charged, and the total surely covered by its statements.
    before: Option<(Duration, Duration)>,
}

impl Owner {
    /// The least charge for the work.
    fn least(&self) -> Duration {
        if self.uncompared {
            return Duration::ZERO;
        }
        let spread = self.spread_percent.min(100);
        Duration::from_nanos(self.worked.as_nanos() * (100 - spread) / (100 + spread))
    }
}

/// A process's account with the daemon, by the frames that reached it.
#[derive(Debug)]
struct Attachment {
    process: usize,
    client: ClientId,
    tenant: ClientId,
    /// The process's total when it attached, and as charged.
    base: Duration,
    charged: Duration,
    /// The number of ended turns, and whether the daemon ended the last of them.
    turn: u32,
    stopped: bool,
    /// The total allowed in this turn, at first and now.
    first: Duration,
    held: Option<Duration>,
    /// The total surely covered by the process's statements from now on.
    covered: Duration,
}

impl Attachment {
    /// The charge if the process left now.
    fn at_leave(&self) -> Duration {
        self.held.map_or(self.charged, |allowed| allowed.max(self.charged))
    }
}

/// Figures of the accounts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccountFigures {
    /// The number of compared attachments, and of the processes among them that ended in good order.
    pub compared: u64,
    /// The number of processes that ended in good order and were compared with the device.
    pub ended: u64,
    /// The part of them charged the device's time to the nanosecond.
    pub exact: u64,
    /// The number of times a process attached again to the same daemon.
    pub again: u64,
    /// The largest charge of a disconnect beyond the use.
    pub worst_again: Duration,
}

impl AccountFigures {
    pub(super) fn add(&mut self, other: &Self) {
        self.compared += other.compared;
        self.ended += other.ended;
        self.exact += other.exact;
        self.again += other.again;
        self.worst_again = self.worst_again.max(other.worst_again);
    }
}

/// The accounts of a run. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Accounts {
    window: Duration,
    in_flight: Duration,
    owners: Vec<Owner>,
    /// Whether a measurement may hold kernels of other processes, because the processes did not take turns.
    pub(super) disturbed: bool,
    attachments: BTreeMap<ConnId, Attachment>,
    /// The charge of each instance on its device, with departed processes.
    tenants: BTreeMap<ClientId, Duration>,
    pub(super) figures: AccountFigures,
}

/// A broken claim, as a text.
type Checked = Result<(), String>;

impl Accounts {
    pub(super) fn new(window: Duration, in_flight: Duration) -> Self {
        Self { window, in_flight, ..Self::default() }
    }

    pub(super) fn add_process(&mut self, program: &Program, limit: Quota) {
        let (spread_percent, window_limit) = (program.spread_percent, limit.of(self.window));
        self.owners.push(Owner { spread_percent, window_limit, ..Owner::default() });
    }

    // ---- the device -----------------------------------------------------------------------------------------------------

    /// A launch. `left_out`: a long kernel of a function known as short.
    pub(super) fn launched(&mut self, process: usize, length: Duration, left_out: bool) {
        let owner = &mut self.owners[process];
        owner.longest = owner.longest.max(length);
        self.disturbed |= length > LONG;
        owner.left_out.extend(left_out.then_some(length));
    }

    /// The process has lost its connection.
    pub(super) fn apart(&mut self, now: Timestamp, process: usize) {
        self.owners[process].apart_since = now;
        self.disturbed |= !self.owners[process].gone;
    }

    /// Leaves the kernels of a process out.
    pub(super) fn leave_out(&mut self, process: usize) {
        self.owners[process].uncompared = true;
    }

    /// A kernel has ended. `spent`: the process's total by its own measurement.
    pub(super) fn ran(&mut self, process: usize, length: Duration, spent: Duration) {
        let owner = &mut self.owners[process];
        owner.spent = spent;
        match owner.left_out.iter().position(|other| *other == length) {
            Some(at) => drop(owner.left_out.remove(at)),
            None if owner.gone => {}
            None => owner.worked = owner.worked.saturating_add(length),
        }
    }

    // ---- frames ---------------------------------------------------------------------------------------------------------

    pub(super) fn said(&mut self, process: usize, used: Duration) {
        self.owners[process].said = used;
    }

    /// The daemon admits a process, which states its totals.
    pub(super) fn joins(
        &mut self,
        now: Timestamp,
        (conn, process): (ConnId, usize),
        (client, tenant): (ClientId, ClientId),
        (used, allowed): (Duration, Duration),
    ) -> Checked {
        let open = self.attachments.values().filter(|other| other.process == process);
        let open = open.map(|other| (other.at_leave(), other.covered)).max();
        let owner = &self.owners[process];
        let total = self.tenants.entry(tenant).or_default();
        *total = total.saturating_add(used.saturating_sub(allowed));
        let attachment = Attachment {
            process,
            client,
            tenant,
            base: used,
            charged: used,
            turn: 0,
            stopped: false,
            first: used,
            held: None,
            covered: used,
        };
        self.attachments.insert(conn, attachment);
        let Some((charged, covered)) = open.or(owner.before) else { return Ok(()) };
        let restated = used.min(allowed);
        self.figures.again += 1;
        self.figures.worst_again = self.figures.worst_again.max(charged.saturating_sub(restated));
        if restated < covered {
            return Err(format!(
                "process {process} attaches again with {used} used of {allowed} allowed, and the daemon had heard of {covered}"
            ));
        }
        let windows = now.saturating_since(owner.apart_since).as_nanos() / self.window.as_nanos().max(1) + 2;
        let most = charged.saturating_add(owner.window_limit.saturating_mul(windows));
        if allowed > most {
            return Err(format!(
                "process {process} attaches again with {allowed} allowed: at most {most} were, {charged} by the daemon"
            ));
        }
        Ok(())
    }

    /// A total reaches the daemon.
    pub(super) fn heard(&mut self, conn: ConnId, turn: u32, used: Duration) {
        let Some(entry) = self.attachments.get_mut(&conn) else { return };
        let more = used.saturating_sub(entry.charged);
        entry.charged = entry.charged.saturating_add(more);
        grow(&mut self.tenants, entry.tenant, more);
        let ends = entry.held.is_some() && turn == entry.turn.wrapping_add(1);
        if ends || (entry.stopped && turn == entry.turn) {
            entry.covered = entry.covered.max(entry.first.min(used));
            (entry.held, entry.stopped) = (None, false);
        }
        entry.turn = entry.turn.max(turn);
    }

    /// The daemon allows a total, or takes the token back.
    pub(super) fn allows(&mut self, now: Timestamp, conn: ConnId, allowed: Duration, until: Timestamp) {
        let Some(entry) = self.attachments.get_mut(&conn) else { return };
        if until > now {
            if entry.held.is_none() {
                entry.first = allowed;
            }
            // A recall states a smaller total, and leaves the charge of a lost token as it is.
            entry.held = entry.held.max(Some(allowed));
            return;
        }
        let more = allowed.saturating_sub(entry.charged);
        entry.charged = entry.charged.saturating_add(more);
        grow(&mut self.tenants, entry.tenant, more);
        (entry.held, entry.stopped, entry.turn) = (None, true, entry.turn.wrapping_add(1));
    }

    /// Each connected process: its total as charged, and as measured by itself.
    pub(super) fn totals(&self) -> impl Iterator<Item = (usize, Duration, Duration)> + '_ {
        self.attachments
            .values()
            .map(|entry| (entry.process, entry.charged, self.owners[entry.process].spent))
    }

    /// The client of a connection, for a reading of the daemon's account.
    pub(super) fn client(&self, conn: ConnId) -> Option<(ClientId, ClientId)> {
        self.attachments.get(&conn).map(|entry| (entry.client, entry.tenant))
    }

    pub(super) fn open(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.attachments.keys().copied()
    }

    /// Compares the account of a connected process with the daemon's `reading`: the charge since the process attached, and the charge
    /// of its instance.
    pub(super) fn compare(&self, conn: ConnId, reading: Option<(Duration, Duration)>) -> Checked {
        let Some(entry) = self.attachments.get(&conn) else { return Ok(()) };
        let by_frames = (entry.charged.saturating_sub(entry.base), self.of_tenant(entry.tenant));
        if reading == Some(by_frames) {
            return Ok(());
        }
        let process = entry.process;
        Err(format!(
            "process {process} and its instance are charged {reading:?}, by their frames {by_frames:?}"
        ))
    }

    fn of_tenant(&self, tenant: ClientId) -> Duration {
        self.tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// The daemon has seen the end of a connection. `tenant`: its charge of the instance.
    pub(super) fn leaves(&mut self, conn: ConnId, tenant: Option<Duration>) -> Checked {
        let Some(entry) = self.attachments.remove(&conn) else { return Ok(()) };
        let (process, charged) = (entry.process, entry.at_leave());
        grow(&mut self.tenants, entry.tenant, charged.saturating_sub(entry.charged));
        let of_all = self.of_tenant(entry.tenant);
        self.figures.compared += 1;
        if tenant != Some(of_all) {
            return Err(format!(
                "process {process} leaves its instance with a charge of {tenant:?}, its processes' is {of_all}"
            ));
        }
        let owner = &mut self.owners[process];
        owner.before = owner.before.max(Some((charged, entry.covered)));
        if owner.gone && self.attachments.values().all(|other| other.process != process) {
            let (least, charged) = (owner.least(), owner.before.map_or(charged, |(charged, _)| charged));
            let unheard = owner.longest.saturating_mul(2);
            if charged.saturating_add(unheard) < least {
                return Err(format!("process {process} was killed after {least}, and charged {charged}"));
            }
        }
        Ok(())
    }

    /// The accounts of a daemon end with it.
    pub(super) fn daemon_dies(&mut self) {
        self.attachments.clear();
        self.tenants.clear();
        self.owners.iter_mut().for_each(|owner| owner.before = None);
    }

    // ---- the end of a process -------------------------------------------------------------------------------------------

    /// A process is gone. `served`: it has ended in good order, after its last statement to a daemon.
    pub(super) fn ends(&mut self, process: usize, served: bool) -> Checked {
        let owner = &mut self.owners[process];
        owner.gone = true;
        if !served {
            return Ok(());
        }
        self.figures.ended += 1;
        self.figures.exact += u64::from(owner.said == owner.worked);
        let queued = self.in_flight.saturating_add(owner.longest);
        let compared = !self.disturbed && owner.spread_percent == 0 && !owner.uncompared;
        if owner.said < owner.least() || compared && owner.said > owner.worked.saturating_add(queued) {
            let (said, worked) = (owner.said, owner.worked);
            return Err(format!("process {process} ends and has stated {said}, its kernels took {worked}"));
        }
        Ok(())
    }
}

fn grow(tenants: &mut BTreeMap<ClientId, Duration>, tenant: ClientId, more: Duration) {
    let total = tenants.entry(tenant).or_default();
    *total = total.saturating_add(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONN: ConnId = ConnId::new(0, 0);
    const NEXT: ConnId = ConnId::new(1, 0);
    const IDS: (ClientId, ClientId) = (ClientId::new(0, 0), ClientId::new(0, 0));

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    /// A process with a token of 10 ms, which has worked for 7 ms and has reported 3 ms.
    fn working() -> Accounts {
        let moment = (ms(1), ms(1));
        let program = Program {
            kernel: moment,
            functions: 1,
            spread_percent: 0,
            synchronises: false,
            pause: moment,
            silences: false,
            allocates: false,
            weights: gshare_core::Bytes::ZERO,
        };
        let mut accounts = Accounts::new(ms(100), ms(2));
        accounts.add_process(&program, Quota::WHOLE);
        accounts.joins(at(0), (CONN, 0), IDS, (ms(0), ms(0))).unwrap();
        accounts.allows(at(0), CONN, ms(10), at(20));
        (0..7).for_each(|_| accounts.launched(0, ms(1), false));
        (1..=7).for_each(|over| accounts.ran(0, ms(1), ms(over)));
        accounts.said(0, ms(3));
        accounts.heard(CONN, 0, ms(3));
        accounts
    }

    fn charges(accounts: &Accounts, charged: u64) -> bool {
        accounts.compare(CONN, Some((ms(charged), ms(charged)))).is_ok()
    }

    #[test]
    fn a_doubled_total_is_charged_once() {
        let mut accounts = working();
        accounts.heard(CONN, 0, ms(3));
        assert!(charges(&accounts, 3) && !charges(&accounts, 6) && !charges(&accounts, 2));
        assert!(accounts.compare(CONN, Some((ms(3), ms(4)))).is_err(), "the instance has one process");
    }

    #[test]
    fn a_token_that_ends_unheard_is_charged_in_full_and_its_late_total_not_again() {
        let mut accounts = working();
        accounts.allows(at(30), CONN, ms(10), at(30));
        assert!(charges(&accounts, 10) && !charges(&accounts, 3));
        accounts.heard(CONN, 0, ms(7));
        assert!(charges(&accounts, 10));
        accounts.heard(CONN, 1, ms(12));
        assert!(charges(&accounts, 12));
    }

    #[test]
    fn a_process_that_leaves_is_charged_its_token() {
        assert!(working().leaves(CONN, Some(ms(10))).is_ok());
        assert!(working().leaves(CONN, Some(ms(3))).is_err());
        assert!(working().leaves(CONN, None).is_err());
    }

    #[test]
    fn an_end_in_good_order_states_all_kernels_and_at_most_the_queue_more() {
        for (said, holds) in [(6, false), (7, true), (10, true), (11, false)] {
            let mut accounts = working();
            accounts.said(0, ms(said));
            assert_eq!(accounts.ends(0, true).is_ok(), holds, "{said} ms");
        }
        assert!(working().ends(0, false).is_ok(), "a killed process states nothing");
    }

    #[test]
    fn a_killed_process_is_charged_all_but_two_kernels() {
        let mut accounts = working();
        (0..6).for_each(|_| accounts.ran(0, ms(1), ms(13)));
        accounts.ends(0, false).unwrap();
        assert!(accounts.leaves(CONN, Some(ms(10))).is_err(), "10 ms of 13 ms");
    }

    #[test]
    fn a_process_that_attaches_again_covers_its_last_turn_and_invents_no_permission() {
        for (used, allowed, holds) in
            [(7, 10, true), (7, 3, true), (7, 2, false), (2, 10, false), (7, 203, true), (7, 204, false)]
        {
            let mut accounts = working();
            accounts.heard(CONN, 1, ms(3));
            accounts.leaves(CONN, Some(ms(3))).unwrap();
            let joined = accounts.joins(at(40), (NEXT, 0), IDS, (ms(used), ms(allowed)));
            assert_eq!(joined.is_ok(), holds, "{used} ms of {allowed} ms");
        }
    }
}
