//! The plan of a deployment: its command, annotations, labels and limits, checked.
//!
//! A deployment names a goal (a latency, a model, a kind of work) or a fixed share, as in FaST-GShare. If it names neither, the
//! host measures the function at its first deployment and picks the share.

mod annotations;

use super::api::{ApiError, FunctionDeployment, check_name, check_namespace};
use super::trials::Measured;
use annotations::Annotations;
use gshare_core::dag::Dag;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, GpuShare, ModelId, Quota, QuotaRange, ResourceSpec, ServiceClass, SmShare, TenantId,
};
use gshare_modelstore::arena_fill::Source;
use gshare_runner::confine::Limits;
use gshare_runner::container::{ContainerError, Image};
use gshare_sched::pipeline::Goal;
use gshare_sched::platform::{FunctionSpec, Regime, Weights, Work};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Prefixes of the annotations for shares (FaST-GShare, Figure 4, and its code).
const SHARE_PREFIXES: [&str; 2] = ["fastgshare/", "faasshare/"];
/// A rate beyond any load. At an unknown speed the scaler never starts a second instance.
const ANY_RATE: f64 = 1e9;
/// The most requests of a batch: the paper's batches end at 32, and their answers wait for each other.
const MOST_BATCH: u32 = 256;
/// Upper bound of the instances of a function.
const MOST: u32 = 4096;

/// The annotations of this host, with their meaning for error messages.
const KEYS: [(&str, &str); 18] = [
    ("gshare/slo", "time in which a request is to be answered, such as 69ms"),
    ("gshare/model", "path of a safetensors file"),
    (
        "gshare/class",
        "slo-sensitive or best-effort; by default an SLO makes the first and training the second",
    ),
    ("gshare/workload", "inference, pipeline or training"),
    ("gshare/workers", "workers of a training job, each on a device of its own: 1 to 64"),
    ("gshare/devices", "devices over which a model is spread, each with an equal part of it: 1 to 64"),
    ("gshare/profile", "auto, none, or a file with measured points"),
    ("gshare/dag", "file with the components of a pipeline and their profiles"),
    ("gshare/tenant", "name of the tenant that pays"),
    ("gshare/regime", "fractional, sliced or whole"),
    ("gshare/requests_per_second", "requests per second of an instance with the given share"),
    ("gshare/concurrency", "requests that an instance serves at once: 1 to 64"),
    ("gshare/batch", "most requests that an instance takes as one batch: 1 to 256"),
    (
        "gshare/park",
        "false: while others need the device, the process ends instead of its memory going to host memory",
    ),
    ("gshare/load", "time from the start of an instance to its first answer, such as 4s"),
    ("gshare/probe_path", "path that is called while the function is measured"),
    ("gshare/probe_body", "file that is sent as the body while it is measured"),
    ("gshare/pod_template", "pod template as JSON, on Kubernetes alone"),
];

/// The annotations for shares, without their prefix.
const SHARES: [&str; 4] = ["gpu_sm_partition", "gpu_quota_request", "gpu_quota_limit", "gpu_mem"];

/// Prefix of the other annotations of this host.
const PREFIX: &str = "gshare/";
/// Longest key that may be one of ours with typing errors.
const LONGEST_KEY: usize = 64;

/// The annotation that a user means by a key that is none of them: one without its prefix, or with at most two typing errors. Other
/// programs have keys such as `model` too, so a plain word counts only `beside` a key with a prefix of ours.
fn meant(key: &str, beside: bool) -> Option<String> {
    if key.len() > LONGEST_KEY {
        return None;
    }
    let prefixed = |prefix: &'static str| SHARES.map(|name| format!("{prefix}{name}"));
    let shares = SHARE_PREFIXES.into_iter().flat_map(prefixed);
    let all = KEYS.iter().map(|(name, _)| (*name).to_owned()).chain(shares);
    let key = key.to_lowercase();
    let short = |name: &str| {
        name.split_once('/').map_or("", |(_, short)| short.trim_start_matches("gpu_")).to_owned()
    };
    let plain = |name: &str| name != "gshare/slo" && !(key.contains('_') && name.contains('_'));
    let distance = |name: String| match key.trim_start_matches("gpu_") == short(&name) {
        true if beside || !plain(&name) => (0, name),
        _ => (strsim::damerau_levenshtein(&key, &name), name),
    };
    all.map(distance).filter(|(errors, _)| *errors <= 2).min().map(|(_, name)| name)
}

/// Whether the value of an annotation may be a path to a file on this host.
pub fn is_file(key: &str) -> bool {
    ["gshare/model", "gshare/profile", "gshare/dag", "gshare/probe_body"].contains(&key)
}

