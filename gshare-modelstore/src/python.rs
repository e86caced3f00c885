//! Text of the Python package, for programs that bring it along: `gshare run --shim` and `gshare up` do.

use std::path::Path;

/// Files of a directory that goes first into `PYTHONPATH`: their paths and texts. A Python program that knows of no store then
/// gets its weights from one; `gshare_store/shim.py` says which.
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
