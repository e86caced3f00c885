//! `gshare lab pack`: each pod's GPU, and the load of the GPUs afterwards.

use super::{print_json, read_file};
use anyhow::Context as _;
use gshare_core::{Bytes, ConfigError, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::picture::{self, Diagnosis};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer, Placed, Placement, Rectangle};
use gshare_sched::place::{DiluConfig, DiluPacker};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

/// The largest file to read: far above a million pods.
const MAX_FILE: u64 = 256 << 20;
/// Most GPUs or pods of a file, with its counts.
const MAX_COUNT: usize = 1 << 20;
/// GPUs drawn as text.
const PICTURES: usize = 8;

/// Pack pods onto GPUs, by share of GPU time, of SMs, and memory.
///
/// FILE is TOML (`.toml`) or JSON: a list `gpu` of `count`, `memory`, `quota` and `sm`, and a list `pod` of `name`,
/// `count`, `quota`, `sm`, `sm_limit`, `memory` and `apart`. `quota` is a share of the time ("0.4" or "40%"), `sm` per cent
/// of the SMs ("12" or "12%"), `memory` a number of bytes ("1.5GiB"); `count` defaults to 1, and a GPU's `quota` and `sm`
/// to the whole. Pods with the same number `apart` never share a GPU.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab pack pods.toml
  gshare lab pack --online --policy dilu --svg gpus.svg pods.toml    as pods arrive, by Dilu's packer, with a picture")]
pub(crate) struct Options {
    /// GPUs and pods, as TOML or JSON.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Packing policy.
    #[arg(long, value_enum, default_value_t = Policy::MaxRects)]
    policy: Policy,
    /// Place the pods one by one in the order of the file, as they would arrive. Otherwise all are known at once.
    #[arg(long)]
    online: bool,
    /// Draw the GPUs in use into this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[expect(clippy::doc_markdown, reason = "the text of --help, where backticks would show")]
    /// Print one JSON object: {"policy", "online", "gpus_in_use", "placements": [{"pod", "gpu", "rectangle": {"time_offset_bp",
    /// "sm_offset_bp", "quota_bp", "sm_bp"}}], "refused": [{"pod", "why"}], "gpus": [{"gpu", "placements",
    /// "memory_used_bytes", "occupancy_bp", "fragmentation_bp", "largest_hole", "holes"}]}.
    #[arg(long)]
    json: bool,
}

/// The policies behind [`Packer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Policy {
    /// Maximal rectangles, the best over all GPUs; re-arranges a GPU before it opens another.
    #[default]
    MaxRects,
    /// Dilu's policy: sums of SM requests, limits and memory, without quotas.
    Dilu,
}

