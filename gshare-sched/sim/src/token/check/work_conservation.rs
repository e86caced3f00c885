//! Free SMs are not kept from the only client that wants them.
//!
//! A policy may keep room for a wide client and let a narrow client wait, so "a client that fits runs" is too strong a claim. No
//! policy, however, needs an idle GPU and a queue of one. The claims hold after each call, per GPU, for the clients that ask, hold
//! nothing and have some of their limit left:
//!
//! - if no client holds a token, no such client may remain;
//! - where clients hold side by side: if exactly one such client remains, no holder asks for more, and its SMs are free, it may not
//!   remain.
//!
//! If the limits of the GPU's clients leave time over, a client may also wait until its limit has paid back its overuse from before
//! the window, at the pace of this limit: the rest of the limit still fits into the window.
//!
//! The scheduler must also wake up in time to keep these claims. Whenever a client holds a token or asks, there is a deadline after
//! `now`. It is no later than the end of the window (for an asking client) and the revocation of each token.

use super::Checker;
use crate::token::Book;
use crate::token::account::Bound;
use gshare_core::{GpuId, Quota, SmShare, Timestamp, TokenScheduler};

/// The check of free SMs. See the [module](self).
#[derive(Debug)]
pub struct WorkConservation {
    /// Whether clients hold side by side where their SMs fit.
    pub together: bool,
}

impl Checker for WorkConservation {
    fn settled(
        &mut self,
        book: &Book,
        now: Timestamp,
        scheduler: &dyn TokenScheduler,
    ) -> Result<u64, String> {
        book.gpus().into_iter().try_for_each(|gpu| on_gpu(book, now, gpu, self.together))?;
        wakes_up(book, now, scheduler.next_deadline()).map(|()| 1)
    }
}

fn on_gpu(book: &Book, now: Timestamp, gpu: GpuId, together: bool) -> Result<(), String> {
    let left = |bound| {
        book.on(gpu).filter(move |(_, client)| {
            client.asked.is_some() && client.held.is_none() && !client.account.remain(now, bound).is_zero()
        })
    };
    let limits: u32 =
        book.on(gpu).map(|(_, client)| u32::from(client.account.standing_limit(now).get())).sum();
    let time_over = limits < u32::from(Quota::WHOLE.get());
    let mut surely =
        left(Bound::Most).filter(|(_, client)| !time_over || client.account.paid_back(now) <= now);
    let Some((id, client)) = surely.next() else { return Ok(()) };
    let remain = client.account.remain(now, Bound::Most);
    if book.on(gpu).all(|(_, client)| client.held.is_none()) {
        return Err(format!("{gpu} is idle while {id} asks and has {remain} left"));
    }
    // Another client, with time left only in the kinder reading of its account, may go first and reserve room.
    let alone = left(Bound::Least).count() == 1;
    let more_wanted = book.on(gpu).any(|(_, client)| client.held.is_some() && client.asked.is_some());
    let free = u32::from(SmShare::WHOLE.get()) - book.sm_held(gpu).min(u32::from(SmShare::WHOLE.get()));
    if together && alone && !more_wanted && u32::from(client.share.sm.get()) <= free {
        let sm = client.share.sm;
        return Err(format!(
            "{id} alone asks on {gpu}, has {remain} left and needs {sm}; {free} basis points are free"
        ));
    }
    Ok(())
}

fn wakes_up(book: &Book, now: Timestamp, deadline: Option<Timestamp>) -> Result<(), String> {
    if let Some(deadline) = deadline.filter(|&deadline| deadline <= now) {
        return Err(format!("the next deadline is {deadline}, which is not after {now}"));
    }
    for (id, client) in book.clients() {
        let taken = client.due(book.terms()).map(|due| (due, "its token is to be taken back"));
        let windows = client.account.windows();
        let window_end =
            client.asked.map(|_| (windows.end(windows.index(now)), "it asks, and its window ends"));
        for (needed, why) in taken.into_iter().chain(window_end) {
            if deadline.is_none_or(|deadline| deadline > needed) {
                return Err(format!("{id}: {why} at {needed}, the next deadline is {deadline:?}"));
            }
        }
    }
    Ok(())
}
