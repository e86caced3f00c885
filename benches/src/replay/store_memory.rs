//! FaST-GShare, section 5.5 and figure 13: memory of a GPU with one, three and seven pods of a model, and how many fit.
//!
//! Real processes on the simulated driver's V100: a store in GPU memory (no context of its own), its loader, and pods that map the
//! model and allocate what the paper's pods took beside it. Memory is what the driver says is taken. Weights are the paper's server
//! less its context of 300 MB; MB are MiB, as nvidia-smi prints them.

use anyhow::{Context as _, Result, bail, ensure};
use gshare_core::Bytes;
use gshare_modelstore::backend::HostBackend;
use gshare_modelstore::backend::cuda::{CudaMap, Scratch, VmmBackend, memory_info, run_loader};
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use serde_json::json;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::{Report, row};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Do not build the simulated driver first: it is beside this program
    #[arg(long)]
    built: bool,
    /// What a process of this replay does, in which directory, for which model, with how much memory of its own
    #[arg(long, hide = true, num_args = 4)]
    role: Option<Vec<String>>,
}

/// A model of figure 13: MiB of a pod without and with sharing, and of the paper's server.
const MODELS: [(&str, u64, u64, u64); 4] = [
    ("ResNet50", 1_525, 1_427, 416),
    ("ResNet152", 1_745, 1_501, 601),
    ("ResNeXt", 3_335, 1_829, 1_805),
    ("ViT_huge", 4_735, 2_101, 2_979),
];
const PAPER_CONTEXT: u64 = 300;
const MIB: u64 = 1 << 20;
const GPU: GetOptions = GetOptions { tier: MemoryTier::Gpu, timeout: std::time::Duration::from_secs(300) };

struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a role, and waits until it is ready; `None` when there is no room for it on the GPU.
    fn start(role: &str, dir: &Path, model: &str, bytes: u64) -> Result<Option<Self>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["store-memory", "--role", role, &dir.to_string_lossy(), model, &bytes.to_string()])
            .env("LD_LIBRARY_PATH", dir)
            .env("GSHARE_SIM_DEVICE", dir.join("device"))
            .env("GSHARE_SIM_PROFILE", "v100")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("no pipes")
        };
        let mut process = Self { child, input, output: BufReader::new(output) };
        match &*process.line()? {
            "ready" => Ok(Some(process)),
            "no room" => Ok(None),
            _ => bail!("the {role} of {model} ended before it was ready"),
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Bytes of the device that are taken, as the driver tells this process.
    fn used(&mut self) -> Result<u64> {
        writeln!(self.input)?;
        self.line()?.parse().context("a pod answers its memory")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs it.
///
/// # Errors
/// When a process cannot be started or a store refuses.
pub fn run(args: &Args) -> Result<Report> {
    if let Some(role) = &args.role {
        act(role)?;
        std::process::exit(0);
    }
    let built = build(args.built)?;
    let mut report = Report::new("store-memory", Vec::new());
    for (model, without, with, server) in MODELS {
        let dir = tempfile::Builder::new().prefix("gshare-store-").tempdir()?;
        for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
            std::os::unix::fs::symlink(built.join("libfake_cuda.so"), dir.path().join(name))?;
        }
        let weights = (server - PAPER_CONTEXT) * MIB;
        eprintln!("{model}: {} of weights to load, and as many pods as fit", Bytes(weights));
        let file = weights_file(weights)?;
        let _store = Process::start("store", dir.path(), model, 0)?.context("the store starts")?;
        let client = Client::connect(dir.path().join("store.sock"))?;
        client.put_file(model, Access::Public, MemoryTier::Gpu, &file, |_, _| {})?;
        let (mut pods, mut taken) = (Vec::new(), Vec::new());
        while let Some(mut pod) = Process::start("pod", dir.path(), model, with * MIB)? {
            taken.push(pod.used()?.div_ceil(MIB));
            pods.push(pod);
            ensure!(pods.len() < 100, "a GPU without end");
        }
        let at = |pods: usize| taken.get(pods - 1).map_or(json!("does not fit"), |mib| json!(mib));
        report.rows.push(row(&[
            ("policy", json!("store, simulated V100")),
            ("model", json!(model)),
            ("mib_1_pod", at(1)),
            ("mib_3_pods", at(3)),
            ("mib_7_pods", at(7)),
            ("pods_that_fit", json!(taken.len())),
        ]));
        for (policy, each, fixed) in [("paper, sharing", with, server), ("paper, no sharing", without, 0)] {
            let of = |pods: u64| {
                let mib = fixed + each * pods;
                if mib <= V100_MIB { json!(mib) } else { json!(format!("{mib}, does not fit")) }
            };
            report.paper.push(row(&[
                ("policy", json!(policy)),
                ("model", json!(model)),
                ("mib_1_pod", of(1)),
                ("mib_3_pods", of(3)),
                ("mib_7_pods", of(7)),
                ("pods_that_fit", json!((V100_MIB - fixed) / each)),
            ]));
        }
    }
    Ok(report)
}

/// Memory of the V100 of the paper's cluster, 16 GB, as nvidia-smi gives it.
const V100_MIB: u64 = 16_276;

/// A safetensors file with this many bytes of weights, without taking them on the disk.
fn weights_file(bytes: u64) -> Result<std::fs::File> {
    let mut file = tempfile::tempfile()?;
    let header = Header::encode(&[("weights", Dtype::U8, &[bytes])]);
    file.write_all(&header)?;
    file.set_len(header.len() as u64 + bytes)?;
    Ok(file)
}

fn act(role: &[String]) -> Result<()> {
    let [role, dir, model, bytes] = role else { bail!("a role, a directory, a model and bytes") };
    let dir = PathBuf::from(dir);
    let socket = dir.join("store.sock");
    match role.as_str() {
        "loader" => Ok(run_loader()?),
        "store" => {
            let program = std::env::current_exe()?.into_os_string();
            let arguments = ["store-memory", "--role", "loader", "-", "-", "0"].map(Into::into);
            let loader = [vec![program], arguments.to_vec()].concat();
            let mut config = ServerConfig::at(socket);
            config.store.gpu = Bytes::from_gib(16);
            let gpu = Box::new(VmmBackend::new(0, loader)?);
            let running = Server::with_backends(config, Box::new(HostBackend), Some(gpu))?.spawn()?;
            println!("ready");
            running.join();
            Ok(())
        }
        "pod" => {
            let shared = Client::connect(socket)?.get(model, &GPU)?;
            let own = bytes.parse::<u64>()?.saturating_sub(CONTEXT);
            // Makes the context that the pod keeps.
            let made = CudaMap::new(&shared, 0).and_then(|map| Ok((map, Scratch::new(0, own)?)));
            let (map, _own) = match made {
                Err(error) if error.to_string().contains("OUT_OF_MEMORY") => {
                    println!("no room");
                    return Ok(());
                }
                made => made?,
            };
            println!("ready");
            for line in std::io::stdin().lines() {
                line?;
                let (free, total) = memory_info(0)?;
                println!("{}", total - free);
            }
            drop(map);
            Ok(())
        }
        other => bail!("no role `{other}`"),
    }
}

/// A context on the simulated V100.
const CONTEXT: u64 = 308 * MIB;

/// The directory of the simulated driver: this program's own, where cargo puts it.
fn build(built: bool) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.parent().context("no directory")?;
    if built {
        return Ok(dir.to_owned());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no checkout")?;
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        // Not quiet: it may take minutes, or wait for another cargo, and says so on stderr.
        .args(["build", "--package", "gshare-fake-cuda", "--profile", profile, "--target-dir"])
        .arg(dir.parent().context("no target directory")?)
        .current_dir(root)
        .stdout(Stdio::null())
        .status()
        .context("cargo")?;
    ensure!(status.success(), "cargo build: {status}");
    Ok(dir.to_owned())
}
