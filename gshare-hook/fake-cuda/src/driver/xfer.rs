//! Copies.
//!
//! Bytes really move. They move when the call is made, or, while host functions of this process are pending (which might
//! still change them), when the device reaches the copy. A synchronous copy waits for its turn on the device first.

use std::sync::atomic::Ordering::Acquire;

use super::array::Array;
use super::base::*;
use super::graph::{Node, legacy_not_implied, not_while_capturing};
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
    pub(crate) fn linear(to: Side, from: Side, bytes: u64) -> Self {
        Self { to, from, width: bytes, height: 1, depth: 1 }
    }

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
            push_host(
                stream,
                Box::new(move || {
                    self.apply();
                    true
                }),
            )?;
        }
        push(stream, self.work()?)?;
        Ok(())
    }

    /// On the default stream, and done when it returns.
    fn run_now(self, flavor: Flavor) -> Answer {
        current()?;
        not_while_capturing()?;
        // SAFETY: the null handle.
        let stream = unsafe { stream(flavor, std::ptr::null_mut())? };
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
            Transfer::linear($to_side(to), $from_side(from), bytes as u64).run_now(flavor)
        });
        entry!($asynchronous, |flavor, to, from, bytes, stream| {
            Transfer::linear($to_side(to), $from_side(from), bytes as u64).run_on(flavor, stream)
        });
    )*};
}
copies! {
    cuMemcpy cuMemcpyAsync any any;
    cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 dev host;
    cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2 host dev;
    cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2 dev dev;
}

entry!(cuMemcpyPeer, |flavor, dstDevice, _, srcDevice, _, ByteCount| Transfer::linear(
    dev(dstDevice),
    dev(srcDevice),
    ByteCount as u64
)
.run_now(flavor));

entry!(cuMemcpyPeerAsync, |flavor, dstDevice, _, srcDevice, _, ByteCount, hStream| Transfer::linear(
    dev(dstDevice),
    dev(srcDevice),
    ByteCount as u64
)
.run_on(flavor, hStream));

entry!(cuMemcpyWithAttributesAsync, |flavor, dst, src, size, _, hStream| Transfer::linear(
    any(dst),
    any(src),
    size as u64
)
.run_on(flavor, hStream));

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
        Transfer::linear(any(*dsts.add(i)), any(*srcs.add(i)), *sizes.add(i) as u64)
            .run_on(flavor, hStream)?;
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
// The driver's structures with their enumerations as integers.

#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2D {
    src_x: usize,
    src_y: usize,
    src_kind: u32,
    src_host: u64,
    src_device: u64,
    src_array: *mut c_void,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_kind: u32,
    dst_host: u64,
    dst_device: u64,
    dst_array: *mut c_void,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Copy3D {
    src_x: usize,
    src_y: usize,
    src_z: usize,
    src_lod: usize,
    src_kind: u32,
    src_host: u64,
    src_device: u64,
    src_array: *mut c_void,
    /// Reserved, or the source context in the peer variant: the layout is the same.
    src_context: *mut c_void,
    src_pitch: usize,
    src_height: usize,
    dst_x: usize,
    dst_y: usize,
    dst_z: usize,
    dst_lod: usize,
    dst_kind: u32,
    dst_host: u64,
    dst_device: u64,
    dst_array: *mut c_void,
    dst_context: *mut c_void,
    dst_pitch: usize,
    dst_height: usize,
    width: usize,
    height: usize,
    depth: usize,
}

const _: () = assert!(size_of::<Copy2D>() == size_of::<sys::CUDA_MEMCPY2D>());
const _: () = assert!(size_of::<Copy3D>() == size_of::<sys::CUDA_MEMCPY3D>());
const _: () = assert!(size_of::<Copy3D>() == size_of::<sys::CUDA_MEMCPY3D_PEER>());

#[derive(Clone, Copy)]
struct Corner {
    kind: u32,
    host: u64,
    device: u64,
    array: *mut c_void,
    pitch: u64,
    rows: u64,
    x: u64,
    y: u64,
    z: u64,
}

unsafe fn side(c: Corner, width: u64, height: u64) -> Result<Side, CUresult> {
    let (address, pitch, slice, device) = match c.kind {
        1 => (c.host, c.pitch, c.pitch * c.rows, false),
        2 => (c.device, c.pitch, c.pitch * c.rows, true),
        3 => {
            let array = Object::<Array>::get(c.array)?;
            (array.address, array.pitch, array.pitch * array.height.max(1), true)
        }
        4 => (c.device, c.pitch, c.pitch * c.rows, on_device(c.device)),
        _ => return Err(INVALID_VALUE),
    };
    let pitch = if pitch == 0 { width } else { pitch };
    let slice = if slice == 0 { pitch * height } else { slice };
    Ok(Side { address: address + c.z * slice + c.y * pitch + c.x, pitch, slice, device })
}

