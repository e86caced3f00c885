//! The real `dlsym` and `dlvsym`, and a library's place in the program's order.
//!
//! This library exports both names, so it cannot import them. The real `dlvsym` is read from the symbol table of the C library. The
//! real `dlsym` is the next after this library, from the C library or another preloaded library.
#![allow(unsafe_code)] // the loader's interface and an ELF symbol table

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The next `dlsym` of the program, or null until [`find_dlsym`] ran.
pub(crate) static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
/// The C library's `dlvsym`, or null until [`find_dlvsym`] ran.
pub(crate) static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Calls the real `dlsym`, for handles of opened libraries, where the caller does not matter.
pub(crate) fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let mut pointer = REAL_DLSYM.load(Ordering::Relaxed);
    if pointer.is_null() {
        pointer = find_dlsym();
    }
    if pointer.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: `find_dlsym` stores only functions with this signature.
    let dlsym = unsafe { core::mem::transmute::<*mut c_void, Dlsym>(pointer) };
    // SAFETY: handle and name come from our caller, under dlsym's own contract.
    let found = unsafe { dlsym(handle, name) };
    // Work after the call keeps the compiler from replacing it by a jump, which would have RTLD_NEXT start from our caller.
    core::hint::black_box(found)
}

/// Calls the real `dlvsym`, for handles of opened libraries, where the caller does not matter.
pub(crate) fn real_dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    let mut pointer = REAL_DLVSYM.load(Ordering::Relaxed);
    if pointer.is_null() {
        pointer = find_dlvsym();
    }
    if pointer.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: the C library's function of this name has this signature.
    let dlvsym = unsafe { core::mem::transmute::<*mut c_void, Dlvsym>(pointer) };
    // SAFETY: all three come from our caller, under dlvsym's own contract.
    let found = unsafe { dlvsym(handle, name, version) };
    // As above.
    core::hint::black_box(found)
}

/// Finds the next `dlsym` after this library. The constructor calls this, or another constructor does earlier by calling `dlsym`.
pub(crate) extern "C" fn find_dlsym() -> *mut c_void {
    // Every glibc for x86-64 has this version. For a missing version glibc allocates a message, and a wrapper of `malloc` that
    // looks up the next `malloc` would come here again, without end.
    let found = real_dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), c"GLIBC_2.2.5".as_ptr());
    if !found.is_null() {
        REAL_DLSYM.store(found, Ordering::Release);
    }
    found
}

/// Finds the C library's `dlvsym`.
pub(crate) extern "C" fn find_dlvsym() -> *mut c_void {
    let mut found: *mut c_void = core::ptr::null_mut();
    // SAFETY: the function and its argument fit together, and all calls happen while this function waits.
    unsafe { libc::dl_iterate_phdr(Some(look_into), (&raw mut found).cast()) };
    if !found.is_null() {
        REAL_DLVSYM.store(found, Ordering::Release);
    }
    found
}

/// Looks for `dlvsym` in one library, and ends the walk (1) once it is found.
unsafe extern "C" fn look_into(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description.
    let info = unsafe { &*info };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: a C string of the loader.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    // Before glibc 2.34 the function is in libdl.
    if ![&b"/libc.so.6"[..], b"/libdl.so.2"].iter().any(|name| path.ends_with(name)) {
        return 0;
    }
    // SAFETY: the library is loaded while the loader walks.
    let address = unsafe { symbol_of(info, c"dlvsym") };
    if address.is_null() {
        return 0;
    }
    // SAFETY: `find_dlvsym` passed this place.
    unsafe { found.cast::<*mut c_void>().write(address) };
    1
}

/// An entry of an ELF symbol table.
#[repr(C)]
struct Symbol {
    name: u32,
    kind: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

const FUNCTION: u8 = 2;
/// Kinds of entries of the dynamic section.
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;

/// The address of a defined function, found by the library's hash table, or null.
///
/// # Safety
/// The library is loaded by glibc, which has turned the addresses of its dynamic section into absolute ones.
unsafe fn symbol_of(info: &libc::dl_phdr_info, name: &CStr) -> *mut c_void {
    let none = core::ptr::null_mut();
    // SAFETY: the loader's own array.
    let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC) else { return none };
    let at = |address: u64| core::ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap_or(0));
    let (mut strings, mut symbols, mut hash) = (0, 0, 0);
    let mut entry = at(info.dlpi_addr + dynamic.p_vaddr).cast::<[u64; 2]>();
    loop {
        // SAFETY: the section ends with an entry of kind 0.
        match unsafe { entry.read() } {
            [0, _] => break,
            [DT_STRTAB, address] => strings = address,
            [DT_SYMTAB, address] => symbols = address,
            [DT_GNU_HASH, address] => hash = address,
            _ => {}
        }
        // SAFETY: as above.
        entry = unsafe { entry.add(1) };
    }
    if strings == 0 || symbols == 0 || hash == 0 {
        return none;
    }
    let wanted =
        name.to_bytes().iter().fold(5381u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()));
    let words = at(hash).cast::<u32>();
    // SAFETY: the table holds the number of buckets, the first symbol, the filter's words and its shift, and then the filter, the
    // buckets and the chains.
    unsafe {
        let (buckets, first, filter) = (words.read(), words.add(1).read(), words.add(2).read());
        let bucket = words.add(4 + 2 * filter as usize);
        let chain = bucket.add(buckets as usize);
        let mut index = bucket.add((wanted % buckets) as usize).read();
        while index >= first {
            let hash = chain.add((index - first) as usize).read();
            let symbol = &*at(symbols).cast::<Symbol>().add(index as usize);
            if hash | 1 == wanted | 1
                && symbol.kind & 0xf == FUNCTION
                && symbol.section != 0
                && CStr::from_ptr(at(strings).add(symbol.name as usize).cast()) == name
            {
                return core::ptr::with_exposed_provenance_mut(at(info.dlpi_addr + symbol.value).addr());
            }
            if hash & 1 == 1 {
                break;
            }
            index += 1;
        }
    }
    none
}

/// The places of two addresses' libraries in the order in which the program searches its libraries.
#[derive(Debug)]
struct Order {
    addresses: [usize; 2],
    /// The places of the libraries, once found.
    places: [Option<usize>; 2],
    next: usize,
}

/// Whether the library of `one` stands before the library of `other` in the order of the program's start.
pub(crate) fn stands_before(one: *const c_void, other: *const c_void) -> bool {
    let mut order = Order { addresses: [one.addr(), other.addr()], places: [None, None], next: 0 };
    // SAFETY: the function and its argument fit together, and all calls happen while this function waits.
    unsafe { libc::dl_iterate_phdr(Some(note_place), (&raw mut order).cast()) };
    matches!(order.places, [Some(one), Some(other)] if one < other)
}

unsafe extern "C" fn note_place(info: *mut libc::dl_phdr_info, _: usize, order: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description, and `stands_before` passes its own structure.
    let (info, order) = unsafe { (&*info, &mut *order.cast::<Order>()) };
    // SAFETY: the loader's own array.
    let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    for (address, place) in order.addresses.iter().zip(&mut order.places) {
        let inside = headers.iter().any(|header| {
            let start = usize::try_from(info.dlpi_addr + header.p_vaddr).unwrap_or(usize::MAX);
            header.p_type == libc::PT_LOAD
                && (start..start + usize::try_from(header.p_memsz).unwrap_or(0)).contains(address)
        });
        if inside {
            *place = Some(order.next);
        }
    }
    order.next += 1;
    0
}
