//! `gshare serve`: model processes on the GPUs of this node, fed from standard input.

use super::sim::{Kind, Simulate};
use super::{Where, run as under_hook};
use anyhow::Context as _;
use gshare_core::{Bytes, Duration, GpuId, GpuKind, ModelId, RequestId, TenantId};
use gshare_runner::libraries::HOOK;
use gshare_runner::manager::{
    Ending, GpuSpec, Hook, ManagerConfig, Program, Serving, ServingHandle, Submission,
};
use gshare_sched::request::{LocalityScheduler, ModelProfile, SchedulerConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Serve inference requests: load models where they are needed, evict them, and feed their processes.
///
/// Each line in, `{"id": N, "model": "name", "input": "text"}` (and, if wanted, `"tenant": N`, `"within_ns": N`), gives one
/// line out when it has ended: `{"id": N, "output": "text", "gpu": N, "waited_ns": N, "took_ns": N}`, or `{"id": N, "error":
/// "…"}`. Lines come in the order in which requests end. At the end of the input what is left is served first. The file names
/// the GPUs and the models:
///
///     [[gpu]]
///     visible = "0"          # as in CUDA_VISIBLE_DEVICES
///     memory = "14GiB"       # for models
///     [[model]]
///     name = "resnet50"
///     command = ["python3", "serve.py", "resnet50"]
///     memory = "1701MiB"     # on the GPU, context included
///     load = "2670ms"        # to start it and load it
///     infer = "1280ms"       # to run one request
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
#[command(after_help = "\
EXAMPLES
  gshare serve --config models.toml < requests.jsonl > answers.jsonl
  gshare serve --sim --config models.toml")]
pub(crate) struct Options {
    /// The GPUs and models: a TOML file; a table `scheduler` has the settings of `gshare engine request`.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    simulate: Simulate,
    #[command(flatten)]
    place: Where,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    scheduler: Option<SchedulerConfig>,
    gpu: Vec<Gpu>,
    model: Vec<Model>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpu {
    visible: String,
    memory: Text<Bytes>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    name: String,
    command: Vec<String>,
    memory: Text<Bytes>,
    load: Text<Duration>,
    infer: Text<Duration>,
}

/// A unit as people write it.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String", bound = "T: std::str::FromStr, T::Err: std::fmt::Display")]
pub(super) struct Text<T>(pub(super) T);

impl<T: std::str::FromStr<Err: std::fmt::Display>> TryFrom<String> for Text<T> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: T::Err| error.to_string())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: u64,
    model: String,
    #[serde(default)]
    input: String,
    #[serde(default)]
    tenant: u32,
    within_ns: Option<Duration>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Out {
    Served { id: u64, output: String, gpu: GpuId, waited_ns: Duration, took_ns: Duration },
    Refused { id: Option<u64>, error: String },
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let context = || format!("--config {}", options.config.display());
    let text = std::fs::read_to_string(&options.config).with_context(context)?;
    let file: File = toml::from_str(&text).with_context(context)?;
    let hook = HOOK.find()?;
    // Without a GPU, models need no driver.
    let simulated = options.simulate.kind().is_ok_and(Kind::is_simulated);
    if simulated {
        eprintln!("gshare: simulated device");
    }
    let (socket, _held) = under_hook::socket(&options.place, simulated)?;
    let mut config = ManagerConfig::default();
    config.hook = Some(Hook { preload: hook, socket });
    let (variables, simulator) = options.simulate.environment()?.unzip();
    config.environment.extend(variables.into_iter().flatten());
    let settings = file.scheduler.unwrap_or_else(SchedulerConfig::evict_cost_aware);
    let serving = Serving::spawn(config, Box::new(LocalityScheduler::new(settings)?))?;
    let models = set_up(&serving.handle(), &file.gpu, file.model).with_context(context)?;
    let (sender, endings) = channel();
    let writer = std::thread::spawn(move || write(&endings));
    read(&serving.handle(), &models, &sender)?;
    drop(sender);
    let written = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    // Processes end before their driver.
    drop(serving);
    drop(simulator);
    written
}

fn set_up(
    handle: &ServingHandle,
    gpus: &[Gpu],
    models: Vec<Model>,
) -> anyhow::Result<BTreeMap<String, ModelId>> {
    // GPUs of the same size are of the same kind.
    let mut kinds: Vec<Bytes> = Vec::new();
    for (number, gpu) in (0..).zip(gpus) {
        let memory = gpu.memory.0;
        let kind = kinds.iter().position(|other| *other == memory).unwrap_or_else(|| {
            kinds.push(memory);
            kinds.len() - 1
        });
        let mut spec = GpuSpec::new(gpu.visible.as_str(), memory);
        spec.kind = GpuKind::new(u8::try_from(kind).context("gpu: too many different memories")?);
        handle.add_gpu(GpuId::new(number), spec).with_context(|| format!("gpu `{}`", gpu.visible))?;
    }
    let mut names = BTreeMap::new();
    for (number, model) in (0..).zip(models) {
        let of = || format!("model `{}`", model.name);
        let (load, infer) = (model.load.0, model.infer.0);
        let (program, arguments) =
            model.command.split_first().with_context(|| format!("{}: command is empty", of()))?;
        let profile = ModelProfile { load_disk: load, load_host: load, infer };
        let mut started = Program::new(program, model.memory.0, profile);
        started.arguments = arguments.iter().map(Into::into).collect();
        let all = (0..kinds.len()).map(|kind| (GpuKind::new(u8::try_from(kind).unwrap_or(0)), profile));
        started.profiles = all.collect();
        handle.add_model(ModelId::new(number), started).with_context(of)?;
        let other = names.insert(model.name.clone(), ModelId::new(number));
        anyhow::ensure!(other.is_none(), "{}: the name is taken", of());
    }
    Ok(names)
}

/// An entry for the writer: the end of a request, or an invalid line.
type Ended = (Option<u64>, Result<Ending, String>);

fn read(
    handle: &ServingHandle,
    models: &BTreeMap<String, ModelId>,
    sender: &Sender<Ended>,
) -> anyhow::Result<()> {
    let (ends, ended) = channel::<(RequestId, _)>();
    let forward = sender.clone();
    // Ends once every request and this reader have ended.
    std::thread::spawn(move || {
        for (request, ending) in ended {
            if forward.send((Some(request.number()), Ok(ending))).is_err() {
                return;
            }
        }
    });
    for text in std::io::stdin().lock().lines() {
        let text = text?;
        if text.trim().is_empty() {
            continue;
        }
        let line = serde_json::from_str::<Line>(&text).map_err(|error| (None, error.to_string()));
        let line = line.and_then(|line| match models.get(&line.model) {
            Some(model) => Ok((*model, line)),
            None => Err((Some(line.id), format!("model `{}` is not in the file", line.model))),
        });
        match line {
            Ok((model, line)) => {
                let mut submission = Submission::new(RequestId::new(line.id), model, line.input.into_bytes());
                submission.tenant = TenantId::new(line.tenant);
                submission.within = line.within_ns;
                handle.submit_to(submission, ends.clone())?;
            }
            Err((id, error)) => sender.send((id, Err(error)))?,
        }
    }
    Ok(())
}

fn write(endings: &Receiver<Ended>) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    for (id, ending) in endings {
        let line = match (id, ending) {
            (Some(id), Ok(Ok(answer))) => Out::Served {
                id,
                output: String::from_utf8_lossy(&answer.output).into_owned(),
                gpu: answer.gpu,
                waited_ns: answer.dispatched.saturating_since(answer.arrived),
                took_ns: answer.completed.saturating_since(answer.arrived),
            },
            (id, Ok(Err(refused))) => Out::Refused { id, error: refused.to_string() },
            (id, Err(error)) => Out::Refused { id, error },
            (None, Ok(Ok(_))) => continue,
        };
        serde_json::to_writer(&mut output, &line)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}