impl Policy {
    /// An empty pool under this policy with its defaults.
    fn packer(self) -> Result<Box<dyn Packer>, ConfigError> {
        Ok(match self {
            Self::MaxRects => Box::new(MaxRects::new(MaxRectsConfig::default())),
            Self::Dilu => Box::new(DiluPacker::new(DiluConfig::default())?),
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    gpu: Vec<GpuLine>,
    pod: Vec<PodLine>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuLine {
    count: Option<u32>,
    memory: Option<Text>,
    quota: Option<Text>,
    sm: Option<Text>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PodLine {
    name: Option<String>,
    count: Option<u32>,
    quota: Text,
    sm: Text,
    sm_limit: Option<Text>,
    memory: Option<Text>,
    apart: Option<u32>,
}

/// A value with its unit, or a bare number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Text {
    Word(String),
    Whole(u64),
    Fraction(f64),
}

impl Text {
    fn read<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(
        &self,
        field: &str,
    ) -> anyhow::Result<T> {
        let text = match self {
            Self::Word(text) => text.clone(),
            Self::Whole(number) => number.to_string(),
            Self::Fraction(number) => number.to_string(),
        };
        text.parse().with_context(|| field.to_owned())
    }
}

fn optional<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    text: Option<&Text>,
    field: &str,
    otherwise: T,
) -> anyhow::Result<T> {
    text.map_or(Ok(otherwise), |text| text.read(field))
}

/// A pod of the file, one of `count`.
#[derive(Debug)]
struct Pod {
    name: String,
    demand: Demand,
}

#[derive(Debug, Serialize)]
struct Report {
    policy: Policy,
    online: bool,
    gpus_in_use: usize,
    placements: Vec<Shown>,
    refused: Vec<Refused>,
    gpus: Vec<Gpu>,
}

#[derive(Debug, Serialize)]
struct Shown {
    pod: String,
    gpu: GpuId,
    rectangle: Rectangle,
}

#[derive(Debug, Serialize)]
struct Refused {
    pod: String,
    why: String,
}

#[derive(Debug, Serialize)]
struct Gpu {
    gpu: GpuId,
    placements: usize,
    memory_used_bytes: Bytes,
    #[serde(flatten)]
    diagnosis: Diagnosis,
    #[serde(skip)]
    spec: GpuSpec,
    #[serde(skip)]
    held: Vec<Placement>,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let input: Input = read_file(&options.file, MAX_FILE)?;
    let (gpus, pods) = expand(&input).with_context(|| options.file.display().to_string())?;
    let mut packer = options.policy.packer()?;
    for (number, spec) in (0..).zip(gpus) {
        packer.add_gpu(GpuId::new(number), spec).with_context(|| format!("gpu {number}"))?;
    }
    let (names, refused) = place(packer.as_mut(), &pods, options.online);
    let report = report(options, packer.as_ref(), &names, refused);
    if let Some(file) = &options.svg {
        let pages: Vec<(String, &Gpu)> = report.gpus.iter().map(|gpu| (title(gpu), gpu)).collect();
        let label = |placement: &Placement| format!("{}: {}", name_of(&names, placement), size(placement));
        let gpus = pages.iter().map(|(title, gpu)| (title.as_str(), gpu.spec, gpu.held.as_slice()));
        std::fs::write(file, picture::svg(gpus, label)).with_context(|| file.display().to_string())?;
    }
    if options.json {
        print_json(&report)?;
    } else {
        print(&report, &names);
    }
    anyhow::ensure!(
        report.refused.is_empty(),
        "{} of {} pods found no room",
        report.refused.len(),
        pods.len()
    );
    Ok(())
}

fn expand(input: &Input) -> anyhow::Result<(Vec<GpuSpec>, Vec<Pod>)> {
    let bounded = |total: usize, what: &str| {
        anyhow::ensure!(total <= MAX_COUNT, "{what}: {total} in all, at most {MAX_COUNT}");
        Ok(())
    };
    let counts = |counts: Vec<Option<u32>>| counts.iter().map(|count| count.unwrap_or(1) as usize).sum();
    bounded(counts(input.gpu.iter().map(|gpu| gpu.count).collect()), "gpu")?;
    bounded(counts(input.pod.iter().map(|pod| pod.count).collect()), "pod")?;
    let mut gpus = Vec::new();
    for (index, line) in input.gpu.iter().enumerate() {
        let spec = || -> anyhow::Result<GpuSpec> {
            let quota = optional(line.quota.as_ref(), "quota", Quota::WHOLE)?;
            let sm = optional(line.sm.as_ref(), "sm", SmShare::WHOLE)?;
            let memory = optional(line.memory.as_ref(), "memory", Bytes::ZERO)?;
            Ok(GpuSpec::new(memory).with_size(quota, sm))
        };
        let spec = spec().with_context(|| format!("gpu[{index}]"))?;
        gpus.extend(std::iter::repeat_n(spec, line.count.unwrap_or(1) as usize));
    }
    let mut pods = Vec::new();
    for (index, line) in input.pod.iter().enumerate() {
        let demand = || -> anyhow::Result<Demand> {
            let mut demand = Demand::new(line.quota.read("quota")?, line.sm.read("sm")?)
                .with_memory(optional(line.memory.as_ref(), "memory", Bytes::ZERO)?);
            if let Some(limit) = &line.sm_limit {
                demand = demand.with_sm_limit(limit.read("sm_limit")?);
            }
            demand.apart = line.apart;
            demand.validate()?;
            Ok(demand)
        };
        let demand = demand().with_context(|| format!("pod[{index}]"))?;
        let name = line.name.clone().unwrap_or_else(|| format!("pod{index}"));
        let count = line.count.unwrap_or(1);
        for copy in 0..count {
            let name = if count == 1 { name.clone() } else { format!("{name}-{copy}") };
            pods.push(Pod { name, demand });
        }
    }
    Ok((gpus, pods))
}

type Names = BTreeMap<PlacementId, String>;

fn place(packer: &mut dyn Packer, pods: &[Pod], online: bool) -> (Names, Vec<Refused>) {
    let (mut names, mut refused) = (Names::new(), Vec::new());
    if !online {
        let demands: Vec<Demand> = pods.iter().map(|pod| pod.demand).collect();
        let mut out: Vec<Placed> = Vec::new();
        if packer.place_all(&demands, &mut out).is_ok() {
            names.extend(out.iter().zip(pods).map(|(placed, pod)| (placed.placement.id, pod.name.clone())));
            return (names, refused);
        }
    }
    // If all pods do not fit together, the large ones go first, one by one. If they arrive one by one, they keep their order.
    let mut order: Vec<&Pod> = pods.iter().collect();
    if !online {
        order.sort_by_key(|pod| {
            let Demand { quota, sm, .. } = pod.demand;
            std::cmp::Reverse(u32::from(quota.get()) * u32::from(sm.get()))
        });
    }
    for pod in order {
        match packer.place(&pod.demand) {
            Ok(placed) => {
                names.insert(placed.placement.id, pod.name.clone());
            }
            Err(error) => refused.push(Refused { pod: pod.name.clone(), why: error.to_string() }),
        }
    }
    (names, refused)
}

fn name_of<'a>(names: &'a Names, placement: &Placement) -> &'a str {
    names.get(&placement.id).map_or("", String::as_str)
}

fn report(options: &Options, packer: &dyn Packer, names: &Names, refused: Vec<Refused>) -> Report {
    let (mut gpus, mut placements) = (Vec::new(), Vec::new());
    let mut statuses = Vec::new();
    packer.gpus(&mut |status| statuses.push(*status));
    for status in statuses.into_iter().filter(|status| status.placements > 0) {
        let mut held = Vec::new();
        packer.placements_on(status.gpu, &mut |placement| held.push(*placement));
        placements.extend(held.iter().map(|placement| Shown {
            pod: name_of(names, placement).to_owned(),
            gpu: placement.gpu,
            rectangle: placement.rectangle,
        }));
        gpus.push(Gpu {
            gpu: status.gpu,
            placements: held.len(),
            memory_used_bytes: status.memory_used,
            diagnosis: picture::diagnose(status.spec, &held),
            spec: status.spec,
            held,
        });
    }
    Report {
        policy: options.policy,
        online: options.online,
        gpus_in_use: gpus.len(),
        placements,
        refused,
        gpus,
    }
}

fn title(gpu: &Gpu) -> String {
    let Diagnosis { occupancy, fragmentation, largest_hole, .. } = gpu.diagnosis;
    let hole = largest_hole.map_or_else(|| "none".to_owned(), |hole| format!("{} x {}", hole.quota, hole.sm));
    let memory = match gpu.spec.memory {
        Bytes::ZERO => String::new(),
        whole => format!(", {} of {whole}", gpu.memory_used_bytes),
    };
    format!(
        "{}: {} pods, {occupancy} occupied, largest hole {hole}, {fragmentation} fragmented{memory}",
        gpu.gpu, gpu.placements
    )
}

fn size(placement: &Placement) -> String {
    let Rectangle { time_offset, sm_offset, quota, sm } = placement.rectangle;
    format!("{quota} of the time from {time_offset}, {sm} of the SMs from {sm_offset}")
}

fn print(report: &Report, names: &Names) {
    println!("{} pods on {} GPUs", report.placements.len(), report.gpus_in_use);
    // Dilu's sums have no place on the GPU, so there is nothing to draw.
    let drawn = if report.policy == Policy::Dilu { 0 } else { PICTURES };
    for (index, gpu) in report.gpus.iter().enumerate() {
        println!("\n{}", title(gpu));
        if index < drawn {
            print!("{}", picture::text(gpu.spec, &gpu.held, 50, 16));
        }
        for (place, placement) in gpu.held.iter().enumerate() {
            println!("  {} {}: {}", picture::letter(place), name_of(names, placement), size(placement));
        }
    }
    if !report.refused.is_empty() {
        println!("\nno room for");
        report.refused.iter().for_each(|refused| println!("  {}: {}", refused.pod, refused.why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> anyhow::Result<(Vec<GpuSpec>, Vec<Pod>)> {
        expand(&toml::from_str(text)?)
    }

    /// FaST-GShare, section 5.4.
    const EIGHT: &str = r#"
        [[gpu]]
        count = 4
        memory = "16GiB"
        [[pod]]
        name = "resnet"
        count = 4
        quota = "40%"
        sm = 12
        [[pod]]
        name = "rnnt"
        count = 2
        quota = 0.4
        sm = "24%"
        [[pod]]
        name = "bert"
        count = 2
        quota = "0.6"
        sm = "50"
        memory = "1GiB"
    "#;

    #[test]
    fn the_eight_pods_fit_one_gpu_under_every_order() {
        let (gpus, pods) = expanded(EIGHT).unwrap();
        assert_eq!((gpus.len(), pods.len(), pods[0].name.as_str()), (4, 8, "resnet-0"));
        for online in [false, true] {
            let mut packer = Policy::MaxRects.packer().unwrap();
            (0..).zip(&gpus).for_each(|(id, spec)| packer.add_gpu(GpuId::new(id), *spec).unwrap());
            let (names, refused) = place(packer.as_mut(), &pods, online);
            assert_eq!((names.len(), refused.len()), (8, 0));
            assert!(names.contains_key(&PlacementId::new(0, 0)));
            assert_eq!(packer.gpu(GpuId::new(1)).unwrap().placements, 0);
        }
    }

    #[test]
    fn what_finds_no_room_is_named_with_the_reason() {
        for policy in [Policy::MaxRects, Policy::Dilu] {
            let (gpus, pods) = expanded(
                "[[gpu]]\n[[pod]]\nquota = 1\nsm = 60\ncount = 2\n[[pod]]\nname = 'huge'\nquota = '1'\nsm = 1\nmemory = 1",
            )
            .unwrap();
            let mut packer = policy.packer().unwrap();
            (0..).zip(&gpus).for_each(|(id, spec)| packer.add_gpu(GpuId::new(id), *spec).unwrap());
            let (names, refused) = place(packer.as_mut(), &pods, false);
            assert_eq!((names.len(), refused.len()), (1, 2), "{policy:?}");
            let huge = refused.iter().find(|refused| refused.pod == "huge").unwrap();
            assert!(huge.why.contains("more than any GPU"), "{}", huge.why);
        }
    }

    #[test]
    fn a_bad_file_names_the_line_and_the_field() {
        let error = |text| format!("{:#}", expanded(text).unwrap_err());
        let share = error("[[gpu]]\n[[pod]]\nquota = '140%'\nsm = 12");
        assert!(share.starts_with("pod[0]: quota: "), "{share}");
        let zero = error("[[gpu]]\n[[pod]]\nquota = 0\nsm = 12");
        assert!(zero.contains("quota is zero"), "{zero}");
        let many = error("[[gpu]]\ncount = 4000000000\n[[pod]]\nquota = 1\nsm = 12");
        assert!(many.contains("at most 1048576"), "{many}");
        let unknown = error("[[gpu]]\n[[pod]]\nquota = 1\nsm = 12\nsmm = 1");
        assert!(unknown.contains("smm"), "{unknown}");
    }
}
