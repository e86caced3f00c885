//! Whether a scaler of tokens within a GPU keeps the contract of [`VerticalScaler`].
//!
//! # Runs
//! 1. **Random GPUs**: clients of both classes join, change their shares, report use and iterations of growing length, and leave, on two
//!    GPUs; the suite keeps a book of the clients beside the scaler.
//! 2. **The same again**, and **the first GPU alone**, which must give its clients the same tokens.

use super::story::{Broken, Log, claim};
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::{ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Timestamp};
use gshare_sched::scale::vertical_claims as claims;
use gshare_sched::scale::{Iteration, VerticalError, VerticalScaler};
use std::collections::BTreeMap;

const PERIODS: u64 = 300;
/// The number of clients on a GPU.
const SLOTS: u32 = 4;
const GPUS: u32 = 2;

#[derive(Debug, Clone, Copy)]
enum Call {
    Join(GpuId, QuotaRange, ServiceClass),
    Quota(QuotaRange),
    Leave,
    Used(u64),
    Iterated(Iteration),
}

struct Client {
    gpu: GpuId,
    issued: u64,
    /// The number of ended periods since the client joined or its share changed.
    periods: u32,
}

/// The changes of issued tokens.
type Issued = Vec<(Timestamp, ClientId, u64)>;

struct World<'a> {
    scaler: Box<dyn VerticalScaler>,
    clients: BTreeMap<ClientId, Client>,
    issued: Issued,
    log: &'a Log,
}

/// Runs the suite over the scalers of `make`, which must be equal, without clients, and count in microseconds.
///
/// # Errors
/// The first broken claim.
pub fn vertical_scaler(make: &dyn Fn() -> Box<dyn VerticalScaler>, seeds: Range<u64>) -> Result<(), Story> {
    for seed in seeds {
        let run = |gpus| {
            let log = Log::default();
            let ran = run(make(), seed, gpus, &log);
            ran.map(|issued| (issued, log.clone())).map_err(|broken| log.story(seed, broken))
        };
        let (first, log) = run(GPUS)?;
        let tell = |broken| log.story(seed, broken);
        let (again, alone) = (run(GPUS)?.0, run(1)?.0);
        claim(first == again, claims::SAME, || "they did not".into()).map_err(tell)?;
        let on_first: Issued = first.into_iter().filter(|(_, client, _)| client.slot() < SLOTS).collect();
        claim(on_first == alone, claims::APART, || "gpu0 was issued other tokens alone".into())
            .map_err(tell)?;
    }
    Ok(())
}

fn run(scaler: Box<dyn VerticalScaler>, seed: u64, gpus: u32, log: &Log) -> Result<Issued, Broken> {
    let mut world = World { scaler, clients: BTreeMap::new(), issued: Vec::new(), log };
    // One generator per GPU makes the calls for a GPU independent of the other GPU.
    let mut rng = Rng::new(seed);
    let mut rngs: Vec<Rng> = (0..GPUS).map(|_| rng.fork()).collect();
    // The first slot has a client from the start to the end, so that periods begin at the same time in all runs.
    let start = Timestamp::from_nanos(1);
    for (gpu, rng) in (0..gpus).map(GpuId::new).zip(&mut rngs) {
        let class = class(rng);
        world.tell(start, ClientId::new(gpu.number() * SLOTS, 0), Call::Join(gpu, quota(rng), class))?;
    }
    let period = world.scaler.next_deadline().map_or(Duration::ZERO, |end| end.saturating_since(start));
    for number in 0..PERIODS {
        let begin = start + period.saturating_mul(number);
        let mut calls: Vec<(Timestamp, ClientId, Call)> = Vec::new();
        for (gpu, rng) in (0..gpus).map(GpuId::new).zip(&mut rngs) {
            for slot in gpu.number() * SLOTS..(gpu.number() + 1) * SLOTS {
                let (at, id) = (begin + rng.duration(Duration::ZERO, period), ClientId::new(slot, 0));
                let call = random_call(rng, gpu, world.clients.contains_key(&id), slot % SLOTS, (at, period));
                calls.extend(call.map(|call| (at, id, call)));
            }
        }
        calls.sort_by_key(|(at, id, _)| (*at, *id));
        for (at, id, call) in calls {
            world.catch_up(at)?;
            world.tell(at, id, call)?;
        }
        world.catch_up(begin + period)?;
    }
    Ok(world.issued)
}

fn quota(rng: &mut Rng) -> QuotaRange {
    let points = |points: u64| Quota::new(u16::try_from(points).unwrap_or(10_000)).unwrap_or(Quota::WHOLE);
    let request = rng.below(2_500);
    let limit = rng.between(request.max(100), 10_000);
    QuotaRange::new(points(request), points(limit)).unwrap_or(QuotaRange::BEST_EFFORT)
}

