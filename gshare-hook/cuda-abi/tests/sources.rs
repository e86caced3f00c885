//! The table beside its sources.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use gshare_cuda_abi::SYMBOLS;

/// Exported name -> argument types, as the table spells them.
fn signatures() -> BTreeMap<&'static str, Vec<&'static str>> {
    macro_rules! rows {
        ($({ $index:literal $name:ident $base:literal $introduced:literal $flavor:ident $class:ident
             ($($arg:ident: $type:ty),*) })*) => {
            BTreeMap::from([$((stringify!($name), vec![$(stringify!($type)),*])),*])
        };
    }
    gshare_cuda_abi::cuda_symbols!(rows)
}

/// `cudarc`'s bindings of the driver, in cargo's folder: the crate is a dependency, so cargo has them.
fn bindings() -> String {
    let metadata = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--offline",
            "--filter-platform",
            "x86_64-unknown-linux-gnu",
        ])
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .expect("cargo metadata runs");
    let text = String::from_utf8(metadata.stdout).expect("cargo metadata prints UTF-8");
    let manifest = text
        .split('"')
        .find(|piece| piece.contains("/cudarc-") && piece.ends_with("/Cargo.toml"))
        .expect("cudarc is a dependency");
    let file: PathBuf = Path::new(manifest).with_file_name("src/driver/sys/mod.rs");
    std::fs::read_to_string(file).expect("cudarc keeps its driver bindings in src/driver/sys/mod.rs")
}

/// One spelling for types with the same ABI: pointee constness and integer aliases do not matter, and enumerations, which the table passes
/// as `c_uint`, come from the bindings' own list.
fn canonical(spelled: &str, enums: &[&str]) -> String {
    let plain =
        spelled.replace(' ', "").replace("::core::ffi::", "").replace("sys::", "").replace("*const", "*mut");
    let (stars, base) = plain.split_at(plain.rfind("*mut").map_or(0, |at| at + 4));
    let base = match base {
        "CUdevice" | "CUdevice_v1" => "c_int",
        "CUdeviceptr"
        | "CUdeviceptr_v2"
        | "cuuint64_t"
        | "c_ulonglong"
        | "CUtexObject"
        | "CUsurfObject"
        | "CUmemGenericAllocationHandle"
        | "CUgraphConditionalHandle"
        | "CUlogicalEndpointId" => "u64",
        "cuuint32_t" | "c_uint" => "u32",
        "CUuuid" => "CUuuid_st",
        other if enums.contains(&other) && other != "CUresult" => "u32",
        other => other.trim_end_matches("_v1").trim_end_matches("_v2").trim_end_matches("_v3"),
    };
    format!("{stars}{}", base.trim_end_matches("_st"))
}

#[test]
fn every_function_the_bindings_know_is_in_the_table_with_the_same_signature() {
    let text = bindings();
    let targets: Vec<&str> =
        text.split("pub enum ").skip(1).filter_map(|rest| rest.split([' ', '{']).next()).collect();
    let mut enums = targets.clone();
    for line in text.lines() {
        if let Some((target, alias)) =
            line.strip_prefix("pub use self::").and_then(|rest| rest.split_once(" as "))
        {
            if targets.contains(&target) {
                enums.push(alias.trim_end_matches(';'));
            }
        } else if let Some((alias, target)) =
            line.strip_prefix("pub type ").and_then(|rest| rest.trim_end_matches(';').split_once(" = "))
            && enums.contains(&target)
        {
            enums.push(alias);
        }
    }
    let table = signatures();
    let mut compared = 0;
    for rest in text.split("pub unsafe fn cu").skip(1) {
        let Some((name, rest)) = rest.split_once('(') else { continue };
        let Some((arguments, _)) = rest.split_once(") -> CUresult {") else { continue };
        let name = format!("cu{name}");
        let theirs: Vec<String> = arguments
            .split(", ")
            .filter_map(|argument| argument.split_once(": "))
            .map(|(_, spelled)| canonical(spelled, &enums))
            .collect();
        let ours: Vec<String> = table
            .get(name.as_str())
            .unwrap_or_else(|| panic!("{name} is missing: run generate.py on newer headers"))
            .iter()
            .map(|spelled| canonical(spelled, &enums))
            .collect();
        // The bindings hold several editions of a few functions; structures with a changed tag differ in name only.
        assert_eq!(ours.len(), theirs.len(), "{name}: {ours:?} {theirs:?}");
        for (mine, other) in ours.iter().zip(&theirs) {
            let opaque = mine.starts_with('*') && mine.ends_with("c_void");
            assert!(mine == other || opaque, "{name}: {mine} in the table, {other} in the bindings");
        }
        compared += 1;
    }
    assert!(compared > 500, "only {compared} functions were found in the bindings");
    assert_eq!(table.len(), SYMBOLS.len());
}

/// `CUDA_HEADERS` lists the include directories of CUDA releases, separated by colons, as for `generate.py`. Headers are
/// not redistributed with the crate; without them only the comparison above runs.
#[test]
fn generating_again_from_the_headers_gives_the_same_table() {
    let Some(headers) = std::env::var_os("CUDA_HEADERS") else {
        eprintln!("CUDA_HEADERS is not set: the table was not generated again");
        return;
    };
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("generate.py"))
        .arg("--check")
        .args(std::env::split_paths(&headers))
        .output()
        .expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
