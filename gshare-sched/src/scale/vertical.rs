//! Fast scaling up and down on one GPU (Dilu, section 3.4.1, Algorithm 2), with its gaps closed.
//!
//! # Problem
//! An inference instance and a trainer share a GPU. The instance is mostly idle or far below the SMs its latency needs, and the trainer
//! should have the rest; in a burst the instance must have its SMs back within milliseconds. Static shares waste one or break the other.
//! So the scaler sets the shares again in every period (5 ms), by the one sign of trouble in the launches: a longer KLC of the instance.
//!
//! # Terms
//! Beside the terms of [`crate::scale`], per GPU and in tokens per period:
//! - `M`: its `MaxTokens`; `request = M x guaranteed share`, `limit = M x greatest share`. A share below `min_share` (or 0, as best
//!   effort) counts as `min_share`, so every client always has tokens;
//! - `last`: the client's tokens of the period before; `grown(x)`: `x` and `growth` (30 %) more;
//! - `floor`: an owner's request; for any other client its largest kernel of late, between 1 % of its request and the request (always 1 %
//!   with [`learn`](DiluVerticalConfig::learn)). Floors never exceed requests, so all of them can always be kept;
//! - **idle**: without a launch for one **window** (100 periods: the printed `sum(RW) == 0`);
//! - `ratio = T_current / T_min`, the paper's `1 + dT`: the last KLC over the shortest of the last 20 in 30 s, per model and batch bucket.
//!
//! # Algorithm
//! At the end of each period, for each GPU:
//! 1. **Owners.** An idle owner is in RECOVERY and wants its request. Else an owner with a ratio above `1 + tolerance` is in EMERGENCY,
//!    with its ratio (at most 4) as severity, and wants its limit. Else an owner beside idle clients only is in RECOVERY and wants
//!    `min(grown(max(last, request)), limit)`. Any other owner is in CONTENTION and wants its request.
//! 2. **The GPU's state** is its owners' worst: EMERGENCY (of the highest severity), else CONTENTION, else RECOVERY; NONE without any.
//! 3. **The others** want their limit in NONE, and `min(grown(last), limit)` in RECOVERY. In EMERGENCY each wants `min(request, last)`,
//!    divided by the severity once per finished KLC. In CONTENTION each wants `last`, and `min(grown(last), limit)` once per `calm_cycles`
//!    KLCs in a row within 20 % of the minimum.
//! 4. **Share out** `M`: first every floor (in NONE: every request); then the owners' wishes beyond it, in proportion to the wish times
//!    the severity; then the others' wishes beyond their floors, in proportion to their requests.
//! 5. **Issue** the changes: first smaller amounts, then larger ones.
//!
//! # Invariants
//! - after each single action the tokens issued on a GPU add up to at most `M`, and so do the floors;
//! - from the end of its first period a client is issued at least its floor (one token or more), and an owner at most its limit;
//! - with debts carried ([`TokenBalance`](crate::scale::TokenBalance)) a client launches its next kernel within `c / floor` periods,
//!   rounded up, and one more, after a kernel of `c` tokens. An EMERGENCY ends at the latest one window after its owner stopped. A
//!   departed client's tokens are shared out at the end of the period.
//!
//! # Cost
//! O(1) per event, but O(20) for an iteration. A period costs O(n) for n clients on the GPU, and one more pass per distinct share at its
//! cap. A client takes about 200 bytes, and a model and bucket of batch sizes 350.

mod plans;

use super::apportion::Want;
use super::cycle::Cycles;
use crate::scale::{
    ClientScale, GpuScale, ScaleState, VerticalAction, VerticalError, VerticalEvent, VerticalScaler,
};
use gshare_core::slots::NamedSlots;
use gshare_core::{
    BasisPoints, ClientId, ConfigError, Duration, Engine, GpuId, ModelId, QuotaRange, ServiceClass,
    TimeWentBack, Timestamp,
};
use plans::Plan;

