//! The C functions.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::{device, now};
use crate::streams::{Entry, HostFunction, Streams, Wait, streams, wait};

type Result = c_int;
type Handle = *mut c_void;

const SUCCESS: Result = 0;
const INVALID_VALUE: Result = 1;
const OUT_OF_MEMORY: Result = 2;
const INVALID_CONTEXT: Result = 201;
const INVALID_HANDLE: Result = 400;
const NOT_FOUND: Result = 500;
const NOT_READY: Result = 600;
const NOT_SUPPORTED: Result = 801;

const RELEASE: c_int = 12_080;
/// Bytes of the device.
const MEMORY: usize = 16 << 30;
/// The one context; it lies where no other handle does.
const CONTEXT: usize = 0x5_0000;
/// Streams and events are numbers above these.
const STREAMS: usize = 0x10_0000;
const EVENTS: usize = 0x4000_0000;

fn handle(number: usize) -> Handle {
    std::ptr::with_exposed_provenance_mut(number)
}

/// A stream's number: the default streams have their own handles.
fn stream(handle: Handle) -> usize {
    let address = handle.addr();
    if address <= 2 { address } else { address.wrapping_sub(STREAMS) }
}

fn event(handle: Handle) -> usize {
    handle.addr().wrapping_sub(EVENTS)
}

/// Writes to the program's out-pointer.
fn put<T>(out: *mut T, value: T) -> Result {
    if out.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and so valid by the driver's own contract.
    unsafe { out.write(value) };
    SUCCESS
}

fn queue(to: Handle, entry: Entry) -> Result {
    if streams().push(stream(to), entry) { SUCCESS } else { INVALID_HANDLE }
}

fn said(passed: bool) -> Result {
    if passed { SUCCESS } else { NOT_READY }
}

/// A launch call: takes its time, and queues work at its end or at its beginning.
fn launch(to: Handle, length: u64) -> Result {
    let device = device();
    let spin = || {
        let until = now() + device.call_ns;
        while device.call_ns > 0 && now() < until {
            core::hint::spin_loop();
        }
    };
    if !device.early {
        spin();
    }
    let result = queue(to, Entry::Kernel(length));
    if device.early {
        spin();
    }
    result
}

/// The duration in a kernel's name, in ns.
fn length_of(name: &str) -> Option<u64> {
    if name.starts_with("zero") {
        return Some(0);
    }
    let digits = name.strip_prefix("spin_")?.split_once("us")?.0;
    digits.parse::<u64>().ok().map(|us| us * 1000)
}

thread_local! {
    static CURRENT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Device memory of this process: sizes by address.
struct Allocated {
    sizes: BTreeMap<u64, usize>,
    bytes: usize,
    next: u64,
}

impl Allocated {
    /// Addresses that no other memory has.
    fn addresses(&mut self, bytes: usize, align: usize) -> u64 {
        let place = self.next.next_multiple_of(align.max(512) as u64);
        self.next = place + bytes as u64;
        place
    }

    /// Takes memory of the device; `None` where too little is left.
    fn take(&mut self, bytes: usize) -> Option<u64> {
        if self.bytes + bytes > MEMORY {
            return None;
        }
        let place = self.addresses(bytes, 0);
        self.bytes += bytes;
        self.sizes.insert(place, bytes);
        Some(place)
    }

    fn give_back(&mut self, place: u64) -> Result {
        let Some(bytes) = self.sizes.remove(&place) else { return INVALID_VALUE };
        self.bytes -= bytes;
        SUCCESS
    }
}

fn allocated() -> MutexGuard<'static, Allocated> {
    static ALLOCATED: Mutex<Allocated> =
        Mutex::new(Allocated { sizes: BTreeMap::new(), bytes: 0, next: 0x7000_0000_0000 });
    ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner)
}

macro_rules! driver {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            /// The driver's function of this name.
            ///
            /// # Safety
            /// As for the driver's function.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> Result $body
        )*
        /// Every function by its name.
        static ALL: &[(&str, Address)] = &[$((stringify!($name), Address($name as *const c_void))),*];
    };
}

struct Address(*const c_void);
// SAFETY: the address of a function.
unsafe impl Sync for Address {}

