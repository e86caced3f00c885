//! GPU memory by virtual memory management: the store has handles, clients have maps, and only loader processes copy.
//!
//! The store makes physical memory (`cuMemCreate`) and exports it as descriptors. It maps nothing and has no CUDA context,
//! so it takes no GPU memory beside the models (FaST-GShare's server takes 300 MB per model, section 5.5). A loader process
//! has a context, fills the memory, and exits after one load. The driver keeps memory until the last handle and the last
//! map of any process are gone, so readers survive the store.
//!
//! # Protection
//! [`CudaMap`] maps for reading, so a kernel of that process that writes there faults. But the importer chooses the access:
//! a client that calls the driver itself can map the same descriptor for writing. So this protects against mistakes, not
//! against hostile clients, and only clients that trust each other should share models on a GPU. Under MPS the fault of one
//! client may end other clients of the same server.
//!
//! `verify` needs a context to read GPU memory, so it refuses here.
#![allow(unsafe_code, reason = "calls to the CUDA driver")]

use super::{ArenaMemory, ModelBackend};
use crate::arena_fill::{self, Origin};
use crate::client::Model;
use crate::frame::{Handle, MAX_FRAME};
use crate::manifest::{Layout, Place};
use crate::packet;
use crate::safetensors::Dtype;
use gshare_cuda_abi::types::sys;
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const POSIX_DESCRIPTOR: u32 = 1;
const DEVICE: u32 = 1;
const READ: u32 = 1;
const READ_WRITE: u32 = 3;

/// Calls a function of the driver.
macro_rules! cuda {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: arguments as cuda.h asks for them; pointers are to values that outlive the call.
        let result = unsafe { sys::$name($($argument),*) };
        result.result().map_err(|error| io::Error::other(format!("{}: {error:?}", stringify!($name))))
    }};
}

mod pinned;

use pinned::Copied;
pub use pinned::PinnedBackend;

fn start() -> io::Result<()> {
    // SAFETY: loads the driver, with the same initialisers as in every CUDA program.
    if !unsafe { sys::is_culib_present() } {
        return Err(io::Error::new(io::ErrorKind::NotFound, "there is no CUDA driver (libcuda.so)"));
    }
    cuda!(cuInit(0))
}

fn ordinal(device: u32) -> io::Result<i32> {
    i32::try_from(device).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no such device"))
}

/// A device's primary context, held while this value lives.
#[derive(Debug)]
struct Context {
    device: i32,
    context: usize,
}

impl Context {
    fn new(device: u32) -> io::Result<Self> {
        start()?;
        let device = ordinal(device)?;
        let mut context = std::ptr::null_mut();
        cuda!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        Ok(Self { device, context: context as usize })
    }

    /// Makes the context current in the calling thread.
    fn enter(&self) -> io::Result<()> {
        cuda!(cuCtxSetCurrent(self.context as sys::CUcontext))
    }

    /// Copies memory of the device to the host, from `offset` on in an arena.
    fn read(&self, arena: (sys::CUdeviceptr, u64), offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = place(arena, offset, out.len())?;
        self.enter()?;
        cuda!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from, out.len()))
    }
}

/// The address of `bytes` at `offset` of an arena, which is given by its address and length.
fn place(
    (address, length): (sys::CUdeviceptr, u64),
    offset: u64,
    bytes: usize,
) -> io::Result<sys::CUdeviceptr> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= length => Ok(address + offset),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = cuda!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

/// Physical memory by a handle.
#[derive(Debug)]
struct Physical(sys::CUmemGenericAllocationHandle);

impl Physical {
    fn new(device: u32, bytes: usize) -> io::Result<Self> {
        let mut prop = std::mem::MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
        // The head of the structure: pinned, exported as descriptors, on the device. Written as integers, since the field
        // names of the bindings differ from release to release.
        let head = [1, POSIX_DESCRIPTOR, DEVICE, device];
        // SAFETY: the structure begins with these four 32-bit fields in all releases.
        unsafe { prop.as_mut_ptr().cast::<[u32; 4]>().write_unaligned(head) };
        let mut handle = 0;
        cuda!(cuMemCreate(&raw mut handle, bytes, prop.as_ptr(), 0))?;
        Ok(Self(handle))
    }

