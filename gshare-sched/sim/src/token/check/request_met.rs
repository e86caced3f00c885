//! Who keeps asking gets its request in every window.
//!
//! FaST-GShare, section 3.3.2: `quota_request` is the minimal allocation. It can be promised only if it can be kept at
//! all, and only to a client that takes what it is given. So the claim is made for a client and a window when, through
//! the whole window,
//!
//! - the requests of its GPU add up to at most the whole (one after the other they fit whatever their SMs);
//! - every client of the GPU keeps it busy while it holds a token and uses no more than its budget; none is revoked,
//!   joins, leaves or gets another share, and none carries overuse in;
//! - this client holds or asks at every instant.
//!
//! Then at the end of the window it has been charged at least its request, less `slack` (hand-over times of the driver;
//! zero for clients that answer at once).

use super::Checker;
use crate::token::account::{Bound, Windows};
use crate::token::{Book, Change, Client, Held};
use gshare_core::{ClientId, Duration, GpuId, Quota, Timestamp, TokenAction, TokenEvent, TokenScheduler};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Debug)]
pub struct RequestMet {
    slack: Duration,
    /// By GPU: the window watched, and whether everybody behaved in it so far.
    gpus: BTreeMap<GpuId, Watch>,
    tested: u64,
}

#[derive(Debug)]
struct Watch {
    window: u64,
    clean: bool,
    /// Clients that have held or asked at every instant so far.
    keen: Vec<ClientId>,
}

impl RequestMet {
    /// Requests are met but for `slack` in each window.
    pub const fn new(slack: Duration) -> Self {
        Self { slack, gpus: BTreeMap::new(), tested: 0 }
    }

    /// Whether the GPU ran for this client, and not beyond its budget, all the time it held the token.
    fn kept_busy(&self, held: &Held, now: Timestamp, used: Duration) -> bool {
        let busy = now.saturating_since(held.since) <= used.saturating_add(self.slack);
        busy && used <= held.budget.saturating_add(self.slack)
    }

    /// Closes the windows that ended by `now`; the book is as it was at their end, as nothing happened since.
    fn roll(&mut self, book: &Book, now: Timestamp) -> Result<(), String> {
        self.gpus.retain(|gpu, _| book.windows(*gpu).is_some());
        for gpu in book.gpus() {
            let Some(windows) = book.windows(gpu) else { continue };
            let window = windows.index(now);
            if self.gpus.get(&gpu).is_some_and(|watch| watch.window == window) {
                continue;
            }
            if let Some(watch) = self.gpus.insert(gpu, open(book, gpu, windows, now))
                && watch.clean
                && watch.window + 1 == window
            {
                self.close(book, windows, &watch)?;
            }
        }
        Ok(())
    }

    fn close(&mut self, book: &Book, windows: Windows, watch: &Watch) -> Result<(), String> {
        for &id in &watch.keen {
            let Some(client) = book.client(id) else { continue };
            self.tested += 1;
            let request = client.share.quota.request().of(windows.length);
            let charged = client.account.charged(watch.window, Bound::Most);
            if charged.saturating_add(self.slack) < request {
                return Err(format!(
                    "{id} asked all through window {} (until {}) and was given {charged} of its request of {request}",
                    watch.window,
                    windows.end(watch.window),
                ));
            }
        }
        Ok(())
    }
}

/// The watch over a window that starts at `now`, or has started: then nothing can be said about it.
fn open(book: &Book, gpu: GpuId, windows: Windows, now: Timestamp) -> Watch {
    let window = windows.index(now);
    let clients: Vec<_> = book.on(gpu).collect();
    let requests: u32 = clients.iter().map(|(_, client)| u32::from(client.share.quota.request().get())).sum();
    let debt = clients.iter().any(|(_, client)| !client.account.carried(window, Bound::Most).is_zero());
    let clean = now == windows.start(window) && requests <= u32::from(Quota::WHOLE.get()) && !debt;
    let keen = clients.iter().filter(|(_, client)| wants(client)).map(|(id, _)| *id).collect();
    Watch { window, clean, keen }
}

const fn wants(client: &Client) -> bool {
    client.asked.is_some() || client.held.is_some()
}

impl Checker for RequestMet {
    fn name(&self) -> &'static str {
        "request met"
    }

    fn tested(&self) -> u64 {
        self.tested
    }

    fn before(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<(), String> {
        self.roll(book, now)?;
        // Whoever does not keep the GPU busy spoils the window for all: others may have waited for it.
        let spoils = match change {
            Change::Event(TokenEvent::ClientJoined { gpu, .. }) => Some(gpu),
            Change::Event(TokenEvent::ShareChanged { client, .. } | TokenEvent::ClientLeft { client })
            | Change::Action(TokenAction::Revoke { client, .. }) => {
                book.client(client).map(|entry| entry.gpu)
            }
            Change::Event(TokenEvent::TokenReturned { client, lease, used, .. }) => book
                .client(client)
                .filter(|entry| {
                    entry.held.is_some_and(|held| held.lease == lease && !self.kept_busy(&held, now, used))
                })
                .map(|entry| entry.gpu),
            Change::Event(_) | Change::Action(_) => None,
        };
        if let Some(watch) = spoils.and_then(|gpu| self.gpus.get_mut(&gpu)) {
            watch.clean = false;
        }
        Ok(())
    }

    fn settled(
        &mut self,
        book: &Book,
        _now: Timestamp,
        _scheduler: &dyn TokenScheduler,
    ) -> Result<(), String> {
        for watch in self.gpus.values_mut() {
            watch.keen.retain(|id| book.client(*id).is_some_and(wants));
        }
        Ok(())
    }
}