/// A model's file as it was when it was named.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Model {
    /// Its path.
    pub path: PathBuf,
    length: u64,
    changed: Option<SystemTime>,
    /// Memory of its weights in a store.
    pub bytes: Bytes,
}

impl Model {
    /// The model in a safetensors file.
    ///
    /// # Errors
    /// The fault of the file, in words for people.
    pub fn of(path: &Path) -> Result<Self, String> {
        // Another file may never end, or have nothing to read for ever.
        let about = std::fs::metadata(path).map_err(|error| error.to_string())?;
        if !about.is_file() {
            return Err("need a regular file".to_owned());
        }
        let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
        let source = Source::open(file).map_err(|error| error.to_string())?;
        let (length, changed) = (about.len(), about.modified().ok());
        Ok(Self { path: path.to_owned(), length, changed, bytes: Bytes(source.layout.arena_bytes) })
    }

    /// The model's number for the platform: the same wherever this file is named as it is now.
    pub fn number(&self) -> ModelId {
        static KNOWN: Mutex<Vec<Model>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock();
        let at = known.iter().position(|model| model == self).unwrap_or_else(|| {
            known.push(self.clone());
            known.len() - 1
        });
        ModelId::new(u32::try_from(at).unwrap_or(u32::MAX))
    }
}

/// The kind of work of a function, and the way to its share of a device.
#[derive(Debug, Clone, PartialEq)]
pub enum Wants {
    /// Inference without a GPU.
    NoGpu {
        /// Requests per second that an instance serves; without a rate, load starts no further instance.
        rate: Option<f64>,
    },
    /// Inference with a fixed share.
    Share {
        /// Share of each instance.
        share: ResourceSpec,
        /// Requests per second that an instance serves; without a rate, load starts no further instance.
        rate: Option<f64>,
    },
    /// Inference with a share that is yet to be measured.
    Measured,
    /// Inference with measured points, from which the scaler picks.
    Profile {
        /// Measured points.
        table: ProfileTable,
        /// Measured GPU memory in bytes; none if only the points were given.
        memory: Option<Bytes>,
    },
    /// Inference in stages on MIG devices.
    Pipeline {
        /// Components and their dependencies.
        dag: Box<Dag>,
    },
    /// A training job.
    Training {
        /// Number of workers, each on its own device.
        workers: u32,
        /// Share of each worker.
        share: GpuShare,
    },
}

/// A deployment after all checks.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Container image; none for a program of this host.
    pub image: Option<Image>,
    /// Program and arguments; may be empty with an image, which then runs its own command.
    pub command: Vec<String>,
    /// Kind of work and share.
    pub wants: Wants,
    /// Requests that an instance serves at once.
    pub concurrency: u32,
    /// Most requests of a batch, where the function takes batches.
    pub batch: Option<u32>,
    /// Devices that an instance's process uses.
    pub devices: u32,
    /// Fewest and most instances.
    pub bounds: (u32, u32),
    /// Time in which a request should be answered.
    pub slo: Option<Duration>,
    /// Number of the tenant; 0 if the deployment names none.
    pub tenant: TenantId,
    /// An earlier measurement of the same program.
    pub measured: Option<Measured>,
    /// The model that the deployment names.
    pub model: Option<Model>,
    /// GPU memory of an instance in bytes without shared weights, if an annotation tells it.
    pub memory: Option<Bytes>,
    /// The same as expected by the model's file, until it is measured: a fifth of the weights for activations, 512 MiB for the CUDA
    /// context, and the weights themselves if each instance has its own.
    pub expected: Option<Bytes>,
    /// Service class beside other functions on a device. By default a function with an SLO is SLO-sensitive, and a training job
    /// is best effort.
    pub class: Option<ServiceClass>,
    /// Upper limit of GPU time, if the deployment sets one; otherwise the platform chooses.
    pub limit: Option<Quota>,
    /// Kind of devices, if the deployment chooses one.
    pub regime: Option<Regime>,
    /// Whether the memory of its processes may go to host memory while others need the device.
    pub parks: bool,
    /// Time from the start of an instance to its first answer.
    pub load: Duration,
    /// Request for the trials.
    pub probe: Probe,
    /// Limits of host memory and CPU time for each process. They hold in containers and where the host manages cgroups.
    pub limits: Limits,
}

/// The request that the trials send to a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Path, which begins with `/`.
    pub path: String,
    /// Body; the request is a GET if the body is empty.
    pub body: Vec<u8>,
}

