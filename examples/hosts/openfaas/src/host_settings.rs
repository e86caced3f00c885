//! The settings of `--settings FILE` and `--set KEY=VALUE`: rarely used options of the host, and settings of the platform.

use super::Options;
use super::traces::Collector;
use anyhow::{Context as _, bail, ensure};
use gshare_core::text::{some_text, text};
use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_runner::confine::User;
use gshare_sched::platform::{PlatformSettings, TenantLimits};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The table `host` of the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostSettings {
    /// Whether functions are ordinary processes without a GPU.
    pub no_gpu: bool,
    /// Whether an address that other machines reach is allowed, though passwords cross the network in clear.
    pub plain_http: bool,
    /// Whether MPS is started, unless it runs already, and stopped at the end.
    pub mps: bool,
    /// Numbers of the GPUs that serve one request at a time and keep models in their memory.
    pub whole: Vec<u32>,
    /// GPU memory to book for a function of unknown size until it is measured.
    #[serde(deserialize_with = "text")]
    pub guess: Bytes,
    /// Socket of the node's daemon. Without it the host runs its own daemon.
    pub daemon: Option<PathBuf>,
    /// Socket of the node's model store. Without it the host runs its own store.
    pub model_store: Option<PathBuf>,
    /// Host memory for models, if the host runs the store.
    #[serde(deserialize_with = "text")]
    pub model_memory: Bytes,
    /// The user of functions. Needs root.
    #[serde(deserialize_with = "some_text")]
    pub function_user: Option<User>,
    /// Folder of the cgroup file system. Each process gets a cgroup below it, with its function's limits of memory and CPU.
    pub cgroups: Option<PathBuf>,
    /// The limits of each tenant.
    pub tenants: BTreeMap<String, Tenant>,
    /// Hosts, or `host:port`, that may receive answers of asynchronous calls; `*` allows any.
    pub callback: Vec<String>,
    /// Most requests of a function that wait at once.
    pub queue: u32,
    /// Longest wait of a request for an instance, and then for the head of its answer, in seconds.
    pub timeout: u32,
    /// Collector for traces of requests, in OTLP over HTTP.
    #[serde(deserialize_with = "some_text")]
    pub otlp: Option<Collector>,
    /// Pods, with `--kubernetes`.
    #[cfg(feature = "kubernetes")]
    pub kubernetes: crate::kubernetes::up::KubernetesSettings,
}

impl Default for HostSettings {
    fn default() -> Self {
        Self {
            no_gpu: false,
            plain_http: false,
            mps: false,
            whole: Vec::new(),
            guess: Bytes::from_gib(4),
            daemon: None,
            model_store: None,
            model_memory: Bytes::from_gib(4),
            function_user: None,
            cgroups: None,
            tenants: BTreeMap::new(),
            callback: Vec::new(),
            queue: 1024,
            timeout: 60,
            otlp: None,
            #[cfg(feature = "kubernetes")]
            kubernetes: crate::kubernetes::up::KubernetesSettings::default(),
        }
    }
}

/// The pause after a failed start.
const RETRY: &str = "/fractional/scaler/heuristic/fleet/retry_after_ns";

/// Limits of a tenant; a missing limit does not apply.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    max_requests: Option<u32>,
    max_processes: Option<u32>,
    gpu_time_bp: Option<BasisPoints>,
    memory_bp: Option<BasisPoints>,
    max_waiting: Option<u32>,
}

impl Tenant {
    pub(crate) fn limits(&self) -> TenantLimits {
        let mut limits = TenantLimits::default();
        limits.max_requests = self.max_requests.unwrap_or(limits.max_requests);
        limits.max_processes = self.max_processes.unwrap_or(limits.max_processes);
        limits.gpu_time = self.gpu_time_bp.unwrap_or(limits.gpu_time);
        limits.memory = self.memory_bp.unwrap_or(limits.memory);
        limits.max_waiting = self.max_waiting.unwrap_or(limits.max_waiting);
        limits
    }
}

impl Options {
    /// Reads the file, then each `--set`.
    ///
    /// # Errors
    /// The file cannot be read; a key is unknown; a value is out of its bounds, or has no meaning beside another option.
    pub(crate) fn read_settings(&mut self) -> anyhow::Result<()> {
        if let Some(word) = &self.stray {
            ensure!(self.sim.is_empty(), "--sim {word}: the value needs `=`: write --sim={word}");
            bail!("`{word}` is no option of `gshare up` (--help has them)");
        }
        let mut all = match &self.settings {
            Some(file) => {
                let context = || format!("--settings {}", file.display());
                let text = std::fs::read_to_string(file).with_context(context)?;
                let is_toml = file.extension().is_some_and(|extension| extension == "toml");
                if is_toml {
                    toml::from_str(&text).with_context(context)?
                } else {
                    serde_json::from_str(&text).with_context(context)?
                }
            }
            None => Map::new(),
        };
        for (key, value) in &self.set {
            put(&mut all, key, value.clone()).with_context(|| format!("--set {key}={value}"))?;
        }
        if let Some(host) = all.remove("host") {
            self.host = typed("host.", host)?;
        }
        const TABLES: [&str; 4] = ["platform", "fractional", "sliced", "whole"];
        if let Some(key) = all.keys().find(|key| !TABLES.contains(&key.as_str())) {
            bail!("setting {key}: no such table: need host, {}", TABLES.join(", "));
        }
        let mut all = Value::Object(all);
        // A failed start is repeated soon: the user may have just installed the program.
        let scaler = all.pointer("/fractional/scaler");
        if scaler.is_none_or(|scaler| scaler.get("heuristic").is_some()) && all.pointer(RETRY).is_none() {
            let key = RETRY.trim_start_matches('/').replace('/', ".");
            let table = all.as_object_mut().context("the settings are a table")?;
            put(table, &key, Value::from(Duration::from_secs(5).as_nanos()))?;
        }
        self.platform = typed("", all)?;
        let HostSettings { timeout, queue, no_gpu, mps, .. } = self.host;
        ensure!(queue > 0, "host.queue: 0 is out of range: need at least 1 waiting request");
        ensure!(
            (1..=3600).contains(&timeout),
            "host.timeout: {timeout} is out of range: need 1 to 3600 (seconds)"
        );
        ensure!(!no_gpu || self.sim.is_empty(), "host.no_gpu: --sim asks for GPUs: leave out one of them");
        ensure!(
            !mps || !no_gpu && self.sim.is_empty(),
            "host.mps: MPS serves real GPUs: leave out host.no_gpu and --sim"
        );
        Ok(())
    }