fn class(rng: &mut Rng) -> ServiceClass {
    if rng.percent(50) { ServiceClass::SLO_SENSITIVE } else { ServiceClass::BestEffort }
}

fn random_call(
    rng: &mut Rng,
    gpu: GpuId,
    here: bool,
    slot: u32,
    (at, period): (Timestamp, Duration),
) -> Option<Call> {
    if !here {
        return rng.percent(10).then(|| Call::Join(gpu, quota(rng), class(rng)));
    }
    match rng.below(100) {
        0..3 if slot > 0 => Some(Call::Leave),
        3..5 => Some(Call::Quota(quota(rng))),
        5..55 => Some(Call::Used(rng.below(5_000))),
        55..85 => {
            // Cycles last from a tenth of a period to five periods: sometimes the neighbours are in the way.
            let cycle = rng.duration(period, period.saturating_mul(5));
            let cycle = if rng.percent(60) { Duration::from_nanos(period.as_nanos() / 10) } else { cycle };
            let batch = u32::try_from(rng.between(1, 4)).unwrap_or(1);
            let first_launch = at.saturating_sub(cycle);
            Some(Call::Iterated(Iteration { batch, first_launch, last_launch: at }))
        }
        _ => None,
    }
}

impl World<'_> {
    /// Ends every period up to `now` in time, to separate the effect of a call from the effects of deadlines.
    fn catch_up(&mut self, now: Timestamp) -> Result<(), Broken> {
        while let Some(at) = self.scaler.next_deadline().filter(|at| *at <= now) {
            self.scaler.catch_up(at);
            self.look(at)?;
            let next = self.scaler.next_deadline();
            claim(next != Some(at), claims::DEADLINE, || format!("{at} is still due"))?;
            for (id, client) in &mut self.clients {
                client.periods += 1;
                let floor = self.scaler.client(*id).map_or(0, |told| told.floor_tokens);
                claim(floor > 0, claims::FLOOR, || format!("{id}: {floor}"))?;
                claim(client.periods < 2 || client.issued >= floor, claims::FLOOR, || {
                    format!("{id} is issued {} and its floor is {floor}", client.issued)
                })?;
            }
        }
        Ok(())
    }

    fn tell(&mut self, now: Timestamp, id: ClientId, call: Call) -> Result<(), Broken> {
        let changes = self.issued.len();
        let answer: Result<(), VerticalError> = match call {
            Call::Join(gpu, quota, class) => self.scaler.join(now, id, gpu, quota, class),
            Call::Quota(quota) => self.scaler.set_quota(now, id, quota),
            Call::Leave => {
                self.scaler.leave(now, id);
                Ok(())
            }
            Call::Used(tokens) => {
                self.scaler.used(now, id, tokens);
                Ok(())
            }
            Call::Iterated(iteration) => self.scaler.iterated(now, id, iteration),
        };
        self.log.note(&now, &format!("{id}: {call:?} -> {answer:?}"));
        match (call, &answer) {
            (Call::Join(gpu, ..), Ok(())) => {
                self.clients.insert(id, Client { gpu, issued: 0, periods: 0 });
            }
            (Call::Leave, _) => {
                self.clients.remove(&id);
            }
            (Call::Quota(_), Ok(())) => {
                self.clients.get_mut(&id).into_iter().for_each(|client| client.periods = 0);
            }
            _ => {}
        }
        let known = self.scaler.client(id).is_some() == self.clients.contains_key(&id);
        claim(known, claims::CLIENTS, || format!("{id} after {call:?}: {answer:?}"))?;
        self.look(now)?;
        claim(answer.is_ok() || self.issued.len() == changes, claims::REFUSED, || format!("{answer:?}"))
    }

    /// Compares the totals of each GPU with the sums over its clients.
    fn look(&mut self, now: Timestamp) -> Result<(), Broken> {
        let mut sums = [0; GPUS as usize];
        for (id, client) in &mut self.clients {
            let told =
                self.scaler.client(*id).ok_or_else(|| (claims::CLIENTS, format!("{id} is not known")))?;
            sums[client.gpu.index()] += told.issued_tokens;
            if core::mem::replace(&mut client.issued, told.issued_tokens) != told.issued_tokens {
                self.log.note(&now, &format!("{id} is issued {}", told.issued_tokens));
                self.issued.push((now, *id, told.issued_tokens));
            }
        }
        for (gpu, sum) in (0..).map(GpuId::new).zip(sums) {
            let (issued, most) =
                self.scaler.gpu(gpu).map_or((0, 0), |gpu| (gpu.issued_tokens, gpu.max_tokens));
            claim(issued == sum, claims::LEAVES, || {
                format!("{gpu} has {issued} issued by its own account, {sum} by its clients'")
            })?;
            claim(sum <= most, claims::MOST, || format!("{sum} of {most} on {gpu}"))?;
        }
        Ok(())
    }
}
