//! The scheduler's own account agrees with the reported totals.
//!
//! `total_used` must be the largest of the client's reported total and the allowed totals of its revoked tokens. `holds`, `share`
//! and `gpu` must be equal to the book. The checker finds a slip in the ledger at the call with the mistake, even before a grant
//! shows it.

use super::Checker;
use crate::token::{Book, Client};
use gshare_core::token::ClientStatus;
use gshare_core::{Timestamp, TokenScheduler};

/// The check of the ledger. See the [module](self).
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "nothing is kept")]
pub struct Ledger;

impl Checker for Ledger {
    fn settled(
        &mut self,
        book: &Book,
        _now: Timestamp,
        scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        for (id, client) in book.clients() {
            match scheduler.client(id) {
                Some(status) => compare(client, &status).map_err(|message| format!("{id}: {message}"))?,
                None => return Err(format!("{id} is not known to the scheduler")),
            }
        }
        Ok(1)
    }
}

fn compare(client: &Client, status: &ClientStatus) -> Result<(), String> {
    if (status.gpu, status.share) != (client.gpu, client.share) {
        return Err(format!(
            "status says {} {:?}, it is {} {:?}",
            status.gpu, status.share, client.gpu, client.share
        ));
    }
    let held = client.held.map(|held| held.until);
    if status.holds != held {
        return Err(format!("status says it holds until {:?}, it holds until {held:?}", status.holds));
    }
    if status.waiting_since.is_none() && client.asked.is_some() {
        return Err(format!("it has been asking since {:?}, status says it does not wait", client.asked));
    }
    if status.total_used != client.charged {
        return Err(format!("status says {} used in all, it is {}", status.total_used, client.charged));
    }
    Ok(())
}
