//! Where the hook and the simulated driver are, and putting the latter in a program's path.
//!
//! A program built with `GSHARE_BUNDLE` has the libraries in itself. If none is beside the program, it writes them to the user's
//! cache, in a folder named by their content.

use crate::Scratch;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// The library for `LD_PRELOAD`.
pub const HOOK: Library =
    Library { file: "libgshare_hook.so", variable: "GSHARE_HOOK_LIBRARY", package: "gshare-hook" };
/// The driver without a GPU.
pub const SIMULATOR: Library =
    Library { file: "libfake_cuda.so", variable: "GSHARE_SIM_LIBRARY", package: "gshare-fake-cuda" };

/// The client of the model store, which its Python package loads.
pub const STORE: Library =
    Library { file: "libgshare_store.so", variable: "GSHARE_STORE_LIBRARY", package: "gshare-store-c" };

/// A shared library of gshare.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// Its file.
    pub file: &'static str,
    /// Names it where it is in no usual place.
    pub variable: &'static str,
    /// Cargo's package of the library.
    pub package: &'static str,
}

/// File, hash and content of the libraries in the program itself.
const BUNDLED: &[(&str, &str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/bundled.rs"));

/// Writes a library to the folder of its hash in the user's cache, unless the folder has the same already.
fn unpacked(cache: &Path, file: &str, hash: &str, content: &[u8]) -> io::Result<PathBuf> {
    let folder = cache.join("gshare").join(hash);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let (owner, us) = (folder.metadata()?.uid(), rustix::process::geteuid().as_raw());
    if owner != us {
        let text = format!("{} is of user {owner}, and would be loaded by user {us}", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let path = folder.join(file);
    if std::fs::read(&path).ok().as_deref() != Some(content) {
        // Others may load it meanwhile: they see the old or the new file.
        let mut new =
            tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempfile_in(&folder)?;
        new.write_all(content)?;
        new.persist(&path)?;
    }
    Ok(path)
}

/// The user's folder of files that can be made again.
fn user_cache() -> io::Result<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache"))).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "neither XDG_CACHE_HOME nor HOME names a folder")
    })
}

impl Library {
    /// Looks at the variable first, then beside the program and where packages put libraries, then in the program itself.
    ///
    /// # Errors
    /// When the variable names no file, the library is in none of these places, or it cannot be written to the user's cache.
    pub fn find(self) -> io::Result<PathBuf> {
        if let Some(path) = std::env::var_os(self.variable).filter(|text| !text.is_empty()) {
            let path = PathBuf::from(path);
            return path.canonicalize().map_err(|error| {
                io::Error::new(error.kind(), format!("{}={}: {error}", self.variable, path.display()))
            });
        }
        let program = std::env::current_exe()?;
        let beside = program.parent().unwrap_or(Path::new("/"));
        // Cargo builds into `deps`; a copy beside the program can be older.
        let mut places = ["deps", "", "../lib/gshare", "../libexec/gshare", "../lib"].iter();
        if let Some(path) = places.find_map(|place| beside.join(place).join(self.file).canonicalize().ok()) {
            return Ok(path);
        }
        if let Some((file, hash, content)) = BUNDLED.iter().find(|(file, ..)| *file == self.file) {
            return unpacked(&user_cache()?, file, hash, content);
        }
        let (file, program, variable) = (self.file, program.display(), self.variable);
        let how = self.how_to_get(beside);
        let text =
            format!("{file} is neither beside {program} nor in ../lib/gshare; {how}, or set {variable}");
        Err(io::Error::new(io::ErrorKind::NotFound, text))
    }

    /// Advice about a missing library, by how the program in this directory was installed: cargo can build a library
    /// beside its earlier output, but `cargo install` copies programs alone.
    fn how_to_get(self, beside: &Path) -> String {
        let (file, package) = (self.file, self.package);
        // Cargo leaves this file in each output folder; programs of tests lie in its `deps`.
        let built_by_cargo = |dir: &Path| dir.join(".cargo-lock").exists();
        if let Some(dir) = beside.ancestors().take(2).find(|dir| built_by_cargo(dir)) {
            let release = if dir.ends_with("release") { " --release" } else { "" };
            return format!("run `cargo build{release} -p {package}` in the checkout");
        }
        let lib = beside.parent().unwrap_or(Path::new("/")).join("lib/gshare");
        format!(
            "install the package or wheel of gshare, which brings it along, or the command with GSHARE_BUNDLE=build; or run \
             `cargo build --release -p {package} && install -Dt {} target/release/{file}` in a checkout",
            lib.display()
        )
    }
}

/// A directory in which a program finds the simulated driver under the names of the real one. Goes when dropped.
#[derive(Debug)]
pub struct SimulatorDir(Scratch);

impl SimulatorDir {
    /// Finds the simulated driver, and makes the directory.
    ///
    /// # Errors
    /// When there is no such library.
    pub fn new() -> io::Result<Self> {
        let library = SIMULATOR.find()?;
        // Functions may run as another user.
        let dir = Scratch::below(&std::env::temp_dir(), "sim", 0o777)?;
        for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
            std::os::unix::fs::symlink(&library, dir.path().join(name))?;
        }
        Ok(Self(dir))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// `first` before the variable's present value; for a list of directories. For `LD_PRELOAD` there is
/// [`preload`](crate::preload()), which refuses paths unfit for the loader.
pub fn prepend(variable: &str, first: &Path) -> std::ffi::OsString {
    let mut value = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|text| !text.is_empty()) {
        value.push(":");
        value.push(rest);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_the_program_itself_is_written_once_and_mended() {
        let dir = tempfile::tempdir().unwrap();
        let unpack = || unpacked(dir.path(), "libx.so", "00ff", b"content").unwrap();
        let path = unpack();
        assert_eq!(path, dir.path().join("gshare/00ff/libx.so"));
        let inode = |path: &Path| path.metadata().unwrap().ino();
        let (first, mode) = (inode(&path), path.metadata().unwrap().mode() & 0o777);
        assert_eq!((inode(&unpack()), mode), (first, 0o755), "the same file");
        std::fs::write(&path, "conten").unwrap();
        assert_eq!(std::fs::read(unpack()).unwrap(), b"content");
        let folder = path.parent().unwrap();
        assert_eq!(
            (folder.metadata().unwrap().mode() & 0o777, folder.read_dir().unwrap().count()),
            (0o700, 1)
        );
    }

    #[test]
    fn a_missing_library_is_built_in_a_build_and_installed_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let [installed, built] = ["bin", "target/release"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(&built).unwrap();
        std::fs::write(built.join(".cargo-lock"), "").unwrap();
        assert_eq!(HOOK.how_to_get(&built), "run `cargo build --release -p gshare-hook` in the checkout");
        assert_eq!(HOOK.how_to_get(&built.join("deps")), HOOK.how_to_get(&built));
        let target = dir.path().join("lib/gshare");
        let install = format!("install -Dt {} target/release/libgshare_hook.so", target.display());
        assert!(HOOK.how_to_get(&installed).contains(&install));
    }
}
