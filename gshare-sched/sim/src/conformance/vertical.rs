//! Whether a scaler of tokens within a GPU keeps the contract of [`VerticalScaler`].
//!
//! # Runs
//! 1. **Random GPUs**: clients of both classes join, change their shares, report usage and iterations with growing cycles, and
//!    leave, on two GPUs; the suite keeps a book of issued tokens beside the scaler.
//! 2. **The same again**, and **the first GPU alone**, which must give its clients the same tokens.

use super::story::{Broken, Log, claim};
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::{ClientId, Duration, Engine, GpuId, ModelId, Quota, QuotaRange, ServiceClass, Timestamp};
use gshare_sched::Wrapped;
use gshare_sched::scale::vertical_claims as claims;
use gshare_sched::scale::{VerticalAction, VerticalEvent, VerticalScaler};
use std::collections::BTreeMap;

const PERIODS: u64 = 300;
/// The number of slots on a GPU.
const SLOTS: u32 = 4;
const GPUS: u32 = 2;

#[derive(Debug, Clone, Copy)]
struct Client {
    gpu: GpuId,
    issued: u64,
    /// The number of ended periods since the client joined or its share changed.
    periods: u32,
}

type Issued = Vec<(Timestamp, ClientId, u64)>;

/// Runs the suite over the scalers of `make`, which must be equal, without clients, and count in microseconds.
///
/// # Errors
/// The first broken claim.
pub fn vertical_scaler(make: &dyn Fn() -> Box<dyn VerticalScaler>, seeds: Range<u64>) -> Result<(), Story> {
    for seed in seeds {
        let log = Log::default();
        let tell = |broken| log.story(seed, broken);
        let first = run(make(), seed, GPUS, &log).map_err(tell)?;
        let again = Log::default();
        run(make(), seed, GPUS, &again).map_err(tell)?;
        log.is_repeated_by(&again).map_err(tell)?;
        let alone = run(make(), seed, 1, &Log::default()).map_err(tell)?;
        let on_first: Issued = first.into_iter().filter(|(_, client, _)| client.slot() < SLOTS).collect();
        claim(on_first == alone, claims::APART, || "gpu0 was issued other tokens alone".into())
            .map_err(tell)?;
    }
    Ok(())
}

struct World {
    scaler: Wrapped<dyn VerticalScaler>,
    clients: BTreeMap<ClientId, Client>,
    issued: Issued,
}

fn run(scaler: Box<dyn VerticalScaler>, seed: u64, gpus: u32, log: &Log) -> Result<Issued, Broken> {
    let mut world = World { scaler: log.watch(scaler, false), clients: BTreeMap::new(), issued: Vec::new() };
    let period = world.scaler.period();
    // One generator per GPU makes the events of a GPU independent of the other GPU.
    let mut rng = Rng::new(seed);
    let mut rngs: Vec<Rng> = (0..GPUS).map(|_| rng.fork()).collect();
    let mut generations = vec![0; (GPUS * SLOTS) as usize];
    for number in 1..=PERIODS {
        let end = Timestamp::ZERO + period.saturating_mul(number);
        let begin = Timestamp::ZERO + period.saturating_mul(number - 1);
        let mut events: Vec<(Timestamp, VerticalEvent)> = Vec::new();
        for (gpu, rng) in (0..gpus).map(GpuId::new).zip(&mut rngs) {
            for slot in gpu.number() * SLOTS..(gpu.number() + 1) * SLOTS {
                let drawn = begin + rng.duration(Duration::from_nanos(1), period);
                // The first slot has a client from the start to the end, so that periods begin at the same time in all runs.
                let at = if number == 1 && slot == 0 { begin + Duration::from_nanos(1) } else { drawn };
                let here = world.clients.keys().find(|client| client.slot() == slot).copied();
                let event = random_event(rng, gpu, slot, here, &mut generations, (at, period));
                events.extend(event.map(|event| (at, event)));
            }
        }
        events.sort_by_key(|(at, _)| *at);
        for (at, event) in events {
            world.catch_up(at)?;
            world.tell(at, event)?;
        }
        world.catch_up(end)?;
    }
    Ok(world.issued)
}

