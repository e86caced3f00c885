//! The multi-token scheduler (FaST-GShare, section 3.3.2), with its gaps closed.
//!
//! # Problem
//! Several clients share the time and the SMs of a GPU. Each has a quota request `r` (guaranteed share of time), a
//! quota limit `l` (most it may take) and an SM partition `s`. Decide who holds a token, so that
//! - the SMs of the holders never add up to more than the whole GPU;
//! - nobody takes more than `l` of a window, and overuse is paid back;
//! - whoever asks gets `r` before anyone gets more than his request;
//! - time that nobody claims goes to whoever can use it.
//!
//! # Terms
//! The words of [`gshare_core::token`], and per client and window of length `W`:
//! - **used**: GPU time charged in this window, plus the overuse carried into it;
//! - **outstanding**: the part of the budget of this window's lease, if it holds one, that has not been charged;
//! - **running**: what was charged for the lease that it holds beyond the time since that was granted: a kernel is charged when
//!   it is launched;
//! - **left**: how long what it holds still runs at least: what is outstanding, or running;
//! - **committed** `u`: used + outstanding;
//! - **owed**: GPU time that others overran of what this client requested in the window before. It comes on top of its request
//!   and its limit in this window;
//! - **miss** `r*W + owed - u` (the paper's `Q_miss`) and **remain** `l*W + owed - u` (its `Q_remain`);
//! - **unmet**: miss is above zero; **met** otherwise;
//! - **spare**: time used beyond the request in earlier windows, fading: at each window's end an eighth of it (rounded up)
//!   is forgotten and what was used beyond the request in that window, `max(0, used - r*W - owed)`, is added; if clients of the
//!   GPU came, left or changed since the last end of a window, or nothing happened for 320 windows, all spare is zero then;
//! - **missed** of a window: what those who held a token or waited for one at its end then missed, at most `r*W` each. Others
//!   overran it, or it was nobody's: what hosts pause for that wait for each of their short kernels while they hold a token, and
//!   hand-overs;
//! - **lost**: what was missed of a window beyond the overuse carried from it, of all clients of the GPU together;
//! - **ahead**: what a client has more (below zero: less) than its part of what was got in windows of which something was lost,
//!   at most `max_token` either way;
//! - **short**: a window of which more than a quarter of their requests was lost;
//! - **part**: after a short window, the time by the clock that a client may hold a token at a stretch;
//! - **due**: a client's miss; without a part, less by what it is ahead, if that is more than
//!   `max_token / 4`, but at least half of the miss;
//! - **loose**: a window at whose start the limits of the GPU's clients add up to less than the whole;
//! - **waiting**: has requested a token (or more time) and not been given it: **throttled** while remain is zero; **paced** in a
//!   loose window, from its start until the part `c / (l*W)` of it is over, `c` being the overuse carried into it; else **ready**.
//!
//! # Algorithm
//! Windows of a GPU follow each other without a gap from its first client on. A lease belongs to one window: neither its
//! budget nor its expiry passes the window's end. On every event, at time `now`:
//!
//! 1. **Catch up**, in the order of time: revoke every lease with `expires + grace <= now` and count its whole budget
//!    as used; at each window's end bring spare up to date, then set `used = max(0, used - l*W - owed)`: what was beyond the
//!    limit (the largest in force in that window) and what was owed is the overuse that is carried. It comes back to
//!    those who missed something: each is owed its part of it in proportion to what he missed, and no more than that.
//!    Where the rest was lost, add up what each of its clients got of its request (`r*W` less what it missed, and what it is
//!    owed for it) and was ahead; each is ahead by what it has more than its part of that, in proportion to the requests.
//!    After a short window each also has a part of `W * r / sum of r`, at least `r*W` and `max_token / 4`. After a window in
//!    which clients came, left or changed, and after one without an event, nobody is owed anything, is ahead or has a part.
//! 2. **Account** for the event. Usage counts for the window its lease belongs to. When that window is the one before
//!    this, what it changes is spare and what that window left: overuse, and what all clients of the GPU are owed and ahead.
//!    When it is older, what it adds is charged to this window.
//! 3. **Dispatch** on the GPU concerned: go through the ready clients in the order of
//!    - unmet before met;
//!    - unmet: `(u - owed + ahead) / r` ascending (the least served in proportion first), less a twelfth of the time that it waits
//!      (of four windows at most): whole kernels divide windows into equal parts but for microseconds. Who has had no token in this
//!      window is taken to be ahead by nothing, since who is ahead gets less, and not later. Last who still holds a token of an
//!      earlier window, since a kernel under it may not be charged yet;
//!    - met: `spare + u - r*W - owed` ascending (the least beyond its request first, in this window and before);
//!    - then who has waited longest, then the lower slot;
//!
//!    Give each a token if its SMs fit. The first that does not fit (the **head**) gets a **reservation**: from the
//!    holders' latest release times follows when there will be room for it at the latest; those behind it (up to
//!    `backfill_depth`) may be given a token only if they are sure to release it by then or leave enough SMs beside it.
//!    When a grant gives SMs back (a new lease with fewer than the one it replaces), it is gone through anew.
//!
//! A new token's budget is `min(max_token, remain, window end - now - running)`. While `n > 1` clients are ready (this one and
//! those that are served before it in this round included), an unmet one's is also at most what is due to it, and a met
//! one's at most `max((window end - now) / n, max_token / 4)`. It expires after `left + budget + slack`, at the latest after the
//! client's part, if it has one, and at the window's end. A client behind a reservation gets at most the time until then,
//! less what is left, slack and grace, and nothing below `min_token`.
//!
//! A holder that asks again is a ready client that needs no more SMs: its lease is extended by a budget of the same
//! rule, on top of the larger of its budget and what it was charged. In a new window it gets a new lease in place of the old
//! one. One whose kernel runs until the window's end gets neither: it goes on waiting, and has its place in the order when it
//! returns what it holds. One that returns a token and wants the next at once takes its place before anyone is served; a request that
//! came a moment later would find its turn given away. If it could use nothing of that token, it has waited since it asked for it:
//! the last of a window may be shorter than a hand-over.
//!
//! ## Example
//! `W` = 100 ms, tokens of 10 ms, SMs 100 % each. A has 20%:20%, B 30%:100%; both return a token when it is used up and
//! ask again as they do. A asked first and runs 0-10 ms, which is half of its request; B runs 10-20 ms, a third of its own, and so
//! 20-30 ms as well; A runs 30-40 ms: its remain is 0, it is throttled until 100 ms. B runs 40-50 ms; its request is met, nobody
//! else is ready, and it goes on 50-100 ms: A used 20 ms, B 80 ms.
//!
//! ## Example of short windows
//! A (30 %) and B (70 %) run kernels of 10 us and wait for each; their hosts need 20 us in between. A token of 10 ms expires
//! after 12 ms and is 4 ms of GPU time, and a window has eight of them. Each by itself would be divided 3:5, whatever went
//! before: 37 % for A. Now A is 12 - 0.3 * 32 = 2.4 ms ahead after the first and B as much behind, A gets two tokens in the
//! second, and so on: 30 % of what there is. Of A (10 %) and B (90 %), A's part is 10 ms: a token of that
//! length in each window, and not of 12 ms. If their hosts need 1 us, nine tokens are 3:6, and A has its 30 ms when the window
//! ends: the 13 ms that were lost were B's alone. Then A is 4 ms ahead, its third token is 6 ms, and B has 4 ms more.
//!
//! ## Example of long kernels
//! A (25 %), B (25 %) and C (50 %) run kernels of 20 ms, which nothing stops. A window is A, B, C, C, A: A used 40 ms of 25 and
//! carries 15 into the next, B missed 5 and C 10. If that were forgotten, the next window would have 10, 25 and 50 ms to give and 15
//! for nobody. B is owed 5 and C 10: the next window's 100 ms are A's 10, B's 30 and C's 60.
//!
//! # Invariants
//! - holders' SMs + free SMs = the whole; so the holders' sum never passes it, within one round either;
//! - a client is at most one of: ready, paced, throttled; only waiting clients are any of these;
//! - budgets granted in a window <= l*W + owed - overuse carried into it;
//! - what is owed in a window, by all together, <= the overuse carried into it;
//! - every holder is in the table of release times.
//!
//! From these: a client's GPU time in a window is at most its limit, what it missed in the one before, and the kernel it could not
//! stop; if the requests of a GPU add up to at most the whole and its clients keep their GPU busy while they hold a token,
//! every request is met in every window (at each instant an unmet client runs, until none is left), less the hand-over times
//! and what is owed for it in the next. For larger sums of requests (which SM partitions allow) no greedy order proves them.
//! Who is paced loses nothing: afterwards it needs at most its limit's part of what is left of the window, and in a loose window
//! those parts fit.
//! An unmet client waits at most for one token of each other client, its slack and grace, and one window.
//! A client whose request is 0 is promised nothing.
//!
//! # Cost
//! O(log n) per event for n clients on the GPU, plus eight candidates, the holders looked at for a reservation and at most
//! `backfill_depth` candidates behind it; O(n log n) once a window, and when a lease of the one before is charged more. About
//! 250 bytes per client.
//!
//! # Differences from the paper
//! - The paper sorts by `Q_miss` in absolute time: with requests that add up to more than the GPU, the small ones are
//!   then never served. Unmet clients are ordered by the share of their request that they got.
//! - "Returns tokens for the head pods until one does not fit": a narrow client behind a wide one is let in if it cannot
//!   delay it, and a wide one is never overtaken for good. SMs are counted as they are granted, not after the round.
//! - Time beyond the requests is shared by what each client got of it lately, and in tokens that shrink with the number
//!   of those who want it: in absolute `Q_miss` and whole tokens the same few take the end of every window.
//! - A token may not exceed what remains of the limit (the paper's full token overshoots by up to one token), and
//!   overuse is carried, so that the limit holds over time for kernels longer than a quota.
//! - What a window of few tokens cannot divide in proportion is made good in the next ones, and nobody has to skip one for
//!   that.
//! - Kernels longer than tokens cannot be cut, and what one overruns is taken from those who wait. If that were forgotten, as in
//!   the paper, the GPU would be idle when the overuse is paid back: of caps of 10, 20, 30 and 40 % with kernels of 20 ms the
//!   last had 30 %.
//! - Where the limits leave time over, overuse is paid back before more is given: a client of 20 % with kernels of 30 ms would
//!   otherwise run at the start of two windows and not in the third. Where they do not, the time would be lost.
//! - Tokens are leases: a client that dies or hangs loses its SMs at once or at the end of its lease.
use super::ConfigError;
use super::ledger::{Gpu, Ledger, Rank};
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, Duration, Engine, Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler,
};

