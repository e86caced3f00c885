//! Contexts: primary, created, current.

use super::stream::create_stream;
use super::*;

/// Ends a context: waits for its work, closes its streams, returns its memory.
fn destroy(context: Ref<Context>) -> Answer {
    let driver = driver()?;
    for stream in context.all_streams() {
        drain(stream)?;
    }
    refuse_if(!context.retire(), INVALID_CONTEXT)?;
    lock(&CONTEXTS).remove(&context.id);
    #[cfg(feature = "runtime-tables")]
    crate::private_tables::storage::context_ends(context);
    device_memory::free_all_of(context)?;
    driver.device.with(|engine, now| {
        for stream in context.all_streams() {
            stream.retire();
            engine.close_stream(now, stream.slot);
        }
    });
    context.device.refund(MemKind::Context, context.device.context_bytes(context.kind));
    lock(&context.streams).clear();
    Ok(())
}

impl Device {
    /// The state of the device's primary context, locked.
    fn primary(self) -> MutexGuard<'static, PrimaryState> {
        lock(&self.driver.primaries[self.ordinal as usize])
    }
}

/// A device's primary context, created if need be, and its locked state.
fn primary_state(dev: CUdevice) -> Res<(Ref<Context>, MutexGuard<'static, PrimaryState>)> {
    let device = Device::at(dev)?;
    let mut state = device.primary();
    let flags = state.flags;
    let context = match state.context {
        Some(context) => context,
        None => *state.context.insert(Context::create(device, ContextKind::Primary, flags, None)?),
    };
    Ok((context, state))
}

/// A device's primary context, created if need be; this call does not retain it.
#[cfg(feature = "runtime-tables")]
pub(crate) fn primary(dev: CUdevice) -> Res<Ref<Context>> {
    Ok(primary_state(dev)?.0)
}

entry!(cuDevicePrimaryCtxRetain, |pctx, dev| {
    let (context, mut state) = primary_state(dev)?;
    state.retained += 1;
    put(pctx, context.handle())
});

entry!(cuDevicePrimaryCtxRelease_v2 | cuDevicePrimaryCtxRelease, |dev: Device| {
    let mut state = dev.primary();
    refuse_if(state.retained == 0, INVALID_CONTEXT)?;
    state.retained -= 1;
    let last = if state.retained == 0 { state.context.take() } else { None };
    last.map_or(Ok(()), destroy)
});

entry!(cuDevicePrimaryCtxReset_v2 | cuDevicePrimaryCtxReset, |dev: Device| {
    let mut state = dev.primary();
    state.context.take().map_or(Ok(()), destroy)
});

entry!(cuDevicePrimaryCtxGetState, |dev: Device, flags, active| {
    let state = dev.primary();
    put_opt(flags, state.flags);
    put_opt(active, c_int::from(state.context.is_some()));
});

entry!(cuDevicePrimaryCtxSetFlags_v2 | cuDevicePrimaryCtxSetFlags, |dev: Device, flags| {
    let mut state = dev.primary();
    state.flags = flags;
    if let Some(context) = state.context {
        context.flags.store(flags, Relaxed);
    }
});

unsafe fn create(pctx: *mut sys::CUcontext, flags: u32, dev: CUdevice, sms: Option<u32>) -> Answer {
    invalid_if(pctx.is_null())?;
    let context = Context::create(Device::at(dev)?, ContextKind::Created, flags, sms)?;
    push_current(context);
    put(pctx, context.handle())
}

entry!(cuCtxCreate | cuCtxCreate_v2, |pctx, flags, dev| create(pctx, flags, dev, None));

/// SMs of the affinities (type 0 is a number of SMs), read as integers.
unsafe fn affinity(list: *const c_void, count: c_int, dev: CUdevice) -> Res<Option<u32>> {
    invalid_if(count < 0 || count > 0 && list.is_null())?;
    let all = Device::at(dev)?.profile().sms;
    let mut sms = None;
    for i in 0..count as usize {
        let [kind, wanted] = list.cast::<[u32; 2]>().add(i).read_unaligned();
        invalid_if(kind != 0 || wanted == 0)?;
        sms = Some(wanted.min(all));
    }
    Ok(sms)
}

entry!(cuCtxCreate_v3, |pctx, affinities, count, flags, dev| {
    create(pctx, flags, dev, affinity(affinities.cast(), count, dev)?)
});

