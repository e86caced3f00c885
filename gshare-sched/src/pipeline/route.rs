//! The question which request an instance on sliced devices serves next, and the policy that answers it.

use crate::pipeline::{AssignedSlice, Offer, Offers};
use gshare_core::{FunctionId, InstanceId, RequestId, Timestamp};

/// A change of the queues, or of the instances that take requests. The latter are told after the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub enum Change {
    /// The request waits, for the first time or again after its instance was lost.
    Waits {
        request: RequestId,
        function: FunctionId,
        /// The latest time for the answer: the function's SLO, or the client's deadline if that is earlier.
        due: Option<Timestamp>,
    },
    /// The request waits no more.
    Left {
        request: RequestId,
        function: FunctionId,
        /// As it was when the request began to wait.
        due: Option<Timestamp>,
        /// The instance that serves it; None for a request that has ended.
        to: Option<InstanceId>,
    },
    /// The instance takes requests from now on.
    Offered { instance: InstanceId },
    /// The instance takes no requests any more.
    Withdrawn {
        instance: InstanceId,
        /// Its offer until now.
        offer: Offer,
    },
    /// The shared instance was loaded or evicted: slacks on it change.
    LoadChanged { instance: InstanceId },
}

/// Which waiting request is next on sliced devices.
///
/// The platform has the requests and dispatches them; a policy keeps an index of the waiting requests, in an order of its own.
///
/// # Contract
/// - an answer is a waiting request of the instance's function, and is given again until the request has [left](Change::Left);
/// - where requests of a function wait, there is an answer for each of its instances;
/// - the same calls give the same answers.
pub trait Route: Send {
    /// Learns of a change.
    fn note(&mut self, now: Timestamp, offers: &Offers, change: Change);

    /// The next request for an exclusive instance with room.
    fn next(&mut self, now: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId>;

    /// The next request for an idle shared slice, and the instance on the slice that serves it.
    fn next_on(
        &mut self,
        now: Timestamp,
        offers: &Offers,
        slice: AssignedSlice,
    ) -> Option<(InstanceId, RequestId)>;

    /// A request to be rejected, since its answer would be late; the policy has forgotten it.
    fn late(&mut self, _: Timestamp, _: &Offers) -> Option<RequestId> {
        None
    }

    /// Whether the function's instances cannot serve its waiting requests in time.
    fn is_short(&self, now: Timestamp, offers: &Offers, function: FunctionId) -> bool;

    /// Number of a function's waiting requests.
    fn waiting(&self, function: FunctionId) -> usize;

    /// The time from which [`late`](Self::late) may have another answer.
    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }

    /// Checks the policy's own order between events, for tests.
    ///
    /// # Panics
    /// On a broken invariant, a mistake of the policy.
    fn invariants(&self, _: &Offers) {}
}
