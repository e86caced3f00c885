//! The multi-token scheduler (FaST-GShare, section 3.3.2), with lag accounting.
//!
//! # Problem
//! Clients share the time and the SMs of a GPU. Each has a guaranteed quota request `r`, a limit `l` and an SM partition `s`. The
//! scheduler picks token holders so that their SMs fit, each client gets `r` before any gets more, and none takes more than `l`.
//!
//! A kernel cannot be stopped, so a client may use more than its token allowed. A host may pause, so a client may use a tenth of the time
//! it holds the GPU. *Order* therefore follows the time a client **occupied**, and the *limit* follows the time it **used**.
//!
//! # Terms
//! The terms of [`gshare_core::token`] apply, and for each client and window of length `W`:
//! - **used**: GPU time charged in this window, plus the **overuse** (beyond the limit) carried into it;
//! - **occupied** by a token: the time since its grant, or its charge if the charge is more once the token is over;
//! - **lag**: GPU time missing from a client's share, as in EEVDF and BFQ; negative for a client beyond its share;
//! - **eligible**: a client that would still have a positive lag after occupying all of its token;
//! - **surplus**: time beyond the request in earlier windows, fading by an eighth each window;
//! - **throttled**: waiting with no limit left; **paced**: waiting to pay overuse back, where limits leave time over; **ready**: otherwise.
//!
//! # Algorithm
//! 1. **Catch up** in the order of time. A token not given back within `grace` of its end is taken back and charged in full. At the end
//!    of a window each lag grows by `r*W`. A waiting client keeps a positive lag, over as many windows as the longest recent token
//!    lasted. Time beyond a share is forgiven if no other client lost it, and clients bear hand-over losses in proportion to `r`.
//! 2. **Account**: the charge follows the client's total (see `ledger.rs`).
//! 3. **Dispatch**: eligible clients first, by the largest `lag / r` plus 1/12 of the time waited; then the others, by the smallest
//!    surplus in proportion to `l`. SLO-sensitive clients go before all others until each has had its `r` of this window. The first client
//!    without room gets a **reservation**; the next `backfill_depth` may go ahead if they cannot delay it. If the requests of a GPU add up
//!    to more than the whole, a packing's slots decide instead (`slots.rs`).
//!
//! A budget is at most `max_token`, the rest of the limit and of the window; with others ready, also an eligible client's lag.
//! Without room for an eligible client, holders beyond their shares are **recalled**, if this makes room: each gets a lower total. So are
//! best-effort holders within their shares for an SLO-sensitive client.
//!
//! Example: `W` = 100 ms, tokens of 10 ms, A 20%:20%, B 30%:100%, SMs 100 %. A runs 0-10 ms, B 10-30 ms, A 30-40 ms and is throttled,
//! B goes on to 100 ms: A used 20 ms, B 80 ms. B's lag of -50 ms cost no other client time, so it is forgiven.
//!
//! # Invariants
//! The invariants of `ledger.rs` hold. Over `n` windows a client uses at most `n` limits, one request and one kernel. If requests
//! add up to at most the whole, a client that keeps asking and keeps the GPU busy gets its request, **however the others use theirs**,
//! less hand-over times. An eligible client waits at most for one token of each other client and one window.
//!
//! # Differences from the paper
//! The paper orders by missed time in absolute use, forgets it at the end of a window, and lets whole tokens overshoot the limit. Here
//! order is relative to the request, later windows make up for time that long kernels could not divide, and overuse is carried.

use super::client::{Client, Rank};
use super::ledger::{Gpu, Ledger};
use super::slots::Slots;
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, ConfigError, Duration, Engine, Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler,
};

