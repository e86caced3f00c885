//! Pools that serve blocks: stream-ordered allocations of a process that can be parked.
//!
//! # Problem
//! The memory of a driver's pool cannot be unmapped, so large allocations from pools are [blocks](crate::device::blocks). Creating and
//! mapping memory takes far longer than an allocation from a pool, so a freed block must serve again. Another stream must not get it
//! before the device has passed the free.
//!
//! # Algorithm
//! A block that the program frees in the order of a stream becomes **spare**: it keeps its memory, and a [`Mark`] is its place in the
//! stream. An allocation takes the smallest spare block that is at most an eighth too large: at once on the stream of the free, and
//! on others once the device has passed the event of the mark. Without such a block it makes a new one.
//!
//! Spare blocks end where the driver's pools shrink: after a synchronising call beyond the pool's release threshold, when the pool is
//! trimmed or destroyed, and before an allocation fails for want of memory. A process that parks ends them all, for nothing in them is worth
//! a copy. A block of `cuMemAlloc` that is freed in the order of a stream becomes spare for no pool.
//!
//! A pool whose memory other processes may use, a pool with a bound of its own, and a pool of host memory stay with the driver, as do the small
//! allocations of all pools.
//!
//! # Invariants
//! The lock of the spare blocks is taken before the lock of all blocks. A spare block is charged like a block in use.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use gshare_cuda_abi::types::{CUdeviceptr, CUresult, sys};

use crate::device::blocks::{Block, Blocks, GRANULE, Place};
use crate::device::context::{current_handle, relaxed};
use crate::sys::driver::{beneath, real};
use crate::sys::lock::Lock;

/// Attributes of a pool: `CU_MEMPOOL_ATTR_` `RELEASE_THRESHOLD`, `RESERVED_MEM_CURRENT` and `_HIGH`, `USED_MEM_CURRENT` and `_HIGH`.
const THRESHOLD: c_uint = 4;
pub(crate) const RESERVED: c_uint = 5;
const MOST_RESERVED: c_uint = 6;
pub(crate) const USED: c_uint = 7;
const MOST_USED: c_uint = 8;
/// `CU_EVENT_DISABLE_TIMING`.
const UNTIMED: c_uint = 2;

/// An attribute of a live pool, of 64 bits at most.
pub(crate) fn attribute(pool: usize, attribute: c_uint) -> Option<u64> {
    let (mut value, pool) = (0u64, core::ptr::with_exposed_provenance_mut(pool));
    // SAFETY: a live pool, and room for the longest attribute.
    let result = unsafe { real!(cuMemPoolGetAttribute)?(pool, attribute, (&raw mut value).cast::<c_void>()) };
    result.is_ok().then_some(value)
}

/// A pool that serves blocks, and the figures of these blocks.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    handle: usize,
    /// Bytes of blocks in use, as asked for, and bytes of all blocks.
    used: AtomicU64,
    reserved: AtomicU64,
    /// The most bytes of the pool so far, with the driver's part.
    most_used: AtomicU64,
    most_reserved: AtomicU64,
}

impl Pool {
    /// A figure of the whole pool, from the driver's part.
    fn whole(&self, attribute: c_uint, part: u64) -> u64 {
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        match attribute {
            RESERVED => part.saturating_add(read(&self.reserved)),
            USED => part.saturating_add(read(&self.used)),
            MOST_RESERVED => part.max(read(&self.most_reserved)),
            _ => part.max(read(&self.most_used)),
        }
    }

    /// Corrects the driver's answer for an attribute.
    pub(crate) fn tells(&self, attribute: c_uint, value: *mut c_void) {
        if (RESERVED..=MOST_USED).contains(&attribute) {
            // SAFETY: the driver has just written the 64 bits of these attributes.
            unsafe {
                let part = value.cast::<u64>().read_unaligned();
                value.cast::<u64>().write_unaligned(self.whole(attribute, part));
            }
        }
    }

    /// Notes the pool's bytes after an allocation.
    pub(crate) fn note(&self) {
        for (current, most) in [(RESERVED, &self.most_reserved), (USED, &self.most_used)] {
            let part = attribute(self.handle, current).unwrap_or(0);
            most.fetch_max(self.whole(current, part), Ordering::Relaxed);
        }
    }

    /// Has a highest figure begin again with the current one.
    pub(crate) fn forget_most(&self, attribute: c_uint) {
        match attribute {
            MOST_RESERVED => self.most_reserved.store(0, Ordering::Relaxed),
            MOST_USED => self.most_used.store(0, Ordering::Relaxed),
            _ => return,
        }
        self.note();
    }

    /// Bytes that the pool keeps at a synchronising call, beside the driver's part.
    pub(crate) fn kept(&self) -> u64 {
        self.besides(attribute(self.handle, THRESHOLD).unwrap_or(0))
    }

    /// Bytes that a pool keeps when the one of this handle is trimmed to `keep`, beside the driver's part.
    pub(crate) fn keeps_of(&self, handle: usize, keep: u64) -> u64 {
        if self.handle == handle { self.besides(keep) } else { u64::MAX }
    }

