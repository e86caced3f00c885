//! Watching a token scheduler: a book of its tokens, checkers, and the last calls before a violation.
//!
//! # Problem
//! The contract of [`TokenScheduler`] speaks about instants ("never more than the whole"), windows ("no more than the limit") and
//! waits, and a test of single calls sees none of these. The audit therefore writes every call into a [`Book`], change by change,
//! and [checkers](check) read the book after each change.
//!
//! # Terms
//! - **call**: one successful `handle`, with its event and its actions. A refused call changes nothing, and the book does not see
//!   it.
//! - **change**: the event of a call, or one of its actions. SMs must suffice after each change, not only at the end.
//! - **holder**: a client from its grant until it gives the token back, is stopped or leaves. A client past `until` is still a
//!   holder, since its kernels may still run.
//!
//! A driver holds an [`Audit`], which keeps the book and the last calls, runs the checkers and hashes the log. One number then
//! suffices to compare two runs of a seed.

pub mod account;
pub mod check;
pub mod drive;
pub mod keen;
pub mod ops;

use crate::log::Log;
use crate::story::Story;
use account::{Account, Windows};
use gshare_core::{
    ClientId, Duration, GpuId, Share, SmShare, Timestamp, TokenAction, TokenEvent, TokenScheduler, UseState,
};
use std::collections::BTreeMap;

/// The terms of a policy, as far as a check of its tokens needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// The length of the window for the settlement of quotas.
    pub window: Duration,
    /// The longest time of a single grant.
    pub max_token: Duration,
    /// The time from the end of a token's budget to the end of the token.
    pub slack: Duration,
    /// The time from the end of a token, or of the known work under it, to its revocation.
    pub grace: Duration,
    /// The most overuse carried from one window into the next.
    pub max_carry: Duration,
}

impl Terms {
    /// The terms of FaST's multi-token scheduler.
    pub const fn multi_token(
        window: Duration,
        max_token: Duration,
        (slack, grace): (Duration, Duration),
        max_carry: Duration,
    ) -> Self {
        Self { window, max_token, slack, grace, max_carry }
    }

    /// The windows of a GPU, which begin with its first client, and again after each time without clients.
    const fn windows(&self, origin: Timestamp) -> Windows {
        Windows { origin, length: self.window, max_carry: self.max_carry }
    }
}

/// An entry of the book: the event of a call, or one of its actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The event of the call.
    Event(TokenEvent),
    /// One action of the call.
    Action(TokenAction),
}

/// A token in the book.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The time of the grant, extensions aside. The token may have replaced a held token of an earlier window.
    pub since: Timestamp,
    /// The time of the replaced token's grant, or `since` for a token without a predecessor.
    pub replaced: Timestamp,
    /// The total at the token's beginning: its client's charge, or the allowed total of the replaced token.
    pub base: Duration,
    /// The allowed total.
    pub allowed: Duration,
    /// The time at which the client must stop.
    pub until: Timestamp,
    /// The SMs of the client's share at the time of the grant, which count for this token.
    pub sm: SmShare,
}

/// A client in the book.
#[derive(Debug, Clone)]
pub struct Client {
    /// The GPU of the client's launches.
    pub gpu: GpuId,
    /// The share of the client.
    pub share: Share,
    /// The token of the client, if any.
    pub held: Option<Held>,
    /// The beginning of the client's present request, for a first token or for more than its token.
    pub asked: Option<Timestamp>,
    /// The account of the client's quota.
    pub account: Account,
    /// The client's reported GPU time since it joined.
    pub said: Duration,
    /// The client's charged GPU time since it joined.
    pub charged: Duration,
}

impl Client {
    /// The time of the token's revocation, unless the client gives it back before.
    pub fn due(&self, terms: Terms) -> Option<Timestamp> {
        self.held.map(|held| {
            let runs = self.charged.saturating_sub(held.base).min(terms.max_carry);
            held.until.max(held.since.saturating_add(runs)).saturating_add(terms.grace)
        })
    }

    /// The total at which a grant at `now` begins or goes on.
    pub fn begins(&self, now: Timestamp) -> Duration {
        let windows = self.account.windows();
        let held = self.held.map_or(Duration::ZERO, |held| {
            if windows.index(held.since) == windows.index(now) { held.base } else { held.allowed }
        });
        held.max(self.charged)
    }

    /// GPU time charged to a window, with the remaining allowance of the client's token of this window.
    pub fn committed(&self, window: u64) -> Duration {
        let held = self.held.filter(|held| self.account.windows().index(held.since) == window);
        let open =
            held.map_or(Duration::ZERO, |held| held.allowed.saturating_sub(self.charged.max(held.base)));
        self.account.charged(window).saturating_add(open)
    }

