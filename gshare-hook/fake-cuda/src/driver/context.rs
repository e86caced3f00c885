//! Contexts: primary, created, current.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;

use super::base::*;
use super::stream::create_stream;
use super::*;
use crate::sim::MemKind;

/// Ends a context: waits for its work, closes its streams, returns its memory.
fn destroy(context: &'static Object<Context>, charged: bool) -> Answer {
    let driver = driver()?;
    for stream in context.all_streams() {
        drain(stream)?;
    }
    if !context.retire() {
        return Err(INVALID_CONTEXT);
    }
    #[cfg(feature = "runtime-tables")]
    crate::private_tables::storage::context_ends(context);
    memory::free_all_of(context)?;
    driver.device.with(|engine, now| {
        for stream in context.all_streams() {
            stream.retire();
            engine.close_stream(now, stream.slot);
        }
        if charged {
            engine.refund(driver.process, context.gpu, MemKind::Context, driver.profile().context_bytes);
        }
    });
    lock(&context.streams).clear();
    Ok(())
}

/// A device's primary context, made if there is none, and its state, locked.
fn primary_state(
    dev: CUdevice,
) -> Result<(&'static Object<Context>, MutexGuard<'static, PrimaryState>), CUresult> {
    let driver = driver()?;
    driver.gpu(dev)?;
    let mut state = lock(&driver.primaries[dev as usize].state);
    let context = match state.context {
        Some(context) => context,
        None => {
            let context = Context::create(dev, true, state.flags, None, true)?;
            state.context = Some(context);
            context
        }
    };
    Ok((context, state))
}

/// A device's primary context, made if there is none; nobody retains it by this call.
#[cfg(feature = "runtime-tables")]
pub(crate) fn primary(dev: CUdevice) -> Result<&'static Object<Context>, CUresult> {
    Ok(primary_state(dev)?.0)
}

pub(super) unsafe fn cuDevicePrimaryCtxRetain(pctx: *mut sys::CUcontext, dev: CUdevice) -> Answer {
    let (context, mut state) = primary_state(dev)?;
    state.retained += 1;
    put(pctx, context.handle())
}

pub(super) unsafe fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> Answer {
    let driver = driver()?;
    driver.gpu(dev)?;
    let mut state = lock(&driver.primaries[dev as usize].state);
    if state.retained == 0 {
        return Err(INVALID_CONTEXT);
    }
    state.retained -= 1;
    if state.retained == 0
        && let Some(context) = state.context.take()
    {
        destroy(context, true)?;
    }
    Ok(())
}

pub(super) unsafe fn cuDevicePrimaryCtxRelease(dev: CUdevice) -> Answer {
    cuDevicePrimaryCtxRelease_v2(dev)
}

pub(super) unsafe fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) -> Answer {
    let driver = driver()?;
    driver.gpu(dev)?;
    let mut state = lock(&driver.primaries[dev as usize].state);
    if let Some(context) = state.context.take() {
        destroy(context, true)?;
    }
    Ok(())
}

pub(super) unsafe fn cuDevicePrimaryCtxReset(dev: CUdevice) -> Answer {
    cuDevicePrimaryCtxReset_v2(dev)
}

pub(super) unsafe fn cuDevicePrimaryCtxGetState(
    dev: CUdevice,
    flags: *mut c_uint,
    active: *mut c_int,
) -> Answer {
    let driver = driver()?;
    driver.gpu(dev)?;
    let state = lock(&driver.primaries[dev as usize].state);
    put_opt(flags, state.flags);
    put_opt(active, c_int::from(state.context.is_some()));
    Ok(())
}

pub(super) unsafe fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint) -> Answer {
    let driver = driver()?;
    driver.gpu(dev)?;
    let mut state = lock(&driver.primaries[dev as usize].state);
    state.flags = flags;
    if let Some(context) = state.context {
        context.flags.store(flags, Relaxed);
    }
    Ok(())
}

pub(super) unsafe fn cuDevicePrimaryCtxSetFlags(dev: CUdevice, flags: c_uint) -> Answer {
    cuDevicePrimaryCtxSetFlags_v2(dev, flags)
}

unsafe fn create(pctx: *mut sys::CUcontext, flags: u32, dev: CUdevice, sms: Option<u32>) -> Answer {
    if pctx.is_null() {
        return Err(INVALID_VALUE);
    }
    let context = Context::create(dev, false, flags, sms, true)?;
    push_current(context);
    put(pctx, context.handle())
}

