//! Private tables and fat binaries in the use of NVIDIA's runtime library: by identifier and slot, through C.
#![cfg(feature = "runtime-tables")]
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client
#![allow(clippy::cast_possible_truncation)] // small numbers

mod common;

use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use common::*;

type Id = [u8; 16];
type Call<T> = unsafe extern "C" fn(T) -> CUresult;
type Call2<T, U> = unsafe extern "C" fn(T, U) -> CUresult;
type Call3<T, U, V> = unsafe extern "C" fn(T, U, V) -> CUresult;

const CUDART: Id = id("6BD5FB6C5BF4E74A8987D93912FD9DF9");
const CALLBACKS: Id = id("A094798C2E742E7493F20800200C0A66");
const TLS: Id = id("42D85A8123F6CB478298F6E78A3AECDC");
const STORAGE: Id = id("C693336E1121DF11A8C368F355D89593");
const CHECKS: Id = id("263E88607CD2614392F6BBD5006DFA7E");
const INTEGRITY: Id = id("D4082055BDE6704B8D34BA123C66E1F2");
const CONTEXT: Id = id("21318C60971432488CA641FF7324C8F2");
const MODULE: Id = id("6E163FBEB958444D835CE182AFF1991E");
const PROFILER: Id = id("7CB63F9B9CA48E42A484BEB66E6AED7F");

/// Tables with their size first: words, and the slots with a function.
const SIZED: [(Id, usize, &[usize]); 8] = [
    (CUDART, 13, &[1, 2, 6, 7, 8, 12]),
    (CALLBACKS, 7, &[2, 6]),
    (TLS, 4, &[2]),
    (CHECKS, 4, &[2, 3]),
    (INTEGRITY, 3, &[1]),
    (CONTEXT, 95, &[3, 4, 39, 51]),
    (MODULE, 56, &[7]),
    (PROFILER, 64, &[]),
];

const fn id(hex: &str) -> Id {
    const fn digit(c: u8) -> u8 {
        if c <= b'9' { c - b'0' } else { c - b'A' + 10 }
    }
    let (hex, mut out, mut i) = (hex.as_bytes(), [0; 16], 0);
    while i < 16 {
        out[i] = digit(hex[2 * i]) * 16 + digit(hex[2 * i + 1]);
        i += 1;
    }
    out
}

fn table(id: &Id) -> Result<*const usize, CUresult> {
    let mut at = null();
    match cu!(cuGetExportTable(&raw mut at, std::ptr::from_ref(id).cast())) {
        OK => Ok(at.cast()),
        error => {
            assert!(at.is_null());
            Err(error)
        }
    }
}

/// The function in a slot, with a type named by the caller.
macro_rules! slot {
    ($id:expr, $slot:expr, $type:ty) => {{
        // SAFETY: the table has the slot, and the slot a function of this type.
        unsafe { transmute::<usize, $type>(table(&$id).unwrap().add($slot).read()) }
    }};
}

macro_rules! call {
    ($id:expr, $slot:expr, $type:ty, $($arg:expr),*) => {{
        let f = slot!($id, $slot, $type);
        // SAFETY: arguments are the test's.
        unsafe { f($($arg),*) }
    }};
}

#[test]
fn known_tables_have_their_size_and_a_function_in_every_slot() {
    isolated("known_tables_have_their_size_and_a_function_in_every_slot", &[], || {
        for (id, words, served) in SIZED {
            let at = table(&id).unwrap();
            // SAFETY: a table has a first word.
            assert_eq!(unsafe { at.read() }, words * 8, "{id:02x?}");
            for slot in (1..words).filter(|slot| !served.contains(slot)) {
                let answer = call!(id, slot, Call2<usize, *mut c_void>, 7, null_mut());
                assert_eq!(answer, CUresult::CUDA_ERROR_NOT_SUPPORTED, "{id:02x?} {slot}");
            }
        }
        // SAFETY: this table has four words.
        assert_eq!(unsafe { table(&STORAGE).unwrap().add(3).read() }, 0);
    });
}

