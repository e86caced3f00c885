//! Streams, events, host functions and memory operations on streams.

use std::collections::VecDeque;

use super::capture::{
    Point, context_not_capturing, legacy_not_implied, not_capturing, not_while_capturing, point, submit,
    wait_for,
};
use super::tasks::Task;
use super::*;
use crate::sim::layout::OpenEvent;

// --- Streams ---------------------------------------------------------------------------------------

pub(crate) fn create_stream(context: Ref<Context>, flags: u32, priority: i32) -> Res<Ref<Stream>> {
    invalid_if(flags > 1)?;
    Stream::create(context, flags, priority.clamp(-5, 0), false)
}

entry!(cuStreamCreateWithPriority, context, |out, flags, priority| {
    put(out, create_stream(context, flags, priority)?.handle())
});
alias!(cuStreamCreate(out, flags) = cuStreamCreateWithPriority(out, flags, 0));

entry!(cuStreamDestroy_v2 | cuStreamDestroy, driver, |hStream| {
    refuse_if(hStream as usize <= 2, INVALID_HANDLE)?;
    let stream = Object::<Stream>::get(hStream)?;
    refuse_if(!stream.retire(), INVALID_HANDLE)?;
    lock(&stream.context.streams).retain(|s| s.id != stream.id);
    driver.device.with(|engine, now| engine.close_stream(now, stream.slot));
});

/// The streams for which the legacy stream waits, if `stream` is the legacy stream.
fn barriers(stream: Ref<Stream>) -> Vec<Ref<Stream>> {
    if stream.legacy { stream.context.blocking() } else { Vec::new() }
}

// The legacy stream is done when the blocking streams are, since its next work would wait for them.
entry!(cuStreamSynchronize, |stream: Stream| {
    not_capturing(stream)?;
    drain(stream)?;
    memory_pool::after_synchronising(stream.context.device)?;
    barriers(stream).into_iter().try_for_each(drain)
});

entry!(cuStreamQuery, |stream: Stream| {
    not_capturing(stream)?;
    for each in barriers(stream).into_iter().chain([stream]) {
        refuse_if(!drained(each)?, NOT_READY)?;
    }
});

/// Waits for the work of a context.
pub(crate) fn finish(context: Ref<Context>) -> Answer {
    let pending = |s: &Object<Stream>| s.completed.load(Acquire) < s.tail.load(Acquire);
    let busy: Vec<_> = lock(&context.streams).iter().copied().filter(|s| pending(s)).collect();
    drain(context.legacy()?)?;
    busy.into_iter().try_for_each(drain)
}

entry!(cuCtxSynchronize_v2, |context: OrCurrent| {
    context.check()?;
    context_not_capturing(context)?;
    finish(context)?;
    memory_pool::after_synchronising(context.device)
});
entry!(cuCtxSynchronize, || symbol::cuCtxSynchronize_v2::call((null_mut(),)));

entry!(cuStreamGetCtx_v2, |hStream: Stream, pCtx, green| {
    put_opt::<sys::CUgreenCtx>(green, null_mut());
    put(pCtx, hStream.context.handle())
});
alias!(cuStreamGetCtx(stream, context) = cuStreamGetCtx_v2(stream, context, null_mut()));

entry!(cuStreamGetDevice, |hStream: Stream, device| put(device, hStream.context.device.ordinal));
entry!(cuStreamGetFlags, |hStream: Stream, flags| put(flags, hStream.flags));
entry!(cuStreamGetPriority, |hStream: Stream, priority| put(priority, hStream.priority));
entry!(cuStreamGetId, |hStream: Stream, streamId| put(streamId, hStream.id));

entry!(cuStreamCopyAttributes, |_dst: Stream, _src: Stream| ());

entry!(cuStreamGetAttribute, |_stream: Stream, _, value: Given| std::ptr::write_bytes(value, 0, 1));

entry!(cuStreamSetAttribute, |_stream: Stream, _, _param: Given| ());

entry!(cuStreamAttachMemAsync, |_stream: Stream, _, _, _| ());

// --- Events ----------------------------------------------------------------------------------------

/// The last record of an event.
#[derive(Clone, Copy)]
struct Recorded {
    sequence: u64,
    stream: u32,
    position: u64,
}

pub(crate) struct Event {
    pub(crate) slot: u32,
    pub(crate) flags: u32,
    /// [`Context::home`] of its context.
    home: (u32, u64),
    recorded: Mutex<Option<Recorded>>,
    /// The point of a capture at its last record.
    captured: Mutex<Option<Point>>,
    /// Opened from another process's handle.
    pub(crate) imported: bool,
}

object!(Event, b"gshareEV");

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

impl Event {
    fn create(context: &Context, flags: u32) -> Res<Ref<Self>> {
        let driver = driver()?;
        let slot = driver.device.with(|engine, _| engine.open_event(driver.process))?;
        Ok(Self::with_slot(slot, context.home(), flags, false))
    }

