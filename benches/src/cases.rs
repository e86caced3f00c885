//! Cases of a scenario beside each other and beside published numbers.
//!
//! A case's figure is the mean over its seeds. Two cases with a difference in one axis are compared seed by seed, see
//! [`paired`](crate::replay::paired). Fewer than [`VERDICT_SEEDS`] seeds give no verdict.

use crate::replay::paired::Paired;
use crate::replay::{columns, mean};
use gshare_core::Duration;
use gshare_sim::scenario::{Case, FIGURES, PaperText, figure};
use gshare_sim::world::{FunctionOutcome, Outcome};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The fewest seeds that a verdict is computed from.
pub const VERDICT_SEEDS: usize = 10;

/// All functions together, where there are several.
const ALL: &str = "all";

/// The figure that is a mean over functions.
const LATE_BY_FUNCTION: &str = "svr_mean_percent";

/// The kind of a drawn function, which its name begins with.
fn kind(name: &str) -> &str {
    name.rsplit_once('-').map_or(name, |(kind, _)| kind)
}

/// A case and the results of its seeds.
#[derive(Debug)]
pub struct CaseRun {
    /// The case.
    pub case: Case,
    /// All seeds together.
    pub total: Outcome,
    length: Duration,
    /// Function, figure and value of each seed.
    by_seed: Vec<BTreeMap<(String, &'static str), f64>>,
}

impl CaseRun {
    /// No seed yet. Load comes for `length` in each.
    pub fn new(case: Case, length: Duration) -> Self {
        Self { case, total: Outcome::default(), length, by_seed: Vec::new() }
    }

    /// Adds a seed. Drawn functions differ from seed to seed, so they count by kind.
    pub fn take(&mut self, outcome: &Outcome) {
        let mut late = BTreeMap::<String, Vec<f64>>::new();
        for of in &outcome.functions {
            let missed = of.attainment().map(|met| 100.0 - 100.0 * met);
            for name in [kind(&of.name), ALL] {
                late.entry(name.to_owned()).or_default().extend(missed);
            }
        }
        let mut by_kind = outcome.clone();
        if self.case.scenario.draw.is_some() {
            let mut kinds = Vec::<FunctionOutcome>::new();
            for of in &outcome.functions {
                match kinds.iter_mut().find(|known| known.name == kind(&of.name)) {
                    Some(known) => known.add(of),
                    None => {
                        let mut first = of.clone();
                        kind(&of.name).clone_into(&mut first.name);
                        kinds.push(first);
                    }
                }
            }
            by_kind.functions = kinds;
        }
        let outcome = &by_kind;
        self.total.add(outcome);
        let sum = |of: fn(&FunctionOutcome) -> bool| {
            let mut all = FunctionOutcome::default();
            outcome.functions.iter().filter(|one| of(one)).for_each(|one| all.add(one));
            all.slo = outcome.functions.iter().find_map(|one| one.slo);
            all
        };
        let mut figures = BTreeMap::new();
        for (name, _) in FIGURES {
            let mut note = |function: &str, of: &FunctionOutcome| {
                figures
                    .extend(figure(of, name, self.length).map(|value| ((function.to_owned(), name), value)));
            };
            outcome.functions.iter().for_each(|of| note(&of.name, of));
            if outcome.functions.len() > 1 {
                // A trainer's GPU time answers no request.
                note(
                    ALL,
                    &sum(match name {
                        "rps_per_gpu" => |of| of.answered > 0,
                        "trained_per_gpu" => |of| !of.trained.is_zero(),
                        _ => |_| true,
                    }),
                );
            }
        }
        let late = late.into_iter().filter(|(_, late)| !late.is_empty());
        figures.extend(late.map(|(name, late)| ((name, LATE_BY_FUNCTION), mean(late))));
        self.by_seed.push(figures);
    }

    /// The mean over those seeds that have the figure.
    fn mean(&self, function: &str, name: &'static str) -> Option<f64> {
        let key = (function.to_owned(), name);
        let values: Vec<f64> = self.by_seed.iter().filter_map(|seed| seed.get(&key).copied()).collect();
        (!values.is_empty()).then(|| mean(values))
    }

    fn functions(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.total.functions.iter().map(|function| function.name.as_str()).collect();
        if names.len() > 1 {
            names.push(ALL);
        }
        names
    }

