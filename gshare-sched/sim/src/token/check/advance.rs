//! A client's time before its turn, which a scheduler may take off the client's next windows.
//!
//! A scheduler that divides a GPU by lag remembers, past the end of a window, which clients took more than a fair part. A client is
//! **ahead** after a window in which the clients with further demand together missed a part `m` of their requests `R`. The fair
//! part of a client with the request `r` is then `r * (1 - m / R)`, and its charge beyond the fair part came before its turn, `m`
//! at most. After a window without a missed part, no client is ahead.
//!
//! Example: requests of 30 and 70 ms are charged 35 and 55 ms, since 10 ms went to hand-overs. The second client missed 15 of 100
//! ms, so the fair parts are 25.5 and 59.5 ms, and the first client is ahead by 9.5 ms.

use crate::token::{Book, Client};
use gshare_core::{ClientId, Duration, GpuId, Timestamp};
use std::collections::BTreeMap;

/// The lead of each client. See the [module](self).
#[derive(Debug, Default)]
pub struct Advance {
    /// The window of each GPU at the last look.
    windows: BTreeMap<GpuId, u64>,
    ahead: BTreeMap<ClientId, Duration>,
}

impl Advance {
    /// A client's lead from the windows before this window.
    pub fn of(&self, client: ClientId) -> Duration {
        self.ahead.get(&client).copied().unwrap_or_default()
    }

    /// Looks back at the windows that ended by `now`. The book still has the state of their end, since nothing happened after it.
    pub fn roll(&mut self, book: &Book, now: Timestamp) {
        self.windows.retain(|gpu, _| book.windows(*gpu).is_some());
        for gpu in book.gpus() {
            let Some(windows) = book.windows(gpu) else { continue };
            let window = windows.index(now);
            match self.windows.insert(gpu, window) {
                Some(before) if before == window => {}
                Some(before) if before + 1 == window => self.look_back(book, gpu, before, windows.length),
                _ => book.on(gpu).for_each(|(id, _)| {
                    self.ahead.remove(&id);
                }),
            }
        }
    }

    fn look_back(&mut self, book: &Book, gpu: GpuId, window: u64, length: Duration) {
        let request = |client: &Client| client.share.quota.request().of(length);
        let charged = |client: &Client| client.committed(window);
        let wants = |client: &&Client| client.asked.is_some() || client.held.is_some();
        let those_that_want = || book.on(gpu).map(|(_, client)| client).filter(wants);
        let requests: Duration = those_that_want().map(request).sum();
        let missed: Duration =
            those_that_want().map(|client| request(client).saturating_sub(charged(client))).sum();
        for (id, client) in book.on(gpu) {
            let lost = u128::from(request(client).as_nanos()) * u128::from(missed.as_nanos())
                / u128::from(requests.as_nanos().max(1));
            let fair = request(client).saturating_sub(Duration::from_wide_nanos(lost));
            let ahead = charged(client).saturating_add(self.of(id)).saturating_sub(fair).min(missed);
            self.ahead.insert(id, ahead);
        }
    }
}
