//! Where the hook and the simulated driver are, and putting the latter in a program's path.

use std::io;
use std::path::{Path, PathBuf};

/// The library that goes into `LD_PRELOAD`.
pub const HOOK: Library = Library { file: "libgshare_hook.so", variable: "GSHARE_HOOK_LIBRARY" };
/// The driver without a GPU.
pub const SIMULATOR: Library = Library { file: "libfake_cuda.so", variable: "GSHARE_SIM_LIBRARY" };

/// The client of the model store, which its Python package loads.
pub const STORE: Library = Library { file: "libgshare_store.so", variable: "GSHARE_STORE_LIBRARY" };

/// A shared library of gshare.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// Its file.
    pub file: &'static str,
    /// Names it where it is in no usual place.
    pub variable: &'static str,
}

impl Library {
    /// Looks at the variable first, then beside the program and where packages put libraries.
    ///
    /// # Errors
    /// When the variable names no file, or the library is in none of these places.
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
        ["deps", "", "../lib/gshare", "../libexec/gshare", "../lib"]
            .iter()
            .find_map(|place| beside.join(place).join(self.file).canonicalize().ok())
            .ok_or_else(|| {
                let program = program.display();
                let text = format!(
                    "{} is neither beside {program} nor in ../lib/gshare; set {}, or in a checkout run \
                     `cargo build -p gshare-hook -p gshare-fake-cuda -p gshare-store-c` with the profile of this program",
                    self.file, self.variable
                );
                io::Error::new(io::ErrorKind::NotFound, text)
            })
    }
}

/// A directory in which a program finds the simulated driver under the names of the real one. Goes when dropped.
#[derive(Debug)]
pub struct SimulatorDir(tempfile::TempDir);

impl SimulatorDir {
    /// Finds the simulated driver, and makes the directory.
    ///
    /// # Errors
    /// When there is no such library.
    pub fn new() -> io::Result<Self> {
        let library = SIMULATOR.find()?;
        let dir = tempfile::Builder::new().prefix("gshare-sim-").tempdir()?;
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

/// `first` and then whatever the variable says already; for a list of directories. For `LD_PRELOAD` there is
/// [`preload`](crate::preload()), which refuses what the loader would not find.
pub fn prepend(variable: &str, first: &Path) -> std::ffi::OsString {
    let mut value = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|text| !text.is_empty()) {
        value.push(":");
        value.push(rest);
    }
    value
}
