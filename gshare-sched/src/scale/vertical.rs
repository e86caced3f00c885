//! Fast scaling up and down on one GPU (Dilu, section 3.4.1, Algorithm 2), with its gaps closed.
//!
//! # Problem
//! An inference instance and a trainer share a GPU. The instance is mostly idle or far below the SMs its latency needs, and the trainer
//! should have the rest; in a burst the instance must have its SMs back within milliseconds. Static shares waste one or break the other.
//! So the scaler sets the shares again in every period (5 ms), by the one sign of trouble in the launches: a longer KLC of the instance.
//!
//! # Terms
//! Beside the terms of [`crate::scale`], per GPU and in tokens per period:
//! - `M`: its `MaxTokens`; `request = M x guaranteed share`, `limit = M x greatest share`. A share below 1 % (or 0, as best effort)
//!   counts as 1 %, so every client always has tokens;
//! - `last`: the client's tokens of the period before; `grown(x)`: `x` and 30 % more;
//! - `floor`: an owner's request; 1 % of any other client's. Floors never exceed requests, so all of them can always be kept;
//! - **idle**: without a launch for one **window** (100 periods: the printed `sum(RW) == 0`);
//! - an owner **rests** when it has neither launched nor waited for tokens for two periods after an iteration;
//! - `ratio = T_current / T_min`, the paper's `1 + dT`: the last KLC over the shortest undisturbed one, per bucket of batch sizes;
//! - an owner's **need**: the most tokens it launched in a period of late (a quarter less with each period) and 30 % more, or its whole
//!   limit once it ran out.
//!
//! # Algorithm
//! At the end of each period, for each GPU:
//! 1. **Owners.** An idle owner is in RECOVERY and wants its request. Else an owner with a ratio above what its tolerance allows is in
//!    EMERGENCY, with its ratio (at most 4) as severity, and wants its limit. Else an owner beside idle clients only is in RECOVERY and
//!    wants `min(grown(max(last, request)), limit)`. Any other owner is in CONTENTION. A busy owner wants at least its need; a
//!    resting owner wants its request.
//! 2. **The GPU's state** is its owners' worst: EMERGENCY (of the highest severity), else CONTENTION, else RECOVERY; NONE without any.
//! 3. **The others** want their limit in NONE, and `min(grown(last), limit)` in RECOVERY. In CONTENTION and EMERGENCY each wants `last`,
//!    and once per finished KLC above the tolerated excess, or below half of it, `last x half of the tolerated excess / excess`. While all
//!    owners rest or are idle, they want their limit.
//! 4. **Share out** `M`: first every floor (in NONE: every request); then the owners' wishes beyond it, in proportion to the wish times
//!    the severity; then the others' wishes beyond their floors, in proportion to their requests; the rest goes to busy owners.
//!
//! # Invariants
//! - the tokens issued on a GPU add up to at most `M`, and so do the floors;
//! - from the end of its first period a client is issued at least its floor (one token or more), and at most its limit;
//! - an EMERGENCY ends at the latest one window after its owner stopped. A departed client's tokens are shared out at the end of the period.
//!
//! # Cost
//! O(log n) per call for n clients, but O(20) more for an iteration. A period costs O(n log n) for the clients on the GPU, and one more
//! pass per distinct share at its cap. A client takes about 200 bytes, and a bucket of batch sizes 350.

mod plans;

use super::cycle::Cycles;
use crate::scale::{ClientScale, GpuScale, Iteration, ScaleState, VerticalError, VerticalScaler};
use gshare_core::{BasisPoints, ClientId, Duration, GpuId, QuotaRange, ServiceClass, Timestamp};
use std::collections::BTreeMap;

/// Length of a period. 5 ms, as in the paper: several periods fit into one iteration of the fastest models.
const PERIOD: Duration = Duration::from_millis(5);

/// Periods without a launch after which a client is idle: half a second.
const WINDOW: u64 = 100;

/// `M`: the microseconds of a period.
const MAX_TOKENS: u64 = PERIOD.as_nanos() / 1_000;

/// The whole, in basis points.
const WHOLE: u64 = 10_000;

/// The highest severity: beyond four times the shortest KLC, a longer one is no sign of more trouble.
const MAX_SEVERITY: u64 = 4 * WHOLE;

/// Growth of a client's tokens in one step: from 1 % to the whole in 18 periods, less than 100 ms.
const GROWTH: BasisPoints = BasisPoints::percent(30);

/// The scaler ignores shorter KLCs. Two periods: the wait for the next period is no contention.
const MIN_CYCLE: Duration = Duration::from_millis(10);

