//! A client with owed time waits no longer than a stated bound.
//!
//! A client is owed time while it asks, holds nothing, and has used less of its request in this window than allowed. Its time
//! before its turn in earlier windows ([`advance`](super::advance)) counts as used. Clients without a token let this client go
//! first, and each client with a token holds it for one token, slack and grace at most. This gives
//!
//! `wait <= sum over the other clients of (longest token + slack + grace) + one window`
//!
//! The window pays for the narrow clients let in beside a wide client, and for the turn of the window, after which everybody is
//! owed time again. The clock of a wait starts again when the client gets a token or is owed nothing, when clients come to its GPU,
//! and when shares change. The checker reads the clock after every call, so it finds an excessive wait at the bound and not at the
//! wait's end.
//!
//! The bound also forbids starvation of a wide client by narrow clients, a defect of schedulers that skip a client without
//! room. It also gives a dead client's SMs to others, since no client waits longer for them.

use super::Checker;
use super::advance::Advance;
use crate::token::account::Bound;
use crate::token::{Book, Change};
use gshare_core::{ClientId, Timestamp, TokenAction, TokenEvent, TokenScheduler};
use std::collections::BTreeMap;

/// The waits of clients. See the [module](self).
#[derive(Debug, Default)]
pub struct BoundedWait {
    since: BTreeMap<ClientId, Timestamp>,
    advance: Advance,
}

impl Checker for BoundedWait {
    fn before(&mut self, book: &Book, now: Timestamp, _change: Change) -> Result<u64, String> {
        self.advance.roll(book, now);
        Ok(0)
    }

    fn after(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<u64, String> {
        match change {
            Change::Action(TokenAction::Allow { client, .. })
            | Change::Event(TokenEvent::ClientLeft { client }) => {
                self.since.remove(&client);
            }
            Change::Event(
                TokenEvent::ClientJoined { client, .. } | TokenEvent::ShareChanged { client, .. },
            ) => {
                let gpu = book.client(client).map(|entry| entry.gpu);
                for (id, since) in &mut self.since {
                    if book.client(*id).map(|entry| entry.gpu) == gpu {
                        *since = now;
                    }
                }
            }
            Change::Event(_) | Change::Action(_) => {}
        }
        Ok(0)
    }

    fn settled(
        &mut self,
        book: &Book,
        now: Timestamp,
        _scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        let (terms, mut tested) = (book.terms(), 0);
        for (id, client) in book.clients() {
            let windows = client.account.windows();
            let window = windows.index(now);
            let used = client
                .account
                .carried(window, Bound::Most)
                .saturating_add(client.account.charged(window))
                .saturating_add(self.advance.of(id));
            let owed = used < client.share.quota.request().of(windows.length);
            if client.asked.is_none() || client.held.is_some() || !owed {
                self.since.remove(&id);
                continue;
            }
            let waited = now.saturating_since(*self.since.entry(id).or_insert(now));
            tested += 1;
            let others = book.on(client.gpu).count() as u64 - 1;
            let bound = terms
                .max_token
                .saturating_add(terms.slack)
                .saturating_add(terms.grace)
                .saturating_mul(others)
                .saturating_add(terms.window);
            if waited > bound {
                return Err(format!(
                    "{id} has waited for {waited}, bound {bound}: it used {used} of its request of {}",
                    client.share.quota.request().of(windows.length),
                ));
            }
        }
        Ok(tested)
    }
}
