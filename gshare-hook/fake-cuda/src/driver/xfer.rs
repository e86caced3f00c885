//! Copies and sets.
//!
//! Bytes really move: at the call, or, while pending host functions of this process might still change them, when the device reaches the
//! copy. A synchronous copy waits for its turn on the device first.

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::array::Array;
use super::capture::{legacy_not_implied, not_while_capturing, submit};
use super::registry::{What, check_range, on_device};
use super::tasks::Task;
use super::*;

/// Queues a copy or a set on a stream.
fn queue<T: Task>(stream: Ref<Stream>, task: T, check: fn(&T) -> Answer) -> Answer {
    legacy_not_implied(stream)?;
    check(&task)?;
    calls::copy();
    submit(stream, task)
}

/// One side of a copy.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    pub(crate) address: u64,
    pub(crate) pitch: u64,
    pub(crate) slice: u64,
    pub(crate) device: bool,
}

/// A box of bytes to copy.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) to: Side,
    pub(crate) from: Side,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

impl Side {
    pub(crate) fn linear(address: u64, device: bool) -> Self {
        Self { address, pitch: 0, slice: 0, device }
    }

    fn check(&self, t: &Transfer, write: bool) -> Answer {
        let extent = self.slice * (t.depth - 1) + self.pitch * (t.height - 1) + t.width;
        invalid_if(self.address == 0 || t.height > 1 && self.pitch < t.width)?;
        if self.device { check_range(self.address, extent, write) } else { Ok(()) }
    }
}

impl Transfer {
    fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    pub(crate) fn check(&self) -> Answer {
        if self.bytes() == 0 {
            return Ok(());
        }
        self.to.check(self, true)?;
        self.from.check(self, false)
    }

    fn apply(&self) {
        for z in 0..self.depth {
            for y in 0..self.height {
                let to = self.to.address + z * self.to.slice + y * self.to.pitch;
                let from = self.from.address + z * self.from.slice + y * self.from.pitch;
                // SAFETY: device ranges were checked; host ranges are the caller's promise. They may overlap.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, self.width as usize) };
            }
        }
    }

    /// The copy's work on the device, unless the copy shall fail.
    fn work(&self) -> Res<Work> {
        let (bytes, crosses, driver) = (self.bytes(), self.to.device != self.from.device, driver()?);
        let (failed, copies) = &driver.failed_copies;
        if crosses && !failed.is_empty() {
            let number = copies.fetch_add(1, Relaxed) + 1;
            refuse_if(failed.contains(&number), CUresult::CUDA_ERROR_UNKNOWN)?;
        }
        let ns = driver.profile().copy_ns(bytes, crosses);
        let to_host = self.from.device && !self.to.device;
        if to_host {
            VALUES.read_back()?;
        }
        Ok(Work::Copy { engine: to_host.into(), bytes, ns })
    }

    /// Runs the copy on the default stream, and returns when it is done.
    fn run_now(self, flavor: Flavor) -> Answer {
        current()?;
        not_while_capturing()?;
        // SAFETY: the null handle.
        let stream = unsafe { StreamArg::default_of(flavor).find()? };
        legacy_not_implied(stream)?;
        self.check()?;
        if self.bytes() == 0 {
            return Ok(());
        }
        calls::copy();
        let driver = driver()?;
        let position = push(stream, self.work()?)?;
        driver.device.wait(driver.process, stream.slot, position);
        stream.context.check()?;
        self.apply();
        Ok(())
    }

    fn run_on(self, stream: StreamArg) -> Answer {
        // SAFETY: the handle is the C caller's.
        queue(unsafe { stream.find()? }, self, Self::check)
    }
}

task!(Transfer, 1, |&transfer, stream| {
    if transfer.bytes() == 0 {
        return Ok(());
    }
    let work = transfer.work()?;
    move_bytes(stream, move || transfer.apply())?;
    push(stream, work).map(drop)
});

