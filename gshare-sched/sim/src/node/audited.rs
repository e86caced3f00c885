//! A wrapper around any token scheduler of the daemon, which audits every call.

use crate::story::Story;
use crate::token::account::Windows;
use crate::token::drive::Driver;
use crate::token::{Terms, check};
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, Duration, Engine, GpuId, Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler,
};
use std::sync::{Arc, Mutex, PoisonError};

/// A scheduler under audit, shared by the daemon that calls it and the simulation that reads the audit.
#[derive(Debug, Clone)]
pub(super) struct Audited {
    shared: Arc<Mutex<Shared>>,
    window: Duration,
}

#[derive(Debug)]
struct Shared {
    driver: Driver,
    violation: Option<Story>,
}

impl Audited {
    pub(super) fn new(scheduler: Box<dyn TokenScheduler>, terms: Terms) -> Self {
        let window = scheduler.window();
        let driver = Driver::new(scheduler, terms, check::always());
        Self { shared: Arc::new(Mutex::new(Shared { driver, violation: None })), window }
    }

    fn with<T>(&self, read: impl FnOnce(&mut Shared) -> T) -> T {
        read(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The first broken rule, if any.
    pub(super) fn violation(&self) -> Option<Story> {
        self.with(|shared| shared.violation.clone())
    }

    /// The windows of a device, while it has clients.
    pub(super) fn windows(&self, gpu: GpuId) -> Option<Windows> {
        self.with(|shared| shared.driver.book().windows(gpu))
    }

    /// The number of calls so far, refused calls included.
    pub(super) fn calls(&self) -> u64 {
        self.with(|shared| shared.driver.audit().calls())
    }
}

impl Engine for Audited {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.with(|shared| match shared.driver.call(now, event) {
            Ok(Ok(())) => {
                actions.extend_from_slice(shared.driver.actions());
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(violation) => {
                shared.violation.get_or_insert(violation);
                Ok(())
            }
        })
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.with(|shared| shared.driver.scheduler().next_deadline())
    }
}

impl TokenScheduler for Audited {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.with(|shared| shared.driver.scheduler().client(client))
    }

    fn window(&self) -> Duration {
        self.window
    }
}
