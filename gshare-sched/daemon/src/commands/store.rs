//! `gshare store`: the model store as a server, and its client on the command line.

use super::print_json;
use anyhow::Context as _;
use gshare_core::Bytes;
use gshare_core::store::{Access, ContentHash, MemoryTier, StoreLimits};
use gshare_modelstore::backend::cuda::{VmmBackend, run_loader};
use gshare_modelstore::backend::{HostBackend, ModelBackend};
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::server::{Server, ServerConfig};
use gshared::libraries::{SimulatorDir, prepend};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Write as _;
use std::path::PathBuf;

const DEFAULT_SOCKET: &str = "/run/gshare/store.sock";

/// One copy of a model for all processes that use it.
///
/// `serve` runs the store; the others talk to one. With --json each prints one object: `ls` an array
/// `models` of {name, `owner_uid`, access, bytes, tensors, content, source, tiers}, `stat` the store's figures, `get` {name,
/// content, bytes, tensors: [{name, dtype, shape, offset, bytes, hash}]}, `put` {name, content, bytes}.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The store's socket [default: `GSHARE_STORE_SOCKET`; else /run/gshare/store.sock].
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Run a store in the foreground. SIGTERM and SIGINT stop it; clients keep what they have mapped.
    Serve(Serve),
    /// What the store starts to fill memory of a GPU.
    #[command(hide = true)]
    Loader,
    /// The models that you may read.
    Ls,
    /// Memory, references, loads and evictions.
    Stat,
    /// Load a safetensors file into the store, which keeps it as the model's source.
    Put {
        /// Name of the model.
        name: String,
        /// The file.
        file: PathBuf,
        /// Where to.
        #[arg(long, value_enum, default_value_t = Tier::Host)]
        tier: Tier,
        /// Who may read it.
        #[arg(long, value_enum, default_value_t = Who::Private)]
        access: Who,
    },
    /// Take a reference to a model, say what is in it, and give the reference back.
    Get {
        /// Name of the model, or its content hash.
        model: String,
        /// In which memory.
        #[arg(long, value_enum, default_value_t = Tier::Host)]
        tier: Tier,
        /// How long to wait for a load.
        #[arg(long, value_name = "TIME", default_value = "60s")]
        timeout: gshare_core::Duration,
    },
    /// Take a model out of memory. One that was not put from a file is gone with that.
    Evict {
        /// Name of the model.
        name: String,
        /// Forget where it came from, too, so that its name is free.
        #[arg(long)]
        forget: bool,
    },
    /// Keep a model in memory once it is there.
    Pin {
        /// Name of the model.
        name: String,
        /// No longer.
        #[arg(long)]
        off: bool,
    },
    /// Hash a model in memory again, and compare.
    Verify {
        /// Name of the model.
        name: String,
    },
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Host memory for models.
    #[arg(long, value_name = "BYTES", default_value = "4GiB")]
    host: Bytes,
    /// Memory of a GPU for models. The store has no context there, so it takes no more than the models; a process that lives as
    /// long as one load fills it. Clients import it and map it for reading.
    #[arg(long, value_name = "BYTES")]
    gpu: Option<Bytes>,
    /// Which GPU.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "gpu")]
    device: u32,
    /// Simulate the GPU: a profile such as v100, a100 or h200, or a profile file.
    #[arg(
        long,
        value_name = "PROFILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        requires = "gpu"
    )]
    sim: Option<String>,
    /// Directory whose *.safetensors files are models for everybody, loaded when they are asked for.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// What each user other than those of --user-limit may have in memory.
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// What one user may have in memory.
    #[arg(long, value_name = "UID=BYTES", value_parser = user_limit)]
    user_limit: Vec<(u32, Bytes)>,
    /// Permissions of the socket, octal.
    #[arg(long, value_name = "MODE", default_value = "666", value_parser = octal)]
    mode: u32,
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("`{text}` is not a mode such as 660"))
}

fn user_limit(text: &str) -> Result<(u32, Bytes), String> {
    let (uid, bytes) = text.split_once('=').ok_or("need UID=BYTES, such as 1000=2GiB")?;
    let uid = uid.parse().map_err(|_| format!("`{uid}` is not a uid"))?;
    Ok((uid, bytes.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())?))
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Tier {
    /// Of the GPU.
    Gpu,
    /// Of the host.
    Host,
}

