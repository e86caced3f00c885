//! Cases of a scenario: axes of variation, figures of each case, and published numbers.

use super::error::ScenarioError;
use super::{Scenario, change, parsed};
use crate::world::FunctionOutcome;
use gshare_core::Duration;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The most cases of a scenario; more cases would be a search.
const MOST_CASES: usize = 1_000;

/// An axis of variation.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct AxisText {
    /// The name, unlike the names of the other axes.
    pub name: String,
    /// The option to which the other options are compared.
    pub against: Option<String>,
    /// The options to choose from; at least one.
    pub option: Vec<OptionText>,
}

/// A choice of an axis.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct OptionText {
    /// The name, unlike the names of the other options of the axis.
    pub name: String,
    /// Keys of the scenario with their values in this case: `"policies.scaler" = "lazy"`.
    #[serde(default)]
    pub set: BTreeMap<String, toml::Value>,
}

/// Published numbers, and the limits of their reproduction.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PaperText {
    /// The paper, with section and figure.
    pub source: String,
    /// Sentences about numbers that cannot be reproduced here, with the reasons.
    #[serde(default)]
    pub missing: Vec<String>,
    /// The published numbers.
    #[serde(default)]
    pub row: Vec<PaperRow>,
}

/// Published numbers of one case.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PaperRow {
    /// The case: an option of each axis, in the order of the axes.
    pub case: Vec<String>,
    /// The case to which the numbers are ratios; without a case they are absolute.
    pub to: Option<Vec<String>>,
    /// The function; without a name the numbers cover all functions together.
    pub function: Option<String>,
    /// The numbers by name of the figure, see [`FIGURES`].
    pub figures: BTreeMap<String, f64>,
}

/// A combination of options.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Case {
    /// An option of each axis, in the order of the axes.
    pub options: Vec<String>,
    /// The scenario with the keys of these options.
    pub scenario: Scenario,
}

impl Case {
    /// The options with a slash between them.
    pub fn name(&self) -> String {
        self.options.join("/")
    }
}

/// The figures of a function, and whether a lower figure is better.
pub const FIGURES: [(&str, bool); 12] = [
    ("rps", false),
    ("svr_percent", true),
    ("svr_mean_percent", true),
    ("mean_ms", true),
    ("p50_ms", true),
    ("p95_ms", true),
    ("p99_ms", true),
    ("cold_starts", true),
    ("trained_s", false),
    ("gpu_held_s", true),
    ("rps_per_gpu", false),
    ("trained_per_gpu", false),
];

/// A figure of a function's outcome under load of this `length` in all: answered requests per second, the part of the requests
/// above the SLO, latencies, requests with a wait for a start, completed training, held GPU time, and answers and training per
/// second of held GPU time. `None` means the figure does not apply to the function.
#[expect(clippy::cast_precision_loss, reason = "a report")]
pub fn figure(of: &FunctionOutcome, name: &str, length: Duration) -> Option<f64> {
    let answers = of.answered > 0;
    let ms = |time: Duration| answers.then(|| time.as_secs_f64() * 1e3);
    let per_gpu = |done: f64| (done > 0.0 && !of.held.is_zero()).then(|| done / of.held.as_secs_f64());
    match name {
        "rps" => answers.then(|| of.answered as f64 / length.as_secs_f64()),
        "svr_percent" => of.attainment().map(|met| 100.0 - 100.0 * met),
        "mean_ms" => ms(of.mean()),
        "p50_ms" => ms(of.percentile(50)),
        "p95_ms" => ms(of.percentile(95)),
        "p99_ms" => ms(of.percentile(99)),
        "cold_starts" => answers.then_some(of.cold_starts as f64),
        "trained_s" => (!of.trained.is_zero()).then(|| of.trained.as_secs_f64()),
        "gpu_held_s" => Some(of.held.as_secs_f64()),
        "rps_per_gpu" => per_gpu(of.answered as f64),
        "trained_per_gpu" => per_gpu(of.trained.as_secs_f64()),
        _ => None,
    }
}

