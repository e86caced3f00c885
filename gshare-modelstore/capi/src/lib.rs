//! The C interface of the model store's client. `include/gshare_store.h` is made of this file by cbindgen, which `.ci/run header` checks,
//! so the comments here are the documentation in C.
//!
//! Pointers come from C: each function states its assumptions on them. Objects are boxes that C holds and gives back once.
#![allow(unsafe_code, reason = "pointers from C")]

use core::ffi::{CStr, c_char};
use gshare_modelstore::backend::cuda::CudaMap;
use gshare_modelstore::client::{Client, ClientError, GetOptions, Model};
use gshare_modelstore::safetensors::{Dtype, MAX_RANK};
use gshare_modelstore::store::{Access, MemoryTier};
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

/// A connection to a store.
#[derive(Debug)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct gshare_store(Client);

/// A reference to a model.
#[derive(Debug)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct gshare_model {
    /// Declared before the reference, so that it is dropped first.
    gpu: Option<CudaMap>,
    model: Model,
    /// Shapes in C's form, filled at the first access to a tensor.
    shapes: OnceLock<Vec<Vec<u64>>>,
}

impl gshare_model {
    fn shapes(&self) -> Result<&[Vec<u64>], ClientError> {
        if let Some(shapes) = self.shapes.get() {
            return Ok(shapes);
        }
        let manifest = self.model.manifest()?;
        let shape = |at| manifest.get(at).map(|tensor| tensor.shape().collect()).unwrap_or_default();
        Ok(self.shapes.get_or_init(|| (0..manifest.len()).map(shape).collect()))
    }
}

/// A tensor of a model. Pointers are valid until the model is released; no process can write to `data`.
#[derive(Debug)]
#[repr(C)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct gshare_tensor {
    /// Name in UTF-8, without a terminating 0.
    pub name: *const c_char,
    /// Length of the name in bytes.
    pub name_bytes: u64,
    /// Dimensions of the tensor.
    pub shape: *const u64,
    /// Number of dimensions.
    pub rank: u64,
    /// The tensor's data; NULL if the model is not in host memory.
    pub data: *const u8,
    /// Offset of the data in the arena.
    pub offset: u64,
    /// Bytes of the tensor's data.
    pub bytes: u64,
    /// BLAKE3 of the data.
    pub hash: [u8; 32],
    /// 0 BOOL, 1 U8, 2 I8, 3 `F8_E5M2`, 4 `F8_E4M3`, 5 `F8_E8M0`, 6 I16, 7 U16, 8 F16, 9 BF16, 10 I32, 11 U32, 12 F32, 13 C64, 14 F64,
    /// 15 I64, 16 U64, 17 F4, 18 `F6_E2M3`, 19 `F6_E3M2`, 20 any other.
    pub dtype: u8,
}

/// Memory of the GPU.
pub const GSHARE_TIER_GPU: u32 = 0;
/// Host memory.
pub const GSHARE_TIER_HOST: u32 = 1;

/// Only the owner may read.
pub const GSHARE_ACCESS_PRIVATE: u32 = 0;
/// The owner's group may read.
pub const GSHARE_ACCESS_GROUP: u32 = 1;
/// Everybody may read.
pub const GSHARE_ACCESS_PUBLIC: u32 = 2;

/// The store is gone. Codes below 100 come from the store, these codes from the client.
pub const GSHARE_ERROR_GONE: i32 = 100;
/// An argument is invalid.
pub const GSHARE_ERROR_ARGUMENT: i32 = 101;
/// The system refused an operation, or the store speaks another protocol.
pub const GSHARE_ERROR_SYSTEM: i32 = 102;

/// Where an error text goes.
struct ErrorText(*mut c_char, usize);

