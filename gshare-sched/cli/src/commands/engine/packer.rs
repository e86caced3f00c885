//! `gshare engine pack`: a packer as a filter. A line in is a call of [`PackerExt`], a line out its answer.

use super::filter;
use crate::commands::pack::Policy;
use gshare_core::{ConfigError, GpuId, PlacementId};
use gshare_sched::pack::picture::{Diagnosis, diagnose};
use gshare_sched::pack::{
    Demand, GpuSpec, GpuStatus, MaxRects, MaxRectsConfig, PackerExt, Placed, Placement, Rectangle, RepackPlan,
};
use gshare_sched::place::{DiluConfig, DiluPacker};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A packer's policy and its settings.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Config {
    /// The policy that decides.
    policy: Policy,
    /// Settings of the policy `max_rects`.
    max_rects: MaxRectsConfig,
    /// Settings of the policy `dilu`.
    dilu: DiluConfig,
}

impl Config {
    fn packer(&self) -> Result<Box<dyn PackerExt>, ConfigError> {
        Ok(match self.policy {
            Policy::MaxRects => Box::new(MaxRects::new(self.max_rects)),
            Policy::Dilu => Box::new(DiluPacker::new(self.dilu)?),
        })
    }
}

/// A line in.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "call", rename_all = "snake_case", deny_unknown_fields)]
enum Call {
    /// Adds an empty GPU.
    AddGpu { gpu: GpuId, spec: GpuSpec },
    /// Removes an empty GPU.
    RemoveGpu { gpu: GpuId },
    /// A cordoned GPU takes no new placements.
    SetCordoned { gpu: GpuId, cordoned: bool },
    /// The GPU that `place` would choose now.
    Probe { demand: Demand },
    /// Places a demand, on any GPU but those in `except`.
    Place {
        demand: Demand,
        #[serde(default)]
        except: Vec<GpuId>,
    },
    /// Places the demand of a running pod exactly here.
    PlaceAt { gpu: GpuId, rectangle: Rectangle, demand: Demand },
    /// Places all or none, the large ones first.
    PlaceAll { demands: Vec<Demand> },
    /// Places all on GPUs of their own, or none.
    PlaceGang { demands: Vec<Demand> },
    /// Frees a placement.
    Release { placement: PlacementId },
    /// Every GPU and its placements.
    Show,
    /// A plan to use fewer GPUs.
    PlanRepack { max_moves: usize },
    /// A plan to empty a GPU.
    PlanDrain { gpu: GpuId },
    /// Carries a plan out: all of it, or nothing.
    Apply { plan: RepackPlan },
}

/// A line out.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "answer", rename_all = "snake_case")]
enum Answer {
    /// The call is done.
    Done { version: u64 },
    /// The GPU.
    Gpu { gpu: GpuId },
    /// The places of the demands, in the order of the call.
    Placed { placed: Vec<Placed> },
    /// The released placement.
    Released { placement: Placement },
    /// Every GPU.
    Gpus { gpus: Vec<Shown> },
    /// The plan.
    Plan { plan: RepackPlan },
}

/// A GPU and its load.
#[derive(Debug, Serialize, JsonSchema)]
struct Shown {
    #[serde(flatten)]
    status: GpuStatus,
    #[serde(flatten)]
    diagnosis: Diagnosis,
    held: Vec<Placement>,
}

pub(super) fn run(options: &filter::Options) -> anyhow::Result<()> {
    filter::serve(
        options,
        |config: Config| Ok(config.packer()?),
        |packer, call| answer(packer.as_mut(), call),
    )
}

