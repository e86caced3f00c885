//! Vertical scaling on a node: the co-scaler's tokens as shares of the token engine.
//!
//! # Problem
//! The co-scaler issues tokens, microseconds of GPU time per period of 5 ms, but clients hold time from the token engine. Its orders
//! therefore become shares: a client with 1,500 of 5,000 tokens has a limit of 30 % from this moment on. The token engine and the hooks
//! enforce this limit like every other share.
//!
//! # Rules
//! 1. Only clients with a class take part; all other clients keep their share. The shares of the clients with a class may
//!    add up to the whole GPU at most.
//! 2. On a GPU without an SLO-sensitive client nothing is scaled: each client has its whole quota.
//! 3. Otherwise the limit of a client is its issued part, at least its request and [`LEAST`], at most the limit of its quota.
//!    The request is kept: a guarantee holds for best-effort clients too. A client without a guarantee asks for `0:1.0`.
//!    The quota itself does not change: the co-scaler works within it.
//! 4. A class beyond the GPU's time is reported, and the client keeps its share.
//!
//! # Cost
//! One pass every 5 ms over the clients with a class. Without such clients, none.

use crate::scale::{ClientScale, DiluVertical, Iteration, ScaleState, VerticalError, VerticalScaler};
use gshare_core::{ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Timestamp};
use std::collections::BTreeMap;

/// The least limit, in basis points: 1 %. With less, a client spends most of its time on hand-over.
const LEAST: u16 = 100;

/// A client's new share of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resize {
    pub(super) client: ClientId,
    pub(super) quota: QuotaRange,
}

#[derive(Debug)]
struct Entry {
    /// The promised quota.
    quota: QuotaRange,
    /// The quota in force now, as the scaler last set it.
    current: QuotaRange,
    /// GPU time used up to the last period.
    used: Duration,
}

/// The default vertical scaler of a node.
pub fn vertical_scaler() -> Box<dyn VerticalScaler> {
    Box::new(DiluVertical::default())
}

/// The co-scaler of all GPUs of the node. See the [module](self).
pub(super) struct Scaling {
    engine: Box<dyn VerticalScaler>,
    clients: BTreeMap<ClientId, Entry>,
}

gshare_core::debug_fields!(Scaling { clients });

impl Scaling {
    pub(super) fn new(engine: Box<dyn VerticalScaler>) -> Self {
        Self { engine, clients: BTreeMap::new() }
    }

    /// The end of the period; `None` while no client takes part.
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.engine.next_deadline()
    }

    /// The state of a client; `None` if it takes no part.
    pub(super) fn client(&self, client: ClientId) -> Option<ClientScale> {
        self.engine.client(client)
    }

    /// The state of a GPU; `None` before its first client with a class.
    pub(super) fn gpu(&self, gpu: GpuId) -> Option<ScaleState> {
        self.engine.gpu(gpu).map(|gpu| gpu.state)
    }

    /// A client takes part from now on.
    pub(super) fn join(
        &mut self,
        now: Timestamp,
        client: ClientId,
        gpu: GpuId,
        quota: QuotaRange,
        class: ServiceClass,
    ) -> Result<(), VerticalError> {
        self.engine.join(now, client, gpu, quota, class)?;
        self.clients.insert(client, Entry { quota, current: quota, used: Duration::ZERO });
        Ok(())
    }

    /// The promised quota changed, and the new one is in force. On an error the client takes no part any more.
    pub(super) fn quota_changed(
        &mut self,
        now: Timestamp,
        client: ClientId,
        quota: QuotaRange,
    ) -> Result<(), VerticalError> {
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let told = self.engine.set_quota(now, client, quota);
        match told {
            Ok(()) => (entry.quota, entry.current) = (quota, quota),
            Err(_) => self.leave(now, client),
        }
        told
    }

    /// A client is gone, or takes no part any more.
    pub(super) fn leave(&mut self, now: Timestamp, client: ClientId) {
        if self.clients.remove(&client).is_some() {
            self.engine.leave(now, client);
        }
    }

    /// An iteration of a client ended. The report comes from a peer; `false`: it is impossible.
    pub(super) fn iteration(
        &mut self,
        now: Timestamp,
        client: ClientId,
        first_launch: Timestamp,
        last_launch: Timestamp,
        launches: u32,
    ) -> bool {
        self.engine.iterated(now, client, Iteration { batch: launches, first_launch, last_launch }).is_ok()
    }

    /// Ends the period and appends the changed shares, the shrinking shares first. `used` gives the time of each client since it came, and
    /// whether the client waits for a token.
    pub(super) fn period(
        &mut self,
        now: Timestamp,
        used: impl Fn(ClientId) -> Option<(Duration, bool)>,
        resizes: &mut Vec<Resize>,
    ) {
        if self.next_deadline().is_none_or(|due| due > now) {
            return;
        }
        for (&client, entry) in &mut self.clients {
            let (total, waits) = used(client).unwrap_or((entry.used, false));
            let tokens = (total.saturating_sub(entry.used).as_nanos() / 1_000).max(waits.into());
            entry.used = total;
            self.engine.used(now, client, tokens);
        }
        self.engine.catch_up(now);
        let from = resizes.len();
        for (&client, entry) in &mut self.clients {
            let Some(scale) = self.engine.client(client) else { continue };
            let gpu = self.engine.gpu(scale.gpu);
            let quota = match gpu {
                Some(gpu) if gpu.state != ScaleState::None => {
                    share(entry.quota, scale.issued_tokens, gpu.max_tokens)
                }
                _ => entry.quota,
            };
            if quota != entry.current {
                let shrinks = quota.limit() < entry.current.limit();
                entry.current = quota;
                let place = if shrinks { from } else { resizes.len() };
                resizes.insert(place, Resize { client, quota });
            }
        }
    }
}

