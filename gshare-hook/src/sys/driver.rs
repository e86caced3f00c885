//! The real driver: one saved pointer per variant of the table.
//!
//! A pointer arrives when the program looks the function up, and the program's original answer is kept. Otherwise a wrapper or the
//! hook itself looks the exported name up at the first need, in the `libcuda.so.1` that the program has loaded. The hook never
//! loads a driver, so a program without CUDA stays without CUDA.
#![allow(unsafe_code)] // function pointers of the driver, and dladdr

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use gshare_cuda_abi::SYMBOLS;

use crate::sys::dlsym;

static REAL: [AtomicPtr<c_void>; SYMBOLS.len()] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; SYMBOLS.len()];

/// The real function of this exported name, with its type, or `None` when the driver has no such function.
macro_rules! real {
    ($name:ident) => {
        $crate::sys::driver::typed::<gshare_cuda_abi::signature::$name>(gshare_cuda_abi::index::$name)
    };
}
pub(crate) use real;

/// Serves only [`real!`], which pairs a name's index with its signature.
#[inline(always)]
pub(crate) fn typed<Function: Copy>(index: usize) -> Option<Function> {
    const { assert!(size_of::<Function>() == size_of::<*mut c_void>()) };
    // SAFETY: the slot of a name holds the driver's function of this name, and the table gives its C signature.
    pointer(index).map(|pointer| unsafe { core::mem::transmute_copy(&pointer) })
}

/// The driver's functions that have another function in front of them: see [`put_in_front`].
static BENEATH: [AtomicPtr<c_void>; SYMBOLS.len()] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; SYMBOLS.len()];

/// Puts a function of the same signature in front of the driver's, if the driver has it: [`real!`] gives this function from now on.
pub(crate) fn put_in_front(index: usize, function: *mut c_void) {
    if let Some(found) = pointer(index) {
        BENEATH[index].store(found.as_ptr(), Ordering::Release);
        REAL[index].store(function, Ordering::Release);
    }
}

/// Like [`real!`], past a function in front of the driver's.
macro_rules! beneath {
    ($name:ident) => {
        $crate::sys::driver::typed_beneath::<gshare_cuda_abi::signature::$name>(gshare_cuda_abi::index::$name)
    };
}
pub(crate) use beneath;

/// Serves only [`beneath!`].
#[inline(always)]
pub(crate) fn typed_beneath<Function: Copy>(index: usize) -> Option<Function> {
    const { assert!(size_of::<Function>() == size_of::<*mut c_void>()) };
    let beneath = core::ptr::NonNull::new(BENEATH[index].load(Ordering::Relaxed)).or_else(|| pointer(index));
    // SAFETY: as in `typed`.
    beneath.map(|pointer| unsafe { core::mem::transmute_copy(&pointer) })
}

#[inline(always)]
pub(crate) fn pointer(index: usize) -> Option<core::ptr::NonNull<c_void>> {
    match core::ptr::NonNull::new(REAL[index].load(Ordering::Relaxed)) {
        Some(pointer) => Some(pointer),
        None => look_up(index),
    }
}

/// Keeps the answer to a look-up. The first answer stays, and so does the driver, however often the program closes it.
pub(crate) fn remember(index: usize, pointer: *mut c_void) {
    let _ = loaded_driver();
    let _ = REAL[index].compare_exchange(core::ptr::null_mut(), pointer, Ordering::AcqRel, Ordering::Relaxed);
}

#[cold]
fn look_up(index: usize) -> Option<core::ptr::NonNull<c_void>> {
    let handle = loaded_driver()?;
    // The longest exported name is below 64 bytes.
    let name = SYMBOLS[index].name.as_bytes();
    let mut buffer = [0u8; 96];
    buffer.get_mut(..name.len())?.copy_from_slice(name);
    let name = CStr::from_bytes_until_nul(&buffer).ok()?;
    // The first choice is the next library in the program's order: the driver, or another preloaded library before it. A driver
    // opened privately is in no order and is asked itself.
    let next = dlsym::real_dlsym(libc::RTLD_NEXT, name.as_ptr());
    let found = if next.is_null() { dlsym::real_dlsym(handle, name.as_ptr()) } else { next };
    let found = core::ptr::NonNull::new(found)?;
    remember(index, found.as_ptr());
    Some(found)
}

