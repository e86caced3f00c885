//! Vertical scaling on a node: the co-scaler's tokens as shares of the token engine.
//!
//! # Problem
//! The co-scaler issues tokens, microseconds of GPU time per period of 5 ms, but clients hold time from the token engine. Its orders
//! therefore become shares: an owner with 1,500 of 5,000 tokens is guaranteed 30 % from this moment on. The token engine and the hooks
//! keep this share like every other one.
//!
//! # Rules
//! 1. Only clients with a class take part; all other clients keep their share. The shares of the clients with a class may
//!    add up to the whole GPU at most.
//! 2. On a GPU without an SLO-sensitive client nothing is scaled: each client has its whole quota.
//! 3. Otherwise an SLO-sensitive client's request is its issued part, at least its own request and at most its limit, as far as the
//!    requests of all clients leave time. Others use the time that it leaves; when it comes, the token engine lets it go first.
//! 4. A best-effort client with SMs that fit beside an SLO-sensitive client runs at the same time, and slows its kernels down. Its limit
//!    is therefore its issued part, at least its request and [`LEAST`]. Where the two take turns, a lower limit would only idle the GPU.
//! 5. The promised quota itself does not change: the co-scaler works within it.
//! 6. A class beyond the GPU's time is reported, and the client keeps its share.
//!
//! # Cost
//! One pass every 5 ms over the clients with a class. Without such clients, none.

use crate::scale::{ClientScale, DiluVertical, Iteration, ScaleState, VerticalError, VerticalScaler};
use gshare_core::{ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Share, SmShare, Timestamp};
use std::collections::BTreeMap;

/// The least limit, in basis points: 1 %. With less, a client spends most of its time on hand-over.
const LEAST: u32 = 100;

/// The whole GPU, in basis points.
const WHOLE: u32 = 10_000;

/// A client's new share of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resize {
    pub(super) client: ClientId,
    pub(super) quota: QuotaRange,
}

#[derive(Debug)]
struct Entry {
    gpu: GpuId,
    slo_sensitive: bool,
    /// The promised share.
    share: Share,
    /// The quota in force now, as the scaler last set it.
    current: QuotaRange,
    /// GPU time used up to the last period.
    used: Duration,
}

/// The SLO-sensitive clients of a GPU.
#[derive(Debug, Clone, Copy)]
struct Owners {
    /// The sum of their wishes beyond their requests, in basis points.
    wishes: u32,
    /// The fewest SMs of any of them.
    least_sm: SmShare,
    /// The part of the GPU beside the requests of all its clients, in basis points.
    spare: u32,
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

    /// A client takes part from now on. `used`: its time so far.
    pub(super) fn join(
        &mut self,
        now: Timestamp,
        (client, used): (ClientId, Duration),
        gpu: GpuId,
        share: Share,
        class: ServiceClass,
    ) -> Result<(), VerticalError> {
        self.engine.join(now, client, gpu, share.quota, class)?;
        let (slo_sensitive, current) = (class.is_slo_sensitive(), share.quota);
        self.clients.insert(client, Entry { gpu, slo_sensitive, share, current, used });
        Ok(())
    }