impl ErrorText {
    fn say(&self, text: &str) {
        if self.0.is_null() || self.1 == 0 {
            return;
        }
        let mut end = text.len().min(self.1 - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: the caller says that the buffer has `self.1` bytes; `end` and the 0 after it are within them.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), self.0.cast(), end);
            *self.0.add(end) = 0;
        }
    }

    fn code(&self, error: &ClientError) -> i32 {
        self.say(&error.to_string());
        match error {
            ClientError::Refused { code, .. } => i32::from(code.number()),
            ClientError::Gone => GSHARE_ERROR_GONE,
            _ => GSHARE_ERROR_SYSTEM,
        }
    }

    fn argument(&self, text: &str) -> i32 {
        self.say(text);
        GSHARE_ERROR_ARGUMENT
    }
}

/// # Safety
/// `text` is null or ends with a 0, and lives as long as the result is used.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?.to_str().ok()
}

fn access(number: u32) -> Option<Access> {
    [Access::Private, Access::Group, Access::Public].get(number as usize).copied()
}

fn done(result: Result<impl Sized, ClientError>, error: &ErrorText) -> i32 {
    result.map_or_else(|refused| error.code(&refused), |_| 0)
}

/// Connects to the store at a path. NULL, with the reason in `error`, if that fails.
///
/// # Safety
/// `path` ends with a 0; `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_connect(
    path: *const c_char,
    error: *mut c_char,
    error_bytes: usize,
) -> *mut gshare_store {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let Some(path) = (unsafe { text(path) }) else {
        error.argument("path is not a text");
        return core::ptr::null_mut();
    };
    match Client::connect(path) {
        Ok(client) => Box::into_raw(Box::new(gshare_store(client))),
        Err(refused) => {
            error.say(&format!("{path}: {refused}"));
            core::ptr::null_mut()
        }
    }
}

/// Closes a connection; models from it stay valid.
///
/// # Safety
/// `store` is null or came from `gshare_store_connect`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_close(store: *mut gshare_store) {
    if !store.is_null() {
        // SAFETY: as the caller promises.
        drop(unsafe { Box::from_raw(store) });
    }
}

/// Takes a reference to a model in a tier, and loads it if necessary; `gshare_model_release` gives the reference back.
/// NULL, with the reason in `error`, if the store refuses. The model outlives the connection and the store, and is mapped
/// at the first access to its tensors.
///
/// # Safety
/// `store` came from `gshare_store_connect`; `name` ends with a 0; `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_get(
    store: *mut gshare_store,
    name: *const c_char,
    tier: u32,
    timeout_ms: u32,
    error: *mut c_char,
    error_bytes: usize,
) -> *mut gshare_model {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let (store, name) = unsafe { (store.as_ref(), text(name)) };
    let (Some(store), Some(name), Some(&tier)) = (store, name, MemoryTier::ALL.get(tier as usize)) else {
        error.argument("store, name or tier is invalid");
        return core::ptr::null_mut();
    };
    let timeout = Duration::from_millis(timeout_ms.into());
    match store.0.get(name, &GetOptions { tier, timeout }) {
        Ok(model) => Box::into_raw(Box::new(gshare_model { gpu: None, model, shapes: OnceLock::new() })),
        Err(refused) => {
            error.code(&refused);
            core::ptr::null_mut()
        }
    }
}

/// Gives a model's reference back.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`; neither the model nor its data is used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_release(model: *mut gshare_model) {
    if !model.is_null() {
        // SAFETY: as the caller promises.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// Loads a safetensors file from `descriptor`, which stays open for the caller. 0, or a code.
///
/// # Safety
/// As `gshare_store_get`; `descriptor` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_put_file(
    store: *mut gshare_store,
    name: *const c_char,
    descriptor: i32,
    access_number: u32,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let (store, name) = unsafe { (store.as_ref(), text(name)) };
    let (Some(store), Some(name), Some(access), 0..) = (store, name, access(access_number), descriptor)
    else {
        return error.argument("store, name, descriptor or access is invalid");
    };
    // SAFETY: as the caller promises, and only until it is duplicated.
    match unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned() {
        Ok(file) => {
            done(store.0.put_file(name, access, MemoryTier::Host, &File::from(file), |_, _| {}), &error)
        }
        Err(refused) => error.code(&refused.into()),
    }
}

