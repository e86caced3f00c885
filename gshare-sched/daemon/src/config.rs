//! The daemon's configuration: a TOML file, read and checked once before the daemon uses it.
//!
//! Every key has a default, and an unknown key is an error. An error names the line, the key and the bound.
//!
//! ```
//! let config = gshared::Config::parse(r#"
//!     socket = "/run/gshare/gshare.sock"
//!     [[client]]
//!     name = "alice"
//!     quota = "0.3:0.8"   # request:limit, shares of GPU time in a window
//!     sm = 24             # per cent of the SMs
//!     memory = "1GiB"
//! "#)?;
//! assert_eq!(config.clients["alice"].spec.unwrap().quota().to_string(), "30%:80%");
//!
//! let error = gshared::Config::parse("[[client]]\nname = 'bob'\nquota = '0.8:0.3'").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "line 3: client `bob`: quota: quota request 80% is larger than quota limit 30%: need request <= limit"
//! );
//! # Ok::<(), gshared::ConfigError>(())
//! ```

use gshare_core::text::{some_text, text};
use gshare_core::{Bytes, Duration, MemoryRange, QuotaRange, ResourceSpec, ServiceClass, SmShare, SpecError};
use gshare_sched::node::{ClientConfig, NodeConfig, max_gpus};
use gshare_sched::token::MultiTokenConfig;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::de::{DeTable, DeValue};

pub use gshare_sched::node::{DeviceConfig, DeviceUuid};

/// Default path of the socket between the hooks and the daemon.
pub const DEFAULT_SOCKET: &str = "/run/gshare/gshare.sock";

/// Errors of reading a configuration or putting it in force.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot be read: {cause}")]
    Read {
        /// Error of the system call.
        cause: std::io::Error,
    },
    /// A line is not TOML, a key is unknown, or a value is outside its bound.
    #[error("line {line}: {message}")]
    Text {
        /// Line number in the file, from 1.
        line: usize,
        /// The key (in a list, with the entry's name), the bound, and the value's breach of the bound.
        message: String,
    },
    /// The node cannot put a value in force.
    #[error(transparent)]
    Node(#[from] gshare_core::ConfigError),
    /// A changed key needs a restart of the daemon.
    #[error("{key} cannot change while the daemon runs: restart it (now {now}, in the file {new})")]
    NotLive {
        /// The key.
        key: &'static str,
        /// The value in force.
        now: String,
        /// The value in the file.
        new: String,
    },
}

