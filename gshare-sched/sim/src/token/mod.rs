//! Watching a token scheduler: a book of its leases, checkers, and a picture of what went wrong.
//!
//! # Problem
//! The contract of [`TokenScheduler`] speaks about instants ("never more than the whole"), windows ("no more than the
//! limit") and waits. A test that looks at single calls sees none of these. So every call is written into a [`Book`],
//! change by change, and [checkers](check) read the book after each change.
//!
//! # Terms
//! - **call**: one `handle` that succeeded, with its event and its actions. A call that was refused changes nothing and
//!   is not shown to the book.
//! - **change**: the event of a call, or one of its actions. SMs must suffice after each of them, not only at the end.
//! - **holder**: a client from its grant to its return, revocation or departure. Running past `expires` does not end
//!   it: its kernels may still run.
//!
//! [`Audit`] is what a driver holds: it keeps the book, runs the checkers, draws the [`timeline`] and hashes the log,
//! so that two runs of one seed can be compared by one number.

pub mod account;
pub mod check;
pub mod drive;
pub mod keen;
pub mod ops;
pub mod paced;
pub mod timeline;

use account::{Account, Bound, Windows};
use core::fmt::{self, Write as _};
use gshare_core::{
    ClientId, Duration, GpuId, LeaseId, Share, SmShare, Timestamp, TokenAction, TokenEvent, TokenScheduler,
};
use std::collections::{BTreeMap, BTreeSet};
use timeline::Timeline;

/// The terms of a policy, as far as its leases can be checked by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// Length of the window over which quotas are settled.
    pub window: Duration,
    /// Where the windows of a GPU begin.
    pub origin: Origin,
    /// The longest time a token is given for at once.
    pub max_token: Duration,
    /// Time after a token's budget could have been used at which it is revoked, if it is not returned.
    pub overtime: Duration,
    /// The most overuse that is carried from one window into the next.
    pub max_carry: Duration,
}

impl Terms {
    /// The terms of FaST's multi-token scheduler: windows from a GPU's first client on.
    pub const fn multi_token(
        window: Duration,
        max_token: Duration,
        overtime: Duration,
        max_carry: Duration,
    ) -> Self {
        Self { window, origin: Origin::FirstClient, max_token, overtime, max_carry }
    }

    /// The same terms with windows that begin elsewhere.
    #[must_use]
    pub const fn with_origin(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    const fn windows(&self, first_client: Timestamp) -> Windows {
        let origin = match self.origin {
            Origin::Epoch => Timestamp::ZERO,
            Origin::FirstClient => first_client,
        };
        Windows { origin, length: self.window, max_carry: self.max_carry }
    }
}

/// Where the windows of a GPU begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// At time 0, for every GPU.
    Epoch,
    /// When the GPU gets a client and has none; again each time that it has been empty.
    FirstClient,
}

/// One entry of the book: the event of a call, or one of its actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The event.
    Event(TokenEvent),
    /// An action.
    Action(TokenAction),
}

/// A lease as the book knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Its name.
    pub lease: LeaseId,
    /// When it was first granted.
    pub since: Timestamp,
    /// GPU time in all.
    pub budget: Duration,
    /// When the client must stop.
    pub expires: Timestamp,
    /// SMs it counts for: those of the client's share when it was granted.
    pub sm: SmShare,
    /// GPU time reported so far.
    pub reported: Duration,
    /// Whether it was revoked, and nothing was heard of it since: then it counts as used up.
    pub revoked: bool,
}

impl Held {
    /// GPU time that is charged for it.
    pub fn charge(&self, bound: Bound) -> Duration {
        match bound {
            Bound::Least if !self.revoked => self.reported,
            Bound::Least | Bound::Most => self.reported.max(self.budget),
        }
    }
}

/// A client as the book knows it.
#[derive(Debug, Clone)]
pub struct Client {
    /// Where it launches.
    pub gpu: GpuId,
    /// The share that it may take.
    pub share: Share,
    /// Its lease.
    pub held: Option<Held>,
    /// Since when it has been asking: for its first token, or for more than the one it holds.
    pub asked: Option<Timestamp>,
    /// Its quota.
    pub account: Account,
    /// A lease that was replaced or revoked and has not been returned: its return may still come.
    pub unsettled: Option<Held>,
    /// The charge for leases before these two, at least and at most.
    closed: (Duration, Duration),
}

