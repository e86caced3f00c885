//! The daemon's configuration: TOML, parsed and checked once, at the edge.
//!
//! Everything has a default; an unknown key is an error, and an error names the line, the key and the bound. A
//! holder of a [`Config`] need not check it again.
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
//! assert_eq!(config.client("alice").unwrap().quota().to_string(), "30%:80%");
//!
//! let error = gshared::Config::parse("[[client]]\nname = 'bob'\nquota = '0.8:0.3'").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "line 3: client `bob`: quota: quota request 80% is larger than quota limit 30%: need request <= limit"
//! );
//! # Ok::<(), gshared::ConfigError>(())
//! ```

use gshare_core::{
    Bytes, Duration, QuotaRange, ResourceSpec, ServiceClass, SmShare, SpecError, TokenScheduler,
};
use gshare_sched::node::{ClientConfig, NodeConfig, is_printable, max_gpus, printable};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

pub use gshare_sched::node::{DeviceConfig, DeviceUuid};

/// Where hooks and daemon meet unless they are told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/gshare/gshare.sock";

/// A CPU that takes longer than this to wake up is not there in practice.
const CPU_LATENCY_MOST: Duration = Duration::from_millis(10);

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot be read: {cause}")]
    Read {
        /// Error of the system call.
        cause: std::io::Error,
    },
    /// Not TOML, an unknown key, or a value that is not what the key wants. The text shows the line.
    #[error(transparent)]
    Syntax(#[from] toml::de::Error),
    /// A value that cannot be.
    #[error("line {line}: {key}: {message}")]
    Value {
        /// Line of the file, from 1.
        line: usize,
        /// The key; for an entry of a list with the name of the entry.
        key: String,
        /// The bound, and how it was broken.
        message: String,
    },
    /// A value that the node cannot put in force.
    #[error(transparent)]
    Node(#[from] gshare_core::ConfigError),
    /// A key that needs a restart of the daemon to change.
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

/// The configuration of a daemon. `Default` is a daemon for the calling user that lets every client in.
#[derive(Debug, Clone)]
pub struct Config {
    /// The socket of the hooks.
    pub socket: PathBuf,
    /// The socket of `gshare status` and `gshare top`; beside the other one by default.
    pub admin_socket: PathBuf,
    /// Address of the Prometheus endpoint: `127.0.0.1:9478`, a port alone for loopback, `0.0.0.0:9478` for other hosts,
    /// or `unix:/path`. None by default, since a port is something to be asked for.
    pub metrics: Option<MetricsAddress>,
    /// Most clients (process, GPU) at a time. 1024: more than a node's GPUs can serve.
    pub max_clients: u32,
    /// Most connections at a time, refused ones included. 4096: a fork bomb must not take all descriptors.
    pub max_connections: u32,
    /// Whether a client without a `[[client]]` entry gets the share it asks for. True: a platform passes the share
    /// to the process that it starts.
    pub allow_unlisted: bool,
    /// Whether a process that is refused may run all the same, within the limits that it would have had (`strangers = "run"`).
    /// False: it launches nothing.
    pub refused_run: bool,
    /// Users that may connect besides the daemon's own and root.
    pub allow_uids: Vec<u32>,
    /// Whether every user may connect.
    pub allow_any_user: bool,
    /// Token policy, window over which quotas are settled, longest token, and time allowed to return one
    /// after it ran out.
    pub tokens: TokenConfig,
    /// Most GPU time that a client should have in flight. 5 ms: half a token, so that the device does not run dry while
    /// a launching thread waits for a CPU, and no more than its grace to wait for when a lease is called back.
    pub in_flight: Duration,
    /// Memory of each device that is not handed out: contexts, code and the driver's own. 0 by default, because the
    /// hooks charge what they can see; a node without MPS needs some 300 MiB per process.
    pub memory_headroom: Bytes,
    /// Where events are written down. Nowhere by default.
    pub journal: Option<JournalConfig>,
    /// The use of NVIDIA's MPS.
    pub mps: MpsMode,
    /// Longest time that a CPU of the node may take to wake up while two processes and more share a device; the kernel is asked
    /// to keep it (`/dev/cpu_dma_latency`, which needs root). 0 keeps CPUs from sleeping at all, which costs power and is
    /// worth most to programs that synchronise after each short kernel. Not asked for by default.
    pub cpu_latency: Option<Duration>,
    /// When to stop by itself: after this time without a connection. Never by default; for daemons that were started for
    /// one user's programs. Not a key of the file.
    pub idle_exit: Option<Duration>,
    /// The devices of the node. Empty: every device that a client attaches to is learned.
    pub devices: Vec<DeviceConfig>,
    clients: BTreeMap<String, ClientConfig>,
    /// Whether the file sets the admin socket.
    #[cfg_attr(
        not(feature = "command"),
        expect(dead_code, reason = "options of the command move the socket")
    )]
    own_admin_socket: bool,
}

