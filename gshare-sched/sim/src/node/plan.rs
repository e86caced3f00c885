//! What a seed means: the node, its clients, and what they do to each other.

use crate::rng::Rng;
use gshare_core::{Duration, Quota, QuotaRange, Share, SmShare};

/// Things that may happen in a run. Each seed switches on a random half of them: a run in which everything happens at once
/// hides what only shows when some of it does not (swarm testing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Behaviours {
    /// Clients fall silent and wake up again.
    pub pauses: bool,
    /// Clients come later.
    pub joins: bool,
    /// Clients leave in good order.
    pub leaves: bool,
    /// Clients are killed with kernels queued.
    pub kills: bool,
    /// Clients stop answering, with a token in hand.
    pub hangs: bool,
    /// Shares change on the fly.
    pub share_changes: bool,
    /// Predicted costs are up to 30 % wrong.
    pub mispredictions: bool,
    /// Messages take up to five times as long as usual.
    pub slow_messages: bool,
}

impl Behaviours {
    fn draw(rng: &mut Rng) -> Self {
        let mut coin = || rng.percent(50);
        Self {
            pauses: coin(),
            joins: coin(),
            leaves: coin(),
            kills: coin(),
            hangs: coin(),
            share_changes: coin(),
            mispredictions: coin(),
            slow_messages: coin(),
        }
    }
}

/// Which promise the clients of a GPU can be held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Request and limit are equal, any SMs; the limits add up to what fits even one after the other. Whoever never
    /// pauses gets his limit, whatever the others do.
    Capped,
    /// Request and limit are equal, and all SMs fit at once: limits may add up to more than one.
    SideBySide,
    /// No two fit at once, and limits leave room: time is shared by requests, the rest by who is least above his.
    Elastic,
}

/// One client.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// What it may take.
    pub share: Share,
    /// Its kernels take from this to this.
    pub kernel: (Duration, Duration),
    /// Predicted cost of a kernel, in per cent of the true one.
    pub predicted_percent: u64,
    /// Whether it falls silent now and then.
    pub pauses: bool,
}

/// One GPU and the clients it begins with.
#[derive(Debug, Clone)]
pub struct GpuPlan {
    /// Which promise is checked.
    pub shape: Shape,
    /// Its clients.
    pub clients: Vec<Plan>,
}

/// The whole run.
#[derive(Debug, Clone)]
pub struct NodePlan {
    /// What may happen.
    pub behaviours: Behaviours,
    /// The GPUs.
    pub gpus: Vec<GpuPlan>,
    /// How long a message takes, from this to this.
    pub latency: (Duration, Duration),
    /// How long after its end a kernel is known to have ended, at most.
    pub observe: Duration,
    /// GPU time a client may have in flight.
    pub in_flight: Duration,
    /// Windows that are simulated.
    pub windows: u64,
}

/// Most GPUs and clients of a node.
pub const GPUS: u64 = 4;
/// Most clients at one time.
pub const CLIENTS: u64 = 64;

impl NodePlan {
    /// The plan of a seed.
    pub fn draw(rng: &mut Rng) -> Self {
        let behaviours = Behaviours::draw(rng);
        let gpus = rng.between(1, GPUS);
        // Small nodes as often as large ones.
        let most = *rng.pick(&[4, 8, 16, 32, CLIENTS]).unwrap_or(&CLIENTS);
        let clients = rng.between(2, most);
        let micros = Duration::from_micros;
        let slow = if behaviours.slow_messages { 5 } else { 1 };
        let latency = (micros(rng.between(5, 20)), micros(slow * rng.between(20, 40)));
        let plan = |gpu: u64, rng: &mut Rng| {
            let share = clients / gpus + u64::from(gpu < clients % gpus);
            GpuPlan::draw(share, behaviours, latency.1, rng)
        };
        Self {
            behaviours,
            gpus: (0..gpus).map(|gpu| plan(gpu, rng)).collect(),
            latency,
            observe: micros(rng.between(10, 60)),
            in_flight: micros(rng.between(1_000, 3_000)),
            windows: 32,
        }
    }
}

impl GpuPlan {
    fn draw(clients: u64, behaviours: Behaviours, latency: Duration, rng: &mut Rng) -> Self {
        let shape = *rng.pick(&[Shape::Capped, Shape::SideBySide, Shape::Elastic]).unwrap_or(&Shape::Capped);
        let count = clients.max(1);
        // Every hand-over leaves the GPU idle for two messages and the rest of a poll; each client is handed the GPU a
        // few times a window, and what is lost that way cannot be promised to anyone.
        let lost = (4 * count + 20) * (2 * latency.as_nanos() + 100_000) / 10_000;
        let promised = 9_000_u64.saturating_sub(lost).max(2_000);
        // The longest kernel is small beside the smallest share: 10 windows of a client hold at least ten kernels.
        let longest = rng.between(100, 1_000).min(20_000 / count);
        let clients = (0..clients)
            .map(|_| {
                let part = promised / count;
                let request = rng.between(part / 2, part).max(1);
                let (request, limit, sm) = match shape {
                    Shape::Capped => (request, request, rng.between(100, 10_000)),
                    Shape::SideBySide => {
                        let limit = rng.between(500, 9_000);
                        (limit, limit, rng.between(50, 10_000 / count))
                    }
                    Shape::Elastic => (request, rng.between(request, 10_000), rng.between(5_001, 10_000)),
                };
                let shortest = rng.between(20, longest);
                Plan {
                    share: share(request, limit, sm),
                    kernel: (Duration::from_micros(shortest), Duration::from_micros(longest)),
                    predicted_percent: if behaviours.mispredictions { rng.between(70, 130) } else { 100 },
                    pauses: shape != Shape::Elastic && behaviours.pauses && rng.percent(40),
                }
            })
            .collect();
        Self { shape, clients }
    }

    /// Another share that keeps to the promise of the shape: never more than the old one.
    pub fn smaller_share(&self, old: Share, rng: &mut Rng) -> Share {
        let request = u64::from(old.quota.request().get());
        let request = rng.between((request / 2).max(1), request.max(1));
        match self.shape {
            Shape::Elastic => share(request, u64::from(old.quota.limit().get()), u64::from(old.sm.get())),
            Shape::Capped | Shape::SideBySide => share(request, request, u64::from(old.sm.get())),
        }
    }
}

fn share(request: u64, limit: u64, sm: u64) -> Share {
    let quota = |points: u64| u16::try_from(points).ok().and_then(Quota::new).unwrap_or(Quota::WHOLE);
    let sm = u16::try_from(sm).ok().and_then(SmShare::new).unwrap_or(SmShare::WHOLE);
    Share { quota: QuotaRange::new(quota(request), quota(limit)).unwrap_or(QuotaRange::BEST_EFFORT), sm }
}
