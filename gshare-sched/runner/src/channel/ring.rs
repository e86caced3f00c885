//! The two counters of a channel, and who sleeps on which.
//!
//! `head` counts messages that were published, `tail` those that were released; both wrap. A side that finds nothing to
//! do says so in its `asleep` word, looks once more, and sleeps on the other side's counter while that has the value it
//! saw. The other side moves its counter first and looks at `asleep` then. A fence between the two steps on both sides
//! makes one of the looks see the other's write, so no wake-up is lost; a `loom` model runs every interleaving of that.
#![cfg_attr(loom, allow(unsafe_code, reason = "the model's slot, which loom checks"))]

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// One side's counter with its sleeper: the other side.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) count: &'a AtomicU32,
    /// 1 while the other side sleeps on `count`, or is about to.
    pub(super) asleep: &'a AtomicU32,
}

/// Sleeping on a word while it has a value, and waking who sleeps.
pub(super) trait Futex {
    /// Sleeps unless `word` is not `value`; may wake for no reason.
    fn wait(&self, word: &AtomicU32, value: u32);
    /// Wakes who sleeps on `word`.
    fn wake(&self, word: &AtomicU32);
}

impl Turn<'_> {
    /// Where the counter stands; what was written before it was moved there is seen.
    #[inline]
    pub(super) fn seen(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Moves the counter, and wakes the other side if it sleeps. Where to, the one side that moves it knows: to read
    /// the line before writing it would bring it here twice.
    #[inline]
    pub(super) fn advance(&self, to: u32, futex: &impl Futex) {
        self.count.store(to, Ordering::Release);
        self.nudge(futex);
    }

    /// Wakes the other side if it sleeps, after something else than the counter was written that it should see. One
    /// that is about to sleep may miss it; the counter's next move it does not.
    #[inline]
    pub(super) fn nudge(&self, futex: &impl Futex) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) != 0 {
            // Only the sleeper takes its word back: cleared here it could be the word of its next sleep, which then
            // no thread would end.
            futex.wake(self.count);
        }
    }

    /// Sleeps until the counter is not `seen`, or for no reason.
    pub(super) fn sleep(&self, seen: u32, futex: &impl Futex) {
        self.asleep.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::Relaxed) == seen {
            futex.wait(self.count, seen);
        }
        self.asleep.store(0, Ordering::Relaxed);
    }
}

/// RUSTFLAGS="--cfg loom" cargo test -p gshare-runner --lib loom
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// A futex as the kernel promises it: looking and going to sleep are one step.
    struct Model {
        lock: Mutex<()>,
        bell: Condvar,
    }

    impl Futex for Model {
        fn wait(&self, word: &AtomicU32, value: u32) {
            let guard = self.lock.lock().unwrap();
            if word.load(Ordering::SeqCst) == value {
                drop(self.bell.wait(guard).unwrap());
            }
        }

        fn wake(&self, _: &AtomicU32) {
            let _guard = self.lock.lock().unwrap();
            self.bell.notify_all();
        }
    }

    struct Shared {
        head: AtomicU32,
        head_asleep: AtomicU32,
        tail: AtomicU32,
        tail_asleep: AtomicU32,
        slot: UnsafeCell<u32>,
        futex: Model,
    }

    impl Shared {
        fn published(&self) -> Turn<'_> {
            Turn { count: &self.head, asleep: &self.head_asleep }
        }

        fn released(&self) -> Turn<'_> {
            Turn { count: &self.tail, asleep: &self.tail_asleep }
        }
    }

    /// One slot, two messages: the producer has to wait for the consumer and the other way round. Loom fails on a lost
    /// wake-up (neither side can go on) and on a slot that both touch at once.
    #[test]
    fn loom_no_wake_up_is_lost_and_no_slot_is_torn() {
        // Every interleaving with up to three preemptions; unbounded it does not end within minutes.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Arc::new(Shared {
                head: AtomicU32::new(0),
                head_asleep: AtomicU32::new(0),
                tail: AtomicU32::new(0),
                tail_asleep: AtomicU32::new(0),
                slot: UnsafeCell::new(0),
                futex: Model { lock: Mutex::new(()), bell: Condvar::new() },
            });
            let producer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    for message in 1..=2u32 {
                        while shared.released().seen() != message - 1 {
                            // Less than `message - 1`: only the second message waits, for the release of the first.
                            shared.released().sleep(message - 2, &shared.futex);
                        }
                        // The message is coming: who wakes for that finds nothing yet, and sleeps again.
                        shared.published().nudge(&shared.futex);
                        shared.slot.with_mut(|slot| {
                            // SAFETY: the slot was released, so the consumer does not look at it; loom checks that.
                            unsafe { *slot = message }
                        });
                        shared.published().advance(message, &shared.futex);
                    }
                })
            };
            for message in 1..=2u32 {
                while shared.published().seen() < message {
                    shared.published().sleep(message - 1, &shared.futex);
                }
                let got = shared.slot.with(|slot| {
                    // SAFETY: the slot was published and not released; loom checks that.
                    unsafe { *slot }
                });
                assert_eq!(got, message);
                shared.released().advance(message, &shared.futex);
            }
            producer.join().unwrap();
        });
    }
}
