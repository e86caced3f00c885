//! A client that keeps asking and keeps the GPU busy gets its request, regardless of the other clients' tokens.
//!
//! FaST-GShare, section 3.3.2: `quota_request` is the minimal allocation. A scheduler can promise it only if it is feasible at all,
//! and only to a client that takes its grants. The claim holds for a client and a window under these conditions through the whole
//! window:
//!
//! - the requests of its GPU add up to at most the whole (one after the other they fit with any SMs);
//! - no client of the GPU uses more than its token allows, is stopped, joins, leaves or gets another share, and none carries
//!   overuse into the window;
//! - this client holds or asks at every instant, and keeps the GPU busy while it holds a token.
//!
//! At the end of the window the client must be charged at least its request, less its time before its turn in earlier windows
//! ([`advance`](super::advance)) and less `slack` (hand-over times of the driver; zero for clients with immediate answers). If
//! another client of the GPU pauses while it holds a token, its turn ends by the clock, not by use, and the last turn of a window
//! may take a part of the next client's time. The next window makes this part good: the shortfalls of consecutive windows never add
//! up to more than the longest token.

use super::Checker;
use super::advance::Advance;
use crate::token::account::{Bound, Windows};
use crate::token::{Book, Change, Client, Held};
use gshare_core::{
    ClientId, Duration, GpuId, Quota, Timestamp, TokenAction, TokenEvent, TokenScheduler, UseState,
};
use std::collections::BTreeMap;

/// The check of requests. See the [module](self).
#[derive(Debug)]
pub struct RequestMet {
    slack: Duration,
    /// By GPU: the present window, and whether all clients have behaved in it so far.
    gpus: BTreeMap<GpuId, Watch>,
    advance: Advance,
}

#[derive(Debug)]
struct Watch {
    window: u64,
    clean: bool,
    /// A client held a token in this window and did not keep the GPU busy.
    paused: bool,
    /// The clients that have held or asked at every instant so far and kept the GPU busy, with the shortfalls of the windows before.
    keen: BTreeMap<ClientId, Duration>,
}

impl RequestMet {
    /// A check that tolerates a shortfall of `slack` in each window.
    pub fn new(slack: Duration) -> Self {
        Self { slack, gpus: BTreeMap::new(), advance: Advance::default() }
    }

    /// Whether the GPU worked for this client all the time since the grant.
    fn kept_busy(&self, held: &Held, now: Timestamp, used: Duration) -> bool {
        now.saturating_since(held.since) <= used.saturating_sub(held.base).saturating_add(self.slack)
    }

    /// Closes the windows that ended by `now`, and returns the number of clients in the test of the claim. The book still has the state
    /// of the windows' end, since nothing happened after it.
    fn roll(&mut self, book: &Book, now: Timestamp) -> Result<u64, String> {
        let mut tested = 0;
        self.gpus.retain(|gpu, _| book.windows(*gpu).is_some());
        for gpu in book.gpus() {
            let Some(windows) = book.windows(gpu) else { continue };
            let window = windows.index(now);
            if self.gpus.get(&gpu).is_some_and(|watch| watch.window == window) {
                continue;
            }
            let Some(mut watch) = self.gpus.insert(gpu, open(book, gpu, windows, now)) else { continue };
            if watch.clean && watch.window + 1 == window {
                tested += self.close(book, windows, &mut watch)?;
                if let Some(next) = self.gpus.get_mut(&gpu) {
                    for (id, shortfall) in &mut next.keen {
                        *shortfall = watch.keen.get(id).copied().unwrap_or_default();
                    }
                    // Time after a pause makes up for a shortfall later, so the pause is remembered until then.
                    next.paused = watch.paused && next.keen.values().any(|shortfall| !shortfall.is_zero());
                }
            }
        }
        self.advance.roll(book, now);
        Ok(tested)
    }

    /// A client that paused while it held its token has no promise in this window. Returns the client's GPU if it used more than its
    /// token allowed, since others may have missed this time.
    fn gives_back(&mut self, book: &Book, now: Timestamp, client: ClientId, used: Duration) -> Option<GpuId> {
        let entry = book.client(client)?;
        let held = entry.held?;
        if !self.kept_busy(&held, now, used) {
            let watch = self.gpus.get_mut(&entry.gpu)?;
            watch.keen.remove(&client);
            watch.paused = true;
        }
        (used > held.allowed.saturating_add(self.slack)).then_some(entry.gpu)
    }

    fn close(&self, book: &Book, windows: Windows, watch: &mut Watch) -> Result<u64, String> {
        let mut tested = 0;
        let allowed = if watch.paused { book.terms().max_token } else { Duration::ZERO };
        for (&id, shortfall) in &mut watch.keen {
            let Some(client) = book.client(id) else { continue };
            tested += 1;
            let request = client.share.quota.request().of(windows.length);
            let charged = client.committed(watch.window);
            let had = charged.saturating_add(self.advance.of(id)).saturating_add(self.slack);
            *shortfall = shortfall.saturating_add(request).saturating_sub(had);
            if *shortfall > allowed {
                return Err(format!(
                    "{id} asked all through window {} (until {}) and was given {charged} of its request of {request}: {shortfall} \
                     short by now, {allowed} at most are made good later",
                    watch.window,
                    windows.end(watch.window),
                ));
            }
        }
        Ok(tested)
    }
}

/// The watch over a window that starts at `now`. A window with an earlier start gets a watch without any claim.
fn open(book: &Book, gpu: GpuId, windows: Windows, now: Timestamp) -> Watch {
    let window = windows.index(now);
    let clients: Vec<_> = book.on(gpu).collect();
    let requests: u32 = clients.iter().map(|(_, client)| u32::from(client.share.quota.request().get())).sum();
    let debt = clients.iter().any(|(_, client)| !client.account.carried(window, Bound::Most).is_zero());
    let clean = now == windows.start(window) && requests <= u32::from(Quota::WHOLE.get()) && !debt;
    let keen =
        clients.iter().filter(|(_, client)| wants(client)).map(|(id, _)| (*id, Duration::ZERO)).collect();
    Watch { window, clean, paused: false, keen }
}

const fn wants(client: &Client) -> bool {
    client.asked.is_some() || client.held.is_some()
}

impl Checker for RequestMet {
    fn before(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<u64, String> {
        let tested = self.roll(book, now)?;
        let spoils = match change {
            Change::Event(TokenEvent::ClientJoined { gpu, .. }) => Some(gpu),
            Change::Event(TokenEvent::ShareChanged { client, .. } | TokenEvent::ClientLeft { client })
            | Change::Action(TokenAction::Stop { client }) => book.client(client).map(|entry| entry.gpu),
            Change::Event(TokenEvent::Used { client, used, state: UseState::Idle | UseState::Wants }) => {
                self.gives_back(book, now, client, used)
            }
            Change::Event(_) | Change::Action(_) => None,
        };
        if let Some(watch) = spoils.and_then(|gpu| self.gpus.get_mut(&gpu)) {
            watch.clean = false;
        }
        Ok(tested)
    }

    fn settled(
        &mut self,
        book: &Book,
        _now: Timestamp,
        _scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        for watch in self.gpus.values_mut() {
            watch.keen.retain(|id, _| book.client(*id).is_some_and(wants));
        }
        Ok(0)
    }
}