    /// Charges the client up to a total: time within the token's allowance to the window of the token, the rest to the window of
    /// `now`.
    fn charge(&mut self, now: Timestamp, total: Duration) {
        let more = total.saturating_sub(self.charged);
        let windows = self.account.windows();
        let mut earlier = Duration::ZERO;
        if let Some(held) = self.held {
            let same = windows.index(held.since) == windows.index(now);
            let (upto, when) = if same { (held.base, held.replaced) } else { (held.allowed, held.since) };
            earlier = upto.saturating_sub(self.charged).min(more);
            self.account.charge(when, earlier);
        }
        self.charged = self.charged.saturating_add(more);
        self.account.charge(now, more - earlier);
    }
}

/// All tokens, from events and actions alone.
#[derive(Debug, Clone)]
pub struct Book {
    terms: Terms,
    clients: BTreeMap<ClientId, Client>,
    /// The windows of each GPU with clients.
    windows: BTreeMap<GpuId, Windows>,
    /// The latest generation of each slot.
    generations: BTreeMap<u32, u32>,
}

impl Book {
    /// An empty book.
    pub const fn new(terms: Terms) -> Self {
        Self { terms, clients: BTreeMap::new(), windows: BTreeMap::new(), generations: BTreeMap::new() }
    }

    /// The terms of the scheduler.
    pub const fn terms(&self) -> Terms {
        self.terms
    }

    /// The windows for the settlement of quotas on a GPU with clients.
    pub fn windows(&self, gpu: GpuId) -> Option<Windows> {
        self.windows.get(&gpu).copied()
    }

