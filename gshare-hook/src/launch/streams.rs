//! A stream's number and context, and whether it is being captured.
#![allow(unsafe_code)] // calls to the driver

use core::ffi::c_uint;

use crate::device::context;
use crate::sys::driver::real;

/// `CU_STREAM_LEGACY`. The number below it is the default stream.
pub(crate) const LEGACY_STREAM: usize = 1;

/// `CU_STREAM_PER_THREAD`.
pub(crate) const PER_THREAD_STREAM: usize = 2;

/// The stream as a number, which tells the two flavours of the default stream apart.
#[inline(always)]
pub(crate) fn stream_of<T>(stream: *mut T, per_thread: bool) -> usize {
    let stream = stream.addr();
    if per_thread && stream == 0 { PER_THREAD_STREAM } else { stream }
}

/// Does `work` with a stream's own context current, because work may be given to a stream of another device.
pub(crate) fn in_context_of<T>(stream: usize, work: impl FnOnce() -> T) -> T {
    let foreign = if stream > PER_THREAD_STREAM { foreign_context(stream) } else { None };
    // The context stays pushed until the end of this function.
    let _pushed = foreign.and_then(context::Pushed::new);
    work()
}

/// The context of a stream, unless it is the current context. For the stream of a green context this is the primary context, where
/// the driver tells it.
pub(crate) fn foreign_context(stream: usize) -> Option<usize> {
    let (handle, _) = contexts_of(stream)?;
    (context::current_handle() != Some(handle)).then_some(handle)
}

/// The context with which a stream ends: its green context, if it has one, and 0 where the driver does not tell.
pub(crate) fn context_of(stream: usize) -> usize {
    if stream <= PER_THREAD_STREAM {
        return context::current_handle().unwrap_or(0);
    }
    contexts_of(stream).map_or(0, |(context, green)| if green == 0 { context } else { green })
}

/// The context of a stream, and its green context or 0.
fn contexts_of(stream: usize) -> Option<(usize, usize)> {
    let stream = core::ptr::with_exposed_provenance_mut(stream);
    let (mut context, mut green) = (core::ptr::null_mut(), core::ptr::null_mut());
    let found = match real!(cuStreamGetCtx_v2) {
        // SAFETY: the program's own stream and valid out-pointers.
        Some(get) => unsafe { get(stream, &raw mut context, &raw mut green) },
        // SAFETY: as above.
        None => unsafe { real!(cuStreamGetCtx)?(stream, &raw mut context) },
    };
    (found.is_ok() && !context.is_null()).then(|| (context.expose_provenance(), green.addr()))
}

/// Whether a launch on this stream becomes part of a graph.
#[cold]
pub(crate) fn is_captured(stream: usize) -> bool {
    let Some(query) = real!(cuStreamIsCapturing) else { return false };
    let mut status: c_uint = 0;
    // SAFETY: a valid out-pointer and the program's own stream.
    let result = unsafe { query(core::ptr::with_exposed_provenance_mut(stream), &raw mut status) };
    // The error is CAPTURE_IMPLICIT, and the launch will fail by itself.
    !result.is_ok() || status != 0
}
