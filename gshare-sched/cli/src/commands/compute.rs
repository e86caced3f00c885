//! `gshare run --compute`: PyTorch's operators have values on a simulated device.
//!
//! This program contains the files of the Python package, like the files for `--shim`. `gshare_sim/__init__.py` describes the package.

use super::sim::Variables;
use gshare_runner::Scratch;
use std::ffi::OsString;

/// Values on a simulated device.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Compute {
    /// PyTorch's operators compute on the simulated device, by PyTorch's CPU kernels; Triton's kernels by its interpreter. A kernel
    /// without values fails in a program of PyTorch, and gives a warning in others. Sets `PYTHONPATH`, `GSHARE_SIM_COMPUTE` and
    /// `TRITON_INTERPRET`.
    #[arg(long, requires = "sim")]
    compute: bool,
}

impl Compute {
    /// The variables of the program, and the directory, which must outlive it; none without `--compute`. `python_path` is the
    /// program's `PYTHONPATH` so far.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn environment(
        &self,
        python_path: Option<OsString>,
    ) -> std::io::Result<Option<(Variables, Scratch)>> {
        if !self.compute {
            return Ok(None);
        }
        // The program runs this code, so only this user may write it.
        let dir = Scratch::new("compute")?;
        gshare_fake_cuda_spec::write_compute(dir.path())?;
        let mut path = dir.path().as_os_str().to_owned();
        if let Some(rest) = python_path.filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        let set = |name: &str| (name.into(), "1".into());
        let variables = vec![("PYTHONPATH".into(), path), set("GSHARE_SIM_COMPUTE"), set("TRITON_INTERPRET")];
        Ok(Some((variables, dir)))
    }
}