    pub(crate) fn with_slot(slot: u32, home: (u32, u64), flags: u32, imported: bool) -> Ref<Self> {
        Object::create(Self {
            slot,
            flags,
            home,
            recorded: Mutex::new(None),
            captured: Mutex::new(None),
            imported,
        })
    }

    pub(crate) fn gpu(&self) -> u32 {
        self.home.0
    }

    /// The event's place in the device file.
    fn open(&self) -> Res<&'static OpenEvent> {
        Ok(&driver()?.device.open_part().events[self.slot as usize])
    }

    /// Queues the event's next record.
    pub(crate) fn record(&self, stream: Ref<Stream>) -> Answer {
        let open = self.open()?;
        refuse_if(self.home != stream.context.home(), INVALID_HANDLE)?;
        let mut recorded = lock(&self.recorded);
        let sequence = open.issued.load(Acquire) + 1;
        let position = push(stream, Work::Record { event: self.slot, sequence })?;
        *recorded = Some(Recorded { sequence, stream: stream.slot, position });
        Ok(())
    }

    /// Sequence number of the last record, of any process for interprocess events.
    fn last(&self) -> Res<u64> {
        let open = self.open()?;
        if self.flags & INTERPROCESS != 0 {
            return Ok(open.issued.load(Acquire));
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
        let Some(Recorded { stream: other, position, .. }) = recorded else { return Ok(()) };
        if driver()?.device.completed_now(other) <= position {
            push(stream, Work::Wait { stream: other, position })?;
        }
        Ok(())
    }

    /// An error while its GPU is lost.
    fn check(&self) -> Answer {
        refuse_if(driver()?.device.is_lost(self.gpu()), GPU_LOST)
    }

    fn reached(&self) -> Res<bool> {
        self.check()?;
        let last = self.last()?;
        let done = || self.open().map(|open| open.done.load(Acquire) >= last);
        if !done()? {
            driver()?.device.with(|_, _| ());
        }
        done()
    }

    fn not_captured(&self) -> Answer {
        let captured = lock(&self.captured);
        captured.as_ref().map_or(Ok(()), |(session, _)| session.spoil(CUresult::CUDA_ERROR_CAPTURED_EVENT))
    }
}

/// A record of an event.
pub(crate) struct Record(pub(crate) Ref<Event>);

/// A wait for an event.
pub(crate) struct Wait(pub(crate) Ref<Event>);

task!(Wait, 6, |Wait(event), stream| event.wait_on(stream));
task!(Record, 7, |Record(event), stream| event.record(stream));

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

entry!(cuEventRecordWithFlags, driver, |event: Event, stream: Stream, flags| {
    invalid_if(flags > 1)?;
    legacy_not_implied(stream)?;
    calls::event();
    let captures = stream.capturing.load(Acquire);
    if captures && flags == 1 {
        // An external record is a node of the graph.
        return submit(stream, Record(event));
    }
    // In a capture the event stands for this point, and nothing runs.
    let point = if captures { Some(point(stream)?) } else { None };
    if !captures {
        event.record(stream)?;
    }
    *lock(&event.captured) = point;
});
alias!(cuEventRecord(event, stream) = cuEventRecordWithFlags(event, stream, 0));