crate::settings_table::settings! {
    /// Settings of [`MultiToken`].
    pub struct MultiTokenConfig {
        /// Length of the window over which quotas are settled. A window of 100 ms holds ten turns of 10 ms, and no client misses due time
        /// for longer than people notice.
        #[cfg_attr(feature = "serde", serde(rename = "window_ns"))]
        pub window: Duration = Duration::from_millis(100), with_window;
        /// The longest token. At 10 ms, a hand-over (tens of microseconds) costs well under 1 %.
        #[cfg_attr(feature = "serde", serde(rename = "max_token_ns"))]
        pub max_token: Duration = Duration::from_millis(10), with_max_token;
        /// The shortest token worth giving to a client ahead of a reservation. 500 us.
        #[cfg_attr(feature = "serde", serde(rename = "min_token_ns"))]
        pub min_token: Duration = Duration::from_micros(500), with_min_token;
        /// Time beyond its budget after which a token expires. In 2 ms the last kernels may complete under the token.
        #[cfg_attr(feature = "serde", serde(rename = "slack_ns"))]
        pub slack: Duration = Duration::from_millis(2), with_slack;
        /// Time after its expiry at which an unreturned token is revoked. 5 ms allow for a return on its way.
        #[cfg_attr(feature = "serde", serde(rename = "grace_ns"))]
        pub grace: Duration = Duration::from_millis(5), with_grace;
        /// The most overuse carried. With 10 s, a client with one endless kernel is not locked out for ever.
        #[cfg_attr(feature = "serde", serde(rename = "max_debt_ns"))]
        pub max_debt: Duration = Duration::from_secs(10), with_max_debt;
        /// Number of ready clients examined behind a reservation. 16, as a longer search rarely finds more.
        pub backfill_depth: u32 = 16, with_backfill_depth;
        /// Number of client slots. 4,096.
        pub max_clients: u32 = 4096, with_max_clients;
        /// Number of GPUs. 64.
        pub max_gpus: u32 = 64, with_max_gpus;
    }
}

impl MultiTokenConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let secs = Duration::from_secs;
        gshare_core::check_fields!(self {
            window in Duration::from_millis(1)..=secs(60), "need 1ms to 60s";
            max_token in Duration::from_micros(10)..=self.window, "need 10us to the window";
            min_token in Duration::from_nanos(1)..=self.max_token, "need 1ns to max_token";
            slack, grace in ..=secs(60), "need at most 60s";
            max_debt in self.window..=secs(3600), "need the window to 3600s";
            max_clients in 1..=1 << 20, "need 1 to 1048576";
            max_gpus in 1..=4096, "need 1 to 4096";
            backfill_depth in ..=4096, "need at most 4096";
        })
    }
}

/// The multi-token scheduler. See the [module](self).
#[derive(Debug)]
pub struct MultiToken {
    ledger: Ledger,
    slots: Slots,
    scratch: Vec<Rank>,
}

impl MultiToken {
    /// A scheduler without clients, or the error of a setting out of bounds.
    pub fn new(config: MultiTokenConfig) -> Result<Self, ConfigError> {
        Ok(Self { ledger: Ledger::new(config)?, slots: Slots::default(), scratch: Vec::new() })
    }

