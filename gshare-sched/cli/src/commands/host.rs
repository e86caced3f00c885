//! The host of functions, as commands reach it. `gshare up` starts a host.

use anyhow::{Context as _, bail};
use std::path::PathBuf;

/// The address of a host, and the credentials for it.
#[derive(Debug, clap::Args)]
pub(crate) struct Host {
    /// The host's address.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) host: String,
    /// Directory with the files `basic-auth-user` and `basic-auth-password`, as for the host.
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
}

impl Host {
    fn url(&self, path: &str) -> anyhow::Result<String> {
        let mut url = self.host.trim_end_matches('/').to_owned();
        if let Some(dir) = &self.credentials {
            let read = |name: &str| {
                let path = dir.join(name);
                std::fs::read_to_string(&path).with_context(|| path.display().to_string())
            };
            let (user, password) = (read("basic-auth-user")?, read("basic-auth-password")?);
            url = url.replacen("://", &format!("://{}:{}@", user.trim_end(), password.trim_end()), 1);
        }
        Ok(url + path)
    }

    fn no_answer(&self) -> String {
        format!("{}: no host answers; `gshare up` starts one", self.host)
    }

    /// Gets a path from the host.
    ///
    /// # Errors
    /// When no host answers.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<String> {
        let mut answer = ureq::get(&self.url(path)?).call().with_context(|| self.no_answer())?;
        Ok(answer.body_mut().read_to_string()?)
    }

    /// Posts to a path of the host.
    ///
    /// # Errors
    /// When no host answers, or the host refuses; the error is the host's own sentence.
    pub(crate) fn post(&self, path: &str) -> anyhow::Result<()> {
        let request = ureq::post(&self.url(path)?).config().http_status_as_error(false).build();
        let mut answer = request.send_empty().with_context(|| self.no_answer())?;
        if answer.status().is_success() {
            return Ok(());
        }
        bail!("{}", answer.body_mut().read_to_string()?.trim())
    }
}
