//! Where the hook and the simulated driver are, and putting the latter in a program's path.

use anyhow::Context as _;
use std::path::{Path, PathBuf};

pub(crate) const HOOK: Library = Library { file: "libgshare_hook.so", variable: "GSHARE_HOOK_LIBRARY" };
pub(crate) const SIMULATOR: Library = Library { file: "libfake_cuda.so", variable: "GSHARE_SIM_LIBRARY" };

/// A shared library of gshare.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    pub(crate) file: &'static str,
    /// Names it where it is in no usual place.
    pub(crate) variable: &'static str,
}

impl Library {
    /// Named by its variable; else beside the program, or where packages put it.
    pub(crate) fn find(self) -> anyhow::Result<PathBuf> {
        if let Some(path) = std::env::var_os(self.variable).filter(|text| !text.is_empty()) {
            let path = PathBuf::from(path);
            return path.canonicalize().with_context(|| format!("{}={}", self.variable, path.display()));
        }
        let program = std::env::current_exe()?;
        let beside = program.parent().unwrap_or(Path::new("/"));
        ["", "deps", "../lib/gshare", "../libexec/gshare", "../lib"]
            .iter()
            .find_map(|place| beside.join(place).join(self.file).canonicalize().ok())
            .with_context(|| {
                format!(
                    "{} is neither beside {} nor in ../lib/gshare; set {}",
                    self.file,
                    program.display(),
                    self.variable
                )
            })
    }
}

/// A directory in which a program finds the simulated driver under the names of the real one. Goes when dropped.
#[derive(Debug)]
pub(crate) struct SimulatorDir(tempfile::TempDir);

impl SimulatorDir {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let library = SIMULATOR.find()?;
        let dir = tempfile::Builder::new().prefix("gshare-sim-").tempdir()?;
        for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
            std::os::unix::fs::symlink(&library, dir.path().join(name))?;
        }
        Ok(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

/// `first` and then whatever the variable says already.
pub(crate) fn prepend(variable: &str, first: &Path) -> std::ffi::OsString {
    let mut value = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|text| !text.is_empty()) {
        value.push(":");
        value.push(rest);
    }
    value
}