/// The configuration of a daemon. The default serves the calling user and lets every client in.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The socket of the hooks.
    pub socket: PathBuf,
    /// The socket of `gshare status` and `gshare top`; `None` puts it beside the hooks' socket ([`Config::admin_socket`]).
    pub admin_socket: Option<PathBuf>,
    /// Address of the Prometheus endpoint: `127.0.0.1:9478`, a port alone for loopback, `0.0.0.0:9478` for other hosts,
    /// or `unix:/path`. None by default, since only the operator should open a port.
    #[serde(deserialize_with = "some_text")]
    pub metrics: Option<MetricsAddress>,
    /// Most clients, each a pair of process and GPU, at a time. By default 1024, more than a node's GPUs can serve.
    #[serde(deserialize_with = "count")]
    pub max_clients: u32,
    /// Most connections at a time, those of refused processes included. By default 4096: a fork bomb must not take all descriptors.
    #[serde(deserialize_with = "count")]
    pub max_connections: u32,
    /// Whether a client without a `[[client]]` entry gets its requested share. True by default, since a platform passes
    /// the share to the process it starts.
    pub allow_unlisted: bool,
    /// Whether all clients are only observed: no limit holds, nothing waits, and use is measured. Not by default.
    pub observe: bool,
    /// The treatment of a refused process.
    pub strangers: Strangers,
    /// Users that may connect besides the daemon's own user and root.
    pub allow_uids: Vec<u32>,
    /// Whether every user may connect.
    pub allow_any_user: bool,
    /// Length of the window over which quotas are settled. FaST-GShare's window is 40 ms; the default of 100 ms halves the
    /// cost of hand-overs at the same error per second.
    #[serde(deserialize_with = "window")]
    pub window: Duration,
    /// The longest token. The default of 10 ms gives ten clients a turn in a window.
    #[serde(deserialize_with = "part_of_window")]
    pub token: Duration,
    /// Time after a token's expiry in which its process may still return it. The default of 50 ms allows kernels longer than a
    /// token: their process returns the token once the device is free for the next client. A dead process returns it at once.
    #[serde(deserialize_with = "part_of_window")]
    pub grace: Duration,
    /// Most GPU time a client should have in flight. The default of 5 ms is half a token: the device does not run dry while
    /// a launching thread waits for a CPU, and a token that is called back returns within its grace.
    #[serde(deserialize_with = "part_of_window")]
    pub in_flight: Duration,
    /// Memory of each device kept back for contexts, code and the driver. 0 by default, because the hooks charge all memory
    /// in their sight; a node without MPS needs some 300 MiB per process.
    #[serde(deserialize_with = "text")]
    pub memory_headroom: Bytes,
    /// Most host memory for the parked programs of one user. By default half of the host's memory.
    #[serde(deserialize_with = "text")]
    pub park_memory: Bytes,
    /// The journal of events. None by default.
    pub journal: Option<JournalConfig>,
    /// The use of NVIDIA's MPS.
    pub mps: MpsMode,
    /// Time without a connection after which the daemon stops by itself. Never by default; meant for a daemon started for
    /// one user's programs.
    #[serde(deserialize_with = "some_text")]
    pub idle_exit: Option<Duration>,
    /// The devices of the node. With an empty list the daemon learns each device from the first client that attaches to it.
    #[serde(rename = "device", deserialize_with = "devices")]
    pub devices: Vec<DeviceConfig>,
    /// The promise to each client name.
    #[serde(rename = "client", deserialize_with = "clients")]
    pub clients: BTreeMap<String, ClientConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            admin_socket: None,
            metrics: None,
            max_clients: 1024,
            max_connections: 4096,
            allow_unlisted: true,
            observe: false,
            strangers: Strangers::Refuse,
            allow_uids: Vec::new(),
            allow_any_user: false,
            window: Duration::from_millis(100),
            token: Duration::from_millis(10),
            grace: Duration::from_millis(50),
            in_flight: Duration::from_millis(5),
            memory_headroom: Bytes::ZERO,
            park_memory: half_of_host_memory(),
            journal: None,
            mps: MpsMode::Off,
            idle_exit: None,
            devices: Vec::new(),
            clients: BTreeMap::new(),
        }
    }
}

fn half_of_host_memory() -> Bytes {
    let info = rustix::system::sysinfo();
    Bytes(info.totalram.saturating_mul(info.mem_unit.into()) / 2)
}

/// The treatment of a refused process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::exhaustive_enums, reason = "it launches or it does not")]
pub enum Strangers {
    /// The process launches nothing.
    Refuse,
    /// The process runs within the limits it would have had.
    Run,
}

/// Location and limits of the [`journal`](crate::journal).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalConfig {
    /// The directory. The daemon creates it if need be.
    pub dir: PathBuf,
    /// Most bytes of one file. The default of 64 MiB holds some 600 000 events.
    #[serde(default = "default_file", deserialize_with = "file_size")]
    pub max_file: Bytes,
    /// Most files in the directory, by default 8.
    #[serde(default = "default_files", deserialize_with = "files")]
    pub keep_files: usize,
    /// Whether the node's actions are written too. Not by default, since a replay gives them again.
    #[serde(default)]
    pub actions: bool,
}

const fn default_file() -> Bytes {
    Bytes::from_mib(64)
}

const fn default_files() -> usize {
    8
}

impl JournalConfig {
    /// A journal in `dir` with the default sizes.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), max_file: default_file(), keep_files: default_files(), actions: false }
    }
}

/// The address of the metrics endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricsAddress {
    /// An address and port.
    Tcp(std::net::SocketAddr),
    /// A UNIX socket.
    Unix(PathBuf),
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A port without an address is on loopback: metrics name tenants, so other hosts see them only with the operator's consent.
impl FromStr for MetricsAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let loopback = |port| std::net::SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, port));
        let address = text.parse().ok().or_else(|| text.parse().ok().map(loopback));
        address.map(Self::Tcp).ok_or_else(|| {
            format!("`{text}` is not an address: need `127.0.0.1:9478`, `9478` for loopback, or `unix:/path`")
        })
    }
}

/// The daemon's use of NVIDIA's MPS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MpsMode {
    /// Leave MPS alone, but use it if another process started it.
    Off,
    /// Start the MPS control daemon where it is installed.
    Auto,
    /// Start the MPS control daemon, or refuse to start.
    On,
}

