//! A split of the slices that is made once: each function has exclusive instances on its own slices, for ever.

use super::applications::{Variant, whole};
use anyhow::Result;
use gshare_core::dag::Dag;
use gshare_core::{FunctionId, GpuId};
use gshare_sched::mig::{GpuModel, SliceAt};
use gshare_sched::pipeline::{AssignedSlice, Goal, Home, Node, Place, PlacedPart};
use gshare_sched::platform::Work;
use gshare_sim::world::{Function, Plan};

/// The planned places on a node, with the number of their GPU there. Each function keeps as many instances as it has places.
#[derive(Debug, Clone)]
pub(super) struct StaticSplit(Vec<(FunctionId, usize, SliceAt, Home)>);

impl StaticSplit {
    /// Number of a function's instances on a node.
    pub(super) fn count(&self, function: FunctionId) -> usize {
        self.0.iter().filter(|(of, ..)| *of == function).count()
    }

    /// Gives every slice of a node, as the first node of the plan has them, to one function that fits it as a whole. The largest
    /// slice goes first. Each goes to the function with the smallest part so far of the rate that the whole node could give it.
    pub(super) fn new<'a>(plan: &'a Plan, model: &GpuModel, variant: &Variant) -> Result<Self> {
        let dag = |function: &'a Function| match &function.spec.work {
            Work::Pipeline { dag, .. } => Some(&**dag),
            _ => None,
        };
        let dags: Vec<&Dag> = plan.functions.iter().filter_map(dag).collect();
        let mut slices: Vec<AssignedSlice> = Vec::new();
        let first = plan.devices.iter().take_while(|device| device.node == plan.devices[0].node);
        for (gpu, device) in (0..).map(GpuId::new).zip(first) {
            let all = device.mig.iter().flat_map(|layout| layout.slices());
            slices.extend(all.map(|&slice| AssignedSlice { gpu, slice }));
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
            let fits = (0..dags.len()).filter(|&one| time(dags[one], &slice).is_some());
            let Some(least) = fits.min_by(|&a, &b| f64::total_cmp(&has[a], &has[b])) else { continue };
            let Some(latency) = time(dags[least], &slice) else { continue };
            has[least] += rate(dags[least], &slice) / most[least];
            let parts = vec![PlacedPart { stage: 0, components: dags[least].all(), slice }];
            let function = FunctionId::new(u32::try_from(least)?);
            let home = Home::Exclusive { parts, latency, interval: latency };
            planned.push((function, slice.gpu.index(), slice.slice, home));
        }
        Ok(Self(planned))
    }
}

impl Place for StaticSplit {
    fn find(&self, function: FunctionId, _: &Dag, _: &Goal, node: &Node, _: bool) -> Option<Home> {
        let mine = self.0.iter().filter(|(of, ..)| *of == function);
        mine.filter_map(|(_, gpu, slice, home)| {
            let gpu = node.gpus().get(*gpu)?;
            let mut home = home.clone();
            if let Home::Exclusive { parts, .. } = &mut home {
                parts.iter_mut().for_each(|part| part.slice.gpu = gpu.gpu);
            }
            gpu.free.contains(slice).then_some(home)
        })
        .next()
    }
}
