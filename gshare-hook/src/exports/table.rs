//! The driver functions with a wrapper, by index into the table of symbols.

use core::ffi::c_void;

use gshare_cuda_abi::{SYMBOLS, index};

use crate::exports::{array, blocks, context, copies, launch, memory, pools, resolve, served, waits};

/// Wrappers by index into the table, with null for a function without a wrapper.
struct Wrappers([*const c_void; SYMBOLS.len()]);

// SAFETY: addresses of functions.
#[allow(unsafe_code)]
unsafe impl Sync for Wrappers {}

static WRAPPERS: Wrappers = Wrappers({
    let mut all = [core::ptr::null(); SYMBOLS.len()];
    let lists = [
        launch::LAUNCHES,
        copies::COPIES,
        memory::MEMORY,
        pools::POOLS,
        served::SERVED,
        array::ARRAYS,
        blocks::BLOCKS,
        context::CONTEXTS,
        waits::WAITS,
    ];
    let mut list = 0;
    while list < lists.len() {
        let mut row = 0;
        while row < lists[list].len() {
            all[lists[list][row].0] = lists[list][row].1;
            row += 1;
        }
        list += 1;
    }
    all[index::cuGetProcAddress] = resolve::cuGetProcAddress as *const c_void;
    all[index::cuGetProcAddress_v2] = resolve::cuGetProcAddress_v2 as *const c_void;
    all
});

/// The wrapper of this variant, if there is any.
pub(crate) fn wrapper(index: usize) -> Option<*mut c_void> {
    Some(WRAPPERS.0[index].cast_mut()).filter(|pointer| !pointer.is_null())
}