/// The policy that decides about tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenPolicy {
    /// The client that misses most of its request goes first: [`MultiToken`].
    #[default]
    MultiToken,
}

impl TokenPolicy {
    /// A scheduler of this policy.
    ///
    /// # Errors
    /// When a field of the configuration is out of its bounds.
    pub fn build(
        self,
        config: MultiTokenConfig,
    ) -> Result<Box<dyn TokenScheduler>, gshare_core::ConfigError> {
        Ok(match self {
            Self::MultiToken => Box::new(MultiToken::new(config)?),
        })
    }
}

/// Policy and times of the token engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenConfig {
    /// The policy.
    pub policy: TokenPolicy,
    /// Length of the window over which quotas are settled.
    pub window: Duration,
    /// The longest lease that is granted at once.
    pub longest: Duration,
    /// Time after its expiry in which a token may still be returned.
    pub grace: Duration,
}

impl TokenConfig {
    /// The settings of the scheduler that these times amount to.
    pub fn engine(&self, max_clients: u32) -> MultiTokenConfig {
        let mut engine = MultiTokenConfig::default();
        engine.window = self.window;
        engine.max_token = self.longest;
        engine.min_token = engine.min_token.min(self.longest);
        engine.slack = engine.slack.min(self.window);
        engine.grace = self.grace;
        engine.max_clients = max_clients;
        engine.max_gpus = max_gpus(max_clients);
        engine
    }
}

/// Where and how events are written down. See [`journal`](crate::journal).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalConfig {
    /// The directory; made if need be.
    pub dir: PathBuf,
    /// Most bytes of one file. 64 MiB: some 600 000 events.
    pub max_file: Bytes,
    /// Most files in the directory. 8.
    pub keep_files: usize,
    /// Whether the engine's orders are written too. No: a replay gives them again.
    pub actions: bool,
}

impl JournalConfig {
    /// A journal in `dir` with the default sizes.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), max_file: Bytes::from_mib(64), keep_files: 8, actions: false }
    }
}

/// Where metrics are served.
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

/// A port without an address is on loopback: metrics name tenants, so other hosts see them only if the operator says so.
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
    /// Leave it alone; use it if another process started it.
    Off,
    /// Start its control daemon where there is one.
    Auto,
    /// Start it, or refuse to start.
    On,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            admin_socket: admin_socket_of(Path::new(DEFAULT_SOCKET)),
            metrics: None,
            max_clients: 1024,
            max_connections: 4096,
            allow_unlisted: true,
            refused_run: false,
            allow_uids: Vec::new(),
            allow_any_user: false,
            tokens: TokenConfig::default(),
            in_flight: Duration::from_millis(5),
            memory_headroom: Bytes::ZERO,
            journal: None,
            mps: MpsMode::Off,
            cpu_latency: None,
            idle_exit: None,
            devices: Vec::new(),
            clients: BTreeMap::new(),
            own_admin_socket: false,
        }
    }
}