/// Stores tensors from memory, by name, shape, data, bytes and dtype of each. 0, or a code.
///
/// # Safety
/// As `gshare_store_get`; `tensors` has `count` elements, each with a name, a shape and data of the stated lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_put(
    store: *mut gshare_store,
    name: *const c_char,
    access_number: u32,
    tensors: *const gshare_tensor,
    count: usize,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let (store, name) = unsafe { (store.as_ref(), text(name)) };
    let (Some(store), Some(name), Some(access), false) =
        (store, name, access(access_number), tensors.is_null())
    else {
        return error.argument("store, name, access or tensors is invalid");
    };
    // SAFETY: as the caller promises.
    let tensors = unsafe { core::slice::from_raw_parts(tensors, count) };
    let mut list: Vec<(&str, Dtype, &[u64], &[u8])> = Vec::with_capacity(count);
    for tensor in tensors {
        let pointers = !tensor.name.is_null() && (tensor.rank == 0 || !tensor.shape.is_null());
        let sizes = [tensor.name_bytes, tensor.rank, tensor.bytes].map(usize::try_from);
        let ([Ok(name_bytes), Ok(rank), Ok(bytes)], true) =
            (sizes, pointers && (tensor.bytes == 0 || !tensor.data.is_null()))
        else {
            return error.argument("a tensor without a name, a shape or data");
        };
        if rank > MAX_RANK {
            return error.argument("a tensor of too many dimensions");
        }
        // SAFETY: not null where there is something to read, and of these lengths, as the caller promises.
        let (name, shape, data) = unsafe {
            (
                core::slice::from_raw_parts(tensor.name.cast::<u8>(), name_bytes),
                if rank == 0 { &[] } else { core::slice::from_raw_parts(tensor.shape, rank) },
                if bytes == 0 { &[] } else { core::slice::from_raw_parts(tensor.data, bytes) },
            )
        };
        let (Ok(name), Some(dtype)) = (core::str::from_utf8(name), Dtype::from_code(tensor.dtype)) else {
            return error.argument("a tensor whose name is not UTF-8, or of no known type");
        };
        if dtype.bytes_of(shape, tensor.bytes) != Some(tensor.bytes) {
            return error.argument(&format!("tensor `{name}`: its bytes are not those of its shape"));
        }
        list.push((name, dtype, shape, data));
    }
    let heads: Vec<(&str, Dtype, &[u64])> =
        list.iter().map(|&(name, dtype, shape, _)| (name, dtype, shape)).collect();
    let stored = store.0.put(name, access, MemoryTier::Host, &heads).and_then(|mut put| {
        list.iter().try_for_each(|(name, _, _, data)| put.write(name, 0, data))?;
        put.commit()
    });
    done(stored, &error)
}

/// Evicts a model from memory; with `forget`, its name becomes free. 0, or a code.
///
/// # Safety
/// As `gshare_store_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_evict(
    store: *mut gshare_store,
    name: *const c_char,
    forget: i32,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let (Some(store), Some(name)) = (unsafe { (store.as_ref(), text(name)) }) else {
        return error.argument("store or name is invalid");
    };
    done(store.0.evict(name, forget != 0), &error)
}

/// The bytes of all arenas in a tier, exact to the byte, for comparison with other books. 0, or a code.
///
/// # Safety
/// `store` came from `gshare_store_connect`; `bytes` has room for one number; `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_store_arena_bytes(
    store: *mut gshare_store,
    tier: u32,
    bytes: *mut u64,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let store = unsafe { store.as_ref() };
    let (Some(store), Some(&tier), false) = (store, MemoryTier::ALL.get(tier as usize), bytes.is_null())
    else {
        return error.argument("store, tier or bytes is invalid");
    };
    match store.0.status() {
        Ok(status) => {
            let here = status.tiers.iter().filter(|found| found.tier == tier);
            // SAFETY: not null, and as the caller promises.
            unsafe { bytes.write(here.map(|tier| tier.arena_bytes).sum()) };
            0
        }
        Err(refused) => error.code(&refused),
    }
}