/// Share of a client with a smaller guarantee, within its limit.
const MIN_SHARE: BasisPoints = BasisPoints::percent(1);

/// The least tolerance: KLCs of one batch size vary by as much.
const MIN_TOLERANCE: u64 = 500;

/// Periods without a launch, and without a wait for tokens, after which an owner rests: between two batches of a queue one period may
/// begin and end without a launch.
const REST_PERIODS: u64 = 2;

/// `share` of `tokens`, rounded down, at least one.
const fn part(share: BasisPoints, tokens: u64) -> u64 {
    // At most 2^40 x 10_000: fits.
    let part = tokens * share.get() as u64 / WHOLE;
    if part == 0 { 1 } else { part }
}

/// The part by which a KLC of `cycle`, begun `pause` after the end of the one before, may be longer for latencies to stay within
/// `tolerance` (basis points): `tolerance x (1 - rho) / (1 + tolerance x rho)`.
fn within_a_queue(tolerance: u64, cycle: Duration, pause: Duration) -> u64 {
    let (cycle, pause) = (u128::from(cycle.as_nanos()), u128::from(pause.as_nanos()));
    let (tolerance, whole) = (u128::from(tolerance), u128::from(WHOLE));
    // Both sides of the fraction are multiplied by `cycle + pause` and 10 000.
    let part = tolerance * pause * whole / ((whole * (cycle + pause) + tolerance * cycle).max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// The judgement of the last KLC.
#[derive(Debug, Clone, Copy)]
struct Verdict {
    /// In basis points, at least [`WHOLE`].
    ratio: u64,
    /// A higher ratio is an emergency.
    most: u64,
    /// The judgement counts until then.
    until: Timestamp,
}

#[derive(Debug)]
struct Client {
    gpu: GpuId,
    class: ServiceClass,
    state: ScaleState,
    /// Tokens per period: the guarantee, and the most the client may get.
    request: u64,
    limit: u64,
    last: u64,
    /// Whether the GPU's issued tokens include `last`; false until the client's first period ends.
    issued: bool,
    /// The last period with a launch.
    active: Option<u64>,
    /// Tokens launched in the open period, and the client's need per period by its use of late.
    used: u64,
    demand: u64,
    cycles: Cycles,
    /// The client's tokens before it stepped back for an owner that learns, or before the owners lent it more.
    resumes: Option<u64>,
    /// The last launch of its last iteration.
    finished: Option<Timestamp>,
    verdict: Option<Verdict>,
}

impl Client {
    /// Whether the client launched nothing in the last `periods` up to `period`.
    fn is_idle(&self, period: u64, periods: u64) -> bool {
        self.active.is_none_or(|active| period - active >= periods)
    }

    /// Whether the client has ended an iteration, and neither launched nor wanted to since.
    fn rests(&self, period: u64) -> bool {
        self.finished.is_some() && self.is_idle(period, REST_PERIODS)
    }

    fn floor(&self) -> u64 {
        if self.class.is_slo_sensitive() { self.request } else { (self.request / 100).max(1) }
    }
}

#[derive(Debug, Default)]
struct Gpu {
    /// In the order of their arrival.
    clients: Vec<ClientId>,
    state: ScaleState,
    issued: u64,
    /// Sum of the requests.
    guaranteed: u64,
    /// Until then, kernels of others than owners may be in the way.
    loud_until: Timestamp,
    /// The end of the others' step back for an owner that learns, and the earliest start of another.
    learns_until: Timestamp,
    learns_again: Timestamp,
    /// The factor by which the others' tokens change, after the KLCs that ended in this period.
    step: Option<u64>,
}

/// Fast scaling up and down on one GPU (Dilu, section 3.4.1, Algorithm 2). The essay in `scale/vertical.rs` states its rules.
///
/// # Example
/// Tokens are microseconds, so `M` = 5000. Owner A has 30%:60%, or 1500 to 3000 tokens; trainer B has 20%:100%, or 1000 to 5000. A's first
/// KLC takes 50 ms beside B: B steps back to 10 tokens, and A has 3000, until a KLC of 20 ms ends. Both are at their own tokens again. The
/// next KLC takes 50 ms: in EMERGENCY, of severity 2.5, B has a quarter of 1000 and A 3000. KLCs of 20 ms double and quadruple B's tokens.
/// A stops, and two periods later B is lent all but A's request: 3500.
///
/// # Differences from the paper
/// 1. Lines 19 and 27 change the others' tokens in every period, by the state alone, and line 27 divides by `dT`, which raises tokens while
///    `dT < 1`. A neighbour lengthens a KLC about in proportion to its launches, so the others' tokens follow the KLCs: they change with
///    each finished KLC, by at least a quarter and at most four, and by at most one as long as the minimum is not clean (8).
/// 2. With several owners, the paper leaves the choice of `dT` and the end of EMERGENCY open. Here states belong to owners, and the GPU's
///    state is their join.
/// 3. Each owner may take its limit, and limits add up to more than the GPU (gamma = 1.5). Here `M` bounds the issued sum: requests are
///    guaranteed, and the rest goes by severity.
/// 4. Line 14 looks at the last KLC even if nothing runs: EMERGENCY for ever. The scaler tests idleness first, and a KLC counts for one
///    window and its own length.
/// 5. Line 19 has no upper bound and never leaves 0. Here the limit bounds it, and it starts at the request.
/// 6. No rule returns to NONE. Here NONE means no SLO-sensitive client on the GPU, and all clients share in proportion.
/// 7. `R_last` of a newcomer is open. Here it is the newcomer's request, and for others than owners at most the free tokens.
/// 8. **Minima.** `T_min` never ages, and one minimum serves all batch sizes. Beside a neighbour without rest, the shortest KLC is a
///    contended one, ratios are 1, and the neighbour grows step by step unnoticed. So minima belong to a bucket of batch sizes, and only
///    **clean** KLCs become minima: those during which every client other than an owner was idle or at its floor. A KLC shorter than all
///    before becomes one as well, for neighbours never make a KLC shorter. At the first KLC of a bucket, and every 30 s until a clean one
///    is known, the others step down to their floors and the owner rises to its limit, until a clean KLC ends or a window is over. Such a
///    step comes at most once in five windows. The scaler ignores KLCs shorter than two periods.
/// 9. **The tolerance bounds latency, not the KLC.** A queue multiplies a slowdown of its server: at an occupancy of `rho` requests spend
///    `T / (1 - rho)`, and KLCs `s` times as long multiply it by `s (1 - rho) / (1 - s rho)`. To stay within `1 + tolerance`, `s` may be
///    `(1 + tolerance) / (1 + tolerance x rho)`: all of the tolerance for an owner with hardly any requests, and nothing for an owner with
///    back-to-back iterations, as in a burst. `rho` is the last KLC's part of the time since the end of the one before, and the
///    tolerated excess is never less than 5 %. With 60 %, a KLC of 25 ms may be 23 % longer if it began 25 ms after the
///    one before, and 5 % if it began at once.
/// 10. **Rest.** The printed window of half a second is longer than the pauses between bursts, so the tokens a burst took would stay taken
///     for as long as bursts went on. While all owners on a GPU rest or are idle, they lend the others all tokens without a guarantee, at
///     once; with an owner's next launch the others are back at their own tokens one period later.
#[derive(Debug, Default)]
pub struct DiluVertical {
    now: Timestamp,
    /// Number of the open period, and its end.
    period: u64,
    period_end: Timestamp,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuId, Gpu>,
}

/// The tokens a share guarantees, and the most it may get.
fn tokens(quota: QuotaRange) -> (u64, u64) {
    let (request, limit) = (quota.request().basis_points(), quota.limit().basis_points());
    let request = part(request.max(limit.min(MIN_SHARE)), MAX_TOKENS);
    (request, part(limit, MAX_TOKENS).max(request))
}

const fn grown(tokens: u64) -> u64 {
    tokens + part(GROWTH, tokens)
}

impl DiluVertical {
    /// The client, with its GPU.
    fn pair(&mut self, client: ClientId) -> Result<(&mut Client, &mut Gpu), VerticalError> {
        let unknown = || VerticalError::UnknownClient { client };
        let known = self.clients.get_mut(&client).ok_or_else(unknown)?;
        let gpu = self.gpus.get_mut(&known.gpu).ok_or_else(unknown)?;
        Ok((known, gpu))
    }

    /// Steps 1 to 4 for one GPU, at the end of period `ended`.
    fn issue(&mut self, id: GpuId, ended: u64) {
        let Some(mut gpu) = self.gpus.remove(&id) else { return };
        self.note_loud(&mut gpu);
        self.note_demand(&gpu);
        let mut plans = Vec::with_capacity(gpu.clients.len());
        gpu.state = self.plan_owners(&gpu, ended, &mut plans);
        self.plan_others(&mut gpu, ended, &mut plans);
        plans::share_out(&mut plans);
        for plan in &plans {
            let Some(client) = self.clients.get_mut(&plan.client) else { continue };
            let before = if client.issued { client.last } else { 0 };
            gpu.issued = gpu.issued + plan.tokens - before;
            (client.last, client.issued) = (plan.tokens, true);
        }
        self.gpus.insert(id, gpu);
        self.invariants(id);
    }

    /// Notes whether a client other than an owner used more than its floor in the ended period; its kernels may run for one more.
    fn note_loud(&self, gpu: &mut Gpu) {
        let loud = |client: &Client| {
            let other = !client.class.is_slo_sensitive();
            other && client.active == Some(self.period) && client.last > client.floor()
        };
        if gpu.clients.iter().filter_map(|id| self.clients.get(id)).any(loud) {
            gpu.loud_until = self.now.saturating_add(PERIOD);
        }
    }

    /// Notes each client's need per period: its limit if it ran out of tokens, else its largest use of late.
    fn note_demand(&mut self, gpu: &Gpu) {
        for id in &gpu.clients {
            let Some(client) = self.clients.get_mut(id) else { continue };
            let used = core::mem::take(&mut client.used);
            client.demand = match used >= client.last {
                true => client.limit,
                false => used.max(client.demand - client.demand / 4),
            };
        }
    }

    fn invariants(&self, id: GpuId) {
        if !cfg!(debug_assertions) {
            return;
        }
        let gpu = &self.gpus[&id];
        let (mut issued, mut guaranteed) = (0, 0);
        for (id, client) in gpu.clients.iter().map(|id| (id, &self.clients[id])) {
            let floor = client.floor();
            assert!(floor >= 1 && floor <= client.request, "a floor is never more than what is guaranteed");
            assert!(client.last >= floor, "{id} has {} tokens, floor {floor}", client.last);
            assert!(client.last <= client.limit, "{id} is above its limit");
            issued += client.last;
            guaranteed += client.request;
        }
        assert_eq!((issued, guaranteed), (gpu.issued, gpu.guaranteed), "sums of the clients");
        assert!(issued <= MAX_TOKENS, "{issued} of {MAX_TOKENS} tokens issued");
        assert!(guaranteed <= MAX_TOKENS, "{guaranteed} of {MAX_TOKENS} tokens guaranteed");
    }
}

/// Whether so many tokens may be guaranteed on a GPU.
fn check_guaranteed(gpu: GpuId, guaranteed: u64) -> Result<(), VerticalError> {
    match guaranteed <= MAX_TOKENS {
        true => Ok(()),
        false => Err(VerticalError::Oversubscribed { gpu, guaranteed, max_tokens: MAX_TOKENS }),
    }
}

impl VerticalScaler for DiluVertical {
    fn join(
        &mut self,
        now: Timestamp,
        client: ClientId,
        gpu: GpuId,
        quota: QuotaRange,
        class: ServiceClass,
    ) -> Result<(), VerticalError> {
        if self.clients.contains_key(&client) {
            return Err(VerticalError::ClientExists { client });
        }
        if let ServiceClass::SloSensitive { tolerance: BasisPoints::ZERO } = class {
            return Err(VerticalError::ZeroTolerance { client });
        }
        let (request, limit) = tokens(quota);
        check_guaranteed(gpu, self.gpus.get(&gpu).map_or(0, |gpu| gpu.guaranteed) + request)?;
        self.catch_up(now);
        if self.clients.is_empty() {
            // No present client's period is cut short.
            self.period_end = now.saturating_add(PERIOD);
        }
        let home = self.gpus.entry(gpu).or_default();
        home.clients.push(client);
        home.guaranteed += request;
        let free = MAX_TOKENS.saturating_sub(home.issued);
        let new = Client {
            gpu,
            class,
            state: ScaleState::None,
            request,
            limit,
            last: if class.is_slo_sensitive() { request } else { request.min(free) },
            issued: false,
            active: None,
            used: 0,
            demand: 0,
            cycles: Cycles::default(),
            resumes: None,
            finished: None,
            verdict: None,
        };
        self.clients.insert(client, new);
        Ok(())
    }

    fn set_quota(
        &mut self,
        now: Timestamp,
        client: ClientId,
        quota: QuotaRange,
    ) -> Result<(), VerticalError> {
        let (request, limit) = tokens(quota);
        let (known, gpu) = self.pair(client)?;
        check_guaranteed(known.gpu, gpu.guaranteed - known.request + request)?;
        self.catch_up(now);
        let (known, gpu) = self.pair(client)?;
        gpu.guaranteed = gpu.guaranteed - known.request + request;
        (known.request, known.limit) = (request, limit);
        // Kernel times under another share say nothing about the new share.
        known.cycles.clear();
        known.verdict = None;
        Ok(())
    }

    fn leave(&mut self, now: Timestamp, client: ClientId) {
        self.catch_up(now);
        let Some(known) = self.clients.remove(&client) else { return };
        let Some(gpu) = self.gpus.get_mut(&known.gpu) else { return };
        gpu.issued -= if known.issued { known.last } else { 0 };
        gpu.guaranteed -= known.request;
        gpu.clients.retain(|other| *other != client);
        if gpu.clients.is_empty() {
            gpu.state = ScaleState::None;
        }
    }

    fn used(&mut self, now: Timestamp, client: ClientId, tokens: u64) {
        self.catch_up(now);
        if let Some(known) = self.clients.get_mut(&client).filter(|_| tokens > 0) {
            known.active = Some(self.period);
            known.used = known.used.saturating_add(tokens);
        }
    }

    fn iterated(
        &mut self,
        now: Timestamp,
        client: ClientId,
        iteration: Iteration,
    ) -> Result<(), VerticalError> {
        let Iteration { batch, first_launch, last_launch } = iteration;
        self.pair(client)?;
        if batch == 0 {
            return Err(VerticalError::ZeroBatch { client });
        }
        if first_launch > last_launch || last_launch > now {
            return Err(VerticalError::BadIteration { client, first_launch, last_launch, now });
        }
        self.catch_up(now);
        let (known, gpu) = self.pair(client)?;
        let ServiceClass::SloSensitive { tolerance } = known.class else { return Ok(()) };
        let cycle = last_launch.saturating_since(first_launch);
        let before = known.finished.replace(last_launch);
        if cycle < MIN_CYCLE {
            return Ok(());
        }
        let tolerance = u64::from(tolerance.get());
        let pause = before.map_or(Duration::MAX, |before| first_launch.saturating_since(before));
        let tolerance = within_a_queue(tolerance, cycle, pause).max(MIN_TOLERANCE.min(tolerance));
        // A clean cycle ends both times.
        let clean = first_launch >= gpu.loud_until;
        let learns = now < gpu.learns_until;
        if clean {
            gpu.learns_until = now;
        }
        let judged = known.cycles.judge(now, batch, cycle.as_nanos() / 1_000, clean, now >= gpu.learns_again);
        let window = PERIOD.saturating_mul(WINDOW);
        if judged.asks {
            gpu.learns_until = now.saturating_add(window);
            gpu.learns_again = now.saturating_add(window.saturating_mul(5));
        }
        // While the others step back, the ratio says nothing about their later tokens.
        if let Some(ratio) = judged.ratio.filter(|_| !learns) {
            let (aim, longer) = (tolerance / 2, (ratio - WHOLE).max(1));
            if longer > tolerance || longer <= aim {
                let most = if judged.sure { MAX_SEVERITY } else { WHOLE };
                let step = (aim * WHOLE / longer).clamp(WHOLE * WHOLE / MAX_SEVERITY, most);
                gpu.step = Some(gpu.step.map_or(step, |other| other.min(step)));
            }
        }
        let until = now.saturating_add(window).saturating_add(cycle);
        let ratio = judged.ratio.unwrap_or(WHOLE);
        known.verdict = Some(Verdict { ratio, most: WHOLE + tolerance, until });
        Ok(())
    }

    fn catch_up(&mut self, now: Timestamp) {
        self.now = now;
        if self.clients.is_empty() || now < self.period_end {
            return;
        }
        let late = now.saturating_since(self.period_end).as_nanos() / PERIOD.as_nanos();
        let ended = self.period + late;
        for gpu in self.gpus.keys().copied().collect::<Vec<_>>() {
            self.issue(gpu, ended);
        }
        self.period = ended + 1;
        self.period_end = self.period_end.saturating_add(PERIOD.saturating_mul(late + 1));
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        (!self.clients.is_empty()).then_some(self.period_end)
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuScale> {
        let known = self.gpus.get(&gpu)?;
        Some(GpuScale { state: known.state, max_tokens: MAX_TOKENS, issued_tokens: known.issued })
    }

    fn client(&self, client: ClientId) -> Option<ClientScale> {
        let client = self.clients.get(&client)?;
        Some(ClientScale {
            gpu: client.gpu,
            class: client.class,
            state: client.state,
            issued_tokens: if client.issued { client.last } else { 0 },
            floor_tokens: client.floor(),
        })
    }
}
