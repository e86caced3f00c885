//! A host for tests of one pool under a platform, with scripted answers.

use crate::platform::{
    InstanceReport, Platform, PlatformAction, PlatformConfig, PlatformEvent, RegimePool, Rejection,
};
use core::marker::PhantomData;
use gshare_core::{Duration, Engine, FunctionId, InstanceId, RequestId, Timestamp};

pub(super) struct Host<P> {
    pub(super) platform: Platform,
    pool: PhantomData<P>,
    /// In milliseconds.
    pub(super) now: u64,
}

impl<P: Into<RegimePool>> Host<P> {
    /// Around a pool alone, with bounds that no test meets.
    pub(super) fn around(pool: P) -> Self {
        let day = Duration::from_secs(86_400);
        let bounds = PlatformConfig::default().with_max_wait(day).with_start_timeout(day);
        let bounds = bounds.with_park_timeout(day).with_drain_timeout(day).with_max_attempts(100);
        let platform = Platform::new(bounds, vec![pool.into()]).unwrap();
        Self { platform, pool: PhantomData, now: 0 }
    }

    /// Returns the orders, and checks that a refusal comes without any.
    pub(super) fn try_tell(&mut self, event: PlatformEvent) -> Result<Vec<PlatformAction>, String> {
        let before = format!("{:?}", self.platform);
        let mut actions = Vec::new();
        let told = self.platform.handle(Timestamp::from_millis(self.now), event, &mut actions);
        told.map_err(|error| {
            assert!(actions.is_empty());
            assert_eq!(format!("{:?}", self.platform), before, "a refusal changes nothing");
            error.to_string()
        })?;
        self.platform.invariants();
        Ok(actions)
    }

    pub(super) fn tell(&mut self, event: PlatformEvent) -> Vec<PlatformAction> {
        self.try_tell(event).unwrap()
    }

    pub(super) fn arrive(
        &mut self,
        request: u64,
        function: u32,
        deadline: Option<u64>,
    ) -> Vec<PlatformAction> {
        let (request, function) = (RequestId::new(request), FunctionId::new(function));
        let deadline = deadline.map(Timestamp::from_millis);
        self.tell(PlatformEvent::RequestArrived { request, function, deadline })
    }

    /// Cancels a waiting request, and returns the other orders.
    pub(super) fn cancel(&mut self, request: u64) -> Vec<PlatformAction> {
        let mut orders = self.tell(PlatformEvent::RequestCancelled { request: RequestId::new(request) });
        assert_eq!(orders.remove(0), reject(request, Rejection::Cancelled));
        orders
    }

    pub(super) fn report(&mut self, instance: u64, report: InstanceReport) -> Vec<PlatformAction> {
        self.tell(PlatformEvent::Instance { instance: InstanceId::new(instance), report })
    }

    pub(super) fn done(&mut self, request: u64) -> Vec<PlatformAction> {
        let took = Duration::from_millis(20);
        self.tell(PlatformEvent::RequestDone { request: RequestId::new(request), took })
    }

    /// How often a lack of devices was counted during an event.
    pub(super) fn unmet(&mut self, function: u32, event: PlatformEvent) -> u64 {
        let function = FunctionId::new(function);
        let unmet = |host: &Self| host.platform.function(function).map_or(0, |of| of.stats.unmet);
        let before = unmet(self);
        self.tell(event);
        unmet(self) - before
    }
}

pub(super) fn park(instance: u64) -> PlatformAction {
    PlatformAction::Park { instance: InstanceId::new(instance), keeps: true }
}

pub(super) fn dispatch(request: u64, instance: u64) -> PlatformAction {
    PlatformAction::Dispatch { request: RequestId::new(request), instance: InstanceId::new(instance) }
}

pub(super) fn reject(request: u64, reason: Rejection) -> PlatformAction {
    PlatformAction::Reject { request: RequestId::new(request), reason }
}