    fn paper(&self) -> Option<&PaperText> {
        self.case.scenario.paper.as_ref()
    }
}

/// One row per case and function.
fn rows(runs: &[CaseRun]) -> Vec<Map<String, Value>> {
    let row = |run: &CaseRun, function: &str| {
        let mut row = Map::new();
        row.insert("case".to_owned(), run.case.name().into());
        row.insert("function".to_owned(), function.into());
        for (name, _) in FIGURES {
            row.insert(name.to_owned(), json!(run.mean(function, name).map(rounded)));
        }
        row
    };
    runs.iter().flat_map(|run| run.functions().into_iter().map(move |function| row(run, function))).collect()
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// A case beside its counterpart: the case with the option that its axis is compared with, and with the same other options.
struct Beside<'a> {
    case: String,
    against: String,
    function: &'a str,
    figure: &'static str,
    paired: Paired,
}

fn compared(runs: &[CaseRun]) -> Vec<Beside<'_>> {
    let mut all = Vec::new();
    for run in runs {
        for (index, axis) in run.case.scenario.axis.iter().enumerate() {
            let Some(against) = axis.against.as_ref().filter(|against| **against != run.case.options[index])
            else {
                continue;
            };
            let mut options = run.case.options.clone();
            options[index].clone_from(against);
            let Some(other) = runs.iter().find(|other| other.case.options == options) else { continue };
            for function in run.functions() {
                for (figure, less_is_better) in FIGURES {
                    let key = (function.to_owned(), figure);
                    let pair = |(other, run): (&BTreeMap<_, f64>, &BTreeMap<_, f64>)| {
                        Some((*other.get(&key)?, *run.get(&key)?))
                    };
                    let seeds = other.by_seed.iter().zip(&run.by_seed);
                    let pairs: Vec<(f64, f64)> = seeds.filter_map(pair).collect();
                    if let Some(paired) = Paired::new(&pairs, less_is_better).filter(|_| !pairs.is_empty()) {
                        let (case, against) = (run.case.name(), other.case.name());
                        all.push(Beside { case, against, function, figure, paired });
                    }
                }
            }
        }
    }
    all
}

/// Published numbers beside ours, one row each.
fn published(runs: &[CaseRun]) -> Vec<Map<String, Value>> {
    let mut rows = Vec::new();
    for row in runs.first().and_then(CaseRun::paper).iter().flat_map(|paper| &paper.row) {
        let find = |case: &Vec<String>| runs.iter().find(|run| run.case.options == *case);
        let Some(run) = find(&row.case) else { continue };
        let function =
            row.function.as_deref().unwrap_or_else(|| run.functions().last().copied().unwrap_or(ALL));
        for (name, published) in &row.figures {
            let Some((name, _)) = FIGURES.into_iter().find(|(known, _)| known == name) else { continue };
            let ours = run.mean(function, name);
            let ours = match &row.to {
                None => ours,
                Some(to) => {
                    ours.zip(find(to).and_then(|to| to.mean(function, name))).map(|(one, to)| one / to)
                }
            };
            let to = row.to.as_ref().map_or_else(|| "-".to_owned(), |to| to.join("/"));
            let case = run.case.name();
            rows.push(Map::from_iter([
                ("case".to_owned(), json!(case)),
                ("ratio_to".to_owned(), json!(to)),
                ("function".to_owned(), json!(function)),
                ("figure".to_owned(), json!(name)),
                ("paper".to_owned(), json!(published)),
                ("ours".to_owned(), json!(ours.map(rounded))),
            ]));
        }
    }
    rows
}

/// Published numbers beside ours, and the numbers without a reproduction; empty for a scenario without published numbers.
pub fn paper(runs: &[CaseRun]) -> String {
    let Some(paper) = runs.first().and_then(CaseRun::paper) else { return String::new() };
    let mut text = format!("paper: {}\n", paper.source);
    let rows = published(runs);
    if !rows.is_empty() {
        text.push_str(&columns(&rows));
    }
    for missing in &paper.missing {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "not reproduced: {missing}");
    }
    text
}

/// All cases, the comparisons and the published numbers.
pub fn text(runs: &[CaseRun]) -> String {
    let mut text = columns(&rows(runs));
    let enough = runs.iter().all(|run| run.by_seed.len() >= VERDICT_SEEDS);
    if !enough {
        let _ = writeln!(text, "no verdicts: they need {VERDICT_SEEDS} seeds");
    }
    let mut last = String::new();
    for Beside { case, against, function, figure, paired } in compared(runs).iter().filter(|_| enough) {
        let head = format!("{case} against {against}, {function}");
        if head != last {
            let _ = writeln!(text, "{head}");
            last = head;
        }
        let _ = writeln!(text, "  {figure:<12} {}", paired.text());
    }
    text + &paper(runs)
}

/// The same as one JSON object.
pub fn json(runs: &[CaseRun]) -> Value {
    let enough = runs.iter().all(|run| run.by_seed.len() >= VERDICT_SEEDS);
    let beside = |one: &Beside<'_>| {
        json!({"case": one.case, "against": one.against, "function": one.function, "figure": one.figure,
               "difference": one.paired})
    };
    let compared: Vec<_> = compared(runs).iter().filter(|_| enough).map(beside).collect();
    let paper = runs
        .first()
        .and_then(CaseRun::paper)
        .map(|paper| json!({"source": paper.source, "missing": paper.missing, "rows": published(runs)}));
    json!({"cases": rows(runs), "compared": compared, "paper": paper})
}

/// Kernels over time as comma-separated values.
pub fn series(runs: &[CaseRun]) -> String {
    let mut text = "case,at_s,function,instance,kernels\n".to_owned();
    for run in runs {
        for sample in &run.total.series {
            let function = run.total.functions.get(sample.function).map_or("", |of| of.name.as_str());
            let (case, at) = (run.case.name(), sample.at.as_secs_f64());
            let _ = writeln!(text, "{case},{at},{function},{},{}", sample.instance.number(), sample.kernels);
        }
    }
    text
}