impl Client {
    /// GPU time used since it joined.
    pub fn total_used(&self, bound: Bound) -> Duration {
        let closed = match bound {
            Bound::Least => self.closed.0,
            Bound::Most => self.closed.1,
        };
        self.held
            .iter()
            .chain(&self.unsettled)
            .fold(closed, |sum, held| sum.saturating_add(held.charge(bound)))
    }

    /// Lays a lease aside whose return may still come.
    fn lay_aside(&mut self, held: Held) {
        self.close_unsettled();
        self.unsettled = Some(held);
    }

    /// A later lease has ended: what was laid aside before it can no longer be returned, and is charged as it stands.
    fn close_unsettled(&mut self) {
        if let Some(earlier) = self.unsettled.take() {
            self.closed.0 = self.closed.0.saturating_add(earlier.charge(Bound::Least));
            self.closed.1 = self.closed.1.saturating_add(earlier.charge(Bound::Most));
        }
    }
}

/// All leases, from events and actions alone.
#[derive(Debug, Clone)]
pub struct Book {
    terms: Terms,
    clients: BTreeMap<ClientId, Client>,
    /// Windows of each GPU that has clients.
    windows: BTreeMap<GpuId, Windows>,
    /// Latest generation of each slot.
    generations: BTreeMap<u32, u32>,
    leases: BTreeSet<LeaseId>,
}

impl Book {
    /// An empty book.
    pub const fn new(terms: Terms) -> Self {
        Self {
            terms,
            clients: BTreeMap::new(),
            windows: BTreeMap::new(),
            generations: BTreeMap::new(),
            leases: BTreeSet::new(),
        }
    }

    /// The terms of the scheduler.
    pub const fn terms(&self) -> Terms {
        self.terms
    }

    /// The windows quotas are settled over on a GPU that has clients.
    pub fn windows(&self, gpu: GpuId) -> Option<Windows> {
        self.windows.get(&gpu).copied()
    }

