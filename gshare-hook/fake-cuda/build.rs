//! Writes the exports: one C function per name of the driver's table.
//!
//! A name for which `src/driver/` has a function `unsafe fn NAME` calls it; where the table has a per-thread variant too
//! (`_ptsz`, `_ptds`), the function takes a `Flavor` first and serves both. Every other name answers
//! `CUDA_ERROR_NOT_SUPPORTED`. So the library exports what a driver exports, and the signatures are the table's.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

macro_rules! rows {
    ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident ($($arg:ident: $type:ty),*) })*) => {
        const ROWS: &[(&str, &[(&str, &str)])] = &[$((stringify!($name), &[$((stringify!($arg), stringify!($type))),*])),*];
    };
}
gshare_cuda_abi::cuda_symbols!(rows);

/// Exported without the panic guard: their functions have none on the path that must cost next to nothing.
const UNGUARDED: [&str; 1] = ["cuLaunchKernel"];

/// How a trace shows an argument: a `trace::Value`.
fn shown(arg: &str, ty: &str) -> String {
    let ty = ty.replace(" :: ", "::").replace("sys::", "").replace("* ", "*");
    match ty.as_str() {
        "c_uint" | "c_uchar" | "c_ushort" | "u32" | "u64" | "usize" | "c_ulonglong" => {
            format!("Value::Unsigned({arg} as u64)")
        }
        "c_int" | "CUdevice" => format!("Value::Signed(i64::from({arg}))"),
        "f32" => format!("Value::Float({arg})"),
        "CUresult" => format!("Value::Unsigned(u64::from({arg}.0))"),
        "CUdeviceptr" => format!("Value::Address({arg} as usize)"),
        "*const c_char" => format!("Value::Text({arg})"),
        "*mut c_uint" => format!("Value::OutUnsigned({arg})"),
        "*mut c_int" | "*mut CUdevice" => format!("Value::OutSigned({arg})"),
        "*mut usize" | "*mut u64" | "*mut c_ulonglong" => format!("Value::OutSize({arg}.cast())"),
        "*mut CUdeviceptr" => format!("Value::OutAddress({arg}.cast())"),
        handle if handle.strip_prefix("*mut ").is_some_and(|it| HANDLES.contains(&it)) => {
            format!("Value::OutAddress({arg}.cast())")
        }
        pointer if pointer.starts_with('*') || HANDLES.contains(&pointer) => {
            format!("Value::Address({arg} as usize)")
        }
        _ => "Value::Other".to_owned(),
    }
}

/// Handles that are addresses.
const HANDLES: [&str; 14] = [
    "CUarray",
    "CUcontext",
    "CUevent",
    "CUfunction",
    "CUgraph",
    "CUgraphExec",
    "CUgraphNode",
    "CUgreenCtx",
    "CUkernel",
    "CUlibrary",
    "CUmemoryPool",
    "CUmodule",
    "CUstream",
    "CUuserObject",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/driver");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Its own table of functions must hold its own functions, also under a preloaded library that exports the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    let in_macro = [
        "cuMemcpy",
        "cuMemcpyAsync",
        "cuMemcpyHtoD_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoH_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoD_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuMemsetD8_v2",
        "cuMemsetD8Async",
        "cuMemsetD2D8_v2",
        "cuMemsetD2D8Async",
        "cuMemsetD16_v2",
        "cuMemsetD16Async",
        "cuMemsetD2D16_v2",
        "cuMemsetD2D16Async",
        "cuMemsetD32_v2",
        "cuMemsetD32Async",
        "cuMemsetD2D32_v2",
        "cuMemsetD2D32Async",
    ];
    let mut written = BTreeSet::new();
    for entry in fs::read_dir("src/driver").expect("src/driver is part of the package") {
        let text = fs::read_to_string(entry.expect("readable").path()).expect("readable");
        // Functions, and the names that the macros for families of functions are given.
        for word in text.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if in_macro.contains(&word) {
                written.insert(word.to_owned());
            }
        }
        for line in text.lines() {
            if let Some(rest) = line.trim_start().strip_prefix("pub(super) unsafe fn cu") {
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                written.insert(format!("cu{name}"));
            }
        }
    }
    let mut out = String::new();
    let mut pointers = String::new();
    let mut used = BTreeSet::new();
    let names: BTreeSet<&str> = ROWS.iter().map(|(name, _)| *name).collect();
    for (name, args) in ROWS {
        let stem = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds"));
        let per_thread = stem.is_some();
        let stem = stem.unwrap_or(name);
        let flavored = names.contains(format!("{stem}_ptsz").as_str())
            || names.contains(format!("{stem}_ptds").as_str());
        let params: Vec<String> = args.iter().map(|(arg, ty)| format!("{arg}: {ty}")).collect();
        let mut values: Vec<String> = args.iter().map(|(arg, _)| (*arg).to_owned()).collect();
        if flavored {
            values.insert(0, format!("Flavor::{}", if per_thread { "PerThread" } else { "Legacy" }));
        }
        let body = if !written.contains(stem) {
            values.clear();
            "CUresult::CUDA_ERROR_NOT_SUPPORTED".to_owned()
        } else {
            used.insert(stem.to_owned());
            let call = format!("imp::{stem}({})", values.join(", "));
            if UNGUARDED.contains(&stem) { call } else { format!("guard(|| {call})") }
        };
        let params = params.join(", ");
        let shown: Vec<_> = args.iter().map(|(arg, ty)| format!("(\"{arg}\", {})", shown(arg, ty))).collect();
        let trace = format!("crate::call_trace::call(\"{name}\", returned.0, &[{}])", shown.join(", "));
        let body = if UNGUARDED.contains(&stem) {
            // Two copies: after a call, its arguments would have to be kept.
            format!(
                "if crate::call_trace::calls() {{ let returned = {body}; {trace}; return returned; }} {body}"
            )
        } else {
            format!("let returned = {body}; if crate::call_trace::calls() {{ {trace}; }} returned")
        };
        writeln!(
            out,
            "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {name}({params}) -> CUresult {{ {body} }}"
        )
        .expect("writes to a string");
        writeln!(pointers, "Pointer({name} as *const ()),").expect("writes to a string");
    }
    let unknown: Vec<_> = written.difference(&used).collect();
    assert!(unknown.is_empty(), "written but not in the table: {unknown:?}");
    writeln!(out, "pub(crate) static POINTERS: [Pointer; {}] = [\n{pointers}];", ROWS.len())
        .expect("writes to a string");
    writeln!(out, "/// Driver functions that do more than answer \"not supported\".\npub const IMPLEMENTED: &[&str] = &{:?};", used.iter().collect::<Vec<_>>()).expect("writes to a string");
    let path = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("exports.rs");
    // A new file: build folders may be hard links to another checkout's.
    let _ = fs::remove_file(&path);
    fs::write(path, out).expect("OUT_DIR is writable");
}
