//! A scheduler of tokens from one rule: who holds a GPU next, and for how long.
//!
//! The books are the same for every policy: windows and limits, throttles, reports, tokens that nobody gives back. [`Leases`] keeps
//! them, and asks the rule once for each GPU on which something has changed.
//!
//! # Example
//! One holder at a time, and the longest waiter next (nvshare's rule):
//! ```
//! use gshare_core::Duration;
//! use gshare_sched::token::{Leases, MultiTokenConfig};
//!
//! let turn = Duration::from_millis(100);
//! let one_holder = Leases::new(MultiTokenConfig::default(), move |gpu| {
//!     let (waiting, holders) = (gpu.waiting(), gpu.holders());
//!     let next = waiting.first().copied();
//!     // A holder that asks for more has its GPU on while nobody else waits.
//!     if let Some(next) = next.filter(|next| holders.is_empty() || (holders == [*next] && waiting.len() == 1)) {
//!         gpu.grant(next, turn);
//!     }
//! })?;
//! # Ok::<(), gshare_core::ConfigError>(())
//! ```

use super::MultiTokenConfig;
use super::ledger::Ledger;
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, ConfigError, Duration, Engine, GpuId, SmShare, Timestamp, TokenAction, TokenError, TokenEvent,
    TokenScheduler,
};

/// A token scheduler with the rule `R`.
pub struct Leases<R> {
    ledger: Ledger,
    rule: R,
}

gshare_core::debug_fields!(Leases<R> { ledger });

impl<R: FnMut(&mut Turn<'_>) + Send> Leases<R> {
    /// A scheduler without clients. The rule is told a GPU after each change on it, and grants as often as it likes. Settings of
    /// [`MultiToken`](super::MultiToken)'s own order are without effect here.
    ///
    /// # Errors
    /// A setting out of its bounds.
    pub fn new(config: MultiTokenConfig, rule: R) -> Result<Self, ConfigError> {
        Ok(Self { ledger: Ledger::new(config)?, rule })
    }
}

/// A GPU on which a client asks, joins, leaves or gives back, or a window begins.
#[derive(Debug)]
pub struct Turn<'a> {
    ledger: &'a mut Ledger,
    index: usize,
    actions: &'a mut Vec<TokenAction>,
}

impl Turn<'_> {
    /// The GPU.
    pub fn gpu(&self) -> GpuId {
        GpuId::new(u32::try_from(self.index).unwrap_or(u32::MAX))
    }

    /// The time of the change.
    pub const fn now(&self) -> Timestamp {
        self.ledger.now
    }

    /// Clients that ask and have some of their limit left, the longest waiter first. A holder that asks for more is among them.
    pub fn waiting(&self) -> Vec<ClientId> {
        let mut waiting: Vec<_> = self.ledger.gpus[self.index].ready.iter().copied().collect();
        waiting.sort_unstable_by_key(|rank| (rank.asked, rank.slot));
        waiting.iter().map(|rank| self.ledger.client(rank.slot).id).collect()
    }

    /// Clients with a token, in the order in which their tokens are taken back.
    pub fn holders(&self) -> Vec<ClientId> {
        let releases = &self.ledger.gpus[self.index].releases;
        releases.iter().map(|&(_, slot)| self.ledger.client(slot).id).collect()
    }

    /// A client's account.
    pub fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.ledger.status(client)
    }

    /// SMs that no token takes.
    pub fn free(&self) -> SmShare {
        SmShare::new(self.ledger.gpus[self.index].free).unwrap_or(SmShare::ZERO)
    }

    /// Grants a waiting client up to `most` of GPU time, or extends its token: no more than its limit leaves it, and no longer than
    /// the window. Grants nothing, and says so, where too few SMs are free or no time is left.
    pub fn grant(&mut self, client: ClientId, most: Duration) -> bool {
        let (now, gpu) = (self.ledger.now, &self.ledger.gpus[self.index]);
        let Ok(of) = self.ledger.get(client) else { return false };
        let waits = gpu.ready.iter().any(|rank| rank.slot == client.slot());
        let budget = of.budget(most, gpu.window_end, gpu.window, now);
        if !waits || of.needed_sm(gpu.window) > gpu.free || budget.is_zero() {
            return false;
        }
        let until = gpu.window_end;
        self.ledger.grant(client.slot(), budget, until, self.actions);
        true
    }
}

impl<R: FnMut(&mut Turn<'_>) + Send> Engine for Leases<R> {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.ledger.account(now, event, actions)?;
        for index in 0..self.ledger.gpus.len() {
            if core::mem::take(&mut self.ledger.gpus[index].dirty) {
                (self.rule)(&mut Turn { ledger: &mut self.ledger, index, actions });
            }
        }
        if cfg!(debug_assertions) {
            self.ledger.invariants();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.ledger.next_deadline()
    }
}

impl<R: FnMut(&mut Turn<'_>) + Send> TokenScheduler for Leases<R> {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.ledger.status(client)
    }

    fn window(&self) -> Duration {
        self.ledger.config.window
    }
}