pub(super) unsafe fn cuCtxCreate(pctx: *mut sys::CUcontext, flags: c_uint, dev: CUdevice) -> Answer {
    create(pctx, flags, dev, None)
}

pub(super) unsafe fn cuCtxCreate_v2(pctx: *mut sys::CUcontext, flags: c_uint, dev: CUdevice) -> Answer {
    create(pctx, flags, dev, None)
}

/// SMs of the affinities (type 0 is a number of SMs), read as integers.
unsafe fn affinity(list: *const c_void, count: c_int, dev: CUdevice) -> Result<Option<u32>, CUresult> {
    if count < 0 || count > 0 && list.is_null() {
        return Err(INVALID_VALUE);
    }
    let driver = driver()?;
    let all = driver.profile_of(driver.gpu(dev)?).sms;
    let mut sms = None;
    for i in 0..count as usize {
        let at = list.cast::<[u32; 2]>().add(i).read_unaligned();
        if at[0] != 0 || at[1] == 0 {
            return Err(INVALID_VALUE);
        }
        sms = Some(at[1].min(all));
    }
    Ok(sms)
}

pub(super) unsafe fn cuCtxCreate_v3(
    pctx: *mut sys::CUcontext,
    paramsArray: *mut sys::CUexecAffinityParam,
    numParams: c_int,
    flags: c_uint,
    dev: CUdevice,
) -> Answer {
    create(pctx, flags, dev, affinity(paramsArray.cast(), numParams, dev)?)
}

/// `CUctxCreateParams`: affinities, their number, parameters of graphics contexts.
pub(super) unsafe fn cuCtxCreate_v4(
    pctx: *mut sys::CUcontext,
    ctxCreateParams: *mut sys::CUctxCreateParams,
    flags: c_uint,
    dev: CUdevice,
) -> Answer {
    let sms = if ctxCreateParams.is_null() {
        None
    } else {
        let list = ctxCreateParams.cast::<*const c_void>().read();
        let count = ctxCreateParams.cast::<*const c_void>().add(1).cast::<c_int>().read();
        let graphics = ctxCreateParams.cast::<*const c_void>().add(2).read();
        if !graphics.is_null() {
            return Err(NOT_SUPPORTED);
        }
        affinity(list, count, dev)?
    };
    create(pctx, flags, dev, sms)
}

pub(super) unsafe fn cuCtxDestroy_v2(ctx: sys::CUcontext) -> Answer {
    driver()?;
    if ctx.is_null() {
        return Err(INVALID_VALUE);
    }
    let context = Object::<Context>::get(ctx)?;
    if context.primary {
        return Err(INVALID_CONTEXT);
    }
    destroy(context, true)?;
    if current_opt().is_some_and(|c| c.id == context.id) {
        pop_current();
    }
    Ok(())
}

pub(super) unsafe fn cuCtxDestroy(ctx: sys::CUcontext) -> Answer {
    cuCtxDestroy_v2(ctx)
}

pub(super) unsafe fn cuCtxAttach(pctx: *mut sys::CUcontext, flags: c_uint) -> Answer {
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    put(pctx, current()?.handle())
}

pub(super) unsafe fn cuCtxDetach(ctx: sys::CUcontext) -> Answer {
    cuCtxDestroy_v2(ctx)
}

pub(super) unsafe fn cuCtxPushCurrent_v2(ctx: sys::CUcontext) -> Answer {
    driver()?;
    push_current(Object::<Context>::get(ctx)?);
    Ok(())
}

pub(super) unsafe fn cuCtxPushCurrent(ctx: sys::CUcontext) -> Answer {
    cuCtxPushCurrent_v2(ctx)
}

pub(super) unsafe fn cuCtxPopCurrent_v2(pctx: *mut sys::CUcontext) -> Answer {
    driver()?;
    let context = pop_current().ok_or(INVALID_CONTEXT)?;
    put_opt(pctx, context.handle());
    Ok(())
}

pub(super) unsafe fn cuCtxPopCurrent(pctx: *mut sys::CUcontext) -> Answer {
    cuCtxPopCurrent_v2(pctx)
}

