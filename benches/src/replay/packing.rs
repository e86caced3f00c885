//! Quality of the packers: bins used on the 500 standard instances and on the mixes, beside peers and bounds.
//!
//! Instances are files `Class_01.2bp` to `Class_10.2bp` in the form of Berkey and Wang (1987) and Martello and Vigo
//! (1998), with an optional `best_known.csv` beside them (columns `class`, `n`, `instance`, `bin_w`, `bin_h`,
//! `area_lb`, `dff_lb`, `best_known`, `status`). Without a folder only the seeded mixes run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, Heuristic, MaxRects, MaxRectsConfig, Packer};
use gshare_sim::scenario::Own;

use super::{Report, mean, row};
use crate::churn::{Churn, Nothing};
use crate::dual_feasible::lower_bound;
use crate::mixes::Mix;
use crate::peers::{self, Guillotiere, Ours, Pool, Scan};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the .2bp files
    #[arg(long)]
    instances: Option<PathBuf>,
    /// First seed of the mixes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// GPUs of the pool that is churned
    #[arg(long, default_value_t = 1_000)]
    gpus: u32,
    /// Rounds of churn measured, after as many of warming up
    #[arg(long, default_value_t = 400)]
    rounds: u32,
    /// Demands of a static set
    #[arg(long, default_value_t = 1_000)]
    count: usize,
}

struct Instance {
    class: usize,
    side: u16,
    /// Basis points a unit is scaled to, so that the bin is nearly whole.
    scale: u16,
    items: Vec<(u16, u16)>,
}

/// Runs what the flags ask for.
///
/// # Errors
/// When a file does not parse.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    let seeds: Vec<u64> = (args.seed..args.seed + args.seeds).collect();
    let mut report = Report::new("packing", seeds.clone());
    if let Some(folder) = &args.instances {
        standard(folder, &mut report)?;
    }
    for mix in Mix::PERCENT {
        still(args, &seeds, mix, own, &mut report)?;
    }
    for mix in Mix::PERCENT {
        churned(args, &seeds, mix, own, &mut report)?;
    }
    Ok(report)
}

fn contact_rearranging() -> MaxRectsConfig {
    MaxRectsConfig::default().with_heuristic(Heuristic::ContactCorner)
}