/// FaST-GShare's window is 40 ms; 100 ms halves the cost of hand-overs at the same error per second. A token of 10 ms
/// lets ten clients have a turn in it. A grace of 50 ms is for kernels that are longer than a token: their process returns
/// it when the device is free for the next. A process that died returns it at once, with any grace.
impl Default for TokenConfig {
    fn default() -> Self {
        Self {
            policy: TokenPolicy::MultiToken,
            window: Duration::from_millis(100),
            longest: Duration::from_millis(10),
            grace: Duration::from_millis(50),
        }
    }
}

/// The admin socket that goes with a hook socket: `gshare.sock` and `gshare-admin.sock`.
pub fn admin_socket_of(socket: &Path) -> PathBuf {
    let stem = socket.file_stem().unwrap_or_default().to_string_lossy();
    let extension = socket.extension().map(|text| format!(".{}", text.to_string_lossy())).unwrap_or_default();
    socket.with_file_name(format!("{stem}-admin{extension}"))
}

impl Config {
    /// The default configuration at another socket.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        let socket = socket.into();
        Self { admin_socket: admin_socket_of(&socket), socket, ..Self::default() }
    }

    /// Uses another socket for hooks; the admin socket is beside it, unless the file sets one.
    #[cfg(feature = "command")]
    pub(crate) fn move_socket(&mut self, socket: &Path) {
        socket.clone_into(&mut self.socket);
        if !self.own_admin_socket {
            self.admin_socket = admin_socket_of(socket);
        }
    }

    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ConfigError::Read { cause })?;
        Self::parse(&text)
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        toml::from_str::<RawConfig>(text)?.check(text)
    }

    /// The configuration of the node.
    pub fn node(&self) -> NodeConfig {
        let mut node = NodeConfig::default();
        node.max_clients = self.max_clients;
        node.allow_unlisted = self.allow_unlisted;
        node.refused_run = self.refused_run;
        node.in_flight = self.in_flight;
        node.memory_headroom = self.memory_headroom;
        node.max_debt = self.tokens.engine(self.max_clients).max_debt;
        node.devices.clone_from(&self.devices);
        node.clients.clone_from(&self.clients);
        node
    }

    /// The share that the configuration promises a client of this name.
    pub fn client(&self, name: &str) -> Option<&ResourceSpec> {
        self.clients.get(name)?.spec.as_ref()
    }

    /// Promises a client of this name a share, or another one.
    pub fn set_client(&mut self, name: impl Into<String>, spec: ResourceSpec) {
        self.clients.entry(name.into()).or_default().spec = Some(spec);
    }

    /// The only user who may use a name; `None`: the first one, while its processes live.
    pub fn owner(&self, name: &str) -> Option<u32> {
        self.clients.get(name)?.user
    }

    /// Reserves a name for a user.
    pub fn set_owner(&mut self, name: impl Into<String>, uid: u32) {
        self.clients.entry(name.into()).or_default().user = Some(uid);
    }

    /// How the configuration treats a client of this name beside others; `None`: as its process asks.
    pub fn class(&self, name: &str) -> Option<ServiceClass> {
        self.clients.get(name)?.class
    }

    /// Sets the class of a client of this name, no matter what its process asks.
    pub fn set_class(&mut self, name: impl Into<String>, class: ServiceClass) {
        self.clients.entry(name.into()).or_default().class = Some(class);
    }

    /// Whether `new` can take the place of this configuration in a running daemon.
    pub(crate) fn check_live(&self, new: &Self) -> Result<(), ConfigError> {
        let keys: [(&'static str, &dyn fmt::Debug, &dyn fmt::Debug); 10] = [
            ("socket", &self.socket, &new.socket),
            ("admin_socket", &self.admin_socket, &new.admin_socket),
            ("metrics", &self.metrics, &new.metrics),
            ("max_clients", &self.max_clients, &new.max_clients),
            ("max_connections", &self.max_connections, &new.max_connections),
            ("policy, window, token or grace", &self.tokens, &new.tokens),
            ("journal", &self.journal, &new.journal),
            ("mps", &self.mps, &new.mps),
            ("cpu_latency", &self.cpu_latency, &new.cpu_latency),
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

/// A value with a text form; numbers are read through their text.
#[derive(Debug, Clone, Copy)]
struct Text<T>(T);

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor<T>(std::marker::PhantomData<T>);
        impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for TextVisitor<T> {
            type Value = Text<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a number")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Text<T>, E> {
                text.parse().map(Text).map_err(|error| E::custom(format_args!("{error}")))
            }
            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Text<T>, E> {
                self.visit_str(&number.to_string())
            }
            fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Text<T>, E> {
                self.visit_str(&number.to_string())
            }
        }
        deserializer.deserialize_any(TextVisitor(std::marker::PhantomData))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    socket: Option<PathBuf>,
    admin_socket: Option<PathBuf>,
    metrics: Option<Text<MetricsAddress>>,
    max_clients: Option<Spanned<u32>>,
    max_connections: Option<Spanned<u32>>,
    allow_unlisted: Option<bool>,
    #[serde(default)]
    strangers: Strangers,
    #[serde(default)]
    allow_uids: Vec<u32>,
    #[serde(default)]
    allow_any_user: bool,
    policy: Option<TokenPolicy>,
    window: Option<Spanned<Text<Duration>>>,
    token: Option<Spanned<Text<Duration>>>,
    grace: Option<Spanned<Text<Duration>>>,
    in_flight: Option<Spanned<Text<Duration>>>,
    memory_headroom: Option<Text<Bytes>>,
    journal: Option<RawJournal>,
    mps: Option<MpsMode>,
    cpu_latency: Option<Spanned<Text<Duration>>>,
    #[serde(default)]
    device: Vec<RawDevice>,
    #[serde(default)]
    client: Vec<RawClient>,
}

/// The treatment of a process that is refused.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Strangers {
    #[default]
    Refuse,
    Run,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawJournal {
    dir: PathBuf,
    max_file: Option<Spanned<Text<Bytes>>>,
    keep_files: Option<Spanned<usize>>,
    #[serde(default)]
    actions: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    uuid: Spanned<Text<DeviceUuid>>,
    memory: Option<Spanned<Text<Bytes>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawClient {
    name: Spanned<String>,
    // Checked by hand, so that the error can name the client.
    quota: Option<Spanned<Loose>>,
    sm: Option<Spanned<Loose>>,
    memory: Option<Spanned<Loose>>,
    class: Option<Spanned<Loose>>,
    user: Option<u32>,
    device: Option<Spanned<Text<DeviceUuid>>>,
}

/// Any text or number, unparsed.
struct Loose(String);

impl FromStr for Loose {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Text::<Self>::deserialize(deserializer).map(|text| text.0).map_err(D::Error::custom)
    }
}

/// Where errors are: turns offsets into lines.
struct Source<'a>(&'a str);

