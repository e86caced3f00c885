//! Text of the Python package, for programs that bring it along: `gshare run --shim` does.

/// Files of a directory that goes first into `PYTHONPATH`: their paths and texts. A Python program that knows of no store then
/// gets its weights from one; `gshare_store/shim.py` says which.
pub const SHIM: [(&str, &str); 4] = [
    ("sitecustomize.py", include_str!("../python/sitecustomize.py")),
    ("gshare_store/__init__.py", include_str!("../python/gshare_store/__init__.py")),
    ("gshare_store/_dlpack.py", include_str!("../python/gshare_store/_dlpack.py")),
    ("gshare_store/shim.py", include_str!("../python/gshare_store/shim.py")),
];
