//! Streams, events, host functions and memory operations on streams.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::base::*;
use super::graph::{
    GraphNode, Node, Session, context_not_capturing, join_capture, legacy_not_implied, not_capturing,
    not_while_capturing,
};
use super::*;
use crate::sim::Work;
use crate::sim::device_file::{now_ns, sleep_until};

// --- Streams ---------------------------------------------------------------------------------------

pub(crate) fn create_stream(
    context: &'static Object<Context>,
    flags: u32,
    priority: i32,
) -> Result<&'static Object<Stream>, CUresult> {
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let driver = driver()?;
    let slot = driver.device.with(|engine, _| engine.open_stream(driver.process, context.gpu))?;
    Ok(Stream::create(driver, context, slot, flags, priority.clamp(-5, 0), StreamKind::Created))
}

pub(super) unsafe fn cuStreamCreate(phStream: *mut sys::CUstream, Flags: c_uint) -> Answer {
    put(phStream, create_stream(current()?, Flags, 0)?.handle())
}

pub(super) unsafe fn cuStreamCreateWithPriority(
    phStream: *mut sys::CUstream,
    flags: c_uint,
    priority: c_int,
) -> Answer {
    put(phStream, create_stream(current()?, flags, priority)?.handle())
}

pub(super) unsafe fn cuStreamDestroy_v2(hStream: sys::CUstream) -> Answer {
    let driver = driver()?;
    if hStream as usize <= 2 {
        return Err(INVALID_HANDLE);
    }
    let stream = Object::<Stream>::get(hStream)?;
    if !stream.retire() {
        return Err(INVALID_HANDLE);
    }
    lock(&stream.context.streams).retain(|s| s.id != stream.id);
    driver.device.with(|engine, now| engine.close_stream(now, stream.slot));
    Ok(())
}

pub(super) unsafe fn cuStreamDestroy(hStream: sys::CUstream) -> Answer {
    cuStreamDestroy_v2(hStream)
}

pub(super) unsafe fn cuStreamSynchronize(flavor: Flavor, hStream: sys::CUstream) -> Answer {
    let stream = stream(flavor, hStream)?;
    not_capturing(stream)?;
    drain_with_barriers(stream)
}

/// The legacy stream is done when the blocking streams are, since what comes next would wait for them.
fn drain_with_barriers(stream: &'static Object<Stream>) -> Answer {
    drain(stream)?;
    stream_ordered::after_synchronising(stream.context.ordinal)?;
    if stream.kind == StreamKind::Legacy {
        let others: Vec<_> = lock(&stream.context.streams).iter().copied().filter(|s| s.blocking()).collect();
        for other in others {
            drain(other)?;
        }
    }
    Ok(())
}

pub(super) unsafe fn cuStreamQuery(flavor: Flavor, hStream: sys::CUstream) -> Answer {
    let stream = stream(flavor, hStream)?;
    not_capturing(stream)?;
    let mut done = drained(stream)?;
    if stream.kind == StreamKind::Legacy {
        let others: Vec<_> = lock(&stream.context.streams).iter().copied().filter(|s| s.blocking()).collect();
        for other in others {
            done &= drained(other)?;
        }
    }
    if done { Ok(()) } else { Err(NOT_READY) }
}

pub(super) unsafe fn cuCtxSynchronize() -> Answer {
    synchronise(current()?)
}

pub(super) unsafe fn cuCtxSynchronize_v2(ctx: sys::CUcontext) -> Answer {
    driver()?;
    synchronise(if ctx.is_null() { current()? } else { Object::<Context>::get(ctx)? })
}

pub(crate) fn synchronise(context: &'static Object<Context>) -> Answer {
    context.check()?;
    context_not_capturing(context)?;
    let pending = |s: &Object<Stream>| s.completed.load(Acquire) < s.tail.load(Acquire);
    let busy: Vec<_> = lock(&context.streams).iter().copied().filter(|s| pending(s)).collect();
    drain(context.legacy()?)?;
    for stream in busy {
        drain(stream)?;
    }
    stream_ordered::after_synchronising(context.ordinal)
}

