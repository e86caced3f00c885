//! Programs of different paces on one device, through the whole node: the daemon's engine, a meter in each process, frames that
//! take time. A host that pauses between its kernels keeps its token meanwhile, and takes nothing of a busy program's request.

use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, Duration, Quota, QuotaRange, ResourceSpec, SmShare, Timestamp};
use gshare_sim::Rng;
use gshare_sim::node::{Delays, GpuPlan, InstancePlan, Kinds, NodePlan, NodeWorld, Program, Setup, Shape};
use std::collections::BTreeMap;

/// Windows before the comparison, and compared windows.
const SETTLE: u64 = 10;
const WINDOWS: u64 = 50;

fn quota(request: u64, limit: u64) -> QuotaRange {
    let quota = |percent: u64| Quota::new(u16::try_from(percent * 100).unwrap()).unwrap();
    QuotaRange::new(quota(request), quota(limit)).unwrap()
}

fn program(kernel_us: u64, pause_us: u64) -> Program {
    let (kernel, pause) = (Duration::from_micros(kernel_us), Duration::from_micros(pause_us));
    Program {
        kernel: (kernel, kernel),
        functions: 1,
        spread_percent: 0,
        synchronises: true,
        pause: (pause, pause),
        silences: false,
        allocates: false,
        weights: Bytes::ZERO,
    }
}

/// An instance of these programs, a process each.
fn instance(quota: QuotaRange, first: u64, programs: &[Program]) -> InstancePlan {
    let start = |number| Timestamp::from_nanos(1_700_000 * number);
    InstancePlan {
        spec: ResourceSpec::new(quota, SmShare::WHOLE, None).unwrap(),
        on_loss: OnDaemonLoss::Open,
        processes: (first..).map(start).zip(programs.iter().copied()).collect(),
    }
}

/// One device and these instances.
fn plan(seed: u64, instances: Vec<InstancePlan>) -> NodePlan {
    let micros = Duration::from_micros;
    NodePlan {
        seed,
        kinds: Kinds::default(),
        gpus: vec![GpuPlan { shape: Shape::Any, memory: Bytes::from_gib(16), instances }],
        delays: Delays { frame: (micros(5), micros(20)), wake: (micros(2), micros(20)) },
        in_flight: Duration::from_millis(5),
        windows: SETTLE + WINDOWS,
        faults: Vec::new(),
    }
}

/// These programs as an instance each.
fn run(seed: u64, programs: &[(QuotaRange, Program)]) -> Vec<(f64, Duration)> {
    let instances =
        programs.iter().zip(0..).map(|(&(quota, program), first)| instance(quota, first, &[program]));
    run_instances(seed, instances.collect())
}

/// GPU time of each process in the compared windows, as a part of their length, and its longest time without any.
fn run_instances(seed: u64, instances: Vec<InstancePlan>) -> Vec<(f64, Duration)> {
    let processes = instances.iter().map(|instance| instance.processes.len()).sum();
    let (plan, setup) = (plan(seed, instances), Setup::daemon());
    let window = Setup::daemon().terms.window;
    let mut world = NodeWorld::new(&plan, &setup, false);
    world.advance(Timestamp::ZERO.saturating_add(window.saturating_mul(SETTLE))).unwrap();
    let before: Vec<Duration> = (0..processes).map(|process| world.got(process).busy).collect();
    world.advance(Timestamp::ZERO.saturating_add(window.saturating_mul(SETTLE + WINDOWS))).unwrap();
    let length = window.saturating_mul(WINDOWS).as_secs_f64();
    let after = before.iter().enumerate().map(|(process, before)| {
        let got = world.got(process);
        (got.busy.saturating_sub(*before).as_secs_f64() / length, got.gap)
    });
    after.collect()
}

#[test]
fn a_pausing_program_takes_nothing_of_a_busy_ones_request() {
    let kernels = [10, 100, 1_000, 5_000, 20_000];
    let pauses = [1, 20, 100, 300, 1_000];
    let mut rng = Rng::new(0);
    let mut pick = |of: &[u64]| of[usize::try_from(rng.between(0, of.len() as u64 - 1)).unwrap()];
    let (mut worst, mut longest) = (0.0_f64, 0.0_f64);
    let mut alone = BTreeMap::new();
    for case in 0..40 {
        let shares: &[u64] = [&[50, 50][..], &[30, 70], &[70, 30], &[10, 20, 70]][case % 4];
        let capped = case % 8 < 4;
        let programs: Vec<(QuotaRange, Program)> = (1..)
            .zip(shares)
            .map(|(place, &share)| {
                // The last program is busy, and so is every third of the others.
                let busy = place == shares.len() || pick(&[0, 1, 2]) == 0;
                let pause = if busy { 1 } else { pick(&pauses) };
                (quota(share, if capped { share } else { 100 }), program(pick(&kernels), pause))
            })
            .collect();
        let seed = case as u64;
        let got = run(seed, &programs);
        let kernel = programs.iter().map(|(_, program)| program.kernel.1).max().unwrap();
        for ((&share, &(_, program)), &(used, gap)) in shares.iter().zip(&programs).zip(&got) {
            let alone = *alone
                .entry((program.kernel.1, program.pause.1))
                .or_insert_with(|| run(seed, &[(quota(100, 100), program)])[0].0);
            let short = share as f64 - used / alone * 100.0;
            worst = worst.max(short);
            assert!(short < 2.0, "case {case}, {programs:?}: {short:.2} points short of {share}: {got:?}");
            // A window and the longest kernel, and for each other program a token with its slack; or the pause forced by the cap.
            let others = Duration::from_millis(13).saturating_mul(shares.len() as u64 - 1);
            let pause = program.kernel.1.as_secs_f64() * (100.0 / share as f64 - 1.0);
            let bound = Setup::daemon().terms.window.as_secs_f64().max(pause)
                + kernel.saturating_add(others).as_secs_f64();
            longest = longest.max(gap.as_secs_f64() / bound);
            assert!(gap.as_secs_f64() <= bound, "case {case}, {programs:?}: {gap} without the device");
        }
    }
    println!("at most {worst:.2} points short; the longest wait was {:.0} % of its bound", longest * 100.0);
}

#[test]
fn processes_of_an_instance_take_turns_by_the_time_they_hold_the_device() {
    let whole = quota(100, 100);
    for (case, (pause, kernel)) in [(100, 100), (300, 5_000), (1_000, 1_000)].into_iter().enumerate() {
        let seed = case as u64;
        let programs = [program(10, pause), program(kernel, 1)];
        let alone = programs.map(|program| run(seed, &[(whole, program)])[0].0);
        let got = run_instances(seed, vec![instance(whole, 0, &programs)]);
        let shares = [0, 1].map(|process: usize| got[process].0 / alone[process]);
        assert!(
            shares.iter().all(|share| (0.42..=0.58).contains(share)),
            "{programs:?}: {shares:?} of their own speeds"
        );
    }
}