impl From<Tier> for MemoryTier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Gpu => Self::Gpu,
            Tier::Host => Self::Host,
        }
    }
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Who {
    /// You.
    Private,
    /// You and your group.
    Group,
    /// Everybody.
    Public,
}

impl From<Who> for Access {
    fn from(who: Who) -> Self {
        match who {
            Who::Private => Self::Private,
            Who::Group => Self::Group,
            Who::Public => Self::Public,
        }
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let environment =
        || std::env::var_os("GSHARE_STORE_SOCKET").filter(|text| !text.is_empty()).map(PathBuf::from);
    let socket = options.socket.clone().or_else(environment).unwrap_or_else(|| DEFAULT_SOCKET.into());
    match &options.command {
        Command::Serve(Serve { sim: Some(profile), .. }) => return simulated(profile),
        Command::Serve(serve) => return run_server(socket, serve),
        Command::Loader => return Ok(run_loader()?),
        _ => {}
    }
    let client = Client::connect(&socket).with_context(|| {
        format!(
            "no store answers at {}; start one with `gshare store serve`, or name its socket with --socket",
            socket.display()
        )
    })?;
    let done = |text: String| if options.json { print_json(&json!({"done": true})) } else { say(&text) };
    match &options.command {
        Command::Serve(_) | Command::Loader => Ok(()),
        Command::Ls => {
            let list = client.list()?;
            if options.json { print_json(&list) } else { say(&table(&list)) }
        }
        Command::Stat => {
            let stat = client.stat()?;
            if options.json { print_json(&stat) } else { say(&figures(&stat)) }
        }
        Command::Put { name, file, tier, access } => {
            let opened = std::fs::File::open(file).with_context(|| file.display().to_string())?;
            let bar = bar(opened.metadata().map_or(0, |about| about.len()));
            let (access, tier) = ((*access).into(), (*tier).into());
            let stored = client.put_file(name, access, tier, &opened, |done, total| {
                bar.set_length(total);
                bar.set_position(done);
            });
            bar.finish_and_clear();
            let stored = stored?;
            if options.json {
                print_json(&json!({"name": name, "content": stored.content, "bytes": stored.bytes}))
            } else {
                say(&format!("{name} {} {}", Bytes(stored.bytes), stored.content))
            }
        }
        Command::Get { model, tier, timeout } => {
            let timeout = std::time::Duration::from_nanos(timeout.as_nanos());
            let get = GetOptions { tier: (*tier).into(), timeout };
            let got = match model.parse::<ContentHash>() {
                Ok(content) => client.get_content(content, &get)?,
                Err(_) => client.get(model, &get)?,
            };
            let manifest = got.manifest();
            let tensors: Vec<Value> = (manifest.iter())
                .map(|tensor| {
                    json!({
                        "name": tensor.name, "dtype": tensor.dtype.text(), "shape": tensor.shape().collect::<Vec<_>>(),
                        "offset": tensor.offset, "bytes": tensor.bytes, "hash": ContentHash(tensor.hash),
                    })
                })
                .collect();
            if options.json {
                return print_json(
                    &json!({"name": model, "content": got.content(), "bytes": got.arena_bytes(), "tensors": tensors}),
                );
            }
            let mut text = format!("{model} {} {}\n", Bytes(got.arena_bytes()), got.content());
            for tensor in manifest.iter() {
                let shape: Vec<u64> = tensor.shape().collect();
                let _ = writeln!(text, "  {:7} {shape:?} {}", tensor.dtype.text(), tensor.name);
            }
            say(text.trim_end())
        }
        Command::Evict { name, forget } => {
            client.evict(name, *forget)?;
            done(format!("{name} is out of memory{}", if *forget { ", and its name is free" } else { "" }))
        }
        Command::Pin { name, off } => {
            client.pin(name, !off)?;
            done(format!(
                "{name} {}",
                if *off { "may go when room is needed" } else { "stays in memory once it is there" }
            ))
        }
        Command::Verify { name } => {
            client.verify(name)?;
            done(format!("{name} is what it was when it was loaded"))
        }
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the end of most subcommands")]
fn say(text: &str) -> anyhow::Result<()> {
    println!("{text}");
    Ok(())
}

fn bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style =
        ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Runs the same command where it finds the simulated driver.
fn simulated(profile: &str) -> anyhow::Result<()> {
    eprintln!("gshare: simulated device");
    let dir = SimulatorDir::new()?;
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1).filter(|word| !word.to_string_lossy().starts_with("--sim")));
    command.env("LD_LIBRARY_PATH", prepend("LD_LIBRARY_PATH", dir.path()));
    if !profile.is_empty() {
        command.env("GSHARE_SIM_PROFILE", profile);
    }
    // Before the child is there: a signal that comes between must not be lost.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let mut child = command.spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
            let _ = pid.map(|pid| kill_process(pid, signal));
        }
    });
    let status = child.wait()?;
    drop(dir);
    anyhow::ensure!(status.success(), "the store on the simulated device: {status}");
    Ok(())
}

