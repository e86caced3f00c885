//! Trials and whole runs against functions in virtual time: measurements, and failures.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

mod common;

use common::{Begin, Reply, Virtual, fast_gshare, simulated_gpu};
use gshare_core::profile::{ProfilePoint, ProfileTable, Setting};
use gshare_core::{BasisPoints, Duration, Quota, SmShare};
use gshare_profile::executor::ExecError;
use gshare_profile::load::Load;
use gshare_profile::planner::{EfficacySearch, Journal, Outcome, PlanError, Trial};
use gshare_profile::record::{Record, RunError, Sink, run};
use gshare_profile::trial::{Measured, TrialConfig, TrialError, measure};

const MS: fn(u64) -> Duration = Duration::from_millis;

fn setting(batch: u32, sm: u16, quota: u16) -> Setting {
    let (sm, quota) = (SmShare::from_percent(sm).unwrap(), Quota::from_percent(quota).unwrap());
    Setting { batch, sm, quota }
}

fn percent(percent: u16) -> BasisPoints {
    BasisPoints::from_percent(percent).unwrap()
}

fn measure_with(
    config: &TrialConfig,
    reply: impl FnMut(Setting, u64) -> Reply,
) -> Result<Measured, TrialError> {
    let mut executor = Virtual::new(|_| Begin::Ready(MS(700)), reply);
    measure(&mut executor, setting(4, 50, 100), config)
}

#[test]
fn a_function_that_warms_up_is_measured_once_it_is_steady() {
    // 25 slow batches, of which the first 20 look steady, then 20 ms each.
    let reply = |_, number| Reply::After(if number < 25 { MS(200) } else { MS(20) });
    let measured = measure_with(&TrialConfig::default(), reply).unwrap();
    let point = measured.measurement.point;
    assert_eq!(point.throughput.as_milli(), 200_000, "4 requests every 20 ms");
    assert_eq!((point.p50, point.p95, measured.p99), (MS(20), MS(20), MS(20)));
    assert_eq!(measured.measurement.load, Some(MS(700)));
}

#[test]
fn two_calls_in_flight_wait_for_each_other_but_their_time_is_their_own() {
    let mut config = TrialConfig::default();
    config.load = Load::Closed { in_flight: 2 };
    let measured = measure_with(&config, |_, _| Reply::After(MS(20))).unwrap();
    assert_eq!(measured.measurement.point.p95, MS(20));
    assert_eq!(measured.p95_with_wait, MS(40));
    assert_eq!(measured.measurement.point.throughput.as_milli(), 200_000);
}

#[test]
fn an_open_load_shows_its_wait_and_whether_it_is_met() {
    let mut config = TrialConfig::default();
    config.load = Load::Poisson { rate: 35.0, seed: 1 };
    let measured = measure_with(&config, |_, _| Reply::After(MS(20))).unwrap();
    assert!((130.0..150.0).contains(&measured.throughput.mean), "{measured:?}");
    assert_eq!(measured.measurement.point.p95, MS(20));
    assert!(measured.p95_with_wait > MS(30), "70 % busy: {measured:?}");
    for load in [Load::Poisson { rate: 80.0, seed: 1 }, Load::Even { rate: 80.0 }] {
        config.load = load;
        let error = measure_with(&config, |_, _| Reply::After(MS(20))).unwrap_err();
        assert!(matches!(error, TrialError::NotSteady { .. } | TrialError::LoadNotMet { .. }), "{error}");
    }
}

#[test]
fn whatever_a_function_does_a_trial_ends_and_says_why() {
    let config = TrialConfig::default();
    let error = |reply: fn(Setting, u64) -> Reply| measure_with(&config, reply).unwrap_err().to_string();
    let hangs = |_, number| if number < 70 { Reply::After(MS(5)) } else { Reply::Hangs };
    assert_eq!(error(hangs), "a call was not answered within 30s");
    let ends = |_, number| if number < 30 { Reply::After(MS(5)) } else { Reply::Ends("signal 9".into()) };
    assert_eq!(error(ends), "the function ended: signal 9");
    let slower = |_, number| Reply::After(MS(number * number));
    assert!(error(slower).starts_with("not steady after "));
    let slow = |_, _| Reply::After(MS(1_400));
    assert_eq!(error(slow), "21 calls in 30s, need 40: it is too slow to be measured in that time");
    for begin in [Begin::Hangs, Begin::Ready(Duration::from_secs(121))] {
        let mut executor = Virtual::new(move |_| begin.clone(), |_, _| Reply::Hangs);
        let error = measure(&mut executor, setting(1, 10, 100), &config).unwrap_err();
        assert_eq!(error.to_string(), "not ready within 120s");
    }
}