entry!(cuCtxCreate_v4, |pctx, params, flags, dev| {
    if params.is_null() {
        return create(pctx, flags, dev, None);
    }
    let params = &*params;
    // Graphics contexts.
    refuse_if(!params.cigParams.is_null(), NOT_SUPPORTED)?;
    let sms = affinity(params.execAffinityParams.cast(), params.numExecAffinityParams, dev)?;
    create(pctx, flags, dev, sms)
});

entry!(cuCtxDestroy_v2 | cuCtxDestroy | cuCtxDetach, driver, |ctx: Given| {
    let context = Object::<Context>::get(ctx)?;
    refuse_if(context.kind == ContextKind::Primary, INVALID_CONTEXT)?;
    destroy(context)?;
    if current_opt().is_some_and(|c| c.id == context.id) {
        pop_current();
    }
});

entry!(cuCtxAttach, |pctx, flags| {
    invalid_if(flags != 0)?;
    put(pctx, current()?.handle())
});

entry!(cuCtxPushCurrent_v2 | cuCtxPushCurrent, driver, |ctx: Context| push_current(ctx));

entry!(cuCtxPopCurrent_v2 | cuCtxPopCurrent, driver, |pctx| {
    put_opt(pctx, pop_current().ok_or(INVALID_CONTEXT)?.handle());
});

entry!(cuCtxSetCurrent, driver, |ctx| {
    set_current(if ctx.is_null() { None } else { Some(Object::<Context>::get(ctx)?) });
});

entry!(cuCtxGetCurrent, driver, |pctx| put(pctx, current_opt().map_or(null_mut(), Object::handle)));
entry!(cuCtxGetDevice, context, |device| put(device, context.device.ordinal));
entry!(cuCtxGetDevice_v2, |device, context: OrCurrent| put(device, context.device.ordinal));

entry!(cuCtxGetFlags, |flags| {
    // Memory of the host can always be mapped.
    const MAP_HOST: c_uint = 8;
    put(flags, current()?.flags.load(Relaxed) | MAP_HOST)
});

entry!(cuCtxSetFlags, context, |flags| context.flags.store(flags, Relaxed));
entry!(cuCtxGetId | cuGreenCtxGetId, |context: OrCurrent, ctxId| put(ctxId, context.id));
entry!(cuCtxGetApiVersion, |_context: OrCurrent, version| put(version, 3020));

entry!(cuCtxGetStreamPriorityRange, context, |leastPriority, greatestPriority| {
    put_opt(leastPriority, 0);
    put_opt(greatestPriority, -5);
});

entry!(cuCtxGetCacheConfig, context, |pconfig| put(pconfig, 0));
entry!(cuCtxSetCacheConfig | cuCtxSetSharedMemConfig, context, |_| ());
entry!(cuCtxGetSharedMemConfig, context, |pConfig| put(pConfig, 1));
entry!(cuCtxResetPersistingL2Cache, context, || ());

/// Limits and their defaults: stack, printf, heap, nesting, pending launches, L2 granularity, persisting L2, …
/// By number of `CUlimit`; those of 0 are the device's, see [`limit_of`].
const LIMITS: [usize; 9] = [1024, 0, 8 << 20, 2, 2048, 64, 0, 0, 0];

/// The default of a limit, as an H100 and an H200 with driver 580 have it.
fn limit_of(context: &Context, limit: c_uint) -> Res<usize> {
    let profile = context.device.profile();
    let default = *LIMITS.get(limit as usize).ok_or(INVALID_VALUE)?;
    match limit {
        // 64 KiB of output for each SM.
        1 => Ok(profile.sms as usize * (64 << 10)),
        // Devices of this generation have no nesting depth.
        3 if profile.compute_capability.0 >= 9 => Err(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT),
        6 => Ok(profile.l2_bytes as usize / 16 * 3),
        7 => Ok(profile.shared_memory_per_sm_bytes as usize - (1 << 10)),
        _ => Ok(default),
    }
}

/// The heap's part beyond the default has its address among the limits.
const HEAP_AT: u32 = u32::MAX;

entry!(cuCtxGetLimit, context, |pvalue, limit| {
    let default = limit_of(context, limit)?;
    put(pvalue, lock(&context.limits).get(&limit).copied().unwrap_or(default))
});

entry!(cuCtxSetLimit, context, |limit, value| {
    limit_of(context, limit)?;
    let mut limits = lock(&context.limits);
    // The heap of device-side malloc lies in the context's memory; its default size is part of the context's charge.
    if limit == 2 {
        let heap = match value.saturating_sub(LIMITS[2]) {
            0 => 0,
            more => device_memory::allocate(context, more as u64, MemKind::Plain)?,
        };
        if let Some(before) = limits.insert(HEAP_AT, heap as usize).filter(|at| *at != 0) {
            device_memory::free_at_rest(before as u64)?;
        }
    }
    limits.insert(limit, value);
});

