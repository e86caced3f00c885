//! Text of the Python package, for programs that embed it, such as `gshare run --shim`.

/// Paths and texts of files for a directory at the front of `PYTHONPATH`. A Python program without a client of the store
/// then gets its weights from a store; `gshare_store/shim.py` chooses it.
pub const SHIM: [(&str, &str); 4] = [
    ("sitecustomize.py", include_str!("../python/sitecustomize.py")),
    ("gshare_store/__init__.py", include_str!("../python/gshare_store/__init__.py")),
    ("gshare_store/_dlpack.py", include_str!("../python/gshare_store/_dlpack.py")),
    ("gshare_store/shim.py", include_str!("../python/gshare_store/shim.py")),
];