    fn import(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let mut handle = 0;
        let number = usize::try_from(descriptor.as_raw_fd()).unwrap_or(usize::MAX);
        let kind = sys::CUmemAllocationHandleType_enum(POSIX_DESCRIPTOR);
        cuda!(cuMemImportFromShareableHandle(&raw mut handle, number as *mut core::ffi::c_void, kind))?;
        Ok(Self(handle))
    }

    fn export(&self) -> io::Result<OwnedFd> {
        let mut descriptor: core::ffi::c_int = -1;
        let kind = sys::CUmemAllocationHandleType_enum(POSIX_DESCRIPTOR);
        cuda!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), self.0, kind, 0))?;
        // SAFETY: the driver made this descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = cuda!(cuMemRelease(self.0));
    }
}

/// A map of physical memory into this process's addresses on a device.
#[derive(Debug)]
struct Mapped {
    address: sys::CUdeviceptr,
    bytes: usize,
    context: Arc<Context>,
}

impl Mapped {
    fn new(physical: &Physical, bytes: usize, device: u32, access: u32) -> io::Result<Self> {
        let context = Arc::new(Context::new(device)?);
        context.enter()?;
        let mut address = 0;
        cuda!(cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0))?;
        if let Err(error) = cuda!(cuMemMap(address, bytes, 0, physical.0, 0)) {
            let _ = cuda!(cuMemAddressFree(address, bytes));
            return Err(error);
        }
        let mapped = Self { address, bytes, context };
        let mut about = std::mem::MaybeUninit::<sys::CUmemAccessDesc>::zeroed();
        // SAFETY: the structure is these three 32-bit fields in all releases.
        unsafe { about.as_mut_ptr().cast::<[u32; 3]>().write_unaligned([DEVICE, device, access]) };
        cuda!(cuMemSetAccess(address, bytes, about.as_ptr(), 1))?;
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = self.context.enter();
        let _ = cuda!(cuMemUnmap(self.address, self.bytes));
        let _ = cuda!(cuMemAddressFree(self.address, self.bytes));
    }
}

fn size(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
}

// --- The store's side ------------------------------------------------------------------------------

/// Arenas in memory of one GPU, filled by short-lived loader processes.
#[derive(Debug)]
pub struct VmmBackend {
    device: u32,
    loader: Vec<OsString>,
}

impl VmmBackend {
    /// Arenas on a device. `loader` is a program with arguments that calls [`run_loader`].
    ///
    /// # Errors
    /// If there is no driver.
    pub fn new(device: u32, loader: Vec<OsString>) -> io::Result<Self> {
        start()?;
        Ok(Self { device, loader })
    }
}

#[derive(Debug)]
struct VmmArena {
    /// Keeps the memory; the descriptor would, too.
    _physical: Physical,
    descriptor: Arc<OwnedFd>,
    sealed: AtomicBool,
}

fn no_context() -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        "the store has no context on the GPU, so it cannot look into its memory",
    )
}

impl ArenaMemory for VmmArena {
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(no_context())
    }

    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(no_context())
    }

    fn writable(&self) -> io::Result<Arc<OwnedFd>> {
        Ok(self.descriptor.clone())
    }

    /// The driver has no seals, so a process with the descriptor can map it for writing. A loader is trusted. A writing
    /// client is not, and its put fails when its content should be hashed.
    fn seal(&self) -> io::Result<()> {
        self.sealed.store(true, Ordering::Release);
        Ok(())
    }

    fn export(&self) -> Option<(Handle, Option<Arc<OwnedFd>>)> {
        self.sealed.load(Ordering::Acquire).then(|| (Handle::CudaVmm, Some(self.descriptor.clone())))
    }
}