/// The most tokens of a GPU in a period. With 2^40, products stay within 128 bits.
const MAX_TOKENS: u64 = 1 << 40;

/// The whole, in basis points.
const WHOLE: u64 = 10_000;

/// The highest severity: beyond four times the shortest KLC, a longer one is no sign of more trouble.
const MAX_SEVERITY: u64 = 4 * WHOLE;

/// Excess over the shortest KLC up to which a KLC is good. KLCs vary as much without any neighbour.
const CALM_GROWTH: BasisPoints = BasisPoints::percent(20);

/// Growth of a client's tokens in one step: from 1 % to the whole in 18 periods, less than 100 ms.
const GROWTH: BasisPoints = BasisPoints::percent(30);

/// Good KLCs in a row before others grow beside a busy owner.
const CALM_CYCLES: u32 = 5;

/// The scaler ignores shorter KLCs. Two periods: the wait for the next period is no contention.
const MIN_CYCLE: Duration = Duration::from_millis(10);

/// Share of a client with a smaller guarantee, within its limit.
const MIN_SHARE: BasisPoints = BasisPoints::percent(1);

/// The least tolerance, with `learn`: KLCs of one batch size vary by as much.
const MIN_TOLERANCE: BasisPoints = BasisPoints::percent(5);

/// Periods without a launch, and without a wait for tokens, after which an owner rests, with `learn`: between two batches of a queue one
/// period may begin and end without a launch.
const REST_PERIODS: u64 = 2;

crate::settings_table::settings! {
    /// Settings of [`DiluVertical`].
    pub struct DiluVerticalConfig {
        /// Length of a period. 5 ms, as in the paper: several periods fit into one iteration of the fastest models.
        #[cfg_attr(feature = "serde", serde(rename = "period_ns"))]
        pub period: Duration = Duration::from_millis(5), with_period;
        /// Periods without a launch after which a client is idle. 100 periods are half a second.
        pub window_periods: u32 = 100, with_window_periods;
        /// Owners learn their undisturbed KLCs and get the tokens no other client wants, as [`DiluVertical`] explains. Off, as in the
        /// paper.
        pub learn: bool = false, with_learn;
        /// Number of client slots. 4,096.
        pub max_clients: u32 = 4096, with_max_clients;
        /// Number of GPUs. 64.
        pub max_gpus: u32 = 64, with_max_gpus;
    }
}

impl DiluVerticalConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let ms = Duration::from_millis;
        gshare_core::check_fields!(self {
            period in ms(1)..=ms(1_000), "need 1ms to 1s";
            window_periods in 1..=100_000, "need 1 to 100000";
            max_clients in 1..=1 << 20, "need 1 to 1048576";
            max_gpus in 1..=4096, "need 1 to 4096";
        })
    }

    /// `M` of a GPU without calibration: the microseconds of a period.
    fn default_max_tokens(&self) -> u64 {
        self.period.as_nanos() / 1_000
    }
}

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
    /// The KLC ended in the period that ends now.
    fresh: bool,
}

#[derive(Debug)]
struct Client {
    id: ClientId,
    gpu: usize,
    quota: QuotaRange,
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
    /// The window (by number) of the largest kernel, that kernel, and the largest of the window before.
    largest: (u64, u64, u64),
    cycles: Cycles,
    /// The client's tokens before it stepped back for an owner that learns, or before the owners lent it more.
    resumes: Option<u64>,
    /// The last launch of its last iteration.
    finished: Option<Timestamp>,
    verdict: Option<Verdict>,
}

impl Client {
    /// Whether the client launched nothing in the `window` periods up to `period`.
    fn is_idle(&self, period: u64, window: u64) -> bool {
        self.active.is_none_or(|active| period - active >= window)
    }

    /// Whether the client has ended an iteration, and neither launched nor wanted to for `rest` periods up to `period`.
    fn rests(&self, period: u64, rest: u64) -> bool {
        self.finished.is_some() && self.is_idle(period, rest)
    }

