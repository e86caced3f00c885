//! The strategies on made-up functions, beside exhaustive search; killed and resumed after every trial; and given
//! functions that no point of suits, or trials that fail.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]

mod common;

use common::fast_gshare;
use gshare_core::profile::{ProfileError, ProfilePoint, RequestRate, Setting};
use gshare_core::{Duration, Quota, SmShare};
use gshare_profile::planner::{
    EfficacySearch, Grid, InferenceChoice, Journal, JournalError, Measurement, Outcome, PlanError, Planner,
    Step, TrainingSearch, Trial,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::BTreeMap;

/// A function: time of a batch in seconds, or why it cannot run.
type Function<'a> = dyn Fn(Setting) -> Result<f64, String> + 'a;

fn trial(function: &Function<'_>, setting: Setting) -> Trial {
    match function(setting) {
        Ok(seconds) => {
            let exec = Duration::from_nanos((seconds * 1e9) as u64);
            let throughput = f64::from(setting.batch) / seconds;
            let Setting { batch, sm, quota } = setting;
            let point = ProfilePoint::measured(sm, quota, batch, throughput, exec, exec).unwrap();
            let load = Some(Duration::from_millis(100 + u64::from(batch)));
            Trial::done(Measurement { point, load })
        }
        Err(reason) => Trial::failed(setting, reason),
    }
}

/// Runs a strategy to its end. The journal takes no setting twice, so this shows that none is asked for twice.
fn drive<P: Planner>(
    planner: &P,
    function: &Function<'_>,
    mut journal: Journal,
) -> (Result<P::Answer, PlanError>, Journal) {
    for _ in 0..10_000 {
        match planner.next(&journal) {
            Ok(Step::Measure(setting)) => journal.add(trial(function, setting)).unwrap(),
            Ok(Step::Done(answer)) => return (Ok(answer), journal),
            Err(error) => return (Err(error), journal),
        }
    }
    panic!("no end")
}

fn settings(journal: &Journal) -> Vec<(u32, u16)> {
    journal.trials().iter().map(|trial| (trial.setting.batch, trial.setting.sm.get() / 100)).collect()
}

/// A function from a table in milliseconds: for batch sizes, their times at some shares.
fn tabled(rows: &[(u32, &[(u16, f64)])]) -> impl Fn(Setting) -> Result<f64, String> + use<> {
    let times = |(batch, row): &(u32, &[(u16, f64)])| {
        let batch = *batch;
        row.iter().map(move |(sm, ms)| ((batch, sm * 100), ms / 1e3)).collect::<Vec<_>>()
    };
    let table: BTreeMap<_, _> = rows.iter().flat_map(times).collect();
    move |setting| {
        let found = table.get(&(setting.batch, setting.sm.get())).copied();
        Ok(found.unwrap_or_else(|| panic!("({setting}) should not have been asked for")))
    }
}

/// Dilu's published times in ms of `ResNet152` on an A100: batches of 1 to 32, shares of 10 to 100 %.
const RESNET152: [(u32, [f64; 10]); 6] = [
    (1, [28.1, 21.2, 19.9, 19.4, 20.0, 20.6, 19.6, 19.4, 19.8, 19.6]),
    (2, [36.9, 22.2, 21.4, 20.3, 20.9, 21.2, 20.5, 20.1, 21.0, 20.4]),
    (4, [50.7, 28.4, 25.2, 24.2, 23.8, 24.9, 24.0, 24.5, 23.5, 23.4]),
    (8, [70.2, 38.1, 28.7, 26.0, 25.7, 26.3, 24.8, 25.0, 25.2, 25.9]),
    (16, [104.2, 55.5, 40.0, 32.3, 27.1, 28.4, 26.3, 26.1, 25.9, 25.8]),
    (32, [177.9, 94.2, 67.3, 54.9, 44.8, 42.1, 40.2, 38.9, 37.9, 32.2]),
];

/// The example of the essay.
#[test]
fn efficacy_search_the_example_of_the_essay() {
    let rows: Vec<_> = RESNET152
        .iter()
        .map(|(batch, row)| (*batch, (1..=10u16).map(|step| step * 10).zip(*row).collect::<Vec<_>>()))
        .collect();
    let rows: Vec<_> = rows.iter().map(|(batch, row)| (*batch, row.as_slice())).collect();
    let planner = EfficacySearch::new(Duration::from_millis(40)).unwrap();
    let (choice, journal) = drive(&planner, &tabled(&rows), Journal::default());
    let choice = choice.unwrap();
    assert_eq!((choice.point.batch, choice.point.sm.get()), (16, 3_000));
    assert_eq!(choice.limit.get(), 6_000, "twice the request");
    assert_eq!(choice.trials, journal.trials().len());
    assert!(choice.trials <= 10, "{:?}", settings(&journal));
}

/// A time that hardly depends on the batch, as with small vision models: the largest batch on the smallest share is best, and far from
/// where doubling from batch 1 stops.
#[test]
fn efficacy_search_jumps_where_the_batch_is_free() {
    let function = |setting: Setting| {
        let wobble = 0.001 * f64::from(setting.batch.trailing_zeros() * 7 % 5) / 4.0;
        Ok(0.014 + wobble + 0.000_001 * f64::from(setting.batch) / setting.sm.as_fraction())
    };
    let planner = EfficacySearch::new(Duration::from_millis(20)).unwrap();
    let (choice, journal) = drive(&planner, &function, Journal::default());
    let choice = choice.unwrap();
    assert_eq!((choice.point.batch, choice.point.sm.get()), (32, 1_000));
    assert!(journal.trials().len() <= 5, "{:?}", settings(&journal));
}

#[test]
fn efficacy_search_says_which_slo_no_point_meets() {
    let function = |setting: Setting| Ok(0.020 * f64::from(setting.batch) / setting.sm.as_fraction());
    let planner = EfficacySearch::new(Duration::from_millis(19)).unwrap();
    let (found, journal) = drive(&planner, &function, Journal::default());
    assert_eq!(
        found.unwrap_err().to_string(),
        "no setting has a p95 of at most 19ms; the shortest is 20ms, at (batch 1, 100% of the SMs, 100% of the time)"
    );
    assert!(settings(&journal).contains(&(1, 100)), "all SMs were tried before it was said");
    let planner = EfficacySearch::new(Duration::from_millis(20)).unwrap();
    let choice = drive(&planner, &function, Journal::default()).0.unwrap();
    assert_eq!(
        (choice.point.sm, choice.limit),
        (SmShare::WHOLE, SmShare::WHOLE),
        "the limit is at most the whole"
    );
}

#[test]
fn a_trial_that_fails_is_never_chosen_and_never_waited_for() {
    let planner = EfficacySearch::new(Duration::from_millis(100)).unwrap();
    let (found, _) = drive(&planner, &|_| Err("out of memory".to_owned()), Journal::default());
    assert_eq!(
        found.unwrap_err().to_string(),
        "(batch 1, 100% of the SMs, 100% of the time) failed, and without it there is no answer: out of memory"
    );
    let big = |setting: Setting| match setting.batch {
        0..=4 => Ok(0.001 * f64::from(setting.batch) / setting.sm.as_fraction()),
        _ => Err("out of memory".to_owned()),
    };
    let choice = drive(&planner, &big, Journal::default()).0.unwrap();
    assert!(choice.point.batch <= 4);
    let training = TrainingSearch::new(8).unwrap();
    let found = drive(&training, &big, Journal::default()).0;
    assert!(matches!(found, Err(PlanError::TrialFailed { setting, .. }) if setting.sm == SmShare::WHOLE));
    let grid = fast_gshare(4);
    let half = |setting: Setting| if setting.sm.get() < 2_400 { Err("hung".to_owned()) } else { Ok(0.01) };
    let outcome = drive(&grid, &half, Journal::default()).0.unwrap();
    assert_eq!((outcome.table.points().len(), outcome.failed.len()), (25, 10), "holes are named");
    let nothing = drive(&grid, &|_| Err("hung".to_owned()), Journal::default()).0;
    assert_eq!(nothing.unwrap_err(), PlanError::Profile(ProfileError::Empty));
}

/// FaST-GShare, section 3.2 and Figure 8: 7 x 5 points.
#[test]
fn the_grid_measures_each_point_once() {
    let grid = fast_gshare(1);
    let function = |setting: Setting| Ok(0.01 / setting.sm.as_fraction() / setting.quota.as_fraction());
    let (outcome, journal) = drive(&grid, &function, Journal::default());
    let outcome = outcome.unwrap();
    assert_eq!((journal.trials().len(), outcome.table.points().len(), grid.len()), (35, 35, 35));
    assert!(outcome.failed.is_empty());
}

/// The example of the training search's essay.
#[test]
fn training_search_the_example_of_the_essay() {
    let function = |setting: Setting| Ok(1.0 / setting.sm.as_fraction().min(0.6));
    let (choice, journal) = drive(&TrainingSearch::new(8).unwrap(), &function, Journal::default());
    let choice = choice.unwrap();
    assert_eq!((choice.request.get(), choice.limit.get(), choice.trials), (5_000, 6_000, 9));
    let shares: Vec<_> = settings(&journal).into_iter().map(|(_, sm)| sm).collect();
    assert_eq!(shares, [100, 50, 25, 35, 40, 45, 75, 60, 55]);
    assert_eq!(choice.exclusive, RequestRate::from_milli(4_800));
}

/// Dilu, section 3.2, stops within 2 % of the aim: never, where no share lies there.
#[test]
fn training_search_ends_where_the_band_is_empty() {
    let function = |setting: Setting| Ok(if setting.sm.get() > 5_500 { 1.0 } else { 10.0 });
    let choice = drive(&TrainingSearch::new(1).unwrap(), &function, Journal::default()).0.unwrap();
    assert_eq!((choice.request.get(), choice.limit.get()), (6_000, 6_000));
}

#[test]
fn a_strategy_that_cannot_be_is_refused_by_field() {
    let field = |error: PlanError| match error {
        PlanError::Config(error) => error.field,
        other => panic!("{other}"),
    };
    let sm = |percent| SmShare::from_percent(percent).unwrap();
    assert_eq!(field(EfficacySearch::new(Duration::ZERO).unwrap_err()), "max_exec");
    let search = || EfficacySearch::new(Duration::from_millis(1)).unwrap();
    assert_eq!(field(search().with_batches(vec![]).unwrap_err()), "batches");
    assert_eq!(field(search().with_batches(vec![0, 1]).unwrap_err()), "batches");
    assert_eq!(field(search().with_batches(vec![2, 2]).unwrap_err()), "batches");
    assert_eq!(field(search().with_shares(vec![]).unwrap_err()), "shares");
    assert_eq!(field(search().with_shares(vec![sm(0), sm(7)]).unwrap_err()), "shares");
    assert_eq!(field(search().with_shares(vec![sm(9), sm(7)]).unwrap_err()), "shares");
    assert_eq!(field(search().with_max_trials(1).unwrap_err()), "max_trials");
    assert_eq!(field(TrainingSearch::new(0).unwrap_err()), "batch");
    assert_eq!(field(Grid::new(vec![], vec![Quota::WHOLE], vec![1]).unwrap_err()), "sms");
    assert_eq!(field(Grid::new(vec![sm(5)], vec![Quota::WHOLE], vec![2, 2]).unwrap_err()), "batches");
    assert_eq!(field(Grid::new(vec![sm(5)], vec![Quota::ZERO], vec![2]).unwrap_err()), "quotas");
}

#[test]
fn a_journal_takes_no_setting_twice_and_no_measurement_of_another() {
    let mut journal = Journal::default();
    let at = |batch| Setting { batch, sm: SmShare::WHOLE, quota: Quota::WHOLE };
    let done = trial(&|_| Ok(0.01), at(1));
    journal.add(done.clone()).unwrap();
    let failed = Trial::failed(at(1), "crashed".to_owned());
    assert_eq!(journal.add(failed), Err(JournalError::Duplicate { setting: at(1) }));
    let moved = Trial { setting: at(2), outcome: done.outcome.clone() };
    assert_eq!(journal.add(moved), Err(JournalError::Mismatch { asked: at(2), measured: at(1) }));
    assert_eq!(journal.trials(), [done]);
}

/// A function: cost per batch and per request, SMs it can use, some noise, and settings that fail.
#[derive(Debug, Clone)]
struct Made {
    fixed: f64,
    per_request: f64,
    usable: f64,
    noise: Vec<f64>,
    fails: Vec<bool>,
}

impl Made {
    fn run(&self, setting: Setting) -> Result<f64, String> {
        let number = setting.batch as usize * 131 + usize::from(setting.sm.get()) / 100 * 17;
        let number = number + usize::from(setting.quota.get());
        if self.fails.get(number % 97) == Some(&true) {
            return Err("hung, and was ended".to_owned());
        }
        let sm = setting.sm.as_fraction().min(self.usable);
        let seconds = self.fixed + self.per_request * f64::from(setting.batch) / sm;
        Ok(seconds * self.noise[number % self.noise.len()] / setting.quota.as_fraction())
    }
}

fn made(noise: f64, failing: bool) -> impl Strategy<Value = Made> {
    let fails = prop::collection::vec(prop::bool::weighted(if failing { 0.2 } else { 0.0 }), 97);
    let noise = prop::collection::vec(1.0 - noise..=1.0 + noise, 31);
    (0.001f64..0.05, 0.0001f64..0.01, 0.2f64..1.0, noise, fails).prop_map(
        |(fixed, per_request, usable, noise, fails)| Made { fixed, per_request, usable, noise, fails },
    )
}

/// The most effective point within the bound, by looking at all of them.
fn exhaustive(made: &Made, bound: Duration) -> Option<ProfilePoint> {
    let settings = (0..6).flat_map(|power| {
        (1..=10).map(move |step| Setting {
            batch: 1 << power,
            sm: SmShare::from_percent(step * 10).unwrap(),
            quota: Quota::WHOLE,
        })
    });
    let points = settings.filter_map(|setting| match trial(&|setting| made.run(setting), setting).outcome {
        Outcome::Measured(measurement) => Some(measurement.point),
        _ => None,
    });
    points.filter(|point| point.p95 <= bound).max_by(|a, b| a.cmp_efficacy(b))
}

/// Kills a run after each of its trials, reads the journal back and goes on: the same trials in the same order, the
/// same answer; and killed within a trial, that one is asked for again.
fn resumes<P: Planner<Answer: std::fmt::Debug>>(
    planner: &P,
    function: &Function<'_>,
) -> Result<(), TestCaseError> {
    let (answer, journal) = drive(planner, function, Journal::default());
    for kept in 0..=journal.trials().len() {
        let read: Journal = journal.trials()[..kept].to_vec().try_into().unwrap();
        if let Some(next) = journal.trials().get(kept) {
            match planner.next(&read) {
                Ok(Step::Measure(setting)) => prop_assert_eq!(setting, next.setting),
                _ => prop_assert!(false, "it ended early"),
            }
        }
        let (again, whole) = drive(planner, function, read);
        prop_assert_eq!(&whole, &journal);
        prop_assert_eq!(format!("{again:?}"), format!("{answer:?}"));
    }
    Ok(())
}

/// Over 400 functions of a fixed cost and a cost per request that SMs divide, drawn with one seed: it finds an answer wherever there
/// is one, and loses little on average.
#[test]
fn efficacy_search_comes_near_the_optimum() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut lost, mut found_best, mut with_answer) = (0.0, 0, 0);
    for _ in 0..400 {
        let inputs = (made(0.0, false), 5u64..200).new_tree(&mut runner).unwrap();
        let (made, millis) = inputs.current();
        let bound = Duration::from_millis(millis);
        let planner = EfficacySearch::new(bound).unwrap();
        let (found, _) = drive(&planner, &|setting| made.run(setting), Journal::default());
        let optimum = exhaustive(&made, bound);
        assert_eq!(found.is_ok(), optimum.is_some(), "{made:?} within {bound}");
        if let (Ok(choice), Some(optimum)) = (found, optimum) {
            let efficacy = |point: &ProfilePoint| point.throughput.as_f64() / point.sm.as_fraction();
            let part = efficacy(&choice.point) / efficacy(&optimum);
            lost += 1.0 - part;
            found_best += usize::from(part > 1.0 - 1e-9);
            with_answer += 1;
        }
    }
    let mean = lost / f64::from(with_answer);
    assert!(mean < 0.015, "{mean:.4} lost on average");
    assert!(found_best * 10 >= with_answer as usize * 9, "the optimum in {found_best} of {with_answer}");
}

