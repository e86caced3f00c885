//! FaST-GShare, section 5.4 and figure 11: eight pods that fit one GPU, in every order of arrival.
//!
//! Policies: `time_sharing` (a pod takes all SMs for its quota, as KubeShare does), `algorithm_2` (the printed packer
//! with its mistakes mended), `max_rects` (ours, re-arranging before it opens a GPU), `batch` (ours, all at once).

use anyhow::{Context, Result};
use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Report, row};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {}

#[derive(Debug, Deserialize)]
struct Scenario {
    pod: Vec<Pod>,
    paper: Vec<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct Pod {
    count: usize,
    sm: String,
    quota: String,
}

/// Runs every order under every policy.
///
/// # Errors
/// When the scenario file does not parse.
pub fn run(_args: &Args) -> Result<Report> {
    let scenario: Scenario = toml::from_str(include_str!("../../scenarios/fast-gshare/fig11.toml"))?;
    let mut kinds = Vec::new();
    for pod in &scenario.pod {
        let (quota, sm): (Quota, SmShare) = (pod.quota.parse()?, pod.sm.parse()?);
        kinds.push((Demand::new(quota, sm), pod.count));
    }
    let mut orders = Vec::new();
    let mut left: Vec<usize> = kinds.iter().map(|(_, count)| *count).collect();
    every_order(&mut left, &mut Vec::new(), &mut orders);
    let mut report = Report::new("fast-fig11", Vec::new());
    report.paper = scenario.paper;
    let all_sms = |demand: Demand| Demand::new(demand.quota, SmShare::WHOLE);
    let same = |demand: Demand| demand;
    // Nothing is released here, so the paper's way of keeping released rectangles makes no difference.
    let ours = MaxRectsConfig::default();
    let printed = ours.with_rearrange_gpus(0);
    type Change = dyn Fn(Demand) -> Demand;
    let policies: [(&str, MaxRectsConfig, &Change, bool); 4] = [
        ("time_sharing", printed, &all_sms, false),
        ("algorithm_2", printed, &same, false),
        ("max_rects", ours, &same, false),
        ("batch", ours, &same, true),
    ];
    for (policy, config, change, batch) in policies {
        let (mut least, mut most, mut on_one) = (usize::MAX, 0, 0usize);
        for order in &orders {
            let demands: Vec<Demand> = order.iter().map(|kind| change(kinds[*kind].0)).collect();
            let gpus = gpus_for(config, &demands, batch)?;
            (least, most) = (least.min(gpus), most.max(gpus));
            on_one += usize::from(gpus == 1);
        }
        report.rows.push(row(&[
            ("policy", policy.into()),
            ("orders", orders.len().into()),
            ("orders_on_one_gpu", on_one.into()),
            ("gpus_min", least.into()),
            ("gpus_max", most.into()),
        ]));
    }
    Ok(report)
}

fn gpus_for(config: MaxRectsConfig, demands: &[Demand], batch: bool) -> Result<usize> {
    let mut pool = MaxRects::new(config);
    for gpu in 0..8 {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::ZERO))?;
    }
    if batch {
        pool.place_all(demands, &mut Vec::new())?;
    } else {
        for demand in demands {
            pool.place(demand).context("eight GPUs hold eight pods")?;
        }
    }
    Ok(pool.open_gpus() as usize)
}

fn every_order(left: &mut [usize], prefix: &mut Vec<usize>, orders: &mut Vec<Vec<usize>>) {
    if left.iter().all(|count| *count == 0) {
        orders.push(prefix.clone());
        return;
    }
    for kind in 0..left.len() {
        if left[kind] > 0 {
            left[kind] -= 1;
            prefix.push(kind);
            every_order(left, prefix, orders);
            prefix.pop();
            left[kind] += 1;
        }
    }
}
