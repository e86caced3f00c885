//! The platform that ships, in the world of `benches/scenarios/platform/all.toml`.

use gshare_core::Duration;
use gshare_sched::pipeline::KeepAlive;
use gshare_sim::scenario::{Scenario, WorkText};
use gshare_sim::world::{self, Depth, Fault, Faults, Outcome, Plan};
use std::path::Path;

fn read(name: &str, length: &str) -> Scenario {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/platform").join(name);
    Scenario::read(&path, &[("length".to_owned(), length.to_owned())]).unwrap()
}

/// The scenario of everything, for this time; with `shares`, what of it runs on fractional devices.
fn all(length: &str, shares: bool) -> (Scenario, Plan) {
    let mut scenario = read("all.toml", length);
    if shares {
        for node in &mut scenario.node {
            node.device.retain(|device| device.mig.is_none() && device.regime.is_none());
        }
        scenario.function.retain(|one| one.work != WorkText::Pipeline && one.regime.is_none());
    }
    let plan = scenario.plan().unwrap();
    (scenario, plan)
}

/// The same with every kernel on fractional devices, and a short training.
fn kernels(length: &str, shares: bool) -> (Scenario, Plan) {
    let (scenario, mut plan) = all(length, shares);
    plan.depth = Depth::Kernels;
    for function in &mut plan.functions {
        function.train = Duration::from_secs(10);
    }
    (scenario, plan)
}

fn hundred(shares: bool) -> Outcome {
    let (scenario, plan) = all("30s", shares);
    let mut total = Outcome::default();
    for seed in 0..100 {
        total.add(&world::run(&plan, seed, || scenario.platform()).unwrap());
    }
    for fault in Fault::ALL {
        assert!(total.faults.get(&fault).is_some_and(|count| *count > 0), "{fault} never happened");
    }
    assert!(total.functions.iter().all(|function| function.starts > 0));
    total
}

/// Weights leave host memory soon after a request, and come back before the next one is expected.
fn brief_stays() -> Outcome {
    let (scenario, plan) = all("120s", false);
    let mut settings = scenario.settings();
    let (break_even, longest) = (Duration::from_secs(2), Duration::from_secs(60));
    settings.sliced.keeper.keep_alive = KeepAlive::Adaptive { break_even, longest };
    let mut total = Outcome::default();
    for seed in 0..5 {
        let platform = || settings.build().map_err(|error| error.to_string());
        total.add(&world::run(&plan, seed, platform).unwrap());
    }
    total
}

#[test]
fn a_hundred_seeds_of_shared_devices_keep_every_promise() {
    hundred(true);
}

#[test]
fn a_hundred_seeds_of_everything_keep_every_promise_and_carry_out_every_order() {
    let mut total = hundred(false);
    total.add(&brief_stays());
    let never = total.never_carried_out();
    assert!(never.is_empty(), "never carried out: {never:?}");
}

#[test]
fn a_seed_replays_exactly() {
    let (scenario, plan) = all("20s", true);
    let run = |seed| world::run(&plan, seed, || scenario.platform()).unwrap();
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).hash, run(8).hash);
}

/// The daemon's engine and the hook's decide about every kernel, with faults of platform, processes, daemons and frames.
#[test]
fn kernels_keep_every_promise_of_the_platform_and_replay_exactly() {
    let (scenario, plan) = kernels("15s", false);
    let run = |seed| world::run(&plan, seed, || scenario.platform()).unwrap();
    let total = [0, 1, 2, 3].map(run);
    assert!(total.iter().all(|outcome| outcome.kernels > 1_000));
    assert_eq!(run(1), total[1]);
    assert_ne!(total[0].hash, total[1].hash);
}