/// `issued` of a period's `max_tokens` as a share, within a quota.
fn share(quota: QuotaRange, issued: u64, max_tokens: u64) -> QuotaRange {
    let points = issued.saturating_mul(10_000) / max_tokens.max(1);
    let points = u16::try_from(points).unwrap_or(u16::MAX).max(LEAST);
    let limit = Quota::new(points).unwrap_or(Quota::WHOLE).max(quota.request()).min(quota.limit());
    QuotaRange::new(quota.request(), limit).unwrap_or(quota)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: GpuId = GpuId::new(0);
    const OWNER: ClientId = ClientId::new(0, 0);
    const TRAINER: ClientId = ClientId::new(1, 0);

    fn quota(text: &str) -> QuotaRange {
        text.parse().unwrap()
    }

    struct Bench {
        scaling: Scaling,
        now: Timestamp,
        used: BTreeMap<ClientId, Duration>,
        waits: Option<ClientId>,
        shares: BTreeMap<ClientId, QuotaRange>,
    }

    impl Bench {
        fn new() -> Self {
            let scaling = Scaling::new(vertical_scaler());
            let now = Timestamp::from_millis(1_000);
            Self { scaling, now, used: BTreeMap::new(), waits: None, shares: BTreeMap::new() }
        }

        fn join(&mut self, client: ClientId, text: &str, class: ServiceClass) {
            self.scaling.join(self.now, client, GPU, quota(text), class).unwrap();
            self.shares.insert(client, quota(text));
        }

        fn periods(&mut self, count: u32, busy: &[ClientId]) {
            for _ in 0..count {
                for client in busy {
                    *self.used.entry(*client).or_default() += Duration::from_micros(500);
                }
                self.now = self.scaling.next_deadline().unwrap();
                let mut resizes = Vec::new();
                let used = |client: ClientId| {
                    let used = self.used.get(&client).copied().unwrap_or_default();
                    Some((used, self.waits == Some(client)))
                };
                self.scaling.period(self.now, used, &mut resizes);
                for resize in resizes {
                    let before = self.shares.insert(resize.client, resize.quota).unwrap();
                    assert_eq!(resize.quota.request(), before.request(), "a request is kept");
                }
                // Beside the issued part of the owner only the kept requests may count.
                let beyond = |share: &QuotaRange| match share.limit() == share.request() {
                    true => 0,
                    false => u32::from(share.limit().get()),
                };
                let owned = self.scaling.gpu(GPU) != Some(ScaleState::None);
                let limits: u32 = self.shares.values().map(beyond).sum();
                assert!(!owned || limits <= 10_000, "never more than the GPU");
            }
        }

        fn cycle(&mut self, millis: u64) {
            let first = self.now.saturating_sub(Duration::from_millis(millis));
            self.scaling.iteration(self.now, OWNER, first, self.now, 40);
        }
    }

    #[test]
    fn without_an_owner_everybody_keeps_what_was_promised() {
        let mut bench = Bench::new();
        bench.join(TRAINER, "0.2:1.0", ServiceClass::BestEffort);
        bench.periods(20, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:1.0"));
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.periods(40, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:0.6"), "all but what the owner is promised");
        bench.scaling.leave(bench.now, OWNER);
        bench.shares.remove(&OWNER);
        bench.periods(1, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:1.0"), "and all of it again");
        bench.scaling.leave(bench.now, TRAINER);
        assert_eq!(bench.scaling.next_deadline(), None, "no client takes part: nothing to wake up for");
    }

    #[test]
    fn a_slow_iteration_takes_from_the_trainer_and_gives_to_its_owner() {
        let mut bench = Bench::new();
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.join(TRAINER, "0:1.0", ServiceClass::BestEffort);
        bench.periods(40, &[TRAINER]);
        let both = [OWNER, TRAINER];
        bench.periods(6, &both);
        bench.cycle(20);
        bench.periods(1, &both);
        // The scaler has not yet seen the client alone: it learns, and the trainer steps back.
        assert_eq!(bench.shares[&TRAINER].limit().get(), 100, "one per cent");
        assert!(bench.shares[&OWNER].limit() >= Quota::from_percent(85).unwrap());
        bench.periods(8, &both);
        bench.cycle(20);
        bench.periods(1, &both);
        bench.periods(200, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER].limit(), Quota::from_percent(60).unwrap(), "the owner fell silent");
        bench.periods(4, &both);
        bench.cycle(44);
        bench.periods(1, &both);
        assert_eq!(bench.scaling.client(OWNER).unwrap().state.to_string(), "emergency x2.20");
        let rest = Quota::from_percent(10).unwrap();
        assert_eq!(bench.shares[&TRAINER].limit(), rest, "what the owner's limit leaves");
    }

    /// The use of an iteration is charged when its token comes back, and that is after the iteration.
    #[test]
    fn between_two_iterations_the_trainer_is_lent_what_is_not_promised_unless_the_owner_waits() {
        let mut bench = Bench::new();
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.join(TRAINER, "0:1.0", ServiceClass::BestEffort);
        let (both, lent) = ([OWNER, TRAINER], Quota::from_percent(60).unwrap());
        bench.periods(6, &both);
        // The scaler learns from the first iteration.
        bench.cycle(20);
        bench.periods(8, &both);
        for waits in [None, Some(OWNER)] {
            bench.cycle(20);
            bench.periods(2, &both);
            assert!(bench.shares[&TRAINER].limit() < lent);
            bench.waits = waits;
            // A report at the end of a period counts for the next one.
            bench.periods(3, &[TRAINER]);
            assert_eq!(bench.shares[&TRAINER].limit() == lent, waits.is_none());
        }
    }

    #[test]
    fn a_trainer_that_was_promised_a_share_keeps_it_whatever_its_neighbour_needs() {
        let mut bench = Bench::new();
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.join(TRAINER, "0.2:1.0", ServiceClass::BestEffort);
        bench.periods(40, &[TRAINER]);
        bench.periods(6, &[OWNER, TRAINER]);
        bench.cycle(20);
        bench.periods(1, &[OWNER, TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:0.2"), "1 % before: less than was promised");
    }

    #[test]
    fn what_a_peer_makes_up_changes_nothing() {
        let mut bench = Bench::new();
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        let (now, later) = (bench.now, bench.now.saturating_add(Duration::from_secs(9)));
        bench.scaling.iteration(now, OWNER, later, later, 3);
        bench.scaling.iteration(now, OWNER, later, now, 0);
        bench.scaling.iteration(now, ClientId::new(9, 9), now, now, 3);
        assert_eq!(bench.scaling.client(OWNER).unwrap().state, ScaleState::None);
        let too_much = bench.scaling.join(now, TRAINER, GPU, quota("0.7:1.0"), ServiceClass::BestEffort);
        assert!(matches!(too_much, Err(VerticalError::Oversubscribed { .. })));
        assert!(bench.scaling.client(TRAINER).is_none());
    }
}
