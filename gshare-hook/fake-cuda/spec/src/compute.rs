//! Text of the Python package `gshare_sim`, for programs that embed it: `gshare run --compute`.

use std::path::Path;

/// Paths and texts of files for a directory at the front of `PYTHONPATH`. PyTorch's operators then have values on a simulated
/// device; `gshare_sim/__init__.py` says how.
const FILES: [(&str, &str); 8] = [
    ("sitecustomize.py", include_str!("../python/sitecustomize.py")),
    ("gshare_sim/__init__.py", include_str!("../python/gshare_sim/__init__.py")),
    ("gshare_sim/_collectives.py", include_str!("../python/gshare_sim/_collectives.py")),
    ("gshare_sim/_device.py", include_str!("../python/gshare_sim/_device.py")),
    ("gshare_sim/_forms.py", include_str!("../python/gshare_sim/_forms.py")),
    ("gshare_sim/_kernels.py", include_str!("../python/gshare_sim/_kernels.py")),
    ("gshare_sim/_memory.py", include_str!("../python/gshare_sim/_memory.py")),
    ("gshare_sim/_random.py", include_str!("../python/gshare_sim/_random.py")),
];

/// Writes these files to a directory that is there.
///
/// # Errors
/// The system's.
pub fn write_compute(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory.join("gshare_sim"))?;
    FILES.iter().try_for_each(|(path, text)| std::fs::write(directory.join(path), text))
}
