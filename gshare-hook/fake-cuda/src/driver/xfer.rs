//! Copies.
//!
//! Bytes really move. They move when the call is made, or, while host functions of this process are pending (which might
//! still change them), when the device reaches the copy. A synchronous copy waits for its turn on the device first.

use std::ptr::null_mut;
use std::sync::atomic::Ordering::Acquire;

use super::array::Array;
use super::base::*;
use super::capture::{legacy_not_implied, not_while_capturing};
use super::graph::Node;
use super::memory::{check_range, on_device};
use super::*;
use crate::sim::Work;

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub(crate) address: u64,
    pub(crate) pitch: u64,
    pub(crate) slice: u64,
    pub(crate) device: bool,
}

/// A box of bytes to copy.
#[derive(Clone, Copy, Debug)]
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
        refuse_if(self.address == 0 || t.height > 1 && self.pitch < t.width, INVALID_VALUE)?;
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

    fn work(&self) -> Result<Work, CUresult> {
        let bytes = self.bytes();
        let ns = driver()?.profile().copy_ns(bytes, self.to.device != self.from.device);
        Ok(Work::Copy { engine: u32::from(self.from.device && !self.to.device), bytes, ns })
    }

    pub(crate) fn run(self, stream: &'static Object<Stream>) -> Answer {
        if self.bytes() == 0 {
            return Ok(());
        }
        if driver()?.hosts_pending.load(Acquire) == 0 {
            self.apply();
        } else {
            push_call(stream, move || self.apply())?;
        }
        push(stream, self.work()?)?;
        Ok(())
    }

    /// On the default stream, and done when it returns.
    fn run_now(self, flavor: Flavor) -> Answer {
        current()?;
        not_while_capturing()?;
        // SAFETY: the null handle.
        let stream = unsafe { stream(flavor, null_mut())? };
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

    fn run_on(self, flavor: Flavor, handle: sys::CUstream) -> Answer {
        // SAFETY: the handle is the C caller's.
        let stream = unsafe { stream(flavor, handle)? };
        legacy_not_implied(stream)?;
        self.check()?;
        calls::copy();
        submit(stream, Node::Copy(self))
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

/// The two copies of a kind: on the default stream and on one that is given, between sides that [`dev`], [`host`] or [`any`] make.
macro_rules! copies {
    ($($sync:ident $asynchronous:ident $to_side:ident $from_side:ident;)*) => {$(
        entry!($sync, |flavor, to, from, bytes| {
            linear($to_side(to), $from_side(from), bytes).run_now(flavor)
        });
        entry!($asynchronous, |flavor, to, from, bytes, stream| {
            linear($to_side(to), $from_side(from), bytes).run_on(flavor, stream)
        });
    )*};
}
copies! {
    cuMemcpy cuMemcpyAsync any any;
    cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 dev host;
    cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2 host dev;
    cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2 dev dev;
}

entry!(cuMemcpyPeer, |flavor, to, _, from, _, n| linear(dev(to), dev(from), n).run_now(flavor));
entry!(cuMemcpyPeerAsync, |flavor, to, _, from, _, n, stream| {
    linear(dev(to), dev(from), n).run_on(flavor, stream)
});
entry!(cuMemcpyWithAttributesAsync, |flavor, to, from, n, _, stream| {
    linear(any(to), any(from), n).run_on(flavor, stream)
});

unsafe fn copy_all(
    flavor: Flavor,
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    hStream: sys::CUstream,
) -> Answer {
    refuse_if(
        dsts.is_null() || srcs.is_null() || sizes.is_null() || count == 0 || hStream as usize <= 2,
        INVALID_VALUE,
    )?;
    for i in 0..count {
        linear(any(*dsts.add(i)), any(*srcs.add(i)), *sizes.add(i)).run_on(flavor, hStream)?;
    }
    Ok(())
}

entry!(cuMemcpyBatchAsync, |flavor, dsts, srcs, sizes, count, _, _, _, failIdx, hStream| {
    put_opt(failIdx, usize::MAX);
    copy_all(flavor, dsts, srcs, sizes, count, hStream)
});

entry!(cuMemcpyBatchAsync_v2, |flavor, dsts, srcs, sizes, count, _, _, _, hStream| {
    copy_all(flavor, dsts, srcs, sizes, count, hStream)
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

unsafe fn side(end: End3D, width: u64, height: u64) -> Result<Side, CUresult> {
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

unsafe fn transfer(from: End3D, to: End3D, extent: [usize; 3]) -> Result<Transfer, CUresult> {
    let [width, height, depth] = extent.map(|n| n as u64);
    Ok(Transfer { to: side(to, width, height)?, from: side(from, width, height)?, width, height, depth })
}

unsafe fn from_2d(copy: *const sys::CUDA_MEMCPY2D) -> Result<Transfer, CUresult> {
    refuse_if(copy.is_null(), INVALID_VALUE)?;
    let c = copy.cast::<Copy2D>().read_unaligned();
    transfer(c.from.into(), c.to.into(), [c.width, c.height, 1])
}

pub(crate) unsafe fn from_3d(copy: *const c_void) -> Result<Transfer, CUresult> {
    refuse_if(copy.is_null(), INVALID_VALUE)?;
    let c = copy.cast::<Copy3D>().read_unaligned();
    transfer(c.from, c.to, [c.width, c.height, c.depth])
}

entry!(cuMemcpy2D_v2 | cuMemcpy2DUnaligned_v2, |flavor, pCopy| from_2d(pCopy)?.run_now(flavor));
entry!(cuMemcpy2DAsync_v2, |flavor, pCopy, hStream| from_2d(pCopy)?.run_on(flavor, hStream));
entry!(cuMemcpy3D_v2 | cuMemcpy3DPeer, |flavor, pCopy| from_3d(pCopy.cast())?.run_now(flavor));

entry!(cuMemcpy3DAsync_v2 | cuMemcpy3DPeerAsync, |flavor, pCopy, stream| {
    from_3d(pCopy.cast())?.run_on(flavor, stream)
});

// --- One-dimensional arrays ------------------------------------------------------------------------

unsafe fn in_array(handle: sys::CUarray, offset: usize) -> Result<Side, CUresult> {
    Ok(dev(Object::<Array>::get(handle)?.address + offset as u64))
}

entry!(cuMemcpyHtoA_v2, |flavor, to, at, from, n| linear(in_array(to, at)?, host(from), n).run_now(flavor));
entry!(cuMemcpyAtoH_v2, |flavor, to, from, at, n| linear(host(to), in_array(from, at)?, n).run_now(flavor));
entry!(cuMemcpyDtoA_v2, |flavor, to, at, from, n| linear(in_array(to, at)?, dev(from), n).run_now(flavor));
entry!(cuMemcpyAtoD_v2, |flavor, to, from, at, n| linear(dev(to), in_array(from, at)?, n).run_now(flavor));
entry!(cuMemcpyHtoAAsync_v2, |flavor, to, at, from, n, stream| {
    linear(in_array(to, at)?, host(from), n).run_on(flavor, stream)
});
entry!(cuMemcpyAtoHAsync_v2, |flavor, to, from, at, n, stream| {
    linear(host(to), in_array(from, at)?, n).run_on(flavor, stream)
});
entry!(cuMemcpyAtoA_v2, |flavor, to, to_at, from, from_at, n| {
    linear(in_array(to, to_at)?, in_array(from, from_at)?, n).run_now(flavor)
});