pub(super) unsafe fn cuStreamGetCtx(
    flavor: Flavor,
    hStream: sys::CUstream,
    pctx: *mut sys::CUcontext,
) -> Answer {
    put(pctx, stream(flavor, hStream)?.context.handle())
}

pub(super) unsafe fn cuStreamGetCtx_v2(
    flavor: Flavor,
    hStream: sys::CUstream,
    pCtx: *mut sys::CUcontext,
    pGreenCtx: *mut sys::CUgreenCtx,
) -> Answer {
    put_opt(pGreenCtx, std::ptr::null_mut());
    put(pCtx, stream(flavor, hStream)?.context.handle())
}

pub(super) unsafe fn cuStreamGetDevice(
    flavor: Flavor,
    hStream: sys::CUstream,
    device: *mut CUdevice,
) -> Answer {
    put(device, stream(flavor, hStream)?.context.ordinal)
}

pub(super) unsafe fn cuStreamGetFlags(flavor: Flavor, hStream: sys::CUstream, flags: *mut c_uint) -> Answer {
    put(flags, stream(flavor, hStream)?.flags)
}

pub(super) unsafe fn cuStreamGetPriority(
    flavor: Flavor,
    hStream: sys::CUstream,
    priority: *mut c_int,
) -> Answer {
    put(priority, stream(flavor, hStream)?.priority)
}

pub(super) unsafe fn cuStreamGetId(
    flavor: Flavor,
    hStream: sys::CUstream,
    streamId: *mut c_ulonglong,
) -> Answer {
    put(streamId, stream(flavor, hStream)?.id)
}

pub(super) unsafe fn cuStreamCopyAttributes(
    flavor: Flavor,
    dst: sys::CUstream,
    src: sys::CUstream,
) -> Answer {
    stream(flavor, dst)?;
    stream(flavor, src)?;
    Ok(())
}

pub(super) unsafe fn cuStreamGetAttribute(
    flavor: Flavor,
    hStream: sys::CUstream,
    _attr: c_uint,
    value: *mut sys::CUstreamAttrValue,
) -> Answer {
    stream(flavor, hStream)?;
    if value.is_null() {
        return Err(INVALID_VALUE);
    }
    std::ptr::write_bytes(value, 0, 1);
    Ok(())
}

pub(super) unsafe fn cuStreamSetAttribute(
    flavor: Flavor,
    hStream: sys::CUstream,
    _attr: c_uint,
    param: *const sys::CUstreamAttrValue,
) -> Answer {
    stream(flavor, hStream)?;
    if param.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
}

pub(super) unsafe fn cuStreamAttachMemAsync(
    flavor: Flavor,
    hStream: sys::CUstream,
    _dptr: CUdeviceptr,
    _length: usize,
    _flags: c_uint,
) -> Answer {
    stream(flavor, hStream)?;
    Ok(())
}

// --- Events ----------------------------------------------------------------------------------------

/// The last record of an event.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    sequence: u64,
    stream: u32,
    position: u64,
}

/// A capture, and the nodes that what follows depends on.
type CapturePoint = (Arc<Session>, Vec<&'static Object<GraphNode>>);

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) slot: u32,
    pub(crate) flags: u32,
    gpu: u32,
    /// [`Context::family`] of the one it was made in.
    family: u64,
    sequence: AtomicU64,
    recorded: Mutex<Option<Recorded>>,
    /// The point of a capture it was last recorded at.
    pub(crate) captured: Mutex<Option<CapturePoint>>,
    is_captured: AtomicBool,
    /// Opened from another process's handle.
    pub(crate) imported: bool,
}

impl Kind for Event {
    const MAGIC: u64 = 0x6773_6861_7265_4556;
}

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