entry!(cuEventQuery, driver, |event: Event| {
    event.not_captured()?;
    not_while_capturing()?;
    refuse_if(!event.reached()?, NOT_READY)
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

entry!(cuEventElapsedTime | cuEventElapsedTime_v2, driver, |milliseconds, start: Event, end: Event| {
    start.not_captured()?;
    end.not_captured()?;
    refuse_if((start.flags | end.flags) & DISABLE_TIMING != 0 || start.home != end.home, INVALID_HANDLE)?;
    refuse_if(lock(&start.recorded).is_none() || lock(&end.recorded).is_none(), INVALID_HANDLE)?;
    refuse_if(!start.reached()? || !end.reached()?, NOT_READY)?;
    let time = |event: &Event| event.open().map(|open| open.time.load(Acquire).cast_signed());
    put(milliseconds, ((time(end)? - time(start)?) as f64 / 1e6) as f32)
});

entry!(cuStreamWaitEvent, driver, |stream: Stream, event: Event, Flags| {
    invalid_if(Flags > 1)?;
    legacy_not_implied(stream)?;
    calls::event();
    let external = Flags == 1 && stream.capturing.load(Acquire);
    let captured = lock(&event.captured).clone();
    if external || !wait_for(stream, captured)? {
        submit(stream, Wait(event))?;
    }
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

/// A call of a program's function with the program's argument.
pub(crate) struct HostCall {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: usize,
}

task!(HostCall, 3, |&HostCall { function, data }, stream| push_call(stream, move || {
    // SAFETY: by the contract of cuLaunchHostFunc.
    unsafe { function(data as *mut c_void) };
}));

entry!(cuLaunchHostFunc, |stream: Stream, function, data| {
    let function = function.ok_or(INVALID_VALUE)?;
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, HostCall { function, data: data as usize })
});
alias!(cuLaunchHostFunc_v2(stream, function, data, _) = cuLaunchHostFunc(stream, function, data));

entry!(cuStreamAddCallback, |named, function, data, flags| {
    let stream = named.find()?;
    invalid_if(flags != 0)?;
    let function = function.ok_or(INVALID_VALUE)?;
    not_capturing(stream)?;
    let (handle, data) = (named.1 as usize, data as usize);
    // SAFETY: by the contract of this call.
    push_call(stream, move || unsafe {
        function(handle as sys::CUstream, sys::CUresult::CUDA_SUCCESS, data as *mut c_void);
    })
});

// --- Memory operations -----------------------------------------------------------------------------

/// A write of a word in memory, or a wait for a value in it.
#[derive(Clone, Copy)]
struct MemOp {
    address: u64,
    value: u64,
    /// 8 bytes instead of 4.
    wide: bool,
    /// Waits until this comparison of the word with the value holds.
    until: Option<u32>,
}

impl MemOp {
    /// `false`: the condition does not hold yet.
    fn step(self) -> bool {
        let Self { address, value, wide, until } = self;
        let Some(how) = until else {
            // SAFETY: the address was given to the driver as a word that stays valid until the operation has run.
            unsafe {
                match wide {
                    true => (address as *mut u64).write_volatile(value),
                    false => (address as *mut u32).write_volatile(value as u32),
                }
            }
            return true;
        };
        // SAFETY: as above.
        let now = unsafe {
            match wide {
                true => (address as *const u64).read_volatile(),
                false => (address as *const u32).read_volatile().into(),
            }
        };
        // The upper half of a narrow word does not count.
        let unused = if wide { 0 } else { 32 };
        match how & 3 {
            0 => (now.wrapping_sub(value) << unused).cast_signed() >= 0,
            1 => now == value,
            2 => now & value != 0,
            _ => !(now | value) << unused != 0,
        }
    }
}

/// Memory operations, one after the other.
pub(crate) struct MemOps(Vec<MemOp>);

task!(MemOps, 12, |MemOps(ops), stream| {
    let mut left = VecDeque::from(ops.clone());
    let run = move || {
        while left.front().is_some_and(|op| op.step()) {
            left.pop_front();
        }
        left.is_empty()
    };
    push_host(stream, Box::new(run))
});

fn mem_op(stream: Ref<Stream>, address: u64, value: u64, wide: bool, until: Option<u32>) -> Answer {
    invalid_if(address == 0 || !address.is_multiple_of(if wide { 8 } else { 4 }))?;
    legacy_not_implied(stream)?;
    calls::event();
    submit(stream, MemOps(vec![MemOp { address, value, wide, until }]))
}

entry!(cuStreamWaitValue32 | cuStreamWaitValue32_v2, |stream: Stream, address, value, how| {
    mem_op(stream, address, value.into(), false, Some(how))
});

entry!(cuStreamWaitValue64 | cuStreamWaitValue64_v2, |stream: Stream, address, value, how| {
    mem_op(stream, address, value, true, Some(how))
});

entry!(cuStreamWriteValue32 | cuStreamWriteValue32_v2, |stream: Stream, address, value, _| {
    mem_op(stream, address, value.into(), false, None)
});

entry!(cuStreamWriteValue64 | cuStreamWriteValue64_v2, |stream: Stream, address, value, _| {
    mem_op(stream, address, value, true, None)
});

/// `CUstreamBatchMemOpParams`: a union of 48 bytes with the operation in its first word.
pub(crate) unsafe fn read_mem_ops(list: *const c_void, count: u32) -> Res<MemOps> {
    invalid_if(list.is_null() || count > 256)?;
    let mut ops = Vec::new();
    for i in 0..count as usize {
        let [kind, address, value, flags, ..] = list.cast::<[u64; 6]>().add(i).read_unaligned();
        let (wide, until) = match kind as u32 {
            1 => (false, Some(flags as u32)),
            2 => (false, None),
            4 => (true, Some(flags as u32)),
            5 => (true, None),
            // Flush of remote writes, barrier: nothing to do here.
            3 | 6 => continue,
            _ => return Err(INVALID_VALUE),
        };
        let value = if wide { value } else { value & 0xffff_ffff };
        ops.push(MemOp { address, value, wide, until });
    }
    Ok(MemOps(ops))
}

entry!(cuStreamBatchMemOp_v2 | cuStreamBatchMemOp, |stream: Stream, count, paramArray, _| {
    let ops = read_mem_ops(paramArray.cast(), count)?;
    legacy_not_implied(stream)?;
    submit(stream, ops)
});
