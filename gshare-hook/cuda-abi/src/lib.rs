//! The one table of CUDA driver symbols.
//!
//! # Problem
//!
//! A function of the CUDA driver has a *base name*, and under it several *variants*, each an exported symbol with an
//! ABI of its own: `cuMemAlloc` (32-bit device pointers, CUDA 2.0) and `cuMemAlloc_v2` (64-bit, 3.2); or
//! `cuLaunchKernel` (on the legacy default stream) and `cuLaunchKernel_ptsz` (on the calling thread's own).
//! A program reaches them by linking, by `dlsym` with an exported name, or by `cuGetProcAddress` with a base name, a
//! version and a flag. A library between program and driver must return exactly the requested variant: a newer variant reads arguments which were never passed. One table therefore serves all: the exports of the hook, its
//! pointers to the real functions, its answers to `cuGetProcAddress` and the fake driver come from it.
//!
//! # Terms
//!
//! | word | meaning |
//! |---|---|
//! | base name | the name passed to `cuGetProcAddress`: `cuMemAlloc` |
//! | exported name | the name for the linker and `dlsym`: `cuMemAlloc_v2` |
//! | variant, [`Symbol`] | one exported name: its base name, flavour, introducing release, class and C signature |
//! | flavour | stream behind the handle 0: [`Flavor::Legacy`] or [`Flavor::PerThread`] (`_ptsz`, `_ptds`) |
//! | release | `1000 * major + 10 * minor`, as the driver writes it: 12.8 is 12080 |
//!
//! # Algorithm
//!
//! [`SYMBOLS`] is sorted by base name, flavour, release. [`resolve`] finds the base name by binary search and walks its
//! variants, five at most. Worked example, `cuStreamGetCaptureInfo`:
//!
//! | exported name | flavour | introduced |
//! |---|---|---|
//! | `cuStreamGetCaptureInfo` | legacy | 10010 |
//! | `cuStreamGetCaptureInfo_v2` | legacy | 11030 |
//! | `cuStreamGetCaptureInfo_v3` | legacy | 12030 |
//! | `cuStreamGetCaptureInfo_ptsz` | per thread | 10010 |
//! | `cuStreamGetCaptureInfo_v2_ptsz` | per thread | 11030 |
//! | `cuStreamGetCaptureInfo_v3_ptsz` | per thread | 12030 |
//!
//! Asked at release 12010 with flag 2 (per thread): the newest per-thread variant not newer than 12010 is `_v2_ptsz`.
//! Asked at 10000: every variant is newer, [`Resolution::TooNew`]. A base name without per-thread variants, such as
//! `cuMemAlloc`, answers flag 2 with its legacy variant, as the driver does.
//!
//! # The row of [`cuda_symbols!`]
//!
//! `{ index exported_name "base name" introduced Flavour Class (arg: type, …) }`; every function returns `CUresult`. The types come from [`types`] (`use gshare_cuda_abi::types::*` where the rows are expanded). Most users want the two expansions [`index`] and [`signature`].
//!
//! # Invariants
//!
//! Exported names are unique; within one base name and flavour, releases rise strictly; the table agrees with the
//! bindings of the `cudarc` crate on every function known to both (a test compares names and signatures).
//!
//! # Cost
//!
//! `resolve` and `by_name`: one binary search over [`SYMBOLS`], no allocation, no lock. The table is static data.
//!
//! # Source
//!
//! `generate.py` reads the headers of several CUDA releases, and writes `symbols.txt`; the file says how to fetch them. Signatures use `cudarc`'s
//! bindings for structures and handles, with two departures: C enumerations are `c_uint` and [`types::CUresult`] is a
//! newtype, since a newer driver may pass values outside a Rust enum.

#[cfg(feature = "types")]
pub mod types;

include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// The effect of a function, as metering sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Class {
    /// Starts kernels or host functions on a stream.
    Launch,
    /// Builds, instantiates or edits graphs.
    Graph,
    /// Copies, sets, prefetches or discards memory.
    Copy,
    /// Allocates device or host memory by pointer.
    Alloc,
    /// Frees memory from [`Class::Alloc`].
    Free,
    /// Virtual memory: physical handles, address ranges, mappings, multicast objects.
    Vmm,
    /// Stream-ordered memory pools.
    Pool,
    /// CUDA arrays and mipmapped arrays.
    Array,
    /// Answers questions about devices, memory and pointers.
    Info,
    /// Waits, queries, events and semaphores.
    Sync,
    /// Stream capture.
    Capture,
    /// Contexts, streams and green contexts.
    Context,
    /// Memory and semaphores shared with other processes or APIs.
    Ipc,
    /// Everything else.
    Other,
}

/// Stream behind the handle 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Flavor {
    /// The device's legacy default stream, or no stream at all.
    Legacy,
    /// The calling thread's own default stream.
    PerThread,
}

/// One variant of a driver function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Symbol {
    /// Position in [`SYMBOLS`]; the same number as in [`index`].
    pub index: usize,
    /// The exported name, such as `cuMemAlloc_v2`.
    pub name: &'static str,
    /// The base name, such as `cuMemAlloc`.
    pub base: &'static str,
    /// The first release with this variant, `1000 * major + 10 * minor`.
    pub introduced: u32,
    /// Legacy or per thread.
    pub flavor: Flavor,
    /// The function's effect.
    pub class: Class,
}

