//! Comparison of two policies on the same seeds, with its standard error.
//!
//! Two runs of a seed have the same requests, so the seed's effect on both falls out of the difference of the two. The differences
//! of a figure, one per seed, have a mean and a standard error of it: their standard deviation over the square root of their
//! number. The mean of ever more seeds would be within about two standard errors of it 19 times in 20.

use super::columns;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The verdict of a figure's differences about a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better, by more than two standard errors.
    Better,
    /// Within two standard errors of the other.
    Level,
    /// Worse, by more than two standard errors.
    Worse,
    /// One seed has no standard error.
    OneSeed,
}

impl Verdict {
    const fn words(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Level => "level",
            Self::Worse => "worse",
            Self::OneSeed => "one seed, so no standard error,",
        }
    }
}

/// The differences of a figure: a policy minus another, seed by seed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Paired {
    /// Mean difference, in percent of the other's mean.
    pub mean_percent: f64,
    /// Standard error of the mean difference; none with one seed.
    pub standard_error_percent: Option<f64>,
    /// The verdict from the mean and its error.
    pub verdict: Verdict,
}

impl Paired {
    /// Ratios of pairs `(other, policy)`, one per seed. None where the other's mean is 0.
    pub fn new(pairs: &[(f64, f64)], less_is_better: bool) -> Option<Self> {
        let n = pairs.len() as f64;
        let others = pairs.iter().map(|(other, _)| other).sum::<f64>();
        if others == 0.0 {
            return None;
        }
        let differences = || pairs.iter().map(|(other, policy)| (policy - other) * 100.0 * n / others);
        let mean = differences().sum::<f64>() / n;
        let squares = differences().map(|one| (one - mean).powi(2)).sum::<f64>();
        let error = (pairs.len() > 1).then(|| (squares / (n - 1.0) / n).sqrt());
        let better = if less_is_better { -mean } else { mean };
        let verdict = match error {
            None => Verdict::OneSeed,
            Some(error) if better > 2.0 * error => Verdict::Better,
            Some(error) if better < -2.0 * error => Verdict::Worse,
            Some(_) => Verdict::Level,
        };
        Some(Self { mean_percent: mean, standard_error_percent: error, verdict })
    }

    /// The mean difference, its standard error and the verdict.
    pub fn text(&self) -> String {
        let (mean, words) = (self.mean_percent, self.verdict.words());
        match self.standard_error_percent {
            None => format!("{mean:+.3} %"),
            Some(error) if error < 0.1 => format!("{mean:+.3} ± {error:.3} % {words}"),
            Some(error) => format!("{mean:+.1} ± {error:.1} % {words}"),
        }
    }
}

/// A policy of ours beside another policy, input by input.
#[derive(Debug, Serialize)]
pub struct Compared {
    /// Name of the policy; "ours" unless said otherwise.
    pub policy: &'static str,
    /// Name of the other policy.
    pub with: String,
    /// The figures that are compared, and whether less is better.
    #[serde(skip)]
    pub figures: &'static [(&'static str, bool)],
    /// One per input.
    pub cells: Vec<ComparedCell>,
    /// For each figure, in how many of the inputs ours is not worse than the other as the rows give them: of all seeds
    /// together, and without any tolerance.
    pub not_worse: BTreeMap<&'static str, usize>,
    /// How many comparisons had which verdict.
    pub verdicts: BTreeMap<Verdict, usize>,
}

/// Ours beside another policy on one input.
#[derive(Debug, Serialize)]
pub struct ComparedCell {
    /// The columns that identify this input.
    #[serde(flatten)]
    pub input: Map<String, Value>,
    /// Ours minus the other, by figure.
    #[serde(flatten)]
    pub figures: BTreeMap<&'static str, Paired>,
}

/// A policy's figures of one input.
#[derive(Debug)]
pub struct Run {
    /// Figure of all seeds together.
    pub together: Map<String, Value>,
    /// Figure of each seed.
    pub by_seed: Vec<Map<String, Value>>,
}