/// The default admin socket of a hook socket: `gshare.sock` has `gshare-admin.sock`.
pub fn admin_socket_of(socket: &Path) -> PathBuf {
    let stem = socket.file_stem().unwrap_or_default().to_string_lossy();
    let extension = socket.extension().map(|text| format!(".{}", text.to_string_lossy())).unwrap_or_default();
    socket.with_file_name(format!("{stem}-admin{extension}"))
}

impl Config {
    /// The default configuration at another socket.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), ..Self::default() }
    }

    /// Reads and checks a configuration file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ConfigError::Read { cause })?;
        Self::parse(&text)
    }

    /// Parses and checks a configuration.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().unwrap_or_default().start;
            error_at(text, at, error.message())
        })?;
        // A default gives way to a shorter window; a value in the file is an error instead.
        let parts = [
            ("token", &mut config.token),
            ("grace", &mut config.grace),
            ("in_flight", &mut config.in_flight),
        ];
        for (key, part) in parts {
            if *part > config.window
                && let Some(at) = start_of(text, key)
            {
                let message = format!("{part} is out of range: need {LEAST_PART} to {}", config.window);
                return Err(error_at(text, at, &message));
            }
            *part = config.window.min(*part);
        }
        config.node().check()?;
        Ok(config)
    }

    /// The socket of `gshare status` and `gshare top`.
    pub fn admin_socket(&self) -> PathBuf {
        self.admin_socket.clone().unwrap_or_else(|| admin_socket_of(&self.socket))
    }

    /// The configuration of the node.
    pub fn node(&self) -> NodeConfig {
        let mut node = NodeConfig::default();
        node.max_clients = self.max_clients;
        node.allow_unlisted = self.allow_unlisted;
        node.observe = self.observe;
        node.refused_run = self.strangers == Strangers::Run;
        node.in_flight = self.in_flight;
        node.memory_headroom = self.memory_headroom;
        node.park_memory = self.park_memory;
        node.max_debt = self.engine().max_debt;
        node.devices.clone_from(&self.devices);
        node.clients.clone_from(&self.clients);
        node
    }

    /// The settings of the token scheduler.
    pub fn engine(&self) -> MultiTokenConfig {
        let mut engine = MultiTokenConfig::default();
        engine.window = self.window;
        engine.max_token = self.token;
        engine.min_token = engine.min_token.min(self.token);
        engine.slack = engine.slack.min(self.window);
        engine.grace = self.grace;
        engine.max_clients = self.max_clients;
        engine.max_gpus = max_gpus(self.max_clients);
        engine
    }

    /// Checks that `new` can replace this configuration in a running daemon.
    pub(crate) fn check_live(&self, new: &Self) -> Result<(), ConfigError> {
        let times = |config: &Self| (config.window, config.token, config.grace);
        let keys: [(&'static str, &dyn fmt::Debug, &dyn fmt::Debug); 9] = [
            ("socket", &self.socket, &new.socket),
            ("admin_socket", &self.admin_socket(), &new.admin_socket()),
            ("metrics", &self.metrics, &new.metrics),
            ("max_clients", &self.max_clients, &new.max_clients),
            ("max_connections", &self.max_connections, &new.max_connections),
            ("window, token or grace", &times(self), &times(new)),
            ("journal", &self.journal, &new.journal),
            ("mps", &self.mps, &new.mps),
            ("device", &self.devices, &new.devices),
        ];
        for (key, now, new) in keys {
            let (now, new) = (format!("{now:?}"), format!("{new:?}"));
            if now != new {
                return Err(ConfigError::NotLive { key, now, new });
            }
        }
        Ok(())
    }
}

/// An error with the line and the key at an offset of the text.
fn error_at(text: &str, at: usize, message: &str) -> ConfigError {
    let line = 1 + text.get(..at).unwrap_or_default().matches('\n').count();
    let key = DeTable::parse(text).ok().and_then(|table| key_at(table.get_ref(), at));
    let key = key.map_or_else(String::new, |key| format!("{key}: "));
    ConfigError::Text { line, message: format!("{key}{}", message.trim_end().replace('\n', ": ")) }
}

/// The offset of a top-level key's value.
fn start_of(text: &str, key: &str) -> Option<usize> {
    DeTable::parse(text).ok()?.get_ref().get(key).map(|value| value.span().start)
}