pub(super) unsafe fn cuCtxSetCurrent(ctx: sys::CUcontext) -> Answer {
    driver()?;
    set_current(if ctx.is_null() { None } else { Some(Object::<Context>::get(ctx)?) });
    Ok(())
}

pub(super) unsafe fn cuCtxGetCurrent(pctx: *mut sys::CUcontext) -> Answer {
    driver()?;
    put(pctx, current_opt().map_or(std::ptr::null_mut(), Object::handle))
}

pub(super) unsafe fn cuCtxGetDevice(device: *mut CUdevice) -> Answer {
    put(device, current()?.ordinal)
}

unsafe fn context_or_current(ctx: sys::CUcontext) -> Result<&'static Object<Context>, CUresult> {
    driver()?;
    if ctx.is_null() { current() } else { Object::<Context>::get(ctx) }
}

pub(super) unsafe fn cuCtxGetDevice_v2(device: *mut CUdevice, ctx: sys::CUcontext) -> Answer {
    put(device, context_or_current(ctx)?.ordinal)
}

pub(super) unsafe fn cuCtxGetFlags(flags: *mut c_uint) -> Answer {
    // Memory of the host can always be mapped.
    const MAP_HOST: c_uint = 8;
    put(flags, current()?.flags.load(Relaxed) | MAP_HOST)
}

pub(super) unsafe fn cuCtxSetFlags(flags: c_uint) -> Answer {
    current()?.flags.store(flags, Relaxed);
    Ok(())
}

pub(super) unsafe fn cuCtxGetId(ctx: sys::CUcontext, ctxId: *mut c_ulonglong) -> Answer {
    put(ctxId, context_or_current(ctx)?.id)
}

pub(super) unsafe fn cuCtxGetApiVersion(ctx: sys::CUcontext, version: *mut c_uint) -> Answer {
    context_or_current(ctx)?;
    put(version, 3020)
}

pub(super) unsafe fn cuCtxGetStreamPriorityRange(
    leastPriority: *mut c_int,
    greatestPriority: *mut c_int,
) -> Answer {
    current()?;
    put_opt(leastPriority, 0);
    put_opt(greatestPriority, -5);
    Ok(())
}

pub(super) unsafe fn cuCtxGetCacheConfig(pconfig: *mut c_uint) -> Answer {
    current()?;
    put(pconfig, 0)
}

pub(super) unsafe fn cuCtxSetCacheConfig(_config: c_uint) -> Answer {
    current()?;
    Ok(())
}

pub(super) unsafe fn cuCtxGetSharedMemConfig(pConfig: *mut c_uint) -> Answer {
    current()?;
    put(pConfig, 1)
}

pub(super) unsafe fn cuCtxSetSharedMemConfig(_config: c_uint) -> Answer {
    current()?;
    Ok(())
}

pub(super) unsafe fn cuCtxResetPersistingL2Cache() -> Answer {
    current()?;
    Ok(())
}

/// Limits and their defaults: stack, printf, heap, nesting, pending launches, L2 granularity, persisting L2, …
/// By number of `CUlimit`; those of 0 are the device's, see [`limit_of`].
const LIMITS: [usize; 9] = [1024, 0, 8 << 20, 2, 2048, 64, 0, 0, 0];

/// The default of a limit, as an H100 and an H200 with driver 580 have it.
fn limit_of(context: &Context, limit: c_uint) -> Result<usize, CUresult> {
    let profile = driver()?.profile_of(context.gpu);
    let default = *LIMITS.get(limit as usize).ok_or(INVALID_VALUE)?;
    match limit {
        // 64 KiB of output for each SM.
        1 => Ok(profile.sms as usize * (64 << 10)),
        // Nested launches have no such depth any more.
        3 if profile.compute_capability.0 >= 9 => Err(CUresult(215)),
        6 => Ok(profile.l2_bytes as usize / 16 * 3),
        7 => Ok(profile.shared_memory_per_sm_bytes as usize - (1 << 10)),
        _ => Ok(default),
    }
}

/// Where the part of the heap beyond the default lies: kept among the limits.
const HEAP_AT: u32 = u32::MAX;

pub(super) unsafe fn cuCtxGetLimit(pvalue: *mut usize, limit: c_uint) -> Answer {
    let context = current()?;
    let default = limit_of(context, limit)?;
    put(pvalue, lock(&context.limits).get(&limit).copied().unwrap_or(default))
}

