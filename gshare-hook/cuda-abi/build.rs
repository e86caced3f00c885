//! Writes the macro of the table: a row for each line of `src/symbols.txt`, with its position, base name and flavour.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

const SYMBOLS: &str = "src/symbols.txt";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={SYMBOLS}");
    let text = fs::read_to_string(SYMBOLS).expect("the table is part of the crate");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let newest = lines.next().and_then(|line| line.strip_prefix("newest ")).expect("the newest release");
    let mut rows = String::new();
    for (index, line) in lines.enumerate() {
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().expect("a name, a release, a class and arguments");
        let (name, introduced, class, arguments) = (word(), word(), word(), word());
        let own = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds"));
        let flavor = if own.is_some() { "PerThread" } else { "Legacy" };
        let versioned = own.unwrap_or(name);
        let base = match versioned.rsplit_once("_v") {
            Some((base, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => base,
            _ => versioned,
        };
        writeln!(rows, "{{ {index} {name} \"{base}\" {introduced} {flavor} {class} {arguments} }}")
            .expect("writes to a string");
    }
    let table = format!(
        "/// The newest CUDA release with names in the table, as `1000 * major + 10 * minor`.\n\
         pub const NEWEST_RELEASE: u32 = {newest};\n\
         /// Calls `$callback!` with every row of the table; see the crate's documentation for the shape of a row.\n\
         #[macro_export]\n\
         macro_rules! cuda_symbols {{ ($callback:ident) => {{ $callback! {{\n{rows}}} }}; }}\n"
    );
    let path = Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("table.rs");
    // A new file: build folders may be hard links to another checkout's.
    let _ = fs::remove_file(&path);
    fs::write(path, table).expect("OUT_DIR is writable");
}