/// A loader's order, in one packet. The list of tensors comes with it in a memory file.
#[derive(Debug, Serialize, Deserialize)]
struct Job {
    device: u32,
    bytes: u64,
    threads: usize,
    list_bytes: usize,
    /// Copy from the GPU to the file.
    out: bool,
    /// The file is an arena with the same places as on the GPU.
    arena: bool,
}

impl ModelBackend for VmmBackend {
    fn create(&self, bytes: u64) -> io::Result<Arc<dyn ArenaMemory>> {
        let physical = Physical::new(self.device, size(bytes)?)?;
        let descriptor = Arc::new(physical.export()?);
        Ok(Arc::new(VmmArena { _physical: physical, descriptor, sealed: AtomicBool::new(false) }))
    }

    fn fill(
        &self,
        memory: &dyn ArenaMemory,
        origin: &Origin,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Vec<[u8; 32]>> {
        let layout = origin.layout();
        let (source, begins) = origin.descriptor().ok_or_else(no_context)?;
        let arena = matches!(origin, Origin::Arena { .. });
        let hashes = self.work(memory, layout, &source, &begins, threads, (false, arena))?;
        progress(layout.tensor_bytes);
        Ok(hashes)
    }

    fn copy_out(
        &self,
        from: &Arc<dyn ArenaMemory>,
        layout: &Arc<Layout>,
        to: &dyn ArenaMemory,
        threads: usize,
    ) -> io::Result<Vec<[u8; 32]>> {
        let begins: Vec<u64> = layout.places.iter().map(|place| place.offset).collect();
        let file = to.writable()?;
        self.work(&**from, layout, &file, &begins, threads, (true, true))
    }
}

impl VmmBackend {
    /// Has a loader copy between GPU memory and a file with tensors at `begins`.
    fn work(
        &self,
        memory: &dyn ArenaMemory,
        layout: &Layout,
        file: &OwnedFd,
        begins: &[u64],
        threads: usize,
        (out, arena): (bool, bool),
    ) -> io::Result<Vec<[u8; 32]>> {
        // Begin in the file, begin on the GPU, and length, by name.
        let places = layout.places.iter().zip(begins);
        let list: Vec<[u64; 3]> = places.map(|(place, &at)| [at, place.offset, place.bytes]).collect();
        let list = serde_json::to_vec(&list)?;
        let (device, bytes) = (self.device, layout.arena_bytes);
        let job = Job { device, bytes, threads, list_bytes: list.len(), out, arena };
        let list = super::sealed("gshare-job", &list)?;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let [program, arguments @ ..] = &self.loader[..] else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no loader program"));
        };
        let mut child =
            Command::new(program).args(arguments).stdin(Stdio::from(far)).stdout(Stdio::null()).spawn()?;
        let told = (|| {
            packet::send(&near, &serde_json::to_vec(&job)?, &[list.as_fd(), file.as_fd()], true)?;
            packet::send(&near, b"arena", &[memory.writable()?.as_fd()], true)?;
            let mut bytes = [0; MAX_FRAME + 1];
            let (length, mut descriptors) = packet::receive(&near, &mut bytes)?;
            match (descriptors.next(), length) {
                (Some(hashes), _) => {
                    let mut read = vec![[0; 32]; layout.places.len()];
                    File::from(hashes).read_exact_at(read.as_flattened_mut(), 0)?;
                    Ok(read)
                }
                (None, 0) => Err(io::Error::other("the loader died")),
                (None, length) => {
                    Err(io::Error::other(String::from_utf8_lossy(&bytes[..length]).into_owned()))
                }
            }
        })();
        if told.is_err() {
            let _ = child.kill();
        }
        child.wait()?;
        told
    }
}