/// `cuGetProcAddress`'s flag for the default.
pub const FLAG_DEFAULT: u64 = 0;
/// `cuGetProcAddress`'s flag for the legacy default stream.
pub const FLAG_LEGACY_STREAM: u64 = 1;
/// `cuGetProcAddress`'s flag for per-thread default streams.
pub const FLAG_PER_THREAD_STREAM: u64 = 2;

macro_rules! rows {
    ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident $args:tt })*) => {
        /// Every variant, sorted by base name, flavour (legacy first), introducing release.
        pub static SYMBOLS: &[Symbol] = &[$(Symbol {
            index: $index,
            name: stringify!($name),
            base: $base,
            introduced: $introduced,
            flavor: Flavor::$flavor,
            class: Class::$class,
        }),*];

        /// The position of each exported name in [`SYMBOLS`].
        #[allow(missing_docs, non_upper_case_globals)]
        pub mod index {
            $(pub const $name: usize = $index;)*
        }
    };
}
cuda_symbols!(rows);

/// The C signature of each exported name, as a function pointer type.
#[cfg(feature = "types")]
#[allow(missing_docs, non_camel_case_types, non_snake_case)]
pub mod signature {
    use crate::types::*;

    macro_rules! signatures {
        ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident
             ($($arg:ident: $type:ty),*) })*) => {
            $(pub type $name = unsafe extern "C" fn($($arg: $type),*) -> CUresult;)*
        };
    }
    cuda_symbols!(signatures);
}

/// The result of [`resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The variant (`CU_GET_PROC_ADDRESS_SUCCESS`).
    Found(&'static Symbol),
    /// No base name matches (`CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`).
    UnknownName,
    /// Every variant is newer than the requested release (`CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`).
    TooNew,
}

/// The variant that `cuGetProcAddress(base, …, release, flags, …)` gives.
///
/// `flags` come from the call; with [`FLAG_PER_THREAD_STREAM`] a per-thread variant is taken if there is one, any other value means the
/// legacy flavour. A driver older than [`NEWEST_RELEASE`] knows fewer variants: ask with the smaller of its release and the caller's.
///
/// ```
/// use gshare_cuda_abi::{Resolution, resolve};
/// let Resolution::Found(symbol) = resolve("cuMemAlloc", 12080, 2) else { panic!("cuMemAlloc is in the table") };
/// assert_eq!(symbol.name, "cuMemAlloc_v2");
/// assert_eq!(resolve("cuMemAlloc", 1000, 0), Resolution::TooNew);
/// assert_eq!(resolve("cuMemAlloc_v2", 12080, 0), Resolution::UnknownName);
/// ```
pub fn resolve(base: &str, release: u32, flags: u64) -> Resolution {
    let variants = variants(base);
    let newest = |flavor| variants.iter().rev().find(|s| s.flavor == flavor && s.introduced <= release);
    let found = match flags {
        FLAG_PER_THREAD_STREAM => newest(Flavor::PerThread).or_else(|| newest(Flavor::Legacy)),
        _ => newest(Flavor::Legacy),
    };
    match found {
        Some(symbol) => Resolution::Found(symbol),
        None if variants.is_empty() => Resolution::UnknownName,
        None => Resolution::TooNew,
    }
}

/// All variants of a base name, legacy first, oldest first; empty for an unknown name.
pub fn variants(base: &str) -> &'static [Symbol] {
    let start = SYMBOLS.partition_point(|symbol| symbol.base < base);
    let length = SYMBOLS[start..].iter().take_while(|symbol| symbol.base == base).count();
    &SYMBOLS[start..start + length]
}

/// The variant with this exported name, the name in a program's `dlsym`.
///
/// ```
/// assert_eq!(gshare_cuda_abi::by_name("cuMemcpyDtoH_v2_ptds").map(|s| s.introduced), Some(7000));
/// assert!(gshare_cuda_abi::by_name("cudnnCreate").is_none());
/// ```
pub fn by_name(exported: &str) -> Option<&'static Symbol> {
    let mut place = place_of(exported.as_bytes());
    loop {
        let symbol = &SYMBOLS[usize::from(BY_NAME[place]).checked_sub(1)?];
        if symbol.name == exported {
            return Some(symbol);
        }
        place = (place + 1) % PLACES;
    }
}

/// Number of places for the names of the driver's functions, four for each.
const PLACES: usize = (4 * SYMBOLS.len()).next_power_of_two();

/// The table's indices by the hash of the exported name, each with 1 added; 0 is an empty place.
static BY_NAME: [u16; PLACES] = {
    let (mut places, mut index) = ([0u16; PLACES], 0);
    while index < SYMBOLS.len() {
        let mut place = place_of(SYMBOLS[index].name.as_bytes());
        while places[place] != 0 {
            place = (place + 1) % PLACES;
        }
        #[allow(clippy::cast_possible_truncation, reason = "the driver has hundreds of functions")]
        {
            places[place] = index as u16 + 1;
        }
        index += 1;
    }
    places
};

/// The first place of a name, by a hash of eight bytes at a time; this halves the cost of a look-up.
const fn place_of(name: &[u8]) -> usize {
    let (mut hash, mut at) = (name.len() as u64, 0);
    while at < name.len() {
        let (mut word, mut byte) = (0, 0);
        while byte < 8 && at + byte < name.len() {
            word |= (name[at + byte] as u64) << (8 * byte);
            byte += 1;
        }
        hash = (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash ^= hash >> 29;
        at += 8;
    }
    #[allow(clippy::cast_possible_truncation, reason = "below the number of places")]
    {
        (hash % PLACES as u64) as usize
    }
}