impl Source<'_> {
    fn error<T>(&self, at: &Spanned<T>, key: impl Into<String>, message: impl fmt::Display) -> ConfigError {
        let before = self.0.get(..at.span().start).unwrap_or_default();
        ConfigError::Value {
            line: 1 + before.matches('\n').count(),
            key: key.into(),
            message: message.to_string(),
        }
    }

    /// The value, or the default when it is left out; refused outside the bounds.
    fn within<T: Copy + PartialOrd + fmt::Display>(
        &self,
        key: &str,
        value: Option<&Spanned<T>>,
        default: T,
        least: T,
        most: T,
    ) -> Result<T, ConfigError> {
        let Some(spanned) = value else { return Ok(default) };
        let value = *spanned.get_ref();
        if value < least || value > most {
            let message = format!("{value} is out of range: need {least} to {most}");
            return Err(self.error(spanned, key, message));
        }
        Ok(value)
    }

    fn duration(
        &self,
        key: &str,
        value: Option<&Spanned<Text<Duration>>>,
        default: Duration,
        least: Duration,
        most: Duration,
    ) -> Result<Duration, ConfigError> {
        let plain = value.map(|text| Spanned::new(text.span(), text.get_ref().0));
        self.within(key, plain.as_ref(), default, least, most)
    }
}

