//! A host with policies of a program's own: what `gshare up` runs, with other answers to its questions.
//!
//! ```no_run
//! use gshare_openfaas::Builder;
//! use gshare_sched::pack::{MaxRects, MaxRectsConfig};
//! use gshare_sched::platform::OwnPolicies;
//!
//! let packer = Box::new(MaxRects::new(MaxRectsConfig::default()));
//! let policies = OwnPolicies { packer: Some(packer), ..OwnPolicies::default() };
//! Builder::from_args().policies(policies).serve()?;
//! # Ok::<(), anyhow::Error>(())
//! ```

use super::{HostSettings, Options, serve_with};
use anyhow::ensure;
use clap::Parser as _;
use gshare_core::TokenScheduler;
use gshare_modelstore::store::ModelStore;
use gshare_sched::platform::OwnPolicies;
use gshare_sched::scale::VerticalScaler;

/// The host of `gshare up`, before it starts.
pub struct Builder {
    pub(super) options: Options,
    pub(super) policies: OwnPolicies,
    pub(super) tokens: Option<Box<dyn TokenScheduler>>,
    pub(super) vertical: Option<Box<dyn VerticalScaler>>,
    pub(super) models: Option<Box<dyn ModelStore>>,
}

impl core::fmt::Debug for Builder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Builder")
            .field("options", &self.options)
            .field("policies", &self.policies)
            .field("tokens", &self.tokens.is_some())
            .field("vertical", &self.vertical.is_some())
            .field("models", &self.models)
            .finish()
    }
}

impl Builder {
    /// A host with our policies.
    pub fn new(options: Options) -> Self {
        Self { options, policies: OwnPolicies::default(), tokens: None, vertical: None, models: None }
    }

    /// The same with the options of the command line. Ends the process for `--help`, or for an option that is wrong.
    pub fn from_args() -> Self {
        Self::new(Options::parse())
    }

    /// The policies of the platform: which device an instance gets, how many run, which request is next, who makes room.
    #[must_use]
    pub fn policies(self, policies: OwnPolicies) -> Self {
        Self { policies, ..self }
    }

    /// Who may launch kernels now, in the host's own daemon.
    #[must_use]
    pub fn tokens(self, tokens: Box<dyn TokenScheduler>) -> Self {
        Self { tokens: Some(tokens), ..self }
    }

    /// How shares move between the clients of a device, in the host's own daemon.
    #[must_use]
    pub fn vertical(self, vertical: Box<dyn VerticalScaler>) -> Self {
        Self { vertical: Some(vertical), ..self }
    }

    /// Which models stay in host memory, in the host's own store.
    #[must_use]
    pub fn models(self, models: Box<dyn ModelStore>) -> Self {
        Self { models: Some(models), ..self }
    }

    /// Serves until the process ends. Prints where it listens.
    ///
    /// # Errors
    /// When the host cannot start, or a setting is wrong or leaves no place for a policy.
    pub fn serve(mut self) -> anyhow::Result<()> {
        self.options.read_settings()?;
        let HostSettings { daemon, no_gpu, model_store, .. } = &self.options.host;
        let of_daemon = self.tokens.is_some() || self.vertical.is_some();
        for (given, bars, option) in [
            (of_daemon, daemon.is_some(), "host.daemon: the host has a policy for a daemon of its own"),
            (of_daemon, *no_gpu, "host.no_gpu: the host has a policy for a daemon of its own"),
            (
                self.models.is_some(),
                model_store.is_some(),
                "host.model_store: the host has a policy for a store of its own",
            ),
        ] {
            ensure!(!(given && bars), "{option}: need a host without the setting, or without the policy");
        }
        serve_with(self)
    }
}
