//! The policies of the table, each with its router and its rules of instances.

use super::paper_rank::PaperRank;
use super::static_split::StaticSplit;
use anyhow::Result;
use gshare_core::Duration;
use gshare_sched::pipeline::{
    EvictionPolicy, HOT_ABOVE, HandOff, KeepAlive, KeeperConfig, Late, LoadCosts, Partitioner, Place, Route,
    RouterConfig, SlackRouter,
};
use gshare_sched::platform::{Platform, SlicedConfig, SlicedPool};
use gshare_sim::Make;
use std::sync::Arc;

/// The policy that keeps instances.
pub(super) enum Keeping<'a> {
    Keeper(KeeperConfig),
    /// Ours, at the places of the program's own policy.
    Own(&'a Make<dyn Place>),
    Static,
}

/// The policy that orders requests.
pub(super) enum Routing<'a> {
    Slack(RouterConfig),
    Own(&'a Make<dyn Route>),
}

/// The order in which cuts into stages are tried.
#[derive(Clone, Copy)]
pub(super) enum Rank {
    Paper,
    Bottleneck,
}

/// A policy of the table.
pub(super) struct Policy<'a> {
    pub(super) name: &'a str,
    pub(super) keeping: Keeping<'a>,
    pub(super) router: Routing<'a>,
    pub(super) rank: Rank,
    pub(super) hand_off: HandOff,
}

pub(super) fn policies(ablate: bool, our_order: &RouterConfig) -> Vec<Policy<'_>> {
    let policy = |name, keeper, router, rank| Policy {
        name,
        keeping: Keeping::Keeper(keeper),
        router: Routing::Slack(router),
        rank,
        hand_off: HandOff::default(),
    };
    let split = |name, router| Policy {
        keeping: Keeping::Static,
        ..policy(name, KeeperConfig::default(), router, Rank::Paper)
    };
    let (cv, bottleneck) = (Rank::Paper, Rank::Bottleneck);
    let (theirs, our_order) = (RouterConfig::paper, || our_order.clone());
    // Section 7.3: 10 to 40 ms for a hand-off. Fresh shared memory and its page faults, for both sides: 2.5 GB/s.
    let slow = HandOff { fixed: Duration::from_millis(3), bytes_per_second: 2_500_000_000 };
    let mut all = vec![
        policy("monolithic", KeeperConfig::monolithic(), theirs(), cv),
        policy("monolithic on our order", KeeperConfig::monolithic(), our_order(), cv),
        split("static split on paper's order", theirs()),
        split("static split on our order", our_order()),
        Policy { hand_off: slow, ..policy("paper with its hand-offs", KeeperConfig::paper(), theirs(), cv) },
        policy("paper", KeeperConfig::paper(), theirs(), cv),
        policy("paper on our order", KeeperConfig::paper(), our_order(), cv),
        policy("ours on paper's order", KeeperConfig::default(), theirs(), bottleneck),
        policy("ours", KeeperConfig::default(), our_order(), bottleneck),
    ];
    if ablate {
        let ours = |name, change: &dyn Fn(&mut KeeperConfig)| {
            let mut keeper = KeeperConfig::default();
            change(&mut keeper);
            policy(name, keeper, our_order(), bottleneck)
        };
        all.push(ours("ours - pipelines", &|c| c.pipelines = false));
        all.push(ours("ours - time sharing", &|c| c.time_sharing = false));
        all.push(ours("ours - migration", &|c| c.migration = false));
        all.push(ours("ours - reclaim", &|c| (c.reclaim, c.demote_pipelines) = (false, false)));
        all.push(ours("ours - start when short", &|c| c.hot_on_shortage = false));
        all.push(ours("ours - two thresholds", &|c| {
            (c.hot_below, c.cool_windows) = (HOT_ABOVE, 1);
        }));
        all.push(ours("ours - eviction by cost", &|c| c.eviction = EvictionPolicy::Lru));
        all.push(ours("ours - adaptive keep-alive", &|c| c.keep_alive = KeepAlive::PAPER));
        let base = |name, router, rank| policy(name, KeeperConfig::default(), router, rank);
        all.push(base("ours - late last", our_order().with_late(Late::InOrder), bottleneck));
        let mut patient = our_order();
        patient.late_wait = None;
        all.push(base("ours - overdue first", patient, bottleneck));
        let mut eager = our_order();
        eager.stay_loads = 0;
        all.push(base("ours - loads that pay", eager, bottleneck));
        all.push(base("ours + admission", our_order().with_late(Late::Reject), bottleneck));
        all.push(base("ours - bottleneck rank", our_order(), cv));
    }
    all
}

impl Policy<'_> {
    /// A platform of sliced devices alone, with this router and these rules.
    pub(super) fn platform(&self, split: &StaticSplit) -> Result<Platform> {
        let (keeper, place): (_, Arc<dyn Place>) = match &self.keeping {
            Keeping::Keeper(config) => {
                let place: Arc<dyn Place> = match self.rank {
                    Rank::Paper => Arc::new(PaperRank),
                    Rank::Bottleneck => Arc::new(Partitioner),
                };
                (config.clone(), place)
            }
            Keeping::Own(make) => (KeeperConfig::default(), make().into()),
            Keeping::Static => {
                // It starts once, before the load, and never again.
                let (now, start) = (u64::MAX, KeeperConfig::default().load.start);
                let load = LoadCosts { start, host_bytes_per_second: now, storage_bytes_per_second: now };
                (KeeperConfig::monolithic().with_load(load), Arc::new(split.clone()))
            }
        };
        let router: Box<dyn Route> = match &self.router {
            Routing::Slack(config) => Box::new(SlackRouter::new(config.clone())),
            Routing::Own(make) => make(),
        };
        let pool = SlicedPool::with_config(SlicedConfig::default().with_keeper(keeper))?;
        let pool = pool.with_router(router).with_place(place);
        Ok(Platform::new(crate::replay::without_bounds(), vec![pool.into()])?)
    }
}