    fn besides(&self, keep: u64) -> u64 {
        keep.saturating_sub(attribute(self.handle, RESERVED).unwrap_or(0))
    }
}

impl Block {
    /// Counts the block as in use, or not any more.
    fn uses(&self, on: bool) {
        let Some(pool) = &self.pool else { return };
        let count = if on { AtomicU64::fetch_add } else { AtomicU64::fetch_sub };
        count(&pool.used, self.bytes, Ordering::Relaxed);
    }

    /// Counts a new block of a pool.
    pub(super) fn joins(&self) {
        if let Some(pool) = &self.pool {
            pool.reserved.fetch_add(self.span, Ordering::Relaxed);
            self.uses(true);
        }
    }

    /// Counts the end of a block in use.
    pub(super) fn leaves(&self) {
        if let Some(pool) = &self.pool {
            pool.reserved.fetch_sub(self.span, Ordering::Relaxed);
            self.uses(false);
        }
    }
}

/// The place of a free among the work of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) stream: usize,
    /// The context of the event; 0 once it is destroyed.
    pub(crate) context: usize,
    /// The thread with this stream, where each thread has one.
    pub(crate) thread: i32,
    /// The count of destroyed streams at the free.
    pub(crate) since: u64,
    /// Recorded at the free; 0 when its context is destroyed.
    event: usize,
}

impl Mark {
    fn event(&self) -> sys::CUevent {
        core::ptr::with_exposed_provenance_mut(self.event)
    }

    /// Whether the device has passed the free. After an error it runs nothing more.
    pub(crate) fn is_passed(&self) -> bool {
        if self.event == 0 {
            return self.context == 0;
        }
        // SAFETY: the event is alive, because it is forgotten before its context is destroyed.
        let asked = relaxed(|| real!(cuEventQuery).map(|query| unsafe { query(self.event()) }));
        asked != Some(CUresult::CUDA_ERROR_NOT_READY)
    }

    /// Waits until the device has passed the free.
    pub(crate) fn is_awaited(&self) -> bool {
        if self.event != 0 {
            // SAFETY: as above.
            relaxed(|| beneath!(cuEventSynchronize).map(|wait| unsafe { wait(self.event()) }));
        }
        self.is_passed()
    }
}

#[derive(Debug)]
struct Spare {
    address: CUdeviceptr,
    block: Block,
    mark: Mark,
}

/// The pools that serve blocks, and their spare blocks, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    served: Lock<Vec<Arc<Pool>>>,
    spare: Lock<Vec<Spare>>,
    /// Events without a mark, and their contexts.
    events: Lock<Vec<(usize, usize)>>,
    /// The contexts in which the program made blocks.
    contexts: Lock<Vec<usize>>,
}

impl Pools {
    /// The pool of this handle, if it serves blocks.
    pub(crate) fn get(&self, handle: usize) -> Option<Arc<Pool>> {
        self.served.lock().iter().find(|pool| pool.handle == handle).map(Arc::clone)
    }

    /// Has a pool serve blocks from now on.
    pub(crate) fn serve(&self, handle: usize) -> Arc<Pool> {
        let mut served = self.served.lock();
        if let Some(pool) = served.iter().find(|pool| pool.handle == handle) {
            return Arc::clone(pool);
        }
        let pool = Arc::new(Pool { handle, ..Pool::default() });
        served.push(Arc::clone(&pool));
        pool
    }

    /// Forgets a pool before its destruction. No allocation takes its spare blocks any more, and its blocks in use end when they are freed.
    pub(crate) fn leave(&self, handle: usize) -> Option<Arc<Pool>> {
        let mut served = self.served.lock();
        let at = served.iter().position(|pool| pool.handle == handle)?;
        Some(served.swap_remove(at))
    }

    /// Brings a pool back whose destruction failed.
    pub(crate) fn stays(&self, pool: Arc<Pool>) {
        self.served.lock().push(pool);
    }

    /// Notes that the program makes a block in a context, of which the memory is independent.
    pub(crate) fn made_in(&self, context: usize) {
        let mut contexts = self.contexts.lock();
        if context != 0 && !contexts.contains(&context) {
            contexts.push(context);
        }
    }

    /// The contexts in which the program made blocks.
    pub(crate) fn contexts(&self) -> Vec<usize> {
        self.contexts.lock().clone()
    }

    /// Whether there are spare blocks.
    pub(crate) fn any_spare(&self) -> bool {
        !self.spare.lock().is_empty()
    }

    /// Marks the present place in a stream of the current context.
    pub(crate) fn mark(&self, stream: usize, thread: i32, since: u64) -> Result<Mark, CUresult> {
        let context = current_handle().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        let event = self.event_of(context)?;
        let mark = Mark { stream, context, thread, since, event };
        let record = real!(cuEventRecord).ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        // SAFETY: a live event of the current context, and the program's own stream.
        let result =
            relaxed(|| unsafe { record(mark.event(), core::ptr::with_exposed_provenance_mut(stream)) });
        if result.is_ok() {
            return Ok(mark);
        }
        self.give_back(&mark);
        Err(result)
    }

