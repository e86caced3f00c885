//! Streams, events, host functions and memory operations on streams.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::base::*;
use super::capture::{
    Session, context_not_capturing, join_capture, legacy_not_implied, not_capturing, not_while_capturing,
};
use super::graph::{GraphNode, Node};
use super::*;
use crate::sim::Work;
use crate::sim::device_file::{now_ns, sleep_until};

// --- Streams ---------------------------------------------------------------------------------------

pub(crate) fn create_stream(context: Ref<Context>, flags: u32, priority: i32) -> Res<Ref<Stream>> {
    invalid_if(flags > 1)?;
    let slot = context.device.open_stream()?;
    Ok(Stream::create(context, slot, flags, priority.clamp(-5, 0), StreamKind::Created))
}

entry!(cuStreamCreate, |phStream, Flags| put(phStream, create_stream(current()?, Flags, 0)?.handle()));

entry!(cuStreamCreateWithPriority, |phStream, flags, priority| {
    put(phStream, create_stream(current()?, flags, priority)?.handle())
});

entry!(cuStreamDestroy_v2 | cuStreamDestroy, driver, |hStream| {
    refuse_if(hStream as usize <= 2, INVALID_HANDLE)?;
    let stream = Object::<Stream>::get(hStream)?;
    refuse_if(!stream.retire(), INVALID_HANDLE)?;
    lock(&stream.context.streams).retain(|s| s.id != stream.id);
    driver.device.with(|engine, now| engine.close_stream(now, stream.slot));
});

entry!(cuStreamSynchronize, |stream: Stream| {
    not_capturing(stream)?;
    drain_with_barriers(stream)
});

/// The legacy stream is done when the blocking streams are, since what comes next would wait for them.
fn drain_with_barriers(stream: Ref<Stream>) -> Answer {
    drain(stream)?;
    stream_ordered::after_synchronising(stream.context.device)?;
    if stream.kind == StreamKind::Legacy {
        let others: Vec<_> = lock(&stream.context.streams).iter().copied().filter(|s| s.blocking()).collect();
        for other in others {
            drain(other)?;
        }
    }
    Ok(())
}

entry!(cuStreamQuery, |stream: Stream| {
    not_capturing(stream)?;
    let mut done = drained(stream)?;
    if stream.kind == StreamKind::Legacy {
        let others: Vec<_> = lock(&stream.context.streams).iter().copied().filter(|s| s.blocking()).collect();
        for other in others {
            done &= drained(other)?;
        }
    }
    if done { Ok(()) } else { Err(NOT_READY) }
});

entry!(cuCtxSynchronize, context, || synchronise(context));

entry!(cuCtxSynchronize_v2, |context: OrCurrent| synchronise(context));

pub(crate) fn synchronise(context: Ref<Context>) -> Answer {
    context.check()?;
    context_not_capturing(context)?;
    let pending = |s: &Object<Stream>| s.completed.load(Acquire) < s.tail.load(Acquire);
    let busy: Vec<_> = lock(&context.streams).iter().copied().filter(|s| pending(s)).collect();
    drain(context.legacy()?)?;
    for stream in busy {
        drain(stream)?;
    }
    stream_ordered::after_synchronising(context.device)
}

entry!(cuStreamGetCtx, |hStream: Stream, pctx| put(pctx, hStream.context.handle()));

entry!(cuStreamGetCtx_v2, |hStream: Stream, pCtx, pGreenCtx| {
    put_opt(pGreenCtx, std::ptr::null_mut());
    put(pCtx, hStream.context.handle())
});

entry!(cuStreamGetDevice, |hStream: Stream, device| put(device, hStream.context.device.ordinal));
entry!(cuStreamGetFlags, |hStream: Stream, flags| put(flags, hStream.flags));
entry!(cuStreamGetPriority, |hStream: Stream, priority| put(priority, hStream.priority));
entry!(cuStreamGetId, |hStream: Stream, streamId| put(streamId, hStream.id));

entry!(cuStreamCopyAttributes, |_dst: Stream, _src: Stream| ());

