//! The launch gate: what a hooked process decides by itself.
//!
//! # Problem
//! A kernel launch takes about 2 us; asking a daemon takes 8 us and more. So the process decides from what it was
//! given ahead of time, and a launch costs **one atomic subtraction** while credit lasts. Threads must not fight over
//! one cache line, a lease must be taken back exactly (to the nanosecond) while they launch, and only so much GPU time
//! may be queued that the GPU can be given back soon.
//!
//! # Terms
//! - **credit**: GPU time in ns that may still be launched. A launch is let through while its shard's credit is above
//!   zero, however much it costs; the overrun stays behind as **debt** (negative credit).
//! - **shard**: a thread's own part of the credit, on its own cache line, filled from the **pool** a chunk at a time.
//! - **tag**: which lease a word of credit belongs to; 16 bits beside 48 bits of credit in one atomic word, so that
//!   closing a lease and spending from it cannot cross.
//! - **in flight**: launched and not yet known to have completed, at the predicted cost.
//!
//! # Algorithm
//! [`LaunchGate`] is the shared, hot side: [`try_spend`](LaunchGate::try_spend). [`LeaseLedger`] is the other side,
//! owned by one helper thread: it opens leases, puts credit in as work completes, and settles.
//!
//! ```text
//! lease of 10 ms, in-flight bound 2 ms, kernels predicted at 1 ms that really take 1.1 ms
//! grant            pool 2.0   reserve 8.0
//! launch, launch   pool 0     in flight 2.0          (a third launch waits)
//! one completes    measured 1.1, predicted 1.0: used +0.1; in flight 1.0; pool +1.0, reserve 6.9
//! ...
//! close            used = predicted cost of all launches + what measuring corrected
//! ```
//! What is still in flight when a lease closes is charged to it at the predicted cost; the correction that comes with
//! its completion is carried into the next lease.
//!
//! # Invariants
//! - No credit is lost or made: `spent + left == put in`, under any interleaving (checked by loom).
//! - Credit put in never exceeds the budget, corrections included, nor (with what is in flight) the in-flight bound by
//!   more than one launch per shard and [one](LeaseLedger::let_one_in) each time that what is in flight is overdue.
//! - `used` of a lease never shrinks.
//!
//! # Cost
//! `try_spend`: one load and one compare-and-swap on the thread's own line; every chunk's worth one more on the pool.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering};
#[cfg(loom)]
use loom::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::ids::LeaseId;
use crate::units::{Bytes, Duration};

/// Number of shards; more threads than this share them.
pub const SHARDS: usize = if cfg!(loom) { 2 } else { 8 };

/// Credit a shard takes from the pool at once, in ns: many launches for small kernels, little stranded for large.
const CHUNK: i64 = 50_000;

/// One word of credit on its own pair of cache lines (adjacent lines are fetched together).
#[derive(Debug)]
#[repr(align(128))]
struct Cell(AtomicU64);

const CREDIT_BITS: u32 = 48;
const CREDIT_MASK: u64 = (1 << CREDIT_BITS) - 1;
/// Credit that fits with room to spare: about 19 hours.
const CREDIT_MAX: i64 = 1 << (CREDIT_BITS - 2);

#[expect(clippy::cast_possible_wrap, reason = "sign extension of a 48-bit field is the point")]
const fn credit_of(word: u64) -> i64 {
    ((word << (64 - CREDIT_BITS)) as i64) >> (64 - CREDIT_BITS)
}

const fn tag_of(word: u64) -> u64 {
    word >> CREDIT_BITS
}

#[expect(clippy::cast_sign_loss, reason = "the low 48 bits are the two's complement")]
const fn pack(tag: u64, credit: i64) -> u64 {
    tag << CREDIT_BITS | (credit as u64 & CREDIT_MASK)
}

fn clamp_credit(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(CREDIT_MAX).min(CREDIT_MAX)
}

/// The hot side: shared by all launching threads of a process, one per GPU.
#[derive(Debug)]
pub struct LaunchGate {
    pool: Cell,
    shards: [Cell; SHARDS],
    /// Credit that was on its way into a shard when its lease closed; the ledger counts it as unspent later.
    stray: AtomicI64,
}

impl Default for LaunchGate {
    fn default() -> Self {
        Self::new()
    }
}