fn random_event(
    rng: &mut Rng,
    gpu: GpuId,
    slot: u32,
    here: Option<ClientId>,
    generations: &mut [u32],
    (at, period): (Timestamp, Duration),
) -> Option<VerticalEvent> {
    let quota = |rng: &mut Rng| {
        let points =
            |points: u64| Quota::new(u16::try_from(points).unwrap_or(10_000)).unwrap_or(Quota::WHOLE);
        let request = rng.below(2_500);
        let limit = rng.between(request.max(100), 10_000);
        QuotaRange::new(points(request), points(limit)).unwrap_or(QuotaRange::BEST_EFFORT)
    };
    let Some(client) = here else {
        if !rng.percent(10) && slot > 0 {
            return None;
        }
        let generation = generations.get_mut(slot as usize)?;
        *generation += 1;
        let client = ClientId::new(slot, *generation);
        let class = if rng.percent(50) { ServiceClass::SLO_SENSITIVE } else { ServiceClass::BestEffort };
        return Some(VerticalEvent::ClientJoined { client, gpu, quota: quota(rng), class });
    };
    match rng.below(100) {
        0..3 if slot > 0 => Some(VerticalEvent::ClientLeft { client }),
        3..5 => Some(VerticalEvent::QuotaChanged { client, quota: quota(rng) }),
        5..55 => {
            let tokens = rng.below(5_000);
            let largest_kernel = rng.below(tokens + 1);
            Some(VerticalEvent::UsageReported { client, tokens, largest_kernel })
        }
        55..85 => {
            // Cycles last from a tenth of a period to five periods: sometimes the neighbours are in the way.
            let cycle = rng.duration(period.saturating_mul(1), period.saturating_mul(5));
            let cycle = if rng.percent(60) { Duration::from_nanos(period.as_nanos() / 10) } else { cycle };
            let (first_launch, batch) =
                (at.saturating_sub(cycle), u32::try_from(rng.between(1, 4)).unwrap_or(1));
            let model = ModelId::new(slot);
            Some(VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch: at })
        }
        _ => None,
    }
}

impl World {
    /// Reports every deadline up to `now` in time, to separate the effect of an event from the effects of deadlines.
    fn catch_up(&mut self, now: Timestamp) -> Result<(), Broken> {
        while let Some(at) = self.scaler.next_deadline().filter(|at| *at <= now) {
            self.tell(at, VerticalEvent::DeadlineReached)?;
            self.period_ended()?;
            let next = self.scaler.next_deadline();
            claim(next != Some(at), claims::DEADLINE, || format!("{at} is still due"))?;
        }
        Ok(())
    }

    fn tell(&mut self, now: Timestamp, event: VerticalEvent) -> Result<(), Broken> {
        let mut actions = Vec::new();
        let before = self.clients.clone();
        let accepted = self.scaler.handle(now, event, &mut actions).is_ok();
        match event {
            // The scaler may refuse shares beyond a GPU, at a join and at a change.
            _ if !accepted => {
                for client in before.keys() {
                    let told = self.scaler.client(*client).map(|told| told.issued_tokens);
                    let known = before.get(client).map(|client| client.issued);
                    claim(told == known, claims::REFUSED, || format!("{client}: {told:?}"))?;
                }
            }
            VerticalEvent::ClientJoined { client, gpu, .. } => {
                self.clients.insert(client, Client { gpu, issued: 0, periods: 0 });
            }
            VerticalEvent::QuotaChanged { client, .. } => {
                if let Some(client) = self.clients.get_mut(&client) {
                    client.periods = 0;
                }
            }
            VerticalEvent::ClientLeft { client } => {
                self.clients.remove(&client);
            }
            _ => {}
        }
        for action in actions {
            let VerticalAction::Issue { client, tokens } = action else { continue };
            let unknown = || (claims::CLIENTS, format!("{client}"));
            let known = self.clients.get_mut(&client).ok_or_else(unknown)?;
            known.issued = tokens;
            let gpu = known.gpu;
            self.issued.push((now, client, tokens));
            let most = self.scaler.gpu(gpu).map_or(0, |gpu| gpu.max_tokens);
            let sum = self.sum(gpu);
            claim(sum <= most, claims::MOST, || format!("{sum} of {most} on {gpu}"))?;
        }
        for gpu in (0..GPUS).map(GpuId::new) {
            let told = self.scaler.gpu(gpu).map_or(0, |gpu| gpu.issued_tokens);
            let sum = self.sum(gpu);
            claim(told == sum, claims::LEAVES, || {
                format!("{gpu} has {told} issued by its own account, {sum} by its orders")
            })?;
        }
        Ok(())
    }

    fn sum(&self, gpu: GpuId) -> u64 {
        self.clients.values().filter(|client| client.gpu == gpu).map(|client| client.issued).sum()
    }

    /// A floor follows the launches, so the comparison takes place right after a division of tokens.
    fn period_ended(&mut self) -> Result<(), Broken> {
        for (name, client) in &mut self.clients {
            client.periods += 1;
            let told = self.scaler.client(*name);
            let floor = told.map_or(1, |told| told.floor_tokens);
            claim(told.is_some() && floor > 0, claims::FLOOR, || format!("{name}: {told:?}"))?;
            claim(client.periods < 2 || client.issued >= floor, claims::FLOOR, || {
                format!("{name} is issued {} and its floor is {floor}", client.issued)
            })?;
        }
        Ok(())
    }
}