pub(super) unsafe fn cuCtxSetLimit(limit: c_uint, value: usize) -> Answer {
    let context = current()?;
    limit_of(context, limit)?;
    let mut limits = lock(&context.limits);
    // The heap of device-side malloc lies in the context's memory; up to its default it is part of what a context takes.
    if limit == 2 {
        let heap = match value.saturating_sub(LIMITS[2]) {
            0 => 0,
            more => memory::allocate(context, more as u64, MemKind::Plain)?,
        };
        if let Some(before) = limits.insert(HEAP_AT, heap as usize).filter(|at| *at != 0) {
            memory::free(before as u64)?;
        }
    }
    limits.insert(limit, value);
    Ok(())
}

/// Peers: memory of every GPU is reachable anyway; what was asked for is remembered for the error codes.
pub(super) unsafe fn cuCtxEnablePeerAccess(peerContext: sys::CUcontext, Flags: c_uint) -> Answer {
    let context = current()?;
    let peer = Object::<Context>::get(peerContext)?;
    if Flags != 0 {
        return Err(INVALID_VALUE);
    }
    if peer.ordinal == context.ordinal {
        return Err(CUresult(217));
    }
    let mut peers = lock(&context.peers);
    if peers.contains(&peer.ordinal) {
        return Err(CUresult(704));
    }
    peers.push(peer.ordinal);
    Ok(())
}

pub(super) unsafe fn cuCtxDisablePeerAccess(peerContext: sys::CUcontext) -> Answer {
    let context = current()?;
    let peer = Object::<Context>::get(peerContext)?;
    let mut peers = lock(&context.peers);
    let at = peers.iter().position(|p| *p == peer.ordinal).ok_or(CUresult(705))?;
    peers.remove(at);
    Ok(())
}

pub(super) unsafe fn cuCtxGetExecAffinity(
    pExecAffinity: *mut sys::CUexecAffinityParam,
    type_: c_uint,
) -> Answer {
    let context = current()?;
    if type_ != 0 {
        return Err(NOT_SUPPORTED);
    }
    let sms = context.sms.unwrap_or(driver()?.profile_of(context.gpu).sms);
    put(pExecAffinity.cast::<[u32; 2]>(), [0, sms])
}

// --- Green contexts --------------------------------------------------------------------------------
//
// A resource is 144 bytes: type at 0 (1 = SMs), internal up to 96, then the union: SM count, minimal partition,
// alignment, flags. A descriptor is the SM count it was made from.

const SM_COUNT_AT: usize = 96;

unsafe fn put_resource(to: *mut sys::CUdevResource, sms: u32) -> Answer {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    std::ptr::write_bytes(to, 0, 1);
    let at = to.cast::<u8>();
    at.cast::<u32>().write_unaligned(1);
    let (least, step) = sm_steps()?;
    at.add(SM_COUNT_AT).cast::<[u32; 4]>().write_unaligned([sms, least, step, 0]);
    Ok(())
}

fn sm_steps() -> Result<(u32, u32), CUresult> {
    Ok(if driver()?.profile().compute_capability.0 >= 9 { (8, 8) } else { (2, 2) })
}

unsafe fn resource_sms(from: *const sys::CUdevResource) -> Result<u32, CUresult> {
    if from.is_null() || from.cast::<u32>().read_unaligned() != 1 {
        return Err(INVALID_VALUE);
    }
    Ok(from.cast::<u8>().add(SM_COUNT_AT).cast::<u32>().read_unaligned())
}

pub(super) unsafe fn cuDeviceGetDevResource(
    device: CUdevice,
    resource: *mut sys::CUdevResource,
    type_: c_uint,
) -> Answer {
    let driver = driver()?;
    let gpu = driver.gpu(device)?;
    if type_ != 1 {
        return Err(NOT_SUPPORTED);
    }
    put_resource(resource, driver.profile_of(gpu).sms)
}

pub(super) unsafe fn cuCtxGetDevResource(
    hCtx: sys::CUcontext,
    resource: *mut sys::CUdevResource,
    type_: c_uint,
) -> Answer {
    let context = context_or_current(hCtx)?;
    if type_ != 1 {
        return Err(NOT_SUPPORTED);
    }
    put_resource(resource, context.sms.unwrap_or(driver()?.profile_of(context.gpu).sms))
}