impl RawConfig {
    fn check(self, text: &str) -> Result<Config, ConfigError> {
        let source = Source(text);
        let default = Config::default();
        let socket = self.socket.unwrap_or(default.socket);
        let own_admin_socket = self.admin_socket.is_some();
        let devices =
            self.device.iter().map(|device| device.check(&source)).collect::<Result<Vec<_>, _>>()?;
        for (n, device) in self.device.iter().enumerate() {
            let uuid = device.uuid.get_ref().0;
            if devices[..n].iter().any(|other| other.uuid == uuid) {
                return Err(source.error(&device.uuid, format!("device `{uuid}`"), "is listed twice"));
            }
        }
        let mut clients = BTreeMap::new();
        for client in &self.client {
            let name = client.name.get_ref();
            let mut entry = ClientConfig::default();
            entry.spec = Some(client.check(&source, &devices)?);
            entry.class = client.class(&source)?;
            entry.user = client.user;
            entry.device = client.device(&source, &devices)?;
            if clients.insert(name.clone(), entry).is_some() {
                let key = format!("client `{name}`: name");
                return Err(source.error(&client.name, key, "two clients of one name: need a name each"));
            }
        }
        let window = source.duration(
            "window",
            self.window.as_ref(),
            default.tokens.window,
            Duration::from_millis(1),
            Duration::from_millis(10_000),
        )?;
        let least = Duration::from_micros(100);
        let longest = default.tokens.longest.min(window);
        Ok(Config {
            admin_socket: self.admin_socket.unwrap_or_else(|| admin_socket_of(&socket)),
            socket,
            metrics: self.metrics.map(|address| address.0),
            max_clients: source.within(
                "max_clients",
                self.max_clients.as_ref(),
                default.max_clients,
                1,
                65_536,
            )?,
            max_connections: source.within(
                "max_connections",
                self.max_connections.as_ref(),
                default.max_connections,
                1,
                65_536,
            )?,
            allow_unlisted: self.allow_unlisted.unwrap_or(default.allow_unlisted),
            refused_run: self.strangers == Strangers::Run,
            allow_uids: self.allow_uids,
            allow_any_user: self.allow_any_user,
            tokens: TokenConfig {
                policy: self.policy.unwrap_or(default.tokens.policy),
                window,
                longest: source.duration("token", self.token.as_ref(), longest, least, window)?,
                grace: source.duration(
                    "grace",
                    self.grace.as_ref(),
                    default.tokens.grace.min(window),
                    least,
                    window,
                )?,
            },
            in_flight: source.duration(
                "in_flight",
                self.in_flight.as_ref(),
                default.in_flight.min(window),
                least,
                window,
            )?,
            memory_headroom: self.memory_headroom.map_or(default.memory_headroom, |bytes| bytes.0),
            journal: self.journal.map(|journal| journal.check(&source)).transpose()?,
            mps: self.mps.unwrap_or(default.mps),
            cpu_latency: self
                .cpu_latency
                .map(|text| {
                    source.duration(
                        "cpu_latency",
                        Some(&text),
                        Duration::ZERO,
                        Duration::ZERO,
                        CPU_LATENCY_MOST,
                    )
                })
                .transpose()?,
            idle_exit: None,
            devices,
            clients,
            own_admin_socket,
        })
    }
}