/// Settings of [`MultiToken`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct MultiTokenConfig {
    /// Length of the window over which quotas are settled. 100 ms: ten turns of 10 ms, and nobody who is owed time is
    /// without it for longer than people notice.
    #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
    pub window: Duration,
    /// The longest token. 10 ms: a hand-over (tens of microseconds) costs well under 1 %.
    #[cfg_attr(feature = "serde", serde(rename = "max_token_ns"))]
    pub max_token: Duration,
    /// The shortest token worth giving to a client that runs ahead of a reservation. 500 us.
    #[cfg_attr(feature = "serde", serde(rename = "min_token_ns"))]
    pub min_token: Duration,
    /// Time beyond its budget after which a token expires. 2 ms: the last kernels may complete under it.
    #[cfg_attr(feature = "serde", serde(rename = "slack_ns"))]
    pub slack: Duration,
    /// Time after its expiry at which a token that was not returned is revoked. 5 ms: the return is on its way.
    #[cfg_attr(feature = "serde", serde(rename = "grace_ns"))]
    pub grace: Duration,
    /// The most overuse that is carried. 10 s: a client that runs one endless kernel is not locked out for ever.
    #[cfg_attr(feature = "serde", serde(rename = "max_debt_ns"))]
    pub max_debt: Duration,
    /// How many ready clients behind a reservation are looked at. 16: more rarely finds more.
    pub backfill_depth: u32,
    /// Number of client slots. 4,096.
    pub max_clients: u32,
    /// Number of GPUs. 64.
    pub max_gpus: u32,
}

