//! Writes the exports: one C function per name of the driver's table.
//!
//! Each name is a type in `symbol`, and `args` lists its arguments. A name with a per-thread variant (`_ptsz`, `_ptds`) shares one type
//! with it: streams arrive as a `StreamArg`, and a call without a stream gets a `Flavor` first. `entry!` in `src/driver/mod.rs` gives a
//! type its function; every other name answers `CUDA_ERROR_NOT_SUPPORTED`. The library therefore exports the same names as a driver, with
//! the table's signatures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

macro_rules! rows {
    ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident ($($arg:ident: $type:ty),*) })*) => {
        const ROWS: &[(&str, &[(&str, &str)])] = &[$((stringify!($name), &[$((stringify!($arg), stringify!($type))),*])),*];
    };
}
gshare_cuda_abi::cuda_symbols!(rows);

/// Exported without the panic guard: the fast path of these functions has none and must cost next to nothing.
const UNGUARDED: [&str; 1] = ["cuLaunchKernel"];

/// How a trace shows an argument: a `trace::Value`.
fn shown(arg: &str, ty: &str) -> String {
    let ty = ty.replace(" :: ", "::").replace("sys::", "").replace("* ", "*");
    match ty.as_str() {
        "c_uint" | "c_uchar" | "c_ushort" | "u32" | "u64" | "usize" | "c_ulonglong" | "c_int"
        | "CUdevice" | "f32" => format!("Value::Number(&{{{arg}}})"),
        "CUresult" => format!("Value::Number(&{arg}.0)"),
        "CUdeviceptr" => format!("Value::Address({arg} as usize)"),
        "*const c_char" => format!("Value::Text({arg})"),
        "*mut c_uint" => format!("Value::Out({arg}.cast(), number::<u32>)"),
        "*mut c_int" | "*mut CUdevice" => format!("Value::Out({arg}.cast(), number::<i32>)"),
        "*mut usize" | "*mut u64" | "*mut c_ulonglong" => format!("Value::Out({arg}.cast(), number::<u64>)"),
        "*mut CUdeviceptr" => format!("Value::Out({arg}.cast(), address)"),
        handle if handle.strip_prefix("*mut ").is_some_and(is_handle) => {
            format!("Value::Out({arg}.cast(), address)")
        }
        pointer if pointer.starts_with('*') || is_handle(pointer) => {
            format!("Value::Address({arg} as usize)")
        }
        _ => "Value::Other".to_owned(),
    }
}

/// Handles that are addresses.
const HANDLES: &str = "CUarray CUcontext CUevent CUfunction CUgraph CUgraphExec CUgraphNode CUgreenCtx CUkernel CUlibrary \
                       CUmemoryPool CUmodule CUstream CUuserObject";

fn is_handle(ty: &str) -> bool {
    HANDLES.split_whitespace().any(|handle| handle == ty)
}

fn is_stream(ty: &str) -> bool {
    ty.replace(' ', "") == "sys::CUstream"
}

/// An exported name without the suffix of its per-thread variant, and whether it had the suffix.
fn stem(name: &str) -> (&str, bool) {
    let stem = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds"));
    (stem.unwrap_or(name), stem.is_some())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The library's table must point to the library's functions, even under a preloaded library with the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed={UNSUPPORTED}");
    let names = fs::read_to_string(UNSUPPORTED).expect("the list is part of the crate");
    generate("exports.rs", &exports().expect("writes to a string"));
    generate("unsupported.rs", &format!("unsupported! {{ {names} }}"));
}

/// Names of NVML which answer "not supported".
const UNSUPPORTED: &str = "src/nvml/unsupported.txt";

fn generate(name: &str, text: &str) {
    let path = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join(name);
    // A new file: build folders may be hard links to another checkout's.
    let _ = fs::remove_file(&path);
    fs::write(path, text).expect("OUT_DIR is writable");
}

fn exports() -> Result<String, std::fmt::Error> {
    // Stem -> whether it has a per-thread variant.
    let mut flavored: BTreeMap<&str, bool> = BTreeMap::new();
    for (name, _) in ROWS {
        let (stem, per_thread) = stem(name);
        *flavored.entry(stem).or_default() |= per_thread;
    }
    let (mut symbols, mut types, mut functions) = (String::new(), String::new(), String::new());
    let (mut pointers, mut served) = (String::new(), String::new());
    for (name, args) in ROWS {
        let (stem, per_thread) = stem(name);
        let params: Vec<String> = args.iter().map(|(arg, ty)| format!("{arg}: {ty}")).collect();
        let mut values: Vec<String> = args.iter().map(|(arg, _)| (*arg).to_owned()).collect();
        let mut kinds: Vec<&str> = args.iter().map(|(_, ty)| *ty).collect();
        if flavored[stem] {
            let flavor = if per_thread { "Flavor::PerThread" } else { "Flavor::Legacy" };
            if !kinds.iter().any(|kind| is_stream(kind)) {
                values.insert(0, flavor.to_owned());
                kinds.insert(0, "Flavor");
            }
            for (value, kind) in values.iter_mut().zip(&mut kinds).filter(|(_, kind)| is_stream(kind)) {
                (*value, *kind) = (format!("StreamArg({flavor}, {value})"), "StreamArg");
            }
        }
        if !per_thread {
            writeln!(symbols, "pub(crate) struct {name};")?;
            let kinds: String = kinds.iter().map(|kind| format!("{kind},")).collect();
            writeln!(types, "pub(crate) type {name} = ({kinds});")?;
        }
        let values: String = values.iter().map(|value| format!("{value},")).collect();
        let call = format!("symbol::{stem}::call(({values}))");
        let shown: Vec<_> = args.iter().map(|(arg, ty)| format!("(\"{arg}\", {})", shown(arg, ty))).collect();
        let trace = format!("crate::call_trace::call(\"{name}\", returned.0, &[{}])", shown.join(", "));
        let body = if UNGUARDED.contains(&stem) {
            // The arguments appear twice, since keeping them for the trace would cost every call.
            format!(
                "if crate::call_trace::calls() {{ let returned = code({call}); {trace}; return returned; }} code({call})"
            )
        } else {
            format!("let returned = guard(|| {call}); if crate::call_trace::calls() {{ {trace}; }} returned")
        };
        let params = params.join(", ");
        writeln!(
            functions,
            "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {name}({params}) -> CUresult {{ {body} }}"
        )?;
        writeln!(pointers, "Pointer({name} as *const ()),")?;
        writeln!(served, "symbol::{stem}::SERVED,")?;
    }
    let count = ROWS.len();
    Ok(format!(
        "pub(crate) mod symbol {{\n{symbols}}}\n\
         #[allow(dead_code)] // those of names without a function\n\
         pub(crate) mod args {{\nuse super::*;\n{types}}}\n\
         {functions}\
         pub(crate) static POINTERS: [Pointer; {count}] = [\n{pointers}];\n\
         /// For each row of the table, `true` if it has a function.\n\
         pub(super) static SERVED: [bool; {count}] = [\n{served}];\n"
    ))
}