/// Without faults, and where a function is called often enough to compare.
#[test]
fn kernels_and_profiles_serve_the_same_scenario_alike() {
    let (scenario, mut plan) = kernels("60s", true);
    plan.faults = Faults::default();
    let ratio = |one: Duration, other: Duration| one.as_secs_f64() / other.as_secs_f64();
    let mut totals = [Outcome::default(), Outcome::default()];
    for seed in 3..8 {
        let [by_kernels, by_profile] = [Depth::Kernels, Depth::Requests].map(|depth| {
            plan.depth = depth;
            world::run(&plan, seed, || scenario.platform()).unwrap()
        });
        let mut compared = 0;
        for (one, other) in by_kernels.functions.iter().zip(&by_profile.functions) {
            if one.answered < 200 {
                continue;
            }
            compared += 1;
            let name = format!("seed {seed}, {}", one.name);
            assert_eq!(one.requests, other.requests, "{name}");
            let (attained, other_attained) = (one.attainment().unwrap(), other.attainment().unwrap());
            assert!((attained - other_attained).abs() < 0.05, "{name}: {attained} and {other_attained}");
            let mean = ratio(one.mean(), other.mean());
            assert!((0.85..1.15).contains(&mean), "{name}: mean latency {mean} of the other");
            println!("{name}: attained {attained:.3} and {other_attained:.3}, mean {mean:.3}");
        }
        assert!(compared >= 3, "seed {seed}: {compared} functions are called often enough");
        totals[0].add(&by_kernels);
        totals[1].add(&by_profile);
    }
    for (one, other) in totals[0].functions.iter().zip(&totals[1].functions) {
        let used = ratio(one.used, other.used);
        println!("{}: GPU time {used:.3}", one.name);
        // A batch is its mean size in one and its reached size in the other, which differs less over several seeds.
        assert!(
            one.answered < 1_000 || (0.85..1.15).contains(&used),
            "{}: GPU time {used} of the other",
            one.name
        );
    }
}

/// Models that are spread over devices of a node, beside others: every promise is kept with faults, and at both depths they run.
#[test]
fn models_that_are_spread_over_devices_are_served_at_both_depths() {
    let scenario = read("spread.toml", "150s");
    let mut plan = scenario.plan().unwrap();
    let mut total = Outcome::default();
    for seed in 0..30 {
        total.add(&world::run(&plan, seed, || scenario.platform()).unwrap());
    }
    for one in &total.functions[..3] {
        assert!(one.answered * 10 > one.requests * 8, "{}: {} of {}", one.name, one.answered, one.requests);
    }
    assert!(total.actions.get("unpark").is_some_and(|count| *count > 0), "{:?}", total.actions);
    plan.faults = Faults::default();
    // Which request finds no room in time follows from the last millisecond, so several seeds are compared.
    let [by_profile, by_kernels] = [Depth::Requests, Depth::Kernels].map(|depth| {
        plan.depth = depth;
        let mut total = Outcome::default();
        for seed in 0..6 {
            total.add(&world::run(&plan, seed, || scenario.platform()).unwrap());
        }
        total
    });
    for (one, other) in by_kernels.functions[..3].iter().zip(&by_profile.functions) {
        assert_eq!(one.requests, other.requests, "{}", one.name);
        let answered = one.answered as f64 / other.answered as f64;
        assert!((0.85..1.15).contains(&answered), "{}: {answered} of the answers", one.name);
        let used = one.used.as_secs_f64() / other.used.as_secs_f64();
        assert!((0.85..1.15).contains(&used), "{}: GPU time {used} of the other", one.name);
    }
}

/// A trainer has all SMs, so a request beside it waits for a turn, which takes as long as the request itself.
#[test]
fn a_request_waits_for_the_turn_of_a_trainer_at_both_depths() {
    let scenario = |rate: u32, trainer: &str| {
        let text = format!(
            r#"
            length = "60s"
            node = [{{ device = [{{ memory = "16GiB" }}] }}]

            [[function]]
            name = "requests"
            work = "inference"
            memory = "1GiB"
            slo = "120ms"
            loads = ["20ms", "20ms"]
            instances = [1, 8]
            profile = [{{ sm = "25%", quota = "40%", rps = 40.0, p50 = "10ms" }}]
            load = {{ shape = "poisson", rate = {rate} }}
            {trainer}
            "#
        );
        Scenario::parse(&text).unwrap()
    };
    let trainer = r#"
            [[function]]
            name = "trainer"
            work = "training"
            memory = "1GiB"
            share = { time = ["10%", "100%"], sm = "100%" }
            train = "1h"
            "#;
    let mean = |scenario: &Scenario, depth: Depth| {
        let mut plan = scenario.plan().unwrap();
        plan.depth = depth;
        let outcome = world::run(&plan, 1, || scenario.platform()).unwrap();
        outcome.functions[0].mean().as_secs_f64() * 1e3
    };
    for rate in [2, 10, 40] {
        let alone = mean(&scenario(rate, ""), Depth::Requests);
        let beside = scenario(rate, trainer);
        let [by_profile, by_kernels] = [Depth::Requests, Depth::Kernels].map(|depth| mean(&beside, depth));
        let ratio = by_profile / by_kernels;
        assert!((0.85..1.15).contains(&ratio), "{rate}/s: {by_profile} ms and {by_kernels} ms");
        assert!(by_profile > 1.3 * alone, "{rate}/s: {by_profile} ms, and {alone} ms without the trainer");
    }
}