proptest! {
    /// For any function: an answer is a measured point within the bound, the best of those measured, and at
    /// most the whole grid was tried; an error is that even all SMs are too slow, or fail.
    #[test]
    fn efficacy_search_never_answers_with_a_point_that_is_too_slow(made in made(0.3, true), millis in 5u64..200) {
        let bound = Duration::from_millis(millis);
        let planner = EfficacySearch::new(bound).unwrap();
        let (found, journal) = drive(&planner, &|setting| made.run(setting), Journal::default());
        prop_assert!(journal.trials().len() <= 10);
        let measured = journal.trials().iter().filter_map(|trial| match &trial.outcome {
            Outcome::Measured(measurement) => Some(measurement.point),
            _ => None,
        });
        let best = measured.filter(|point| point.p95 <= bound).max_by(|a, b| a.cmp_efficacy(b));
        match found {
            Ok(InferenceChoice { point, trials, .. }) => {
                prop_assert!(point.p95 <= bound);
                prop_assert_eq!(point.cmp_efficacy(&best.unwrap()), std::cmp::Ordering::Equal);
                prop_assert_eq!(trials, journal.trials().len());
            }
            Err(_) => prop_assert!(best.is_none()),
        }
    }

    /// Where throughput grows with the SMs, the shares are the smallest of the grid that are enough.
    #[test]
    fn training_search_finds_the_smallest_shares(made in made(0.0, false)) {
        let planner = TrainingSearch::new(8).unwrap();
        let choice = drive(&planner, &|setting| made.run(setting), Journal::default()).0.unwrap();
        let at = |step: u16| Setting {
            batch: 8, sm: SmShare::from_percent(step * 5).unwrap(), quota: Quota::WHOLE,
        };
        let throughput = |step| match trial(&|setting| made.run(setting), at(step)).outcome {
            Outcome::Measured(measurement) => measurement.point.throughput.as_milli(),
            _ => 0,
        };
        let enough = |step, percent: u64| throughput(step) * 100 >= throughput(20) * percent;
        let smallest = |percent| (1..=20).find(|&step| enough(step, percent)).unwrap();
        prop_assert_eq!((choice.request.get(), choice.limit.get()), (smallest(78) * 500, smallest(98) * 500));
        prop_assert!(choice.trials <= 11);
    }

    /// A run that was killed goes on where it was: no trial lost, none doubled.
    #[test]
    fn a_killed_run_goes_on_where_it_was(made in made(0.3, true), millis in 5u64..200) {
        let function = |setting: Setting| made.run(setting);
        resumes(&EfficacySearch::new(Duration::from_millis(millis)).unwrap(), &function)?;
        resumes(&TrainingSearch::new(8).unwrap(), &function)?;
        resumes(&fast_gshare(2), &function)?;
    }
}

/// The journal as it is written: one JSON value, checked when it is read.
#[cfg(feature = "serde")]
#[test]
fn a_journal_is_read_back_as_it_was_written() {
    let function = |setting: Setting| match setting.batch {
        16 => Err("out of memory".to_owned()),
        batch => Ok(0.002 * f64::from(batch) / setting.sm.as_fraction()),
    };
    let planner = EfficacySearch::new(Duration::from_millis(200)).unwrap();
    let (_, journal) = drive(&planner, &function, Journal::default());
    let text = serde_json::to_string(&journal).unwrap();
    assert_eq!(serde_json::from_str::<Journal>(&text).unwrap(), journal);
    let line = serde_json::to_string(&journal.trials()[0]).unwrap();
    let twice = serde_json::from_str::<Journal>(&format!("[{line},{line}]")).unwrap_err();
    assert!(twice.to_string().contains("was tried before"));
}