    /// All clients, by id.
    pub fn clients(&self) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients.iter().map(|(id, client)| (*id, client))
    }

    /// One client.
    pub fn client(&self, client: ClientId) -> Option<&Client> {
        self.clients.get(&client)
    }

    /// The clients of one GPU, by id.
    pub fn on(&self, gpu: GpuId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients().filter(move |(_, client)| client.gpu == gpu)
    }

    /// The GPUs that have clients.
    pub fn gpus(&self) -> Vec<GpuId> {
        let mut gpus: Vec<_> = self.clients.values().map(|client| client.gpu).collect();
        gpus.sort_unstable();
        gpus.dedup();
        gpus
    }

    /// Sum of the SMs of the holders on a GPU, in basis points.
    pub fn sm_held(&self, gpu: GpuId) -> u32 {
        self.on(gpu).filter_map(|(_, client)| client.held).map(|held| u32::from(held.sm.get())).sum()
    }

    /// The client in a slot.
    pub fn in_slot(&self, slot: u32) -> Option<ClientId> {
        let first = ClientId::new(slot, 0);
        let last = ClientId::new(slot, u32::MAX);
        self.clients.range(first..=last).next().map(|(id, _)| *id)
    }

    /// A generation that the slot has not had.
    pub fn next_generation(&self, slot: u32) -> u32 {
        self.generations.get(&slot).map_or(0, |last| last + 1)
    }

    fn write(&mut self, now: Timestamp, change: Change) -> Result<(), String> {
        match change {
            Change::Event(event) => self.write_event(now, event)?,
            Change::Action(action) => self.write_action(now, action)?,
        }
        for client in self.clients.values_mut() {
            client.account.set_wants(now, client.asked.is_some() || client.held.is_some());
        }
        Ok(())
    }

    /// Writes an event that was accepted.
    fn write_event(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), String> {
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                let windows = *self.windows.entry(gpu).or_insert_with(|| self.terms.windows(now));
                let account = Account::new(windows, now, share.quota);
                let closed = (Duration::ZERO, Duration::ZERO);
                let entry = Client { gpu, share, held: None, asked: None, account, unsettled: None, closed };
                self.generations.insert(client.slot(), client.generation());
                if self.clients.insert(client, entry).is_some() {
                    return Err(format!("{client} joined twice"));
                }
            }
            TokenEvent::ClientLeft { client } => {
                let entry =
                    self.clients.remove(&client).ok_or_else(|| format!("{client} left and was not there"))?;
                if self.on(entry.gpu).next().is_none() {
                    self.windows.remove(&entry.gpu);
                }
            }
            TokenEvent::ShareChanged { client, share } => {
                let entry = self.entry(client)?;
                entry.share = share;
                entry.account.change_quota(now, share.quota);
            }
            TokenEvent::TokenRequested { client } => {
                let entry = self.entry(client)?;
                entry.asked = entry.asked.or(Some(now));
            }
            TokenEvent::TokenReturned { client, lease, used, again } => {
                let entry = self.entry(client)?;
                match entry.held {
                    Some(held) if held.lease == lease => {
                        entry.held = None;
                        entry.close_unsettled();
                    }
                    _ if entry.unsettled.is_some_and(|earlier| earlier.lease == lease) => {
                        entry.unsettled = None;
                    }
                    _ => {
                        return Err(format!(
                            "{client} returned {lease}, which it does not hold, and was not refused"
                        ));
                    }
                }
                entry.account.settled(now, lease, used);
                entry.closed = (entry.closed.0.saturating_add(used), entry.closed.1.saturating_add(used));
                if again {
                    entry.asked = entry.asked.or(Some(now));
                }
            }
            TokenEvent::UsageReported { client, lease, used } => {
                let entry = self.entry(client)?;
                let known =
                    entry.held.iter_mut().chain(&mut entry.unsettled).find(|held| held.lease == lease);
                let Some(held) = known else {
                    return Err(format!(
                        "{client} reported on {lease}, which it does not hold, and was not refused"
                    ));
                };
                (held.reported, held.revoked) = (used, false);
                let budget = held.budget;
                entry.account.reported(now, lease, budget, used);
            }
            _ => {}
        }
        Ok(())
    }

    /// Writes an action. Refuses one that no lease allows.
    fn write_action(&mut self, now: Timestamp, action: TokenAction) -> Result<(), String> {
        match action {
            TokenAction::Grant { client, lease, budget, expires } => {
                self.write_grant(now, client, lease, budget, expires)
            }
            TokenAction::Revoke { client, lease, .. } => {
                let entry = self.entry(client)?;
                match entry.held.take_if(|held| held.lease == lease) {
                    Some(held) => {
                        let held = Held { revoked: true, ..held };
                        entry.account.settled(now, lease, held.charge(Bound::Most));
                        entry.lay_aside(held);
                        Ok(())
                    }
                    None => Err(format!("{client} was revoked {lease}, which it does not hold")),
                }
            }
            TokenAction::Throttle { client, until, .. } => {
                self.entry(client)?;
                if until <= now {
                    return Err(format!("{client} was throttled until {until}, which is not after {now}"));
                }
                Ok(())
            }
        }
    }

    fn write_grant(
        &mut self,
        now: Timestamp,
        client: ClientId,
        lease: LeaseId,
        budget: Duration,
        expires: Timestamp,
    ) -> Result<(), String> {
        let fresh = self.leases.insert(lease);
        let entry = self.entry(client)?;
        let windows = entry.account.windows();
        if expires <= now {
            return Err(format!("{client} was granted {lease} until {expires}, which is not after {now}"));
        }
        let window = windows.index(now);
        if expires > windows.end(window) {
            return Err(format!(
                "{lease} expires at {expires}, after the end of its window at {}",
                windows.end(window)
            ));
        }
        let held = match entry.held {
            Some(held) if held.lease == lease => {
                if budget < held.budget || expires < held.expires {
                    return Err(format!("{lease} was extended from {held:?} to less: {budget}, {expires}"));
                }
                if windows.index(held.since) != window {
                    return Err(format!(
                        "{lease} was extended into another window than that of {}",
                        held.since
                    ));
                }
                Held { budget, expires, ..held }
            }
            _ if !fresh => return Err(format!("{lease} was granted to {client}, but is not new")),
            replaced => {
                if let Some(replaced) = replaced {
                    entry.lay_aside(replaced);
                }
                let sm = entry.share.sm;
                Held { lease, since: now, budget, expires, sm, reported: Duration::ZERO, revoked: false }
            }
        };
        if budget <= held.reported {
            return Err(format!("{lease} was granted with {budget}, of which nothing is left"));
        }
        entry.account.granted(now, lease, budget, held.reported);
        (entry.held, entry.asked) = (Some(held), None);
        Ok(())
    }

    fn entry(&mut self, client: ClientId) -> Result<&mut Client, String> {
        self.clients.get_mut(&client).ok_or_else(|| format!("{client} is not there"))
    }
}

