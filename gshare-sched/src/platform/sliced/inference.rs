//! An inference function on slices: a DAG of one component, with the times per slice from the function's measured points.

use super::SlicedPool;
use crate::mig::GpuModel;
use crate::pipeline::Goal;
use crate::platform::{FunctionSpec, PoolError, Work};
use gshare_core::dag::{Component, Dag};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, FunctionId, SmShare};
use std::collections::BTreeMap;

/// The pipeline of a function, or the pipeline in place of a measured inference function.
pub(super) fn pipeline(
    function: FunctionId,
    spec: &FunctionSpec,
) -> Result<(Box<Dag>, Box<Goal>), PoolError> {
    match &spec.work {
        Work::Pipeline { dag, goal } => Ok((dag.clone(), goal.clone())),
        Work::Inference { profile: Some(profile) } => {
            let dag = dag(profile, spec.memory);
            let dag = dag.map_err(|why| SlicedPool::REGIME.unsuitable(function, why))?;
            // The function's memory holds its run-time too.
            Ok((Box::new(dag), Box::new(Goal::default().with_runtime_memory(Bytes::ZERO))))
        }
        _ => Err(SlicedPool::REGIME.unsuitable(function, "need a pipeline or a profile")),
    }
}

/// On a slice the function takes the median time of its largest point within the slice's part of the SMs. The function gets no slice
/// that is smaller than all of its points.
fn dag(profile: &ProfileTable, memory: Bytes) -> Result<Dag, String> {
    let mut component = Component::new("all");
    for (slice, part) in slices() {
        if let Some(point) = within(profile, part) {
            component = component.with_profile(slice, Goal::default().batch, point.p50, memory);
        }
    }
    if component.profiles.is_empty() {
        return Err("profile: need a point of batch 1, since a slice serves one request at a time".to_owned());
    }
    Dag::builder("function").component(component).build().map_err(|error| error.to_string())
}

fn within(profile: &ProfileTable, part: SmShare) -> Option<&ProfilePoint> {
    let fit =
        profile.points().iter().filter(|point| point.batch == Goal::default().batch && point.sm <= part);
    fit.max_by_key(|point| (point.sm, point.quota))
}

/// All slices by name, with their part of a GPU: the smallest one where models share the name.
fn slices() -> BTreeMap<String, SmShare> {
    let mut slices = BTreeMap::new();
    for model in GpuModel::names().filter_map(|name| GpuModel::find(name).ok()) {
        for profile in &model.profiles {
            let Some(part) = model.share_of(profile) else { continue };
            let least = slices.entry(profile.name.to_string()).or_insert(part);
            *least = part.min(*least);
        }
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Duration, Quota};

    fn point(percent: u16, quota: u16, batch: u32, ms: u64) -> ProfilePoint {
        let (sm, quota) = (SmShare::from_percent(percent).unwrap(), Quota::from_percent(quota).unwrap());
        let time = Duration::from_millis(ms);
        ProfilePoint::measured(sm, quota, batch, 10.0, time, time).unwrap()
    }

    #[test]
    fn a_slice_takes_the_time_of_the_largest_point_within_it() {
        let points =
            vec![point(14, 100, 1, 40), point(25, 50, 1, 31), point(25, 100, 1, 25), point(100, 100, 1, 9)];
        let dag = dag(&ProfileTable::sparse(points).unwrap(), Bytes::from_gib(3)).unwrap();
        let on = |slice: &str| dag.components()[0].profile(slice, 1).map(|on| on.time.as_nanos() / 1_000_000);
        assert_eq!([on("1g.10gb"), on("2g.20gb"), on("4g.40gb")], [Some(40), Some(25), Some(25)]);
        assert_eq!(on("7g.80gb"), Some(9));
        assert_eq!(dag.components()[0].profiles[0].memory, Bytes::from_gib(3));
    }

    #[test]
    fn a_slice_below_all_points_and_points_of_batches_are_left_out() {
        let table = |points| ProfileTable::sparse(points).unwrap();
        let wide = dag(&table(vec![point(28, 100, 1, 40)]), Bytes::from_gib(3)).unwrap();
        assert!(wide.components()[0].profile("1g.10gb", 1).is_none());
        let why = dag(&table(vec![point(14, 100, 4, 40)]), Bytes::from_gib(3)).unwrap_err();
        assert!(why.contains("batch 1"), "{why}");
    }
}
