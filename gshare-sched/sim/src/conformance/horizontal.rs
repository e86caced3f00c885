//! Whether a scaler of instances keeps the contract of [`HorizontalScaler`].
//!
//! # Runs
//! 1. **Random fleets**: up to three functions under jumping loads and changing bounds. Their starts find no room or take a while, and
//!    their instances die.
//! 2. **The same again**, and **the first function alone**, which must get the same orders.
//! 3. **A scene**: the scaler reports a load that one instance cannot serve.

use super::story::{Broken, Log, claim};
use crate::rng::Rng;
use crate::story::Story;
use core::ops::Range;
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::scale::horizontal_claims as claims;
use gshare_sched::scale::{Fleet, FunctionScale, HorizontalOrder, HorizontalScaler, LoadReport};

/// The number of ticks in a run.
const TICKS: u64 = 400;

type Order = (Timestamp, HorizontalOrder);

struct Function {
    id: FunctionId,
    fleet: Fleet,
    /// The source of this function's randomness, equal with and without other functions.
    rng: Rng,
    rate: u64,
    /// Starting instances, each with the time at which it is ready.
    starting: Vec<(Timestamp, InstanceId)>,
    given: u64,
    orders: Vec<Order>,
}

/// Runs the suite over the scalers of `make`, which must be equal and without functions.
///
/// # Errors
/// The first broken claim.
pub fn horizontal_scaler(
    make: &dyn Fn() -> Box<dyn HorizontalScaler>,
    seeds: Range<u64>,
) -> Result<(), Story> {
    for seed in seeds {
        let run = |most: usize| {
            let log = Log::default();
            let ran = random_fleets(&mut *make(), seed, most, &log);
            ran.map(|orders| (orders, log.clone())).map_err(|broken| log.story(seed, broken))
        };
        let (first, log) = run(usize::MAX)?;
        let (again, alone) = (run(usize::MAX)?.0, run(1)?.0);
        let same = claim(first == again, claims::SAME, || "they did not".into());
        same.map_err(|broken| log.story(seed, broken))?;
        let apart = claim(first[..1] == alone, claims::APART, || "function 0 got other orders alone".into());
        apart.map_err(|broken| log.story(seed, broken))?;
    }
    let log = Log::default();
    overload(&mut *make(), &log).map_err(|broken| log.story(0, broken))
}

/// The orders for each function.
fn random_fleets(
    scaler: &mut dyn HorizontalScaler,
    seed: u64,
    most: usize,
    log: &Log,
) -> Result<Vec<Vec<Order>>, Broken> {
    let mut functions = random_functions(seed);
    functions.truncate(most);
    for number in 1..=TICKS {
        let now = Timestamp::ZERO + scaler.config().tick.saturating_mul(number);
        for of in &mut functions {
            of.happens(now);
            of.decide(now, scaler, log)?;
        }
    }
    Ok(functions.into_iter().map(|of| of.orders).collect())
}

/// One instance at most, with far too much to do.
fn overload(scaler: &mut dyn HorizontalScaler, log: &Log) -> Result<(), Broken> {
    let mut functions = random_functions(0);
    let of = &mut functions[0];
    // The bounds are within each other.
    let _ = of.fleet.set_bounds(of.id, 0, 1);
    of.rate = 100_000;
    for number in 1..=TICKS {
        let now = Timestamp::ZERO + scaler.config().tick.saturating_mul(number);
        for (_, instance) in core::mem::take(&mut of.starting) {
            of.fleet.ready(now, instance);
        }
        of.decide(now, scaler, log)?;
    }
    let unmet = of.orders.iter().any(|(_, order)| matches!(order, HorizontalOrder::Unmet(_)));
    claim(unmet, claims::UNMET, || "100,000 requests/s on one instance were not".into())
}

/// One to three functions; none is left out, since their profiles are valid.
fn random_functions(seed: u64) -> Vec<Function> {
    let mut rng = Rng::new(seed);
    let ids = (0..u32::try_from(rng.between(1, 3)).unwrap_or(1)).map(FunctionId::new);
    ids.filter_map(|id| random_function(id, rng.fork())).collect()
}

