//! Device memory by pointer: plain, pitched, managed; host memory; attributes of pointers.
//!
//! The account is charged the requested bytes, without rounding (a pitched allocation: pitch x height).

use rustix::mm::{MapFlags, munmap};

use super::capture::{legacy_not_implied, not_while_capturing};
use super::registry::{Alloc, READ_WRITE, What, check_range, map_pages};
use super::stream::finish;
use super::*;

/// Allocates and charges device memory.
pub(crate) fn allocate(context: &Context, bytes: u64, kind: MemKind) -> Res<u64> {
    let driver = driver()?;
    charge(context.device, kind, bytes)?;
    let inserted = driver.memory().insert(bytes, What::Charged(kind), context.device, context.id);
    inserted.inspect_err(|_| context.device.refund(kind, bytes))
}

/// Charges bytes; trims this process's pools before it reports a lack of memory.
pub(crate) fn charge(device: Device, kind: MemKind, bytes: u64) -> Answer {
    let charged = device.charge(kind, bytes);
    if charged.is_err() && memory_pool::trim_all(device.gpu)? > 0 {
        return Ok(device.charge(kind, bytes)?);
    }
    Ok(charged?)
}

/// Frees an address from [`allocate`] whose context is at rest, or in the order of a stream.
pub(crate) fn free(address: u64, stream: Option<Ref<Stream>>) -> Answer {
    let driver = driver()?;
    match driver.memory().at(address)?.what {
        What::Pooled(..) => memory_pool::free(address, stream),
        What::Charged(kind) => {
            let charged = |a: &Alloc| matches!(a.what, What::Charged(_));
            let alloc = driver.memory().remove(address, charged).ok_or(INVALID_VALUE)?;
            match alloc.backing {
                Some(backing) => driver.leave(backing.id, backing.generation),
                None => alloc.device.refund(kind, alloc.bytes),
            }
            driver.memory().give_span(&alloc, stream)
        }
        _ => Err(INVALID_VALUE),
    }
}

/// Waits for the work of the context of an allocation. Pools' memory belongs to no context, so there it is the current one.
fn finish_work(alloc: &Alloc) -> Answer {
    Context::numbered(alloc.context).or_else(current_opt).map_or(Ok(()), finish)
}

/// Frees an address after the work of its context, which may use it.
pub(crate) fn free_at_rest(address: u64) -> Answer {
    finish_work(&driver()?.memory().at(address)?)?;
    free(address, None)
}

/// Frees all allocations of a context.
pub(crate) fn free_all_of(context: &Context) -> Answer {
    let ours = |alloc: &Alloc| alloc.context == context.id && matches!(alloc.what, What::Charged(_));
    driver()?.memory().places(ours).into_iter().try_for_each(|address| free(address, None))
}

// --- Plain, pitched, managed -----------------------------------------------------------------------

entry!(cuMemAlloc_v2, context, |dptr, bytesize| {
    invalid_if(dptr.is_null() || bytesize == 0)?;
    not_while_capturing()?;
    put(dptr, allocate(context, bytesize as u64, MemKind::Plain)?)
});

entry!(cuMemAllocPitch_v2, context, |dptr, pPitch, WidthInBytes, Height, ElementSizeBytes| {
    invalid_if(dptr.is_null() || pPitch.is_null() || WidthInBytes == 0 || Height == 0)?;
    invalid_if(!matches!(ElementSizeBytes, 4 | 8 | 16))?;
    not_while_capturing()?;
    let pitch = WidthInBytes.checked_next_multiple_of(512).ok_or(INVALID_VALUE)?;
    let bytes = pitch.checked_mul(Height).ok_or(OUT_OF_MEMORY)?;
    put(dptr, allocate(context, bytes as u64, MemKind::Plain)?)?;
    put(pPitch, pitch)
});

entry!(cuMemAllocManaged, context, |dptr, bytesize, flags| {
    invalid_if(dptr.is_null() || bytesize == 0 || !matches!(flags, 1 | 2))?;
    not_while_capturing()?;
    put(dptr, allocate(context, bytesize as u64, MemKind::Managed)?)
});

entry!(cuMemFree_v2, driver, |dptr| {
    if dptr == 0 {
        return Ok(());
    }
    not_while_capturing()?;
    free_at_rest(dptr)
});

entry!(cuMemGetInfo_v2, context, |free, total| {
    let Device { driver, gpu, .. } = context.device;
    let (left, all) = driver.device.with_living(|engine, _| engine.memory(gpu));
    put_opt(free, left as usize);
    put_opt(total, all as usize);
});

entry!(cuMemGetAddressRange_v2, context, |pbase, psize, dptr| {
    let alloc = driver()?.memory().find(dptr).ok_or(NOT_FOUND)?;
    put_opt(pbase, alloc.address);
    put_opt(psize, alloc.bytes as usize);
});

entry!(cuMemAdvise | cuMemAdvise_v2, driver, |devPtr, count, _, _| check_range(devPtr, count as u64, false));