impl LaunchGate {
    /// A closed gate: no credit.
    pub fn new() -> Self {
        Self {
            pool: Cell(AtomicU64::new(0)),
            shards: core::array::from_fn(|_| Cell(AtomicU64::new(0))),
            stray: AtomicI64::new(0),
        }
    }

    /// Lets a launch of predicted cost `cost` through, or not. `shard` is any number that stays the same for a thread.
    ///
    /// `false` means: no credit. The caller waits for its helper thread to put some in; nothing was charged.
    #[inline]
    pub fn try_spend(&self, shard: usize, cost: Duration) -> bool {
        let cost = clamp_credit(cost);
        let cell = &self.shards[shard % SHARDS].0;
        let word = cell.load(Ordering::Relaxed);
        let credit = credit_of(word);
        if credit >= cost
            && credit > 0
            && cell
                .compare_exchange(
                    word,
                    pack(tag_of(word), credit - cost),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                )
                .is_ok()
        {
            return true;
        }
        self.spend_slow(shard % SHARDS, cost)
    }

    /// Fills the shard from the pool or, when that is empty, from other shards; spends, on debt if need be.
    #[cold]
    fn spend_slow(&self, shard: usize, cost: i64) -> bool {
        let cell = &self.shards[shard].0;
        loop {
            let word = cell.load(Ordering::Acquire);
            let (tag, credit) = (tag_of(word), credit_of(word));
            // Enough, or nothing to be had elsewhere while the balance is positive: go, on debt if need be.
            let lacking = cost - credit;
            let found =
                if credit > 0 && lacking <= 0 { 0 } else { self.take(tag, shard, lacking.max(0) + CHUNK) };
            if credit + found <= 0 {
                if found == 0 {
                    if tag_of(self.pool.0.load(Ordering::Acquire)) == tag {
                        return false;
                    }
                    // The shard is a lease behind (its sweep has not come by yet): try again with the new word.
                    if cell.load(Ordering::Acquire) == word {
                        return false;
                    }
                    continue;
                }
                // Found less than the debt: keep what was found and look again.
                self.give(tag, shard, found);
                continue;
            }
            let spent = pack(tag, credit + found - cost);
            if cell.compare_exchange(word, spent, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return true;
            }
            if found != 0 {
                self.give(tag, shard, found);
            }
        }
    }

    /// Takes up to `want` from the pool, else all of some other shard's, under this tag.
    fn take(&self, tag: u64, own: usize, want: i64) -> i64 {
        let sources = core::iter::once((&self.pool.0, want))
            .chain((0..SHARDS).filter(|&other| other != own).map(|other| (&self.shards[other].0, i64::MAX)));
        for (cell, want) in sources {
            let mut word = cell.load(Ordering::Acquire);
            while tag_of(word) == tag && credit_of(word) > 0 {
                let taken = credit_of(word).min(want);
                let left = pack(tag, credit_of(word) - taken);
                match cell.compare_exchange(word, left, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return taken,
                    Err(now) => word = now,
                }
            }
        }
        0
    }

    /// Adds credit to a shard, or counts it as stray when the shard's lease has closed meanwhile.
    fn give(&self, tag: u64, shard: usize, credit: i64) {
        if !add(&self.shards[shard].0, tag, credit) {
            self.stray.fetch_add(credit, Ordering::AcqRel);
        }
    }

    /// Credit left in the open lease; negative is debt. Exact only while no thread launches.
    pub fn left_ns(&self) -> i64 {
        let tag = tag_of(self.pool.0.load(Ordering::Acquire));
        core::iter::once(&self.pool)
            .chain(&self.shards)
            .map(|cell| cell.0.load(Ordering::Acquire))
            .filter(|&word| tag_of(word) == tag)
            .map(credit_of)
            .sum()
    }

    /// Takes all credit back under a new tag and gives what was left. Only the ledger's thread calls this.
    fn drain(&self) -> i64 {
        let tag = (tag_of(self.pool.0.load(Ordering::Relaxed)) + 1) & (u64::MAX >> CREDIT_BITS);
        core::iter::once(&self.pool)
            .chain(&self.shards)
            .map(|cell| credit_of(cell.0.swap(pack(tag, 0), Ordering::AcqRel)))
            .sum()
    }