    /// The largest kernel in the window (of `block`) and the one before.
    const fn largest_kernel(&self, block: u64) -> u64 {
        let (at, now, before) = self.largest;
        match block - at {
            0 => {
                if now > before {
                    now
                } else {
                    before
                }
            }
            1 => now,
            _ => 0,
        }
    }

    fn note_kernel(&mut self, block: u64, kernel: u64) {
        let (at, now, before) = self.largest;
        self.largest = match block - at {
            0 => (at, now.max(kernel), before),
            1 => (block, kernel, now),
            _ => (block, kernel, 0),
        };
    }

    /// With `small` the floor is 1 % of the request, for kernels of any size.
    fn floor(&self, block: u64, small: bool) -> u64 {
        if self.class.is_slo_sensitive() {
            return self.request;
        }
        let least = (self.request / 100).max(1);
        if small { least } else { self.largest_kernel(block).clamp(least, self.request) }
    }
}

#[derive(Debug, Default)]
struct Gpu {
    max_tokens: u64,
    /// Clients on this GPU, by slot, in the order of their arrival.
    clients: Vec<u32>,
    state: ScaleState,
    issued: u64,
    /// Sum of the requests.
    guaranteed: u64,
    /// Good KLCs in a row.
    calm: u32,
    /// Until then, kernels of others than owners may be in the way.
    loud_until: Timestamp,
    /// The end of the others' step back for an owner that learns, and the earliest start of another.
    learns_until: Timestamp,
    learns_again: Timestamp,
    /// The factor by which the others' tokens change, after the KLCs that ended in this period.
    step: Option<u64>,
}

