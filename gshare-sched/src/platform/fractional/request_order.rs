//! The default order of a function's requests: late requests wait, for a bounded time, behind requests that can be in time.

use super::{Duration, FractionalConfig, RequestId, Timestamp};
use crate::pipeline::overdue_after;
use crate::platform::{QueueOrder, WaitQueue};

/// See [`FractionalConfig::late_wait`] and [`FractionalConfig::late_stretch_percent`].
#[derive(Debug)]
pub(super) struct LateLast {
    wait: Option<Duration>,
    stretch_percent: u32,
}

impl LateLast {
    pub(super) fn new(config: &FractionalConfig) -> Self {
        Self { wait: config.late_wait, stretch_percent: config.late_stretch_percent }
    }
}

impl QueueOrder for LateLast {
    /// The first request, or the first that can be in time while the first is late but not overdue.
    fn next(&mut self, queue: &WaitQueue<'_>) -> Option<(Timestamp, RequestId)> {
        let first = *queue.waiting.first()?;
        let (Some(slo), Some(wait)) = (queue.slo, self.wait) else { return Some(first) };
        let due = first.0.saturating_add(slo);
        let overdue = || due.saturating_add(overdue_after(wait, self.stretch_percent, queue.backlog));
        if queue.done <= due || queue.done >= overdue() {
            return Some(first);
        }
        let in_time =
            Timestamp::ZERO.saturating_add(queue.done.saturating_since(Timestamp::ZERO.saturating_add(slo)));
        queue.waiting.range((in_time, RequestId::new(0))..).next().copied().or(Some(first))
    }
}
