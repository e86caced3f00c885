//! `gshare run --shim`: a Python program without knowledge of the model store gets its weights from it.
//!
//! The files of the shim are part of this program. The command writes them to a directory of the run, which goes first into the
//! program's `PYTHONPATH`; `gshare_store/shim.py` describes their work.

use super::sim::Variables;
use anyhow::Context as _;
use gshare_modelstore::client::Client;
use gshare_modelstore::python::write_shim;
use gshare_runner::Scratch;
use gshare_runner::libraries::{STORE, prepend};
use std::ffi::OsString;
use std::path::PathBuf;

/// Weights from the model store, for Python programs without its client.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Shim {
    /// Serve a Python program's `torch.load(path)` and `safetensors.torch.load_file(path)` from the model store, so all
    /// processes share one copy of the tensors in host memory. The program may write to its tensors, which copies the page.
    /// Files that the store cannot serve are loaded as usual. A file of `torch.save` is converted once, into
    /// `$XDG_CACHE_HOME/gshare/weights`. `GSHARE_SHIM_LOG=1` logs each load. Sets `PYTHONPATH`, `GSHARE_STORE` and
    /// `GSHARE_STORE_LIBRARY`. [store left out: `GSHARE_STORE`; else `GSHARE_STORE_SOCKET`; else /run/gshare/store.sock]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    shim: Option<OsString>,
}

impl Shim {
    /// Whether the option names no store.
    pub(super) fn is_bare(&self) -> bool {
        self.shim.as_ref().is_some_and(|text| text.is_empty())
    }

    /// The variables of the program, and the directory, which must outlive it; none without `--shim`.
    ///
    /// # Errors
    /// When no store answers, its client's library is missing, or the directory cannot be written.
    pub(crate) fn environment(&self) -> anyhow::Result<Option<(Variables, Scratch)>> {
        let Some(given) = &self.shim else { return Ok(None) };
        let named =
            |name| std::env::var_os(name).filter(|text: &OsString| !text.is_empty()).map(PathBuf::from);
        let socket = Some(given).filter(|text| !text.is_empty()).map(PathBuf::from);
        let socket = socket.or_else(|| named("GSHARE_STORE"));
        let socket = socket.or_else(|| named("GSHARE_STORE_SOCKET"));
        let socket = socket.unwrap_or_else(|| super::store::DEFAULT_SOCKET.into());
        // The program may change its working directory.
        let socket = std::path::absolute(socket)?;
        Client::connect(&socket).with_context(|| {
            format!(
                "--shim: no model store answers at {}; start one with `gshare store serve --socket PATH`, name one with \
                 --shim=SOCKET, or leave --shim out",
                socket.display()
            )
        })?;
        let library = STORE.find().context("--shim")?;
        // The program runs this code, so only this user may write it.
        let dir = Scratch::new("shim")?;
        write_shim(dir.path())?;
        let variables = vec![
            ("PYTHONPATH".into(), prepend("PYTHONPATH", dir.path())),
            ("GSHARE_STORE".into(), socket.into()),
            ("GSHARE_STORE_LIBRARY".into(), library.into()),
        ];
        Ok(Some((variables, dir)))
    }
}
