//! No window grants a client more than its limit and its possibly owed time, less the carried overuse.
//!
//! FaST-GShare, section 3.3.2: clients with `Q_remain = Q_limit - Q_used <= 0` wait for the next window. A full token for a client
//! with any time left would overshoot by up to a token in every window, so the checker compares the budget itself with the rest of
//! the [account](crate::token::account) at each grant. GPU time beyond a budget is the client's doing (a kernel cannot be stopped);
//! it is charged, and carried.
//!
//! The GPU time charged to one window is therefore at most `limit * window`, plus the client's missed part of its request in the
//! window before and its overuse in this window. Over many windows it is at most the limit plus one overuse.

use super::Checker;
use crate::token::account::Bound;
use crate::token::{Book, Change};
use gshare_core::{Timestamp, TokenAction};

/// The check of a window's grants. See the [module](self).
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