/// A violation that was found, with the picture of how it came to it.
#[derive(Clone, thiserror::Error)]
#[error("{checker}: {message} (call {call} at {now})\n{picture}")]
pub struct Violation {
    /// Which checker.
    pub checker: &'static str,
    /// Number of the call, from 0.
    pub call: u64,
    /// When it was found.
    pub now: Timestamp,
    /// The violation in words, naming clients and figures.
    pub message: String,
    /// The last calls, and who held what in the time before.
    pub picture: String,
}

crate::debug_as_text::debug_as_text!(Violation);

/// Watches one scheduler: show it every call that succeeded. See the [module](self).
#[derive(Debug)]
pub struct Audit {
    book: Book,
    checks: Vec<check::Check>,
    timeline: Timeline,
    hash: LogHash,
    calls: u64,
}

impl Audit {
    /// An audit by these checkers, over a scheduler that has no clients yet.
    pub fn new(terms: Terms, checks: Vec<check::Check>) -> Self {
        let (book, timeline, hash) = (Book::new(terms), Timeline::new(), LogHash::default());
        Self { book, checks, timeline, hash, calls: 0 }
    }

    /// The book.
    pub const fn book(&self) -> &Book {
        &self.book
    }

    /// A number that two runs share exactly when they saw the same calls.
    pub const fn log_hash(&self) -> u64 {
        self.hash.0
    }

    /// How often each checker's claim was put to the test, by name.
    pub fn tested(&self) -> Vec<(&'static str, u64)> {
        self.checks.iter().map(|check| (check.name, check.tested)).collect()
    }

    /// Number of calls seen.
    pub const fn calls(&self) -> u64 {
        self.calls
    }

    /// Takes one call that succeeded.
    pub fn observe(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &[TokenAction],
        scheduler: &dyn TokenScheduler,
    ) -> Result<(), Violation> {
        self.hash.add(format_args!("{now:?}{event:?}{actions:?}"));
        self.timeline.call(now, event, actions);
        let result = self.take(now, event, actions, scheduler);
        self.calls += 1;
        result
    }

    /// A violation found by the driver itself.
    pub fn violation(&self, checker: &'static str, now: Timestamp, message: String) -> Violation {
        let picture = self.timeline.picture(now);
        Violation { checker, call: self.calls, now, message, picture }
    }

    fn take(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &[TokenAction],
        scheduler: &dyn TokenScheduler,
    ) -> Result<(), Violation> {
        // An engine first does what its deadlines asked for, so revocations at the head of its orders came before the
        // event.
        let overdue =
            actions.iter().take_while(|action| matches!(action, TokenAction::Revoke { .. })).count();
        let (overdue, rest) = actions.split_at(overdue);
        let overdue = overdue.iter().map(|action| Change::Action(*action));
        let rest = rest.iter().map(|action| Change::Action(*action));
        for change in overdue.chain([Change::Event(event)]).chain(rest) {
            self.ask(now, |checker, book| checker.before(book, now, change))?;
            self.book
                .write(now, change)
                .map_err(|message| self.violation("life of a lease", now, message))?;
            self.ask(now, |checker, book| checker.after(book, now, change))?;
        }
        self.ask(now, |checker, book| checker.settled(book, now, scheduler))
    }

    /// Asks every checker.
    fn ask(
        &mut self,
        now: Timestamp,
        ask: impl Fn(&mut dyn check::Checker, &Book) -> Result<u64, String>,
    ) -> Result<(), Violation> {
        for check in &mut self.checks {
            match ask(&mut *check.checker, &self.book) {
                Ok(tested) => check.tested += tested,
                Err(message) => {
                    let name = check.name;
                    return Err(self.violation(name, now, message));
                }
            }
        }
        Ok(())
    }
}

/// FNV-1a over what is written into it: not for tables, only to compare logs.
#[derive(Debug, Clone, Copy)]
struct LogHash(u64);

impl Default for LogHash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl LogHash {
    fn add(&mut self, entry: fmt::Arguments<'_>) {
        // Writing into a number cannot fail.
        let _ = self.write_fmt(entry);
    }
}

impl fmt::Write for LogHash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