pub(super) unsafe fn cuDevSmResourceSplitByCount(
    result: *mut sys::CUdevResource,
    nbGroups: *mut c_uint,
    input: *const sys::CUdevResource,
    remainder: *mut sys::CUdevResource,
    _flags: c_uint,
    minCount: c_uint,
) -> Answer {
    let total = resource_sms(input)?;
    let (least, step) = sm_steps()?;
    let each = minCount.max(least).next_multiple_of(step);
    if nbGroups.is_null() || each > total {
        return Err(INVALID_VALUE);
    }
    let most = total / each;
    if result.is_null() {
        return put(nbGroups, most);
    }
    let groups = (*nbGroups).min(most);
    for i in 0..groups as usize {
        put_resource(result.add(i), each)?;
    }
    if !remainder.is_null() {
        put_resource(remainder, total - groups * each)?;
    }
    put(nbGroups, groups)
}

pub(super) unsafe fn cuDevResourceGenerateDesc(
    phDesc: *mut sys::CUdevResourceDesc,
    resources: *mut sys::CUdevResource,
    nbResources: c_uint,
) -> Answer {
    driver()?;
    let mut sms = 0;
    for i in 0..nbResources as usize {
        sms += resource_sms(resources.add(i))?;
    }
    if sms == 0 {
        return Err(INVALID_VALUE);
    }
    put(phDesc, sms as usize as sys::CUdevResourceDesc)
}

pub(super) unsafe fn cuGreenCtxCreate(
    phCtx: *mut sys::CUgreenCtx,
    desc: sys::CUdevResourceDesc,
    dev: CUdevice,
    flags: c_uint,
) -> Answer {
    let driver = driver()?;
    let gpu = driver.gpu(dev)?;
    // CU_GREEN_CTX_DEFAULT_STREAM is required.
    let sms = desc as usize as u32;
    if flags != 1 || sms == 0 || sms > driver.profile_of(gpu).sms || phCtx.is_null() {
        return Err(INVALID_VALUE);
    }
    put(phCtx, Context::create(dev, false, 0, Some(sms), false)?.handle())
}

pub(super) unsafe fn cuGreenCtxDestroy(hCtx: sys::CUgreenCtx) -> Answer {
    driver()?;
    destroy(Object::<Context>::get(hCtx)?, false)
}

pub(super) unsafe fn cuCtxFromGreenCtx(pContext: *mut sys::CUcontext, hCtx: sys::CUgreenCtx) -> Answer {
    driver()?;
    put(pContext, Object::<Context>::get(hCtx)?.handle())
}

pub(super) unsafe fn cuGreenCtxGetDevResource(
    hCtx: sys::CUgreenCtx,
    resource: *mut sys::CUdevResource,
    type_: c_uint,
) -> Answer {
    cuCtxGetDevResource(hCtx.cast(), resource, type_)
}

pub(super) unsafe fn cuGreenCtxGetId(greenCtx: sys::CUgreenCtx, greenCtxId: *mut c_ulonglong) -> Answer {
    cuCtxGetId(greenCtx.cast(), greenCtxId)
}

pub(super) unsafe fn cuGreenCtxStreamCreate(
    phStream: *mut sys::CUstream,
    greenCtx: sys::CUgreenCtx,
    flags: c_uint,
    priority: c_int,
) -> Answer {
    driver()?;
    // Only non-blocking streams belong to a green context.
    if flags != 1 {
        return Err(INVALID_VALUE);
    }
    put(phStream, create_stream(Object::<Context>::get(greenCtx)?, flags, priority)?.handle())
}

pub(super) unsafe fn cuStreamGetGreenCtx(hStream: sys::CUstream, phCtx: *mut sys::CUgreenCtx) -> Answer {
    let stream = stream(Flavor::Legacy, hStream)?;
    put(phCtx, if stream.context.sms.is_some() { stream.context.handle() } else { std::ptr::null_mut() })
}

pub(super) unsafe fn cuGreenCtxRecordEvent(hCtx: sys::CUgreenCtx, hEvent: sys::CUevent) -> Answer {
    stream::cuCtxRecordEvent(hCtx.cast(), hEvent)
}

pub(super) unsafe fn cuGreenCtxWaitEvent(hCtx: sys::CUgreenCtx, hEvent: sys::CUevent) -> Answer {
    stream::cuCtxWaitEvent(hCtx.cast(), hEvent)
}