fn random_function(id: FunctionId, mut rng: Rng) -> Option<Function> {
    let points = [20, 50].into_iter().filter_map(|percent| {
        let (sm, quota) = (SmShare::from_percent(percent)?, Quota::from_percent(50 + percent)?);
        let p50 = rng.duration(Duration::from_millis(5), Duration::from_millis(80));
        let p95 = p50.saturating_add(rng.duration(Duration::ZERO, Duration::from_millis(20)));
        ProfilePoint::measured(sm, quota, 1, f64::from(percent), p50, p95).ok()
    });
    let profile = ProfileTable::sparse(points.collect()).ok()?;
    let slowest = profile.points().iter().map(|point| point.p95).min()?;
    let max_p95 = rng.percent(50).then_some(slowest);
    let (min_instances, max_instances) = bounds(&mut rng);
    let spec = FunctionScale { profile, max_p95, min_instances, max_instances };
    let fleet = Fleet::new(id, spec).ok()?;
    Some(Function { id, fleet, rng, rate: 0, starting: Vec::new(), given: 0, orders: Vec::new() })
}

fn bounds(rng: &mut Rng) -> (u32, u32) {
    let small = |number: u64| u32::try_from(number).unwrap_or(0);
    let least = small(rng.below(3));
    (least, least.max(1) + small(rng.below(5)))
}

impl Function {
    /// What comes between two ticks: instances become ready or die, the minimum is kept, the load and the bounds change.
    fn happens(&mut self, now: Timestamp) {
        for (at, instance) in core::mem::take(&mut self.starting) {
            if at <= now {
                self.fleet.ready(now, instance);
            } else {
                self.starting.push((at, instance));
            }
        }
        if self.rng.percent(3) {
            let all: Vec<InstanceId> = self.fleet.instances().map(|(instance, _)| instance).collect();
            if let Some(instance) = self.rng.pick(&all).copied() {
                self.ends(instance);
            }
        }
        if self.rng.percent(2) {
            let (least, most) = bounds(&mut self.rng);
            // They are within each other.
            let _ = self.fleet.set_bounds(self.id, least, most);
            while let Some((youngest, _)) = self.fleet.youngest().filter(|_| self.fleet.deployed() > most) {
                self.ends(youngest);
            }
        }
        if self.rng.percent(5) {
            self.rate = self.rng.below(300);
        }
        let next =
            |fleet: &Fleet| fleet.startable(now).next().map(|(point, _)| point).filter(|_| fleet.lacks());
        while let Some(point) = next(&self.fleet) {
            self.start(now, point);
        }
    }

    fn ends(&mut self, instance: InstanceId) {
        self.starting.retain(|(_, other)| *other != instance);
        self.fleet.remove(instance);
    }

    /// Starts an instance, or finds no room.
    fn start(&mut self, now: Timestamp, point: usize) {
        if self.rng.percent(10) {
            return self.fleet.refuse(point, now + Duration::from_secs(30));
        }
        let instance = InstanceId::new(self.given);
        self.given += 1;
        self.fleet.started(now, instance, point);
        let takes = self.rng.duration(Duration::from_millis(500), Duration::from_secs(20));
        self.starting.push((now + takes, instance));
    }

    fn decide(&mut self, now: Timestamp, scaler: &mut dyn HorizontalScaler, log: &Log) -> Result<(), Broken> {
        let (load, mut orders) = (RequestRate::per_second(self.rate), Vec::new());
        scaler.decide(LoadReport { now, function: self.id, fleet: &self.fleet, load }, &mut orders);
        log.note(&now, &format!("{}: {load} on {} instances -> {orders:?}", self.id, self.fleet.deployed()));
        let startable: Vec<usize> = self.fleet.startable(now).map(|(point, _)| point).collect();
        // Each decision is checked as if every start found room.
        let (mut left, mut deployed) =
            (self.fleet.instances().map(|(instance, _)| instance).collect::<Vec<_>>(), self.fleet.deployed());
        let FunctionScale { min_instances: least, max_instances: most, .. } = *self.fleet.spec();
        for order in &orders {
            match order {
                HorizontalOrder::Start(point) => {
                    claim(startable.contains(point), claims::POINT, || format!("{point} of {startable:?}"))?;
                    deployed += 1;
                    claim(deployed <= most, claims::MOST, || format!("{deployed} of {most}"))?;
                }
                HorizontalOrder::Remove(instance) => {
                    let place = left.iter().position(|other| other == instance);
                    let place =
                        place.ok_or_else(|| (claims::INSTANCES, format!("{instance} of {left:?}")))?;
                    left.swap_remove(place);
                    deployed -= 1;
                    claim(deployed >= least, claims::LEAST, || format!("{deployed}, at least {least}"))?;
                }
                HorizontalOrder::Unmet(_) => {}
            }
        }
        for order in orders {
            match order {
                HorizontalOrder::Start(point) => self.start(now, point),
                HorizontalOrder::Remove(instance) => self.ends(instance),
                HorizontalOrder::Unmet(_) => {}
            }
            self.orders.push((now, order));
        }
        Ok(())
    }
}
