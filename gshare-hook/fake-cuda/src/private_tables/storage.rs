//! `CONTEXT_LOCAL_STORAGE_INTERFACE_V0301`: values that a library keeps with a context, by key.
//!
//! Facts: ZLUDA's `dark_api` (put, delete, get and a null word; no size word; a null context is the current one; a missing
//! value answers `CUDA_ERROR_INVALID_HANDLE`; when the context ends, each value's function is called with context, key and
//! value).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

use super::{Table, context_of};
use crate::driver::{CUresult, Pointer, base, guard, sys};

pub(super) const TABLE: Table = Table {
    id: [0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93],
    name: "CONTEXT_LOCAL_STORAGE",
    words: &WORDS,
};

static WORDS: [Pointer; 4] = [
    Pointer(put as *const ()),
    Pointer(delete as *const ()),
    Pointer(get as *const ()),
    Pointer(std::ptr::null()),
];

/// A callback that gets context, key and value when the context ends.
type AtEnd = unsafe extern "C" fn(sys::CUcontext, *mut c_void, *mut c_void);

struct Value {
    value: usize,
    at_end: Option<AtEnd>,
}

/// By the context's number and the key, which is an address that only its owner reads.
static VALUES: Mutex<BTreeMap<(u64, usize), Value>> = Mutex::new(BTreeMap::new());

unsafe extern "C" fn put(
    context: sys::CUcontext,
    key: *mut c_void,
    value: *mut c_void,
    at_end: Option<AtEnd>,
) -> CUresult {
    guard(|| {
        let context = context_of(context)?;
        let value = Value { value: value as usize, at_end };
        base::lock(&VALUES).insert((context.id, key as usize), value);
        Ok(())
    })
}

unsafe extern "C" fn delete(context: sys::CUcontext, key: *mut c_void) -> CUresult {
    guard(|| {
        let context = context_of(context)?;
        base::lock(&VALUES).remove(&(context.id, key as usize));
        Ok(())
    })
}

unsafe extern "C" fn get(value: *mut *mut c_void, context: sys::CUcontext, key: *mut c_void) -> CUresult {
    guard(|| {
        let context = context_of(context)?;
        let found = base::lock(&VALUES).get(&(context.id, key as usize)).map(|found| found.value);
        let found = found.ok_or(base::INVALID_HANDLE)?;
        // SAFETY: an out-pointer of the caller, checked for null.
        unsafe { base::put(value, found as *mut c_void) }
    })
}

/// A context ends: its values go, and their owners are told. The lock is not held meanwhile: an owner may call back.
pub(crate) fn context_ends(context: &'static base::Object<base::Context>) {
    let of_context = {
        let mut values = base::lock(&VALUES);
        let mut from = values.split_off(&(context.id, 0));
        let mut others = from.split_off(&(context.id + 1, 0));
        values.append(&mut others);
        from
    };
    for ((_, key), value) in of_context {
        if let Some(at_end) = value.at_end {
            // SAFETY: the function and its arguments are those that its owner registered for this moment.
            unsafe { at_end(context.handle(), key as *mut c_void, value.value as *mut c_void) };
        }
    }
}
