//! The ground truth over a C boundary, for programs that load the library but are not linked to it.
#![allow(unsafe_code)] // a C entry point

use std::collections::btree_map::{BTreeMap, Entry};
use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::sim::{self, SimDevice, Watched};
use gshare_fake_cuda_spec::Spec;

/// Devices stay open: a reader asks again and again.
static OPEN: Mutex<BTreeMap<PathBuf, SimDevice>> = Mutex::new(BTreeMap::new());

fn device<R>(path: &Path, f: impl FnOnce(&SimDevice) -> R) -> Option<R> {
    let mut open = sim::lock(&OPEN);
    let device = match open.entry(path.to_owned()) {
        Entry::Occupied(open) => open.into_mut(),
        Entry::Vacant(place) => place.insert(SimDevice::open(path, &Spec::default()).ok()?),
    };
    Some(f(device))
}

/// # Safety
///
/// `path` is null or a C string.
unsafe fn path_or_default(path: *const c_char) -> PathBuf {
    if path.is_null() {
        return sim::default_path();
    }
    // SAFETY: a C string, as the caller promises.
    let path = unsafe { CStr::from_ptr(path) };
    PathBuf::from(OsStr::from_bytes(path.to_bytes()))
}

/// Writes [`sim::Truth`] of the device file at `path` (null: the default one) into `out` as JSON.
///
/// Gives its length in bytes, without a terminating zero; when that is more than `capacity`, nothing is written. -1 when
/// the device cannot be opened.
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
    let path = unsafe { path_or_default(path) };
    let truth = || device(&path, |device| serde_json::to_vec(&device.truth()).ok()).flatten();
    let Ok(Some(text)) = std::panic::catch_unwind(truth) else { return -1 };
    if text.len() <= capacity {
        // SAFETY: `out` has room for `capacity` bytes, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    }
    isize::try_from(text.len()).unwrap_or(-1)
}

/// Brings `count` [`Watched`] processes up to date, on GPU 0 of the device file at `path` (null: the default one).
///
/// Gives the instant of that, `CLOCK_MONOTONIC` in ns; -1 when the device cannot be opened.
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
    // SAFETY: null or a C string, as the caller promises.
    let path = unsafe { path_or_default(path) };
    // SAFETY: `count` elements, as the caller promises.
    let processes = unsafe { std::slice::from_raw_parts_mut(processes, count) };
    let watch = std::panic::AssertUnwindSafe(|| device(&path, |device| device.watch(0, processes)));
    let Ok(Some(now)) = std::panic::catch_unwind(watch) else { return -1 };
    i64::try_from(now).unwrap_or(-1)
}
