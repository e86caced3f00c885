//! Puts gshare's libraries into the programs that use this crate, where `GSHARE_BUNDLE` asks for that: `cargo install` copies programs
//! alone. `build` builds them from the checkout that this crate lies in; anything else is a folder that has them.

use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Files and the packages that build them.
const LIBRARIES: [(&str, &str); 3] = [
    ("libgshare_hook.so", "gshare-hook"),
    ("libfake_cuda.so", "gshare-fake-cuda"),
    ("libgshare_store.so", "gshare-store-c"),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GSHARE_BUNDLE");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo names the folder"));
    let asked = std::env::var_os("GSHARE_BUNDLE").filter(|text| !text.is_empty());
    let folder = asked.map(|asked| if asked == "build" { built(&out) } else { PathBuf::from(asked) });
    let files = folder.map(|folder| LIBRARIES.map(|(file, _)| entry(&folder, file)).concat());
    let list = format!("&[\n{}]\n", files.unwrap_or_default());
    std::fs::write(out.join("bundled.rs"), list).expect("the folder can be written");
}

/// Name, hash and content of a library, as an element of the list.
fn entry(folder: &Path, file: &str) -> String {
    let path = std::path::absolute(folder.join(file)).expect("a folder");
    println!("cargo::rerun-if-changed={}", path.display());
    let content =
        std::fs::read(&path).unwrap_or_else(|error| panic!("GSHARE_BUNDLE: {}: {error}", path.display()));
    let mut hasher = DefaultHasher::new();
    hasher.write(&content);
    format!("({file:?}, \"{:016x}\", include_bytes!({:?})),\n", hasher.finish(), path.display().to_string())
}

/// The folder of the libraries of this checkout, built into a folder of their own: that of the build under way is locked.
fn built(out: &Path) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    assert!(
        manifest.is_file(),
        "GSHARE_BUNDLE=build needs a checkout of gshare: {} is not there; set it to a folder with the libraries",
        manifest.display()
    );
    let target = out.join("libraries");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--locked", "--release", "--manifest-path"]).arg(&manifest);
    cargo.arg("--target-dir").arg(&target).args(LIBRARIES.map(|(_, package)| format!("--package={package}")));
    let status = cargo.env_remove("GSHARE_BUNDLE").status().expect("cargo runs");
    assert!(status.success(), "GSHARE_BUNDLE: the libraries cannot be built: {status}");
    target.join("release")
}
