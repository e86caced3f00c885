//! A split of the slices that is made once: each function has exclusive instances on its own slices, for ever.

use super::applications::{Variant, whole};
use anyhow::Result;
use gshare_core::dag::Dag;
use gshare_core::{Duration, Engine, FunctionId, GpuId, InstanceId, Timestamp};
use gshare_sched::Tier;
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::{
    AssignedSlice, Home, InstanceAction, InstanceError, InstanceEvent, InstanceKeeper, InstanceReason, Node,
    PlacedPart,
};
use gshare_sched::platform::Work;
use gshare_sim::world::{Function, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// Starts the planned instances and then changes nothing, until a function is removed.
#[derive(Debug, Clone)]
pub(super) struct StaticSplit {
    planned: BTreeMap<InstanceId, (FunctionId, Home)>,
    takes: Duration,
    added: BTreeSet<FunctionId>,
}

impl StaticSplit {
    /// Gives every slice of a node, as the first node of the plan has them, to one function that fits it as a whole. The largest
    /// slice goes first. Each goes to the function with the smallest part so far of the rate that the whole node could give it.
    pub(super) fn new<'a>(
        plan: &'a Plan,
        model: &GpuModel,
        variant: &Variant,
        takes: Duration,
    ) -> Result<Self> {
        let dag = |function: &'a Function| match &function.spec.work {
            Work::Pipeline { dag, .. } => Some(&**dag),
            _ => None,
        };
        let dags: Vec<&Dag> = plan.functions.iter().filter_map(dag).collect();
        let mut slices: Vec<AssignedSlice> = Vec::new();
        let first = plan.devices.iter().take_while(|device| device.node == plan.devices[0].node);
        for (gpu, device) in (0..).map(GpuId::new).zip(first) {
            let all = device.mig.iter().flat_map(|layout| layout.slices());
            slices.extend(all.map(|&slice| AssignedSlice { gpu, slice, carved: false }));
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
        let mut planned = BTreeMap::new();
        for slice in slices {
            let fits = (0..dags.len()).filter(|&one| time(dags[one], &slice).is_some());
            let Some(least) = fits.min_by(|&a, &b| f64::total_cmp(&has[a], &has[b])) else { continue };
            let Some(latency) = time(dags[least], &slice) else { continue };
            has[least] += rate(dags[least], &slice) / most[least];
            let parts = vec![PlacedPart { stage: 0, components: dags[least].all(), slice }];
            let function = FunctionId::new(u32::try_from(least)?);
            let instance = InstanceId::new(planned.len() as u64);
            planned.insert(instance, (function, Home::Exclusive { parts, latency, interval: latency }));
        }
        Ok(Self { planned, takes, added: BTreeSet::new() })
    }

    /// The keeper of a node with GPUs numbered in a row from the first GPU of `node`.
    pub(super) fn of(&self, node: &Node) -> Self {
        let mut of = self.clone();
        let first = node.gpus().first().map_or(0, |gpu| gpu.gpu.number());
        for (_, home) in of.planned.values_mut() {
            if let Home::Exclusive { parts, .. } = home {
                parts
                    .iter_mut()
                    .for_each(|part| part.slice.gpu = GpuId::new(part.slice.gpu.number() + first));
            }
        }
        of
    }

    fn all(&self, function: FunctionId) -> impl Iterator<Item = (InstanceId, &Home)> {
        let mine = self.planned.iter().filter(move |(_, (of, _))| *of == function);
        mine.map(|(instance, (_, home))| (*instance, home))
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
        let reason = InstanceReason::Removed;
        match event {
            InstanceEvent::FunctionAdded { function, .. } => {
                self.added.insert(function);
                actions.extend(self.all(function).map(|(instance, home)| InstanceAction::Start {
                    instance,
                    function,
                    home: home.clone(),
                    from: Tier::Disk,
                    takes: self.takes,
                    reason: InstanceReason::FirstRequest,
                }));
            }
            InstanceEvent::FunctionRemoved { function } => {
                self.added.remove(&function);
                actions.extend(
                    self.all(function).map(|(instance, _)| InstanceAction::Drain { instance, reason }),
                );
            }
            InstanceEvent::Drained { instance } => actions.push(InstanceAction::Stop { instance, reason }),
            _ => {}
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }
}

impl InstanceKeeper for StaticSplit {
    fn fits(&self, function: FunctionId) -> Option<bool> {
        self.added.contains(&function).then(|| self.all(function).next().is_some())
    }

    fn home(&self, instance: InstanceId) -> Option<&Home> {
        self.planned.get(&instance).map(|(_, home)| home)
    }
}