impl Plan {
    /// Whether its program's work is seen from outside. Processes of a container are not its children, and a program that loads
    /// a model may wait for the store at a Unix socket.
    pub fn works_in_sight(&self) -> bool {
        self.image.is_none() && self.model.is_none()
    }

    /// Reads and checks a deployment. `tenants` holds the known tenants by name.
    ///
    /// # Errors
    /// 400 with the name of the field.
    pub fn of(
        deployment: &FunctionDeployment,
        tenants: &BTreeMap<String, TenantId>,
    ) -> Result<Self, ApiError> {
        // A function of another namespace of a cluster is known as `NAME.NAMESPACE`.
        for part in deployment.service.splitn(2, '.') {
            check_name("service", part)?;
        }
        check_namespace(deployment.namespace.as_deref())?;
        let (image, command) = command(deployment)?;
        let annotations = Annotations(deployment.annotations.iter().flatten().collect());
        annotations.known()?;
        let share = annotations.share()?;
        let rate = annotations.number("gshare/requests_per_second", 0.001..=1e6)?;
        let tenant = match annotations.get("gshare/tenant") {
            None => TenantId::new(0),
            Some(name) => *tenants.get(name).ok_or_else(|| {
                let known: Vec<&str> = tenants.keys().map(String::as_str).collect();
                let need = match known.is_empty() {
                    true => "is not known: leave it out, or name it in host.tenants".to_owned(),
                    false => format!("is not known; there are: {}", known.join(", ")),
                };
                bad("gshare/tenant", name, &need)
            })?,
        };
        let bounds = bounds(deployment)?;
        let concurrency = annotations.count("gshare/concurrency", 1, 1..=64)?;
        let model = annotations.get("gshare/model").map(model).transpose()?;
        let devices = annotations.count("gshare/devices", 1, 1..=64)?;
        // The share applies to each device.
        let all = |memory: Bytes| Bytes(memory.get().saturating_mul(devices.into()));
        let memory = share.and_then(|share| share.memory()).map(all);
        let wants = annotations.wants(share, rate)?;
        if devices > 1
            && matches!(wants, Wants::NoGpu { .. } | Wants::Pipeline { .. } | Wants::Training { .. })
        {
            return Err(bad("gshare/devices", &devices.to_string(), "need an inference function with a GPU"));
        }
        let regime = annotations.regime()?;
        let batch = annotations.batch(&wants, regime)?;
        let scales = !matches!(wants, Wants::Share { rate: None, .. } | Wants::NoGpu { rate: None });
        let slo = annotations.time("gshare/slo")?;
        let class = annotations.class()?.or(match &wants {
            Wants::NoGpu { .. } => None,
            Wants::Training { .. } => Some(ServiceClass::BestEffort),
            _ => slo.map(|_| ServiceClass::SLO_SENSITIVE),
        });
        let mut plan = Self {
            image,
            command,
            concurrency,
            batch,
            devices,
            bounds: if scales { bounds } else { (bounds.0, bounds.0.max(1)) },
            slo,
            tenant,
            measured: None,
            model,
            memory,
            expected: None,
            class,
            limit: share
                .map(|share| share.quota())
                .filter(|quota| !quota.request().is_zero())
                .map(QuotaRange::limit),
            regime,
            parks: annotations.parks(&wants, devices)?,
            load: annotations.time("gshare/load")?.unwrap_or(Duration::from_secs(1)),
            probe: annotations.probe()?,
            limits: limits(deployment)?,
            wants,
        };
        let own = u64::from(plan.weights().is_none());
        let work = |bytes: Bytes| Bytes(bytes.get() / 5).saturating_add(Bytes::from_mib(512));
        plan.expected =
            plan.model.as_ref().map(|model| Bytes(own * model.bytes.get()).saturating_add(work(model.bytes)));
        Ok(plan)
    }

    /// The weights that its instances share on a device with shared time. A training job changes its own, a spread model has a part on
    /// each device, and a pipeline's components state their memory.
    pub fn weights(&self) -> Option<Weights> {
        let shares = matches!(self.wants, Wants::Share { .. } | Wants::Measured | Wants::Profile { .. });
        let model = self.model.as_ref().filter(|_| shares && self.devices == 1)?;
        Some(Weights { model: model.number(), bytes: model.bytes })
    }

    /// The name of the image or the program, for messages.
    pub fn program(&self) -> String {
        let program = self.command.first().cloned();
        self.image.as_ref().map(Image::to_string).or(program).unwrap_or_default()
    }

