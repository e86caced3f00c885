//! A split of the slices that is made once: each function has exclusive instances on its own slices, for ever.

use super::applications::{Variant, whole};
use anyhow::Result;
use gshare_core::dag::Dag;
use gshare_core::pipeline::instances::{
    Home, InstanceAction, InstanceError, InstanceEvent, InstanceReason, PlacedPart,
};
use gshare_core::pipeline::{AssignedSlice, Node};
use gshare_core::request::Tier;
use gshare_core::{Duration, Engine, FunctionId, InstanceId, Timestamp};

/// Starts what was planned and changes nothing any more.
#[derive(Debug)]
pub(super) struct StaticSplit {
    planned: Vec<(FunctionId, Home)>,
    takes: Duration,
}

impl StaticSplit {
    /// Every free slice of the node goes to one function that fits it as a whole: the largest first, each to whom has got
    /// the least so far of what the node could do for it.
    pub(super) fn new(node: &Node, dags: &[Dag], variant: &Variant, takes: Duration) -> Result<Self> {
        let model = node.model();
        let mut slices: Vec<AssignedSlice> = Vec::new();
        for gpu in node.gpus() {
            slices.extend(gpu.free.iter().map(|&slice| AssignedSlice { gpu: gpu.gpu, slice, carved: false }));
        }
        let compute =
            |slice: &AssignedSlice| model.get(slice.slice.profile).map_or(0, |one| one.compute_slices);
        slices.sort_by_key(|slice| (core::cmp::Reverse(compute(slice)), slice.gpu));
        let time = |dag: &Dag, slice: &AssignedSlice| {
            model.get(slice.slice.profile).and_then(|profile| whole(dag, model, &profile.name, variant))
        };
        let rate = |dag: &Dag, slice: &AssignedSlice| time(dag, slice).map_or(0.0, |t| 1.0 / t.as_secs_f64());
        let most: Vec<f64> = dags.iter().map(|dag| slices.iter().map(|one| rate(dag, one)).sum()).collect();
        let mut has = vec![0.0; dags.len()];
        let mut planned = Vec::new();
        for slice in slices {
            let fits = (0..dags.len()).filter(|&one| time(&dags[one], &slice).is_some());
            let Some(least) = fits.min_by(|&a, &b| f64::total_cmp(&has[a], &has[b])) else { continue };
            let Some(latency) = time(&dags[least], &slice) else { continue };
            has[least] += rate(&dags[least], &slice) / most[least];
            let parts = vec![PlacedPart { stage: 0, components: dags[least].all(), slice }];
            let function = FunctionId::new(u32::try_from(least)?);
            planned.push((function, Home::Exclusive { parts, latency, interval: latency }));
        }
        Ok(Self { planned, takes })
    }
}

impl Engine for StaticSplit {
    type Event = InstanceEvent;
    type Action = InstanceAction;
    type Error = InstanceError;

    fn handle(
        &mut self,
        _: Timestamp,
        event: InstanceEvent,
        actions: &mut Vec<InstanceAction>,
    ) -> Result<(), InstanceError> {
        if let InstanceEvent::FunctionAdded { function: added, .. } = event {
            let mine = (0u64..).zip(&self.planned).filter(|(_, (function, _))| *function == added);
            actions.extend(mine.map(|(number, (function, home))| InstanceAction::Start {
                instance: InstanceId::new(number),
                function: *function,
                home: home.clone(),
                from: Tier::Disk,
                takes: self.takes,
                reason: InstanceReason::FirstRequest,
            }));
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }
}
