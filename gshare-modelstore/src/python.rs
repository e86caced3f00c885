//! Text of the Python package, for programs that embed it: `gshare run --shim` and `gshare up`.

use std::path::Path;

/// Paths and texts of files for a directory at the front of `PYTHONPATH`. A Python program without a client of the store
/// then gets its weights from a store; `gshare_store/shim.py` chooses it.
pub const SHIM: [(&str, &str); 4] = [
    ("sitecustomize.py", include_str!("../python/sitecustomize.py")),
    ("gshare_store/__init__.py", include_str!("../python/gshare_store/__init__.py")),
    ("gshare_store/_dlpack.py", include_str!("../python/gshare_store/_dlpack.py")),
    ("gshare_store/shim.py", include_str!("../python/gshare_store/shim.py")),
];

/// Writes these files to a directory that is there.
///
/// # Errors
/// The system's.
pub fn write_shim(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory.join("gshare_store"))?;
    SHIM.iter().try_for_each(|(path, text)| std::fs::write(directory.join(path), text))
}