impl Event {
    fn create(context: &Context, flags: u32) -> Result<&'static Object<Self>, CUresult> {
        let driver = driver()?;
        let (slot, base) = driver.device.with(|engine, _| engine.open_event(driver.process))?;
        Ok(Self::with_slot(slot, base, context.gpu, context.family, flags, false))
    }

    pub(crate) fn with_slot(
        slot: u32,
        base: u64,
        gpu: u32,
        family: u64,
        flags: u32,
        imported: bool,
    ) -> &'static Object<Self> {
        Object::create(Self {
            slot,
            flags,
            gpu,
            family,
            sequence: AtomicU64::new(base),
            recorded: Mutex::new(None),
            captured: Mutex::new(None),
            is_captured: AtomicBool::new(false),
            imported,
        })
    }

    pub(crate) fn gpu(&self) -> u32 {
        self.gpu
    }

    /// Queues the event's next record.
    pub(crate) fn record(&self, stream: &'static Object<Stream>) -> Answer {
        let driver = driver()?;
        if (self.gpu, self.family) != (stream.context.gpu, stream.context.family) {
            return Err(INVALID_HANDLE);
        }
        let mut recorded = lock(&self.recorded);
        let sequence = if self.flags & INTERPROCESS != 0 {
            driver.device.open_part().events[self.slot as usize].issued.load(Acquire) + 1
        } else {
            self.sequence.fetch_add(1, AcqRel) + 1
        };
        let position = push(stream, Work::Record { event: self.slot, sequence })?;
        *recorded = Some(Recorded { sequence, stream: stream.slot, position });
        Ok(())
    }

    /// Sequence number of the last record, of any process for interprocess events.
    fn last(&self) -> Result<u64, CUresult> {
        let driver = driver()?;
        if self.flags & INTERPROCESS != 0 {
            return Ok(driver.device.open_part().events[self.slot as usize].issued.load(Acquire));
        }
        Ok(lock(&self.recorded).map_or(0, |r| r.sequence))
    }

    /// Makes a stream wait for the last record.
    pub(crate) fn wait_on(&self, stream: &'static Object<Stream>) -> Answer {
        if self.flags & INTERPROCESS != 0 {
            let sequence = self.last()?;
            if sequence > 0 {
                push(stream, Work::WaitEvent { event: self.slot, sequence })?;
            }
            return Ok(());
        }
        let recorded = *lock(&self.recorded);
        if let Some(r) = recorded
            && driver()?.device.completed_now(r.stream) <= r.position
        {
            push(stream, Work::Wait { stream: r.stream, position: r.position })?;
        }
        Ok(())
    }

    /// An error while its GPU is lost.
    fn check(&self) -> Answer {
        if driver()?.device.is_lost(self.gpu) { Err(GPU_LOST) } else { Ok(()) }
    }

    fn reached(&self) -> Result<bool, CUresult> {
        self.check()?;
        let driver = driver()?;
        let last = self.last()?;
        let done = &driver.device.open_part().events[self.slot as usize].done;
        if done.load(Acquire) >= last {
            return Ok(true);
        }
        driver.device.with(|_, _| ());
        Ok(done.load(Acquire) >= last)
    }

    fn not_captured(&self) -> Answer {
        if self.is_captured.load(Acquire) {
            if let Some((session, _)) = lock(&self.captured).as_ref() {
                session.invalid.store(true, Release);
            }
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
        }
        Ok(())
    }
}

pub(super) unsafe fn cuEventCreate(phEvent: *mut sys::CUevent, Flags: c_uint) -> Answer {
    let context = current()?;
    if Flags > 7 || Flags & INTERPROCESS != 0 && Flags & DISABLE_TIMING == 0 {
        return Err(INVALID_VALUE);
    }
    put(phEvent, Event::create(context, Flags)?.handle())
}

pub(super) unsafe fn cuEventDestroy_v2(hEvent: sys::CUevent) -> Answer {
    let driver = driver()?;
    let event = Object::<Event>::get(hEvent)?;
    if !event.retire() {
        return Err(INVALID_HANDLE);
    }
    if !event.imported {
        driver.device.with(|engine, _| engine.close_event(event.slot));
    }
    Ok(())
}