impl Default for MultiTokenConfig {
    fn default() -> Self {
        Self {
            window: Duration::from_millis(100),
            max_token: Duration::from_millis(10),
            min_token: Duration::from_micros(500),
            slack: Duration::from_millis(2),
            grace: Duration::from_millis(5),
            max_debt: Duration::from_secs(10),
            backfill_depth: 16,
            max_clients: 4096,
            max_gpus: 64,
        }
    }
}

impl MultiTokenConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let check = |ok: bool, field, value: String, bound| {
            if ok { Ok(()) } else { Err(ConfigError { field, value, bound }) }
        };
        let range = |time: Duration, low: Duration, high: Duration| (low..=high).contains(&time);
        check(
            range(self.window, Duration::from_millis(1), Duration::from_secs(60)),
            "window",
            self.window.to_string(),
            "need 1ms to 60s",
        )?;
        check(
            range(self.max_token, Duration::from_micros(10), self.window),
            "max_token",
            self.max_token.to_string(),
            "need 10us to the window",
        )?;
        check(
            range(self.min_token, Duration::from_nanos(1), self.max_token),
            "min_token",
            self.min_token.to_string(),
            "need 1ns to max_token",
        )?;
        let minute = Duration::from_secs(60);
        check(self.slack <= minute, "slack", self.slack.to_string(), "need at most 60s")?;
        check(self.grace <= minute, "grace", self.grace.to_string(), "need at most 60s")?;
        check(
            range(self.max_debt, self.window, Duration::from_secs(3600)),
            "max_debt",
            self.max_debt.to_string(),
            "need the window to 3600s",
        )?;
        check(
            (1..=1 << 20).contains(&self.max_clients),
            "max_clients",
            self.max_clients.to_string(),
            "need 1 to 1048576",
        )?;
        check((1..=4096).contains(&self.max_gpus), "max_gpus", self.max_gpus.to_string(), "need 1 to 4096")?;
        check(
            self.backfill_depth <= 4096,
            "backfill_depth",
            self.backfill_depth.to_string(),
            "need at most 4096",
        )
    }
}