impl Scenario {
    /// Reads every case of a scenario's file; a file without axes has one case. The values in `set` hold in all of them.
    ///
    /// # Errors
    /// Every error of [`Scenario::read`]; [`ScenarioError::Field`] for invalid axes and published rows, with field and bound.
    pub fn cases(path: &Path, set: &[(String, String)]) -> Result<Vec<Case>, ScenarioError> {
        let base = Self::read(path, set)?;
        base.check_axes()?;
        let read = |cause| ScenarioError::Read { path: path.to_owned(), cause };
        let root: toml::Value = toml::from_str(&std::fs::read_to_string(path).map_err(read)?)?;
        let mut combinations: Vec<Vec<&OptionText>> = vec![Vec::new()];
        for axis in &base.axis {
            let longer = |of: &Vec<_>, option| of.iter().copied().chain([option]).collect();
            combinations = combinations
                .iter()
                .flat_map(|of| axis.option.iter().map(move |option| longer(of, option)))
                .collect();
        }
        let case = |options: &Vec<&OptionText>| {
            let mut root = root.clone();
            for (key, value) in options.iter().flat_map(|option| &option.set) {
                change(&mut root, key, value.clone())?;
            }
            for (key, value) in set {
                change(&mut root, key, parsed(value))?;
            }
            let mut scenario: Self = root.try_into()?;
            scenario.folder.clone_from(&base.folder);
            Ok(Case { options: options.iter().map(|option| option.name.clone()).collect(), scenario })
        };
        combinations.iter().map(case).collect()
    }

    fn check_axes(&self) -> Result<(), ScenarioError> {
        let wrong = |field: &str, value: &str, bound: &str| Err(ScenarioError::field(field, value, bound));
        let mut cases = 1_usize;
        for (number, axis) in self.axis.iter().enumerate() {
            let field = |name: &str| format!("axis `{}`: {name}", axis.name);
            if self.axis[..number].iter().any(|other| other.name == axis.name) {
                return wrong("axis.name", &axis.name, "need names that are unlike");
            }
            if axis.option.is_empty() {
                return wrong(&field("option"), "none", "need at least one");
            }
            for (number, option) in axis.option.iter().enumerate() {
                if axis.option[..number].iter().any(|other| other.name == option.name) {
                    return wrong(&field("option.name"), &option.name, "need names that are unlike");
                }
            }
            if let Some(against) = &axis.against
                && axis.option.iter().all(|option| option.name != *against)
            {
                return wrong(&field("against"), against, "need the name of one of its options");
            }
            cases = cases.saturating_mul(axis.option.len());
        }
        if cases > MOST_CASES {
            return wrong("axis", &format!("{cases} cases"), &format!("at most {MOST_CASES}"));
        }
        for row in self.paper.iter().flat_map(|paper| &paper.row) {
            for (field, case) in [("paper.row.case", Some(&row.case)), ("paper.row.to", row.to.as_ref())] {
                let is_one = |case: &Vec<String>| {
                    case.len() == self.axis.len()
                        && case
                            .iter()
                            .zip(&self.axis)
                            .all(|(name, axis)| axis.option.iter().any(|option| option.name == *name))
                };
                if let Some(case) = case.filter(|case| !is_one(case)) {
                    return wrong(
                        field,
                        &format!("{case:?}"),
                        "need one option of each axis, in their order",
                    );
                }
            }
            if let Some(name) = &row.function
                && self.function.iter().all(|function| function.name != *name)
            {
                return wrong("paper.row.function", name, "need the name of a function");
            }
            for (name, value) in &row.figures {
                if FIGURES.iter().all(|(known, _)| known != name) {
                    let known: Vec<_> = FIGURES.iter().map(|(name, _)| *name).collect();
                    return wrong("paper.row.figures", name, &format!("need one of {}", known.join(", ")));
                }
                if !value.is_finite() || *value < 0.0 {
                    let field = format!("paper.row.figures.{name}");
                    return wrong(&field, &value.to_string(), "need a finite number of at least 0");
                }
            }
        }
        Ok(())
    }
}
