//! The policies of the table, each with its router and its keepers of instances.

use super::applications::Variant;
use super::static_split::StaticSplit;
use anyhow::Result;
use gshare_core::Duration;
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    EvictionPolicy, HOT_ABOVE, HandOff, KeepAlive, Keeper, KeeperConfig, Late, PartitionConfig, Partitioner,
    RankMode, Router, RouterConfig, SlackRouter,
};
use gshare_sched::platform::{Platform, SlicedConfig, SlicedPool};
use gshare_sim::Make;
use gshare_sim::scenario::MakeKeeper;
use gshare_sim::world::Plan;
use std::sync::Arc;

/// The policy that keeps instances.
pub(super) enum Keeping<'a> {
    Keeper(KeeperConfig),
    Own(&'a MakeKeeper),
    Static,
}

/// The policy that orders requests.
pub(super) enum Routing<'a> {
    Slack(RouterConfig),
    Own(&'a Make<dyn Router>),
}

/// A policy of the table.
pub(super) struct Policy<'a> {
    pub(super) name: &'a str,
    pub(super) keeping: Keeping<'a>,
    pub(super) router: Routing<'a>,
    pub(super) rank: RankMode,
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
        ..policy(name, KeeperConfig::default(), router, RankMode::PaperCv)
    };
    let (cv, bottleneck) = (RankMode::PaperCv, RankMode::Bottleneck);
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
    /// A platform of sliced devices alone, with this router and these keepers.
    pub(super) fn platform(&self, plan: &Plan, model: &GpuModel, variant: &Variant) -> Result<Platform> {
        let keeper: gshare_sched::platform::MakeKeeper = match &self.keeping {
            Keeping::Keeper(config) => {
                let partitioner = Partitioner::new(PartitionConfig::default().with_rank(self.rank))?;
                let config = config.clone();
                Arc::new(move |node| Ok(Box::new(Keeper::new(config.clone(), node, partitioner.clone())?)))
            }
            Keeping::Own(make) => {
                let make = MakeKeeper::clone(make);
                Arc::new(move |node| Ok(make(node)))
            }
            Keeping::Static => {
                let split = StaticSplit::new(plan, model, variant, KeeperConfig::default().load.start)?;
                Arc::new(move |node| Ok(Box::new(split.of(node))))
            }
        };
        let router: Box<dyn Router> = match &self.router {
            Routing::Slack(config) => Box::new(SlackRouter::new(config.clone())),
            Routing::Own(make) => make(),
        };
        let pool = SlicedPool::with_config(SlicedConfig::default())?.with_router(router).with_keepers(keeper);
        Ok(Platform::new(crate::replay::without_bounds(), vec![pool.into()])?)
    }
}