impl RawJournal {
    fn check(self, source: &Source<'_>) -> Result<JournalConfig, ConfigError> {
        let default = JournalConfig::new(self.dir);
        let max_file = self.max_file.map(|text| Spanned::new(text.span(), text.get_ref().0));
        Ok(JournalConfig {
            max_file: source.within(
                "journal.max_file",
                max_file.as_ref(),
                default.max_file,
                Bytes::from_mib(1),
                Bytes::from_gib(64),
            )?,
            keep_files: source.within(
                "journal.keep_files",
                self.keep_files.as_ref(),
                default.keep_files,
                1,
                10_000,
            )?,
            actions: self.actions,
            dir: default.dir,
        })
    }
}

impl RawDevice {
    fn check(&self, source: &Source<'_>) -> Result<DeviceConfig, ConfigError> {
        let uuid = self.uuid.get_ref().0;
        let memory = self.memory.as_ref().map(|memory| memory.get_ref().0);
        if let (Some(Bytes(0)), Some(at)) = (memory, &self.memory) {
            let key = format!("device `{uuid}`: memory");
            return Err(source.error(at, key, "is 0 bytes: need more, or leave it out"));
        }
        Ok(DeviceConfig { uuid, memory })
    }
}

impl RawClient {
    fn check(&self, source: &Source<'_>, devices: &[DeviceConfig]) -> Result<ResourceSpec, ConfigError> {
        let name = self.name.get_ref();
        if name.is_empty() || name.len() > gshare_core::wire::MAX_TEXT {
            let message = format!("is {} bytes long: need 1 to {}", name.len(), gshare_core::wire::MAX_TEXT);
            return Err(source.error(&self.name, "client: name", message));
        }
        if !is_printable(name) {
            let message = format!("`{}` has characters that cannot be printed", printable(name));
            return Err(source.error(&self.name, "client: name", message));
        }
        let key = |key: &str| format!("client `{name}`: {key}");
        let quota = match &self.quota {
            None => QuotaRange::BEST_EFFORT,
            Some(text) => text
                .get_ref()
                .0
                .parse()
                .map_err(|error: SpecError| source.error(text, key("quota"), error))?,
        };
        let sm = match &self.sm {
            None => SmShare::WHOLE,
            Some(text) => text
                .get_ref()
                .0
                .parse()
                .map_err(|error: gshare_core::ParseUnitError| source.error(text, key("sm"), error))?,
        };
        if let (true, Some(at)) = (sm.is_zero(), &self.sm) {
            return Err(source.error(at, key("sm"), SpecError::ZeroSm));
        }
        let memory = self.memory.as_ref().map(|text| {
            let bytes: Bytes = text
                .get_ref()
                .0
                .parse()
                .map_err(|error: gshare_core::ParseUnitError| source.error(text, key("memory"), error))?;
            // A client may use any device, so it must fit on the largest; the others refuse it when it attaches.
            let largest = devices.iter().map(|device| device.memory).max().flatten();
            let known = devices.iter().all(|device| device.memory.is_some());
            match largest {
                Some(device) if known && bytes > device => Err(source.error(
                    text,
                    key("memory"),
                    SpecError::MemoryAboveDevice { asked: bytes, device },
                )),
                _ if bytes == Bytes::ZERO => Err(source.error(text, key("memory"), SpecError::ZeroMemory)),
                _ => Ok(bytes),
            }
        });
        ResourceSpec::new(quota, sm, memory.transpose()?)
            .map_err(|error| source.error(&self.name, key("spec"), error))
    }
}

impl RawClient {
    /// The only device on which its request is reserved.
    fn device(
        &self,
        source: &Source<'_>,
        devices: &[DeviceConfig],
    ) -> Result<Option<DeviceUuid>, ConfigError> {
        let Some(text) = &self.device else { return Ok(None) };
        let uuid = text.get_ref().0;
        if !devices.is_empty() && devices.iter().all(|device| device.uuid != uuid) {
            let key = format!("client `{}`: device", self.name.get_ref());
            return Err(source.error(text, key, format!("{uuid} is not listed: need a [[device]] with it")));
        }
        Ok(Some(uuid))
    }

