//! A throttled client has used its limit, and the scheduler tells it the true end of the wait.
//!
//! There are three claims. At a throttle, nothing remains to the client even if every doubt counts against it. `until` lies between
//! the starts of the first windows with remaining time under the kindest and under the harshest reading of its account, so a client
//! asleep until then neither sleeps too long nor wakes for nothing. Until then the client gets no grant, unless its account
//! changed, by a share or by its use.

use super::Checker;
use crate::token::account::Bound;
use crate::token::{Book, Change};
use gshare_core::{ClientId, Timestamp, TokenAction, TokenEvent};
use std::collections::BTreeMap;

/// The check of throttles. See the [module](self).
#[derive(Debug, Default)]
pub struct Throttle {
    until: BTreeMap<ClientId, Timestamp>,
}

impl Checker for Throttle {
    fn before(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<u64, String> {
        match change {
            Change::Event(TokenEvent::Used { client, used, .. }) => {
                if book.client(client).is_some_and(|entry| used > entry.charged) {
                    self.until.remove(&client);
                }
                Ok(0)
            }
            Change::Action(TokenAction::Stop { client }) => {
                self.until.remove(&client);
                Ok(0)
            }
            Change::Event(TokenEvent::ShareChanged { client, .. } | TokenEvent::ClientLeft { client }) => {
                self.until.remove(&client);
                Ok(0)
            }
            Change::Action(TokenAction::Allow { client, .. }) => match self.until.remove(&client) {
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
            Change::Event(_) | Change::Action(TokenAction::Recall { .. }) => Ok(0),
        }
    }
}
