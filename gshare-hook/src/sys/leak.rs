//! Values that are never freed, in memory that may be unavailable.
#![allow(unsafe_code)] // an allocation that may fail

use core::ptr::NonNull;
use std::alloc::Layout;

/// Puts a value in memory for good, or returns `None` where the process gets no memory for it.
pub(crate) fn leak<T>(value: T) -> Option<&'static T> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the size is not zero.
    let place = NonNull::new(unsafe { std::alloc::alloc(Layout::new::<T>()) }.cast::<T>())?;
    // SAFETY: memory of this size and alignment, which is never freed.
    unsafe {
        place.write(value);
        Some(place.as_ref())
    }
}

/// Whether the process still gets this much memory. Callers ask before allocations that must not fail.
pub(crate) fn is_there(bytes: usize) -> bool {
    const PAGE: usize = 4096;
    let Ok(layout) = Layout::from_size_align(bytes.max(PAGE), PAGE) else { return false };
    // SAFETY: the size is not zero.
    let place = unsafe { std::alloc::alloc(layout) };
    if place.is_null() {
        return false;
    }
    // SAFETY: the place was just allocated with this layout.
    unsafe { std::alloc::dealloc(place, layout) };
    true
}