#[test]
fn unknown_tables_are_refused() {
    isolated("unknown_tables_are_refused", &[], || {
        for unknown in [id("F8CFF95121468B4EB9E2FB469E7C0DD9"), [0; 16], [0xff; 16]] {
            assert_eq!(table(&unknown), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
        }
        let mut at = null();
        assert_eq!(cu!(cuGetExportTable(&raw mut at, null())), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            cu!(cuGetExportTable(null_mut(), std::ptr::from_ref(&CUDART).cast())),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
    });
}

#[test]
fn tables_and_slots_without_a_function_are_traced() {
    const NAME: &str = "tables_and_slots_without_a_function_are_traced";
    if std::env::var("SIM_TEST").is_ok_and(|name| name == NAME) {
        assert!(table(&[0xab; 16]).is_err());
        assert_ne!(call!(CONTEXT, 90, Call<usize>, 0), OK);
        return;
    }
    let lines = |topics: &str| {
        let dir = tempfile::tempdir().unwrap();
        let output = command(dir.path(), NAME, &[("GSHARE_TRACE", topics)]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let traced = lines("tables");
    assert!(traced.contains("abababab-abab-abab-abab-abababababab: UNKNOWN TABLE"), "{traced}");
    assert!(traced.contains("TOOLS_CONTEXT: call of UNKNOWN SLOT 90"), "{traced}");
    assert!(!lines("").contains("TOOLS_CONTEXT"));
}

#[test]
fn contexts_are_found_through_the_tables() {
    isolated("contexts_are_found_through_the_tables", &[], || {
        let context = start();
        let (mut found, mut device, mut number, mut expected) = (null_mut::<c_void>(), 9_i32, 0_u64, 0_u64);
        assert_eq!(call!(CUDART, 2, Call2<*mut *mut c_void, i32>, &raw mut found, 0), OK);
        assert_eq!(found, context.cast());
        assert_ne!(call!(CUDART, 2, Call2<*mut *mut c_void, i32>, &raw mut found, 99), OK);
        found = null_mut();
        assert_eq!(call!(TLS, 2, Call<*mut *mut c_void>, &raw mut found), OK);
        assert_eq!(found, context.cast());
        assert_eq!(call!(CONTEXT, 3, Call2<sys::CUcontext, *mut i32>, context, &raw mut device), OK);
        assert_eq!(device, 0);
        assert_eq!(call!(CONTEXT, 4, Call2<sys::CUcontext, *mut u64>, context, &raw mut number), OK);
        ok!(cuCtxGetId(context, &raw mut expected));
        assert_eq!(number, expected);
        let mut flag = 9_u32;
        let checked = call!(CHECKS, 2, Call3<sys::CUcontext, *mut u32, *mut *const c_void>, context, &raw mut flag, null_mut());
        assert_eq!((checked, flag), (OK, 0));
    });
}

#[test]
fn streams_have_an_object_and_what_is_no_stream_has_none() {
    isolated("streams_have_an_object_and_what_is_no_stream_has_none", &[], || {
        type Object = Call3<sys::CUcontext, usize, *mut *mut c_void>;
        type Property = Call3<sys::CUcontext, *mut c_void, *mut u64>;
        let context = start();
        let (mut default, mut created, mut stream, mut property) = (null_mut(), null_mut(), null_mut(), 9);
        ok!(cuStreamCreate(&raw mut stream, 0));
        assert_eq!(call!(CONTEXT, 51, Object, context, 0, &raw mut default), OK);
        assert_eq!(call!(CONTEXT, 51, Object, context, stream as usize, &raw mut created), OK);
        assert_ne!(default, created);
        let none = call!(CONTEXT, 51, Object, context, usize::MAX, &raw mut created);
        assert_eq!(none, CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(call!(CONTEXT, 39, Property, context, default, &raw mut property), OK);
        assert_eq!(property, 0);
    });
}

static ENDED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

extern "C" fn note_end(_context: sys::CUcontext, key: *mut c_void, value: *mut c_void) {
    ENDED.lock().unwrap().push((key as usize, value as usize));
}

#[test]
fn values_of_a_context_last_until_it_ends() {
    isolated("values_of_a_context_last_until_it_ends", &[], || {
        type End = Option<extern "C" fn(sys::CUcontext, *mut c_void, *mut c_void)>;
        type Put = unsafe extern "C" fn(sys::CUcontext, usize, usize, End) -> CUresult;
        type Delete = Call2<sys::CUcontext, usize>;
        type Get = Call3<*mut usize, sys::CUcontext, usize>;
        start();
        let mut context = null_mut();
        ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
        let get = |context, key| {
            let mut value = 0;
            let code = call!(STORAGE, 2, Get, &raw mut value, context, key);
            if code == OK { Ok(value) } else { Err(code) }
        };
        for (key, value) in [(1, 10), (2, 20), (3, 30)] {
            assert_eq!(call!(STORAGE, 0, Put, context, key, value, Some(note_end)), OK);
        }
        // A null context is the current one, and each context has its own values.
        assert_eq!(get(null_mut(), 1), Ok(10));
        let mut other = null_mut();
        ok!(cuCtxCreate_v2(&raw mut other, 0, 0));
        assert_eq!(get(other, 1), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(call!(STORAGE, 0, Put, other, 1, 99, None), OK);
        assert_eq!(call!(STORAGE, 1, Delete, context, 2), OK);
        assert_eq!(get(context, 2), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
        ok!(cuCtxDestroy_v2(context));
        assert_eq!(*ENDED.lock().unwrap(), [(1, 10), (3, 30)]);
        assert_eq!(get(other, 1), Ok(99));
        ok!(cuCtxDestroy_v2(other));
        assert_eq!(ENDED.lock().unwrap().len(), 2);
    });
}

#[test]
fn the_check_depends_on_the_time_and_repeats_itself() {
    isolated("the_check_depends_on_the_time_and_repeats_itself", &[], || {
        start();
        let ask = |version: u32, seconds: u64| {
            let mut answer = [0_u64; 2];
            assert_eq!(
                call!(INTEGRITY, 1, Call3<u32, u64, *mut [u64; 2]>, version, seconds, &raw mut answer),
                OK
            );
            answer
        };
        assert_eq!(ask(13_022, 5), ask(13_022, 5));
        assert_ne!(ask(13_022, 5), ask(13_022, 6));
        assert_ne!(ask(13_022, 5), ask(13_023, 5));
        assert_eq!(ask(13_020, 5), ask(13_020, 6));
    });
}

#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    container: *const u8,
    linked: *const *const u8,
}

/// A container with one PTX text for an architecture.
fn container(architecture: u32, text: &str) -> Vec<u8> {
    let padded = text.len().next_multiple_of(8);
    let mut entry = vec![1, 0, 1, 1];
    for field in [64, padded as u32, 0, 0, 0, 0, architecture, 0, 0, 0x11, 0, 0, 0, 0, 0] {
        entry.extend(u32::to_le_bytes(field));
    }
    entry.extend(text.as_bytes());
    entry.resize(64 + padded, 0);
    let mut out = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
    out.extend((entry.len() as u64).to_le_bytes());
    out.extend(entry);
    out
}

const TEXT: &str =
    ".version 7.0\n.visible .entry first()\n{ret;}\n.entry second()\n{ret;}\n.global .u32 values[10];\n";

static VISITED: Mutex<Vec<String>> = Mutex::new(Vec::new());

extern "C" fn note_visit(argument: *mut c_void, function: sys::CUfunction, _module: sys::CUmodule) {
    let mut name = null();
    ok!(cuFuncGetName(&raw mut name, function));
    assert_eq!(argument as usize, 7);
    // SAFETY: the driver's text.
    let name = unsafe { CStr::from_ptr(name) };
    VISITED.lock().unwrap().push(name.to_str().unwrap().to_owned());
}

#[test]
fn modules_from_fat_binaries_know_their_functions() {
    isolated("modules_from_fat_binaries_know_their_functions", &[], || {
        type Visit = extern "C" fn(*mut c_void, sys::CUfunction, sys::CUmodule);
        type ForEach = unsafe extern "C" fn(sys::CUcontext, sys::CUmodule, Visit, usize) -> i32;
        type LoadContainer = unsafe extern "C" fn(
            *const c_void,
            *mut sys::CUmodule,
            *mut c_void,
            *mut c_void,
            u32,
        ) -> CUresult;
        let context = start();
        let bytes = container(50, TEXT);
        let wrapper = Wrapper { magic: 0x4662_43b1, version: 1, container: bytes.as_ptr(), linked: null() };
        let (mut module, mut other, mut function) = (null_mut(), null_mut(), null_mut());
        let image: *const c_void = (&raw const wrapper).cast();
        assert_eq!(call!(CUDART, 1, Call2<*mut sys::CUmodule, *const c_void>, &raw mut module, image), OK);
        let direct: *const c_void = bytes.as_ptr().cast();
        assert_eq!(call!(CUDART, 8, LoadContainer, direct, &raw mut other, null_mut(), null_mut(), 0), OK);
        for module in [module, other] {
            ok!(cuModuleGetFunction(&raw mut function, module, c"second".as_ptr()));
            let absent = cu!(cuModuleGetFunction(&raw mut function, module, c"third".as_ptr()));
            assert_eq!(absent, CUresult::CUDA_ERROR_NOT_FOUND);
        }
        assert_eq!(call!(MODULE, 7, ForEach, context, module, note_visit, 7), 1);
        assert_eq!(*VISITED.lock().unwrap(), ["first", "second"]);
        assert_eq!(call!(MODULE, 7, ForEach, context, null_mut(), note_visit, 7), 0);
    });
}

#[test]
fn an_image_without_code_for_the_device_is_refused() {
    isolated("an_image_without_code_for_the_device_is_refused", &[], || {
        start();
        let bytes = container(120, TEXT);
        let (mut module, mut library, mut kernel) = (null_mut(), null_mut(), null_mut());
        let image: *const c_void = bytes.as_ptr().cast();
        assert_eq!(cu!(cuModuleLoadData(&raw mut module, image)).0, 209);
        let none = null_mut();
        ok!(cuLibraryLoadData(&raw mut library, image, none, none.cast(), 0, none, none.cast(), 0));
        assert_eq!(cu!(cuLibraryGetKernel(&raw mut kernel, library, c"first".as_ptr())).0, 209);
    });
}

#[test]
fn a_variable_of_a_library_has_its_size_and_a_place_in_each_context() {
    isolated("a_variable_of_a_library_has_its_size_and_a_place_in_each_context", &[], || {
        start();
        let bytes = container(50, TEXT);
        let (mut library, none) = (null_mut(), null_mut());
        ok!(cuLibraryLoadData(
            &raw mut library,
            bytes.as_ptr().cast(),
            none,
            none.cast(),
            0,
            none,
            none.cast(),
            0
        ));
        let get = |name: &CStr| {
            let (mut at, mut size) = (0, 0);
            let code = cu!(cuLibraryGetGlobal(&raw mut at, &raw mut size, library, name.as_ptr()));
            if code == OK { Ok((at, size)) } else { Err(code) }
        };
        let (first, size) = get(c"values").unwrap();
        assert_eq!(size, 40);
        assert_eq!(get(c"values"), Ok((first, 40)));
        assert_eq!(get(c"first"), Err(CUresult::CUDA_ERROR_NOT_FOUND));
        let mut context = null_mut();
        ok!(cuCtxCreate_v2(&raw mut context, 0, 0));
        assert_ne!(get(c"values").unwrap().0, first);
        // A library outlives a context, and its memory there.
        ok!(cuCtxDestroy_v2(context));
        ok!(cuLibraryUnload(library));
    });
}
