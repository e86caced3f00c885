//! `gshare store`: the model store as a server, and its client on the command line.

use super::out::table;
use super::print_json;
use anyhow::Context as _;
use gshare_core::Bytes;
use gshare_modelstore::backend::cuda::run_loader;
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::store::{Access, ContentHash, MemoryTier};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use serve::Serve;
use std::fmt::Write as _;
use std::path::PathBuf;

mod serve;

pub(super) const DEFAULT_SOCKET: &str = "/run/gshare/store.sock";

/// Keep one copy of a model for all processes that use it.
///
/// `serve` runs the store; the other commands are its clients. With --json each prints one object: `ls` an array `models`
/// of {name, `owner_uid`, access, bytes, tensors, content, source, tiers}, `stat` the store's figures, `get` {name,
/// content, bytes, tensors: [{name, dtype, shape, offset, bytes, hash}]}, `put` {name, content, bytes}.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare store serve --host 64GiB --models /srv/models    a store whose models are loaded when they are asked for
  gshare store put llama /srv/llama.safetensors           one more model
  gshare store ls
  gshare run --shim -- python3 serve.py                   a program whose models come from the store")]
pub(crate) struct Options {
    /// The store's socket [default: `GSHARE_STORE_SOCKET`; else /run/gshare/store.sock].
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Run a store in the foreground. SIGTERM and SIGINT stop it; clients keep their mappings.
    Serve(Serve),
    /// Program that the store starts to fill GPU memory.
    #[command(hide = true)]
    Loader,
    /// List the models that you may read.
    Ls,
    /// Show memory, references, loads and evictions.
    Stat,
    /// Load a safetensors file into the store, which keeps it as the model's source.
    Put {
        /// Name of the model.
        name: String,
        /// Path of the file.
        file: PathBuf,
        /// Memory for the model.
        #[arg(long, value_enum, default_value_t = Tier::Host)]
        tier: Tier,
        /// Users with read access.
        #[arg(long, value_enum, default_value_t = Who::Private)]
        access: Who,
    },
    /// Take a reference to a model, list its content, and release the reference.
    Get {
        /// Name of the model, or its content hash.
        model: String,
        /// Memory for the model.
        #[arg(long, value_enum, default_value_t = Tier::Host)]
        tier: Tier,
        /// Longest wait for a load.
        #[arg(long, value_name = "TIME", default_value = "60s")]
        timeout: gshare_core::Duration,
    },
    /// Remove a model from memory. A model without a source file is lost then.
    Evict {
        /// Name of the model.
        name: String,
    },
    /// Remove a model from memory, and forget its source file, which frees its name.
    Forget {
        /// Name of the model.
        name: String,
    },
    /// Keep a model in memory once it is there.
    Pin {
        /// Name of the model.
        name: String,
    },
    /// Undo a pin.
    Unpin {
        /// Name of the model.
        name: String,
    },
    /// Hash a model in memory again, and compare.
    Verify {
        /// Name of the model.
        name: String,
    },
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Tier {
    /// GPU memory.
    Gpu,
    /// Host memory.
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
    /// You alone
    Private,
    /// You and your group.
    Group,
    /// Every user
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
        std::env::var_os("GSHARE_STORE_SOCKET").filter(|text| !text.is_empty()).map(PathBuf::from);
    match &options.command {
        Command::Serve(serve) => return serve.run(options.socket.as_deref().or(environment.as_deref())),
        Command::Loader => return Ok(run_loader()?),
        _ => {}
    }
    let socket = options.socket.clone().or(environment).unwrap_or_else(|| DEFAULT_SOCKET.into());
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
            if options.json { print_json(&list) } else { say(&models(&list)) }
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
            let manifest = got.manifest()?;
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
        Command::Evict { name } => {
            client.evict(name, false)?;
            done(format!("{name} is out of memory"))
        }
        Command::Forget { name } => {
            client.evict(name, true)?;
            done(format!("{name} is out of memory, and its name is free"))
        }
        Command::Pin { name } => {
            client.pin(name, true)?;
            done(format!("{name} stays in memory once it is there"))
        }
        Command::Unpin { name } => {
            client.pin(name, false)?;
            done(format!("{name} may go when room is needed"))
        }
        Command::Verify { name } => {
            client.verify(name)?;
            done(format!("{name} is unchanged since it was loaded"))
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

fn models(list: &Value) -> String {
    let row = |model: &Value| {
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
        [
            text_of("name"),
            number("bytes").map_or_else(|| "-".into(), |bytes| Bytes(bytes).to_string()),
            number("tensors").map_or_else(|| "-".into(), |tensors| tensors.to_string()),
            text_of("access"),
            places.join(", "),
            text_of("content").chars().take(16).collect(),
        ]
    };
    let head = ["NAME", "BYTES", "TENSORS", "ACCESS", "WHERE", "CONTENT"].map(str::to_owned);
    let models = list["models"].as_array().into_iter().flatten();
    let rows: Vec<_> = [head].into_iter().chain(models.map(row)).collect();
    table(&rows).trim_end().to_owned()
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
            if of("pinned_bytes") > 0 {
                let _ = write!(text, ", {} page-locked", Bytes(of("pinned_bytes")));
            }
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
