//! Arrays and mipmapped arrays: memory without padding, charged to the byte. Those whose memory the program maps itself
//! (sparse ones, deferred mapping) have none of their own; mapping it is not supported.

use super::base::*;
use super::memory::{allocate, free};
use super::*;
use crate::sim::MemKind;

/// An array, or one level of a mipmapped array.
pub(crate) struct Array {
    /// 0 for none.
    pub(crate) address: u64,
    /// Bytes of a row.
    pub(crate) pitch: u64,
    pub(crate) height: u64,
    shape: Shape,
    /// Levels belong to their mipmapped array.
    level: bool,
}

object!(Array, b"gshareAR");

/// The array that is asked for: the driver's descriptor with its enumeration as an integer.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shape {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

const _: () = assert!(size_of::<Shape>() == size_of::<sys::CUDA_ARRAY3D_DESCRIPTOR>());

/// Width, height, format, channels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shape2D {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

const _: () = assert!(size_of::<Shape2D>() == size_of::<sys::CUDA_ARRAY_DESCRIPTOR>());

impl Shape {
    fn row(&self) -> Res<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return Err(NOT_SUPPORTED),
        };
        invalid_if(self.width == 0 || !matches!(self.channels, 1 | 2 | 4))?;
        (self.width as u64).checked_mul(channel * u64::from(self.channels)).ok_or(INVALID_VALUE)
    }

    fn bytes(&self) -> Res<u64> {
        let rows = (self.height.max(1) as u64).checked_mul(self.depth.max(1) as u64);
        rows.and_then(|rows| rows.checked_mul(self.row().ok()?)).ok_or(INVALID_VALUE)
    }

    /// `CUDA_ARRAY3D_SPARSE` or `CUDA_ARRAY3D_DEFERRED_MAPPING`.
    fn without_memory(&self) -> bool {
        self.flags & 0xc0 != 0
    }

    fn at_level(mut self, level: u32) -> Self {
        let half = |n: usize| if n == 0 { 0 } else { (n >> level).max(1) };
        self.width = half(self.width);
        self.height = half(self.height);
        // Layers keep their number.
        if self.flags & 1 == 0 {
            self.depth = half(self.depth);
        }
        self
    }
}

fn create(shape: Shape) -> Res<Ref<Array>> {
    let context = current()?;
    let (pitch, bytes) = (shape.row()?, shape.bytes()?);
    capture::not_while_capturing()?;
    let address = if shape.without_memory() { 0 } else { allocate(context, bytes, MemKind::Array)? };
    Ok(Object::create(Array { address, pitch, height: shape.height as u64, shape, level: false }))
}

entry!(cuArray3DCreate_v2, |pHandle, pAllocateArray| {
    invalid_if(pHandle.is_null() || pAllocateArray.is_null())?;
    put(pHandle, create(pAllocateArray.cast::<Shape>().read_unaligned())?.handle())
});

entry!(cuArrayCreate_v2, |pHandle, pAllocateArray| {
    invalid_if(pHandle.is_null() || pAllocateArray.is_null())?;
    let s = pAllocateArray.cast::<Shape2D>().read_unaligned();
    let shape = Shape {
        width: s.width,
        height: s.height,
        depth: 0,
        format: s.format,
        channels: s.channels,
        flags: 0,
    };
    put(pHandle, create(shape)?.handle())
});

entry!(cuArrayDestroy, driver, |array: Array| {
    refuse_if(array.level || !array.retire(), INVALID_HANDLE)?;
    if array.address == 0 { Ok(()) } else { free(array.address) }
});

entry!(cuArray3DGetDescriptor_v2, |pArrayDescriptor, hArray: Array| {
    put(pArrayDescriptor.cast::<Shape>(), hArray.shape)
});

entry!(cuArrayGetDescriptor_v2, |pArrayDescriptor, hArray: Array| {
    let s = hArray.shape;
    let shape = Shape2D { width: s.width, height: s.height, format: s.format, channels: s.channels };
    put(pArrayDescriptor.cast::<Shape2D>(), shape)
});

/// Size and alignment, of arrays with deferred mapping only.
unsafe fn requirements(out: *mut sys::CUDA_ARRAY_MEMORY_REQUIREMENTS, deferred: bool, bytes: u64) -> Answer {
    invalid_if(out.is_null() || !deferred)?;
    std::ptr::write_bytes(out, 0, 1);
    put(out.cast::<[u64; 2]>(), [bytes, 1])
}

entry!(cuArrayGetMemoryRequirements, |memoryRequirements, array, _device: Device| {
    let shape = Object::<Array>::get(array)?.shape;
    requirements(memoryRequirements, shape.flags & 0x80 != 0, shape.bytes()?)
});

/// A mipmapped array: its levels one after the other.
struct Mipmapped {
    address: u64,
    bytes: u64,
    deferred: bool,
    levels: Vec<Ref<Array>>,
}

object!(Mipmapped, b"gshareMI");

entry!(cuMipmappedArrayCreate, context, |pHandle, pMipmappedArrayDesc, numMipmapLevels| {
    invalid_if(pHandle.is_null() || pMipmappedArrayDesc.is_null())?;
    capture::not_while_capturing()?;
    let shape = pMipmappedArrayDesc.cast::<Shape>().read_unaligned();
    let most = shape.width.max(shape.height).max(1).ilog2() + 1;
    let shapes: Vec<Shape> = (0..numMipmapLevels.clamp(1, most)).map(|l| shape.at_level(l)).collect();
    let mut bytes = 0;
    for shape in &shapes {
        bytes += shape.bytes()?;
    }
    let address = if shape.without_memory() { 0 } else { allocate(context, bytes, MemKind::Array)? };
    let mut at = address;
    let mut levels = Vec::new();
    for shape in shapes {
        let pitch = shape.row()?;
        levels.push(Object::create(Array {
            address: if address == 0 { 0 } else { at },
            pitch,
            height: shape.height as u64,
            shape,
            level: true,
        }));
        at += shape.bytes()?;
    }
    put(
        pHandle,
        Object::create(Mipmapped { address, bytes, deferred: shape.flags & 0x80 != 0, levels }).handle(),
    )
});

entry!(cuMipmappedArrayDestroy, driver, |mipmapped: Mipmapped| {
    refuse_if(!mipmapped.retire(), INVALID_HANDLE)?;
    for level in &mipmapped.levels {
        level.retire();
    }
    if mipmapped.address == 0 { Ok(()) } else { free(mipmapped.address) }
});

entry!(cuMipmappedArrayGetLevel, |pLevelArray, mipmapped: Mipmapped, level| {
    put(pLevelArray, mipmapped.levels.get(level as usize).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.handle())
});

entry!(cuMipmappedArrayGetMemoryRequirements, |memoryRequirements, mipmap, _device: Device| {
    let mipmapped = Object::<Mipmapped>::get(mipmap)?;
    requirements(memoryRequirements, mipmapped.deferred, mipmapped.bytes)
});
