//! CUDA arrays, charged at the driver's own figure of their size.
#![allow(unsafe_code)] // exported C functions

use core::ffi::{c_uint, c_void};

use gshare_cuda_abi::types::{CUdevice, CUresult, sys};

use crate::device::book::{Key, Kind};
use crate::exports::macros::wrappers;
use crate::exports::memory::{allocate, free, handle, metered, metering};
use crate::process::runtime::Metered;
use crate::sys::driver::real;

/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: the array has no memory of its own, but the program maps physical memory
/// into it, and the mapped memory is counted as such.
const SPARSE: c_uint = 0x40;
const DEFERRED_MAPPING: c_uint = 0x80;

/// Size of an array by its description, in bytes.
fn described(width: usize, height: usize, depth: usize, format: c_uint, channels: c_uint) -> u64 {
    let element = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4u64,
    };
    let cells = (width as u64).saturating_mul(height.max(1) as u64).saturating_mul(depth.max(1) as u64);
    cells.saturating_mul(element * u64::from(channels.max(1)))
}

/// The description of a 3-D array as plain integers: width, height, depth, format, channels, flags.
fn description(
    desc: *const sys::CUDA_ARRAY3D_DESCRIPTOR,
) -> Option<(usize, usize, usize, c_uint, c_uint, c_uint)> {
    if desc.is_null() {
        return None;
    }
    // SAFETY: the caller's own description; the format is read as the integer it is in C.
    unsafe {
        let format = (&raw const (*desc).Format).cast::<c_uint>().read();
        Some(((*desc).Width, (*desc).Height, (*desc).Depth, format, (*desc).NumChannels, (*desc).Flags))
    }
}

/// The size of an array of this description, learned from the requirements of a twin without memory.
fn required(
    desc: *const sys::CUDA_ARRAY3D_DESCRIPTOR,
    levels: Option<c_uint>,
    ordinal: CUdevice,
) -> Option<u64> {
    // SAFETY: the caller's own description, copied bit by bit.
    let mut twin = core::mem::MaybeUninit::uninit();
    // SAFETY: as above.
    unsafe { core::ptr::copy_nonoverlapping(desc, twin.as_mut_ptr(), 1) };
    // SAFETY: Flags is a plain integer inside the copy.
    unsafe { (*twin.as_mut_ptr()).Flags |= DEFERRED_MAPPING };
    let mut needs = core::mem::MaybeUninit::<sys::CUDA_ARRAY_MEMORY_REQUIREMENTS>::zeroed();
    let known = match levels {
        None => {
            let mut array: sys::CUarray = core::ptr::null_mut();
            let (get, create, destroy) =
                (real!(cuArrayGetMemoryRequirements)?, real!(cuArray3DCreate_v2)?, real!(cuArrayDestroy)?);
            // SAFETY: valid pointers; the twin is destroyed again.
            unsafe {
                if !create(&raw mut array, twin.as_ptr()).is_ok() {
                    return None;
                }
                let known = get(needs.as_mut_ptr(), array, ordinal);
                let _ = destroy(array);
                known
            }
        }
        Some(levels) => {
            let mut array: sys::CUmipmappedArray = core::ptr::null_mut();
            let get = real!(cuMipmappedArrayGetMemoryRequirements)?;
            let (create, destroy) = (real!(cuMipmappedArrayCreate)?, real!(cuMipmappedArrayDestroy)?);
            // SAFETY: valid pointers; the twin is destroyed again.
            unsafe {
                if !create(&raw mut array, twin.as_ptr(), levels).is_ok() {
                    return None;
                }
                let known = get(needs.as_mut_ptr(), array, ordinal);
                let _ = destroy(array);
                known
            }
        }
    };
    // SAFETY: zeroed before, and plain integers in any case.
    known.is_ok().then(|| unsafe { needs.assume_init() }.size as u64)
}

