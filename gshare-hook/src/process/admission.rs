//! A launch by the program, from the call to the driver's answer.
//!
//! The fast path needs only the `launch` floor. The slow path first decides whether the process is metered at all, and on which device.

use gshare_cuda_abi::types::CUresult;
use gshare_meter::launch::{Call, Verdict};

use crate::launch::control::{CONTROL, State};
use crate::launch::gate::{admit, admit_prepaid, conclude};
use crate::launch::streams::{in_context_of, is_captured};
use crate::launch::ticket::Ticket;
use crate::process::arm::arm;
use crate::process::runtime::{Metered, Runtime};

/// Meters a launch by the program and makes the driver's own `call`.
///
/// `handle` and `size` identify the launch's cost, and `stream` is its stream (see [`stream_of`](crate::launch::streams::stream_of)).
#[inline(always)]
pub(crate) fn launch(handle: u64, size: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    launch_as(handle, size, stream, Call::Launch, call)
}

/// Like [`launch`], for a call of the given kind.
#[inline(always)]
pub(crate) fn launch_as(
    handle: u64,
    size: u64,
    stream: usize,
    kind: Call,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let ticket = match admit_prepaid(handle, size, stream) {
        Some(ticket) => ticket,
        None if CONTROL.state() == State::Off as u32 => Ticket::PASS,
        None => admit_slowly(handle, size, stream, kind),
    };
    if ticket.verdict == Verdict::Fail {
        return CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
    }
    let result = call();
    if ticket.verdict > Verdict::Paid || (ticket.verdict == Verdict::Paid && !result.is_ok()) {
        conclude(ticket, stream, result);
    }
    result
}

#[inline(never)]
fn admit_slowly(handle: u64, size: u64, stream: usize, kind: Call) -> Ticket {
    let runtime = match arm(None) {
        Metered::Yes(runtime) => runtime,
        Metered::No => return Ticket::PASS,
        Metered::Refused => return Ticket::FAIL,
    };
    if CONTROL.capturing() && is_captured(stream) {
        return Ticket::PASS;
    }
    let admit_here = || admit_on(runtime, (handle, size), stream, kind);
    if runtime.metering.devices.sole().is_some() {
        return admit_here();
    }
    // With several devices the stream determines the device, and events must be made in the stream's context.
    in_context_of(stream, admit_here)
}

fn admit_on(runtime: &'static Runtime, what: (u64, u64), stream: usize, kind: Call) -> Ticket {
    match runtime.launch_device() {
        Metered::Yes(device) => admit(&runtime.metering, device, what, stream, kind),
        Metered::No => Ticket::PASS,
        Metered::Refused => Ticket::FAIL,
    }
}