/// Runs as a loader that [`VmmBackend`] started, with a socket as its standard input. Fills one arena.
///
/// # Errors
/// If no store started the process. Errors of the load itself go to the store.
pub fn run_loader() -> io::Result<()> {
    let socket = io::stdin();
    let mut bytes = [0; MAX_FRAME + 1];
    let (length, given) = packet::receive(&socket, &mut bytes)?;
    let job: Job = serde_json::from_slice(&bytes[..length])?;
    let (_, mut arena) = packet::receive(&socket, &mut bytes)?;
    let ([Some(list), Some(file)], Some(arena)) = (given.0, arena.next()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not started by a store"));
    };
    match fill_here(&job, &File::from(list), &file, &arena) {
        Ok(hashes) => {
            let file = super::sealed("gshare-hashes", hashes.as_flattened())?;
            packet::send(&socket, b"ok", &[file.as_fd()], true)
        }
        Err(error) => packet::send(
            &socket,
            &error.to_string().as_bytes()[..error.to_string().len().min(MAX_FRAME)],
            &[],
            true,
        ),
    }
}

fn fill_here(job: &Job, list: &File, file: &OwnedFd, arena: &OwnedFd) -> io::Result<Vec<[u8; 32]>> {
    let mut text = vec![0; job.list_bytes];
    list.read_exact_at(&mut text, 0)?;
    let list: Vec<[u64; 3]> = serde_json::from_slice(&text)?;
    start()?;
    let physical = Physical::import(arena.as_fd())?;
    let access = if job.out { READ } else { READ_WRITE };
    let mapped = Mapped::new(&physical, size(job.bytes)?, job.device, access)?;
    let place = |[from, offset, bytes]: [u64; 3]| {
        let (name, dtype, shape) = (String::new(), Dtype::U8, vec![bytes]);
        Place { name, dtype, shape, offset, bytes, source: from }
    };
    let tensor_bytes = list.iter().map(|[_, _, bytes]| bytes).sum();
    let layout =
        Layout { places: list.into_iter().map(place).collect(), arena_bytes: job.bytes, tensor_bytes };
    if job.arena
        && let Ok(host) = Copied::map(&mapped.context, file, job.bytes, job.out)
    {
        return host.copy(mapped.address, &layout, job.threads, job.out);
    }
    let file = File::from(file.try_clone()?);
    let read = |place: usize, offset: u64, bytes: usize, buffer: &mut [u8]| {
        let (place, part) = (&layout.places[place], &mut buffer[..bytes]);
        let here = place.offset + offset;
        if here.checked_add(bytes as u64).is_none_or(|end| end > job.bytes) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        mapped.context.enter()?;
        if job.out {
            cuda!(cuMemcpyDtoH_v2(part.as_mut_ptr().cast(), mapped.address + here, bytes))?;
            file.write_all_at(part, place.source + offset)?;
        } else {
            file.read_exact_at(part, place.source + offset)?;
            cuda!(cuMemcpyHtoD_v2(mapped.address + here, part.as_ptr().cast(), bytes))?;
        }
        Ok(0)
    };
    let hashes = arena_fill::pieces(&layout, job.threads, &|_| {}, &read)?;
    cuda!(cuCtxSynchronize())?;
    Ok(hashes)
}

// --- The client's side -----------------------------------------------------------------------------

/// A model's arena, mapped for reading on a device of this process.
#[derive(Debug)]
pub struct CudaMap {
    mapped: Mapped,
    _physical: Physical,
}

impl CudaMap {
    /// Maps a model of the GPU tier.
    ///
    /// # Errors
    /// If the model is not in such GPU memory, or the driver refuses.
    pub fn new(model: &Model, device: u32) -> io::Result<Self> {
        let (Handle::CudaVmm, Some(descriptor)) = model.handle() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the model is not in exported GPU memory",
            ));
        };
        start()?;
        let physical = Physical::import(descriptor)?;
        let mapped = Mapped::new(&physical, size(model.arena_bytes())?, device, READ)?;
        Ok(Self { mapped, _physical: physical })
    }

    /// Address of the arena on the device; a tensor is at this address plus its offset.
    pub const fn address(&self) -> u64 {
        self.mapped.address
    }

    /// Copies bytes of the arena to the host.
    ///
    /// # Errors
    /// Beyond the end of the arena, or if the driver refuses.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let Mapped { address, bytes, context } = &self.mapped;
        context.read((*address, *bytes as u64), offset, out)
    }
}