/// The key with its name or its value at this offset of the text; in a list, with the name of the entry.
fn key_at(table: &DeTable<'_>, at: usize) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let name = key.get_ref();
        let inside = match value.get_ref() {
            DeValue::Table(table) => key_at(table, at).map(|inner| format!("{name}.{inner}")),
            DeValue::Array(entries) => entries.iter().find_map(|entry| {
                let table = entry.get_ref().as_table()?;
                let of = |id: &str| Some(format!("{name} `{}`", table.get(id)?.get_ref().as_str()?));
                let entry_name = of("name").or_else(|| of("uuid")).unwrap_or_else(|| name.to_string());
                let here = || entry.span().contains(&at).then(|| entry_name.clone());
                key_at(table, at).map(|inner| format!("{entry_name}: {inner}")).or_else(here)
            }),
            _ => None,
        };
        let here = key.span().contains(&at) || value.span().contains(&at);
        inside.or_else(|| here.then(|| name.to_string()))
    })
}

fn within<'de, T, D: Deserializer<'de>>(deserializer: D, bounds: RangeInclusive<T>) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display> + PartialOrd + fmt::Display,
{
    let value: T = text(deserializer)?;
    if bounds.contains(&value) {
        return Ok(value);
    }
    let (least, most) = bounds.into_inner();
    Err(D::Error::custom(format_args!("{value} is out of range: need {least} to {most}")))
}

const LEAST_PART: Duration = Duration::from_micros(100);
const LONGEST_WINDOW: Duration = Duration::from_millis(10_000);

fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    within(deserializer, 1..=65_536)
}

fn files<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    within(deserializer, 1..=10_000)
}

fn file_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    within(deserializer, Bytes::from_mib(1)..=Bytes::from_gib(64))
}

fn window<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, Duration::from_millis(1)..=LONGEST_WINDOW)
}

/// The upper bound is the window, which may come later in the file.
fn part_of_window<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    within(deserializer, LEAST_PART..=LONGEST_WINDOW)
}

fn partition<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SmShare, D::Error> {
    let sm: SmShare = text(deserializer)?;
    if sm.is_zero() { Err(D::Error::custom(SpecError::ZeroSm)) } else { Ok(sm) }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    match text(deserializer)? {
        Bytes::ZERO => Err(D::Error::custom(SpecError::ZeroMemory)),
        bytes => Ok(Some(bytes)),
    }
}

fn devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DeviceConfig>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        #[serde(deserialize_with = "text")]
        uuid: DeviceUuid,
        #[serde(default, deserialize_with = "memory")]
        memory: Option<Bytes>,
    }
    let entries = Vec::<Entry>::deserialize(deserializer)?;
    Ok(entries.into_iter().map(|Entry { uuid, memory }| DeviceConfig { uuid, memory }).collect())
}

fn clients<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, ClientConfig>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        name: String,
        #[serde(default = "best_effort", deserialize_with = "text")]
        quota: QuotaRange,
        #[serde(default = "all_sms", deserialize_with = "partition")]
        sm: SmShare,
        #[serde(default, deserialize_with = "some_text")]
        memory: Option<MemoryRange>,
        #[serde(default, deserialize_with = "some_text")]
        class: Option<ServiceClass>,
        user: Option<u32>,
        #[serde(default, deserialize_with = "some_text")]
        device: Option<DeviceUuid>,
    }
    let mut clients = BTreeMap::new();
    for entry in Vec::<Entry>::deserialize(deserializer)? {
        let spec = ResourceSpec::new(entry.quota, entry.sm, None).map_err(D::Error::custom)?;
        let spec = entry.memory.map_or(spec, |memory| spec.with_memory(memory));
        let client = ClientConfig::default()
            .with_spec(Some(spec))
            .with_class(entry.class)
            .with_user(entry.user)
            .with_device(entry.device);
        if clients.insert(entry.name.clone(), client).is_some() {
            let name = entry.name;
            return Err(D::Error::custom(format_args!(
                "`{name}`: two clients of one name: need a name each"
            )));
        }
    }
    Ok(clients)
}

const fn best_effort() -> QuotaRange {
    QuotaRange::BEST_EFFORT
}

const fn all_sms() -> SmShare {
    SmShare::WHOLE
}

#[cfg(test)]
mod tests;