/// Prefetching moves nothing, since managed memory is charged to its device at once, but it takes a copy's time.
fn prefetch(stream: Ref<Stream>, address: u64, bytes: u64) -> Answer {
    check_range(address, bytes, false)?;
    legacy_not_implied(stream)?;
    refuse_if(stream.capturing.load(Acquire), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
    let ns = driver()?.profile().copy_ns(bytes, true);
    push(stream, Work::Copy { engine: 0, bytes, ns }).map(drop)
}

entry!(cuMemPrefetchAsync, |at, count, _, stream: Stream| prefetch(stream, at, count as u64));
alias!(cuMemPrefetchAsync_v2(at, count, _, _, stream) = cuMemPrefetchAsync(at, count, 0, stream));

entry!(
    cuMemPrefetchBatchAsync | cuMemDiscardAndPrefetchBatchAsync,
    |list, sizes, count, _, _, _, flags, stream: Stream| {
        invalid_if(list.is_null() || sizes.is_null() || count == 0 || flags != 0)?;
        (0..count).try_for_each(|i| prefetch(stream, *list.add(i), *sizes.add(i) as u64))
    }
);
alias!(
    cuMemDiscardBatchAsync(list, sizes, count, flags, stream) =
        cuMemPrefetchBatchAsync(list, sizes, count, null_mut(), null_mut(), 0, flags, stream)
);

// --- Host memory -----------------------------------------------------------------------------------

entry!(cuMemHostAlloc, context, |pp, bytesize, flags| {
    invalid_if(pp.is_null() || bytesize == 0 || flags > 7)?;
    not_while_capturing()?;
    let at = map_pages(0, bytesize.next_multiple_of(4096), READ_WRITE, MapFlags::empty())?;
    let memory = context.device.driver.memory();
    memory.note(at as u64, bytesize as u64, What::Host(flags), context.device, context.id);
    put(pp, at)
});
alias!(cuMemAllocHost_v2(pp, bytesize) = cuMemHostAlloc(pp, bytesize, 0));

entry!(cuMemFreeHost, driver, |p| {
    if p.is_null() {
        return Ok(());
    }
    not_while_capturing()?;
    finish_work(&driver.memory().at(p as u64)?)?;
    let alloc = driver.memory().remove(p as u64, |a| matches!(a.what, What::Host(_))).ok_or(INVALID_VALUE)?;
    let _ = munmap(p, (alloc.bytes as usize).next_multiple_of(4096));
});

entry!(cuMemHostRegister_v2 | cuMemHostRegister, context, |p, bytesize, Flags| {
    invalid_if(p.is_null() || bytesize == 0)?;
    let registry = context.device.driver.memory();
    refuse_if(registry.find(p as u64).is_some(), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)?;
    registry.note(p as u64, bytesize as u64, What::Registered(Flags), context.device, context.id);
});

entry!(cuMemHostUnregister, |p| {
    let removed = driver()?.memory().remove(p as u64, |a| matches!(a.what, What::Registered(_)));
    removed.map(|_| ()).ok_or(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
});

entry!(cuMemHostGetDevicePointer_v2, driver, |pdptr, p, Flags| {
    let known = driver.memory().find(p as u64).is_some_and(|a| a.what.is_host());
    invalid_if(Flags != 0 || !known)?;
    put(pdptr, p as u64)
});

entry!(cuMemHostGetFlags, |pFlags, p| {
    match driver()?.memory().find(p as u64).map(|a| a.what) {
        Some(What::Host(flags)) => put(pFlags, flags | 2),
        _ => Err(INVALID_VALUE),
    }
});

// --- Attributes of pointers ------------------------------------------------------------------------

/// One attribute; `Ok(None)` for a pointer unknown to the driver.
fn attribute(kind: u32, address: u64) -> Res<Option<u64>> {
    let driver = driver()?;
    let Some(alloc) = driver.memory().find(address) else { return Ok(None) };
    let host = alloc.what.is_host();
    let managed = alloc.what == What::Charged(MemKind::Managed);
    Ok(Some(match kind {
        1 => Context::numbered(alloc.context).map_or(null_mut::<c_void>(), Object::handle) as u64,
        2 if host => 1,
        2 => 2,
        3 => address,
        4 if host || managed => address,
        7 => alloc.id,
        8 => managed.into(),
        9 => alloc.device.ordinal as u64,
        10 => (alloc.what == What::Charged(MemKind::Plain)).into(),
        11 => alloc.address,
        12 => alloc.bytes,
        13 => 1,
        16 => 3,
        17 if let What::Pooled(pool, _) = alloc.what => pool,
        6 | 14 | 15 | 17..=21 => 0,
        _ => return Err(INVALID_VALUE),
    }))
}

/// Writes an attribute, in 8 bytes or in 4.
unsafe fn put_attribute(to: *mut c_void, kind: u32, value: u64) {
    match kind {
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 16..=19 => to.cast::<u64>().write_unaligned(value),
        _ => to.cast::<u32>().write_unaligned(value as u32),
    }
}

entry!(cuPointerGetAttribute, |data: Given, kind, ptr| {
    put_attribute(data, kind, attribute(kind, ptr)?.ok_or(INVALID_VALUE)?);
});

// Unknown pointers are no error here: their attributes are 0, and their device is -2.
entry!(cuPointerGetAttributes, driver, |count, kinds, data, ptr| {
    invalid_if(kinds.is_null() || data.is_null() || count == 0)?;
    for i in 0..count as usize {
        let kind = *kinds.add(i);
        let unknown = if kind == 9 { -2_i32 as u64 } else { 0 };
        put_attribute(*data.add(i), kind, attribute(kind, ptr).ok().flatten().unwrap_or(unknown));
    }
});

entry!(cuPointerSetAttribute, |value, attribute, ptr| {
    // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    invalid_if(value.is_null() || attribute != 6 || driver()?.memory().find(ptr).is_none())
});