// SAFETY (of this list's blocks): strings and records are the program's, valid by the driver's own contract.
driver! {
    cuInit(_flags: c_uint) { SUCCESS }
    cuDriverGetVersion(version: *mut c_int) { put(version, RELEASE) }
    cuDeviceGetCount(count: *mut c_int) { put(count, 1) }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) { put(device, ordinal) }
    cuDeviceGetUuid(uuid: *mut [u8; 16], _device: c_int) { put(uuid, *b"a stub's device.") }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) { put(uuid, *b"a stub's device.") }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { put(bytes, MEMORY) }
    cuDeviceGetAttribute(value: *mut c_int, _attribute: c_uint, _device: c_int) { put(value, 1) }
    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) { put(context, handle(CONTEXT)) }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    cuDevicePrimaryCtxGetState(_device: c_int, flags: *mut c_uint, active: *mut c_int) {
        put(flags, 0).max(put(active, 1))
    }
    cuCtxSetCurrent(context: Handle) {
        CURRENT.set(context.addr());
        SUCCESS
    }
    cuCtxGetCurrent(context: *mut Handle) { put(context, handle(CURRENT.get())) }
    cuCtxPushCurrent_v2(context: Handle) {
        CURRENT.set(context.addr());
        SUCCESS
    }
    cuCtxPopCurrent_v2(context: *mut Handle) { put(context, handle(CURRENT.get())) }
    cuCtxGetDevice(device: *mut c_int) {
        if CURRENT.get() == 0 {
            return INVALID_CONTEXT;
        }
        put(device, 0)
    }
    cuCtxSynchronize() { said(wait(|streams, now| Some(streams.all_until(now)))) }
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) { put(mode, 0) }
    cuModuleLoadData(module: *mut Handle, image: *const c_void) { put(module, image.cast_mut()) }
    cuModuleGetFunction(function: *mut Handle, _module: Handle, name: *const c_char) {
        // SAFETY: as said above.
        let name = unsafe { CStr::from_ptr(name) };
        match name.to_str().ok().and_then(length_of) {
            Some(length) => put(function, Box::into_raw(Box::new(length)).cast()),
            None => NOT_FOUND,
        }
    }
    cuLaunchKernel(function: Handle, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, to: Handle, _params: *mut Handle, _extra: *mut Handle) {
        // SAFETY: a handle of `cuModuleGetFunction`, which is never freed.
        launch(to, unsafe { *function.cast::<u64>() })
    }
    cuGraphCreate(graph: *mut Handle, _flags: c_uint) { put(graph, Box::into_raw(Box::new(0u64)).cast()) }
    // Nodes follow one another: only a node's kernel counts, the first field of its record.
    cuGraphAddKernelNode_v2(node: *mut Handle, graph: Handle, _after: *const Handle, _count: usize,
        kernel: *const Handle) {
        // SAFETY: as said above; handles of this library.
        unsafe { *graph.cast::<u64>() += *(*kernel).cast::<u64>() };
        put(node, graph)
    }
    cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, _flags: u64) {
        // SAFETY: a handle of this library.
        let length = unsafe { *graph.cast::<u64>() };
        put(exec, Box::into_raw(Box::new(length)).cast())
    }
    cuGraphLaunch(exec: Handle, to: Handle) {
        // SAFETY: a handle of this library.
        launch(to, unsafe { *exec.cast::<u64>() })
    }
    cuStreamCreate(out: *mut Handle, _flags: c_uint) { put(out, handle(STREAMS + streams().create())) }
    cuStreamDestroy_v2(to: Handle) {
        if streams().destroy(stream(to)) { SUCCESS } else { INVALID_HANDLE }
    }
    cuStreamSynchronize(to: Handle) { said(wait(|streams, now| streams.until(stream(to), now))) }
    cuStreamQuery(to: Handle) {
        let now = now();
        said(streams().until(stream(to), now).is_some_and(|until| until <= now))
    }
    cuStreamGetCtx(_to: Handle, context: *mut Handle) { put(context, handle(CONTEXT)) }
    cuStreamIsCapturing(_to: Handle, status: *mut c_uint) { put(status, 0) }
    cuStreamWaitEvent(to: Handle, of: Handle, _flags: c_uint) {
        let mut streams = streams();
        let entry = streams.wait_for(event(of));
        if entry.is_some_and(|entry| streams.push(stream(to), entry)) { SUCCESS } else { INVALID_HANDLE }
    }
    cuStreamWaitValue32_v2(to: Handle, address: u64, value: u32, _flags: c_uint) {
        let Ok(address) = usize::try_from(address) else { return INVALID_VALUE };
        if !device().waits_for_words {
            return NOT_SUPPORTED;
        }
        queue(to, Entry::Wait(Wait::Word(address, value)))
    }
    cuLaunchHostFunc(to: Handle, function: HostFunction, argument: *mut c_void) {
        queue(to, Entry::Host(function, argument.expose_provenance()))
    }
    cuEventCreate(out: *mut Handle, _flags: c_uint) { put(out, handle(EVENTS + streams().create_event())) }
    cuEventDestroy_v2(_event: Handle) { SUCCESS }
    cuEventRecord(of: Handle, to: Handle) {
        let mut streams = streams();
        let entry = streams.record(event(of));
        if entry.is_some_and(|entry| streams.push(stream(to), entry)) { SUCCESS } else { INVALID_HANDLE }
    }
    cuEventQuery(of: Handle) {
        let now = now();
        said(streams().event_at(event(of), now).is_some_and(|at| at <= now))
    }
    cuEventSynchronize(of: Handle) { said(wait(|streams, now| streams.event_at(event(of), now))) }
    cuEventElapsedTime(milliseconds: *mut f32, from: Handle, to: Handle) {
        let now = now();
        let mut streams = streams();
        let mut at = |of| Streams::event_at(&mut streams, event(of), now).filter(|&at| at <= now);
        let (Some(from), Some(to)) = (at(from), at(to)) else { return NOT_READY };
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "the driver's own type")]
        let elapsed = (to.cast_signed() - from.cast_signed()) as f32 / 1e6;
        put(milliseconds, elapsed)
    }
    cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        allocated().take(bytes).map_or(OUT_OF_MEMORY, |place| put(address, place))
    }
    cuMemFree_v2(address: u64) { allocated().give_back(address) }
    cuMemCreate(physical: *mut u64, bytes: usize, _properties: *const c_void, _flags: u64) {
        allocated().take(bytes).map_or(OUT_OF_MEMORY, |place| put(physical, place))
    }
    cuMemRelease(physical: u64) { allocated().give_back(physical) }
    cuMemAddressReserve(address: *mut u64, bytes: usize, align: usize, _wish: u64, _flags: u64) {
        put(address, allocated().addresses(bytes, align))
    }
    cuMemAddressFree(_address: u64, _bytes: usize) { SUCCESS }
    cuMemMap(_address: u64, _bytes: usize, _offset: usize, _physical: u64, _flags: u64) { SUCCESS }
    cuMemUnmap(_address: u64, _bytes: usize) { SUCCESS }
    cuMemSetAccess(_address: u64, _bytes: usize, _access: *const c_void, _count: usize) { SUCCESS }
    cuMemGetAllocationGranularity(bytes: *mut usize, _properties: *const c_void, _option: c_uint) {
        put(bytes, 2 << 20)
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, MEMORY - allocated().bytes).max(put(total, MEMORY))
    }
    cuMemHostRegister_v2(_address: *mut c_void, _bytes: usize, _flags: c_uint) { SUCCESS }
    cuMemHostUnregister(_address: *mut c_void) { SUCCESS }
    cuMemHostGetDevicePointer_v2(address: *mut u64, host: *mut c_void, _flags: c_uint) {
        put(address, host.expose_provenance() as u64)
    }
    cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) {
        // SAFETY: zeroed memory that is never freed.
        put(address, unsafe { libc::calloc(1, bytes) })
    }
    cuMemcpyHtoDAsync_v2(_to: u64, _from: *const c_void, bytes: usize, on: Handle) {
        queue(on, Entry::Copy(bytes as u64 / 16))
    }
    cuMemcpyDtoHAsync_v2(_to: *mut c_void, _from: u64, bytes: usize, on: Handle) {
        queue(on, Entry::Copy(bytes as u64 / 16))
    }
    cuGetProcAddress_v2(name: *const c_char, found: *mut *const c_void, _release: c_int, _flags: u64,
        status: *mut c_uint) {
        // SAFETY: as said above.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let is = |own: &str| {
            own.as_bytes().strip_prefix(name).is_some_and(|rest| matches!(rest, b"" | b"_v2"))
        };
        let address = ALL.iter().find(|(own, _)| is(own)).map_or(std::ptr::null(), |(_, address)| address.0);
        // The status may be left out.
        put(status, u32::from(address.is_null()));
        put(found, address).max(if address.is_null() { NOT_FOUND } else { SUCCESS })
    }
}

/// GPU time of this process's kernels, in ns.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn stub_busy_ns() -> u64 {
    device().used()
}
