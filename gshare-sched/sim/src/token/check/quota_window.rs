//! In no window is a client granted more than its limit and what it may be owed, less the overuse it carries.
//!
//! FaST-GShare, section 3.3.2: clients with `Q_remain = Q_limit - Q_used <= 0` wait for the next window. A full token
//! for a client that has any time left overshoots by up to a token in every window; so what is checked at a grant is the
//! budget itself against the rest of the [account](crate::token::account). GPU time used beyond a budget is the client's doing (a kernel
//! cannot be stopped); it is charged, and carried.
//!
//! It follows that the GPU time charged to one window is at most `limit * window` plus what the client
//! missed of its request in the window before and overused in this one, and over many windows at most the limit plus one overuse.

use super::Checker;
use crate::token::account::Bound;
use crate::token::{Book, Change};
use gshare_core::{Timestamp, TokenAction};

/// See the [module](self).
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "nothing is kept")]
pub struct QuotaWindow;

impl Checker for QuotaWindow {
    fn before(&mut self, book: &Book, now: Timestamp, change: Change) -> Result<u64, String> {
        let Change::Action(TokenAction::Allow { client, allowed, .. }) = change else { return Ok(0) };
        let Some(entry) = book.client(client) else { return Ok(0) };
        let (remain, budget) =
            (entry.account.remain(now, Bound::Least), allowed.saturating_sub(entry.begins(now)));
        if budget <= remain {
            return Ok(1);
        }
        let window = entry.account.windows().index(now);
        Err(format!(
            "{client} is given {budget} where {remain} remain (limit {}, {} owed and {} carried into window {window}, {} charged to it)",
            entry.share.quota.limit(),
            entry.account.owed(window, Bound::Least),
            entry.account.carried(window, Bound::Least),
            entry.account.charged(window),
        ))
    }
}
