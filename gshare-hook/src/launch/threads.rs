//! The program's threads, with a record for each launching thread. A record is reused when its thread has ended.
#![allow(unsafe_code)] // a thread key and the thread's own word

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::launch::thread_record::{self, ThreadRecord};
use crate::sys::leak::leak;
use crate::sys::lock::Lock;
use crate::sys::tls;

/// The key that notices the end of a thread, or a negative number while there is no key.
static KEY: AtomicI64 = AtomicI64::new(-1);
/// Whether the thread of `main` has ended before the process.
static MAIN_ENDED: AtomicBool = AtomicBool::new(false);

/// Makes the key, unless it exists, or returns `false` if the program has taken all keys. The library's constructor calls this before
/// the program can take any.
pub(crate) fn make_key() -> bool {
    if KEY.load(Ordering::Acquire) >= 0 {
        return true;
    }
    let mut key = 0;
    // SAFETY: a valid out-pointer; the destructor runs in the ending thread.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(thread_ends)) } != 0 {
        return false;
    }
    if KEY.compare_exchange(-1, key.into(), Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // SAFETY: just made, and unknown to all other code.
        unsafe { libc::pthread_key_delete(key) };
    }
    true
}

/// Has the end of the calling thread noticed.
pub(crate) fn watch_this_thread(record: *const c_void) {
    if let Ok(key) = u32::try_from(KEY.load(Ordering::Acquire)) {
        // SAFETY: the key was made with `thread_ends`.
        unsafe { libc::pthread_setspecific(key, record) };
    }
}

/// Whether the thread of `main` has ended before the process.
pub(crate) fn main_has_ended() -> bool {
    MAIN_ENDED.load(Ordering::Relaxed)
}

/// Stands for the main thread's record while it has none, so its end is noticed.
pub(crate) static NO_RECORD: u8 = 0;

extern "C" fn thread_ends(record: *mut c_void) {
    // SAFETY: the calls only return two numbers of the kernel.
    if unsafe { libc::gettid() == libc::getpid() } {
        MAIN_ENDED.store(true, Ordering::Relaxed);
    }
    if record.cast_const() == (&raw const NO_RECORD).cast() {
        return;
    }
    // SAFETY: the word is this thread's own, and the key holds a record that is never freed.
    unsafe { *tls::word() = 0 };
    // SAFETY: as above.
    if let Some(record) = unsafe { record.cast::<ThreadRecord>().as_ref() } {
        thread_record::retire(record);
    }
}

/// The records of all threads, in the order of their making.
#[derive(Debug, Default)]
pub(crate) struct Threads(Lock<Vec<&'static ThreadRecord>>);

impl Threads {
    /// Gives the calling thread a record, or returns `None` where there is no memory for it.
    #[cold]
    pub(crate) fn enlist(&self) -> Option<&'static ThreadRecord> {
        let mut threads = self.0.lock();
        let free = threads
            .iter()
            .find(|t| t.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        let record: &'static ThreadRecord = match free {
            Some(record) => record,
            None => {
                threads.try_reserve(1).ok()?;
                let record = leak(ThreadRecord::new())?;
                threads.push(record);
                record
            }
        };
        drop(threads);
        let pointer = core::ptr::from_ref(record);
        watch_this_thread(pointer.cast());
        // SAFETY: the word is this thread's own.
        unsafe { *tls::word() = pointer.expose_provenance() };
        Some(record)
    }

    /// Whether `is` holds for any record.
    pub(crate) fn any(&self, is: impl Fn(&ThreadRecord) -> bool) -> bool {
        self.0.lock().iter().any(|record| is(record))
    }

    pub(crate) fn all(&self) -> Vec<&'static ThreadRecord> {
        self.0.lock().clone()
    }
}