    /// How it is treated beside others.
    fn class(&self, source: &Source<'_>) -> Result<Option<ServiceClass>, ConfigError> {
        let Some(text) = &self.class else { return Ok(None) };
        let class: ServiceClass = text.get_ref().0.parse().map_err(|error: String| {
            source.error(text, format!("client `{}`: class", self.name.get_ref()), error)
        })?;
        let ample = |text: &Spanned<Loose>| {
            text.get_ref().0.parse().is_ok_and(|quota: QuotaRange| !quota.request().is_zero())
        };
        if class.is_slo_sensitive() && !self.quota.as_ref().is_some_and(ample) {
            let message =
                "slo-sensitive needs a guaranteed share to come back to: need a quota with a request above 0";
            return Err(source.error(text, format!("client `{}`: class", self.name.get_ref()), message));
        }
        Ok(Some(class))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn everything_has_a_default_and_the_example_is_a_configuration() {
        let config = Config::parse("").unwrap();
        assert_eq!(config.socket, Path::new("/run/gshare/gshare.sock"));
        assert_eq!(config.admin_socket, Path::new("/run/gshare/gshare-admin.sock"));
        let example = include_str!("../dist/gshared.toml");
        assert!(Config::parse(example).is_ok());
        // Lines that are commented out in the example must be right too.
        let all: String = example
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line))
            .flat_map(|line| [line, "\n"])
            .collect();
        let config = Config::parse(&all).unwrap();
        assert!(config.metrics.is_some() && config.journal.is_some() && !config.clients.is_empty());
        config.node().check().unwrap();
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let text = error("socket = '/x'\nwindw = '5ms'\n");
        assert!(text.contains("line 2") && text.contains("windw"), "{text}");
        let text = error("[[client]]\nname = 'a'\nqouta = 1\n");
        assert!(text.contains("line 3") && text.contains("qouta") && text.contains("quota"), "{text}");
    }

    #[test]
    fn a_bad_share_names_the_client_the_key_and_the_bound() {
        let client = |rest: &str| error(&format!("[[client]]\nname = 'a'\n{rest}"));
        assert_eq!(
            client("quota = '0.8:0.3'"),
            "line 3: client `a`: quota: quota request 80% is larger than quota limit 30%: need request <= limit"
        );
        assert_eq!(
            client("sm = 0"),
            "line 3: client `a`: sm: SM partition is 0: need more than 0 and at most 100 per cent"
        );
        assert_eq!(
            client("sm = 101"),
            "line 3: client `a`: sm: `101` is out of range: a share of the SMs is at most 100 per cent"
        );
        assert!(client("memory = 0").contains("memory: GPU memory is 0 bytes"));
        assert!(client("memory = '1XB'").starts_with("line 3: client `a`: memory: `1XB` is not a"));
        assert!(client("quota = 1.5").contains("at most 1.0"));
        assert!(client("quota = 0").contains("quota limit is 0"));
        assert!(error("[[client]]\nname = ''").contains("client: name: is 0 bytes long: need 1 to 120"));
    }

    #[test]
    fn a_class_is_read_as_it_is_printed_and_a_bad_one_names_the_client_and_the_bound() {
        let config = |rest: &str| Config::parse(&format!("[[client]]\nname = 'a'\n{rest}"));
        let class = |rest: &str| config(rest).unwrap().class("a");
        assert_eq!(class("class = 'best-effort'"), Some(ServiceClass::BestEffort));
        let tolerant = class("quota = '0.3:0.8'\nclass = 'slo-sensitive:30'");
        assert_eq!(tolerant, ServiceClass::slo_sensitive(30));
        assert_eq!(class("quota = 0.3\nclass = 'slo-sensitive'"), Some(ServiceClass::SLO_SENSITIVE));
        // The example says what is in force.
        let percent = ServiceClass::SLO_SENSITIVE.to_string();
        let says = format!("{} if left\n", percent.strip_prefix("slo-sensitive:").unwrap());
        assert!(include_str!("../dist/gshared.toml").contains(&says), "{says}");
        assert_eq!(class("quota = 0.3"), None, "as the process asks");
        let error = |rest: &str| config(rest).unwrap_err().to_string();
        assert_eq!(
            error("class = 'slow'"),
            "line 3: client `a`: class: `slow` is neither best-effort nor slo-sensitive[:PERCENT] with a tolerance of 1 to 100"
        );
        assert!(
            error("quota = 0.3\nclass = 'slo-sensitive:0'").starts_with("line 4: client `a`: class: `slo-")
        );
        assert!(error("class = 7").contains("client `a`: class: `7` is neither"));
        for idle in ["class = 'slo-sensitive'", "class = 'slo-sensitive'\nquota = '0:0.5'"] {
            assert!(error(idle).contains("need a quota with a request above 0"), "{}", error(idle));
        }
    }

    #[test]
    fn memory_beyond_the_largest_device_is_refused() {
        let device = |n: u8, memory: &str| {
            format!("[[device]]\nuuid = 'GPU-{n:08}-0000-0000-0000-000000000000'\nmemory = '{memory}'\n")
        };
        let both = device(1, "16GiB") + &device(2, "80GiB");
        assert!(Config::parse(&format!("{both}[[client]]\nname='a'\nmemory='80GiB'")).is_ok());
        let text = error(&format!("{both}[[client]]\nname='a'\nmemory='81GiB'"));
        assert!(
            text.ends_with("client `a`: memory: GPU memory 81 GiB is larger than the device's 80 GiB"),
            "{text}"
        );
        let twice = device(1, "16GiB") + &device(1, "16GiB");
        assert!(error(&twice).contains("is listed twice"));
    }

    #[test]
    fn the_scheduler_has_a_number_for_each_device_that_clients_may_bring() {
        let most = |max_clients| TokenConfig::default().engine(max_clients).max_gpus;
        assert_eq!([most(1), most(1024), most(65_536)], [64, 1024, 4096]);
        assert!(TokenPolicy::default().build(TokenConfig::default().engine(65_536)).is_ok());
    }

    #[test]
    fn two_clients_of_one_name_are_refused() {
        assert_eq!(
            error("[[client]]\nname = 'a'\n[[client]]\nname = 'a'\n"),
            "line 4: client `a`: name: two clients of one name: need a name each"
        );
    }

    #[test]
    fn times_and_numbers_are_kept_within_bounds() {
        assert_eq!(error("window = '1us'"), "line 1: window: 1us is out of range: need 1ms to 10s");
        assert_eq!(error("\ntoken = '200ms'"), "line 2: token: 200ms is out of range: need 100us to 100ms");
        assert_eq!(error("cpu_latency = '1s'"), "line 1: cpu_latency: 1s is out of range: need 0ns to 10ms");
        assert_eq!(
            Config::parse("cpu_latency = '20us'").expect("in range").cpu_latency,
            Some(Duration::from_micros(20))
        );
        assert!(error("max_clients = 0").contains("max_clients: 0 is out of range: need 1 to 65536"));
        let metrics = |text: &str| Config::parse(text).unwrap().metrics.unwrap().to_string();
        assert_eq!(metrics("metrics = 9478"), "127.0.0.1:9478", "other hosts only if they are named");
        assert_eq!(metrics("metrics = '0.0.0.0:80'"), "0.0.0.0:80");
        assert!(error("metrics = 'nowhere'").contains("need `127.0.0.1:9478`, `9478` for loopback"));
        let name = "line 2: client: name: `a\\u{1b}[2J` has characters that cannot be printed";
        assert_eq!(error("[[client]]\nname = \"a\\u001b[2J\""), name);
        assert!(error("[journal]\ndir = '/x'\nkeep_files = 0").contains("journal.keep_files"));
        assert!(error("window = 5").contains("with its unit"));
    }
}