fn linear(to: Side, from: Side, bytes: usize) -> Transfer {
    Transfer { to, from, width: bytes as u64, height: 1, depth: 1 }
}

fn dev(address: u64) -> Side {
    Side::linear(address, true)
}

fn host(address: *const c_void) -> Side {
    Side::linear(address as u64, false)
}

/// A pointer to host or device memory.
fn any(address: u64) -> Side {
    Side::linear(address, on_device(address))
}

entry!(cuMemcpyBatchAsync, |to, from, sizes, count, _, _, _, failed, stream| {
    put_opt(failed, usize::MAX);
    invalid_if(to.is_null() || from.is_null() || sizes.is_null() || count == 0 || stream.1 as usize <= 2)?;
    (0..count).try_for_each(|i| linear(any(*to.add(i)), any(*from.add(i)), *sizes.add(i)).run_on(stream))
});
alias!(
    cuMemcpyBatchAsync_v2(to, from, sizes, count, all, at, n, stream) =
        cuMemcpyBatchAsync(to, from, sizes, count, all, at, n, null_mut(), stream)
);

// --- Boxes -----------------------------------------------------------------------------------------
//
// The driver's structures with their enumerations as integers: an end to read from, one to write to, and the extent.

#[repr(C)]
#[derive(Clone, Copy)]
struct End2D {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: *mut c_void,
    pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct End3D {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: *mut c_void,
    /// Reserved, or the context in the peer variant: the layout is the same.
    context: *mut c_void,
    pitch: usize,
    rows: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ends<End, const DIMENSIONS: usize> {
    from: End,
    to: End,
    extent: [usize; DIMENSIONS],
}

const _: () = assert!(size_of::<Ends<End2D, 2>>() == size_of::<sys::CUDA_MEMCPY2D>());
const _: () = assert!(size_of::<Ends<End3D, 3>>() == size_of::<sys::CUDA_MEMCPY3D>());
const _: () = assert!(size_of::<Ends<End3D, 3>>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());

impl From<End2D> for End3D {
    fn from(End2D { x, y, kind, host, device, array, pitch }: End2D) -> Self {
        Self { x, y, z: 0, lod: 0, kind, host, device, array, context: null_mut(), pitch, rows: 0 }
    }
}

unsafe fn side(end: End3D, width: u64, height: u64) -> Res<Side> {
    let pitch = end.pitch as u64;
    let slice = pitch * end.rows as u64;
    let (address, pitch, slice, device) = match end.kind {
        1 => (end.host, pitch, slice, false),
        2 => (end.device, pitch, slice, true),
        3 => {
            let array = Object::<Array>::get(end.array)?;
            (array.address, array.pitch, array.pitch * array.height.max(1), true)
        }
        4 => (end.device, pitch, slice, on_device(end.device)),
        _ => return Err(INVALID_VALUE),
    };
    let pitch = if pitch == 0 { width } else { pitch };
    let slice = if slice == 0 { pitch * height } else { slice };
    let address = address + end.z as u64 * slice + end.y as u64 * pitch + end.x as u64;
    Ok(Side { address, pitch, slice, device })
}

unsafe fn transfer(from: End3D, to: End3D, extent: [usize; 3]) -> Res<Transfer> {
    let [width, height, depth] = extent.map(|n| n as u64);
    Ok(Transfer { to: side(to, width, height)?, from: side(from, width, height)?, width, height, depth })
}

unsafe fn from_2d(copy: *const sys::CUDA_MEMCPY2D) -> Res<Transfer> {
    let Ends::<End2D, 2> { from, to, extent: [width, height] } = read(copy.cast())?;
    transfer(from.into(), to.into(), [width, height, 1])
}

pub(crate) unsafe fn from_3d(copy: *const c_void) -> Res<Transfer> {
    let Ends::<End3D, 3> { from, to, extent } = read(copy)?;
    transfer(from, to, extent)
}

unsafe fn in_array(handle: sys::CUarray, offset: usize) -> Res<Side> {
    Ok(dev(Object::<Array>::get(handle)?.address + offset as u64))
}

// --- Sets ------------------------------------------------------------------------------------------

/// Zeroed bytes from which on a fill gives pages back to the host instead of writing them.
const SPARSE: usize = 1 << 16;
const PAGE: usize = 4096;

/// Makes bytes zero. Whole pages go back to the host, so a program may zero a whole simulated device without filling the host's memory.
///
/// # Safety
/// The range is mapped and writable, and its pages are anonymous or of a memory file.
unsafe fn zero(at: usize, length: usize) {
    let (first, end) = (at.next_multiple_of(PAGE), (at + length) / PAGE * PAGE);
    let (pages, size) = (first as *mut c_void, end - first);
    // SAFETY: whole pages of the caller's range. Pages of a file are cut out of it; for anonymous pages the call fails, and dropping them
    // makes them zero.
    let given = unsafe {
        match madvise(pages, size, Advice::LinuxRemove) {
            Err(Errno::INVAL) => madvise(pages, size, Advice::LinuxDontNeed),
            done => done,
        }
    };
    // SAFETY: the caller's range.
    unsafe {
        if given.is_ok() {
            std::ptr::write_bytes(at as *mut u8, 0, first - at);
            std::ptr::write_bytes(end as *mut u8, 0, at + length - end);
        } else {
            std::ptr::write_bytes(at as *mut u8, 0, length);
        }
    }
}

/// A memset: rows of equal elements. The layout equals `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Fill {
    pub(crate) address: u64,
    pub(crate) pitch: u64,
    pub(crate) value: u32,
    /// Bytes per element: 1, 2 or 4.
    pub(crate) element: u32,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

const _: () = assert!(size_of::<Fill>() == size_of::<sys::CUDA_MEMSET_NODE_PARAMS_v1>());

impl Fill {
    fn bytes(&self) -> u64 {
        self.width * self.height * u64::from(self.element)
    }

    pub(crate) fn check(&self) -> Answer {
        let row = self.width * u64::from(self.element);
        let aligned = self.address.is_multiple_of(u64::from(self.element));
        invalid_if(!aligned || self.height > 1 && self.pitch < row)?;
        if self.bytes() > 0 {
            check_range(self.address, self.pitch * (self.height - 1) + row, true)?;
        }
        Ok(())
    }

    fn run_now(self, flavor: Flavor) -> Answer {
        current()?;
        not_while_capturing()?;
        self.run_on(StreamArg::default_of(flavor))
    }

    fn run_on(self, stream: StreamArg) -> Answer {
        current()?;
        // SAFETY: the handle is the C caller's.
        queue(unsafe { stream.find()? }, self, Self::check)
    }

    fn apply(&self) {
        let bytes = self.value.to_le_bytes();
        let element = &bytes[..self.element as usize];
        let same = element.iter().all(|byte| *byte == bytes[0]);
        let length = (self.width * u64::from(self.element)) as usize;
        for row in 0..self.height {
            let at = (self.address + row * self.pitch) as usize;
            // SAFETY: the range was checked to lie in live device memory, which this process has mapped.
            unsafe {
                if self.value == 0 && length >= SPARSE && self.is_ours() {
                    zero(at, length);
                } else if same {
                    std::ptr::write_bytes(at as *mut u8, bytes[0], length);
                } else {
                    let row = std::slice::from_raw_parts_mut(at as *mut u8, length);
                    row.chunks_exact_mut(element.len()).for_each(|to| to.copy_from_slice(element));
                }
            }
        }
    }

    /// Whether the simulator owns the pages; the program may have registered its own.
    fn is_ours(&self) -> bool {
        let found = driver().ok().and_then(|driver| driver.memory().find(self.address));
        found.is_some_and(|alloc| !matches!(alloc.what, What::Registered(_)))
    }
}

task!(Fill, 2, |&fill, stream| {
    let bytes = fill.bytes();
    if bytes == 0 {
        return Ok(());
    }
    move_bytes(stream, move || fill.apply())?;
    push(stream, Work::Copy { engine: 0, bytes, ns: driver()?.profile().copy_ns(bytes, false) }).map(drop)
});

fn fill(element: u32, at: u64, pitch: usize, value: impl Into<u32>, width: usize, height: usize) -> Fill {
    let (value, pitch) = (value.into(), pitch as u64);
    Fill { address: at, pitch, value, element, width: width as u64, height: height as u64 }
}

// --- Calls -----------------------------------------------------------------------------------------

/// The two calls for one way of copying or setting: on the default stream, and on the stream behind the arguments; `_` for a missing call.
macro_rules! pairs {
    ($($now:ident $on:tt $args:tt $task:expr;)*) => {$(
        pairs!(@now $now $args $task);
        pairs!(@on $on $args $task);
    )*};
    (@now $name:ident ($($arg:tt),*) $task:expr) => {
        entry!($name, |flavor, $($arg),*| $task.run_now(flavor));
    };
    (@on _ $args:tt $task:expr) => {};
    (@on $name:ident ($($arg:tt),*) $task:expr) => {
        entry!($name, |$($arg),*, stream| $task.run_on(stream));
    };
}
pairs! {
    cuMemcpy cuMemcpyAsync (to, from, n) linear(any(to), any(from), n);
    cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 (to, from, n) linear(dev(to), host(from), n);
    cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2 (to, from, n) linear(host(to), dev(from), n);
    cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2 (to, from, n) linear(dev(to), dev(from), n);
    cuMemcpyPeer cuMemcpyPeerAsync (to, _, from, _, n) linear(dev(to), dev(from), n);
    cuMemcpy2D_v2 cuMemcpy2DAsync_v2 (copy) from_2d(copy)?;
    cuMemcpy2DUnaligned_v2 _ (copy) from_2d(copy)?;
    cuMemcpy3D_v2 cuMemcpy3DAsync_v2 (copy) from_3d(copy.cast())?;
    cuMemcpy3DPeer cuMemcpy3DPeerAsync (copy) from_3d(copy.cast())?;
    cuMemcpyHtoA_v2 cuMemcpyHtoAAsync_v2 (to, at, from, n) linear(in_array(to, at)?, host(from), n);
    cuMemcpyAtoH_v2 cuMemcpyAtoHAsync_v2 (to, from, at, n) linear(host(to), in_array(from, at)?, n);
    cuMemcpyDtoA_v2 _ (to, at, from, n) linear(in_array(to, at)?, dev(from), n);
    cuMemcpyAtoD_v2 _ (to, from, at, n) linear(dev(to), in_array(from, at)?, n);
    cuMemcpyAtoA_v2 _ (to, to_at, from, from_at, n) linear(in_array(to, to_at)?, in_array(from, from_at)?, n);
    cuMemsetD8_v2 cuMemsetD8Async (at, value, n) fill(1, at, 0, value, n, 1);
    cuMemsetD16_v2 cuMemsetD16Async (at, value, n) fill(2, at, 0, value, n, 1);
    cuMemsetD32_v2 cuMemsetD32Async (at, value, n) fill(4, at, 0, value, n, 1);
    cuMemsetD2D8_v2 cuMemsetD2D8Async (at, pitch, value, n, rows) fill(1, at, pitch, value, n, rows);
    cuMemsetD2D16_v2 cuMemsetD2D16Async (at, pitch, value, n, rows) fill(2, at, pitch, value, n, rows);
    cuMemsetD2D32_v2 cuMemsetD2D32Async (at, pitch, value, n, rows) fill(4, at, pitch, value, n, rows);
}

alias!(cuMemcpyWithAttributesAsync(to, from, n, _, stream) = cuMemcpyAsync(to, from, n, stream));
