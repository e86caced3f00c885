//! Copies.
//!
//! Bytes really move. They move when the call is made, or, while host functions of this process are pending (which might
//! still change them), when the device reaches the copy. A synchronous copy waits for its turn on the device first.

use super::array::Array;
use super::capture::{legacy_not_implied, not_while_capturing};
use super::memory::{check_range, on_device};
use super::*;

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

    fn check(&self, t: &Transfer) -> Answer {
        let extent = self.slice * (t.depth - 1) + self.pitch * (t.height - 1) + t.width;
        invalid_if(self.address == 0 || t.height > 1 && self.pitch < t.width)?;
        if self.device { check_range(self.address, extent) } else { Ok(()) }
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
        self.to.check(self)?;
        self.from.check(self)
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

    fn work(&self) -> Res<Work> {
        let bytes = self.bytes();
        let ns = driver()?.profile().copy_ns(bytes, self.to.device != self.from.device);
        Ok(Work::Copy { engine: u32::from(self.from.device && !self.to.device), bytes, ns })
    }

    pub(crate) fn run(self, stream: Ref<Stream>) -> Answer {
        if self.bytes() == 0 {
            return Ok(());
        }
        move_bytes(stream, move || self.apply())?;
        push(stream, self.work()?).map(drop)
    }

    /// On the default stream, and done when it returns.
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
        let stream = unsafe { stream.find()? };
        legacy_not_implied(stream)?;
        self.check()?;
        calls::copy();
        submit(stream, self)
    }
}

fn linear(to: Side, from: Side, bytes: usize) -> Transfer {
    Transfer { to, from, width: bytes as u64, height: 1, depth: 1 }
}

fn dev(address: u64) -> Side {
    Side::linear(address, true)
}

fn host(address: *const c_void) -> Side {
    Side::linear(address as u64, false)
}

/// A pointer that may be either.
fn any(address: u64) -> Side {
    Side::linear(address, on_device(address))
}

unsafe fn copy_all(
    to: *mut u64,
    from: *mut u64,
    sizes: *mut usize,
    count: usize,
    stream: StreamArg,
) -> Answer {
    invalid_if(to.is_null() || from.is_null() || sizes.is_null() || count == 0 || stream.1 as usize <= 2)?;
    (0..count).try_for_each(|i| linear(any(*to.add(i)), any(*from.add(i)), *sizes.add(i)).run_on(stream))
}

entry!(cuMemcpyBatchAsync, |to, from, sizes, count, _, _, _, failIdx, stream| {
    put_opt(failIdx, usize::MAX);
    copy_all(to, from, sizes, count, stream)
});

entry!(cuMemcpyBatchAsync_v2, |to, from, sizes, count, _, _, _, stream| {
    copy_all(to, from, sizes, count, stream)
});

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
struct Copy2D {
    from: End2D,
    to: End2D,
    width: usize,
    height: usize,
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
struct Copy3D {
    from: End3D,
    to: End3D,
    width: usize,
    height: usize,
    depth: usize,
}

const _: () = assert!(size_of::<Copy2D>() == size_of::<sys::CUDA_MEMCPY2D>());
const _: () = assert!(size_of::<Copy3D>() == size_of::<sys::CUDA_MEMCPY3D>());
const _: () = assert!(size_of::<Copy3D>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());

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
    invalid_if(copy.is_null())?;
    let c = copy.cast::<Copy2D>().read_unaligned();
    transfer(c.from.into(), c.to.into(), [c.width, c.height, 1])
}

pub(crate) unsafe fn from_3d(copy: *const c_void) -> Res<Transfer> {
    invalid_if(copy.is_null())?;
    let c = copy.cast::<Copy3D>().read_unaligned();
    transfer(c.from, c.to, [c.width, c.height, c.depth])
}

unsafe fn in_array(handle: sys::CUarray, offset: usize) -> Res<Side> {
    Ok(dev(Object::<Array>::get(handle)?.address + offset as u64))
}

// --- Calls -----------------------------------------------------------------------------------------

/// The calls that copy in one way: on the default stream, and on one that follows the arguments; `_` where
/// there is no such call.
macro_rules! copies {
    ($($now:ident $on:tt $args:tt $transfer:expr;)*) => {$(
        copies!(@now $now $args $transfer);
        copies!(@on $on $args $transfer);
    )*};
    (@now $name:ident ($($arg:tt),*) $transfer:expr) => {
        entry!($name, |flavor, $($arg),*| $transfer.run_now(flavor));
    };
    (@on _ $args:tt $transfer:expr) => {};
    (@on $name:ident ($($arg:tt),*) $transfer:expr) => {
        entry!($name, |$($arg),*, stream| $transfer.run_on(stream));
    };
}
copies! {
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
}

entry!(cuMemcpyWithAttributesAsync, |to, from, n, _, stream| linear(any(to), any(from), n).run_on(stream));