/// A handle of the driver, if the program has loaded it.
pub(crate) fn loaded_driver() -> Option<*mut c_void> {
    static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
    let known = HANDLE.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    // SAFETY: a valid C string, and RTLD_NOLOAD loads nothing. The reference is kept for the life of the process.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return None;
    }
    HANDLE.store(handle, Ordering::Release);
    Some(handle)
}

/// Whether the function that the program got under this name of the table is the driver's. The loader is asked once, because a
/// driver, once found, stays loaded and the answer stays true.
pub(crate) fn is_drivers(index: usize, found: *mut c_void) -> bool {
    REAL[index].load(Ordering::Relaxed) == found || DRIVER.holds(found) || {
        let is = lies_in(found, b"libcuda.so");
        if is {
            DRIVER.note(found);
        }
        is
    }
}

/// The address range of the driver loaded by the program, from the first address to behind the last. The range is known once one of
/// the driver's functions was found.
#[derive(Debug)]
struct Extent {
    first: AtomicUsize,
    end: AtomicUsize,
}

static DRIVER: Extent = Extent { first: AtomicUsize::new(usize::MAX), end: AtomicUsize::new(0) };

impl Extent {
    fn holds(&self, address: *mut c_void) -> bool {
        (self.first.load(Ordering::Relaxed)..self.end.load(Ordering::Acquire)).contains(&address.addr())
    }

    /// Takes the extent of the loaded driver, where the address lies in it, since another copy of a driver may be unloaded again.
    fn note(&self, address: *mut c_void) {
        let Some(driver) = loaded_driver() else { return };
        let own = dlsym::real_dlsym(driver, c"cuInit".as_ptr());
        let Some((first, end)) =
            extent_of(own).filter(|(first, end)| (first..end).contains(&&address.addr()))
        else {
            return;
        };
        self.first.store(first, Ordering::Relaxed);
        self.end.store(end, Ordering::Release);
    }
}

/// The extent of the library around an address, as it is loaded.
fn extent_of(address: *mut c_void) -> Option<(usize, usize)> {
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, sought: *mut c_void) -> c_int {
        // SAFETY: the loader passes its own record, and the caller below passes this structure.
        let (info, sought) = unsafe { (&*info, &mut *sought.cast::<(usize, Option<(usize, usize)>)>()) };
        // SAFETY: the loader's own table has this many entries.
        let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let base = usize::try_from(info.dlpi_addr).unwrap_or(0);
        let size = |size: u64| usize::try_from(size).unwrap_or(0);
        let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        let parts = loaded.map(|header| {
            let first = base + size(header.p_vaddr);
            (first, first + size(header.p_memsz))
        });
        let all = parts.reduce(|(first, end), part| (first.min(part.0), end.max(part.1)));
        let found = all.filter(|&(first, end)| (first..end).contains(&sought.0));
        sought.1 = sought.1.or(found);
        found.is_some().into()
    }
    let mut sought = (address.addr(), None);
    // SAFETY: the function takes the loader's records and `sought`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut sought).cast()) };
    sought.1
}

/// Whether an address lies in a library with a file name of this beginning.
pub(crate) fn lies_in(address: *const c_void, prefix: &[u8]) -> bool {
    library_of(address).is_some_and(|path| file_name(&path).starts_with(prefix))
}

/// The loader's path of the library around an address.
pub(crate) fn library_of(address: *const c_void) -> Option<Vec<u8>> {
    // SAFETY: all-zero is a valid Dl_info, and dladdr fills it or fails.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: dladdr accepts any address.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dli_fname is a C string of the loader, alive while the library is loaded.
    Some(unsafe { CStr::from_ptr(info.dli_fname.cast::<c_char>()) }.to_bytes().to_owned())
}

/// Whether two addresses lie in the same library.
pub(crate) fn are_in_one_library(one: *const c_void, other: *const c_void) -> bool {
    library_of(one) == library_of(other)
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}