fn answer(packer: &mut dyn PackerExt, call: Call) -> anyhow::Result<Option<Answer>> {
    let placed = |placed| Ok(Some(Answer::Placed { placed }));
    match call {
        Call::AddGpu { gpu, spec } => packer.add_gpu(gpu, spec)?,
        Call::RemoveGpu { gpu } => packer.remove_gpu(gpu)?,
        Call::SetCordoned { gpu, cordoned } => packer.set_cordoned(gpu, cordoned)?,
        Call::Probe { demand } => return Ok(Some(Answer::Gpu { gpu: packer.probe(&demand)? })),
        Call::Place { demand, except } => {
            return placed(vec![packer.place_where(&demand, &|gpu| !except.contains(&gpu))?]);
        }
        Call::PlaceAt { gpu, rectangle, demand } => {
            return placed(vec![Placed::new(packer.place_at(gpu, rectangle, &demand)?)]);
        }
        Call::PlaceAll { demands } => {
            let mut out = Vec::new();
            packer.place_all(&demands, &mut out)?;
            return placed(out);
        }
        Call::PlaceGang { demands } => {
            let mut out = Vec::new();
            packer.place_gang(&demands, &mut out)?;
            return placed(out);
        }
        Call::Release { placement } => {
            return Ok(Some(Answer::Released { placement: packer.release(placement)? }));
        }
        Call::Show => return Ok(Some(Answer::Gpus { gpus: show(packer) })),
        Call::PlanRepack { max_moves } => {
            return Ok(Some(Answer::Plan { plan: packer.plan_repack(max_moves) }));
        }
        Call::PlanDrain { gpu } => return Ok(Some(Answer::Plan { plan: packer.plan_drain(gpu)? })),
        Call::Apply { plan } => packer.apply(&plan)?,
    }
    Ok(Some(Answer::Done { version: packer.version() }))
}

fn show(packer: &dyn PackerExt) -> Vec<Shown> {
    let mut statuses = Vec::new();
    packer.gpus(&mut |status| statuses.push(*status));
    let shown = |status: GpuStatus| {
        let mut held = Vec::new();
        packer.placements_on(status.gpu, &mut |placement| held.push(*placement));
        Shown { status, diagnosis: diagnose(status.spec, &held), held }
    };
    statuses.into_iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn answers(lines: &[Value]) -> Vec<Value> {
        let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let mut packer = Config::default().packer().unwrap();
        let mut output = Vec::new();
        filter::lines(&mut input.as_bytes(), &mut output, |call| answer(packer.as_mut(), call)).unwrap();
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn demand(quota: u16, sm: u16) -> Value {
        json!({"quota_bp": quota, "sm_bp": sm, "memory_bytes": 1})
    }

    #[test]
    fn a_call_in_is_an_answer_out() {
        let spec = json!({"memory_bytes": 4});
        let lines = answers(&[
            json!({"call": "add_gpu", "gpu": 0, "spec": spec}),
            json!({"call": "add_gpu", "gpu": 1, "spec": spec}),
            json!({"call": "place", "demand": demand(10_000, 5_000)}),
            json!({"call": "probe", "demand": demand(10_000, 5_000)}),
            json!({"call": "place", "demand": demand(10_000, 5_000), "except": [0]}),
            json!({"call": "plan_repack", "max_moves": 4}),
            json!({"call": "show"}),
        ]);
        assert_eq!(lines[1], json!({"answer": "done", "version": 2}));
        assert_eq!(lines[2]["placed"][0]["placement"]["gpu"], 0);
        assert_eq!(lines[3], json!({"answer": "gpu", "gpu": 0}));
        assert_eq!(lines[4]["placed"][0]["placement"]["gpu"], 1);
        assert_eq!(lines[5]["plan"]["emptied"].as_array().unwrap().len(), 1);
        assert_eq!(lines[6]["gpus"][0]["occupancy_bp"], 5_000);
        // A plan goes back in the same form.
        let again = answers(&[
            json!({"call": "add_gpu", "gpu": 0, "spec": spec}),
            json!({"call": "apply", "plan": lines[5]["plan"]}),
            json!({"call": "release", "placement": 7}),
            json!({"call": "place", "demand": demand(0, 5_000)}),
        ]);
        assert!(again[1]["error"].as_str().unwrap().contains("the packer is at 1"), "{again:?}");
        assert!(again[2]["error"].as_str().unwrap().contains("not a placement"), "{again:?}");
        assert_eq!(again[3]["line"], 4);
    }
}
