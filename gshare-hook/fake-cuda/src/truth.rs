//! The ground truth over a C boundary, for programs which load the library without linking to it.
#![allow(unsafe_code)] // a C entry point

use std::collections::btree_map::{BTreeMap, Entry};
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;

use crate::sim::{self, SimDevice, Watched};
use gshare_fake_cuda_spec::Spec;

/// Devices stay open, since a reader asks repeatedly.
static OPEN: Mutex<BTreeMap<PathBuf, SimDevice>> = Mutex::new(BTreeMap::new());

/// Asks the device file at `path`, or the default one; `None` when it cannot be opened.
///
/// # Safety
///
/// `path` is null or a C string.
unsafe fn device<R>(path: *const c_char, ask: impl FnOnce(&SimDevice) -> Option<R>) -> Option<R> {
    let path = if path.is_null() {
        sim::default_path()
    } else {
        // SAFETY: a C string, as the caller promises.
        PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
    };
    let asked = AssertUnwindSafe(|| {
        let mut open = sim::lock(&OPEN);
        ask(match open.entry(path) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => {
                let device = SimDevice::open(place.key(), &Spec::default()).ok()?;
                place.insert(device)
            }
        })
    });
    // No panic crosses into C.
    catch_unwind(asked).ok().flatten()
}

/// Writes [`sim::Truth`] of the device file at `path` (null: the default one) into `out` as JSON.
///
/// Returns its length in bytes, without a terminating zero; nothing is written if the length exceeds `capacity`. -1 if the device cannot be
/// opened.
///
/// # Safety
///
/// `path` is null or a C string; `out` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gshare_sim_truth(
    path: *const c_char,
    out: *mut c_char,
    capacity: usize,
) -> isize {
    // SAFETY: null or a C string, as the caller promises.
    let text = unsafe { device(path, |device| serde_json::to_vec(&device.truth()).ok()) };
    let Some(text) = text else { return -1 };
    if text.len() <= capacity {
        // SAFETY: `out` has room for `capacity` bytes, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    }
    isize::try_from(text.len()).unwrap_or(-1)
}

/// Updates `count` [`Watched`] processes, on GPU 0 of the device file at `path` (null: the default one).
///
/// Returns the instant of the update, `CLOCK_MONOTONIC` in ns; -1 if the device cannot be opened.
///
/// # Safety
///
/// `path` is null or a C string; `processes` has `count` elements.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gshare_sim_watch(
    path: *const c_char,
    processes: *mut Watched,
    count: usize,
) -> i64 {
    // SAFETY: `count` elements, as the caller promises.
    let processes = unsafe { std::slice::from_raw_parts_mut(processes, count) };
    // SAFETY: null or a C string, as the caller promises.
    let now = unsafe { device(path, |device| i64::try_from(device.watch(0, processes)).ok()) };
    now.unwrap_or(-1)
}