fn allocate_array<T>(
    out: *mut *mut T,
    desc: *const sys::CUDA_ARRAY3D_DESCRIPTOR,
    levels: Option<c_uint>,
    call: impl Fn() -> CUresult,
) -> CUresult {
    let Some((width, height, depth, format, channels, flags)) = description(desc) else { return call() };
    if flags & (SPARSE | DEFERRED_MAPPING) != 0 {
        return call();
    }
    let ordinal = metered!(metered!(metering(None), call).current_device(), call).ordinal;
    let bytes = required(desc, levels, ordinal).unwrap_or_else(|| {
        let base = described(width, height, depth, format, channels);
        // All levels of a mipmap take at most twice its base.
        if levels.is_some_and(|levels| levels > 1) { base.saturating_mul(2) } else { base }
    });
    allocate(bytes, call, || (Key(Kind::Array, handle(out)), bytes), || {})
}

/// Converts a description of CUDA 2, a row of 32-bit integers, to a current description. `FIELDS` is 4 (2-D) or 6 (3-D).
fn modern<const FIELDS: usize>(
    desc: *const c_void,
) -> Option<core::mem::MaybeUninit<sys::CUDA_ARRAY3D_DESCRIPTOR>> {
    if desc.is_null() {
        return None;
    }
    // SAFETY: the caller's own description, which consists of `FIELDS` integers.
    let old = unsafe { desc.cast::<[c_uint; FIELDS]>().read_unaligned() };
    let (depth, format, channels, flags) =
        if FIELDS == 4 { (0, old[2], old[3], 0) } else { (old[2], old[3], old[4], old[5]) };
    let mut full = core::mem::MaybeUninit::<sys::CUDA_ARRAY3D_DESCRIPTOR>::zeroed();
    // SAFETY: inside the zeroed description; the format is written as the integer it is in C.
    unsafe {
        let to = full.as_mut_ptr();
        ((*to).Width, (*to).Height, (*to).Depth) = (old[0] as usize, old[1] as usize, depth as usize);
        ((*to).NumChannels, (*to).Flags) = (channels, flags);
        (&raw mut (*to).Format).cast::<c_uint>().write(format);
    }
    Some(full)
}

/// Converts a 2-D description to a 3-D description.
fn flat(
    desc: *const sys::CUDA_ARRAY_DESCRIPTOR,
) -> Option<core::mem::MaybeUninit<sys::CUDA_ARRAY3D_DESCRIPTOR>> {
    if desc.is_null() {
        return None;
    }
    let mut full = core::mem::MaybeUninit::<sys::CUDA_ARRAY3D_DESCRIPTOR>::zeroed();
    // SAFETY: the caller's own description; the format is copied as the integer it is in C.
    unsafe {
        let to = full.as_mut_ptr();
        (*to).Width = (*desc).Width;
        (*to).Height = (*desc).Height;
        (*to).NumChannels = (*desc).NumChannels;
        let format = (&raw const (*desc).Format).cast::<c_uint>().read();
        (&raw mut (*to).Format).cast::<c_uint>().write(format);
    }
    Some(full)
}

wrappers! { ARRAYS:
    // CUDA 2 creates arrays by these functions.
    cuArrayCreate(out: *mut sys::CUarray, desc: *const c_void) |call| {
        let Some(full) = modern::<4>(desc) else { return call() };
        allocate_array(out, full.as_ptr(), None, call)
    }
    cuArray3DCreate(out: *mut sys::CUarray, desc: *const c_void) |call| {
        let Some(full) = modern::<6>(desc) else { return call() };
        allocate_array(out, full.as_ptr(), None, call)
    }
    cuArrayCreate_v2(out: *mut sys::CUarray, desc: *const sys::CUDA_ARRAY_DESCRIPTOR) |call| {
        let Some(full) = flat(desc) else { return call() };
        allocate_array(out, full.as_ptr(), None, call)
    }
    cuArray3DCreate_v2(out: *mut sys::CUarray, desc: *const sys::CUDA_ARRAY3D_DESCRIPTOR) |call| {
        allocate_array(out, desc, None, call)
    }
    cuArrayDestroy(array: sys::CUarray) |call| { free(Key(Kind::Array, array.addr() as u64), call) }
    cuMipmappedArrayCreate(out: *mut sys::CUmipmappedArray, desc: *const sys::CUDA_ARRAY3D_DESCRIPTOR,
        levels: c_uint) |call| { allocate_array(out, desc, Some(levels), call) }
    cuMipmappedArrayDestroy(array: sys::CUmipmappedArray) |call| {
        free(Key(Kind::Array, array.addr() as u64), call)
    }
}
