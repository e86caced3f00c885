//! `CONTEXT_LOCAL_STORAGE_INTERFACE_V0301`: values of a library for a context, by key.
//!
//! Facts: ZLUDA's `dark_api` (put, delete, get and a null word; no size word; a null context is the current one; a missing value answers
//! `CUDA_ERROR_INVALID_HANDLE`; when the context ends, each value's function is called with context, key and value).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

use super::*;
use crate::driver::base::lock;

pub(super) const TABLE: Table = Table {
    id: [0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93],
    name: "CONTEXT_LOCAL_STORAGE",
    words: &WORDS,
};

static WORDS: [Pointer; 4] = [
    Pointer(store as *const ()),
    Pointer(delete as *const ()),
    Pointer(get as *const ()),
    Pointer(std::ptr::null()),
];

/// A callback with context, key and value, called when the context ends.
type AtEnd = unsafe extern "C" fn(sys::CUcontext, *mut c_void, *mut c_void);

struct Value {
    value: usize,
    at_end: Option<AtEnd>,
}

/// Values by the context's number and the key, an address read only by its owner.
static VALUES: Mutex<BTreeMap<(u64, usize), Value>> = Mutex::new(BTreeMap::new());

functions! {
    fn store(context: sys::CUcontext, key: *mut c_void, value: *mut c_void, at_end: Option<AtEnd>) {
        let value = Value { value: value as usize, at_end };
        lock(&VALUES).insert((context_of(context)?.id, key as usize), value);
        Ok(())
    }
    fn delete(context: sys::CUcontext, key: *mut c_void) {
        lock(&VALUES).remove(&(context_of(context)?.id, key as usize));
        Ok(())
    }
    fn get(value: *mut *mut c_void, context: sys::CUcontext, key: *mut c_void) {
        let key = (context_of(context)?.id, key as usize);
        let found = lock(&VALUES).get(&key).map(|found| found.value);
        put(value, found.ok_or(base::INVALID_HANDLE)? as *mut c_void)
    }
}

/// Drops the values of a context at its end, and tells their owners. The lock is free meanwhile: an owner may call back.
pub(crate) fn context_ends(context: Ref<Context>) {
    let of_context =
        lock(&VALUES).extract_if((context.id, 0)..(context.id + 1, 0), |_, _| true).collect::<Vec<_>>();
    for ((_, key), value) in of_context {
        if let Some(at_end) = value.at_end {
            // SAFETY: the owner registered this function and these arguments for the end of the context.
            unsafe { at_end(context.handle(), key as *mut c_void, value.value as *mut c_void) };
        }
    }
}
