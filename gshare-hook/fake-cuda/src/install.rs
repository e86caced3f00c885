//! Installs the built library where a program looks for the driver.

use std::io;
use std::path::{Path, PathBuf};

/// Path of the built library: `GSHARE_SIM_LIBRARY`, or near the running program in cargo's layout.
pub fn library() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os("GSHARE_SIM_LIBRARY") {
        return Ok(path.into());
    }
    let exe = std::env::current_exe()?;
    let mut places = Vec::new();
    if let Some(dir) = exe.parent() {
        places.extend([dir.to_owned(), dir.join("deps"), dir.join("../lib"), dir.join("../lib/gshare")]);
        places.extend(dir.parent().map(Path::to_owned));
    }
    let newest = places
        .into_iter()
        .map(|dir| dir.join("libfake_cuda.so"))
        .filter_map(|file| Some((file.metadata().and_then(|m| m.modified()).ok()?, file)))
        .max();
    newest.map(|(_, file)| file).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            "libfake_cuda.so is not near the program; set GSHARE_SIM_LIBRARY to it",
        )
    })
}

/// Makes `dir` a directory for `LD_LIBRARY_PATH`: links with the driver's names to the library.
pub fn install_into(dir: &Path) -> io::Result<()> {
    let library = library()?.canonicalize()?;
    std::fs::create_dir_all(dir)?;
    for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
        let link = dir.join(name);
        match std::fs::remove_file(&link) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => std::os::unix::fs::symlink(&library, &link)?,
        }
    }
    Ok(())
}