fn standard(folder: &Path, report: &mut Report) -> Result<()> {
    let mut instances = Vec::new();
    for class in 1..=10 {
        let path = folder.join(format!("Class_{class:02}.2bp"));
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        parse(class, &text, &mut instances)?;
    }
    let best = best_known(&folder.join("best_known.csv"))?;
    type Count<'a> = Box<dyn Fn(&Instance) -> Result<usize> + 'a>;
    let online = |config: MaxRectsConfig| move |instance: &Instance| online_bins(instance, config);
    let baf = MaxRectsConfig::default().with_rearrange_gpus(0);
    let policies: Vec<(&str, Count<'_>)> = vec![
        ("dual_feasible_bound", Box::new(|i| Ok(lower_bound(bin_of(i), &sizes_of(i))))),
        ("online_best_area_fit", Box::new(online(baf))),
        ("online_contact", Box::new(online(baf.with_heuristic(Heuristic::ContactCorner)))),
        ("online_default", Box::new(online(MaxRectsConfig::default()))),
        ("online_contact_rearranging", Box::new(online(contact_rearranging()))),
        ("batch", Box::new(|i| batch_bins(bin_of(i), &sizes_of(i)))),
        ("peer_algorithm_2", Box::new(|i| Ok(peer(i, Scan::new(i.items.len(), i.side))))),
        ("peer_guillotiere", Box::new(|i| Ok(peer(i, Guillotiere::new(i.items.len(), i.side))))),
        (
            "peer_binpack2d",
            Box::new(|i| {
                let mut bins = peers::Binpack2d::new(i.side);
                i.items.iter().for_each(|(w, h)| bins.insert(*w, *h));
                Ok(bins.used())
            }),
        ),
        (
            "peer_bin_packing_batch",
            Box::new(|i| {
                let side = (u32::from(i.side), u32::from(i.side));
                peers::bin_packing_batch(side, &i.items).context("every item fits a bin")
            }),
        ),
        (
            "peer_rectangle_pack_batch",
            Box::new(|i| {
                let side = (u32::from(i.side), u32::from(i.side));
                Ok(peers::rectangle_pack_batch(side, &i.items, area_bound(i)))
            }),
        ),
    ];
    for (policy, count) in policies {
        let mut classes = [0usize; 10];
        let mut spent = Duration::ZERO;
        for instance in &instances {
            let start = Instant::now();
            let bins = count(instance)?;
            spent += start.elapsed();
            classes[instance.class - 1] += bins;
        }
        push_classes(report, policy, &classes, &best, Some(spent));
    }
    if let Some(best) = best {
        push_classes(report, "best_known", &best, &Some(best), None);
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn push_classes(
    report: &mut Report,
    policy: &str,
    classes: &[usize; 10],
    best: &Option<[usize; 10]>,
    spent: Option<Duration>,
) {
    let total: usize = classes.iter().sum();
    let mut line = row(&[
        ("policy", policy.into()),
        ("input", "standard_500".into()),
        ("bins", total.into()),
        ("bins_by_class", classes.to_vec().into()),
    ]);
    if let Some(best) = best {
        let best: usize = best.iter().sum();
        line.insert("bins_over_best_known".into(), (total as f64 / best as f64).into());
    }
    if let Some(spent) = spent {
        line.insert("seconds".into(), spent.as_secs_f64().into());
    }
    report.rows.push(line);
}

fn online_bins(instance: &Instance, config: MaxRectsConfig) -> Result<usize> {
    let mut pool = MaxRects::new(config);
    let (w, h) = bin_of(instance);
    let spec = GpuSpec::new(Bytes::ZERO).with_size(w, h);
    for gpu in 0..u32::try_from(instance.items.len())? {
        pool.add_gpu(GpuId::new(gpu), spec)?;
    }
    for (w, h) in &instance.items {
        pool.place(&peers::demand(w * instance.scale, h * instance.scale))?;
    }
    Ok(pool.open_gpus() as usize)
}

fn peer(instance: &Instance, mut pool: impl Pool) -> usize {
    for (w, h) in &instance.items {
        pool.place(*w, *h);
    }
    pool.used()
}

/// Bins of a set that is known beforehand, as `gshare pack` places it.
fn batch_bins(bin: (Quota, SmShare), items: &[(Quota, SmShare)]) -> Result<usize> {
    let mut pool = MaxRects::new(MaxRectsConfig::default());
    for gpu in 0..u32::try_from(items.len())? {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::ZERO).with_size(bin.0, bin.1))?;
    }
    let demands: Vec<Demand> = items.iter().map(|(quota, sm)| Demand::new(*quota, *sm)).collect();
    pool.place_all(&demands, &mut Vec::new())?;
    Ok(pool.open_gpus() as usize)
}

fn area_bound(instance: &Instance) -> usize {
    let area: usize = instance.items.iter().map(|(w, h)| usize::from(*w) * usize::from(*h)).sum();
    area.div_ceil(usize::from(instance.side) * usize::from(instance.side))
}

fn share(points: u16) -> (Quota, SmShare) {
    (Quota::new(points).unwrap_or(Quota::WHOLE), SmShare::new(points).unwrap_or(SmShare::WHOLE))
}

fn bin_of(instance: &Instance) -> (Quota, SmShare) {
    share(instance.side * instance.scale)
}

fn sizes_of(instance: &Instance) -> Vec<(Quota, SmShare)> {
    let scale = instance.scale;
    instance.items.iter().map(|(w, h)| (share(w * scale).0, share(h * scale).1)).collect()
}

