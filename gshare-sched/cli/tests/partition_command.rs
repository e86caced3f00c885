//! `gshare lab partition` as a user meets it: the paper's application 3 on the rest of a GPU.

use std::process::{Command, Output};

/// FluidFaaS, Table 4, application 3: deblur, super-resolution for some requests, background removal, segmentation, classification. The
/// profiles are made up: a function which fits a `4g.40gb` whole needs three smaller slices.
const APP3: &str = r#"
name = "application 3"

[[components]]
name = "deblur"
profiles = [
    { slice = "1g.10gb", time_ns = 60_000_000, memory_bytes = 5_000_000_000 },
    { slice = "2g.20gb", time_ns = 32_000_000, memory_bytes = 5_000_000_000 },
]

[[components]]
name = "super_resolution"
runs_bp = 4000
profiles = [
    { slice = "1g.10gb", time_ns = 80_000_000, memory_bytes = 8_000_000_000 },
    { slice = "2g.20gb", time_ns = 42_000_000, memory_bytes = 8_000_000_000 },
]

[[components]]
name = "background"
profiles = [
    { slice = "1g.10gb", time_ns = 30_000_000, memory_bytes = 4_000_000_000 },
    { slice = "2g.20gb", time_ns = 17_000_000, memory_bytes = 4_000_000_000 },
]

[[components]]
name = "segmentation"
profiles = [
    { slice = "1g.10gb", time_ns = 40_000_000, memory_bytes = 3_000_000_000 },
    { slice = "2g.20gb", time_ns = 21_000_000, memory_bytes = 3_000_000_000 },
]

[[components]]
name = "classification"
profiles = [
    { slice = "1g.10gb", time_ns = 12_000_000, memory_bytes = 1_000_000_000 },
    { slice = "2g.20gb", time_ns = 9_000_000, memory_bytes = 1_000_000_000 },
]

[[edges]]
from = "deblur"
to = "super_resolution"
bytes = 6_000_000

[[edges]]
from = "deblur"
to = "background"
bytes = 6_000_000

[[edges]]
from = "super_resolution"
to = "background"
bytes = 24_000_000

[[edges]]
from = "background"
to = "segmentation"
bytes = 6_000_000

[[edges]]
from = "segmentation"
to = "classification"
bytes = 2_000_000
"#;

fn partition(dag: &str, name: &str, arguments: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(name);
    std::fs::write(&file, dag).unwrap();
    Command::new(env!("CARGO_BIN_EXE_gshare"))
        .args(["lab", "partition"])
        .arg(&file)
        .args(arguments)
        .output()
        .unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn the_choice_has_the_shortest_bottleneck_and_alternatives_hold_fewer_slices() {
    let output = partition(APP3, "app3.toml", &["--free", "1g.10gb,1g.10gb,2g.20gb", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let report = json(&output);
    let of = |pipeline: &serde_json::Value, key: &str| pipeline[key].as_u64().unwrap();
    let mut last = report["chosen"].clone();
    assert_eq!(of(&last, "compute_slices"), 4, "three slices for what fits a `4g.40gb` whole");
    for next in report["alternatives"].as_array().unwrap() {
        assert!(of(next, "bottleneck_ns") >= of(&last, "bottleneck_ns"), "{report}");
        assert!(of(next, "compute_slices") < of(&last, "compute_slices"), "{report}");
        last = next.clone();
    }
}

#[test]
fn the_plain_text_names_stages_slices_and_figures() {
    let output = partition(APP3, "app3.toml", &["--free", "1g.10gb,1g.10gb,2g.20gb"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("application 3 on the free slices of A100-80: 1g.10gb, "), "{text}");
    assert!(text.contains("chosen:") && text.contains("bottleneck") && text.contains(" on gpu0/"), "{text}");
}

#[test]
fn what_fits_nowhere_fails_and_says_why_in_one_object() {
    let output = partition(APP3, "app3.toml", &["--free", "1g.10gb", "--json"]);
    assert!(!output.status.success());
    let report = json(&output);
    assert!(report["chosen"].is_null());
    let passed = report["passed_over"].as_array().unwrap();
    let whys: Vec<&str> = passed.iter().map(|one| one["why"].as_str().unwrap()).collect();
    let whole = "stage 1 fits no free slice: needs 20.5 GiB, the largest has 9.6 GiB";
    assert_eq!(whys, [whole, "needs 5 slices, 1 are free"], "the whole, and its components apart");
}

#[test]
fn bad_input_is_refused_with_the_name_and_the_bound() {
    let refused = |dag: &str, name: &str, arguments: &[&str]| {
        let output = partition(dag, name, arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let error = refused(APP3, "app3.toml", &["--free", "4g.71gb"]);
    assert!(error.contains("A100-80 has no MIG profile `4g.71gb`"), "{error}");
    for (flag, value, text) in [
        ("--batch", "0", "batch is 0: need at least 1"),
        ("--batch", "7", "batch 7"),
        ("--slo", "0ns", "slo is 0: need more than 0"),
        ("--hand-off-rate", "0", "bytes_per_second of hand-offs is 0: need more than 0"),
        ("--top", "1001", "1001 is not in"),
    ] {
        let error = refused(APP3, "app3.toml", &["--free", "1g.10gb", flag, value]);
        assert!(error.contains(text), "{flag} {value}: {error}");
    }
    let cycle = format!("{APP3}\n[[edges]]\nfrom = \"classification\"\nto = \"deblur\"\n");
    let error = refused(&cycle, "app3.toml", &["--free", "1g.10gb"]);
    assert!(error.contains("cycle: ") && error.contains("deblur"), "{error}");
    let component = |n: usize| {
        let profiles = r#"[{"slice": "1g.10gb", "time_ns": 1, "memory_bytes": 1}]"#;
        format!(r#"{{"name": "n{n}", "profiles": {profiles}}}"#)
    };
    let many: Vec<String> = (0..10_000).map(component).collect();
    let many = format!(r#"{{"components": [{}]}}"#, many.join(","));
    let error = refused(&many, "many.json", &["--free", "1g.10gb"]);
    assert!(error.contains("10000 components: at most 128"), "{error}");
    let overflow = many.replace("\"memory_bytes\": 1", "\"memory_bytes\": 18446744073709551615");
    let error = refused(&overflow[..overflow.len().min(200_000)], "cut.json", &["--free", "1g.10gb"]);
    assert!(error.contains("cut.json"), "{error}");
    let large = r#"{"components": [{"name": "a", "profiles": [{"slice": "1g.10gb", "time_ns": 18446744073709551615, "memory_bytes": 1}]}]}"#;
    let error = refused(large, "large.json", &["--free", "1g.10gb"]);
    assert!(
        error.contains("component `a` on 1g.10gb, batch 1: time_ns is ") && error.contains("at most 3600s"),
        "{error}"
    );
}