#[test]
fn a_configuration_that_cannot_be_is_refused_by_field() {
    let refused = |change: fn(&mut TrialConfig)| {
        let mut config = TrialConfig::default();
        change(&mut config);
        let error = measure_with(&config, |_, _| Reply::Hangs).unwrap_err();
        assert!(error.is_fatal(), "other settings would fail just the same");
        error.to_string().split(' ').next().unwrap().to_owned()
    };
    assert_eq!(refused(|config| config.min_calls = 39), "min_calls");
    assert_eq!(refused(|config| config.max_time = Duration::ZERO), "max_time");
    assert_eq!(refused(|config| config.answer_timeout = Duration::ZERO), "answer_timeout");
    assert_eq!(refused(|config| config.load = Load::Even { rate: f64::NAN }), "rate");
}

/// FaST-GShare, Figure 8: the grid of `ResNet`'s shape, not proportional to either share.
fn table() -> ProfileTable {
    let mut points = Vec::new();
    for sm in [6, 12, 24, 50, 60, 80, 100] {
        for quota in [20, 40, 60, 80, 100] {
            let at = setting(1, sm, quota);
            let rate = 75.0 * f64::from(sm.min(24)).powf(0.3) / 24f64.powf(0.3) * f64::from(quota) / 100.0;
            let exec = core::time::Duration::from_secs_f64(1.0 / rate).into();
            points.push(ProfilePoint::measured(at.sm, at.quota, 1, rate, exec, exec).unwrap());
        }
    }
    ProfileTable::grid(points).unwrap()
}

/// How many of the true throughputs lie in the intervals that a whole grid measured.
fn recovered(seed: u64) -> usize {
    struct Check(ProfileTable, usize);
    impl Sink for Check {
        fn keep(&mut self, record: &Record) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let measured = record.measured.ok_or("measured")?;
            let truth = self.0.at(record.trial.setting).ok_or("known")?.throughput.as_f64();
            self.1 += usize::from(measured.throughput.holds(truth));
            Ok(())
        }
    }
    let mut gpu = simulated_gpu(table(), MS(500), percent(10), seed);
    let mut check = Check(table(), 0);
    let grid = fast_gshare(1);
    let (config, mut journal) = (TrialConfig::default(), Journal::default());
    let outcome = run(&grid, &mut gpu, &config, &mut journal, &mut check).unwrap();
    assert_eq!((outcome.table.points().len(), outcome.failed.len()), (35, 0));
    check.1
}

/// FaST-GShare, section 3.2: the profiler finds the GPU's true figures, with its stated confidence (99 %).
#[test]
fn a_grid_recovers_the_gpu_within_its_own_intervals() {
    let held: usize = (0..40).map(recovered).sum();
    // 14 of 1,400 points are expected outside, give or take 4.
    assert!(held >= 1_400 - 30, "{held} of 1400");
}

#[test]
fn a_setting_that_fails_is_kept_as_failed_and_the_run_goes_on() {
    let begin = |setting: Setting| match setting.batch {
        8.. => Begin::Refused("out of memory".into()),
        _ => Begin::Ready(MS(1)),
    };
    let reply = |setting: Setting, _| {
        Reply::After(MS(u64::from(10 + setting.batch) * 100 / u64::from(setting.sm.get() / 100)))
    };
    let planner = EfficacySearch::new(MS(60)).unwrap();
    let mut journal = Journal::default();
    let config = TrialConfig::default();
    let choice = run(&planner, &mut Virtual::new(begin, reply), &config, &mut journal, &mut ()).unwrap();
    assert!(choice.point.batch <= 4 && choice.point.p95 <= MS(60));
    let failed = |trial: &Trial| matches!(&trial.outcome, Outcome::Failed { reason } if reason.contains("out of memory"));
    assert!(journal.trials().iter().any(failed), "{journal:?}");

    // Nothing meets the SLO: said so, with the best there is.
    let planner = EfficacySearch::new(MS(9)).unwrap();
    let error = run(&planner, &mut Virtual::new(begin, reply), &config, &mut Journal::default(), &mut ());
    assert!(matches!(error, Err(RunError::Plan(PlanError::SloUnreachable { .. }))));
}

#[test]
fn what_fails_everywhere_ends_the_run_and_keeps_nothing() {
    struct Missing;
    impl gshare_profile::executor::Executor for Missing {
        fn start(&mut self, _: Setting, _: Duration) -> Result<gshare_profile::executor::Ready, ExecError> {
            Err(ExecError::Unavailable("no such program".into()))
        }
        fn now(&self) -> gshare_core::Timestamp {
            gshare_core::Timestamp::ZERO
        }
        fn submit(&mut self) -> Result<(), ExecError> {
            Ok(())
        }
        fn wait(&mut self, _: gshare_core::Timestamp) -> Result<Option<gshare_core::Timestamp>, ExecError> {
            Ok(None)
        }
        fn stop(&mut self) {}
    }
    let mut journal = Journal::default();
    let planner = EfficacySearch::new(MS(60)).unwrap();
    let error = run(&planner, &mut Missing, &TrialConfig::default(), &mut journal, &mut ());
    assert!(matches!(error, Err(RunError::Trial(TrialError::Exec(ExecError::Unavailable(_))))));
    assert!(journal.trials().is_empty());
}