pub(super) unsafe fn cuEventDestroy(hEvent: sys::CUevent) -> Answer {
    cuEventDestroy_v2(hEvent)
}

pub(super) unsafe fn cuEventRecord(flavor: Flavor, hEvent: sys::CUevent, hStream: sys::CUstream) -> Answer {
    cuEventRecordWithFlags(flavor, hEvent, hStream, 0)
}

pub(super) unsafe fn cuEventRecordWithFlags(
    flavor: Flavor,
    hEvent: sys::CUevent,
    hStream: sys::CUstream,
    flags: c_uint,
) -> Answer {
    driver()?;
    let event = Object::<Event>::get(hEvent)?;
    let stream = stream(flavor, hStream)?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    legacy_not_implied(stream)?;
    calls::event();
    if stream.capturing.load(Acquire) {
        if flags == 1 {
            // An external record is a node of the graph.
            return graph::add_captured(stream, Node::Record(event));
        }
        submit(stream, Node::Record(event))?;
        event.is_captured.store(true, Release);
        return Ok(());
    }
    event.record(stream)?;
    if event.is_captured.swap(false, AcqRel) {
        *lock(&event.captured) = None;
    }
    Ok(())
}

pub(super) unsafe fn cuEventQuery(hEvent: sys::CUevent) -> Answer {
    driver()?;
    let event = Object::<Event>::get(hEvent)?;
    event.not_captured()?;
    not_while_capturing()?;
    if event.reached()? { Ok(()) } else { Err(NOT_READY) }
}

pub(super) unsafe fn cuEventSynchronize(hEvent: sys::CUevent) -> Answer {
    let driver = driver()?;
    let event = Object::<Event>::get(hEvent)?;
    event.not_captured()?;
    not_while_capturing()?;
    let recorded = *lock(&event.recorded);
    if let (Some(r), false) = (recorded, event.flags & INTERPROCESS != 0) {
        driver.device.wait(driver.process, r.stream, r.position);
        return event.check();
    }
    let mut pause = 5_000;
    while !event.reached()? {
        sleep_until(now_ns() + pause);
        pause = (pause * 2).min(200_000);
    }
    Ok(())
}

pub(super) unsafe fn cuEventElapsedTime(
    pMilliseconds: *mut f32,
    hStart: sys::CUevent,
    hEnd: sys::CUevent,
) -> Answer {
    let driver = driver()?;
    let (start, end) = (Object::<Event>::get(hStart)?, Object::<Event>::get(hEnd)?);
    start.not_captured()?;
    end.not_captured()?;
    if (start.flags | end.flags) & DISABLE_TIMING != 0 || (start.gpu, start.family) != (end.gpu, end.family) {
        return Err(INVALID_HANDLE);
    }
    if lock(&start.recorded).is_none() || lock(&end.recorded).is_none() {
        return Err(INVALID_HANDLE);
    }
    if !start.reached()? || !end.reached()? {
        return Err(NOT_READY);
    }
    let time = |event: &Event| driver.device.open_part().events[event.slot as usize].time.load(Acquire);
    let ns = time(end).cast_signed() - time(start).cast_signed();
    put(pMilliseconds, (ns as f64 / 1e6) as f32)
}

pub(super) unsafe fn cuEventElapsedTime_v2(
    pMilliseconds: *mut f32,
    hStart: sys::CUevent,
    hEnd: sys::CUevent,
) -> Answer {
    cuEventElapsedTime(pMilliseconds, hStart, hEnd)
}

pub(super) unsafe fn cuStreamWaitEvent(
    flavor: Flavor,
    hStream: sys::CUstream,
    hEvent: sys::CUevent,
    Flags: c_uint,
) -> Answer {
    driver()?;
    let stream = stream(flavor, hStream)?;
    let event = Object::<Event>::get(hEvent)?;
    if Flags > 1 {
        return Err(INVALID_VALUE);
    }
    legacy_not_implied(stream)?;
    calls::event();
    if Flags == 1 && stream.capturing.load(Acquire) {
        return graph::add_captured(stream, Node::Wait(event));
    }
    if event.is_captured.load(Acquire) && join_capture(stream, event)? {
        return Ok(());
    }
    submit(stream, Node::Wait(event))
}