    /// The promised share changed, and the new one is in force. On an error the client takes no part any more.
    pub(super) fn share_changed(
        &mut self,
        now: Timestamp,
        client: ClientId,
        share: Share,
    ) -> Result<(), VerticalError> {
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let told = self.engine.set_quota(now, client, share.quota);
        match told {
            Ok(()) => (entry.share, entry.current) = (share, share.quota),
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

    /// Ends the period and gives the changed shares, the shrinking shares first. `used` gives the time of each client since it came, and
    /// whether the client waits for a token; `spare` the part of a GPU beside the requests of all its clients, in basis points.
    pub(super) fn period(
        &mut self,
        now: Timestamp,
        used: impl Fn(ClientId) -> Option<(Duration, bool)>,
        spare: impl Fn(GpuId) -> u32,
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
        let owners = self.owners(spare);
        let mut grows = Vec::new();
        for (&client, entry) in &self.clients {
            let quota = self.quota(client, entry, owners.get(&entry.gpu));
            if quota != entry.current {
                let shrinks =
                    quota.request() < entry.current.request() || quota.limit() < entry.current.limit();
                if shrinks { &mut *resizes } else { &mut grows }.push(Resize { client, quota });
            }
        }
        resizes.append(&mut grows);
        for resize in resizes.iter() {
            let entry = self.clients.get_mut(&resize.client).expect("a client of the scaler is resized");
            entry.current = resize.quota;
        }
    }

    /// The clients of a GPU with more than their promised requests, which are as promised again: a new request needs the time.
    pub(super) fn lower(&mut self, gpu: GpuId) -> Vec<Resize> {
        let here = self.clients.iter_mut().filter(|(_, entry)| entry.gpu == gpu);
        let raised = here.filter(|(_, entry)| entry.current.request() > entry.share.quota.request());
        let lowered = raised.map(|(client, entry)| {
            entry.current = entry.share.quota;
            Resize { client: *client, quota: entry.current }
        });
        lowered.collect()
    }

    /// The SLO-sensitive clients of each GPU.
    fn owners(&self, spare: impl Fn(GpuId) -> u32) -> BTreeMap<GpuId, Owners> {
        let mut owners = BTreeMap::new();
        for (client, entry) in self.clients.iter().filter(|(_, entry)| entry.slo_sensitive) {
            let none = || Owners { wishes: 0, least_sm: SmShare::WHOLE, spare: spare(entry.gpu) };
            let of = owners.entry(entry.gpu).or_insert_with(none);
            of.wishes += self.wish(*client, entry);
            of.least_sm = of.least_sm.min(entry.share.sm);
        }
        owners
    }

    /// The issued part of a client, in basis points.
    fn issued(&self, client: ClientId) -> u32 {
        let Some(scale) = self.engine.client(client) else { return 0 };
        let most = self.engine.gpu(scale.gpu).map_or(0, |gpu| gpu.max_tokens);
        u32::try_from(scale.issued_tokens.saturating_mul(WHOLE.into()) / most.max(1)).unwrap_or(WHOLE)
    }

    /// An owner's issued part beyond its request, within its limit, in basis points.
    fn wish(&self, client: ClientId, entry: &Entry) -> u32 {
        let quota = entry.share.quota;
        self.issued(client).min(quota.limit().get().into()).saturating_sub(quota.request().get().into())
    }

    /// The quota of a client from now on, on a GPU with these owners.
    fn quota(&self, client: ClientId, entry: &Entry, owners: Option<&Owners>) -> QuotaRange {
        let promised = entry.share.quota;
        let (mut request, mut limit) = (promised.request(), promised.limit());
        let points =
            |points: u32| Quota::new(u16::try_from(points).unwrap_or(u16::MAX)).unwrap_or(Quota::WHOLE);
        match owners {
            None => {}
            Some(owners) if entry.slo_sensitive => {
                let part = self.wish(client, entry) * owners.wishes.min(owners.spare) / owners.wishes.max(1);
                request = points(u32::from(request.get()) + part);
            }
            Some(owners) if entry.share.sm.get() + owners.least_sm.get() <= SmShare::WHOLE.get() => {
                limit = points(self.issued(client).max(LEAST)).max(request).min(limit);
            }
            Some(_) => {}
        }
        QuotaRange::new(request, limit).unwrap_or(promised)
    }
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
        /// The SMs of the next clients.
        sm: SmShare,
        /// The requests of clients without a class, in basis points.
        reserved: u32,
        used: BTreeMap<ClientId, Duration>,
        waits: Option<ClientId>,
        promised: BTreeMap<ClientId, QuotaRange>,
        shares: BTreeMap<ClientId, QuotaRange>,
    }

    impl Bench {
        fn new(sm: u16) -> Self {
            let scaling = Scaling::new(vertical_scaler());
            let (now, sm) = (Timestamp::from_millis(1_000), SmShare::from_percent(sm).unwrap());
            let (used, promised, shares) = Default::default();
            Self { scaling, now, sm, reserved: 0, used, waits: None, promised, shares }
        }

        fn join(&mut self, client: ClientId, text: &str, class: ServiceClass) {
            let share = Share { quota: quota(text), sm: self.sm };
            self.scaling.join(self.now, (client, Duration::ZERO), GPU, share, class).unwrap();
            self.promised.insert(client, quota(text));
            self.shares.insert(client, quota(text));
        }

        fn leave(&mut self, client: ClientId) {
            self.scaling.leave(self.now, client);
            self.promised.remove(&client);
            self.shares.remove(&client);
        }

        fn periods(&mut self, count: u32, busy: &[ClientId]) {
            let sum = |shares: &BTreeMap<ClientId, QuotaRange>, reserved: u32| {
                shares.values().map(|share| u32::from(share.request().get())).sum::<u32>() + reserved
            };
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
                let spare = WHOLE - sum(&self.promised, self.reserved);
                self.scaling.period(self.now, used, |_| spare, &mut resizes);
                for Resize { client, quota } in resizes {
                    self.shares.insert(client, quota);
                    assert!(sum(&self.shares, self.reserved) <= WHOLE, "at every moment: {:?}", self.shares);
                }
                for (client, share) in &self.shares {
                    let promised = self.promised[client];
                    assert!(share.request() >= promised.request() && share.limit() <= promised.limit());
                }
            }
        }

        fn cycle(&mut self, millis: u64) {
            let first = self.now.saturating_sub(Duration::from_millis(millis));
            self.scaling.iteration(self.now, OWNER, first, self.now, 40);
        }
    }