/// The points were measured beside others: 10 ms of work took 18 ms. Work is not counted a second time for that, nor is a wait for a
/// turn work.
#[test]
fn functions_that_share_a_device_by_time_alone_wait_for_each_other_as_long_at_both_depths() {
    let function = |name: &str, rate: u32, work: u32| {
        format!(
            r#"
            [[function]]
            name = "{name}"
            work = "inference"
            memory = "1GiB"
            slo = "400ms"
            loads = ["200ms", "200ms"]
            instances = [1, 8]
            profile = [{{ sm = "25%", quota = "20%", rps = {}.0, p50 = "{}ms" }}]
            load = {{ shape = "poisson", rate = {rate} }}
            "#,
            200 / work,
            work * 18 / 10
        )
    };
    let text = format!(
        r#"
        length = "60s"
        node = [{{ device = [{{ memory = "16GiB" }}] }}]
        policies = {{ sm_partitions = false }}
        {}{}"#,
        function("short", 25, 10),
        function("long", 3, 40)
    );
    let scenario = Scenario::parse(&text).unwrap();
    let [by_profile, by_kernels] = [Depth::Requests, Depth::Kernels].map(|depth| {
        let mut plan = scenario.plan().unwrap();
        plan.depth = depth;
        let outcome = world::run(&plan, 1, || scenario.platform()).unwrap();
        [0, 1].map(|function| outcome.functions[function].mean().as_secs_f64() * 1e3)
    });
    for (one, other) in by_profile.iter().zip(by_kernels) {
        assert!((0.7..1.4).contains(&(one / other)), "{by_profile:?} ms and {by_kernels:?} ms");
    }
    // A third of the device's time is in use: there are waits, and no backlog.
    assert!(by_kernels[0] > 12.0 && by_kernels[0] < 40.0, "{by_kernels:?} ms");
}

#[test]
fn a_node_with_too_many_fractional_devices_is_refused_by_name() {
    let (mut scenario, _) = kernels("1s", true);
    scenario.node[0].device[0].count = 65;
    let mut plan = scenario.plan().unwrap();
    plan.depth = Depth::Kernels;
    let refused = world::run(&plan, 0, || scenario.platform()).unwrap_err();
    assert!(refused.wrong.contains("more than 64 fractional devices"), "{refused}");
}

/// Of two programs that want the same device the SLO-sensitive one goes first: by the device's rule at depth requests, and by
/// the node's vertical scaler at depth kernels.
#[test]
fn a_class_decides_who_goes_first_at_both_depths() {
    let both = |file: &str, name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/scenarios/dilu").join(file);
        let cases = Scenario::cases(&path, &[("length".to_owned(), "20s".to_owned())]).unwrap();
        let case = cases.into_iter().find(|case| case.name() == name).unwrap();
        let mut plan = case.scenario.plan().unwrap();
        let with = world::run(&plan, 1, || case.scenario.platform()).unwrap();
        plan.functions.iter_mut().for_each(|function| function.class = None);
        let without = world::run(&plan, 1, || case.scenario.platform()).unwrap();
        [with, without].map(|outcome| (outcome.functions[0].mean(), outcome.functions[1].trained))
    };
    // Side by side the trainer gives way. By turns it loses hardly any time: the order of the turns is enough.
    for (file, name, gives_way) in
        [("train-inference.toml", "dilu/bursty", true), ("fig17.toml", "co_scaled", false)]
    {
        let [(latency, trained), (without, more)] = both(file, name);
        assert!(latency < without, "{file}: {latency} and {without}");
        assert_eq!(
            trained.as_secs_f64() < 0.98 * more.as_secs_f64(),
            gives_way,
            "{file}: {trained} and {more}"
        );
    }
}