entry!(cuStreamGetAttribute, |_hStream: Stream, _, value| {
    invalid_if(value.is_null())?;
    std::ptr::write_bytes(value, 0, 1);
});

entry!(cuStreamSetAttribute, |_hStream: Stream, _, param| {
    if param.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
});

entry!(cuStreamAttachMemAsync, |_stream: Stream, _, _, _| ());

// --- Events ----------------------------------------------------------------------------------------

/// The last record of an event.
#[derive(Clone, Copy)]
struct Recorded {
    sequence: u64,
    stream: u32,
    position: u64,
}

/// A capture, and the nodes that what follows depends on.
type CapturePoint = (Arc<Session>, Vec<Ref<GraphNode>>);

/// An event.
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
    fn create(context: &Context, flags: u32) -> Res<Ref<Self>> {
        let driver = driver()?;
        let (slot, base) = driver.device.with(|engine, _| engine.open_event(driver.process))?;
        Ok(Self::with_slot(slot, base, context.device.gpu, context.family, flags, false))
    }

    pub(crate) fn with_slot(
        slot: u32,
        base: u64,
        gpu: u32,
        family: u64,
        flags: u32,
        imported: bool,
    ) -> Ref<Self> {
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
    pub(crate) fn record(&self, stream: Ref<Stream>) -> Answer {
        let driver = driver()?;
        refuse_if(
            (self.gpu, self.family) != (stream.context.device.gpu, stream.context.family),
            INVALID_HANDLE,
        )?;
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
    fn last(&self) -> Res<u64> {
        let driver = driver()?;
        if self.flags & INTERPROCESS != 0 {
            return Ok(driver.device.open_part().events[self.slot as usize].issued.load(Acquire));
        }
        Ok(lock(&self.recorded).map_or(0, |r| r.sequence))
    }

    /// Makes a stream wait for the last record.
    pub(crate) fn wait_on(&self, stream: Ref<Stream>) -> Answer {
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

    fn reached(&self) -> Res<bool> {
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

entry!(cuEventCreate, context, |phEvent, Flags| {
    invalid_if(Flags > 7 || Flags & INTERPROCESS != 0 && Flags & DISABLE_TIMING == 0)?;
    put(phEvent, Event::create(context, Flags)?.handle())
});

entry!(cuEventDestroy_v2 | cuEventDestroy, driver, |event: Event| {
    refuse_if(!event.retire(), INVALID_HANDLE)?;
    if !event.imported {
        driver.device.with(|engine, _| engine.close_event(event.slot));
    }
});

unsafe fn record(event: Ref<Event>, stream: Ref<Stream>, flags: c_uint) -> Answer {
    invalid_if(flags > 1)?;
    legacy_not_implied(stream)?;
    calls::event();
    if stream.capturing.load(Acquire) {
        if flags == 1 {
            // An external record is a node of the graph.
            return capture::add_captured(stream, Node::Record(event));
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

entry!(cuEventRecord, driver, |event: Event, stream: Stream| record(event, stream, 0));
entry!(cuEventRecordWithFlags, driver, |event: Event, stream: Stream, flags| record(event, stream, flags));

entry!(cuEventQuery, driver, |event: Event| {
    event.not_captured()?;
    not_while_capturing()?;
    if event.reached()? { Ok(()) } else { Err(NOT_READY) }
});

entry!(cuEventSynchronize, driver, |event: Event| {
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
});

entry!(cuEventElapsedTime | cuEventElapsedTime_v2, driver, |pMilliseconds, hStart, hEnd| {
    let (start, end) = (Object::<Event>::get(hStart)?, Object::<Event>::get(hEnd)?);
    start.not_captured()?;
    end.not_captured()?;
    refuse_if(
        (start.flags | end.flags) & DISABLE_TIMING != 0 || (start.gpu, start.family) != (end.gpu, end.family),
        INVALID_HANDLE,
    )?;
    refuse_if(lock(&start.recorded).is_none() || lock(&end.recorded).is_none(), INVALID_HANDLE)?;
    refuse_if(!start.reached()? || !end.reached()?, NOT_READY)?;
    let time = |event: &Event| driver.device.open_part().events[event.slot as usize].time.load(Acquire);
    let ns = time(end).cast_signed() - time(start).cast_signed();
    put(pMilliseconds, (ns as f64 / 1e6) as f32)
});

entry!(cuStreamWaitEvent, driver, |stream: Stream, event: Event, Flags| {
    invalid_if(Flags > 1)?;
    legacy_not_implied(stream)?;
    calls::event();
    if Flags == 1 && stream.capturing.load(Acquire) {
        return capture::add_captured(stream, Node::Wait(event));
    }
    if event.is_captured.load(Acquire) && join_capture(stream, event)? {
        return Ok(());
    }
    submit(stream, Node::Wait(event))
});

entry!(cuCtxRecordEvent | cuGreenCtxRecordEvent, |context: Context, event: Event| {
    let legacy = context.legacy()?;
    for stream in context.all_streams() {
        let tail = stream.tail.load(Acquire);
        if stream.id != legacy.id && !drained(stream)? {
            push(legacy, Work::Wait { stream: stream.slot, position: tail - 1 })?;
        }
    }
    event.record(legacy)
});

entry!(cuCtxWaitEvent | cuGreenCtxWaitEvent, |context: Context, event: Event| {
    for stream in context.all_streams() {
        event.wait_on(stream)?;
    }
});

// --- Host functions --------------------------------------------------------------------------------

fn launch_host(stream: Ref<Stream>, function: sys::CUhostFn, data: *mut c_void) -> Answer {
    invalid_if(function.is_none())?;
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, Node::Host { function, data: data as usize })
}

entry!(cuLaunchHostFunc, |hStream: Stream, fn_, data| launch_host(hStream, fn_, data));
entry!(cuLaunchHostFunc_v2, |hStream: Stream, fn_, data, _| launch_host(hStream, fn_, data));

entry!(cuStreamAddCallback, |named, function, data, flags| {
    let stream = stream(named)?;
    invalid_if(function.is_none() || flags != 0)?;
    not_capturing(stream)?;
    submit(stream, Node::Callback { function, stream: named.1 as usize, data: data as usize })
});

// --- Memory operations -----------------------------------------------------------------------------

/// A wait for, or a write of, a word in memory.
#[derive(Clone, Copy)]
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

pub(crate) fn run_mem_ops(stream: Ref<Stream>, ops: Vec<MemOp>) -> Answer {
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

fn mem_op(stream: Ref<Stream>, op: MemOp, alignment: u64) -> Answer {
    let (MemOp::Wait { address, .. } | MemOp::Write { address, .. }) = op;
    invalid_if(address == 0 || !address.is_multiple_of(alignment))?;
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, Node::MemOps(vec![op]))
}

entry!(cuStreamWaitValue32 | cuStreamWaitValue32_v2, |stream: Stream, address, value, how| {
    mem_op(stream, MemOp::Wait { address, value: value.into(), how, wide: false }, 4)
});

entry!(cuStreamWaitValue64 | cuStreamWaitValue64_v2, |stream: Stream, address, value, how| {
    mem_op(stream, MemOp::Wait { address, value, how, wide: true }, 8)
});

entry!(cuStreamWriteValue32 | cuStreamWriteValue32_v2, |stream: Stream, address, value, _| {
    mem_op(stream, MemOp::Write { address, value: value.into(), wide: false }, 4)
});

entry!(cuStreamWriteValue64 | cuStreamWriteValue64_v2, |stream: Stream, address, value, _| {
    mem_op(stream, MemOp::Write { address, value, wide: true }, 8)
});

/// `CUstreamBatchMemOpParams`: a union of 48 bytes whose first word is the operation.
pub(crate) unsafe fn read_mem_ops(list: *const c_void, count: u32) -> Res<Vec<MemOp>> {
    invalid_if(list.is_null() || count > 256)?;
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

entry!(cuStreamBatchMemOp_v2 | cuStreamBatchMemOp, |stream: Stream, count, paramArray, _| {
    let ops = read_mem_ops(paramArray.cast(), count)?;
    legacy_not_implied(stream)?;
    submit(stream, Node::MemOps(ops))
});