fn parse(class: usize, text: &str, instances: &mut Vec<Instance>) -> Result<()> {
    // Numbers lead each line; words behind them are comments.
    let mut lines = text
        .lines()
        .map(|line| line.split_whitespace().map_while(|word| word.parse::<u16>().ok()).collect::<Vec<_>>())
        .filter(|numbers| !numbers.is_empty());
    while let Some(head) = lines.next() {
        let mut line = || lines.next().context("the file ends inside an instance");
        if usize::from(head[0]) != class {
            bail!("expected class {class}, found {head:?}");
        }
        let count = line()?[0];
        line()?;
        let side = line()?;
        let [height, width] = side[..] else { bail!("expected HBIN WBIN, found {side:?}") };
        if height != width || height == 0 {
            bail!("expected a square bin, found {side:?}");
        }
        let mut items = Vec::new();
        for _ in 0..count {
            let item = line()?;
            let [h, w] = item[..] else { bail!("expected H W, found {item:?}") };
            items.push((w, h));
        }
        instances.push(Instance { class, side: width, scale: 10_000 / width, items });
    }
    Ok(())
}

fn best_known(path: &Path) -> Result<Option<[usize; 10]>> {
    let Ok(text) = std::fs::read_to_string(path) else { return Ok(None) };
    let mut classes = [0; 10];
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let class: usize = fields.first().context("a class")?.parse()?;
        let best: usize = fields.get(7).context("a best known value")?.parse()?;
        *classes.get_mut(class.wrapping_sub(1)).context("classes are 1 to 10")? += best;
    }
    Ok(Some(classes))
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn still(args: &Args, seeds: &[u64], mix: Mix, own: &Own, report: &mut Report) -> Result<()> {
    let sets: Vec<Vec<(u16, u16)>> = seeds.iter().map(|seed| mix.demands(*seed, args.count)).collect();
    let percent: Vec<Vec<(u16, u16)>> =
        sets.iter().map(|set| set.iter().map(|(w, h)| (w / 100, h / 100)).collect()).collect();
    let sized = |set: &[(u16, u16)]| -> Vec<(Quota, SmShare)> {
        set.iter().map(|(w, h)| (share(*w).0, share(*h).1)).collect()
    };
    let whole = (Quota::WHOLE, SmShare::WHOLE);
    let bound: usize = sets.iter().map(|set| lower_bound(whole, &sized(set))).sum();
    let ours = |config: MaxRectsConfig| -> usize {
        let count = u32::try_from(args.count).unwrap_or(u32::MAX);
        sets.iter().map(|set| fill(set, Ours::new(count, config))).sum()
    };
    let batch = sets.iter().map(|set| batch_bins(whole, &sized(set))).sum::<Result<usize>>()?;
    let baf = MaxRectsConfig::default().with_rearrange_gpus(0);
    let mut rows = vec![
        ("online_best_area_fit", ours(baf)),
        ("online_contact", ours(baf.with_heuristic(Heuristic::ContactCorner))),
        ("online_default", ours(MaxRectsConfig::default())),
        ("online_contact_rearranging", ours(contact_rearranging())),
        ("batch", batch),
        ("peer_guillotiere", percent.iter().map(|set| fill(set, Guillotiere::new(args.count, 100))).sum()),
        (
            "peer_bin_packing_batch",
            percent.iter().filter_map(|set| peers::bin_packing_batch((100, 100), set)).sum(),
        ),
    ];
    for (name, make) in own.packers() {
        let bins =
            |set: &Vec<(u16, u16)>| Ok(fill(set, peers::with_gpus(u32::try_from(args.count)?, make())?));
        rows.push((name, sets.iter().map(bins).sum::<Result<usize>>()?));
    }
    for (policy, bins) in rows {
        report.rows.push(row(&[
            ("policy", policy.into()),
            ("input", format!("{}_{}", mix.name(), args.count).into()),
            ("bins", bins.into()),
            ("dual_feasible_bound", bound.into()),
            ("bins_over_bound", (bins as f64 / bound as f64).into()),
        ]));
    }
    Ok(())
}

