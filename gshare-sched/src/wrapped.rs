//! A function of yours around another author's engine.

use crate::scale::{ClientScale, GpuScale, VerticalScaler};
use core::fmt;
use gshare_core::token::{ClientStatus, TokenScheduler};
use gshare_core::{ClientId, Duration, Engine, GpuId, Timestamp};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::{DiluVertical, DiluVerticalConfig, VerticalError, VerticalEvent};
    use gshare_core::{QuotaRange, ServiceClass};

    #[test]
    fn the_function_has_each_call_and_the_engine_answers_all_else() {
        let scaler: Box<dyn VerticalScaler> =
            Box::new(DiluVertical::new(DiluVerticalConfig::default()).unwrap());
        let mut wrapped = Wrapped::new(scaler, |scaler, now, event, actions| {
            if let VerticalEvent::ClientLeft { client } = event {
                return Err(VerticalError::UnknownClient { client });
            }
            scaler.handle(now, event, actions)?;
            actions.clear();
            Ok(())
        });
        let (client, gpu) = (ClientId::new(0, 0), GpuId::new(0));
        let (quota, class) = (QuotaRange::BEST_EFFORT, ServiceClass::BestEffort);
        let joined = VerticalEvent::ClientJoined { client, gpu, quota, class };
        assert_eq!(wrapped.orders(Timestamp::ZERO, joined), Ok(Vec::new()));
        let left = VerticalEvent::ClientLeft { client };
        assert_eq!(wrapped.orders(Timestamp::ZERO, left), Err(VerticalError::UnknownClient { client }));
        assert!(wrapped.client(client).is_some() && wrapped.gpu(gpu).is_some());
        assert_eq!(wrapped.period(), DiluVerticalConfig::default().period);
        assert_eq!(wrapped.next_deadline(), Some(Timestamp::ZERO + wrapped.period()));
    }
}