/// A function whose batch of eight takes twice the time of one request, in batches and one request at a time.
#[test]
fn batches_answer_in_time_with_less_gpu_time() {
    let run = |rate: u32, batches: bool| {
        let eight = r#"{ sm = "100%", quota = "50%", batch = 8, rps = 200.0, p50 = "40ms", p95 = "44ms" },"#;
        let text = format!(
            "length = \"60s\"\nnode = [{{ device = [{{ memory = \"16GiB\", count = 4 }}] }}]\n[[function]]\n\
             name = \"f\"\nwork = \"inference\"\nmemory = \"1GiB\"\nslo = \"150ms\"\ninstances = [1, 8]\n\
             loads = [\"1s\", \"1s\"]\nbatches = {batches}\nload = {{ shape = \"poisson\", rate = {rate} }}\n\
             profile = [{} {{ sm = \"100%\", quota = \"50%\", rps = 50.0, p50 = \"20ms\", p95 = \"22ms\" }}]\n",
            if batches { eight } else { "" }
        );
        let scenario = Scenario::parse(&text).unwrap();
        let mut plan = scenario.plan().unwrap();
        plan.faults = Faults::default();
        let outcome = world::run(&plan, 1, || scenario.platform()).unwrap();
        let of = &outcome.functions[0];
        println!(
            "{rate}/s, batches {batches}: {} of {} in time, GPU time {}, mean {}",
            of.within_slo,
            of.requests,
            of.used,
            of.mean()
        );
        (of.used.as_secs_f64() / of.answered as f64, of.attainment().unwrap(), of.mean())
    };
    let (one, many) = (run(150, false), run(150, true));
    assert!(many.0 < 0.6 * one.0, "GPU time of a request: {} and {}", many.0, one.0);
    // The late ones came before the second instance was there.
    assert!(many.1 > 0.975 && many.1 > one.1 - 0.003, "in time: {} and {}", many.1, one.1);
    // A request that is alone waits for no other.
    let (one, many) = (run(2, false), run(2, true));
    assert!(many.2.as_secs_f64() < 1.1 * one.2.as_secs_f64(), "mean: {} and {}", many.2, one.2);
}

/// Three functions of 9 GiB at two requests a second each, on two devices of 16 GiB. Copies to host memory and back take 0.8 s each, so
/// processes live on where a load from host memory takes 3 s. They end where it takes 1 s, and come back more often, since that costs less.
#[test]
fn functions_that_share_too_little_memory_are_in_time_with_few_parkings() {
    for (load, slo, most) in [("3s", "24s", 75), ("1s", "16s", 100)] {
        functions_take_turns(load, slo, most);
    }
}

fn functions_take_turns(load: &str, slo: &str, most: u64) {
    let function = |name: &str| {
        format!(
            r#"
            [[function]]
            name = "{name}"
            work = "inference"
            memory = "9GiB"
            slo = "{slo}"
            loads = ["4s", "{load}"]
            profile = [{{ sm = "25%", quota = "20%", rps = 20.0, p50 = "13ms", p95 = "28ms" }}]
            load = {{ shape = "poisson", rate = 2 }}
            "#
        )
    };
    let nodes = r#"node = [{ device = [{ memory = "16GiB", count = 2 }] }]"#;
    let text = format!("length = \"5m\"\n{nodes}\n{}{}{}", function("a"), function("b"), function("c"));
    let scenario = Scenario::parse(&text).unwrap();
    let plan = scenario.plan().unwrap();
    for seed in 0..10 {
        let outcome = world::run(&plan, seed, || scenario.platform()).unwrap();
        let parked = outcome.actions["park"];
        let late: u64 = outcome.functions.iter().map(|one| one.requests - one.within_slo).sum();
        let asked: u64 = outcome.functions.iter().map(|one| one.requests).sum();
        println!("seed {seed}: {late} of {asked} late, parked {:.1} times a minute", parked as f64 / 5.0);
        // The third start from disk comes after the first, a stay and a parking: 4 + 2 + 0.8 + 4 s, and more by jitter.
        assert!(late == 0 && asked > 1_500, "seed {seed}: {late} of {asked} late");
        assert!(
            (20..=most).contains(&parked),
            "seed {seed}, loads of {load}: parked {parked} times in 5 min"
        );
    }
}