impl Compared {
    /// Nothing compared yet.
    pub fn new(with: impl Into<String>, figures: &'static [(&'static str, bool)]) -> Self {
        let verdicts = [Verdict::Better, Verdict::Level, Verdict::Worse].map(|verdict| (verdict, 0)).into();
        Self {
            policy: "ours",
            with: with.into(),
            figures,
            cells: Vec::new(),
            not_worse: BTreeMap::new(),
            verdicts,
        }
    }

    /// The same of a policy of another name.
    #[must_use]
    pub fn of(self, policy: &'static str) -> Self {
        Self { policy, ..self }
    }

    /// One more input.
    pub fn push(&mut self, input: Map<String, Value>, other: &Run, ours: &Run) {
        let mut figures = BTreeMap::new();
        for &(name, less_is_better) in self.figures {
            let of = |row: &Map<String, Value>| row.get(name).and_then(Value::as_f64).unwrap_or(0.0);
            let (theirs, mine) = (of(&other.together), of(&ours.together));
            let not_worse = if less_is_better { mine <= theirs } else { mine >= theirs };
            *self.not_worse.entry(name).or_default() += usize::from(not_worse);
            let pairs: Vec<_> = other.by_seed.iter().map(of).zip(ours.by_seed.iter().map(of)).collect();
            if let Some(paired) = Paired::new(&pairs, less_is_better) {
                *self.verdicts.entry(paired.verdict).or_default() += 1;
                figures.insert(name, paired);
            }
        }
        self.cells.push(ComparedCell { input, figures });
    }

    /// A line per input, then the summary.
    pub fn table(&self) -> String {
        let line = |cell: &ComparedCell| {
            let figures =
                cell.figures.iter().map(|(name, paired)| ((*name).to_owned(), paired.text().into()));
            cell.input.clone().into_iter().chain(figures).collect()
        };
        let mut text = format!("{} minus {}, seed by seed: mean ± standard error\n", self.policy, self.with);
        text.push_str(&columns(&self.cells.iter().map(line).collect::<Vec<_>>()));
        let all = self.verdicts.values().sum::<usize>();
        let verdicts: Vec<_> =
            self.verdicts.iter().map(|(verdict, n)| format!("{} in {n}", verdict.words())).collect();
        text.push_str(&format!("\nby seed, of {all} comparisons: {}\n", verdicts.join(", ")));
        let not_worse: Vec<_> = self.not_worse.iter().map(|(name, n)| format!("{name} in {n}")).collect();
        let cells = self.cells.len();
        let not_worse = not_worse.join(", ");
        text.push_str(&format!("all seeds together, not worse, of {cells} cells: {not_worse}\n"));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::row;
    use super::*;

    #[test]
    fn a_difference_counts_from_two_standard_errors() {
        // Differences 1, 2, 3 on a mean of 20: mean 10 %, standard deviation 5 %, standard error 5 / sqrt(3).
        let pairs = [(10.0, 11.0), (20.0, 22.0), (30.0, 33.0)];
        let more = Paired::new(&pairs, false).unwrap();
        assert!((more.mean_percent - 10.0).abs() < 1e-9);
        assert!((more.standard_error_percent.unwrap() - 5.0 / 3.0_f64.sqrt()).abs() < 1e-9);
        assert_eq!(more.text(), "+10.0 ± 2.9 % better");
        assert_eq!(Paired::new(&pairs, true).unwrap().verdict, Verdict::Worse);
        let level = Paired::new(&[(10.0, 11.0), (20.0, 19.5), (30.0, 30.2)], false).unwrap();
        assert_eq!(level.verdict, Verdict::Level);
        assert_eq!(Paired::new(&[(10.0, 10.0); 2], false).unwrap().text(), "+0.000 ± 0.000 % level");
        assert_eq!(Paired::new(&[(0.0, 1.0); 2], false), None);
    }

    #[test]
    fn one_seed_has_no_standard_error() {
        let one = Paired::new(&[(200.0, 201.0)], false).unwrap();
        assert_eq!((one.standard_error_percent, one.verdict), (None, Verdict::OneSeed));
        assert_eq!(one.text(), "+0.500 %");
    }

    /// A figure worse by a hair over all seeds together is worse, with any standard error.
    #[test]
    fn nothing_is_tolerated_in_the_sum() {
        let run = |together: f64, seeds: [f64; 2]| Run {
            together: row(&[("p95_ms", together.into())]),
            by_seed: seeds.map(|one| row(&[("p95_ms", one.into())])).to_vec(),
        };
        let mut compared = Compared::new("paper", &[("p95_ms", true)]);
        compared.push(row(&[("load", 1.0.into())]), &run(10.0, [9.0, 11.0]), &run(10.0001, [11.0, 9.0002]));
        compared.push(row(&[("load", 2.0.into())]), &run(10.0, [9.0, 11.0]), &run(10.0, [9.0, 11.0]));
        assert_eq!(compared.not_worse["p95_ms"], 1);
        assert!(compared.table().contains("of 2 comparisons: better in 0, level in 2, worse in 0"));
        let json = serde_json::to_value(&compared).unwrap();
        assert_eq!(json["cells"][0]["p95_ms"]["verdict"], "level");
        assert_eq!(json["verdicts"]["level"], 2);
    }
}