/// Fast scaling up and down. See the [module](self).
///
/// # Example
/// Tokens are microseconds, so `M` = 5000. Owner A has 30%:60%, or 1500 to 3000 tokens; trainer B has 20%:100%, or 1000 to 5000. A is
/// idle, and B has grown to 3500, all the rest beside A's request. When A gets a batch, both are busy: in CONTENTION nothing changes. A's
/// KLC takes 25 ms, the shortest so far, and the next takes 50 ms: the ratio of 2.0 is beyond 1.6. In EMERGENCY B is set to min(1000,
/// 3500) / 2 = 500, and after it A to 3000. The next KLC takes 27 ms: back in CONTENTION, A has 1500 and B 500, and after five such cycles
/// B gets 650. A stops, and 500 ms later it is idle: in RECOVERY B grows by 30 % a period: 845, 1098, ... 3500.
///
/// # Differences from the paper
/// 1. Line 27 divides by `dT`, which raises tokens while `dT < 1`. The scaler divides by `1 + dT`, from 1 to 4.
/// 2. Repeated every 5 ms, line 27 takes all tokens within 100 ms. The scaler steps once per finished KLC, down to a floor.
/// 3. With several owners, the paper leaves the choice of `dT` and the end of EMERGENCY open. Here states belong to owners, and the GPU's
///    state is their join.
/// 4. Each owner may take its limit, and limits add up to more than the GPU (gamma = 1.5). Here `M` bounds the issued sum: requests are
///    guaranteed, and the rest goes by severity.
/// 5. Line 14 looks at the last KLC even if nothing runs: EMERGENCY for ever. The scaler tests idleness first, and a KLC counts for one
///    window and its own length.
/// 6. Line 19 has no upper bound and never leaves 0. Here the limit bounds it, and it starts at the request.
/// 7. No rule returns to NONE. Here NONE means no SLO-sensitive client on the GPU, and all clients share in proportion.
/// 8. `T_min` never ages, and one minimum serves all batch sizes. Here it is a minimum over a window, per model and bucket of batch sizes.
///    KLCs are in microseconds from first to last launch, and the scaler ignores those shorter than two periods.
/// 9. An owner is raised while others still hold their old tokens. The scaler issues smaller amounts first.
/// 10. `R_last` of a newcomer is open. Here it is the newcomer's request, and for others than owners at most the free tokens.
/// 11. A kernel larger than the tokens of a period never runs. Here it may run while any token is left, and the client pays the debt back.
/// 12. Blocks are no measure of time. A token is a predicted microsecond, unless the host calibrates `M` for blocks.
/// 13. As printed, CONTENTION never gives back the tokens an EMERGENCY took, as long as its owner stays busy. The authors' published
///     implementation raises the limit at every fifth good KLC; so does step 3.
///
/// # Learning
/// [`learn`](DiluVerticalConfig::learn) adds five rules beyond the paper:
/// - **Minima.** A minimum is of use only from a KLC without a neighbour in the way. Beside a neighbour without rest, the shortest KLC of
///   late is a contended one, ratios are 1, and the neighbour grows step by step unnoticed. So only **clean** KLCs become minima: those
///   during which every client other than an owner was idle or at its floor. A KLC shorter than all before becomes one as well, for
///   neighbours never make a KLC shorter. Minima do not age: beside a model that gets slower, neighbours are at their floors, and its KLCs
///   are clean then. At the first KLC of a model and bucket, and every 30 s until a clean one is known, the others step down to their
///   floors and the owner rises to its limit, until a clean KLC ends or a window is over. Such a step comes at most once in five windows.
/// - **The others' tokens beside a busy owner** follow its KLCs, not steps, since a neighbour lengthens a KLC about in proportion to its
///   launches. After a KLC with an excess above the tolerated excess, or below half of it, the others' tokens are multiplied by `half of
///   the tolerated excess / excess`: by at least a quarter and at most four, and by at most one as long as the minimum is not clean. Their
///   floor is 1 % of their request, as in the authors' published implementation.
/// - **An owner's need** comes before the others' wishes, within its limit: the most tokens it launched in a period of late (a quarter
///   less with each period) and `growth` more, or its whole limit once it ran out. The rest of `M` after step 4 goes to busy owners too.
/// - **The tolerance bounds latency, not the KLC.** A queue multiplies a slowdown of its server: at an occupancy of `rho` requests spend
///   `T / (1 - rho)`, and KLCs `s` times as long multiply it by `s (1 - rho) / (1 - s rho)`. To stay within `1 + tolerance`, `s` may be
///   `(1 + tolerance) / (1 + tolerance x rho)`: all of the tolerance for an owner with hardly any requests, and nothing for an owner with
///   back-to-back iterations, as in a burst. `rho` is the last KLC's part of the time since the end of the one before, and the
///   tolerated excess is never less than 5 %. With 60 %, a KLC of 25 ms may be 23 % longer if it began 25 ms after the
///   one before, and 5 % if it began at once.
/// - **Rest.** An owner rests when it has neither launched nor waited for tokens for 2 periods. While all owners on a GPU rest or
///   are idle, they lend the others all tokens without a guarantee, at once; with an owner's next launch the others are back at their own
///   tokens one period later. The printed window of half a second is longer than the pauses between bursts, so the tokens a burst took
///   would stay taken for as long as bursts went on.
#[derive(Debug, Default)]
pub struct DiluVertical {
    config: DiluVerticalConfig,
    now: Timestamp,
    /// Number of the open period, and its end.
    period: u64,
    period_end: Timestamp,
    /// Number of clients.
    present: u32,
    clients: NamedSlots<ClientId, Client>,
    gpus: Vec<Option<Gpu>>,
    plans: Vec<Plan>,
    wants: Vec<Want>,
}

