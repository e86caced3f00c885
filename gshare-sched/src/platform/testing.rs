//! A host for tests of one pool, with scripted answers.

use crate::platform::{InstanceReport, PlatformAction, Pool, PoolAction, PoolEvent, Rejection};
use core::fmt::Debug;
use gshare_core::{Duration, FunctionId, InstanceId, RequestId, Timestamp};

pub(super) struct Host<P> {
    pub(super) pool: P,
    /// In milliseconds.
    pub(super) now: u64,
}

impl<P: Pool + Debug> Host<P> {
    /// Returns the orders, and checks that a refusal comes without any.
    pub(super) fn try_tell(&mut self, event: PoolEvent) -> Result<Vec<PoolAction>, String> {
        let before = format!("{:?}", self.pool);
        let mut actions = Vec::new();
        let told = self.pool.handle(Timestamp::from_millis(self.now), event, &mut actions);
        told.map_err(|error| {
            assert!(actions.is_empty());
            assert_eq!(format!("{:?}", self.pool), before, "a refusal changes nothing");
            error.to_string()
        })?;
        Ok(actions)
    }

    pub(super) fn tell(&mut self, event: PoolEvent) -> Vec<PlatformAction> {
        let orders = |action| match action {
            PoolAction::Order(order) => Some(order),
            PoolAction::Unmet { .. } => None,
        };
        self.try_tell(event).unwrap().into_iter().filter_map(orders).collect()
    }

    pub(super) fn arrive(
        &mut self,
        request: u64,
        function: u32,
        deadline: Option<u64>,
    ) -> Vec<PlatformAction> {
        let (request, function) = (RequestId::new(request), FunctionId::new(function));
        let (arrived, deadline) = (Timestamp::from_millis(self.now), deadline.map(Timestamp::from_millis));
        self.tell(PoolEvent::Arrived { request, function, arrived, held: false, deadline })
    }

    /// Withdraws a request, as the platform does, and lets the pool go on.
    pub(super) fn withdraw(&mut self, request: u64) -> Vec<PlatformAction> {
        self.pool.withdraw(RequestId::new(request));
        self.tell(PoolEvent::DeadlineReached)
    }

    pub(super) fn report(&mut self, instance: u64, report: InstanceReport) -> Vec<PlatformAction> {
        self.tell(PoolEvent::Instance { instance: InstanceId::new(instance), report })
    }

    pub(super) fn done(&mut self, request: u64) -> Vec<PlatformAction> {
        self.tell(PoolEvent::Done { request: RequestId::new(request), took: Duration::from_millis(20) })
    }
}

pub(super) fn park(instance: u64) -> PlatformAction {
    PlatformAction::Park { instance: InstanceId::new(instance) }
}

pub(super) fn dispatch(request: u64, instance: u64) -> PlatformAction {
    PlatformAction::Dispatch { request: RequestId::new(request), instance: InstanceId::new(instance) }
}

pub(super) fn reject(request: u64, reason: Rejection) -> PlatformAction {
    PlatformAction::Reject { request: RequestId::new(request), reason }
}