    /// The settings of the platform, with the host's limits applied.
    pub(crate) fn platform_settings(&self) -> PlatformSettings {
        let mut settings = self.platform.clone();
        let patience = Duration::from_secs(self.host.timeout.into());
        let platform = settings.platform.with_max_wait(patience).with_max_waiting(self.host.queue);
        // An attempt counts an instance that was lost before it accepted the request.
        settings.platform = platform.with_max_attempts(u8::MAX);
        settings.fractional.pool = settings.fractional.pool.with_host_memory(self.host.model_memory);
        settings.whole.max_loads = u8::MAX;
        settings
    }
}

/// A setting of the command line: its key, and a value in JSON or else a text.
pub(crate) fn setting(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or("need KEY=VALUE, such as host.queue=8")?;
    Ok((key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| Value::from(value))))
}

/// Puts a value at a key such as `fractional.pool.keep_alive`.
fn put(table: &mut Map<String, Value>, key: &str, value: Value) -> anyhow::Result<()> {
    let Some((first, rest)) = key.split_once('.') else {
        table.insert(key.to_owned(), value);
        return Ok(());
    };
    let inner = table.entry(first).or_insert_with(|| Value::Object(Map::new()));
    let inner = inner.as_object_mut().with_context(|| format!("`{first}` is a value and no table"))?;
    put(inner, rest, value)
}

/// Reads a value; an error has its key.
fn typed<T: DeserializeOwned>(prefix: &str, value: Value) -> anyhow::Result<T> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| anyhow::anyhow!("setting {prefix}{}: {}", error.path(), error.inner()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn read(arguments: &[&str]) -> Result<Options, String> {
        let mut options = Options::parse_from([&["gshare up"], arguments].concat());
        options.read_settings().map(|()| options).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn a_setting_of_the_command_line_stands_above_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let (json, toml) = (dir.path().join("host.json"), dir.path().join("host.toml"));
        std::fs::write(
            &json,
            r#"{"host": {"queue": 8, "guess": "2GiB"}, "fractional": {"pool": {"sm_limit_factor": 2}}}"#,
        )
        .unwrap();
        std::fs::write(&toml, "[host]\nqueue = 8\nguess = '2GiB'\n[fractional.pool]\nsm_limit_factor = 2\n")
            .unwrap();
        for file in [&json, &toml] {
            let options = read(&["--settings", file.to_str().unwrap(), "--set", "host.queue=9"]).unwrap();
            assert_eq!((options.host.queue, options.host.guess), (9, Bytes::from_gib(2)));
            assert_eq!(options.platform_settings().fractional.pool.sm_limit_factor, 2);
        }
        let options =
            read(&["--set", "host.function_user=65534:65534", "--set", "host.whole=[0,2]"]).unwrap();
        assert_eq!((options.host.function_user.unwrap().uid, options.host.whole), (65_534, vec![0, 2]));
    }

    #[test]
    fn a_wrong_setting_is_refused_with_its_key_and_its_bound() {
        for (arguments, key, bound) in [
            (&["--set", "host.timeout=0"][..], "host.timeout", "1 to 3600"),
            (&["--set", "host.queue=many"], "host.queue", "u32"),
            (&["--set", "host.queue=0"], "host.queue", "at least 1"),
            (&["--set", "queue=8"], "setting queue", "need host, platform"),
            (&["--set", "host.guess=lots"], "host.guess", "256MiB"),
            (&["--set", "host.quene=8"], "quene", "`queue`"),
            (&["--set", "host.queue=8", "--set", "host.queue.most=8"], "host.queue.most", "no table"),
            (&["--set", "host.no_gpu=true", "--sim"], "host.no_gpu", "--sim"),
            (&["--set", "host.mps=true", "--sim"], "host.mps", "real GPUs"),
            (&["--sim", "a100"], "--sim a100", "write --sim=a100"),
            (&["functions.toml"], "`functions.toml`", "no option"),
            (&["--set", "fractional.packer.best=8"], "fractional.packer", "max_rects"),
            (&["--settings", "/nowhere.toml"], "/nowhere.toml", "No such file"),
        ] {
            let error = read(arguments).unwrap_err();
            assert!(error.contains(key) && error.contains(bound), "{arguments:?}: {error}");
        }
    }
}