    /// Moves the debts of the shards to the pool: a nanosecond in the pool then lets a launch of any thread
    /// through. Only the ledger's thread calls this.
    fn gather_debts(&self) {
        let tag = tag_of(self.pool.0.load(Ordering::Relaxed));
        for cell in &self.shards {
            let word = cell.0.load(Ordering::Acquire);
            let debt = credit_of(word).min(0);
            if tag_of(word) == tag && debt < 0 {
                // First there, so that there is never more credit than there should be.
                self.put(debt);
                if cell.0.compare_exchange(word, pack(tag, 0), Ordering::AcqRel, Ordering::Relaxed).is_err() {
                    self.put(-debt);
                }
            }
        }
    }

    /// Puts credit into the pool (takes it out when negative). Only the ledger's thread calls this.
    fn put(&self, credit: i64) {
        let tag = tag_of(self.pool.0.load(Ordering::Relaxed));
        let added = add(&self.pool.0, tag, credit);
        debug_assert!(added, "only the ledger changes the pool's tag");
    }
}

/// Adds `credit` to a word that still has `tag`.
fn add(cell: &AtomicU64, tag: u64, credit: i64) -> bool {
    let mut word = cell.load(Ordering::Acquire);
    while tag_of(word) == tag {
        match cell.compare_exchange(
            word,
            pack(tag, credit_of(word) + credit),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => return true,
            Err(now) => word = now,
        }
    }
    false
}

/// A lease as it was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settlement {
    /// Which lease.
    pub lease: LeaseId,
    /// GPU time used under it in all; more than its budget when it was overused.
    pub used: Duration,
}

/// The cold side: what one helper thread knows of the lease that is open in a [`LaunchGate`].
#[derive(Debug)]
pub struct LeaseLedger {
    lease: Option<LeaseId>,
    budget: i64,
    /// Credit put into the gate under this lease.
    released: i64,
    /// Measured minus predicted cost of what completed, and what earlier leases left over.
    correction: i64,
    /// Largest `used` reported under this lease.
    reported: i64,
    /// Predicted cost of what completed under this lease.
    completed: i64,
    /// Predicted cost of what earlier leases launched and has not completed.
    inherited: i64,
    in_flight_bound: i64,
}

impl LeaseLedger {
    /// No lease yet. At most `in_flight_bound` of GPU time may be launched ahead of its completion.
    pub fn new(in_flight_bound: Duration) -> Self {
        Self {
            lease: None,
            budget: 0,
            released: 0,
            correction: 0,
            reported: 0,
            completed: 0,
            inherited: 0,
            in_flight_bound: clamp_credit(in_flight_bound).max(1),
        }
    }

    /// Changes the in-flight bound, from the next credit on.
    pub fn set_in_flight_bound(&mut self, bound: Duration) {
        self.in_flight_bound = clamp_credit(bound).max(1);
    }

    /// The lease that is open.
    pub fn lease(&self) -> Option<LeaseId> {
        self.lease
    }

    /// Opens a lease, or extends the one that is open (same id, larger budget). The lease it replaces is settled.
    pub fn grant(&mut self, gate: &LaunchGate, lease: LeaseId, budget: Duration) -> Option<Settlement> {
        let budget = clamp_credit(budget);
        if self.lease == Some(lease) {
            self.budget = self.budget.max(budget);
            self.top_up(gate);
            return None;
        }
        let settled = self.close(gate);
        self.lease = Some(lease);
        self.budget = budget;
        self.released = 0;
        self.reported = 0;
        self.top_up(gate);
        settled
    }

    /// Work completed that was charged at `predicted` and took `measured`: corrects the account, lets more in.
    pub fn completed(&mut self, gate: &LaunchGate, predicted: Duration, measured: Duration) {
        let predicted = clamp_credit(predicted);
        self.correction += clamp_credit(measured) - predicted;
        let inherited = predicted.min(self.inherited);
        self.inherited -= inherited;
        self.completed += predicted - inherited;
        self.top_up(gate);
    }

    /// GPU time launched and not yet completed, at its predicted cost.
    pub fn in_flight(&self, gate: &LaunchGate) -> Duration {
        nanos(self.inherited + self.charged(gate) - self.completed)
    }