fn fill(set: &[(u16, u16)], mut pool: impl Pool) -> usize {
    for (w, h) in set {
        pool.place(*w, *h);
    }
    pool.used()
}

fn churned(args: &Args, seeds: &[u64], mix: Mix, own: &Own, report: &mut Report) -> Result<()> {
    let gpus = args.gpus as usize;
    let baf = MaxRectsConfig::default().with_rearrange_gpus(0);
    let of_seeds = |ratio: &dyn Fn(u64) -> f64| mean(seeds.iter().map(|seed| ratio(*seed)));
    let ours = |config: MaxRectsConfig| {
        of_seeds(&|seed| used(args, Churn::new(Ours::new(args.gpus, config), mix, gpus, 0.5, 1, seed)))
    };
    let guillotiere =
        of_seeds(&|seed| used(args, Churn::new(Guillotiere::new(gpus, 100), mix, gpus, 0.5, 100, seed)));
    let scan = |seed| Churn::new(Scan::new(gpus, 100).keeping(16), mix, gpus, 0.5, 100, seed);
    let keep = of_seeds(&|seed| used(args, scan(seed)));
    let plain = ours(baf);
    let mut rows = vec![
        ("best_area_fit", plain),
        ("default", ours(MaxRectsConfig::default())),
        ("default_rearranging_64", ours(baf.with_rearrange_gpus(64))),
        ("contact", ours(baf.with_heuristic(Heuristic::ContactCorner))),
        ("contact_rearranging", ours(contact_rearranging())),
        ("paper_keep_16", keep),
        ("peer_guillotiere", guillotiere),
    ];
    for (name, make) in own.packers() {
        let ratio = |seed: &u64| {
            Ok(used(args, Churn::new(peers::with_gpus(args.gpus, make())?, mix, gpus, 0.5, 1, *seed)))
        };
        let ratios = seeds.iter().map(ratio).collect::<Result<Vec<_>>>()?;
        rows.push((name, mean(ratios)));
    }
    for (policy, used) in rows {
        report.rows.push(row(&[
            ("policy", policy.into()),
            ("input", format!("churn_{}_50%", mix.name()).into()),
            ("used_gpus_over_used_area", used.into()),
            ("over_guillotiere", (used / guillotiere).into()),
            ("over_best_area_fit", (used / plain).into()),
        ]));
    }
    Ok(())
}

/// The mean over the measured rounds of GPUs in use per GPU's worth of area in use.
fn used<P: Pool>(args: &Args, mut churn: Churn<P>) -> f64 {
    for _ in 0..args.rounds {
        churn.round(&mut Nothing);
    }
    let mut sum = 0.0;
    for _ in 0..args.rounds {
        churn.round(&mut Nothing);
        sum += churn.used_ratio();
    }
    sum / f64::from(args.rounds.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packer_of_the_programs_own_has_rows_beside_ours() {
        let args = Args { instances: None, seed: 1, seeds: 2, gpus: 20, rounds: 5, count: 60 };
        let own = Own::default().with_packer("mine", || Box::new(MaxRects::new(MaxRectsConfig::default())));
        let rows = run(&args, &own).unwrap().rows;
        let figures = |policies: [&str; 2]| -> Vec<serde_json::Value> {
            let of = rows.iter().filter(|row| policies.iter().any(|policy| row["policy"] == *policy));
            of.map(|row| row.get("bins").or(row.get("used_gpus_over_used_area")).unwrap().clone()).collect()
        };
        let mine = figures(["mine", "mine"]);
        assert_eq!((mine.len(), &mine), (2 * Mix::PERCENT.len(), &figures(["online_default", "default"])));
    }
}
