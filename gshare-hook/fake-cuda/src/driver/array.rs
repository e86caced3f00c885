//! Arrays and mipmapped arrays: memory without padding, charged to the byte. Sparse arrays and arrays with deferred mapping own no memory:
//! the program would map it, which is not supported.

use super::device_memory::{allocate, free_at_rest};
use super::*;

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

/// The description of a new array: the driver's descriptor with its enumeration as an integer.
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
        // The number of layers stays the same at each level.
        if self.flags & 1 == 0 {
            self.depth = half(self.depth);
        }
        self
    }
}

impl Array {
    /// An array, or a level, with memory at `address`; 0 for no memory.
    fn create(shape: Shape, address: u64, level: bool) -> Res<Ref<Self>> {
        let (pitch, height) = (shape.row()?, shape.height as u64);
        Ok(Object::create(Self { address, pitch, height, shape, level }))
    }
}

/// Memory for arrays of a shape, unless the program maps it itself.
fn take(context: &Context, shape: Shape, bytes: u64) -> Res<u64> {
    capture::not_while_capturing()?;
    if shape.without_memory() { Ok(0) } else { allocate(context, bytes, MemKind::Array) }
}

fn give(address: u64) -> Answer {
    if address == 0 { Ok(()) } else { free_at_rest(address) }
}

fn create(context: &Context, shape: Shape) -> Res<Ref<Array>> {
    shape.row()?;
    Array::create(shape, take(context, shape, shape.bytes()?)?, false)
}

entry!(cuArray3DCreate_v2, |array: Given, shape| {
    put(array, create(current()?, read(shape.cast())?)?.handle())
});

entry!(cuArrayCreate_v2, |array: Given, shape| {
    let Shape2D { width, height, format, channels } = read(shape.cast())?;
    let shape = Shape { width, height, depth: 0, format, channels, flags: 0 };
    put(array, create(current()?, shape)?.handle())
});

entry!(cuArrayDestroy, driver, |array: Array| {
    refuse_if(array.level || !array.retire(), INVALID_HANDLE)?;
    give(array.address)
});

entry!(cuArray3DGetDescriptor_v2, |shape, array: Array| put(shape.cast::<Shape>(), array.shape));

entry!(cuArrayGetDescriptor_v2, |shape, array: Array| {
    let Shape { width, height, format, channels, .. } = array.shape;
    put(shape.cast::<Shape2D>(), Shape2D { width, height, format, channels })
});

/// Size and alignment, of arrays with deferred mapping only.
unsafe fn requirements(out: *mut sys::CUDA_ARRAY_MEMORY_REQUIREMENTS, deferred: bool, bytes: u64) -> Answer {
    invalid_if(out.is_null() || !deferred)?;
    std::ptr::write_bytes(out, 0, 1);
    put(out.cast::<[u64; 2]>(), [bytes, 1])
}

entry!(cuArrayGetMemoryRequirements, |memoryRequirements, array: Array, _device: Device| {
    requirements(memoryRequirements, array.shape.flags & 0x80 != 0, array.shape.bytes()?)
});

/// A mipmapped array: its levels one after the other.
struct Mipmapped {
    address: u64,
    bytes: u64,
    deferred: bool,
    levels: Vec<Ref<Array>>,
}

object!(Mipmapped, b"gshareMI");

entry!(cuMipmappedArrayCreate, context, |mipmapped: Given, shape, count| {
    let shape: Shape = read(shape.cast())?;
    capture::not_while_capturing()?;
    let most = shape.width.max(shape.height).max(1).ilog2() + 1;
    let shapes: Vec<Shape> = (0..count.clamp(1, most)).map(|l| shape.at_level(l)).collect();
    let sizes = shapes.iter().map(Shape::bytes).collect::<Res<Vec<u64>>>()?;
    let bytes = sizes.iter().sum();
    let address = take(context, shape, bytes)?;
    let mut at = address;
    let mut levels = Vec::new();
    for (shape, size) in shapes.into_iter().zip(sizes) {
        levels.push(Array::create(shape, at, true)?);
        at += if address == 0 { 0 } else { size };
    }
    let deferred = shape.flags & 0x80 != 0;
    put(mipmapped, Object::create(Mipmapped { address, bytes, deferred, levels }).handle())
});

entry!(cuMipmappedArrayDestroy, driver, |mipmapped: Mipmapped| {
    refuse_if(!mipmapped.retire(), INVALID_HANDLE)?;
    for level in &mipmapped.levels {
        level.retire();
    }
    give(mipmapped.address)
});

entry!(cuMipmappedArrayGetLevel, |array, mipmapped: Mipmapped, level| {
    put(array, mipmapped.levels.get(level as usize).ok_or(INVALID_VALUE)?.handle())
});

entry!(cuMipmappedArrayGetMemoryRequirements, |memoryRequirements, mipmapped: Mipmapped, _device: Device| {
    requirements(memoryRequirements, mipmapped.deferred, mipmapped.bytes)
});