impl DiluVertical {
    /// A scaler without clients.
    pub fn new(config: DiluVerticalConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, ..Self::default() })
    }

    fn get(&self, id: ClientId) -> Result<&Client, VerticalError> {
        self.clients.get(id).ok_or(VerticalError::UnknownClient { client: id })
    }

    fn at(&self, gpu: GpuId) -> Option<&Gpu> {
        self.gpus.get(gpu.index()).and_then(Option::as_ref)
    }

    /// The client in a slot, with its GPU.
    fn pair(&mut self, slot: u32) -> Option<(&mut Client, &mut Gpu)> {
        let client = self.clients.at_mut(slot)?;
        let gpu = self.gpus.get_mut(client.gpu)?.as_mut()?;
        Some((client, gpu))
    }

    fn max_tokens(&self, gpu: GpuId) -> u64 {
        self.at(gpu).map_or_else(|| self.config.default_max_tokens(), |gpu| gpu.max_tokens)
    }

    /// The tokens a share guarantees, and the most it may get, of `max_tokens`.
    fn tokens(&self, quota: QuotaRange, max_tokens: u64) -> (u64, u64) {
        let (request, limit) = (quota.request().basis_points(), quota.limit().basis_points());
        let request = part(request.max(limit.min(MIN_SHARE)), max_tokens);
        (request, part(limit, max_tokens).max(request))
    }

    /// Refuses an impossible event before any change.
    fn check(&self, now: Timestamp, event: &VerticalEvent) -> Result<(), VerticalError> {
        TimeWentBack::check(now, self.now)?;
        let known_gpu = |gpu: GpuId| match gpu.number() < self.config.max_gpus {
            true => Ok(()),
            false => Err(VerticalError::UnknownGpu { gpu, limit: self.config.max_gpus }),
        };
        let within = |gpu, guaranteed: u64, max_tokens| match guaranteed <= max_tokens {
            true => Ok(()),
            false => Err(VerticalError::Oversubscribed { gpu, guaranteed, max_tokens }),
        };
        match *event {
            VerticalEvent::Calibrated { gpu, max_tokens } => {
                known_gpu(gpu)?;
                if !(1..=MAX_TOKENS).contains(&max_tokens) {
                    return Err(VerticalError::BadMaxTokens { gpu, max_tokens, low: 1, high: MAX_TOKENS });
                }
                let clients = self.at(gpu).map_or(&[][..], |gpu| &gpu.clients);
                let clients = clients.iter().filter_map(|&slot| self.clients.at(slot));
                within(gpu, clients.map(|client| self.tokens(client.quota, max_tokens).0).sum(), max_tokens)
            }
            VerticalEvent::ClientJoined { client, gpu, quota, class } => {
                known_gpu(gpu)?;
                if client.slot() >= self.config.max_clients {
                    return Err(VerticalError::TooManyClients { client, limit: self.config.max_clients });
                }
                if !self.clients.takes(client) {
                    return Err(VerticalError::ClientExists { client });
                }
                if let ServiceClass::SloSensitive { tolerance: BasisPoints::ZERO } = class {
                    return Err(VerticalError::ZeroTolerance { client });
                }
                let max_tokens = self.max_tokens(gpu);
                let guaranteed = self.at(gpu).map_or(0, |gpu| gpu.guaranteed);
                within(gpu, guaranteed + self.tokens(quota, max_tokens).0, max_tokens)
            }
            VerticalEvent::QuotaChanged { client, quota } => {
                let known = self.get(client)?;
                let Some(gpu) = self.gpus[known.gpu].as_ref() else { return Ok(()) };
                let request = self.tokens(quota, gpu.max_tokens).0;
                let id = GpuId::new(u32::try_from(known.gpu).unwrap_or(u32::MAX));
                within(id, gpu.guaranteed - known.request + request, gpu.max_tokens)
            }
            VerticalEvent::IterationFinished { client, batch, first_launch, last_launch, .. } => {
                self.get(client)?;
                if batch == 0 {
                    return Err(VerticalError::ZeroBatch { client });
                }
                if first_launch > last_launch || last_launch > now {
                    return Err(VerticalError::BadIteration { client, first_launch, last_launch, now });
                }
                Ok(())
            }
            VerticalEvent::ClientLeft { client } | VerticalEvent::UsageReported { client, .. } => {
                self.get(client).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Ends the periods that are over. Periods the host did not report in time count as free of launches.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<VerticalAction>) {
        self.now = now;
        if self.present == 0 || now < self.period_end {
            return;
        }
        let period = self.config.period;
        let late = now.saturating_since(self.period_end).as_nanos() / period.as_nanos();
        let ended = self.period + late;
        for gpu in 0..self.gpus.len() {
            self.issue(gpu, ended, actions);
        }
        self.period = ended + 1;
        self.period_end = self.period_end.saturating_add(period.saturating_mul(late + 1));
    }

    /// Number of a period's window, for the largest kernel of late.
    fn block(&self, period: u64) -> u64 {
        period / u64::from(self.config.window_periods)
    }

    fn grown(&self, tokens: u64) -> u64 {
        tokens + part(GROWTH, tokens)
    }

    /// Steps 1 to 5 for one GPU, at the end of period `ended`.
    fn issue(&mut self, index: usize, ended: u64, actions: &mut Vec<VerticalAction>) {
        let Some(gpu) = self.gpus[index].take() else { return };
        if gpu.clients.is_empty() {
            self.gpus[index] = Some(gpu);
            return;
        }
        let mut gpu = gpu;
        self.note_loud(&mut gpu, ended);
        if self.config.learn {
            self.note_demand(&gpu);
        }
        let mut plans = core::mem::take(&mut self.plans);
        plans.clear();
        let state = self.plan_owners(&gpu, ended, &mut plans);
        self.plan_others(&mut gpu, state, ended, &mut plans);
        self.share_out(gpu.max_tokens, &mut plans);
        self.announce(&mut gpu, &plans, actions);
        if gpu.state != state {
            gpu.state = state;
            let gpu = GpuId::new(u32::try_from(index).unwrap_or(u32::MAX));
            actions.push(VerticalAction::StateChanged { gpu, state });
        }
        self.gpus[index] = Some(gpu);
        self.plans = plans;
        self.invariants(index, ended);
    }

    /// Notes whether a client other than an owner used more than its floor in the ended period; its kernels may run for one more.
    fn note_loud(&self, gpu: &mut Gpu, ended: u64) {
        let block = self.block(ended);
        let clients = gpu.clients.iter().filter_map(|&slot| self.clients.at(slot));
        let loud = |client: &Client| {
            !client.class.is_slo_sensitive()
                && client.active == Some(self.period)
                && client.last > client.floor(block, self.config.learn)
        };
        if clients.filter(|client| loud(client)).count() > 0 {
            gpu.loud_until = self.now.saturating_add(self.config.period);
        }
    }

    /// Notes each client's need per period: its limit if it ran out of tokens, else its largest use of late.
    fn note_demand(&mut self, gpu: &Gpu) {
        for &slot in &gpu.clients {
            let Some(client) = self.clients.at_mut(slot) else { continue };
            let used = core::mem::take(&mut client.used);
            client.demand = match used >= client.last {
                true => client.limit,
                false => used.max(client.demand - client.demand / 4),
            };
        }
    }

    /// Step 5.
    fn announce(&mut self, gpu: &mut Gpu, plans: &[Plan], actions: &mut Vec<VerticalAction>) {
        for grows in [false, true] {
            for plan in plans {
                let Some(client) = self.clients.at_mut(plan.slot) else { continue };
                let before = if client.issued { client.last } else { 0 };
                if before == plan.tokens || (before < plan.tokens) != grows {
                    continue;
                }
                gpu.issued = gpu.issued - before + plan.tokens;
                (client.last, client.issued) = (plan.tokens, true);
                actions.push(VerticalAction::Issue { client: client.id, tokens: plan.tokens });
            }
        }
    }

    fn join(&mut self, now: Timestamp, id: ClientId, gpu: GpuId, quota: QuotaRange, class: ServiceClass) {
        let max_tokens = self.max_tokens(gpu);
        if self.present == 0 {
            // No present client's period is cut short.
            self.period_end = now.saturating_add(self.config.period);
        }
        self.present += 1;
        let (request, limit) = self.tokens(quota, max_tokens);
        let home = self.home(gpu, max_tokens);
        home.clients.push(id.slot());
        home.guaranteed += request;
        let free = home.max_tokens.saturating_sub(home.issued);
        let client = Client {
            id,
            gpu: gpu.index(),
            quota,
            class,
            state: ScaleState::None,
            request,
            limit,
            last: if class.is_slo_sensitive() { request } else { request.min(free) },
            issued: false,
            active: None,
            used: 0,
            demand: 0,
            largest: (self.block(self.period), 0, 0),
            cycles: Cycles::default(),
            resumes: None,
            finished: None,
            verdict: None,
        };
        self.clients.insert(id, client);
    }

    /// The GPU's entry, made if there is none.
    fn home(&mut self, gpu: GpuId, max_tokens: u64) -> &mut Gpu {
        while self.gpus.len() <= gpu.index() {
            self.gpus.push(None);
        }
        self.gpus[gpu.index()].get_or_insert_with(|| Gpu { max_tokens, ..Gpu::default() })
    }

    fn leave(&mut self, id: ClientId, actions: &mut Vec<VerticalAction>) {
        let Some((client, gpu)) = self.pair(id.slot()) else { return };
        gpu.issued -= if client.issued { client.last } else { 0 };
        gpu.guaranteed -= client.request;
        gpu.clients.retain(|&slot| slot != id.slot());
        if gpu.clients.is_empty() {
            gpu.calm = 0;
            if gpu.state != ScaleState::None {
                gpu.state = ScaleState::None;
                let gpu = GpuId::new(u32::try_from(client.gpu).unwrap_or(u32::MAX));
                actions.push(VerticalAction::StateChanged { gpu, state: ScaleState::None });
            }
        }
        self.clients.remove(id.slot());
        self.present -= 1;
    }

    fn set_quota(&mut self, id: ClientId, quota: QuotaRange) {
        let Ok(client) = self.get(id) else { return };
        let Some(max_tokens) = self.gpus[client.gpu].as_ref().map(|gpu| gpu.max_tokens) else { return };
        let (request, limit) = self.tokens(quota, max_tokens);
        let Some((client, gpu)) = self.pair(id.slot()) else { return };
        gpu.guaranteed = gpu.guaranteed - client.request + request;
        (client.quota, client.request, client.limit) = (quota, request, limit);
        // Kernel times under another share say nothing about the new share.
        client.cycles.clear();
        client.verdict = None;
    }

    fn calibrate(&mut self, gpu: GpuId, max_tokens: u64) {
        let home = self.home(gpu, max_tokens);
        home.max_tokens = max_tokens;
        home.guaranteed = 0;
        for place in 0..home.clients.len() {
            let Some(slot) = self.at(gpu).map(|gpu| gpu.clients[place]) else { return };
            let Some(client) = self.clients.at(slot) else { continue };
            let (request, limit) = self.tokens(client.quota, max_tokens);
            let Some((client, gpu)) = self.pair(slot) else { continue };
            (client.request, client.limit) = (request, limit);
            gpu.guaranteed += request;
        }
    }

    fn note_iteration(
        &mut self,
        id: ClientId,
        model: ModelId,
        batch: u32,
        first_launch: Timestamp,
        cycle: Duration,
    ) {
        let (now, min_cycle, learn) = (self.now, MIN_CYCLE, self.config.learn);
        let least = u64::from(MIN_TOLERANCE.get());
        let window = self.config.period.saturating_mul(u64::from(self.config.window_periods));
        let well = u64::from(CALM_GROWTH.get());
        let Some((client, gpu)) = self.pair(id.slot()) else { return };
        let ServiceClass::SloSensitive { tolerance } = client.class else { return };
        let before = client.finished.replace(first_launch.saturating_add(cycle));
        if cycle < min_cycle {
            return;
        }
        let mut tolerance = u64::from(tolerance.get());
        if learn {
            let pause = before.map_or(Duration::MAX, |before| first_launch.saturating_since(before));
            tolerance = within_a_queue(tolerance, cycle, pause).max(least.min(tolerance));
        }
        let micros = cycle.as_nanos() / 1_000;
        let ratio = if learn {
            // A clean cycle ends both times.
            let clean = first_launch >= gpu.loud_until;
            let learns = now < gpu.learns_until;
            if clean {
                gpu.learns_until = now;
            }
            let judged = client.cycles.judge(now, model, batch, micros, clean, now >= gpu.learns_again);
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
            judged.ratio.unwrap_or(WHOLE)
        } else {
            client.cycles.ratio(now, model, batch, micros)
        };
        let until = now.saturating_add(window).saturating_add(cycle);
        client.verdict = Some(Verdict { ratio, most: WHOLE + tolerance, until, fresh: true });
        gpu.calm = if ratio <= WHOLE + well { gpu.calm.saturating_add(1) } else { 0 };
    }

    fn invariants(&self, index: usize, ended: u64) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Some(gpu) = self.gpus[index].as_ref() else { return };
        let clients = gpu.clients.iter().filter_map(|&slot| self.clients.at(slot));
        let (mut issued, mut guaranteed) = (0, 0);
        for client in clients {
            let floor = client.floor(self.block(ended), self.config.learn);
            assert!(floor >= 1 && floor <= client.request, "a floor is never more than what is guaranteed");
            assert!(client.last >= floor, "{} has {} tokens, floor {floor}", client.id, client.last);
            assert!(client.last <= client.limit, "{} is above its limit", client.id);
            issued += client.last;
            guaranteed += client.request;
        }
        assert_eq!((issued, guaranteed), (gpu.issued, gpu.guaranteed), "sums of the clients");
        assert!(issued <= gpu.max_tokens, "{issued} of {} tokens issued", gpu.max_tokens);
        assert!(guaranteed <= gpu.max_tokens, "{guaranteed} of {} tokens guaranteed", gpu.max_tokens);
    }
}