fn run_server(socket: PathBuf, serve: &Serve) -> anyhow::Result<()> {
    let mut config = ServerConfig::at(socket);
    config.store.host = serve.host;
    config.models.clone_from(&serve.models);
    config.socket_mode = serve.mode;
    let limited = |bytes| {
        let mut limits = StoreLimits::default();
        limits.bytes = bytes;
        limits
    };
    if let Some(bytes) = serve.limit {
        config.default_limits = limited(bytes);
    }
    config.limits = serve.user_limit.iter().map(|&(uid, bytes)| (uid, limited(bytes))).collect();
    if let Some(directory) = config.socket.parent() {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    }
    // Before the store is there: a signal that comes between must not be lost.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let socket = config.socket.clone();
    let mut gpu: Option<Box<dyn ModelBackend>> = None;
    if let Some(bytes) = serve.gpu {
        config.store.gpu = bytes;
        let loader = vec![std::env::current_exe()?.into(), "store".into(), "loader".into()];
        let backend = VmmBackend::new(serve.device, loader)
            .context("no memory of a GPU; to serve from a simulated one, add --sim")?;
        gpu = Some(Box::new(backend));
    }
    let running = Server::with_backends(config, Box::new(HostBackend), gpu)?.spawn()?;
    eprintln!("the store listens at {}", socket.display());
    signals.forever().next();
    running.stop();
    Ok(())
}

fn table(list: &Value) -> String {
    let mut text =
        String::from("NAME                      BYTES  TENSORS  ACCESS   WHERE               CONTENT");
    for model in list["models"].as_array().into_iter().flatten() {
        let number = |field: &str| model[field].as_u64();
        let text_of = |field: &str| model[field].as_str().unwrap_or("-").to_owned();
        let mut places: Vec<String> = (model["tiers"].as_object().into_iter().flatten())
            .map(|(tier, about)| {
                format!("{tier} {} x{}", about["state"].as_str().unwrap_or("?"), about["references"])
            })
            .collect();
        if places.is_empty() {
            places.push("disk".into());
        }
        let bytes = number("bytes").map_or_else(|| "-".into(), |bytes| Bytes(bytes).to_string());
        let tensors = number("tensors").map_or_else(|| "-".into(), |tensors| tensors.to_string());
        let content: String = text_of("content").chars().take(16).collect();
        let _ = write!(
            text,
            "\n{:<20} {bytes:>10} {tensors:>8}  {:<8} {:<19} {content}",
            text_of("name"),
            text_of("access"),
            places.join(", ")
        );
    }
    text
}

fn figures(stat: &Value) -> String {
    let mut text = format!("{} clients, {} models", stat["clients"], stat["models"]);
    for tier in ["gpu", "host"] {
        let of = |field: &str| stat[tier][field].as_u64().unwrap_or(0);
        if of("capacity_bytes") > 0 {
            let _ = write!(
                text,
                "\n{tier}: {} of {} in {} arenas, {} references",
                Bytes(of("promised_bytes")),
                Bytes(of("capacity_bytes")),
                of("arenas"),
                of("references")
            );
        }
    }
    let _ = write!(
        text,
        "\n{} gets, {} loads ({} failed), {} copied off the GPU, {} evictions, {} refusals",
        stat["gets"],
        stat["loads"],
        stat["load_failures"],
        stat["demotions"],
        stat["evictions"],
        stat["refusals"]
    );
    text
}