/// The multi-token scheduler. See the [module](self).
#[derive(Debug)]
pub struct MultiToken {
    ledger: Ledger,
    scratch: Vec<Rank>,
}

impl MultiToken {
    /// A scheduler without clients.
    pub fn new(config: MultiTokenConfig) -> Result<Self, ConfigError> {
        Ok(Self { ledger: Ledger::new(config, true)?, scratch: Vec::new() })
    }

    /// Step 3. See the [module](self).
    fn dispatch(&mut self, index: usize, actions: &mut Vec<TokenAction>) {
        let now = self.ledger.now;
        let (window, window_end) = (self.ledger.gpus[index].window, self.ledger.gpus[index].window_end);
        let ready = self.ledger.gpus[index].ready.len() as u64;
        let mut queue = core::mem::take(&mut self.scratch);
        let mut reservation: Option<Reservation> = None;
        let mut behind = 0;
        // Granting takes the candidate out of the set that is walked: take as many as can be looked at first.
        let mut from = None;
        'rounds: loop {
            queue.clear();
            let gpu = &self.ledger.gpus[index];
            let rest = (
                from.map_or(core::ops::Bound::Unbounded, core::ops::Bound::Excluded),
                core::ops::Bound::Unbounded,
            );
            queue.extend(gpu.ready.range::<Rank, _>(rest).take(BATCH));
            let Some(&last) = queue.last() else { break };
            for &rank in &queue {
                if reservation.is_some() {
                    behind += 1;
                    if behind > self.ledger.config.backfill_depth {
                        break 'rounds;
                    }
                }
                let Some((Some(client), _)) = self.ledger.slots.get(rank.slot as usize) else { continue };
                let gpu = &self.ledger.gpus[index];
                let same_lease = client.holds.filter(|lease| lease.window == window);
                let held = client.holds.map_or(0, |lease| lease.sm);
                let sm = same_lease.map_or(client.share.sm.get(), |lease| lease.sm);
                let needed = sm.saturating_sub(held);
                // What runs is over first.
                let rest = window_end.saturating_since(now).saturating_sub(client.running(now));
                let mut budget = self.ledger.config.max_token.min(client.remain(window)).min(rest);
                if ready > 1 {
                    let fair = Duration::from_nanos(window_end.saturating_since(now).as_nanos() / ready);
                    let least = Duration::from_nanos(self.ledger.config.max_token.as_nanos().div_ceil(4));
                    budget = budget.min(if rank.met { fair.max(least) } else { client.due(window, least) });
                }
                let part = client.shortfall.and_then(|shortfall| shortfall.part);
                let left = client.left(window, now);
                let overhead =
                    left.saturating_add(self.ledger.config.slack).saturating_add(self.ledger.config.grace);
                match &mut reservation {
                    None if needed > gpu.free => {
                        reservation = Some(self.reserve(gpu, rank.slot, needed));
                        continue;
                    }
                    None => {}
                    Some(_) if needed > gpu.free => continue,
                    // There is room beside the head even when it runs.
                    Some(reserved) if sm <= reserved.beside => reserved.beside -= sm,
                    Some(reserved) => {
                        budget = budget.min(reserved.at.saturating_since(now).saturating_sub(overhead));
                        if budget < self.ledger.config.min_token {
                            continue;
                        }
                    }
                }
                if !budget.is_zero() {
                    let free = self.ledger.gpus[index].free;
                    let until = part.map_or(window_end, |part| window_end.min(now.saturating_add(part)));
                    self.ledger.grant(rank.slot, budget, sm, until, actions);
                    if self.ledger.gpus[index].free > free {
                        // It gave SMs back with the lease that was replaced: who did not fit may fit now.
                        (reservation, behind, from) = (None, 0, None);
                        continue 'rounds;
                    }
                }
            }
            from = Some(last);
        }
        queue.clear();
        self.scratch = queue;
    }

    /// When there will be `needed` SMs at the latest, and how many beside them.
    fn reserve(&self, gpu: &Gpu, head: u32, needed: u16) -> Reservation {
        let mut free = gpu.free;
        for &(release, slot) in gpu.releases.iter().filter(|&&(_, slot)| slot != head) {
            let held = self.ledger.slots[slot as usize].0.as_ref().and_then(|client| client.holds);
            free += held.map_or(0, |lease| lease.sm);
            if free >= needed {
                return Reservation { at: release, beside: free - needed };
            }
        }
        // Free and held SMs are the whole GPU, and nobody needs more.
        Reservation { at: self.ledger.now, beside: 0 }
    }
}