    #[test]
    fn without_an_owner_everybody_keeps_what_was_promised() {
        let mut bench = Bench::new(50);
        bench.join(TRAINER, "0.2:1.0", ServiceClass::BestEffort);
        bench.periods(20, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:1.0"));
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.periods(40, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:0.6"), "all but what the owner is promised");
        bench.leave(OWNER);
        bench.periods(1, &[TRAINER]);
        assert_eq!(bench.shares[&TRAINER], quota("0.2:1.0"), "and all of it again");
        bench.scaling.leave(bench.now, TRAINER);
        assert_eq!(bench.scaling.next_deadline(), None, "no client takes part: nothing to wake up for");
    }

    #[test]
    fn a_slow_iteration_takes_from_the_trainer_and_gives_to_its_owner() {
        let mut bench = Bench::new(50);
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.join(TRAINER, "0:1.0", ServiceClass::BestEffort);
        bench.periods(40, &[TRAINER]);
        let both = [OWNER, TRAINER];
        bench.periods(6, &both);
        bench.cycle(20);
        bench.periods(1, &both);
        // The scaler has not yet seen the client alone: it learns, and the trainer steps back.
        assert_eq!(bench.shares[&TRAINER].limit().get(), 100, "one per cent");
        assert!(bench.shares[&OWNER].request() >= Quota::from_percent(85).unwrap());
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

    /// A lower limit of the trainer would leave the GPU idle: the owner's request alone decides its turns.
    #[test]
    fn a_trainer_that_takes_turns_with_its_owner_keeps_its_limit() {
        let mut bench = Bench::new(60);
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        bench.join(TRAINER, "0.2:1.0", ServiceClass::BestEffort);
        // It learns from its first iteration, and the second is slow.
        for (reserved, millis) in [(0, 20), (1_500, 44)] {
            bench.reserved = reserved;
            bench.periods(40, &[TRAINER]);
            assert_eq!(bench.shares[&OWNER], quota("0.4:0.9"), "it needs nothing");
            bench.periods(6, &[OWNER, TRAINER]);
            bench.cycle(millis);
            bench.periods(1, &[OWNER, TRAINER]);
            let most = quota(if reserved == 0 { "0.8:0.9" } else { "0.65:0.9" });
            assert_eq!(bench.shares[&OWNER], most, "all that no other client is promised");
            assert_eq!(bench.shares[&TRAINER], quota("0.2:1.0"));
            bench.periods(8, &[OWNER, TRAINER]);
            bench.cycle(20);
            bench.periods(200, &[TRAINER]);
        }
    }

    /// The use of an iteration is charged when its token comes back, and that is after the iteration.
    #[test]
    fn between_two_iterations_the_trainer_is_lent_what_is_not_promised_unless_the_owner_waits() {
        let mut bench = Bench::new(50);
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
        let mut bench = Bench::new(50);
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
        let mut bench = Bench::new(100);
        bench.join(OWNER, "0.4:0.9", ServiceClass::SLO_SENSITIVE);
        let (now, later) = (bench.now, bench.now.saturating_add(Duration::from_secs(9)));
        bench.scaling.iteration(now, OWNER, later, later, 3);
        bench.scaling.iteration(now, OWNER, later, now, 0);
        bench.scaling.iteration(now, ClientId::new(9, 9), now, now, 3);
        assert_eq!(bench.scaling.client(OWNER).unwrap().state, ScaleState::None);
        let share = Share { quota: quota("0.7:1.0"), sm: SmShare::WHOLE };
        let too_much =
            bench.scaling.join(now, (TRAINER, Duration::ZERO), GPU, share, ServiceClass::BestEffort);
        assert!(matches!(too_much, Err(VerticalError::Oversubscribed { .. })));
        assert!(bench.scaling.client(TRAINER).is_none());
    }
}
