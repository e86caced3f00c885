//! Copies between private memory and memory that another process may read and write. `unsafe` is here for what is read and
//! written by address; that it stays within two slices is checked in this file.
//!
//! One side is atomics, so no reference promises that its bytes stay as they are. They are not copied atomically: a copy
//! of bytes that are written meanwhile may have any bytes. The channel's protocol keeps both sides off the same bytes, but
//! for a message that is written again by a successor, whose first copy is thrown away.
//!
//! The C library copies a chunk by one string instruction where the CPU has it. That is fast as long as the lines are
//! this core's; where they have to come from another core it took two to three times as long as a loop over them.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};
use std::time::{Duration, Instant};

/// The largest message that a receiver copies into its cache. What is larger would push out all else that is there.
pub(super) const CACHED: usize = 4 << 20;

/// How far before they are read lines are asked for that are in memory, which is as far as it takes for them to come.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8 << 10;

/// Copies below this many bytes are left to the C library.
#[cfg(target_arch = "x86_64")]
const SMALL: usize = 1 << 10;

/// Bytes that a sender copies each way to see which is faster.
const TRIAL: usize = 4 << 10;

/// Messages from one trial to the next; odd, for slots to take turns.
const BETWEEN_TRIALS: u32 = 15;

/// How many times as fast memory has to be: the receiver reads it more slowly.
const FASTER: u32 = 3;

/// Which way a sender copies messages of up to [`CACHED`] bytes.
///
/// Through its cache is the faster one for both sides if they share a cache. If they do not, each line that is written
/// has to be taken from the receiver's cache first, one by one, which takes ten times as long as to write it past the
/// caches, to memory. Where threads run is up to the system and, below a virtual machine, to its host: so it is
/// tried out.
#[derive(Debug, Default)]
pub(super) struct Route {
    past: bool,
    until_trial: u32,
}

impl Route {
    /// Whether messages go past the cache.
    pub(super) const fn is_past(&self) -> bool {
        self.past
    }

    /// Copies the beginning of a message, both ways if it is time to try them; answers how many bytes it copied. The
    /// first [`TRIAL`] always go through the cache: lines that last went past it would have to be fetched from memory,
    /// and going through the cache would look slow for ever.
    pub(super) fn begin(&mut self, to: &[AtomicU8], from: &[u8]) -> usize {
        let timed = |part: Range<usize>, past| {
            let begun = Instant::now();
            copy(&to[part.clone()], &from[part], past);
            begun.elapsed()
        };
        if from.len() < 2 * TRIAL {
            return 0;
        }
        let cached = timed(0..TRIAL, false);
        if let Some(left) = self.until_trial.checked_sub(1) {
            self.until_trial = left;
            return TRIAL;
        }
        self.tried(cached, timed(TRIAL..2 * TRIAL, true));
        self.until_trial = BETWEEN_TRIALS - 1;
        2 * TRIAL
    }

    /// Chooses the way by the times that both took for as many bytes.
    fn tried(&mut self, cached: Duration, past: Duration) {
        self.past = cached > past * FASTER;
    }
}

/// Copies `from` to the beginning of `to`, as much as there is room for. With `past` without fetching the lines that it
/// writes and past the cache of this core. What was copied is seen by a thread that sees a later `Release` store.
pub(super) fn copy(to: &[AtomicU8], from: &[u8], past: bool) {
    let bytes = to.len().min(from.len());
    let (to, from) = (to.as_ptr().cast::<u8>().cast_mut(), from.as_ptr());
    // SAFETY: both are at least `bytes` long; atomics may be written by a shared reference, and private memory is none of them.
    unsafe {
        if past {
            copy_to::<true, false>(to, from, bytes);
        } else {
            copy_to::<false, false>(to, from, bytes);
        }
    }
}

/// Appends `from`, which is in memory if it is `far`, else in the cache of some core. What would make it longer than
/// [`CACHED`] goes past the cache.
pub(super) fn append(to: &mut Vec<u8>, from: &[AtomicU8], far: bool) {
    to.reserve(from.len());
    let length = to.len() + from.len();
    let past = length > CACHED;
    let room = to.spare_capacity_mut()[..from.len()].as_mut_ptr().cast::<u8>();
    let (from, bytes) = (from.as_ptr().cast::<u8>(), from.len());
    // SAFETY: both are at least `bytes` long, and memory that a vector owns is none of the atomics.
    unsafe {
        match (past, far) {
            (false, false) => copy_to::<false, false>(room, from, bytes),
            (false, true) => copy_to::<false, true>(room, from, bytes),
            (true, _) => copy_to::<true, true>(room, from, bytes),
        }
    }
    // The reader of the copy reads the copy: the compiler may not look at where it came from again.
    compiler_fence(Ordering::SeqCst);
    // SAFETY: `bytes` were reserved, and `copy_to` has written each of them.
    unsafe { to.set_len(length) };
}