    /// All clients, by id.
    pub fn clients(&self) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients.iter().map(|(id, client)| (*id, client))
    }

    /// The entry of a client, if any.
    pub fn client(&self, client: ClientId) -> Option<&Client> {
        self.clients.get(&client)
    }

    /// The clients of one GPU, by id.
    pub fn on(&self, gpu: GpuId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients().filter(move |(_, client)| client.gpu == gpu)
    }

    /// The GPUs with clients.
    pub fn gpus(&self) -> Vec<GpuId> {
        let mut gpus: Vec<_> = self.clients.values().map(|client| client.gpu).collect();
        gpus.sort_unstable();
        gpus.dedup();
        gpus
    }

    /// The sum of the holders' SMs on a GPU, in basis points.
    pub fn sm_held(&self, gpu: GpuId) -> u32 {
        self.on(gpu).filter_map(|(_, client)| client.held).map(|held| u32::from(held.sm.get())).sum()
    }

    /// The client in a slot.
    pub fn in_slot(&self, slot: u32) -> Option<ClientId> {
        let first = ClientId::new(slot, 0);
        let last = ClientId::new(slot, u32::MAX);
        self.clients.range(first..=last).next().map(|(id, _)| *id)
    }

    /// A new generation for the slot.
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

    /// Writes an accepted event.
    fn write_event(&mut self, now: Timestamp, event: TokenEvent) -> Result<(), String> {
        // A window may have ended since the last call, with these tokens still held.
        let holders: Vec<_> =
            self.clients.iter().filter(|(_, entry)| entry.held.is_some()).map(|(id, _)| *id).collect();
        for client in holders {
            self.lasted(now, client)?;
        }
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                let windows = *self.windows.entry(gpu).or_insert_with(|| self.terms.windows(now));
                let account = Account::new(windows, now, share.quota);
                let (said, charged) = (Duration::ZERO, Duration::ZERO);
                let entry = Client { gpu, share, held: None, asked: None, account, said, charged };
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
            TokenEvent::Used { client, used, state } => {
                let entry = self.entry(client)?;
                if used < entry.said {
                    return Err(format!("{client} said {used} after {}, and was not refused", entry.said));
                }
                entry.said = used;
                entry.charge(now, used);
                self.lasted(now, client)?;
                let entry = self.entry(client)?;
                if matches!(state, UseState::Idle | UseState::Wants) {
                    entry.held = None;
                }
                entry.asked = match state {
                    UseState::Wants | UseState::Extends => entry.asked.or(Some(now)),
                    UseState::Holds if entry.held.is_none() => entry.asked,
                    UseState::Idle | UseState::Holds => None,
                };
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes the length of a client's token so far, if any. The longer it is, the more may be owed to the clients of its GPU.
    fn lasted(&mut self, now: Timestamp, client: ClientId) -> Result<(), String> {
        let terms = self.terms;
        let entry = self.entry(client)?;
        let (gpu, charged) = (entry.gpu, entry.charged);
        if let Some((held, due)) = entry.held.zip(entry.due(terms)) {
            let longest = now.min(due).saturating_since(held.since).max(charged.saturating_sub(held.base));
            for other in self.clients.values_mut().filter(|other| other.gpu == gpu) {
                other.account.lasted(longest);
            }
        }
        Ok(())
    }

    /// Writes an action, and refuses an action without a basis in any token.
    fn write_action(&mut self, now: Timestamp, action: TokenAction) -> Result<(), String> {
        match action {
            TokenAction::Allow { client, allowed, until } => self.write_grant(now, client, allowed, until),
            TokenAction::Recall { client, allowed } => match self.entry(client)?.held {
                Some(held) if allowed < held.allowed && now < held.until => Ok(()),
                held => Err(format!("{client} was recalled to {allowed}, and holds {held:?}")),
            },
            TokenAction::Stop { client } => {
                let terms = self.terms;
                let entry = self.entry(client)?;
                let Some(due) = entry.due(terms) else {
                    return Err(format!("{client} was stopped, and holds nothing"));
                };
                if now < due {
                    return Err(format!("{client} was stopped at {now}, before {due}"));
                }
                let allowed = entry.held.map_or(Duration::ZERO, |held| held.allowed);
                entry.charge(due, allowed);
                self.lasted(due, client)?;
                self.entry(client)?.held = None;
                Ok(())
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
        allowed: Duration,
        until: Timestamp,
    ) -> Result<(), String> {
        let entry = self.entry(client)?;
        let windows = entry.account.windows();
        let window = windows.index(now);
        if until <= now || until > windows.end(window) {
            return Err(format!(
                "{client} was allowed to launch until {until}, which is not between {now} and the end of its window at {}",
                windows.end(window)
            ));
        }
        if allowed <= entry.charged {
            return Err(format!(
                "{client} was allowed {allowed} in all, and has used {} of it",
                entry.charged
            ));
        }
        let same = entry.held.filter(|held| windows.index(held.since) == window);
        if let Some(held) = same
            && (allowed < held.allowed || until < held.until)
        {
            return Err(format!("{client} was extended from {held:?} to less: {allowed}, {until}"));
        }
        let replaced = entry.held.map_or(now, |held| held.since);
        let fresh =
            Held { since: now, replaced, base: entry.begins(now), allowed, until, sm: entry.share.sm };
        entry.held = Some(Held { allowed, until, ..same.unwrap_or(fresh) });
        entry.asked = None;
        Ok(())
    }

    fn entry(&mut self, client: ClientId) -> Result<&mut Client, String> {
        self.clients.get_mut(&client).ok_or_else(|| format!("{client} is not there"))
    }
}

/// The number of calls that a violation tells of.
const CALLS_KEPT: usize = 24;

/// The watch over one scheduler, which must see every successful call. See the [module](self).
#[derive(Debug)]
pub struct Audit {
    book: Book,
    checks: Vec<check::Check>,
    log: Log,
    calls: u64,
}

impl Audit {
    /// An audit with these checkers, over a scheduler without clients.
    pub fn new(terms: Terms, checks: Vec<check::Check>) -> Self {
        Self { book: Book::new(terms), checks, log: Log::keeping(CALLS_KEPT), calls: 0 }
    }

    /// The book of tokens.
    pub const fn book(&self) -> &Book {
        &self.book
    }

    /// A hash of the log, equal exactly for runs with the same calls.
    pub fn log_hash(&self) -> u64 {
        self.log.hash()
    }

    /// The number of tests of each checker's claim, by name.
    pub fn tested(&self) -> Vec<(&'static str, u64)> {
        self.checks.iter().map(|check| (check.name, check.tested)).collect()
    }

    /// The number of calls so far.
    pub const fn calls(&self) -> u64 {
        self.calls
    }

    /// Takes one successful call.
    pub fn observe(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &[TokenAction],
        scheduler: &dyn TokenScheduler,
    ) -> Result<(), Story> {
        let line = format!("{event:?} -> {actions:?}");
        self.log.mix(&[now.as_nanos()]);
        self.log.mix_bytes(line.as_bytes());
        self.log.line(now, || line);
        let result = self.take(now, event, actions, scheduler);
        self.calls += 1;
        result
    }

    /// A violation found by the driver itself.
    pub fn violation(&self, claim: &'static str, now: Timestamp, wrong: String) -> Story {
        let at = format!("call {}, {now}", self.calls);
        Story { claim, seed: None, at, wrong, events: self.log.lines() }
    }

    fn take(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &[TokenAction],
        scheduler: &dyn TokenScheduler,
    ) -> Result<(), Story> {
        // An engine first obeys its deadlines, so stops at the head of its orders came before the event.
        let overdue = actions.iter().take_while(|action| matches!(action, TokenAction::Stop { .. })).count();
        let (overdue, rest) = actions.split_at(overdue);
        let overdue = overdue.iter().map(|action| Change::Action(*action));
        let rest = rest.iter().map(|action| Change::Action(*action));
        for change in overdue.chain([Change::Event(event)]).chain(rest) {
            self.ask(now, |checker, book| checker.before(book, now, change))?;
            self.book
                .write(now, change)
                .map_err(|message| self.violation("life of a token", now, message))?;
            self.ask(now, |checker, book| checker.after(book, now, change))?;
        }
        self.ask(now, |checker, book| checker.settled(book, now, scheduler))
    }

    /// Asks every checker.
    fn ask(
        &mut self,
        now: Timestamp,
        ask: impl Fn(&mut dyn check::Checker, &Book) -> Result<u64, String>,
    ) -> Result<(), Story> {
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
