//! A client that is told to wait has used its limit, and is told the true end of the wait.
//!
//! Three claims. When a throttle is sent, nothing remains to the client even if every doubt is decided against it.
//! `until` lies between the starts of the first windows in which something remains under the kindest and under the
//! harshest reading of its account, so a client that sleeps until then neither sleeps too long nor wakes for nothing.
//! And until then nothing is granted to it, unless what is known of it changed: a share, a return, a report; or what is known
//! of the last window of a client of its GPU, which may have overrun what is owed to it.

use super::Checker;
use crate::token::account::Bound;
use crate::token::{Book, Change, Client};
use gshare_core::{ClientId, LeaseId, Timestamp, TokenAction, TokenEvent};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Throttle {
    until: BTreeMap<ClientId, Timestamp>,
}

fn of_a_window_before(client: &Client, lease: LeaseId, now: Timestamp) -> bool {
    let windows = client.account.windows();
    let known = client.held.iter().chain(&client.unsettled).find(|known| known.lease == lease);
    known.is_some_and(|known| windows.index(known.since) < windows.index(now))
}

impl Checker for Throttle {
    fn before(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<u64, String> {
        match change {
            Change::Event(
                TokenEvent::TokenReturned { client, lease, .. }
                | TokenEvent::UsageReported { client, lease, .. },
            )
            | Change::Action(TokenAction::Revoke { client, lease, .. }) => {
                self.until.remove(&client);
                if let Some(entry) = book.client(client)
                    && of_a_window_before(entry, lease, now)
                {
                    self.until
                        .retain(|other, _| book.client(*other).is_some_and(|other| other.gpu != entry.gpu));
                }
                Ok(0)
            }
            Change::Event(TokenEvent::ShareChanged { client, .. } | TokenEvent::ClientLeft { client }) => {
                self.until.remove(&client);
                Ok(0)
            }
            Change::Action(TokenAction::Grant { client, .. }) => match self.until.remove(&client) {
                Some(until) if now < until => Err(format!(
                    "{client} was throttled until {until} and is granted at {now}; nothing changed"
                )),
                _ => Ok(0),
            },
            Change::Action(TokenAction::Throttle { client, until, .. }) => {
                self.until.insert(client, until);
                let Some(entry) = book.client(client) else { return Ok(0) };
                let remain = entry.account.remain(now, Bound::Most);
                if !remain.is_zero() {
                    return Err(format!("{client} is throttled, but {remain} remain of its limit"));
                }
                let [kind, harsh] =
                    [Bound::Least, Bound::Most].map(|bound| entry.account.next_remain(now, bound));
                if until < kind || until > harsh {
                    return Err(format!(
                        "{client} is throttled until {until}, where {kind} to {harsh} is right"
                    ));
                }
                Ok(1)
            }
            Change::Event(_) => Ok(0),
        }
    }
}