    /// An error message if this host has no such program. `path` is the deployment's own search path.
    pub fn missing_program(&self, path: Option<&str>) -> Option<String> {
        use std::os::unix::fs::PermissionsExt as _;
        let program = self.command.first().filter(|_| self.image.is_none())?;
        let runs = |file: &Path| {
            file.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
        };
        let path = path.map_or_else(|| std::env::var_os("PATH").unwrap_or_default(), Into::into);
        let here = match program.contains('/') {
            true => runs(Path::new(program)),
            false => std::env::split_paths(&path).any(|dir| runs(&dir.join(program))),
        };
        (!here).then(|| {
            format!("envProcess, image: `{program}`: this host has no such program that can be executed")
        })
    }

    /// Whether the platform starts and stops instances by load.
    pub const fn scales(&self) -> bool {
        !matches!(
            self.wants,
            Wants::Share { rate: None, .. } | Wants::NoGpu { rate: None } | Wants::Training { .. }
        )
    }

    /// GPU memory of an instance until it is measured.
    pub fn memory_before(&self, guess: Bytes) -> Bytes {
        self.memory.or(self.expected).unwrap_or(guess)
    }

    /// The platform's description of the function. Unknown memory is booked as `guess`.
    ///
    /// # Errors
    /// 400 with the name of the field.
    pub fn spec(&self, bounds: (u32, u32), guess: Bytes) -> Result<FunctionSpec, ApiError> {
        let memory = self.memory.unwrap_or(match &self.wants {
            Wants::Profile { memory: Some(measured), .. } => *measured,
            _ if self.expected.is_some() => self.memory_before(guess),
            // Without a limit on memory the need is unknown; one byte per device is booked.
            Wants::NoGpu { .. } | Wants::Share { .. } => Bytes(self.devices.into()),
            _ => guess,
        });
        let point = |sm, quota, rate: Option<f64>| {
            // The platform ignores the latency of a fixed share.
            let any = Duration::from_nanos(1);
            let point = ProfilePoint::measured(
                sm,
                quota,
                self.batch.unwrap_or(self.concurrency),
                rate.unwrap_or(ANY_RATE),
                any,
                any,
            );
            let table = point.and_then(|point| ProfileTable::sparse(vec![point]));
            table.map_err(|error| ApiError::bad(format!("annotations: {error}")))
        };
        let work = match &self.wants {
            Wants::NoGpu { rate } => {
                let least = (SmShare::from_percent(1), Quota::from_percent(1));
                let (sm, quota) = (least.0.unwrap_or(SmShare::WHOLE), least.1.unwrap_or(Quota::WHOLE));
                Work::Inference { profile: Some(point(sm, quota, *rate)?) }
            }
            Wants::Share { share, rate } => {
                Work::Inference { profile: Some(point(share.sm(), share.quota().request(), *rate)?) }
            }
            Wants::Measured => Work::Inference { profile: None },
            Wants::Profile { table, .. } => Work::Inference { profile: Some(table.clone()) },
            Wants::Pipeline { dag } => {
                let goal = Goal::default().with_runtime_memory(Bytes::from_mib(256));
                Work::Pipeline { dag: dag.clone(), goal: Box::new(goal) }
            }
            Wants::Training { workers, share } => Work::Training { workers: *workers, share: *share },
        };
        let mut spec = FunctionSpec::new(work, memory)
            .with_tenant(self.tenant)
            .with_instances(bounds.0, bounds.1)
            .with_devices(self.devices)
            .with_weights(self.weights())
            .with_batches(self.batch.is_some())
            .with_loads(self.load, self.load);
        (spec.slo, spec.regime, spec.time_limit) = (self.slo, self.regime, self.limit);
        Ok(spec)
    }
}

fn bad(key: &str, value: &str, need: &str) -> ApiError {
    ApiError::bad(format!("annotations: {key}: `{value}`: {need}"))
}

/// The image and the command of a deployment. `envProcess` gives the command; otherwise `image` does, unless it names an image.
fn command(deployment: &FunctionDeployment) -> Result<(Option<Image>, Vec<String>), ApiError> {
    let refused = |error: ContainerError| ApiError::bad(error.to_string());
    let image = Image::named(&deployment.image).map_err(refused)?;
    let line = deployment.env_process.as_deref().filter(|line| !line.trim().is_empty());
    let line = match (line, &image) {
        (Some(line), _) => line,
        (None, Some(_)) => "",
        (None, None) => {
            Image::refuse_short(&deployment.image).map_err(refused)?;
            &deployment.image
        }
    };
    let command: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    if command.is_empty() && image.is_none() {
        return Err(ApiError::bad("envProcess, image: both are empty: need a program to start"));
    }
    for key in deployment.env_vars.iter().flatten().map(|(key, _)| key) {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(ApiError::bad(format!("envVars: `{key}` is not a name for a variable")));
        }
    }
    if deployment.env_vars.iter().flatten().any(|(_, value)| value.contains('\0')) || line.contains('\0') {
        return Err(ApiError::bad("envVars, envProcess: a byte of value 0"));
    }
    for (field, map) in [("limits", &deployment.limits), ("requests", &deployment.requests)] {
        let gpus = map.iter().flatten().find(|(key, value)| key.ends_with("/gpu") && *value != "0");
        if let Some((key, _)) = gpus {
            return Err(ApiError::bad(format!(
                "{field}: `{key}`: need an SLO or a quota of a GPU's time in place of whole GPUs: leave it out"
            )));
        }
    }
    Ok((image, command))
}

