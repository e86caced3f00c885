//! The holders' SMs never add up to more than the whole GPU.
//!
//! FaST-GShare, section 3.3.2: the SM allocation adapter keeps the occupancy within `SM_GLOBAL_LIMIT`. An adapter that chooses a
//! whole batch before it adds the batch's SMs would let two clients of 60 % in at once. The checker therefore takes the sum after
//! every action of a call and not after the call. A holder counts with the SMs of its share at the time of its grant, since a later
//! cut of the share does not make its kernels smaller.

use super::Checker;
use crate::token::{Book, Change};
use gshare_core::{SmShare, Timestamp, TokenAction};

/// The check of SMs. See the [module](self).
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "nothing is kept")]
pub struct SmSum;

impl Checker for SmSum {
    fn after(&mut self, book: &Book, _now: Timestamp, change: Change) -> Result<u64, String> {
        let Change::Action(TokenAction::Allow { client, .. }) = change else { return Ok(0) };
        let Some(entry) = book.client(client) else { return Ok(0) };
        let held = book.sm_held(entry.gpu);
        if held <= u32::from(SmShare::WHOLE.get()) {
            return Ok(1);
        }
        let holders: Vec<String> = book
            .on(entry.gpu)
            .filter_map(|(id, client)| client.held.map(|held| format!("{id} {}", held.sm)))
            .collect();
        Err(format!(
            "the token of {client} makes {held} of 10000 basis points on {}: {}",
            entry.gpu,
            holders.join(", ")
        ))
    }
}