impl Engine for DiluVertical {
    type Event = VerticalEvent;
    type Action = VerticalAction;
    type Error = VerticalError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: VerticalEvent,
        actions: &mut Vec<VerticalAction>,
    ) -> Result<(), VerticalError> {
        self.check(now, &event)?;
        self.catch_up(now, actions);
        match event {
            VerticalEvent::Calibrated { gpu, max_tokens } => self.calibrate(gpu, max_tokens),
            VerticalEvent::ClientJoined { client, gpu, quota, class } => {
                self.join(now, client, gpu, quota, class);
            }
            VerticalEvent::QuotaChanged { client, quota } => self.set_quota(client, quota),
            VerticalEvent::ClientLeft { client } => self.leave(client, actions),
            VerticalEvent::UsageReported { client, tokens, largest_kernel } => {
                let (period, block) = (self.period, self.block(self.period));
                if let Some((client, _)) = self.pair(client.slot())
                    && tokens > 0
                {
                    client.active = Some(period);
                    client.used = client.used.saturating_add(tokens);
                    client.note_kernel(block, largest_kernel);
                }
            }
            VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch } => {
                let cycle = last_launch.saturating_since(first_launch);
                self.note_iteration(client, model, batch, first_launch, cycle);
            }
            _ => {}
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        (self.present > 0).then_some(self.period_end)
    }
}

impl VerticalScaler for DiluVertical {
    fn gpu(&self, gpu: GpuId) -> Option<GpuScale> {
        let known = self.at(gpu)?;
        let mut scale = GpuScale::empty(known.max_tokens);
        (scale.state, scale.issued_tokens) = (known.state, known.issued);
        Some(scale)
    }

    fn client(&self, client: ClientId) -> Option<ClientScale> {
        let client = self.get(client).ok()?;
        let gpu = GpuId::new(u32::try_from(client.gpu).ok()?);
        let mut scale = ClientScale::joined(gpu, client.class);
        scale.state = client.state;
        scale.issued_tokens = if client.issued { client.last } else { 0 };
        (scale.guaranteed_tokens, scale.limit_tokens) = (client.request, client.limit);
        scale.floor_tokens = client.floor(self.block(self.period), self.config.learn);
        Some(scale)
    }

    fn period(&self) -> Duration {
        self.config.period
    }
}