// Every GPU's memory is reachable without this call; the request is kept for the error codes.
entry!(cuCtxEnablePeerAccess, context, |peer: Context, Flags| {
    invalid_if(Flags != 0)?;
    refuse_if(peer.device.ordinal == context.device.ordinal, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)?;
    let new = lock(&context.peers).insert(peer.device.ordinal);
    refuse_if(!new, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
});

entry!(cuCtxDisablePeerAccess, context, |peer: Context| {
    let was = lock(&context.peers).remove(&peer.device.ordinal);
    refuse_if(!was, CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
});

entry!(cuCtxGetExecAffinity, context, |pExecAffinity, type_| {
    refuse_if(type_ != 0, NOT_SUPPORTED)?;
    put(pExecAffinity.cast::<[u32; 2]>(), [0, context.sms()])
});

// --- Green contexts --------------------------------------------------------------------------------
//
// A resource is 144 bytes: type at 0 (1 = SMs), internal up to 96, then the union: SM count, minimal partition, alignment, flags. A
// descriptor is its SM count.

const SM_COUNT_AT: usize = 96;

unsafe fn put_resource(to: *mut sys::CUdevResource, sms: u32) -> Answer {
    invalid_if(to.is_null())?;
    std::ptr::write_bytes(to, 0, 1);
    let at = to.cast::<u8>();
    at.cast::<u32>().write_unaligned(1);
    let (least, step) = sm_steps()?;
    at.add(SM_COUNT_AT).cast::<[u32; 4]>().write_unaligned([sms, least, step, 0]);
    Ok(())
}

fn sm_steps() -> Res<(u32, u32)> {
    Ok(if driver()?.profile().compute_capability.0 >= 9 { (8, 8) } else { (2, 2) })
}

unsafe fn resource_sms(from: *const sys::CUdevResource) -> Res<u32> {
    invalid_if(read::<u32>(from.cast())? != 1)?;
    Ok(from.cast::<u8>().add(SM_COUNT_AT).cast::<u32>().read_unaligned())
}

entry!(cuDeviceGetDevResource, |device: Device, resource, type_| {
    refuse_if(type_ != 1, NOT_SUPPORTED)?;
    put_resource(resource, device.profile().sms)
});

entry!(cuCtxGetDevResource | cuGreenCtxGetDevResource, |context: OrCurrent, resource, type_| {
    refuse_if(type_ != 1, NOT_SUPPORTED)?;
    put_resource(resource, context.sms())
});

entry!(cuDevSmResourceSplitByCount, |result, nbGroups, input, remainder, _, minCount| {
    let total = resource_sms(input)?;
    let (least, step) = sm_steps()?;
    let each = minCount.max(least).next_multiple_of(step);
    invalid_if(nbGroups.is_null() || each > total)?;
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
});

entry!(cuDevResourceGenerateDesc, driver, |phDesc, resources, nbResources| {
    let mut sms = 0;
    for i in 0..nbResources as usize {
        sms += resource_sms(resources.add(i))?;
    }
    invalid_if(sms == 0)?;
    put(phDesc, sms as usize as sys::CUdevResourceDesc)
});

entry!(cuGreenCtxCreate, |phCtx, desc, dev: Device, flags| {
    // CU_GREEN_CTX_DEFAULT_STREAM is required.
    let sms = desc as usize as u32;
    invalid_if(flags != 1 || sms == 0 || sms > dev.profile().sms || phCtx.is_null())?;
    put(phCtx, Context::create(dev, ContextKind::Green, 0, Some(sms))?.handle())
});

entry!(cuGreenCtxDestroy, driver, |context: Context| destroy(context));
entry!(cuCtxFromGreenCtx, driver, |pContext, context: Context| put(pContext, context.handle()));

entry!(cuGreenCtxStreamCreate, driver, |phStream, greenCtx, flags, priority| {
    // Only non-blocking streams belong to a green context.
    invalid_if(flags != 1)?;
    put(phStream, create_stream(Object::get(greenCtx)?, flags, priority)?.handle())
});

entry!(cuStreamGetGreenCtx, |hStream, phCtx| {
    let stream = StreamArg(Flavor::Legacy, hStream).find()?;
    put(phCtx, if stream.context.part.is_some() { stream.context.handle() } else { null_mut() })
});