/// Copies `bytes`.
///
/// # Safety
/// `bytes` of memory can be read at `from` and written at `to`, and they do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_to<const PAST: bool, const FAR: bool>(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_store_si128, _mm_stream_si128,
    };
    // As many as there are before `to` is aligned; then lines of four vectors; then the rest.
    let head = to.align_offset(align_of::<__m128i>()).min(bytes);
    let count = (bytes - head) / 64;
    if bytes < SMALL {
        // SAFETY: as the caller promises.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        return;
    }
    if PAST {
        // SAFETY: every x86-64 has it. Without it the writes below may come before earlier ones.
        unsafe { _mm_sfence() };
    }
    let tail = head + count * 64;
    // SAFETY: both parts are within `bytes`.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
    }
    // SAFETY: `head` is at most `bytes`.
    let (lines, middle) = unsafe { (to.add(head).cast::<__m128i>(), from.add(head)) };
    // Counted by hand and spelt out: without link-time optimisation an iterator or a closure is called for each line,
    // which takes up to seven times as long.
    let mut line = 0;
    while line < count {
        if FAR {
            let ahead = line * 64 + AHEAD;
            let ahead = if ahead < count * 64 { ahead } else { count * 64 - 1 };
            // SAFETY: every x86-64 has it, and it does nothing to what the program sees.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(middle.wrapping_add(ahead).cast()) };
        }
        // SAFETY: every x86-64 has these. 64 bytes are there for each of `count`: four vectors of 16 bytes are read at
        // `middle`, from any place, and written to `lines`, which is aligned.
        unsafe {
            let (to, from) = (lines.add(line * 4), middle.add(line * 64).cast::<__m128i>());
            let (a, b) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
            let (c, d) = (_mm_loadu_si128(from.add(2)), _mm_loadu_si128(from.add(3)));
            if PAST {
                _mm_stream_si128(to, a);
                _mm_stream_si128(to.add(1), b);
                _mm_stream_si128(to.add(2), c);
                _mm_stream_si128(to.add(3), d);
            } else {
                _mm_store_si128(to, a);
                _mm_store_si128(to.add(1), b);
                _mm_store_si128(to.add(2), c);
                _mm_store_si128(to.add(3), d);
            }
        }
        line += 1;
    }
    if PAST {
        // SAFETY: every x86-64 has it. Without it the writes above may come after later ones.
        unsafe { _mm_sfence() };
    }
}

/// Copies `bytes`.
///
/// # Safety
/// `bytes` of memory can be read at `from` and written at `to`, and they do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_to<const PAST: bool, const FAR: bool>(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn shared(bytes: &[u8]) -> Vec<AtomicU8> {
        bytes.iter().copied().map(AtomicU8::new).collect()
    }

    fn private(shared: &[AtomicU8]) -> Vec<u8> {
        shared.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn copies_are_copies_whatever_their_ends_and_their_way() {
        let from: Vec<u8> = (0..20_000).map(|place: usize| (place * 13 % 251) as u8).collect();
        for (begin, end, shift) in
            [(0, 1_000, 0), (1, 999, 3), (5, 20, 1), (0, 64, 16), (7, 7, 0), (3, 700, 9), (9, 19_999, 5)]
        {
            let part = &from[begin..end];
            for flag in [false, true] {
                let to = shared(&[0; 20_100]);
                copy(&to[shift..], part, flag);
                let to = private(&to);
                assert_eq!(&to[shift..][..part.len()], part, "{begin} {end} {shift} {flag}");
                assert!(to[shift + part.len()..].iter().all(|&byte| byte == 0), "past its end");
                let mut to = vec![7; shift];
                append(&mut to, &shared(part), flag);
                assert_eq!((&to[..shift], &to[shift..]), (&*vec![7; shift], part));
            }
        }
        let short = shared(&[0; 10]);
        copy(&short, &from, false);
        assert_eq!(private(&short), from[..10]);
    }

    #[test]
    fn what_is_appended_beyond_the_cache_is_whole() {
        let from: Vec<u8> = (0..CACHED + 300).map(|place: usize| (place / 7) as u8).collect();
        for far in [false, true] {
            let (mut at_once, mut by_parts) = (Vec::new(), Vec::new());
            let there = shared(&from);
            append(&mut at_once, &there, far);
            there.chunks(1_000_003).for_each(|part| append(&mut by_parts, part, far));
            assert!(at_once == from && by_parts == from);
        }
    }

    #[test]
    fn the_faster_way_is_taken_and_tried_again() {
        let (to, from) = (&*shared(&[0; 4 * TRIAL]), &[1; 4 * TRIAL]);
        let mut route = Route::default();
        assert_eq!(route.begin(to, &from[..TRIAL]), 0, "too little to try");
        for _ in 0..3 {
            assert_eq!(route.begin(to, from), 2 * TRIAL);
            let there = private(to);
            assert_eq!((&there[..2 * TRIAL], &there[2 * TRIAL..]), (&from[..2 * TRIAL], &[0; 2 * TRIAL][..]));
            for _ in 1..BETWEEN_TRIALS {
                assert_eq!(route.begin(to, from), TRIAL);
            }
        }
        for (cached, past, is_past) in [(10, 10, false), (30, 10, false), (31, 10, true), (5, 10, false)] {
            route.tried(Duration::from_micros(cached), Duration::from_micros(past));
            assert_eq!(route.is_past(), is_past, "{cached} {past}");
        }
    }
}
