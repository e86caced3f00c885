//! A function of yours around another author's engine.

use crate::scale::{ClientScale, GpuScale, HorizontalScaler, InstanceCounts, VerticalScaler};
use core::fmt;
use gshare_core::token::{ClientStatus, TokenScheduler};
use gshare_core::{ClientId, Duration, Engine, FunctionId, GpuId, Timestamp};

/// An engine with a function of yours in the place of [`handle`](Engine::handle); all other answers stay the engine's.
///
/// The function is given the engine, and usually calls its `handle`. It may log the call, change the event before or the orders
/// after, leave the call out, or call twice. A wrapped policy still implements its trait, so it fits wherever the bare policy
/// did.
///
/// The function keeps the contract of [`Engine`] in the engine's place. In short: `Err` means nothing changed.
///
/// # Example
/// A token scheduler with every decision printed:
/// ```
/// use gshare_core::{TokenScheduler};
/// use gshare_sched::Wrapped;
///
/// fn printed(scheduler: Box<dyn TokenScheduler>) -> Box<dyn TokenScheduler> {
///     Box::new(Wrapped::new(scheduler, |scheduler, now, event, actions| {
///         let before = actions.len();
///         scheduler.handle(now, event, actions)?;
///         println!("{now}: {event:?} -> {:?}", &actions[before..]);
///         Ok(())
///     }))
/// }
/// ```
pub struct Wrapped<E: Engine + ?Sized> {
    engine: Box<E>,
    handle: Box<Handle<E>>,
}

/// A function in the place of [`Engine::handle`].
type Handle<E> = dyn FnMut(
        &mut E,
        Timestamp,
        <E as Engine>::Event,
        &mut Vec<<E as Engine>::Action>,
    ) -> Result<(), <E as Engine>::Error>
    + Send;

impl<E: Engine + ?Sized> Wrapped<E> {
    /// Puts this function in the place of the engine's `handle`.
    pub fn new(
        engine: Box<E>,
        handle: impl FnMut(&mut E, Timestamp, E::Event, &mut Vec<E::Action>) -> Result<(), E::Error>
        + Send
        + 'static,
    ) -> Self {
        Self { engine, handle: Box::new(handle) }
    }
}

impl<E: Engine + ?Sized> Wrapped<E> {
    /// The engine, to look at.
    pub const fn engine(&self) -> &E {
        &self.engine
    }
}

impl<E: Engine + ?Sized> fmt::Debug for Wrapped<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapped").finish_non_exhaustive()
    }
}

impl<E: Engine + ?Sized> Engine for Wrapped<E> {
    type Event = E::Event;
    type Action = E::Action;
    type Error = E::Error;

    fn handle(
        &mut self,
        now: Timestamp,
        event: E::Event,
        actions: &mut Vec<E::Action>,
    ) -> Result<(), E::Error> {
        (self.handle)(&mut self.engine, now, event, actions)
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.engine.next_deadline()
    }
}

/// Passes on all methods of a policy's trait, also those with a default, since the default would give another answer.
macro_rules! pass_on {
    (
        $policy:ident { $(fn $method:ident(&self $(, $name:ident: $kind:ty)*) $(-> $answer:ty)?;)+ }
    ) => {
        impl<E: $policy + ?Sized> $policy for Wrapped<E> {
            $(fn $method(&self $(, $name: $kind)*) $(-> $answer)? {
                self.engine.$method($($name),*)
            })+
        }
    };
}

pass_on!(TokenScheduler {
    fn client(&self, client: ClientId) -> Option<ClientStatus>;
    fn window(&self) -> Duration;
});

pass_on!(VerticalScaler {
    fn gpu(&self, gpu: GpuId) -> Option<GpuScale>;
    fn client(&self, client: ClientId) -> Option<ClientScale>;
    fn period(&self) -> Duration;
});

pass_on!(HorizontalScaler {
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts>;
    fn tick(&self) -> Duration;
    fn early_reports(&self) -> bool;
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::{HorizontalAction, HorizontalError, HorizontalEvent};
    use gshare_core::InstanceId;

    /// A scaler that asks for reports early, and refuses nothing.
    struct Early(Vec<HorizontalEvent>);

    impl Engine for Early {
        type Event = HorizontalEvent;
        type Action = HorizontalAction;
        type Error = HorizontalError;

        fn handle(
            &mut self,
            _: Timestamp,
            event: HorizontalEvent,
            actions: &mut Vec<HorizontalAction>,
        ) -> Result<(), HorizontalError> {
            actions.push(HorizontalAction::Drain { instance: InstanceId::new(1) });
            self.0.push(event);
            Ok(())
        }

        fn next_deadline(&self) -> Option<Timestamp> {
            Some(Timestamp::from_millis(3))
        }
    }

    impl HorizontalScaler for Early {
        fn instances(&self, _: FunctionId) -> Option<InstanceCounts> {
            None
        }

        fn tick(&self) -> Duration {
            Duration::from_millis(7)
        }

        fn early_reports(&self) -> bool {
            true
        }
    }

    #[test]
    fn the_function_has_each_call_and_the_engine_answers_all_else() {
        let removed = HorizontalEvent::FunctionRemoved { function: FunctionId::new(1) };
        let early: Box<dyn HorizontalScaler> = Box::new(Early(Vec::new()));
        let mut wrapped = Wrapped::new(early, |early, now, event, actions| {
            if matches!(event, HorizontalEvent::FunctionRemoved { .. }) {
                return Err(HorizontalError::UnknownFunction { function: FunctionId::new(9) });
            }
            early.handle(now, event, actions)?;
            actions.clear();
            Ok(())
        });
        assert_eq!(wrapped.orders(Timestamp::ZERO, HorizontalEvent::DeadlineReached), Ok(Vec::new()));
        let unknown = HorizontalError::UnknownFunction { function: FunctionId::new(9) };
        assert_eq!(wrapped.orders(Timestamp::ZERO, removed), Err(unknown));
        assert_eq!(wrapped.next_deadline(), Some(Timestamp::from_millis(3)));
        // Without a method of its own the wrapper would give the trait's default answer.
        assert!(wrapped.early_reports());
        assert_eq!((wrapped.tick(), wrapped.instances(FunctionId::new(1))), (Duration::from_millis(7), None));
    }
}