pub(super) unsafe fn cuCtxRecordEvent(hCtx: sys::CUcontext, hEvent: sys::CUevent) -> Answer {
    let context = Object::<Context>::get(hCtx)?;
    let event = Object::<Event>::get(hEvent)?;
    let legacy = context.legacy()?;
    for stream in context.all_streams() {
        let tail = stream.tail.load(Acquire);
        if stream.id != legacy.id && !drained(stream)? {
            push(legacy, Work::Wait { stream: stream.slot, position: tail - 1 })?;
        }
    }
    event.record(legacy)
}

pub(super) unsafe fn cuCtxWaitEvent(hCtx: sys::CUcontext, hEvent: sys::CUevent) -> Answer {
    let context = Object::<Context>::get(hCtx)?;
    let event = Object::<Event>::get(hEvent)?;
    for stream in context.all_streams() {
        event.wait_on(stream)?;
    }
    Ok(())
}

// --- Host functions --------------------------------------------------------------------------------

pub(super) unsafe fn cuLaunchHostFunc(
    flavor: Flavor,
    hStream: sys::CUstream,
    fn_: sys::CUhostFn,
    userData: *mut c_void,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    if fn_.is_none() {
        return Err(INVALID_VALUE);
    }
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, Node::Host { function: fn_, data: userData as usize })
}

pub(super) unsafe fn cuLaunchHostFunc_v2(
    flavor: Flavor,
    hStream: sys::CUstream,
    fn_: sys::CUhostFn,
    userData: *mut c_void,
    _syncMode: c_uint,
) -> Answer {
    cuLaunchHostFunc(flavor, hStream, fn_, userData)
}

pub(super) unsafe fn cuStreamAddCallback(
    flavor: Flavor,
    hStream: sys::CUstream,
    callback: sys::CUstreamCallback,
    userData: *mut c_void,
    flags: c_uint,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    if callback.is_none() || flags != 0 {
        return Err(INVALID_VALUE);
    }
    not_capturing(stream)?;
    submit(stream, Node::Callback { function: callback, stream: hStream as usize, data: userData as usize })
}

// --- Memory operations -----------------------------------------------------------------------------

/// A wait for, or a write of, a word in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemOp {
    Wait { address: u64, value: u64, how: u32, wide: bool },
    Write { address: u64, value: u64, wide: bool },
}

impl MemOp {
    /// `false`: the condition does not hold yet.
    fn step(self) -> bool {
        // SAFETY: the address was given to the driver as a word that stays valid until the operation has run.
        unsafe {
            match self {
                Self::Write { address, value, wide: true } => (address as *mut u64).write_volatile(value),
                Self::Write { address, value, wide: false } => {
                    (address as *mut u32).write_volatile(value as u32);
                }
                Self::Wait { address, value, how, wide } => {
                    let now = if wide {
                        (address as *const u64).read_volatile()
                    } else {
                        u64::from((address as *const u32).read_volatile())
                    };
                    let ahead = if wide {
                        now.wrapping_sub(value).cast_signed() >= 0
                    } else {
                        (now as u32).wrapping_sub(value as u32).cast_signed() >= 0
                    };
                    return match how & 3 {
                        0 => ahead,
                        1 => now == value,
                        2 => now & value != 0,
                        _ => !(now | value) & if wide { u64::MAX } else { 0xffff_ffff } != 0,
                    };
                }
            }
        }
        true
    }
}

pub(crate) fn run_mem_ops(stream: &'static Object<Stream>, ops: Vec<MemOp>) -> Answer {
    let mut left = std::collections::VecDeque::from(ops);
    push_host(
        stream,
        Box::new(move || {
            while let Some(op) = left.front() {
                if !op.step() {
                    return false;
                }
                left.pop_front();
            }
            true
        }),
    )?;
    Ok(())
}