    /// Time of the budget that has not been launched; 0 without a lease.
    pub fn unspent(&self, gate: &LaunchGate) -> Duration {
        match self.lease {
            Some(_) => nanos(self.budget - self.charged(gate) - self.correction),
            None => Duration::ZERO,
        }
    }

    /// GPU time in flight, once the budget of the open lease is spent. Of one moment: a launch that spends the last of it while
    /// this is worked out is either in neither or in both.
    pub fn in_flight_if_spent(&self, gate: &LaunchGate) -> Option<Duration> {
        let charged = self.charged(gate);
        let spent = self.lease.is_some() && charged + self.correction >= self.budget;
        spent.then(|| nanos(self.inherited + charged - self.completed))
    }

    /// Lets one more launch in, at any cost and with any work in flight, if the open lease has time left; gives whether it has.
    ///
    /// For work in flight that does not complete as it should: it may wait for something that the program has yet to launch.
    pub fn let_one_in(&mut self, gate: &LaunchGate) -> bool {
        gate.gather_debts();
        let left = gate.left_ns();
        let within_budget = self.budget - self.correction - self.released;
        // Up to one nanosecond of credit: any launch passes on that.
        let credit = 1 - left;
        let has_time = self.lease.is_some() && within_budget >= credit;
        if has_time && credit > 0 {
            gate.put(credit);
            self.released += credit;
        }
        has_time
    }

    /// GPU time used so far under the open lease. Never shrinks.
    pub fn used(&mut self, gate: &LaunchGate) -> Duration {
        if self.lease.is_none() {
            return Duration::ZERO;
        }
        self.reported = self.reported.max(self.charged(gate) + self.correction);
        nanos(self.reported)
    }

    /// Takes all credit back and settles the lease. Launches from now on wait.
    pub fn close(&mut self, gate: &LaunchGate) -> Option<Settlement> {
        let lease = self.lease.take()?;
        let charged = self.released - gate.drain() - gate.stray.swap(0, Ordering::AcqRel);
        let balance = charged + self.correction;
        let used = self.reported.max(balance).max(0);
        // Where less was measured than had been reported, the difference counts for the next lease.
        self.correction = balance - used;
        self.inherited += charged - self.completed;
        (self.budget, self.released, self.completed) = (0, 0, 0);
        Some(Settlement { lease, used: nanos(used) })
    }

    /// The settlement of the lease that was closed last with what has been measured since. What is not asked for before the next
    /// lease is opened counts for that.
    pub fn revise(&mut self, settlement: Settlement) -> Settlement {
        if self.lease.is_some() {
            return settlement;
        }
        let balance = clamp_credit(settlement.used) + self.correction;
        let used = self.reported.max(balance).max(0);
        self.correction = balance - used;
        Settlement { used: nanos(used), ..settlement }
    }

    /// Predicted cost of all launches under this lease.
    fn charged(&self, gate: &LaunchGate) -> i64 {
        if self.lease.is_some() { self.released - gate.left_ns() } else { 0 }
    }

    /// Lets credit in, up to the budget and the in-flight bound.
    fn top_up(&mut self, gate: &LaunchGate) {
        if self.lease.is_none() {
            return;
        }
        let left = gate.left_ns();
        let in_flight = self.inherited + (self.released - left) - self.completed;
        let within_budget = self.budget - self.correction - self.released;
        let within_bound = self.in_flight_bound - in_flight - left;
        // A correction may have eaten what is in the gate already: then credit is taken out.
        let credit = if within_budget < 0 { within_budget } else { within_budget.min(within_bound.max(0)) };
        if credit != 0 {
            gate.put(credit);
            self.released += credit;
        }
    }
}

#[expect(clippy::cast_sign_loss, reason = "clamped at zero")]
fn nanos(ns: i64) -> Duration {
    Duration::from_nanos(ns.max(0) as u64)
}

/// Memory that a process may allocate on one GPU without asking again.
///
/// Reserve before the driver call; when the call fails, [`release`](Self::release) takes it back. `free` never goes
/// below zero, so two threads cannot both pass with the last bytes.
#[derive(Debug)]
pub struct MemoryGate {
    free: AtomicU64,
    used: AtomicU64,
}

/// There is not enough reserved memory: ask the daemon for at least `bytes` more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} more needed")]
pub struct Shortage {
    /// How much is missing.
    pub bytes: Bytes,
}

