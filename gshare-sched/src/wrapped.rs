//! A function of yours around another author's engine.

use core::fmt;
use gshare_core::token::{ClientStatus, TokenScheduler};
use gshare_core::{ClientId, Duration, Engine, Timestamp};

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

impl<E: TokenScheduler + ?Sized> TokenScheduler for Wrapped<E> {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.engine.client(client)
    }

    fn window(&self) -> Duration {
        self.engine.window()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{MultiToken, MultiTokenConfig};
    use gshare_core::{GpuId, QuotaRange, Share, SmShare, TokenError, TokenEvent};

    #[test]
    fn the_function_has_each_call_and_the_engine_answers_all_else() {
        let config = MultiTokenConfig::default();
        let scheduler: Box<dyn TokenScheduler> = Box::new(MultiToken::new(config.clone()).unwrap());
        let mut wrapped = Wrapped::new(scheduler, |scheduler, now, event, actions| {
            if let TokenEvent::ClientLeft { client } = event {
                return Err(TokenError::UnknownClient { client });
            }
            scheduler.handle(now, event, actions)?;
            actions.clear();
            Ok(())
        });
        let (client, gpu) = (ClientId::new(0, 0), GpuId::new(0));
        let share = Share { quota: QuotaRange::BEST_EFFORT, sm: SmShare::WHOLE };
        let joined = TokenEvent::ClientJoined { client, gpu, share };
        assert_eq!(wrapped.orders(Timestamp::ZERO, joined), Ok(Vec::new()));
        let left = TokenEvent::ClientLeft { client };
        assert_eq!(wrapped.orders(Timestamp::ZERO, left), Err(TokenError::UnknownClient { client }));
        assert_eq!((wrapped.client(client).unwrap().gpu, wrapped.window()), (gpu, config.window));
    }
}
