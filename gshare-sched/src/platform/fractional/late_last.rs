//! The order of a function's requests: late requests wait, for a bounded time, behind requests that can be in time.

use super::{Duration, FractionalConfig, RequestId, Timestamp};
use crate::pipeline::overdue_after;
use std::collections::BTreeSet;

impl FractionalConfig {
    /// The next request for an instance that will have answered it at `done`: the first one, or the first that can be in time while
    /// the first is late but not overdue. See [`late_wait`](Self::late_wait) and [`late_stretch_percent`](Self::late_stretch_percent).
    pub(super) fn next_request(
        &self,
        queue: &BTreeSet<(Timestamp, RequestId)>,
        slo: Option<Duration>,
        done: Timestamp,
        backlog: Duration,
    ) -> Option<RequestId> {
        let &(arrived, first) = queue.first()?;
        let (Some(slo), Some(wait)) = (slo, self.late_wait) else { return Some(first) };
        let due = arrived.saturating_add(slo);
        let overdue = || due.saturating_add(overdue_after(wait, self.late_stretch_percent, backlog));
        if done <= due || done >= overdue() {
            return Some(first);
        }
        let in_time =
            Timestamp::ZERO.saturating_add(done.saturating_since(Timestamp::ZERO.saturating_add(slo)));
        queue.range((in_time, RequestId::new(0))..).next().map_or(Some(first), |(_, request)| Some(*request))
    }
}