/// How many ready clients are taken out of the order at once.
const BATCH: usize = 8;

/// Room promised to the first ready client that does not fit.
struct Reservation {
    at: Timestamp,
    /// SMs that stay free beside it then.
    beside: u16,
}

impl Engine for MultiToken {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.ledger.account(now, event, actions)?;
        for index in 0..self.ledger.gpus.len() {
            if core::mem::take(&mut self.ledger.gpus[index].stirred) {
                self.dispatch(index, actions);
            }
        }
        if cfg!(debug_assertions) {
            self.ledger.invariants();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.ledger.next_deadline()
    }
}

impl TokenScheduler for MultiToken {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.ledger.status(client)
    }

    fn window(&self) -> Duration {
        self.ledger.config.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::token::RevokeReason;
    use gshare_core::{GpuId, LeaseId, QuotaRange, Share, SmShare};

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn at(n: u64) -> Timestamp {
        Timestamp::from_millis(n)
    }

    fn id(slot: u32) -> ClientId {
        ClientId::new(slot, 0)
    }

    fn share(quota: &str, sm: u16) -> Share {
        Share { quota: quota.parse().unwrap(), sm: SmShare::from_percent(sm).unwrap() }
    }

    /// A GPU whose clients always want to launch, use every token to the full and return it the moment it is used up.
    struct Bench {
        engine: MultiToken,
        /// Client, lease, time at which it is used up, GPU time it will have used.
        running: Vec<(ClientId, LeaseId, Timestamp, Duration)>,
        used: std::collections::BTreeMap<ClientId, Duration>,
        /// Length of every client's kernels: tokens are overrun up to a whole one.
        kernel: Duration,
        now: Timestamp,
        log: Vec<(Timestamp, TokenAction)>,
    }

    impl Bench {
        fn new(clients: &[(&str, u16)], kernel: Duration) -> Self {
            Self::with(MultiTokenConfig::default(), clients, kernel)
        }

        fn with(config: MultiTokenConfig, clients: &[(&str, u16)], kernel: Duration) -> Self {
            let engine = MultiToken::new(config).unwrap();
            let mut bench = Self {
                engine,
                running: Vec::new(),
                used: Default::default(),
                kernel,
                now: Timestamp::ZERO,
                log: Vec::new(),
            };
            for (slot, (quota, sm)) in (0..).zip(clients) {
                bench.join(slot, quota, *sm);
            }
            for slot in 0..clients.len() as u32 {
                bench.send(TokenEvent::TokenRequested { client: id(slot) });
            }
            bench
        }

        fn join(&mut self, slot: u32, quota: &str, sm: u16) {
            self.send(TokenEvent::ClientJoined { client: id(slot), gpu: GpuId(0), share: share(quota, sm) });
        }

        fn send(&mut self, event: TokenEvent) {
            let mut actions = Vec::new();
            self.engine.handle(self.now, event, &mut actions).unwrap();
            for action in actions {
                self.log.push((self.now, action));
                if let TokenAction::Grant { client, lease, budget, .. } = action {
                    let kernel = self.kernel.as_nanos();
                    let used = Duration::from_nanos(budget.as_nanos().div_ceil(kernel) * kernel);
                    self.running.retain(|&(other, ..)| other != client);
                    self.running.push((client, lease, self.now + used, used));
                }
            }
        }

        fn run_until(&mut self, end: Timestamp) {
            loop {
                let next = self.running.iter().map(|&(client, _, done, _)| (done, client)).min();
                let deadline = self.engine.next_deadline();
                match (next, deadline) {
                    (Some((done, client)), deadline)
                        if done <= end && deadline.is_none_or(|at| done <= at) =>
                    {
                        let (_, lease, _, used) =
                            self.running.remove(self.running.iter().position(|run| run.0 == client).unwrap());
                        self.now = done;
                        *self.used.entry(client).or_default() += used;
                        self.send(TokenEvent::TokenReturned { client, lease, used, again: true });
                    }
                    (_, Some(deadline)) if deadline <= end => {
                        self.now = deadline;
                        self.send(TokenEvent::DeadlineReached);
                    }
                    _ => break,
                }
            }
            self.now = end;
        }

        fn used_ms(&self, slot: u32) -> u64 {
            self.used.get(&id(slot)).map_or(0, |used| used.as_nanos() / 1_000_000)
        }
    }

    /// The worked example of the module's essay.
    #[test]
    fn the_example_of_the_essay() {
        let mut bench = Bench::new(&[("0.2:0.2", 100), ("0.3:1", 100)], ms(1));
        bench.run_until(at(100));
        let grants: Vec<_> = bench
            .log
            .iter()
            .filter_map(|(now, action)| match action {
                TokenAction::Grant { client, .. } => Some((now.as_nanos() / 1_000_000, client.slot())),
                _ => None,
            })
            .collect();
        assert_eq!(grants[..6], [(0, 0), (10, 1), (20, 1), (30, 0), (40, 1), (50, 1)]);
        assert_eq!((bench.used_ms(0), bench.used_ms(1)), (20, 80));
    }

    /// FaST-GShare, section 3.3.2: pods with no `Q_remain` wait for the next window.
    #[test]
    fn a_client_alone_keeps_its_limit_in_every_window() {
        for limit in [10, 20, 50, 90] {
            let quota = format!("0.{limit:02}");
            let mut bench = Bench::new(&[(quota.as_str(), 100)], ms(1));
            bench.run_until(at(1_000));
            assert_eq!(bench.used_ms(0), limit * 10);
        }
    }

    /// Kernels longer than the quota of a window: the overuse is carried, so the limit holds over time.
    #[test]
    fn overuse_is_paid_back() {
        let mut bench = Bench::new(&[("0.1:0.1", 100)], ms(30));
        bench.run_until(at(3_000));
        assert!((270..=330).contains(&bench.used_ms(0)), "{}", bench.used_ms(0));
    }

    /// The paper's order by absolute `Q_miss` would never serve the small one.
    #[test]
    fn a_small_request_is_served_beside_large_ones_that_overbook_the_gpu() {
        let clients = [("0.5:1", 100), ("0.5:1", 100), ("0.5:1", 100), ("0.05:1", 100)];
        let mut bench = Bench::new(&clients, ms(1));
        bench.run_until(at(10_000));
        assert!(bench.used_ms(3) >= 250, "{} ms of the 500 it asked for", bench.used_ms(3));
    }

    /// "Stop at the first pod that does not fit", with SMs counted after the round, would grant both at once.
    #[test]
    fn two_clients_of_60_percent_never_hold_together() {
        let mut bench = Bench::new(&[("0.4:1", 60), ("0.4:1", 60)], ms(1));
        bench.run_until(at(1_000));
        assert_eq!(bench.used_ms(0) + bench.used_ms(1), 1_000, "one at a time, and always one");
    }

    #[test]
    fn narrow_clients_run_side_by_side() {
        let mut bench = Bench::new(&[("0.9:0.9", 50), ("0.9:0.9", 50)], ms(1));
        bench.run_until(at(1_000));
        assert_eq!((bench.used_ms(0), bench.used_ms(1)), (900, 900));
    }

    #[test]
    fn a_wide_client_is_not_starved_by_narrow_ones() {
        let clients = [("0.3:1", 40), ("0.3:1", 40), ("0.3:1", 40), ("0.3:0.3", 100)];
        let mut bench = Bench::new(&clients, ms(1));
        bench.run_until(at(2_000));
        assert!(bench.used_ms(3) >= 570, "{} ms of 600", bench.used_ms(3));
    }

    #[test]
    fn a_client_that_leaves_frees_its_sms_at_once() {
        let mut bench = Bench::new(&[("0.5:1", 100), ("0.5:1", 100)], ms(1));
        bench.log.clear();
        bench.send(TokenEvent::ClientLeft { client: id(0) });
        assert!(matches!(bench.log[..], [(_, TokenAction::Grant { client, .. })] if client == id(1)));
        let mut actions = Vec::new();
        let gone = bench.engine.handle(bench.now, TokenEvent::TokenRequested { client: id(0) }, &mut actions);
        assert_eq!(gone, Err(TokenError::UnknownClient { client: id(0) }));
    }

    #[test]
    fn a_token_that_is_not_returned_is_revoked_and_its_late_return_corrects_the_account() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.running.clear();
        let deadline = bench.engine.next_deadline().unwrap();
        assert_eq!(deadline, at(10 + 2 + 5), "budget, slack and grace");
        bench.now = deadline;
        bench.log.clear();
        bench.send(TokenEvent::DeadlineReached);
        let [(_, TokenAction::Revoke { lease, reason: RevokeReason::Expired, .. })] = bench.log[..] else {
            panic!("{:?}", bench.log);
        };
        assert_eq!(bench.engine.client(id(0)).unwrap().window_used, ms(10), "the whole budget");
        bench.send(TokenEvent::TokenReturned { client: id(0), lease, used: ms(3), again: false });
        assert_eq!(bench.engine.client(id(0)).unwrap().window_used, ms(3));
        let again = TokenEvent::TokenReturned { client: id(0), lease, used: ms(3), again: true };
        let stale = bench.engine.handle(bench.now, again, &mut Vec::new());
        assert_eq!(stale, Err(TokenError::StaleLease { client: id(0), lease }));
    }

    /// A return that crosses the end of its window counts there: what it adds to the overuse is carried.
    #[test]
    fn a_return_after_the_end_of_its_window_counts_for_that_window() {
        let config = MultiTokenConfig { grace: ms(200), ..Default::default() };
        let mut bench = Bench::with(config, &[("0.1:0.1", 100)], ms(1));
        let lease = bench.running[0].1;
        bench.running.clear();
        bench.now = at(3);
        bench.send(TokenEvent::UsageReported { client: id(0), lease, used: ms(3) });
        bench.now = at(101);
        bench.send(TokenEvent::UsageReported { client: id(0), lease, used: ms(12) });
        assert_eq!(bench.engine.client(id(0)).unwrap().window_used, ms(2), "12 ms used of a limit of 10");
    }

    #[test]
    fn a_holder_that_asks_early_is_extended_while_nobody_else_wants_the_gpu() {
        let mut bench = Bench::new(&[("0.5:1", 100)], ms(1));
        bench.log.clear();
        bench.now = at(5);
        bench.send(TokenEvent::TokenRequested { client: id(0) });
        let [(_, TokenAction::Grant { lease, budget, .. })] = bench.log[..] else {
            panic!("{:?}", bench.log)
        };
        assert_eq!((lease, budget), (LeaseId(1), ms(20)));
        // Another one waits with nothing used: no further extension.
        bench.join(1, "0.5:1", 100);
        bench.send(TokenEvent::TokenRequested { client: id(1) });
        bench.log.clear();
        bench.send(TokenEvent::TokenRequested { client: id(0) });
        assert!(bench.log.is_empty(), "{:?}", bench.log);
    }

    /// Two events would let the other in between, as if the first did not want to go on.
    #[test]
    fn a_return_that_asks_again_has_its_place_before_anyone_is_served() {
        for (again, next) in [(true, 0), (false, 1)] {
            let mut bench = Bench::new(&[("0.5:1", 100), ("0.1:1", 100)], ms(1));
            bench.run_until(at(20));
            // The first is behind the second, which had all that it requested.
            let (client, lease, ..) = bench.running[0];
            assert_eq!(client, id(0), "{:?}", bench.log);
            bench.send(TokenEvent::UsageReported { client, lease, used: ms(1) });
            bench.log.clear();
            bench.send(TokenEvent::TokenReturned { client, lease, used: ms(1), again });
            let granted = bench.log.iter().find_map(|&(_, action)| match action {
                TokenAction::Grant { client, .. } => Some(client),
                _ => None,
            });
            assert_eq!(granted, Some(id(next)), "{:?}", bench.log);
        }
    }

    /// A token that its client could not use any more has not answered its request.
    #[test]
    fn a_token_that_is_returned_unused_keeps_the_place() {
        for (used, next) in [(0, 0), (1, 1)] {
            let mut bench = Bench::new(&[("0.5:1", 100), ("0.5:1", 100)], ms(1));
            let (client, lease, ..) = bench.running.remove(0);
            bench.log.clear();
            let used = Duration::from_nanos(used);
            bench.send(TokenEvent::TokenReturned { client, lease, used, again: true });
            assert!(matches!(bench.log[..], [(_, TokenAction::Grant { client, .. })] if client == id(next)));
        }
    }

    /// What it is owed is counted in parts of its request.
    #[test]
    fn a_client_that_is_owed_time_may_be_cut_to_best_effort() {
        for end in (200..1_000).step_by(7) {
            let caps = [("0.25:0.25", 100), ("0.25:0.25", 100), ("0.5:0.5", 100)];
            let mut bench = Bench::new(&caps, ms(20));
            bench.run_until(at(end));
            let Some((client, lease, ..)) = bench.running.pop() else { continue };
            bench.send(TokenEvent::TokenReturned { client, lease, used: ms(0), again: false });
            bench.send(TokenEvent::ShareChanged { client, share: share("0:0.5", 100) });
            bench.send(TokenEvent::TokenRequested { client });
            let status = bench.engine.client(client).unwrap();
            assert!(status.holds.is_some() || status.waiting_since.is_some(), "at {end}: {status:?}");
        }
    }

    #[test]
    fn throttling_says_when_there_is_time_again() {
        let mut bench = Bench::new(&[("0.1:0.1", 100)], ms(25));
        bench.run_until(at(26));
        let throttle = bench.log.iter().rev().find_map(|(_, action)| match action {
            TokenAction::Throttle { until, .. } => Some(*until),
            _ => None,
        });
        // 25 ms used of 10: after two more windows 5 ms are carried, and 5 are left; nobody else wants them, and at that pace
        // they are paid back in the middle of the next.
        assert_eq!(throttle, Some(at(200)));
        bench.log.clear();
        bench.run_until(at(249));
        assert_eq!(bench.used_ms(0), 25);
        bench.run_until(at(275));
        assert!(matches!(bench.log.last(), Some((_, TokenAction::Throttle { .. }))), "{:?}", bench.log);
        assert_eq!(bench.used_ms(0), 50);
    }

    #[test]
    fn a_share_can_change_on_the_fly() {
        let mut bench = Bench::new(&[("0.1:0.1", 100)], ms(1));
        bench.run_until(at(200));
        bench.send(TokenEvent::ShareChanged { client: id(0), share: share("0.1:0.9", 100) });
        bench.run_until(at(1_200));
        assert!((910..=920).contains(&bench.used_ms(0)), "{}", bench.used_ms(0));
    }

    /// A cut from 100 % to 1 % would otherwise lock the client out for a hundred windows.
    #[test]
    fn what_was_used_under_a_larger_limit_is_no_debt() {
        let mut bench = Bench::new(&[("0:1", 100)], ms(1));
        bench.run_until(at(90));
        bench.send(TokenEvent::ShareChanged { client: id(0), share: share("0.1:0.1", 100) });
        bench.run_until(at(100));
        assert_eq!(bench.engine.client(id(0)).unwrap().window_used, Duration::ZERO);
    }

    #[test]
    fn gpus_do_not_touch_each_other() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.send(TokenEvent::ClientJoined { client: id(9), gpu: GpuId(3), share: share("1:1", 100) });
        bench.log.clear();
        bench.send(TokenEvent::TokenRequested { client: id(9) });
        assert!(matches!(bench.log[..], [(_, TokenAction::Grant { client, .. })] if client == id(9)));
    }

    #[test]
    fn every_error_leaves_the_state_as_it_was() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.now = at(5);
        bench.send(TokenEvent::UsageReported { client: id(0), lease: LeaseId(1), used: ms(5) });
        let before = format!("{:?}", bench.engine);
        let zero_sm = Share { quota: QuotaRange::BEST_EFFORT, sm: SmShare::ZERO };
        let good = share("0.5:0.5", 100);
        let (far, ghost) = (ClientId::new(1 << 30, 0), ClientId::new(0, 1));
        let bad = [
            (at(4), TokenEvent::DeadlineReached),
            (at(6), TokenEvent::ClientJoined { client: id(0), gpu: GpuId(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: ghost, gpu: GpuId(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: far, gpu: GpuId(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: id(1), gpu: GpuId(1 << 30), share: good }),
            (at(6), TokenEvent::ClientJoined { client: id(1), gpu: GpuId(0), share: zero_sm }),
            (at(6), TokenEvent::ShareChanged { client: id(0), share: zero_sm }),
            (at(6), TokenEvent::ShareChanged { client: ghost, share: good }),
            (at(6), TokenEvent::ClientLeft { client: ghost }),
            (at(6), TokenEvent::TokenReturned { client: id(0), lease: LeaseId(7), used: ms(1), again: true }),
            (at(6), TokenEvent::UsageReported { client: id(0), lease: LeaseId(1), used: ms(4) }),
        ];
        for (now, event) in bad {
            let mut actions = Vec::new();
            assert!(bench.engine.handle(now, event, &mut actions).is_err(), "{event:?}");
            assert!(actions.is_empty());
            assert_eq!(format!("{:?}", bench.engine), before, "{event:?}");
        }
    }

    #[test]
    fn a_slot_is_reused_only_by_a_newer_generation() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.send(TokenEvent::ClientLeft { client: id(0) });
        let join = |client| TokenEvent::ClientJoined { client, gpu: GpuId(0), share: share("0.5:0.5", 100) };
        let old = bench.engine.handle(bench.now, join(id(0)), &mut Vec::new());
        assert_eq!(old, Err(TokenError::ClientExists { client: id(0) }));
        bench.send(join(ClientId::new(0, 1)));
    }

    #[test]
    fn a_bad_configuration_names_field_and_bound() {
        let text = |config: MultiTokenConfig| MultiToken::new(config).unwrap_err().to_string();
        let config = MultiTokenConfig { window: Duration::ZERO, ..Default::default() };
        assert_eq!(text(config), "window is 0ns: need 1ms to 60s");
        let config = MultiTokenConfig { max_token: ms(200), ..Default::default() };
        assert_eq!(text(config), "max_token is 200ms: need 10us to the window");
        let config = MultiTokenConfig { max_clients: 0, ..Default::default() };
        assert_eq!(text(config), "max_clients is 0: need 1 to 1048576");
    }
}