unsafe fn from_2d(copy: *const sys::CUDA_MEMCPY2D) -> Result<Transfer, CUresult> {
    refuse_if(copy.is_null(), INVALID_VALUE)?;
    let c = copy.cast::<Copy2D>().read_unaligned();
    let (width, height) = (c.width as u64, c.height as u64);
    let corner = |kind, host, device, array, pitch: usize, x: usize, y: usize| Corner {
        kind,
        host,
        device,
        array,
        pitch: pitch as u64,
        rows: 0,
        x: x as u64,
        y: y as u64,
        z: 0,
    };
    let from = corner(c.src_kind, c.src_host, c.src_device, c.src_array, c.src_pitch, c.src_x, c.src_y);
    let to = corner(c.dst_kind, c.dst_host, c.dst_device, c.dst_array, c.dst_pitch, c.dst_x, c.dst_y);
    Ok(Transfer { to: side(to, width, height)?, from: side(from, width, height)?, width, height, depth: 1 })
}

pub(crate) unsafe fn from_3d(copy: *const c_void) -> Result<Transfer, CUresult> {
    refuse_if(copy.is_null(), INVALID_VALUE)?;
    let c = copy.cast::<Copy3D>().read_unaligned();
    let (width, height, depth) = (c.width as u64, c.height as u64, c.depth as u64);
    let from = Corner {
        kind: c.src_kind,
        host: c.src_host,
        device: c.src_device,
        array: c.src_array,
        pitch: c.src_pitch as u64,
        rows: c.src_height as u64,
        x: c.src_x as u64,
        y: c.src_y as u64,
        z: c.src_z as u64,
    };
    let to = Corner {
        kind: c.dst_kind,
        host: c.dst_host,
        device: c.dst_device,
        array: c.dst_array,
        pitch: c.dst_pitch as u64,
        rows: c.dst_height as u64,
        x: c.dst_x as u64,
        y: c.dst_y as u64,
        z: c.dst_z as u64,
    };
    Ok(Transfer { to: side(to, width, height)?, from: side(from, width, height)?, width, height, depth })
}

entry!(cuMemcpy2D_v2 | cuMemcpy2DUnaligned_v2, |flavor, pCopy| from_2d(pCopy)?.run_now(flavor));
entry!(cuMemcpy2DAsync_v2, |flavor, pCopy, hStream| from_2d(pCopy)?.run_on(flavor, hStream));
entry!(cuMemcpy3D_v2 | cuMemcpy3DPeer, |flavor, pCopy| from_3d(pCopy.cast())?.run_now(flavor));

entry!(cuMemcpy3DAsync_v2 | cuMemcpy3DPeerAsync, |flavor, pCopy, hStream| from_3d(pCopy.cast())?
    .run_on(flavor, hStream));

// --- One-dimensional arrays ------------------------------------------------------------------------

unsafe fn in_array(handle: sys::CUarray, offset: usize) -> Result<Side, CUresult> {
    Ok(dev(Object::<Array>::get(handle)?.address + offset as u64))
}

entry!(cuMemcpyHtoA_v2, |flavor, dstArray, dstOffset, srcHost, ByteCount| Transfer::linear(
    in_array(dstArray, dstOffset)?,
    host(srcHost),
    ByteCount as u64
)
.run_now(flavor));

entry!(cuMemcpyAtoH_v2, |flavor, dstHost, srcArray, srcOffset, ByteCount| Transfer::linear(
    host(dstHost),
    in_array(srcArray, srcOffset)?,
    ByteCount as u64
)
.run_now(flavor));

entry!(cuMemcpyHtoAAsync_v2, |flavor, dstArray, dstOffset, srcHost, ByteCount, hStream| Transfer::linear(
    in_array(dstArray, dstOffset)?,
    host(srcHost),
    ByteCount as u64
)
.run_on(flavor, hStream));

entry!(cuMemcpyAtoHAsync_v2, |flavor, dstHost, srcArray, srcOffset, ByteCount, hStream| Transfer::linear(
    host(dstHost),
    in_array(srcArray, srcOffset)?,
    ByteCount as u64
)
.run_on(flavor, hStream));

entry!(cuMemcpyDtoA_v2, |flavor, dstArray, dstOffset, srcDevice, ByteCount| Transfer::linear(
    in_array(dstArray, dstOffset)?,
    dev(srcDevice),
    ByteCount as u64
)
.run_now(flavor));

entry!(cuMemcpyAtoD_v2, |flavor, dstDevice, srcArray, srcOffset, ByteCount| Transfer::linear(
    dev(dstDevice),
    in_array(srcArray, srcOffset)?,
    ByteCount as u64
)
.run_now(flavor));

entry!(cuMemcpyAtoA_v2, |flavor, dstArray, dstOffset, srcArray, srcOffset, ByteCount| {
    Transfer::linear(in_array(dstArray, dstOffset)?, in_array(srcArray, srcOffset)?, ByteCount as u64)
        .run_now(flavor)
});
