//! Valid scenarios, and refused scenarios.

use super::Scenario;
use crate::world::{Fault, Limits, Load};
use gshare_core::{Bytes, Duration};
use gshare_sched::platform::{Regime, Work};

const SMALL: &str = r#"
length = "1m"
policies = { scaler = "lazy", packer = "dilu", request = "lalbo3", router = "paper", keeper = "ours" }

[[node]]
device = [
    { memory = "16GiB", count = 2 },
    { memory = "80GiB", mig = { model = "A100-80", slices = ["4g.40gb", "2g.20gb"] } },
]
[[node]]
device = [{ memory = "8GiB", regime = "whole", kind = 1 }]

[[tenant]]
tenant = 3
max_waiting = 7
gpu_time = "25%"

[[function]]
name = "classify"
work = "inference"
memory = "2GiB"
slo = "69ms"
patience = "5s"
limits = "while_full"
instances = [1, 4]
tenant = 3
profile = [{ sm = "12%", quota = "40%", rps = 28.5, p50 = "35ms", p95 = "41ms" }]
load = { shape = "gamma", rate = 40, cv = 2.0 }

[[function]]
name = "enhance"
work = "pipeline"
memory = "9GiB"
dag.component = [
    { name = "deblur", memory = "3GiB", on = [["2g.20gb", "30ms"], ["4g.40gb", "20ms"]] },
    { name = "super", memory = "4GiB", runs = "40%", on = [["2g.20gb", "50ms"], ["4g.40gb", "31ms"]] },
]
dag.edge = [["deblur", "super", "6MiB"]]
load = { shape = "bursts", on = "10s", off = "20s", rate = 5 }

[[function]]
name = "train"
work = "training"
memory = "4GiB"
workers = 2
share = { time = ["0%", "50%"], sm = "50%", sm_limit = "100%" }
train = "2m"

[faults]
back = ["1s", "2s"]
every = { device_lost = "90s", client_cancels = "1s" }
"#;

#[test]
fn a_scenario_says_what_a_run_is() {
    let plan = Scenario::parse(SMALL).unwrap().plan().unwrap();
    assert_eq!(plan.length, Duration::from_secs(60));
    let regimes: Vec<_> =
        plan.devices.iter().map(|device| (device.node.number(), device.effective_regime())).collect();
    let (fractional, whole) = (Regime::Fractional, Regime::Whole);
    assert_eq!(regimes, [(0, fractional), (0, fractional), (0, Regime::Sliced), (1, whole)]);
    let [classify, enhance, train] = &plan.functions[..] else { panic!("three functions") };
    assert_eq!(classify.spec.slo, Some(Duration::from_millis(69)));
    assert_eq!((classify.spec.min_instances, classify.spec.max_instances), (1, 4));
    assert_eq!((classify.limits, train.limits), (Limits::WhileFull, Limits::Always));
    assert!(matches!(classify.load, Load::Process(_)) && matches!(train.load, Load::None));
    let Work::Pipeline { dag, .. } = &enhance.spec.work else { panic!("a pipeline") };
    assert_eq!(dag.components()[1].profile("2g.20gb", 1).unwrap().memory, Bytes::from_gib(4));
    let Work::Training { workers: 2, share } = &train.spec.work else { panic!("a training job") };
    assert_eq!(share.to_string(), "0%:50% of time, 50%:100% of SMs, 4 GiB");
    assert_eq!(train.train, Duration::from_secs(120));
    assert_eq!(plan.tenants[0].1.max_waiting, 7);
    assert_eq!(plan.faults.every[&Fault::DeviceLost], Duration::from_secs(90));
}