/// Units of Kubernetes' quantities, and Docker's `m` and `g`, which OpenFaaS's files use too.
const UNITS: [(&str, u64); 10] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

/// Reads OpenFaaS's `limits`: memory in bytes, CPU time in thousandths of a CPU.
fn limits(deployment: &FunctionDeployment) -> Result<Limits, ApiError> {
    let get = |name: &str| deployment.limits.as_ref()?.get(name).map(String::as_str);
    let bytes = |text: &str| {
        let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
        let (number, unit) =
            unit.map_or((text, 1), |(suffix, unit)| (&text[..text.len() - suffix.len()], *unit));
        number.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
    };
    let milli = |text: &str| match text.strip_suffix('m') {
        Some(number) => number.parse::<u64>().ok(),
        None => {
            // 1 CPU is 1,000 milli-CPUs, and 1 s is 1,000 ms.
            let cpus = text.parse::<f64>().ok().filter(|cpus| (0.0..=1e6).contains(cpus))?;
            let time = std::time::Duration::try_from_secs_f64(cpus).ok()?;
            u64::try_from(time.as_millis()).ok()
        }
    };
    let wrong =
        |name: &str, text: &str, need: &str| ApiError::bad(format!("limits: {name}: `{text}`: need {need}"));
    let memory =
        get("memory").map(|text| bytes(text).ok_or_else(|| wrong("memory", text, "bytes, such as 128Mi")));
    let cpu = get("cpu").map(|text| {
        // The kernel enforces no limit below a hundredth of a CPU.
        let found = milli(text).filter(|milli| *milli >= 10);
        found.ok_or_else(|| wrong("cpu", text, "CPUs, such as 500m or 0.5, 10m or more"))
    });
    Ok(Limits { memory: memory.transpose()?, cpu_milli: cpu.transpose()? })
}

fn bounds(deployment: &FunctionDeployment) -> Result<(u32, u32), ApiError> {
    let label = |name: &str, default: u32, least: u32| {
        let found = deployment.labels.iter().flatten().find(|(key, _)| *key == name);
        match found.map(|(_, text)| (text, text.parse::<u32>())) {
            None => Ok(default),
            Some((_, Ok(count))) if (least..=MOST).contains(&count) => Ok(count),
            Some((text, _)) => {
                Err(ApiError::bad(format!("labels: {name}: `{text}`: need {least} to {MOST}")))
            }
        }
    };
    let least = label("com.openfaas.scale.min", 1, 0)?;
    let most = label("com.openfaas.scale.max", least.max(20), 1)?;
    if least > most {
        return Err(ApiError::bad(format!(
            "labels: com.openfaas.scale.min: {least} is more than the maximum {most}"
        )));
    }
    Ok((least, most))
}

fn model(path: &str) -> Result<Model, ApiError> {
    let found = std::fs::canonicalize(path).map_err(|error| error.to_string());
    found.and_then(|path| Model::of(&path)).map_err(|error| bad("gshare/model", path, &error))
}

/// Longest file, in bytes, that an annotation may name.
const MOST_BYTES: u64 = 16 << 20;

/// The content of a file that an annotation names.
fn file(key: &str, path: &str) -> Result<Vec<u8>, ApiError> {
    let failed = |error: std::io::Error| bad(key, path, &error.to_string());
    // Another file may never end, or have nothing to read for ever.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(bad(key, path, "need a regular file"));
    }
    let (mut bytes, file) = (Vec::new(), std::fs::File::open(path).map_err(failed)?);
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(bad(key, path, "has more bytes than it may have: need at most 16 MiB"));
    }
    Ok(bytes)
}

fn profile(key: &str, path: &Path) -> Result<ProfileTable, ApiError> {
    let name = path.to_string_lossy();
    let table = serde_json::from_slice(&file(key, &name)?);
    table.map_err(|error| bad(key, &name, &format!("{error}; need auto, none, or a file of measured points")))
}

#[cfg(test)]
mod tests;