/// Maps a model, as the first access to a tensor does, after a check that no process can write to it or truncate it. 0, or
/// a code, with the reason in `error`, if the store's files are invalid or the system refuses the map.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_open(
    model: *const gshare_model,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let Some(model) = (unsafe { model.as_ref() }) else { return error.argument("model is null") };
    done(model.shapes(), &error)
}

/// Number of tensors; 0 if the model cannot be mapped, for the reason that `gshare_model_open` gives.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_tensors(model: *const gshare_model) -> u64 {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.and_then(|model| model.shapes().ok()).map_or(0, |shapes| shapes.len() as u64)
}

/// The tensor at a position, in the order of the names. 0, or `GSHARE_ERROR_ARGUMENT` beyond the last tensor, or
/// `GSHARE_ERROR_SYSTEM` if the model cannot be mapped.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`; `tensor` has room for one tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_tensor(
    model: *const gshare_model,
    at: u64,
    tensor: *mut gshare_tensor,
) -> i32 {
    // SAFETY: as the caller promises.
    let Some(model) = (unsafe { model.as_ref() }) else { return GSHARE_ERROR_ARGUMENT };
    let Ok(at) = usize::try_from(at) else { return GSHARE_ERROR_ARGUMENT };
    let (Ok(shapes), Ok(manifest)) = (model.shapes(), model.model.manifest()) else {
        return GSHARE_ERROR_SYSTEM;
    };
    let (Some(entry), Some(shape), false) = (manifest.get(at), shapes.get(at), tensor.is_null()) else {
        return GSHARE_ERROR_ARGUMENT;
    };
    let data = model.model.bytes_of(entry.name).map_or(core::ptr::null(), <[u8]>::as_ptr);
    let filled = gshare_tensor {
        name: entry.name.as_ptr().cast(),
        name_bytes: entry.name.len() as u64,
        shape: shape.as_ptr(),
        rank: shape.len() as u64,
        data,
        offset: entry.offset,
        bytes: entry.bytes,
        hash: entry.hash,
        dtype: entry.dtype.code(),
    };
    // SAFETY: as the caller promises.
    unsafe { tensor.write(filled) };
    0
}

/// Bytes of the arena.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_bytes(model: *const gshare_model) -> u64 {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map_or(0, |model| model.model.arena_bytes())
}

/// The content hash of the model: 32 bytes.
///
/// # Safety
/// `model` came from `gshare_store_get`; `content` has 32 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_content(model: *const gshare_model, content: *mut u8) {
    // SAFETY: as the caller promises.
    if let Some(model) = unsafe { model.as_ref() }
        && !content.is_null()
    {
        // SAFETY: 32 bytes to where there is room for them.
        unsafe { core::ptr::copy_nonoverlapping(model.model.content().0.as_ptr(), content, 32) };
    }
}

/// The descriptor of the arena, or -1; it belongs to the model.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_descriptor(model: *const gshare_model) -> i32 {
    // SAFETY: as the caller promises.
    let descriptor = unsafe { model.as_ref() }.and_then(|model| model.model.handle().1);
    descriptor.map_or(-1, |descriptor| descriptor.as_raw_fd())
}

/// Maps a model of the GPU tier for reading, into the primary context of a device of this process, and gives the address of
/// its arena there. A tensor is at this address plus its offset. The map stays until the model is released, and further
/// calls give the same address. 0, with the reason in `error`, if the model is not in GPU memory or the driver refuses.
///
/// # Safety
/// `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gshare_model_map(
    model: *mut gshare_model,
    device: u32,
    error: *mut c_char,
    error_bytes: usize,
) -> u64 {
    let error = ErrorText(error, error_bytes);
    // SAFETY: as the caller promises.
    let Some(model) = (unsafe { model.as_mut() }) else {
        error.argument("model is null");
        return 0;
    };
    if let Some(map) = &model.gpu {
        return map.address();
    }
    match CudaMap::new(&model.model, device) {
        Ok(map) => model.gpu.insert(map).address(),
        Err(refused) => {
            error.code(&refused.into());
            0
        }
    }
}