/// The error of the scenario with one text in place of another.
fn refused(from: &str, to: &str) -> String {
    assert!(SMALL.contains(from), "{from}");
    match Scenario::parse(&SMALL.replacen(from, to, 1)).and_then(|scenario| scenario.plan()) {
        Ok(_) => panic!("{to} was not refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_cannot_be_is_refused_by_field_and_bound() {
    for (from, to, says) in [
        ("\"lazy\"", "\"lasy\"", "policies.scaler is lasy: one of heuristic, lazy"),
        ("\"dilu\"", "\"first_fit\"", "policies.packer is first_fit: one of max_rects, dilu"),
        ("\"lalbo3\"", "\"lru\"", "policies.request is lru: one of load_balance, lalb, lalbo3, ours"),
        ("router = \"paper\"", "router = \"slack\"", "policies.router is slack: one of paper, ours"),
        ("slo = \"69ms\"", "slow = \"69ms\"", "unknown field `slow`"),
        ("slo = \"69ms\"", "slo = \"69\"", "`69` is not a length of time"),
        ("slo = \"69ms\"", "slo = \"0s\"", "function `classify`: slo is 0: need more"),
        ("\"2GiB\"", "\"2GiX\"", "`2GiX` is not a number of bytes"),
        ("instances = [1, 4]", "instances = [5, 4]", "function `classify`: instances is [5, 4]: need a most"),
        (
            "rps = 28.5",
            "rps = 0.0",
            "function `classify`: profile point (batch 1, 12% of the SMs, 40% of the time): throughput is 0",
        ),
        ("rate = 40", "rate = -1", "function `classify`, load: rate is -1: need a finite number above 0"),
        ("shape = \"gamma\"", "shape = \"pareto\"", "unknown variant `pareto`, expected one of"),
        (
            "[\"deblur\", \"super\", \"6MiB\"]",
            "[\"deblur\", \"supper\", \"6MiB\"]",
            "there is no component `supper`",
        ),
        (
            "share = {",
            "load = { shape = \"poisson\", rate = 1 }\nshare = {",
            "a training job answers no requests",
        ),
        ("[\"0%\", \"50%\"]", "[\"60%\", \"50%\"]", "function `train`: share"),
        ("train = \"2m\"", "profile = [{ sm = \"9%\", rps = 1.0, p50 = \"1s\" }]", "only for work inference"),
        ("\"4g.40gb\", \"2g.20gb\"] }", "\"7g.80gb\", \"2g.20gb\"] }", "do not fit together on one A100-80"),
        ("regime = \"whole\"", "regime = \"sliced\"", "node 1: device.mig is none: a sliced device needs"),
        ("count = 2", "count = 0", "node 0: device.count is 0: need 1 to 100000"),
        ("name = \"train\"", "name = \"enhance\"", "function.name is enhance: need names that are unlike"),
        ("device_lost", "device_eaten", "unknown variant `device_eaten`, expected one of `device_lost`"),
        ("[\"1s\", \"2s\"]", "[\"3s\", \"2s\"]", "faults.back is 3s: the first is at most the second"),
        ("length = \"1m\"", "length = \"0s\"", "length is 0: need more"),
        ("length = \"1m\"", "length = \"1m\"\njitter_percent = 100", "jitter_percent is 100: at most 99"),
        ("length = \"1m\"", "length = \"1m\"\nsede = 4", "unknown field `sede`"),
        (
            "{ shape = \"gamma\", rate = 40, cv = 2.0 }",
            "{ shape = \"rates\", file = \"none\", every = \"1s\" }",
            "none: ",
        ),
    ] {
        let error = refused(from, to);
        assert!(error.contains(says), "{to}: {error}");
    }
}

#[test]
fn keys_are_set_to_other_values_and_files_are_found_beside_the_scenario() {
    let folder = std::env::temp_dir().join(format!("gshare-scenario-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("small.toml");
    let trace = "{ shape = \"trace\", file = \"trace.csv\", row = \"b\", from = 1, column = \"1s\" }";
    let text = SMALL.replace("{ shape = \"gamma\", rate = 40, cv = 2.0 }", trace);
    std::fs::write(&path, text).unwrap();
    std::fs::write(folder.join("trace.csv"), "HashFunction,1,2,3\na,1,1,1\nb,4,5,6\n").unwrap();
    let set = |key: &str, value: &str| Scenario::read(&path, &[(key.to_owned(), value.to_owned())]);
    let plan = set("length", "5s").unwrap().plan().unwrap();
    assert_eq!(plan.length, Duration::from_secs(5));
    let Load::Counts { bin, counts } = &plan.functions[0].load else { panic!("a trace") };
    assert_eq!((*bin, &counts[..]), (Duration::from_secs(1), &[5, 6][..]));
    let plan = set("function.1.instances", "[0, 9]").unwrap().plan().unwrap();
    assert_eq!(plan.functions[1].spec.max_instances, 9);
    let error = |key, value| set(key, value).and_then(|scenario| scenario.plan()).unwrap_err().to_string();
    assert_eq!(error("policies.scaler", "lasy"), "policies.scaler is lasy: one of heuristic, lazy");
    assert_eq!(error("function.7.slo", "1s"), "cannot set `function.7.slo`: a list has elements from 0 on");
    assert_eq!(error("length.x", "1s"), "cannot set `length.x`: its last part is no key of a table");
    assert!(
        error("function.0.load.row", "c")
            .contains("load.row is c: need a function of the trace, or a number below 2")
    );
    std::fs::remove_dir_all(folder).unwrap();
}

const AXES: &str = r#"
[[axis]]
name = "scaler"
against = "eager"
option = [{ name = "eager", set = { "policies.scaler" = "heuristic" } }, { name = "lazy" }]

[[axis]]
name = "slo"
option = [{ name = "short" }, { name = "long", set = { "function.0.slo" = "2s" } }]

[paper]
source = "a paper, figure 1"
row = [{ case = ["lazy", "long"], to = ["eager", "long"], function = "classify", figures = { p95_ms = 0.9 } }]
"#;

#[test]
fn every_combination_of_options_is_a_case() {
    let folder = std::env::temp_dir().join(format!("gshare-cases-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("axes.toml");
    let cases = |axes: &str| {
        std::fs::write(&path, format!("{SMALL}{axes}")).unwrap();
        Scenario::cases(&path, &[("length".to_owned(), "5s".to_owned())])
    };
    let all = cases(AXES).unwrap();
    let names: Vec<_> = all.iter().map(super::Case::name).collect();
    assert_eq!(names, ["eager/short", "eager/long", "lazy/short", "lazy/long"]);
    let last = &all[3].scenario;
    assert_eq!((&last.policies.scaler, last.length.0), (&super::ScalerName::Lazy, Duration::from_secs(5)));
    assert_eq!(last.plan().unwrap().functions[0].spec.slo, Some(Duration::from_secs(2)));
    assert_eq!(all[0].scenario.policies.scaler, super::ScalerName::Heuristic);
    assert_eq!(cases("").unwrap().len(), 1);
    for (from, to, says) in [
        (
            "against = \"eager\"",
            "against = \"eagre\"",
            "axis `scaler`: against is eagre: need the name of one",
        ),
        ("\"slo\"", "\"scaler\"", "axis.name is scaler: need names that are unlike"),
        ("{ name = \"lazy\" }", "{ name = \"eager\" }", "axis `scaler`: option.name is eager: need names"),
        ("case = [\"lazy\", \"long\"]", "case = [\"lazy\"]", "paper.row.case is [\"lazy\"]: need one option"),
        (
            "to = [\"eager\", \"long\"]",
            "to = [\"eager\", \"wide\"]",
            "paper.row.to is [\"eager\", \"wide\"]: need",
        ),
        ("\"classify\"", "\"classy\"", "paper.row.function is classy: need the name of a function"),
        ("p95_ms = 0.9", "p96_ms = 0.9", "paper.row.figures is p96_ms: need one of rps, "),
        (
            "p95_ms = 0.9",
            "p95_ms = -1.0",
            "paper.row.figures.p95_ms is -1: need a finite number of at least 0",
        ),
        ("\"function.0.slo\" = \"2s\"", "\"function.9.slo\" = \"2s\"", "cannot set `function.9.slo`"),
        ("option = [{ name = \"short\" }, {", "options = [{", "unknown field `options`"),
    ] {
        assert!(AXES.contains(from), "{from}");
        let error = cases(&AXES.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(says), "{to}: {error}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_one_kind_of_work_has_is_refused_for_another() {
    let closed = "{ shape = \"gamma\", rate = 40, cv = 2.0 }";
    for (from, to, says) in [
        (
            closed,
            "{ shape = \"closed\", think = \"1ms\", clients = 0 }",
            "load.clients is 0: need 1 to 10000",
        ),
        (closed, "{ shape = \"closed\", think = \"1ms\", clients = 10001 }", "load.clients is 10001: need"),
        ("slo = \"69ms\"", "host = \"0s\"", "function `classify`: host is 0: need more"),
        ("slo = \"69ms\"", "speed = \"40%\"", "function `classify`: speed is given: only for work training"),
        ("train = \"2m\"", "time_limit = \"40%\"", "time_limit is given: only for work inference"),
        ("train = \"2m\"", "host = \"1ms\"", "host is given: only for work inference"),
        ("train = \"2m\"", "devices = 2", "devices is given: only for work inference"),
        ("slo = \"69ms\"", "devices = 65", "function `classify`: devices is 65: need 1 to 64"),
        ("scaler = \"lazy\",", "scaler = \"lazy\", vertical = false,", "share, without policies.vertical"),
        (
            "scaler = \"lazy\",",
            "scaler = \"lazy\", headroom = \"5%\",",
            "policies.headroom is given: only for the scaler",
        ),
        (
            "scaler = \"lazy\",",
            "scaler = \"lazy\", keep_alive = \"0s\",",
            "policies.keep_alive is 0: need more",
        ),
    ] {
        let error = refused(from, to);
        assert!(error.contains(says), "{to}: {error}");
    }
    let still = SMALL
        .replace("scaler = \"lazy\"", "scaler = \"lazy\", vertical = false")
        .replace("[\"0%\", \"50%\"]", "[\"10%\", \"50%\"]");
    let scenario = Scenario::parse(&still).unwrap();
    let Work::Training { share, .. } = &scenario.plan().unwrap().functions[2].spec.work else {
        panic!("a training job")
    };
    assert_eq!(share.to_string(), "10%:10% of time, 50%:50% of SMs, 4 GiB");
    assert_eq!(scenario.settings().fractional.pool.sm_limit_factor, 1);
}

/// A seed draws the same functions each time, another seed draws others, and each drawn function can be planned and served.
#[test]
fn a_seed_draws_functions_of_every_kind() {
    let text = "length = \"1s\"\ndraw = { inference = 4, whole = 2, pipelines = 2, trainers = 2, load = \"40%\", \
        instances = [1, 3] }\n[[function]]\nname = \"own\"\nwork = \"inference\"\nmemory = \"1GiB\"\n\
        profile = [{ sm = \"12%\", rps = 28.5, p50 = \"35ms\" }]\n[[node]]\ndevice = [{ memory = \"16GiB\" }, \
        { memory = \"8GiB\", regime = \"whole\" }, \
        { memory = \"80GiB\", mig = { model = \"A100-80\", slices = [\"4g.40gb\", \"2g.20gb\", \"1g.10gb\"] } }]\n";
    let scenario = Scenario::parse(text).unwrap();
    let drawn = |seed| format!("{:?}", scenario.drawn(seed).unwrap().function);
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    for seed in 0..20 {
        let functions = scenario.drawn(seed).unwrap().plan().unwrap().functions;
        let of = |name: &str| functions.iter().filter(|of| of.name.starts_with(name)).count();
        assert_eq!(
            ["own", "inference-", "whole-", "pipeline-", "guaranteed-", "best_effort-"].map(of),
            [1, 4, 2, 2, 1, 1]
        );
    }
    let none = Scenario::parse(&text.replace("40%", "0%")).unwrap().plan().unwrap_err().to_string();
    assert!(none.contains("draw.load is 0%: need more"), "{none}");
}
