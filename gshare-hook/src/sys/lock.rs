//! A lock that survives a panic of its owner. Guarded values change in single steps, so they are sound whenever the lock is free.
//!
//! The lock is the standard library's, not `parking_lot`'s. `parking_lot` keeps a table for all locks of a process, and a forked
//! child may find this table locked. Its thread-local has a destructor, which is registered under the loader's lock, and a
//! library's constructor may hold the loader's lock while it waits for the helper thread.

use core::time::Duration;
use std::sync::{Condvar, PoisonError};

#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

/// A lock around `T`.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

/// The guarded value, while it is locked.
pub(crate) type Guard<'a, T> = MutexGuard<'a, T>;

impl<T> Lock<T> {
    #[cfg(not(loom))]
    pub(crate) const fn new(guarded: T) -> Self {
        Self(Mutex::new(guarded))
    }

    /// Takes the lock, even after a panic of its owner.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition for which threads wait with a lock.
#[derive(Debug, Default)]
pub(crate) struct Signal(Condvar);

impl Signal {
    pub(crate) const fn new() -> Self {
        Self(Condvar::new())
    }

    /// Wakes all waiting threads.
    pub(crate) fn notify(&self) {
        self.0.notify_all();
    }
}

#[cfg(not(loom))]
impl Signal {
    /// Lets go of the lock until a notification, for `most` at most.
    pub(crate) fn wait<'a, T>(&self, guard: Guard<'a, T>, most: Duration) -> Guard<'a, T> {
        self.0.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits like [`wait`](Self::wait), again and again while `pending` holds, and for `most` in all.
    pub(crate) fn wait_while<'a, T>(
        &self,
        guard: Guard<'a, T>,
        most: Duration,
        pending: impl FnMut(&mut T) -> bool,
    ) -> Guard<'a, T> {
        self.0.wait_timeout_while(guard, most, pending).unwrap_or_else(PoisonError::into_inner).0
    }
}
