//! The time of a function's components for one request.

use crate::rng::Rng;
use gshare_core::Duration;
use gshare_core::dag::{ComponentSet, Dag};
use gshare_sched::pipeline::Goal;

/// A request of a function with components. Its number decides about the components behind a branch, so that every policy has the
/// same requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Staged<'a> {
    pub(crate) dag: &'a Dag,
    pub(crate) goal: &'a Goal,
    pub(crate) seed: u64,
    pub(crate) number: u64,
}

impl Staged<'_> {
    fn takes(&self, component: usize) -> bool {
        let runs = u64::from(self.dag.components()[component].runs.get());
        let mixed = (self.number ^ self.seed.rotate_left(17)).wrapping_add(component as u64 * 0x9e37_79b9);
        runs >= 10_000 || Rng::new(mixed).below(10_000) < runs
    }

    /// The time of these components on a slice of this profile (`None`: on the fastest slice of each), without hand-offs.
    pub(crate) fn work(&self, components: ComponentSet, slice: Option<&str>) -> Duration {
        let run = |one: usize| {
            let component = &self.dag.components()[one];
            let batch = self.goal.batch;
            let time = match slice {
                Some(slice) => component.profile(slice, batch).map(|on| on.time),
                None => component.profiles.iter().filter(|on| on.batch == batch).map(|on| on.time).min(),
            };
            time.filter(|_| self.takes(one)).unwrap_or(Duration::ZERO)
        };
        components.iter().map(run).sum()
    }

    /// The hand-offs between these components and the other components.
    pub(crate) fn hand_offs(&self, components: ComponentSet) -> Duration {
        let cut = self.dag.edges().iter().filter(|edge| {
            components.contains(edge.from) != components.contains(edge.to)
                && self.takes(edge.from)
                && self.takes(edge.to)
        });
        cut.map(|edge| self.goal.hand_off.time(edge.bytes)).sum()
    }
}
