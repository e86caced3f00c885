//! Where the hook and the simulated driver are, and putting the latter in a program's path.

use std::io;
use std::path::{Path, PathBuf};

/// What goes into `LD_PRELOAD`.
pub const HOOK: Library = Library { file: "libgshare_hook.so", variable: "GSHARE_HOOK_LIBRARY" };
/// The driver without a GPU.
pub const SIMULATOR: Library = Library { file: "libfake_cuda.so", variable: "GSHARE_SIM_LIBRARY" };

/// A shared library of gshare.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// Its file.
    pub file: &'static str,
    /// Names it where it is in no usual place.
    pub variable: &'static str,
}

impl Library {
    /// Named by its variable; else beside the program, or where packages put it.
    ///
    /// # Errors
    /// When it is nowhere.
    pub fn find(self) -> io::Result<PathBuf> {
        if let Some(path) = std::env::var_os(self.variable).filter(|text| !text.is_empty()) {
            let path = PathBuf::from(path);
            return path.canonicalize().map_err(|error| {
                io::Error::new(error.kind(), format!("{}={}: {error}", self.variable, path.display()))
            });
        }
        let program = std::env::current_exe()?;
        let beside = program.parent().unwrap_or(Path::new("/"));
        ["", "deps", "../lib/gshare", "../libexec/gshare", "../lib"]
            .iter()
            .find_map(|place| beside.join(place).join(self.file).canonicalize().ok())
            .ok_or_else(|| {
                let program = program.display();
                let text = format!(
                    "{} is neither beside {program} nor in ../lib/gshare; set {}",
                    self.file, self.variable
                );
                io::Error::new(io::ErrorKind::NotFound, text)
            })
    }
}

impl Library {
    /// Finds it; in a checkout of gshare, where `cargo run` builds the command alone, builds it if it is not there.
    ///
    /// # Errors
    /// When it is nowhere, or cannot be built.
    pub fn find_or_build(self) -> io::Result<PathBuf> {
        let found = self.find();
        match Checkout::around() {
            Some(checkout) if found.is_err() && std::env::var_os(self.variable).is_none() => {
                checkout.build()?;
                self.find()
            }
            _ => found,
        }
    }
}

/// In a checkout: brings both libraries up to their sources, unless they are named by their variables.
///
/// # Errors
/// When they cannot be built.
pub fn refresh() -> io::Result<()> {
    let named = |library: Library| std::env::var_os(library.variable).is_some();
    match Checkout::around() {
        Some(checkout) if !(named(HOOK) && named(SIMULATOR)) => checkout.build(),
        _ => Ok(()),
    }
}

/// The checkout that this program was built from and lies in.
#[derive(Debug)]
struct Checkout {
    root: PathBuf,
    /// `release`, or whatever the directory of the program is called.
    profile: String,
    target: PathBuf,
}

impl Checkout {
    /// `<target>/<profile>/gshare` with the sources still where they were.
    fn around() -> Option<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
        if !root.join("gshare-hook/Cargo.toml").is_file() {
            return None;
        }
        let program = std::env::current_exe().ok()?;
        let dir = program.parent()?;
        // Tests lie one deeper.
        let dir = if dir.ends_with("deps") { dir.parent()? } else { dir };
        let target = dir.parent()?;
        // Cargo leaves one in the directory of each profile; its CACHEDIR.TAG is in targets that it made itself only.
        if !dir.join(".cargo-lock").is_file() {
            return None;
        }
        let profile = dir.file_name()?.to_str()?.to_owned();
        Some(Self { root: root.to_owned(), profile, target: target.to_owned() })
    }

    /// Costs a fraction of a second when they are built already, and keeps them as new as their sources.
    fn build(&self) -> io::Result<()> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let profile = if self.profile == "debug" { "dev" } else { &self.profile };
        eprintln!(
            "gshare: building {} and {} (cargo run builds this command alone)",
            HOOK.file, SIMULATOR.file
        );
        let status = std::process::Command::new(cargo)
            .args(["build", "--quiet", "--package", "gshare-hook", "--package", "gshare-fake-cuda"])
            .args(["--profile", profile, "--target-dir"])
            .arg(&self.target)
            .current_dir(&self.root)
            .stdout(std::process::Stdio::null())
            .status()
            .map_err(|error| io::Error::new(error.kind(), format!("cargo: {error}")))?;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("cargo build -p gshare-hook -p gshare-fake-cuda: {status}")))
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
        let library = SIMULATOR.find_or_build()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_finds_the_checkout_it_was_built_in() {
        let checkout = Checkout::around().unwrap();
        assert!(checkout.root.join("gshare-sched/daemon/Cargo.toml").is_file());
        assert!(std::env::current_exe().unwrap().starts_with(checkout.target.join(checkout.profile)));
    }
}
