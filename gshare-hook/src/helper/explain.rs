//! What a launch waits for, and what the daemon said, for the [trace](crate::trace).

use gshare_core::trace::{Event, Why};
use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, ResourceSpec};

use std::sync::atomic::Ordering;

use super::{Account, CLOSED_WAIT, Helper, Link, Outage, RECONNECT, Source};

impl Account {
    /// Tells the threads that wait for credit what they wait for.
    pub(super) fn explain(&self, link: &Link, on_loss: OnDaemonLoss, now: u64) {
        if self.device.waiting.load(Ordering::Acquire) > 0 {
            self.device.why.set(self.why(link, on_loss, now));
        }
    }

    fn why(&self, link: &Link, on_loss: OnDaemonLoss, now: u64) -> Why {
        let limit = self.spec.quota().limit();
        let unspent = self.ledger.unspent(&self.device.gate);
        let in_flight = Why::InFlight { bound_ns: self.bound.as_nanos() };
        match &self.source {
            Source::None => match link {
                Link::Up(_) if self.refused.is_none() => Why::Attaching {},
                _ if on_loss == OnDaemonLoss::Closed => {
                    let since = outage(link).map_or(now, |outage| outage.since);
                    Why::Closed { left_ns: (since + CLOSED_WAIT).saturating_sub(now) }
                }
                &Link::Down { retry_at, .. } => Why::NoDaemon { retry_ns: retry_at.saturating_sub(now) },
                _ => Why::NoDaemon { retry_ns: 0 },
            },
            Source::Local(..) if self.ledger.lease().is_some() && !unspent.is_zero() => in_flight,
            Source::Local(..) => Why::LocalWindow { limit, left_ns: self.expires.saturating_sub(now) },
            Source::Daemon(_) if self.owed.is_some() => Why::Draining { queued_ns: self.queued(now) },
            Source::Daemon(_) if self.ledger.lease().is_some() && !unspent.is_zero() => in_flight,
            Source::Daemon(_) if self.throttled > now => {
                Why::Throttled { limit, left_ns: self.throttled - now }
            }
            Source::Daemon(_) => Why::Token { asked_ns: now.saturating_sub(self.asked_at) },
        }
    }
}

fn outage(link: &Link) -> Option<&Outage> {
    match link {
        Link::Up(_) => None,
        Link::Greeting(.., outage) | Link::Down { outage, .. } => Some(outage),
    }
}

fn words_of(spec: ResourceSpec) -> (gshare_core::Quota, gshare_core::Quota, u64) {
    (spec.quota().request(), spec.quota().limit(), spec.memory().unwrap_or(Bytes(u64::MAX)).0)
}

impl Helper {
    fn note(&self, device: Option<i32>, event: Event) {
        self.runtime.trace(device, event);
    }

    fn ordinal(&mut self, client: ClientId) -> Option<i32> {
        self.account_of(client).map(|account| account.device.ordinal)
    }

    /// A connection was made.
    pub(super) fn note_connected(&self) {
        self.note(None, Event::Connected {});
    }

    /// Nobody listens: written down for the first attempts after a daemon was there.
    pub(super) fn note_not_connected(&self, error: &std::io::Error, now: u64) {
        if let Link::Down { retry_at, outage } = &self.link
            && outage.delay < RECONNECT.1
        {
            let errno = error.raw_os_error().map_or(0, |errno| u64::from(errno.unsigned_abs()));
            self.note(None, Event::NotConnected { errno, retry_ns: retry_at.saturating_sub(now) });
        }
    }

    /// The connection is gone.
    pub(super) fn note_lost(&self, welcomed: bool, now: u64) {
        if let Link::Down { retry_at, .. } = self.link {
            self.note(None, Event::Lost { welcomed, retry_ns: retry_at.saturating_sub(now) });
        }
    }

    /// What the daemon said.
    pub(super) fn note_heard(&mut self, message: &ToClient) {
        let (device, event) = match *message {
            ToClient::Welcome { epoch } => (None, Event::Welcome { epoch }),
            ToClient::Refused { code, .. } => (None, Event::Refused { code }),
            ToClient::Attached { ordinal, spec, window, .. } => {
                let (request, limit, memory) = words_of(spec);
                let event = Event::Attached { request, limit, memory, window_ns: window.as_nanos() };
                (i32::try_from(ordinal).ok(), event)
            }
            ToClient::ShareChanged { client, spec } => {
                let (request, limit, memory) = words_of(spec);
                (self.ordinal(client), Event::ShareChanged { request, limit, memory })
            }
            ToClient::Grant { client, lease, budget, expires } => {
                let (budget_ns, expires_ns) = (budget.as_nanos(), expires.as_nanos());
                (self.ordinal(client), Event::Granted { lease: lease.0, budget_ns, expires_ns })
            }
            ToClient::Revoke { client, lease, .. } => {
                (self.ordinal(client), Event::Revoked { lease: lease.0 })
            }
            ToClient::Throttle { client, until, .. } => {
                if let Some(account) = self.account_of(client) {
                    account.throttled = until.as_nanos();
                }
                (self.ordinal(client), Event::Throttled { until_ns: until.as_nanos() })
            }
            _ => return,
        };
        self.note(device, event);
    }

    /// What the daemon is told.
    pub(super) fn note_said(&mut self, message: &ToDaemon, now: u64) {
        let (client, event) = match *message {
            ToDaemon::TokenRequest { client } => (client, Event::TokenRequested {}),
            ToDaemon::TokenReturn { client, lease, used, again } => {
                let (used_ns, again) = (used.as_nanos(), again != 0);
                (client, Event::Returned { lease: lease.0, used_ns, again })
            }
            _ => return,
        };
        if let Some(account) = self.account_of(client) {
            account.asked_at = now;
        }
        let device = self.ordinal(client);
        self.note(device, event);
    }
}
