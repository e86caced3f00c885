//! Private tables: the answers of `cuGetExportTable` to NVIDIA's runtime library and the libraries above it.
//!
//! # Problem
//!
//! libcudart and the libraries above it (cuBLAS, cuDNN, cuFFT, cuSOLVER) reach some functions of the driver through tables without a public
//! header. A table has an identifier of 16 bytes; most begin with their size in bytes, and every other word is the address of a function.
//! Without these tables every call of the runtime library answers error 500.
//!
//! # Sources of the facts
//!
//! Identifiers, slots and their arguments are public: in the `dark_api` of ZLUDA (MIT or Apache-2.0) and in other projects which print or
//! forward the tables. The missing facts were observed, as the slots and arguments of the libraries' calls (`GSHARE_TRACE=tables`). Each
//! file here names its facts. No code was taken over.
//!
//! # Served tables
//!
//! | file | identifier | asked for by |
//! |---|---|---|
//! | [`cudart`] | `6BD5FB6C-5BF4-E74A-8987-D93912FD9DF9` | libcudart |
//! | [`callbacks`] | `A094798C-2E74-2E74-93F2-0800200C0A66` | libcudart |
//! | [`thread`] | `42D85A81-23F6-CB47-8298-F6E78A3AECDC` | libcudart, cuBLASLt |
//! | [`storage`] | `C693336E-1121-DF11-A8C3-68F355D89593` | libcudart |
//! | [`checks`] | `263E8860-7CD2-6143-92F6-BBD5006DFA7E` | libcudart |
//! | [`integrity`] | `D4082055-BDE6-704B-8D34-BA123C66E1F2` | libcudart |
//! | [`context_table`] | `21318C60-9714-3248-8CA6-41FF7324C8F2` | libcudart 13.4, cuBLASLt, cuFFT, cuSOLVER |
//! | [`module`] | `6E163FBE-B958-444D-835C-E182AFF1991E` | cuFFT |
//! | [`profiler`] | `7CB63F9B-9CA4-8E42-A484-BEB66E6AED7F` | libcupti |
//! | [`products`] | `1734DC26-800D-4745-8726-C0F1E7DD8BCA` | cuBLASLt on an H100 or H200 |
//!
//! Any other identifier is refused with `CUDA_ERROR_INVALID_VALUE`, as on an H100 with driver 580. A slot without a function here answers
//! `CUDA_ERROR_NOT_SUPPORTED`. Both are traced.

#![allow(unsafe_op_in_unsafe_fn)] // functions that C calls: their contract is what each file says of its table

use std::ffi::c_void;

use crate::call_trace;
use crate::driver::base::{self, Context, Find, OrCurrent, Ref, put, put_opt};
use crate::driver::{Answer, CUresult, Flavor, Pointer, Res, StreamArg, exports, guard, sys};

/// A table: its place in [`TABLES`], name, identifier and number of words, and the slots with a function.
macro_rules! table {
    ($place:literal $name:literal $id:expr, $words:literal words $(, $slot:literal $function:ident)*) => {
        pub(super) const TABLE: Table = Table { id: $id, name: $name, words: &WORDS };
        static WORDS: [Pointer; $words] = sized::<$place, $words>(&[$(($slot, $function as *const ())),*]);
    };
}

/// Functions of tables; each body returns an [`Answer`].
macro_rules! functions {
    ($($(#[$doc:meta])* fn $function:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        unsafe extern "C" fn $function($($arg: $type),*) -> CUresult {
            guard(|| $body)
        }
    )*};
}

mod callbacks;
mod checks;
mod context_table;
mod cudart;
mod integrity;
mod module;
mod products;
mod profiler;
pub(crate) mod storage;
mod thread;

/// Most words in a table.
const MOST: usize = 96;

struct Table {
    id: [u8; 16],
    name: &'static str,
    words: &'static [Pointer],
}

/// All served tables. A table's place here is its number in [`unserved`].
static TABLES: [Table; 10] = [
    cudart::TABLE,
    callbacks::TABLE,
    thread::TABLE,
    storage::TABLE,
    checks::TABLE,
    integrity::TABLE,
    context_table::TABLE,
    module::TABLE,
    products::TABLE,
    profiler::TABLE,
];

/// The context behind a handle; null means the calling thread's current context.
unsafe fn context_of(handle: sys::CUcontext) -> Res<Ref<Context>> {
    Find::<OrCurrent>::find(handle)
}

/// The answer of an exported function.
fn ok(code: CUresult) -> Answer {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// The function in a slot of unknown purpose. The caller's arguments stay unread, as the C convention allows.
extern "C" fn unserved<const TABLE: usize, const SLOT: usize>() -> CUresult {
    let name = TABLES.get(TABLE).map_or("?", |table| table.name);
    call_trace::slot(name, SLOT);
    CUresult::CUDA_ERROR_NOT_SUPPORTED
}

/// Words of a table: [`unserved`] in every slot.
const fn unserved_words<const TABLE: usize>() -> [Pointer; MOST] {
    macro_rules! row {
        ($($slot:literal)*) => { [$(Pointer(unserved::<TABLE, $slot> as *const ())),*] };
    }
    row!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40
         41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78
         79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95)
}

/// A table of `WORDS` words, with its size in bytes first; `served` lists the slots with a function.
const fn sized<const TABLE: usize, const WORDS: usize>(served: &[(usize, *const ())]) -> [Pointer; WORDS] {
    let mut words = [Pointer(std::ptr::null()); WORDS];
    words.copy_from_slice(unserved_words::<TABLE>().split_at(WORDS).0);
    words[0] = Pointer(std::ptr::without_provenance(size_of_val(&words)));
    let mut i = 0;
    while i < served.len() {
        assert!(served[i].0 > 0 && served[i].0 < WORDS);
        words[served[i].0] = Pointer(served[i].1);
        i += 1;
    }
    words
}

/// The table with an identifier, and its name; `None` for an identifier without a table.
pub(crate) fn find(id: &[u8; 16]) -> Option<(*const c_void, &'static str)> {
    TABLES.iter().find(|table| table.id == *id).map(|table| (table.words.as_ptr().cast(), table.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_is_found_by_its_identifier_alone() {
        for (i, table) in TABLES.iter().enumerate() {
            assert_eq!(find(&table.id), Some((table.words.as_ptr().cast(), table.name)));
            assert_eq!(TABLES.iter().position(|other| other.id == table.id), Some(i));
            let mut other = table.id;
            other[15] ^= 1;
            assert_eq!(find(&other), None);
        }
    }
}
