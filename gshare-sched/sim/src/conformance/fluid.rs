//! Whether a router of requests and a keeper of instances on MIG slices keep what [`gshare_core::pipeline::instances`] and
//! [`gshare_core::pipeline::routing`] promise: two nodes in virtual time, up to five functions, instances that die, and the
//! book of [`simulate`].

use super::story::{Log, Story, Watched};
use crate::arrivals::Arrivals;
use crate::fluid::{Load, Scenario, chain, simulate};
use crate::rng::Rng;
use core::fmt::Display;
use core::ops::Range;
use gshare_core::mig::GpuModel;
use gshare_core::pipeline::instances::{InstanceAction, InstanceEvent};
use gshare_core::pipeline::routing::{RouteAction, RouteEvent};
use gshare_core::pipeline::{Goal, Node};
use gshare_core::{Duration, Engine, Timestamp};

const OBEYED: &str = "every order can be carried out, no slice is oversold, and each request ends once";
/// Seconds in which requests come, and the most of a function.
const SECONDS: u64 = 60;
const MOST: usize = 300;

/// Runs the suite over the pairs that `router` and `keeper` build; a keeper is given its node, which is free.
///
/// # Errors
/// The first claim that does not hold.
pub fn router_and_keeper<R, K>(
    router: impl Fn() -> R,
    keeper: impl Fn(&Node) -> K,
    seeds: Range<u64>,
) -> Result<(), Story>
where
    R: Engine<Event = RouteEvent, Action = RouteAction>,
    K: Engine<Event = InstanceEvent, Action = InstanceAction>,
{
    for seed in seeds {
        let run = || {
            let log = Log::default();
            let outcome = scenario(seed).and_then(|(scenario, node)| {
                let keepers = (0..2).map(|_| Watched::new(&log, Box::new(keeper(&node)))).collect();
                simulate(&scenario, Watched::new(&log, Box::new(router())), keepers)
            });
            outcome.map_err(|wrong| log.story(seed, (OBEYED, wrong))).map(|_| log)
        };
        let (log, again) = (run()?, run()?);
        log.is_repeated_by(&again).map_err(|broken| log.story(seed, broken))?;
    }
    Ok(())
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn scenario(seed: u64) -> Result<(Scenario, Node), String> {
    let mut rng = Rng::new(seed);
    let model = GpuModel::find("A100-80").map_err(text)?;
    let node =
        Node::with_free(model.clone(), &["4g.40gb", "2g.20gb", "1g.10gb", "3g.40gb", "2g.20gb", "2g.20gb"]);
    let mut loads = Vec::new();
    for _ in 0..rng.between(1, 5) {
        let times: Vec<u64> = (0..rng.between(1, 4)).map(|_| rng.between(5, 60)).collect();
        let slo = Duration::from_millis(times.iter().sum::<u64>() * rng.between(15, 60) / 10 + 5);
        let dag = chain(&times, rng.between(1, 9)).map_err(text)?;
        let arrivals = match rng.below(3) {
            0 => Arrivals::poisson(rate(rng.between(1, 40))),
            1 => Arrivals::gamma(rate(rng.between(1, 20)), 3.0),
            _ => {
                let on = Duration::from_secs(rng.between(5, 20));
                Arrivals::on_off(on, Duration::from_secs(20), rate(rng.between(5, 60)))
            }
        };
        let arrivals = times_of(arrivals.map_err(text)?, &mut rng);
        loads.push(Load { dag, goal: Goal::default().with_slo(slo), arrivals });
    }
    let die_every = rng.percent(60).then(|| Duration::from_secs(rng.between(3, 40)));
    let scenario = Scenario { model, loads, die_every, seed, linger: Duration::from_secs(700) };
    Ok((scenario, node.map_err(text)?))
}

fn rate(per_second: u64) -> f64 {
    f64::from(u32::try_from(per_second).unwrap_or(1))
}

fn times_of(mut arrivals: Arrivals, rng: &mut Rng) -> Vec<Timestamp> {
    let (mut times, mut last) = (Vec::new(), Timestamp::ZERO);
    let end = Timestamp::ZERO + Duration::from_secs(SECONDS);
    while let Some(next) = arrivals.next_after(last, rng).filter(|next| *next < end && times.len() < MOST) {
        times.push(next);
        last = next;
    }
    times
}