fn mem_op(flavor: Flavor, handle: sys::CUstream, op: MemOp, alignment: u64) -> Answer {
    // SAFETY: the handle is the C caller's.
    let stream = unsafe { stream(flavor, handle)? };
    let (MemOp::Wait { address, .. } | MemOp::Write { address, .. }) = op;
    if address == 0 || !address.is_multiple_of(alignment) {
        return Err(INVALID_VALUE);
    }
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, Node::MemOps(vec![op]))
}

macro_rules! mem_ops {
    ($($wait:ident $write:ident $value:ident $wide:literal $alignment:literal)*) => {$(
        pub(super) unsafe fn $wait(flavor: Flavor, stream: sys::CUstream, addr: CUdeviceptr, value: $value, flags: c_uint) -> Answer {
            mem_op(flavor, stream, MemOp::Wait { address: addr, value: u64::from(value), how: flags, wide: $wide }, $alignment)
        }
        pub(super) unsafe fn $write(flavor: Flavor, stream: sys::CUstream, addr: CUdeviceptr, value: $value, _flags: c_uint) -> Answer {
            mem_op(flavor, stream, MemOp::Write { address: addr, value: u64::from(value), wide: $wide }, $alignment)
        }
    )*};
}
mem_ops! {
    wait32 write32 u32 false 4
    wait64 write64 u64 true 8
}

pub(super) unsafe fn cuStreamWaitValue32(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> Answer {
    wait32(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWaitValue32_v2(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> Answer {
    wait32(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWaitValue64(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> Answer {
    wait64(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWaitValue64_v2(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> Answer {
    wait64(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWriteValue32(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> Answer {
    write32(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWriteValue32_v2(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> Answer {
    write32(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWriteValue64(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> Answer {
    write64(flavor, stream, addr, value, flags)
}

pub(super) unsafe fn cuStreamWriteValue64_v2(
    flavor: Flavor,
    stream: sys::CUstream,
    addr: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> Answer {
    write64(flavor, stream, addr, value, flags)
}

/// `CUstreamBatchMemOpParams`: a union of 48 bytes whose first word is the operation.
pub(crate) unsafe fn read_mem_ops(list: *const c_void, count: u32) -> Result<Vec<MemOp>, CUresult> {
    if list.is_null() || count > 256 {
        return Err(INVALID_VALUE);
    }
    let mut ops = Vec::new();
    for i in 0..count as usize {
        let at = list.cast::<u8>().add(i * 48);
        let kind = at.cast::<u32>().read_unaligned();
        let address = at.add(8).cast::<u64>().read_unaligned();
        let value = at.add(16).cast::<u64>().read_unaligned();
        let flags = at.add(24).cast::<u32>().read_unaligned();
        match kind {
            1 => ops.push(MemOp::Wait { address, value: value & 0xffff_ffff, how: flags, wide: false }),
            4 => ops.push(MemOp::Wait { address, value, how: flags, wide: true }),
            2 => ops.push(MemOp::Write { address, value, wide: false }),
            5 => ops.push(MemOp::Write { address, value, wide: true }),
            // Flush of remote writes, barrier: nothing to do here.
            3 | 6 => {}
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(ops)
}

pub(super) unsafe fn cuStreamBatchMemOp_v2(
    flavor: Flavor,
    hStream: sys::CUstream,
    count: c_uint,
    paramArray: *mut sys::CUstreamBatchMemOpParams,
    _flags: c_uint,
) -> Answer {
    let stream = stream(flavor, hStream)?;
    let ops = read_mem_ops(paramArray.cast(), count)?;
    legacy_not_implied(stream)?;
    submit(stream, Node::MemOps(ops))
}

pub(super) unsafe fn cuStreamBatchMemOp(
    flavor: Flavor,
    hStream: sys::CUstream,
    count: c_uint,
    paramArray: *mut sys::CUstreamBatchMemOpParams,
    flags: c_uint,
) -> Answer {
    cuStreamBatchMemOp_v2(flavor, hStream, count, paramArray, flags)
}