impl MemoryGate {
    /// A gate with `free` bytes to begin with.
    pub fn new(free: Bytes) -> Self {
        Self { free: AtomicU64::new(free.0), used: AtomicU64::new(0) }
    }

    /// Takes `bytes`, all or nothing.
    pub fn reserve(&self, bytes: Bytes) -> Result<(), Shortage> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let Some(rest) = free.checked_sub(bytes.0) else {
                return Err(Shortage { bytes: Bytes(bytes.0 - free) });
            };
            match self.free.compare_exchange(free, rest, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => free = now,
            }
        }
        self.used.fetch_add(bytes.0, Ordering::AcqRel);
        Ok(())
    }

    /// Gives `bytes` back that were reserved.
    pub fn release(&self, bytes: Bytes) {
        let before = self.used.fetch_sub(bytes.0, Ordering::AcqRel);
        debug_assert!(before >= bytes.0, "released more than was reserved");
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Adds what the daemon granted.
    pub fn grant(&self, bytes: Bytes) {
        self.free.fetch_add(bytes.0, Ordering::AcqRel);
    }

    /// Takes out what is free beyond `keep`, to be given back to the daemon.
    pub fn surplus(&self, keep: Bytes) -> Bytes {
        let mut free = self.free.load(Ordering::Relaxed);
        while free > keep.0 {
            match self.free.compare_exchange(free, keep.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Bytes(free - keep.0),
                Err(now) => free = now,
            }
        }
        Bytes::ZERO
    }

    /// Bytes reserved.
    pub fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Acquire))
    }

    /// Bytes that may still be reserved without asking.
    pub fn free(&self) -> Bytes {
        Bytes(self.free.load(Ordering::Acquire))
    }
}

/// A client's share kept by its own clock while the daemon is away ([`crate::wire::OnDaemonLoss::Open`]).
///
/// At the start of each window the client may use its quota limit, less what it overused before. Pure, like all of
/// this crate: the helper thread tells it the time.
#[derive(Debug, Clone, Copy)]
pub struct LocalShare {
    limit: Duration,
    window: Duration,
    window_end: crate::units::Timestamp,
    used: Duration,
}

impl LocalShare {
    /// A share of `limit` in each `window`, from `now` on.
    pub fn new(now: crate::units::Timestamp, limit: crate::units::Quota, window: Duration) -> Self {
        let window = if window.is_zero() { Duration::from_millis(100) } else { window };
        Self { limit: limit.of(window), window, window_end: now.saturating_add(window), used: Duration::ZERO }
    }

    /// Counts GPU time used.
    pub fn charge(&mut self, used: Duration) {
        self.used = self.used.saturating_add(used);
    }

    /// The GPU time that may be used now (0 is an answer), and the time at which that changes.
    pub fn budget(&mut self, now: crate::units::Timestamp) -> (Duration, crate::units::Timestamp) {
        if now >= self.window_end {
            let windows = now.saturating_since(self.window_end).as_nanos() / self.window.as_nanos() + 1;
            self.used = self.used.saturating_sub(self.limit.saturating_mul(windows));
            self.window_end = self.window_end.saturating_add(self.window.saturating_mul(windows));
        }
        (self.limit.saturating_sub(self.used), self.window_end)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::units::{Quota, Timestamp};
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_launch_passes_on_any_credit_and_the_overrun_is_debt() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        assert!(!gate.try_spend(0, MS), "closed at first");
        ledger.grant(&gate, LeaseId::new(1), MS);
        assert!(gate.try_spend(0, ms(30)), "a kernel larger than the lease is not starved");
        assert!(!gate.try_spend(0, MS));
        assert_eq!(ledger.close(&gate), Some(Settlement { lease: LeaseId::new(1), used: ms(30) }));
    }