    fn event_of(&self, context: usize) -> Result<usize, CUresult> {
        let mut events = self.events.lock();
        if let Some(at) = events.iter().rposition(|(_, of)| *of == context) {
            return Ok(events.swap_remove(at).0);
        }
        drop(events);
        let mut event: sys::CUevent = core::ptr::null_mut();
        let create = real!(cuEventCreate).ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        // SAFETY: a valid out-pointer; the context is current.
        let result = relaxed(|| unsafe { create(&raw mut event, UNTIMED) });
        if result.is_ok() { Ok(event.expose_provenance()) } else { Err(result) }
    }

    fn give_back(&self, mark: &Mark) {
        if mark.event != 0 {
            self.events.lock().push((mark.event, mark.context));
        }
    }

    /// Forgets the events of a context that is about to be destroyed. Until it is, no place in its streams counts as passed.
    pub(crate) fn destroying(&self, context: usize) {
        let mut spare = self.spare.lock();
        spare.iter_mut().filter(|one| one.mark.context == context).for_each(|one| one.mark.event = 0);
        self.events.lock().retain(|(_, of)| *of != context);
        self.contexts.lock().retain(|of| *of != context);
    }

    /// Notes that a context is destroyed, and its work over.
    pub(crate) fn destroyed(&self, context: usize) {
        let mut spare = self.spare.lock();
        let its = |one: &&mut Spare| one.mark.context == context && one.mark.event == 0;
        spare.iter_mut().filter(its).for_each(|one| one.mark.context = 0);
    }
}

impl Blocks {
    /// Makes the block that begins at an address spare. `false`: there is no such block.
    pub(crate) fn lay_aside(&self, address: CUdeviceptr, mark: Mark) -> bool {
        let mut spare = self.pools.spare.lock();
        let Some(block) = self.all.lock().remove(&address) else {
            self.pools.give_back(&mark);
            return false;
        };
        block.uses(false);
        spare.push(Spare { address, block, mark });
        true
    }

    /// Takes a spare block of a pool into use, where `follows` tells of a mark that the caller's stream is behind it in any case.
    pub(crate) fn take_spare(
        &self,
        pool: &Arc<Pool>,
        bytes: u64,
        follows: impl Fn(&Mark) -> bool,
    ) -> Option<CUdeviceptr> {
        let span = bytes.checked_next_multiple_of(GRANULE)?;
        let mut spare = self.pools.spare.lock();
        let fits = |block: &Block| {
            let its = block.pool.as_ref().is_some_and(|of| Arc::ptr_eq(of, pool));
            let ready = matches!(block.place, Place::Device(_)) && !block.shared;
            its && ready && (span..=span + span / 8).contains(&block.span)
        };
        let smallest = |serves: &dyn Fn(&Mark) -> bool| {
            let fitting = spare.iter().enumerate().filter(|(_, one)| fits(&one.block) && serves(&one.mark));
            fitting.min_by_key(|(_, one)| one.block.span).map(|(at, _)| at)
        };
        let at = smallest(&follows).or_else(|| smallest(&Mark::is_passed))?;
        let Spare { address, mut block, mark } = spare.remove(at);
        self.pools.give_back(&mark);
        block.bytes = bytes;
        block.uses(true);
        self.all.lock().insert(address, block);
        Some(address)
    }

    /// Takes out the spare blocks that are to end: those in host memory, and the others whose work `is_over`, down to the bytes that their
    /// pools keep.
    pub(crate) fn take_idle(
        &self,
        keeps: impl Fn(&Pool) -> u64,
        is_over: impl Fn(&Mark) -> bool,
    ) -> Vec<(CUdeviceptr, Block)> {
        // A pool is asked with the lock held under which it leaves before its destruction.
        let served = self.pools.served.lock();
        let kept: Vec<_> = served.iter().map(|pool| (Arc::clone(pool), keeps(pool))).collect();
        drop(served);
        let keeps =
            |pool: &Arc<Pool>| kept.iter().find(|kept| Arc::ptr_eq(&kept.0, pool)).map_or(0, |kept| kept.1);
        let ends = |one: &mut Spare| match &one.block.pool {
            _ if matches!(one.block.place, Place::Host(_)) => true,
            Some(pool) => {
                let least = keeps(pool).saturating_add(one.block.span);
                pool.reserved.load(Ordering::Relaxed) >= least && is_over(&one.mark)
            }
            None => is_over(&one.mark),
        };
        let mut spare = self.pools.spare.lock();
        let gone = spare.extract_if(.., ends).map(|Spare { address, block, mark }| {
            self.pools.give_back(&mark);
            if let Some(pool) = &block.pool {
                pool.reserved.fetch_sub(block.span, Ordering::Relaxed);
            }
            (address, block)
        });
        gone.collect()
    }
}