    /// Step 3. See the [module](self).
    fn dispatch(&mut self, index: usize, actions: &mut Vec<TokenAction>) {
        let now = self.ledger.now;
        let window = self.ledger.gpus[index].window;
        let ready = self.ledger.gpus[index].ready.len() as u64;
        let mut queue = core::mem::take(&mut self.scratch);
        let mut reservation: Option<Reservation> = None;
        let mut behind = 0;
        // A grant removes the candidate from the walked set, so each round first copies a batch of candidates.
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
                let (client, gpu) = (self.ledger.client(rank.slot), &self.ledger.gpus[index]);
                let (sm, needed) = (client.token_sm(window), client.needed_sm(window));
                let Offer { mut budget, least, until } = self.offer(gpu, client, rank, ready);
                let left = client.left(window, now);
                let overhead =
                    left.saturating_add(self.ledger.config.slack).saturating_add(self.ledger.config.grace);
                let mut ahead = false;
                match &mut reservation {
                    None if needed > gpu.free => {
                        if !rank.ineligible && client.miss(gpu) >= self.ledger.config.min_token {
                            self.ledger.recall(index, rank, needed, actions);
                        }
                        reservation = Some(self.reserve(&self.ledger.gpus[index], rank.slot, needed));
                        continue;
                    }
                    None => {}
                    Some(_) if needed > gpu.free => continue,
                    // There is room beside the reserved client even while it runs.
                    Some(reserved) if sm <= reserved.beside => reserved.beside -= sm,
                    Some(reserved) => {
                        // The token ends by the clock as well, however slowly the client uses its budget.
                        budget = budget.min(reserved.at.saturating_since(now).saturating_sub(overhead));
                        if budget < self.ledger.config.min_token {
                            continue;
                        }
                        ahead = true;
                    }
                }
                if budget >= least {
                    let free = self.ledger.gpus[index].free;
                    self.ledger.grant(rank.slot, budget, until, actions);
                    if ahead {
                        self.ledger.ends_in_time(rank.slot);
                    }
                    if self.ledger.gpus[index].free > free {
                        // The replaced token gave SMs back, so a client without room before may fit now.
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

    /// The token a client may get now, SMs aside.
    fn offer(&self, gpu: &Gpu, client: &Client, rank: Rank, ready: u64) -> Offer {
        let config = &self.ledger.config;
        let now = self.ledger.now;
        // A budget beyond the window's end would stay part of the allowed total, on top of the next window's limit.
        let budget = client.budget(config.max_token, gpu.window_end, gpu.window, now);
        let any = Duration::from_nanos(1);
        let quarter = Duration::from_nanos(config.max_token.as_nanos().div_ceil(4));
        if ready <= 1 {
            return Offer { budget, least: any, until: gpu.window_end };
        }
        // Rounding errors would otherwise cause one extension of nanoseconds after another.
        let extends = client.holds.is_some_and(|token| token.window == gpu.window);
        let least = if extends { config.min_token } else { any };
        if rank.ineligible {
            let fair = Duration::from_nanos(gpu.window_end.saturating_since(now).as_nanos() / ready);
            return Offer { budget: budget.min(fair.max(quarter)), least, until: gpu.window_end };
        }
        let lag = client.miss(gpu);
        let turn = client.left(gpu.window, now).saturating_add(lag.max(quarter));
        Offer { budget: budget.min(lag), least, until: gpu.window_end.min(now.saturating_add(turn)) }
    }

    /// The time at which `needed` SMs are free for the client `head`, and the number of SMs free beside them.
    fn reserve(&self, gpu: &Gpu, head: u32, needed: u16) -> Reservation {
        let now = self.ledger.now;
        let holder = |&(release, slot): &(Timestamp, u32)| {
            let client = self.ledger.client(slot);
            client
                .holds
                .filter(|_| slot != head)
                .map(|token| (client.returns_at(&token, release, now), token.sm))
        };
        let mut holders: Vec<_> = gpu.releases.iter().filter_map(holder).collect();
        holders.sort_unstable();
        let mut free = gpu.free;
        for (at, sm) in holders {
            free += sm;
            if free >= needed {
                return Reservation { at, beside: free - needed };
            }
        }
        // Free and held SMs are the whole GPU, and no client needs more.
        Reservation { at: now, beside: 0 }
    }
}

/// Number of ready clients copied out of the order at once.
const BATCH: usize = 8;

/// Time to grant to a client: nothing below `least`, with expiry at `until` at the latest.
struct Offer {
    budget: Duration,
    least: Duration,
    until: Timestamp,
}

/// Room promised to the first ready client without enough free SMs.
struct Reservation {
    at: Timestamp,
    /// SMs still free beside the client at this time.
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
            let dirty = core::mem::take(&mut self.ledger.gpus[index].dirty);
            if !self.ledger.gpus[index].by_slots {
                if dirty {
                    self.slots.forget(index);
                    self.dispatch(index, actions);
                }
            } else if dirty || self.slots.is_due(index, now) {
                self.slots.dispatch(&mut self.ledger, index, actions);
            }
        }
        if cfg!(debug_assertions) {
            self.ledger.invariants();
            self.slots.invariants(&self.ledger);
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.ledger.next_deadline().into_iter().chain(self.slots.next_deadline()).min()
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
    use super::super::client::Filed;
    use super::*;
    use gshare_core::{GpuId, QuotaRange, ServiceClass, Share, SmShare, UseState};

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

    /// A GPU with clients always ready to launch: they use every token to the full and give it back the moment it is used up.
    struct Bench {
        engine: MultiToken,
        /// Client, time at which its token is used up, its total then.
        running: Vec<(ClientId, Timestamp, Duration)>,
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
                bench.says(id(slot), UseState::Wants);
            }
            bench
        }

        fn join(&mut self, slot: u32, quota: &str, sm: u16) {
            self.send(TokenEvent::ClientJoined {
                client: id(slot),
                gpu: GpuId::new(0),
                share: share(quota, sm),
            });
        }

        /// A client reports its known total.
        fn says(&mut self, client: ClientId, state: UseState) {
            let used = self.used.get(&client).copied().unwrap_or_default();
            self.send(TokenEvent::Used { client, used, state });
        }

        /// A client reports `more` use.
        fn uses(&mut self, client: ClientId, more: Duration, state: UseState) {
            let used = self.used.entry(client).or_default();
            *used = used.saturating_add(more);
            self.says(client, state);
        }

        fn send(&mut self, event: TokenEvent) {
            let actions = self.engine.orders(self.now, event).unwrap();
            for action in actions {
                self.log.push((self.now, action));
                if let TokenAction::Allow { client, allowed, .. } = action {
                    let kernel = self.kernel.as_nanos();
                    let before = self.used.get(&client).copied().unwrap_or_default();
                    let used = Duration::from_nanos((allowed - before).as_nanos().div_ceil(kernel) * kernel);
                    self.running.retain(|&(other, ..)| other != client);
                    self.running.push((client, self.now + used, before + used));
                }
            }
        }

        fn run_until(&mut self, end: Timestamp) {
            loop {
                let next = self.running.iter().map(|&(client, done, _)| (done, client)).min();
                let deadline = self.engine.next_deadline();
                match (next, deadline) {
                    (Some((done, client)), deadline)
                        if done <= end && deadline.is_none_or(|at| done <= at) =>
                    {
                        let at = self.running.iter().position(|run| run.0 == client).unwrap();
                        let (_, _, used) = self.running.remove(at);
                        self.now = done;
                        self.used.insert(client, used);
                        self.says(client, UseState::Wants);
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

        /// Lets time pass until something happens. Each token of the first client is one `kernel` in ms, reported when it is launched.
        fn step_beside(&mut self, kernel: u64) {
            if let Some(run) = self.running.iter_mut().find(|run| run.0 == id(0)) {
                let used = self.used.get(&id(0)).copied().unwrap_or_default();
                if run.2 - used < ms(kernel) {
                    *run = (id(0), self.now + ms(kernel), used + ms(kernel));
                    let event =
                        TokenEvent::Used { client: id(0), used: used + ms(kernel), state: UseState::Holds };
                    let actions = self.engine.orders(self.now, event).unwrap();
                    assert!(actions.is_empty(), "{actions:?}");
                }
            }
            let next = self.running.iter().map(|run| run.1).chain(self.engine.next_deadline()).min();
            self.run_until(next.unwrap().max(self.now));
        }

        fn used_ms(&self, slot: u32) -> u64 {
            self.used.get(&id(slot)).map_or(0, |used| used.as_nanos() / 1_000_000)
        }

        fn window_used(&self, slot: u32) -> Duration {
            self.engine.client(id(slot)).unwrap().window_used
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
                TokenAction::Allow { client, .. } => Some((now.as_nanos() / 1_000_000, client.slot())),
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

    /// The paper's order by absolute `Q_miss` would never serve the small client.
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
        assert!(matches!(bench.log[..], [(_, TokenAction::Allow { client, .. })] if client == id(1)));
        let mut actions = Vec::new();
        let event = TokenEvent::Used { client: id(0), used: ms(1), state: UseState::Wants };
        let gone = bench.engine.handle(bench.now, event, &mut actions);
        assert_eq!(gone, Err(TokenError::UnknownClient { client: id(0) }));
    }

    #[test]
    fn a_token_that_is_not_given_back_is_taken_back_and_a_late_total_is_charged_once() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.running.clear();
        let deadline = bench.engine.next_deadline().unwrap();
        assert_eq!(deadline, at(10 + 2 + 5), "budget, slack and grace");
        bench.now = deadline;
        bench.log.clear();
        bench.send(TokenEvent::DeadlineReached);
        assert_eq!(bench.log, [(deadline, TokenAction::Stop { client: id(0) })]);
        assert_eq!(bench.window_used(0), ms(10), "all that it allowed");
        for (more, charged) in [(3, 10), (7, 10), (0, 10), (15, 25), (0, 25)] {
            bench.uses(id(0), ms(more), UseState::Idle);
            assert_eq!(bench.window_used(0), ms(charged));
        }
    }

    /// A kernel known to run keeps its token: no other client could use the GPU before the kernel ends.
    #[test]
    fn a_token_is_waited_for_as_long_as_its_work_is_known_to_run() {
        let mut bench = Bench::new(&[("0.5:1", 100), ("0.5:1", 100)], ms(1));
        bench.running.clear();
        bench.now = at(1);
        bench.uses(id(0), ms(200), UseState::Extends);
        bench.now = at(150);
        bench.log.clear();
        bench.send(TokenEvent::DeadlineReached);
        assert_eq!(bench.log, []);
        bench.now = at(201);
        bench.says(id(0), UseState::Wants);
        assert!(matches!(bench.log[..], [(_, TokenAction::Allow { client, .. })] if client == id(1)));
    }

    /// The second client is short of its request while the kernel of the first one runs, and gets that time afterwards.
    #[test]
    fn requests_are_met_beside_launches_as_long_as_windows() {
        for (kernel, quotas) in [
            (50, ["0.4:1", "0.5:1"]),
            (100, ["0.4:1", "0.5:1"]),
            (200, ["0.4:1", "0.5:1"]),
            (200, ["0.4:0.4", "0.5:0.5"]),
            (200, ["0.4:0.4", "0.5:1"]),
            (500, ["0.4:1", "0.5:1"]),
            (500, ["0.4:0.4", "0.5:0.5"]),
        ] {
            let mut bench = Bench::new(&[(quotas[0], 100), (quotas[1], 100)], ms(1));
            let windows = 300;
            while bench.now < at(windows * 100) {
                bench.step_beside(kernel);
            }
            let got = [0, 1].map(|slot| bench.used_ms(slot) as f64 / windows as f64);
            assert!(got[0] > 39.0 && got[1] > 48.9, "{kernel} ms, {quotas:?}: {got:?} per cent");
        }
    }

    /// Use reported after its window's end counts for that window up to the token's allowance; overuse counts for the window of the report.
    #[test]
    fn time_of_a_token_counts_for_its_window() {
        let config = MultiTokenConfig { grace: ms(200), ..Default::default() };
        let mut bench = Bench::with(config, &[("0.1:0.1", 100)], ms(1));
        bench.running.clear();
        bench.now = at(3);
        bench.uses(id(0), ms(3), UseState::Holds);
        bench.now = at(101);
        bench.uses(id(0), ms(9), UseState::Holds);
        assert_eq!(bench.window_used(0), ms(2), "12 ms used of a token of 10");
    }

    /// Otherwise the holder of a window's last token would have its time for nothing.
    #[test]
    fn time_of_a_token_that_is_heard_late_is_surplus() {
        let config = MultiTokenConfig { grace: ms(200), ..Default::default() };
        let mut bench = Bench::with(config, &[("0.1:1", 100)], ms(1));
        bench.run_until(at(199));
        bench.running.clear();
        let surplus = |bench: &Bench| bench.engine.ledger.get(id(0)).unwrap().surplus;
        bench.now = at(201);
        bench.send(TokenEvent::DeadlineReached);
        let before = surplus(&bench);
        bench.uses(id(0), ms(9), UseState::Holds);
        assert_eq!(surplus(&bench) - before, ms(9));
    }

    /// A client that has waited long goes first among clients with about the same lag, and does not overtake the others by much.
    #[test]
    fn a_wait_counts_as_lag_for_four_windows_at_most() {
        let mut bench = Bench::new(&[("0.2:1", 100)], ms(1));
        bench.running.clear();
        bench.now = at(1);
        bench.uses(id(0), ms(3_000), UseState::Extends);
        bench.join(1, "0.2:1", 100);
        bench.now = at(10);
        bench.says(id(1), UseState::Wants);
        // The part of the order's key that is not the lag in proportion to the request, in windows of wait.
        let aged = |bench: &Bench| {
            let ledger = &bench.engine.ledger;
            let client = ledger.get(id(1)).unwrap();
            let Filed::Ready(rank) = client.filed else { panic!("{:?}", client.filed) };
            assert!(!rank.ineligible);
            let lag = client.lag_then(&ledger.gpus[0]) as f64 / client.request.as_nanos() as f64;
            (-rank.key as f64 / 65_536.0 - lag) * 12.0
        };
        for window in 0..20u64 {
            let counts = (0.9 + window as f64).min(4.0);
            if window > 0 {
                bench.now = at(100 * window);
                bench.send(TokenEvent::DeadlineReached);
            }
            assert!((aged(&bench) - counts).abs() < 0.01, "{} in window {window}", aged(&bench));
        }
    }

    /// The process around the engine may have been stopped meanwhile.
    #[test]
    fn a_token_is_over_when_its_time_is_however_late_that_is_seen() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.running.clear();
        bench.now = at(60);
        bench.send(TokenEvent::DeadlineReached);
        assert_eq!(bench.engine.ledger.get(id(0)).unwrap().miss(&bench.engine.ledger.gpus[0]), ms(50 - 17));
    }

    /// Each extension came on top of the last one: by the window's end a client was allowed its whole limit beyond its use, and used it on
    /// top of the next window's.
    #[test]
    fn a_client_is_allowed_no_more_than_it_can_use_by_the_end_of_the_window() {
        let mut bench = Bench::with(MultiTokenConfig::default(), &[], ms(1));
        bench.join(1, "0.1:1", 100);
        bench.now = at(60);
        bench.join(0, "0.5:0.94", 100);
        bench.says(id(0), UseState::Wants);
        for now in 61..99 {
            bench.now = at(now);
            bench.says(id(0), UseState::Extends);
        }
        let allowed = bench.log.iter().filter_map(|(_, action)| match action {
            TokenAction::Allow { allowed, .. } => Some(*allowed),
            _ => None,
        });
        assert!((ms(30)..=ms(40)).contains(&allowed.max().unwrap()));
    }

    #[test]
    fn a_holder_that_asks_early_is_extended_while_nobody_else_wants_the_gpu() {
        let mut bench = Bench::new(&[("0.5:1", 100)], ms(1));
        bench.log.clear();
        bench.now = at(5);
        bench.says(id(0), UseState::Extends);
        let [(_, TokenAction::Allow { allowed, .. })] = bench.log[..] else { panic!("{:?}", bench.log) };
        assert_eq!(allowed, ms(20));
        // A second client waits with nothing used, so no further extension follows.
        bench.join(1, "0.5:1", 100);
        bench.says(id(1), UseState::Wants);
        bench.log.clear();
        bench.says(id(0), UseState::Extends);
        assert!(bench.log.is_empty(), "{:?}", bench.log);
    }

    /// A service that is idle most of the time does not wait for a whole token of a trainer beside it.
    #[test]
    fn a_holder_beyond_its_share_is_recalled_for_a_client_within_its_share() {
        let recalls = |bench: &Bench| {
            let orders = bench.log.iter().filter_map(|(now, action)| match action {
                TokenAction::Recall { client, allowed } => Some((*now, *client, *allowed)),
                _ => None,
            });
            orders.collect::<Vec<_>>()
        };
        let mut bench = Bench::new(&[("0.02:1", 100)], ms(1));
        bench.join(1, "0.3:0.6", 100);
        bench.run_until(at(53));
        // The trainer used its 2 ms long ago. Its token of 10 ms ends now, not after 7 ms more; its report is 3 ms old.
        bench.says(id(1), UseState::Wants);
        assert_eq!(recalls(&bench), [(at(53), id(0), ms(50))]);
        assert_eq!(
            bench.engine.client(id(1)).unwrap().holds,
            None,
            "the trainer has the GPU until it says so"
        );
        bench.says(id(1), UseState::Wants);
        assert_eq!(recalls(&bench).len(), 1, "once is enough");
        bench.uses(id(0), ms(3), UseState::Wants);
        assert!(bench.engine.client(id(1)).unwrap().holds.is_some());

        // Within its share it goes on to the end of the share: 2 ms of a new client.
        let mut bench = Bench::new(&[("0.02:1", 100)], ms(1));
        bench.join(1, "0.3:0.6", 100);
        bench.now = at(1);
        bench.says(id(1), UseState::Wants);
        assert_eq!(recalls(&bench), [(at(1), id(0), ms(2))]);
    }

    /// A window begins with the trainer's guaranteed time; a request that comes meanwhile does not wait for its end.
    #[test]
    fn an_slo_sensitive_client_goes_first_until_it_has_had_its_request() {
        let class = |bench: &mut Bench, slot, class| {
            bench.send(TokenEvent::ClassChanged { client: id(slot), class });
        };
        let orders = |bench: &Bench, slot| {
            let of = |action: &TokenAction| match *action {
                TokenAction::Recall { client, .. } => (client == id(slot)).then_some("recalled"),
                TokenAction::Allow { client, .. } => (client == id(slot)).then_some("allowed"),
                _ => None,
            };
            bench.log.iter().filter_map(|(_, action)| of(action)).collect::<Vec<_>>()
        };
        // Within its share by 18 ms, the trainer ends at once.
        let mut bench = Bench::new(&[("0.2:1", 100)], ms(1));
        bench.join(1, "0.3:0.6", 100);
        class(&mut bench, 1, ServiceClass::SLO_SENSITIVE);
        bench.now = at(2);
        bench.says(id(1), UseState::Wants);
        assert_eq!(orders(&bench, 0), ["allowed", "recalled"]);
        bench.running.clear();
        bench.uses(id(0), ms(2), UseState::Wants);
        assert_eq!(orders(&bench, 1), ["allowed"]);
        // It goes on to 30 ms, its whole request, before the trainer has the other 18 ms.
        bench.run_until(at(32));
        assert_eq!((bench.used_ms(0), bench.used_ms(1)), (2, 30));
        bench.run_until(at(50));
        assert_eq!((bench.used_ms(0), bench.used_ms(1)), (20, 30));

        // Neither of one class, nor in a lower class.
        for classes in
            [[ServiceClass::SLO_SENSITIVE; 2], [ServiceClass::SLO_SENSITIVE, ServiceClass::BestEffort]]
        {
            let mut bench = Bench::new(&[("0.2:1", 100)], ms(1));
            bench.join(1, "0.3:0.6", 100);
            class(&mut bench, 0, classes[0]);
            class(&mut bench, 1, classes[1]);
            bench.now = at(2);
            bench.says(id(1), UseState::Wants);
            assert_eq!(orders(&bench, 0), ["allowed"]);
        }
    }

    /// Each drain of a holder idles its SMs for a while.
    #[test]
    fn as_many_holders_are_recalled_as_make_room() {
        let recalled = |bench: &Bench| {
            bench.log.iter().filter(|(_, action)| matches!(action, TokenAction::Recall { .. })).count()
        };
        let mut bench = Bench::new(&[("0:1", 20), ("0:1", 20), ("0:1", 20), ("0:1", 20), ("0:1", 20)], ms(1));
        bench.join(5, "0.3:0.6", 40);
        bench.now = at(3);
        bench.says(id(5), UseState::Wants);
        assert_eq!(recalled(&bench), 2);
        // A wider client that comes next needs one more, beside the SMs already on their way.
        bench.join(6, "0.5:0.6", 60);
        bench.says(id(5), UseState::Idle);
        bench.says(id(6), UseState::Wants);
        assert_eq!(recalled(&bench), 3);
    }

    /// The last kernel of a recalled holder ends in mid-window, at 250 ms. Meanwhile its neighbour's SMs are of use to a client that fits
    /// beside it, up to the time at which the reserved client can run.
    #[test]
    fn room_is_reserved_from_the_time_at_which_a_recalled_holder_ends() {
        let mut bench = Bench::new(&[("0:1", 60)], ms(1));
        bench.join(1, "0.3:0.6", 90);
        bench.join(2, "0:1", 30);
        bench.now = at(3);
        bench.says(id(1), UseState::Wants);
        assert!(
            bench.log.iter().any(|(_, order)| matches!(order, TokenAction::Recall { .. })),
            "{:?}",
            bench.log
        );
        bench.uses(id(0), ms(250), UseState::Holds);
        bench.says(id(2), UseState::Wants);
        assert!(bench.engine.client(id(2)).unwrap().holds.is_some(), "{:?}", bench.log);
        let allowed = |bench: &Bench| {
            bench.log.iter().filter(|(_, order)| matches!(order, TokenAction::Allow { .. })).count()
        };
        bench.running.retain(|run| run.0 != id(0));
        bench.run_until(at(240));
        let orders = allowed(&bench);
        bench.run_until(at(249));
        assert_eq!(allowed(&bench), orders, "a token from now on could delay the reserved client");
        // Slow use of a budget does not delay it either.
        let ends = bench.log.iter().filter_map(|(_, order)| match *order {
            TokenAction::Allow { client, until, .. } if client == id(2) => Some(until),
            _ => None,
        });
        assert!(ends.clone().max().is_some_and(|end| (at(220)..at(250)).contains(&end)), "{ends:?}");
    }

    /// Narrow holders that would make too little room keep their tokens, and so does a holder about to end.
    #[test]
    fn no_holder_is_recalled_in_vain() {
        let mut bench = Bench::new(&[("0:1", 40), ("0.5:1", 40)], ms(1));
        bench.join(2, "0.3:0.6", 100);
        bench.now = at(3);
        bench.log.clear();
        bench.says(id(2), UseState::Wants);
        assert!(bench.log.is_empty(), "the second is within its share: {:?}", bench.log);
        let mut bench = Bench::new(&[("0:1", 100)], ms(1));
        bench.join(1, "0.3:0.6", 100);
        bench.now = at(9);
        bench.uses(id(0), Duration::from_micros(9_600), UseState::Holds);
        bench.log.clear();
        bench.says(id(1), UseState::Wants);
        assert!(bench.log.is_empty(), "0.4 ms are left: {:?}", bench.log);
    }

    /// Two events would let the other client in between, as if the first did not want to go on.
    #[test]
    fn a_client_that_gives_back_and_asks_has_its_place_before_anyone_is_served() {
        for (state, next) in [(UseState::Wants, 0), (UseState::Idle, 1)] {
            let mut bench = Bench::new(&[("0.5:1", 100), ("0.1:1", 100)], ms(1));
            bench.run_until(at(20));
            // The first is behind the second, since the second has had its whole request.
            assert_eq!(bench.running[0].0, id(0), "{:?}", bench.log);
            bench.log.clear();
            bench.uses(id(0), ms(1), state);
            let allowed = bench.log.iter().find_map(|&(_, action)| match action {
                TokenAction::Allow { client, .. } => Some(client),
                _ => None,
            });
            assert_eq!(allowed, Some(id(next)), "{:?}", bench.log);
        }
    }

    /// A token its client could no longer use leaves the client's request unanswered.
    #[test]
    fn a_token_that_is_given_back_unused_keeps_the_place() {
        for (used, next) in [(0, 0), (1, 1)] {
            let mut bench = Bench::new(&[("0.5:1", 100), ("0.5:1", 100)], ms(1));
            let (client, ..) = bench.running.remove(0);
            bench.log.clear();
            bench.uses(client, Duration::from_nanos(used), UseState::Wants);
            assert!(matches!(bench.log[..], [(_, TokenAction::Allow { client, .. })] if client == id(next)));
        }
    }

    /// Time owed to a client is counted in parts of its request.
    #[test]
    fn a_client_that_is_owed_time_may_be_cut_to_best_effort() {
        for end in (200..1_000).step_by(7) {
            let caps = [("0.25:0.25", 100), ("0.25:0.25", 100), ("0.5:0.5", 100)];
            let mut bench = Bench::new(&caps, ms(20));
            bench.run_until(at(end));
            let Some((client, ..)) = bench.running.pop() else { continue };
            bench.says(client, UseState::Idle);
            bench.send(TokenEvent::ShareChanged { client, share: share("0:0.5", 100) });
            bench.says(client, UseState::Wants);
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
        // 25 ms used of 10: after two more windows 5 ms are carried, and 5 ms are left. No other client wants them, and at this pace the
        // carried 5 ms are paid back in the middle of the next window.
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

    /// Time which the second client misses during the long kernels of the first is made good, although its limit or its request changes in
    /// every window, as a vertical scaler does.
    #[test]
    fn missed_time_outlives_other_shares() {
        for (other, due) in [("0.5:0.9", 50), ("0.4:1", 45)] {
            let mut bench = Bench::new(&[("0.4:1", 100), ("0.5:1", 100)], ms(1));
            let mut halves = 0;
            while bench.now < at(30_000) {
                bench.step_beside(200);
                let half = bench.now.as_nanos() / 50_000_000;
                if half != halves {
                    halves = half;
                    let share = share(if half.is_multiple_of(2) { "0.5:1" } else { other }, 100);
                    bench.send(TokenEvent::ShareChanged { client: id(1), share });
                }
            }
            let got = bench.used_ms(1) as f64 / 300.0;
            assert!(got > f64::from(due) - 0.5, "{got:.1} of {due} ms of each window");
        }
    }

    /// A cut from 100 % to 1 % would otherwise lock the client out for a hundred windows.
    #[test]
    fn what_was_used_under_a_larger_limit_is_no_debt() {
        let mut bench = Bench::new(&[("0:1", 100)], ms(1));
        bench.run_until(at(90));
        bench.send(TokenEvent::ShareChanged { client: id(0), share: share("0.1:0.1", 100) });
        bench.run_until(at(100));
        assert_eq!(bench.window_used(0), Duration::ZERO);
    }

    #[test]
    fn gpus_do_not_touch_each_other() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.send(TokenEvent::ClientJoined { client: id(9), gpu: GpuId::new(3), share: share("1:1", 100) });
        bench.log.clear();
        bench.says(id(9), UseState::Wants);
        assert!(matches!(bench.log[..], [(_, TokenAction::Allow { client, .. })] if client == id(9)));
    }

    #[test]
    fn every_error_leaves_the_state_as_it_was() {
        let mut bench = Bench::new(&[("0.5:0.5", 100)], ms(1));
        bench.now = at(5);
        bench.uses(id(0), ms(5), UseState::Holds);
        let before = format!("{:?}", bench.engine);
        let zero_sm = Share { quota: QuotaRange::BEST_EFFORT, sm: SmShare::ZERO };
        let good = share("0.5:0.5", 100);
        let (far, ghost) = (ClientId::new(1 << 30, 0), ClientId::new(0, 1));
        let bad = [
            (at(4), TokenEvent::DeadlineReached),
            (at(6), TokenEvent::ClientJoined { client: id(0), gpu: GpuId::new(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: ghost, gpu: GpuId::new(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: far, gpu: GpuId::new(0), share: good }),
            (at(6), TokenEvent::ClientJoined { client: id(1), gpu: GpuId::new(1 << 30), share: good }),
            (at(6), TokenEvent::ClientJoined { client: id(1), gpu: GpuId::new(0), share: zero_sm }),
            (at(6), TokenEvent::ShareChanged { client: id(0), share: zero_sm }),
            (at(6), TokenEvent::ShareChanged { client: ghost, share: good }),
            (at(6), TokenEvent::ClassChanged { client: ghost, class: ServiceClass::BestEffort }),
            (at(6), TokenEvent::ClientLeft { client: ghost }),
            (at(6), TokenEvent::Used { client: id(0), used: ms(4), state: UseState::Holds }),
            (at(6), TokenEvent::Used { client: ghost, used: ms(6), state: UseState::Idle }),
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
        let join =
            |client| TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share: share("0.5:0.5", 100) };
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