    #[test]
    fn in_flight_time_is_bounded_and_completion_lets_more_in() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(2)));
        ledger.grant(&gate, LeaseId::new(1), ms(10));
        let mut launched = 0;
        while gate.try_spend(0, MS) {
            launched += 1;
        }
        assert_eq!(launched, 2);
        assert_eq!(ledger.in_flight(&gate), ms(2));
        ledger.completed(&gate, MS, MS);
        assert!(gate.try_spend(0, MS));
        assert!(!gate.try_spend(0, MS));
    }

    #[test]
    fn one_launch_is_let_in_beyond_the_bound_while_the_lease_has_time() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(2)));
        assert!(!ledger.let_one_in(&gate), "no lease");
        ledger.grant(&gate, LeaseId::new(1), ms(40));
        assert!(gate.try_spend(0, ms(30)));
        assert!(!gate.try_spend(1, MS), "the bound");
        assert!(ledger.let_one_in(&gate));
        assert!(ledger.let_one_in(&gate), "but no more than one");
        assert!(gate.try_spend(1, MS));
        assert!(!gate.try_spend(1, MS) && !gate.try_spend(0, MS) && !gate.try_spend(2, MS));
        assert_eq!(ledger.unspent(&gate), ms(9));
        assert!(ledger.let_one_in(&gate) && gate.try_spend(0, ms(9)));
        assert!(!ledger.let_one_in(&gate), "the lease is spent");
        ledger.completed(&gate, ms(40), ms(40));
        assert_eq!((ledger.in_flight(&gate), ledger.close(&gate).unwrap().used), (Duration::ZERO, ms(40)));
    }

    #[test]
    fn measuring_corrects_the_account_and_shrinks_what_is_left() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        ledger.grant(&gate, LeaseId::new(1), ms(10));
        for _ in 0..4 {
            assert!(gate.try_spend(0, MS));
        }
        // Each took two, not one: four left of ten, of which two are spent already by prediction's error.
        ledger.completed(&gate, ms(4), ms(8));
        assert_eq!(ledger.used(&gate), ms(8));
        assert_eq!(ledger.unspent(&gate), ms(2));
        let more = (0..100).take_while(|_| gate.try_spend(0, MS)).count();
        assert_eq!(more, 2);
        assert_eq!(ledger.close(&gate).unwrap().used, ms(10));
    }

    #[test]
    fn work_in_flight_at_the_end_is_charged_there_and_its_correction_later() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        ledger.grant(&gate, LeaseId::new(1), ms(2));
        assert!(gate.try_spend(0, ms(2)));
        assert_eq!(
            ledger.grant(&gate, LeaseId::new(2), ms(2)),
            Some(Settlement { lease: LeaseId::new(1), used: ms(2) })
        );
        assert_eq!(ledger.in_flight(&gate), ms(2), "still on the GPU");
        ledger.completed(&gate, ms(2), ms(3));
        assert_eq!(ledger.used(&gate), MS, "the millisecond that was not charged before");
        assert_eq!(ledger.close(&gate).unwrap().used, MS);
    }

    #[test]
    fn what_is_measured_before_a_closed_lease_is_returned_counts_for_it() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        ledger.grant(&gate, LeaseId::new(1), ms(10));
        assert!(gate.try_spend(0, MS));
        assert!(gate.try_spend(0, ms(4)));
        assert_eq!(ledger.used(&gate), ms(5));
        let closed = ledger.close(&gate).unwrap();
        ledger.completed(&gate, MS, ms(30));
        let revised = ledger.revise(closed);
        assert_eq!(revised, Settlement { lease: LeaseId::new(1), used: ms(34) });
        assert_eq!(ledger.revise(revised), revised, "once");
        ledger.completed(&gate, ms(4), Duration::ZERO);
        assert_eq!(ledger.revise(closed).used, ms(5), "reported already");
        ledger.grant(&gate, LeaseId::new(2), ms(10));
        assert_eq!(ledger.revise(closed), closed, "too late");
    }

    #[test]
    fn usage_reported_never_shrinks_and_the_difference_is_not_lost() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        ledger.grant(&gate, LeaseId::new(1), ms(10));
        assert!(gate.try_spend(0, ms(4)));
        assert_eq!(ledger.used(&gate), ms(4));
        ledger.completed(&gate, ms(4), ms(1));
        assert_eq!(ledger.used(&gate), ms(4), "reported already");
        assert_eq!(ledger.close(&gate).unwrap().used, ms(4));
        ledger.grant(&gate, LeaseId::new(2), ms(10));
        assert!(gate.try_spend(0, ms(5)));
        assert_eq!(ledger.used(&gate), ms(2), "three of the five were paid for before");
    }

    #[test]
    fn a_thread_uses_credit_that_lies_in_other_shards() {
        let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(ms(100)));
        ledger.grant(&gate, LeaseId::new(1), Duration::from_micros(60));
        assert!(gate.try_spend(0, Duration::from_micros(1)), "takes a chunk into shard 0");
        assert!(gate.try_spend(1, Duration::from_micros(59)), "the rest is found in pool and shard 0");
        assert_eq!(ledger.close(&gate).unwrap().used, Duration::from_micros(60));
    }

    #[test]
    fn nothing_is_lost_or_made_while_threads_launch_and_leases_close() {
        use std::sync::atomic::AtomicU64 as Counter;
        let gate = LaunchGate::new();
        let (spent, stop) = (Counter::new(0), std::sync::atomic::AtomicBool::new(false));
        let mut used = 0i64;
        std::thread::scope(|scope| {
            let threads = [0, 1, 2, 3].map(|thread| {
                let (gate, spent, stop) = (&gate, &spent, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        if gate.try_spend(thread, Duration::from_nanos(700)) {
                            spent.fetch_add(700, Ordering::Relaxed);
                        }
                    }
                })
            });
            let mut ledger = LeaseLedger::new(ms(100));
            for lease in 1..2_000 {
                if let Some(settled) = ledger.grant(&gate, LeaseId::new(lease), Duration::from_micros(200)) {
                    used += i64::try_from(settled.used.as_nanos()).unwrap();
                }
            }
            stop.store(true, Ordering::Relaxed);
            for thread in threads {
                thread.join().unwrap();
            }
            used += ledger.close(&gate).map_or(0, |settled| i64::try_from(settled.used.as_nanos()).unwrap());
            used += ledger.correction - gate.stray.load(Ordering::Relaxed);
        });
        assert_eq!(used, i64::try_from(spent.load(Ordering::Relaxed)).unwrap());
    }

    #[test]
    fn memory_is_all_or_nothing_and_comes_back() {
        let gate = MemoryGate::new(Bytes(100));
        assert_eq!(gate.reserve(Bytes(60)), Ok(()));
        assert_eq!(gate.reserve(Bytes(60)), Err(Shortage { bytes: Bytes(20) }));
        gate.grant(Bytes(20));
        assert_eq!(gate.reserve(Bytes(60)), Ok(()));
        gate.release(Bytes(60));
        assert_eq!((gate.used(), gate.free()), (Bytes(60), Bytes(60)));
        assert_eq!(gate.surplus(Bytes(10)), Bytes(50));
        assert_eq!(gate.surplus(Bytes(10)), Bytes(0));
    }

    #[test]
    fn a_local_share_keeps_the_limit_over_windows() {
        let mut share = LocalShare::new(Timestamp::ZERO, Quota::from_percent(10).unwrap(), ms(100));
        assert_eq!(share.budget(Timestamp::ZERO), (ms(10), Timestamp::from_millis(100)));
        share.charge(ms(35));
        assert_eq!(share.budget(Timestamp::from_millis(100)), (ms(0), Timestamp::from_millis(200)));
        assert_eq!(share.budget(Timestamp::from_millis(450)), (ms(10), Timestamp::from_millis(500)));
    }

    proptest! {
        /// The ledger against plain arithmetic: launches, completions and leases in any order.
        #[test]
        fn the_ledger_agrees_with_plain_arithmetic(
            threads in 1usize..4,
            steps in prop::collection::vec((0u8..5, 1u64..3_000_000), 1..200),
        ) {
            let bound = 2_000_000;
            let (gate, mut ledger) = (LaunchGate::new(), LeaseLedger::new(Duration::from_nanos(bound)));
            let (mut queue, mut id) = (std::collections::VecDeque::new(), 0);
            let (mut charged, mut measured_minus_predicted, mut settled) = (0i64, 0i64, 0i64);
            let mut closed = None;
            for (what, size) in steps {
                match what {
                    0 => {
                        id += 1;
                        closed = None;
                        if let Some(done) = ledger.grant(&gate, LeaseId::new(id), Duration::from_nanos(size)) {
                            settled += done.used.as_nanos() as i64;
                        }
                    }
                    1 => {
                        let before = ledger.in_flight(&gate).as_nanos();
                        if gate.try_spend(size as usize % threads, Duration::from_nanos(size)) {
                            prop_assert!(before < bound || threads > 1, "in flight {before}");
                            queue.push_back(size);
                            charged += size as i64;
                        }
                    }
                    2 => {
                        if let Some(predicted) = queue.pop_front() {
                            let measured = size;
                            measured_minus_predicted += measured as i64 - predicted as i64;
                            ledger.completed(&gate, Duration::from_nanos(predicted), Duration::from_nanos(measured));
                        }
                    }
                    3 => {
                        if let Some(done) = ledger.close(&gate) {
                            settled += done.used.as_nanos() as i64;
                            closed = Some(done);
                        }
                    }
                    _ => {
                        if let Some(done) = closed {
                            let revised = ledger.revise(done);
                            settled += revised.used.as_nanos() as i64 - done.used.as_nanos() as i64;
                            closed = Some(revised);
                        }
                    }
                }
                prop_assert_eq!(ledger.in_flight(&gate).as_nanos(), queue.iter().sum::<u64>());
            }
            if let Some(done) = ledger.close(&gate) {
                settled += done.used.as_nanos() as i64;
            }
            prop_assert_eq!(settled + ledger.correction, charged + measured_minus_predicted);
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// Two threads spend while the owner closes one lease and opens the next: every nanosecond is accounted for.
    #[test]
    fn closing_while_launching_loses_nothing() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let gate = Arc::new(LaunchGate::new());
            let mut ledger = LeaseLedger::new(Duration::from_millis(100));
            ledger.grant(&gate, LeaseId::new(1), Duration::from_nanos(60_000));
            let threads: Vec<_> = (0..2)
                .map(|shard| {
                    let gate = Arc::clone(&gate);
                    loom::thread::spawn(move || {
                        u64::from(gate.try_spend(shard, Duration::from_nanos(40_000))) * 40_000
                    })
                })
                .collect();
            let first = ledger.grant(&gate, LeaseId::new(2), Duration::from_nanos(30_000)).unwrap().used;
            let spent: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            let second = ledger.close(&gate).unwrap().used;
            // Credit that strayed and was not settled yet makes the next lease cheaper: `correction`.
            let settled = i64::try_from((first + second).as_nanos()).unwrap() + ledger.correction;
            assert_eq!(settled, i64::try_from(spent).unwrap() + gate.stray.load(Ordering::Acquire));
        });
    }

    /// Two threads spend while the owner lets one launch in for which there is no credit.
    #[test]
    fn what_shards_owe_is_gathered_without_loss_while_they_launch() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let gate = Arc::new(LaunchGate::new());
            let mut ledger = LeaseLedger::new(Duration::from_nanos(10_000));
            ledger.grant(&gate, LeaseId::new(1), Duration::from_nanos(200_000));
            assert!(gate.try_spend(0, Duration::from_nanos(40_000)));
            let threads: Vec<_> = (0..2)
                .map(|shard| {
                    let gate = Arc::clone(&gate);
                    loom::thread::spawn(move || {
                        u64::from(gate.try_spend(shard, Duration::from_nanos(30_000))) * 30_000
                    })
                })
                .collect();
            assert!(ledger.let_one_in(&gate));
            let spent: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert!(spent <= 30_000, "one launch, not {spent} ns");
            assert_eq!(ledger.close(&gate).unwrap().used, Duration::from_nanos(40_000 + spent));
        });
    }

    /// The thread that decides on the lease asks while another spends the last of its budget.
    #[test]
    fn what_is_found_spent_is_found_in_flight() {
        loom::model(|| {
            let gate = Arc::new(LaunchGate::new());
            let mut ledger = LeaseLedger::new(Duration::from_millis(100));
            ledger.grant(&gate, LeaseId::new(1), Duration::from_nanos(10_000));
            let launches = {
                let gate = Arc::clone(&gate);
                loom::thread::spawn(move || assert!(gate.try_spend(0, Duration::from_nanos(30_000))))
            };
            // Without it the launches always come last.
            loom::thread::yield_now();
            let found = ledger.in_flight_if_spent(&gate);
            assert!(found.is_none_or(|in_flight| in_flight >= Duration::from_nanos(10_000)), "{found:?}");
            launches.join().unwrap();
            assert_eq!(ledger.in_flight_if_spent(&gate), Some(Duration::from_nanos(30_000)));
        });
    }
}
