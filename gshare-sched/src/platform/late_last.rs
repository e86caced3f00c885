//! The order of a function's waiting requests, in every regime: late requests wait, for a bounded time, behind requests that can be in
//! time.

use super::cluster::Cluster;
use super::{Duration, FunctionId, RequestId, Timestamp};
use crate::pipeline::overdue_after;

impl Cluster {
    /// The next of the function's waiting requests, if `may` lets it be chosen, for an instance that will have answered it at `done`: the
    /// first one, or the first that can be in time while the first is late but not overdue. `behind`: the time that the function needs
    /// for all waiting requests. See [`late_wait`](super::PlatformConfig::late_wait).
    pub(super) fn next_request(
        &self,
        function: FunctionId,
        done: Timestamp,
        behind: Duration,
        may: impl Fn(RequestId) -> bool,
    ) -> Option<RequestId> {
        let of = self.functions.get(&function)?;
        let &(arrived, first) = of.queue.iter().find(|(_, request)| may(*request))?;
        let (Some(slo), Some(wait)) = (of.spec.slo, self.config.late_wait) else { return Some(first) };
        let due = arrived.saturating_add(slo);
        let overdue = || due.saturating_add(overdue_after(wait, self.config.late_stretch_percent, behind));
        if done <= due || done >= overdue() {
            return Some(first);
        }
        let in_time =
            Timestamp::ZERO.saturating_add(done.saturating_since(Timestamp::ZERO.saturating_add(slo)));
        let mut others = of.queue.range((in_time, RequestId::new(0))..).map(|(_, request)| *request);
        others.find(|request| may(*request)).or(Some(first))
    }
}
