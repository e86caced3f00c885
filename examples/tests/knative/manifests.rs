//! The manifests, and the README's examples.

use super::api_server::documents;
use super::kustomize::{check, one};
use clap::Parser as _;
use gshare_examples::knative::Options;
use gshare_examples::knative::api::{CLASS, PodAutoscaler, PodAutoscalerSpec};
use gshare_examples::knative::settings::Settings;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("knative")
}

fn read(file: &str) -> Vec<Value> {
    documents(&std::fs::read_to_string(folder().join(file)).unwrap())
}

#[test]
fn the_manifests_fit_together_and_kubectl_renders_the_same() {
    let all = check(&folder());
    let kustomization = read("kustomization.yaml").remove(0);
    let deployment = one(&all, "Deployment");
    assert_eq!(deployment["metadata"]["namespace"], kustomization["namespace"]);
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "gshare-knative:0.1.0");
    // The program takes these arguments, and its class agrees with the example.
    let namespace = deployment["metadata"]["namespace"].as_str().unwrap();
    assert_eq!(container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"], "metadata.namespace");
    let arguments = container["args"].as_array().unwrap().iter();
    let arguments = arguments.map(|argument| argument.as_str().unwrap().replace("$(NAMESPACE)", namespace));
    let options = Options::try_parse_from(std::iter::once("knative".to_owned()).chain(arguments)).unwrap();
    // Two replicas need a lease, and its rights agree with the manifest.
    assert_eq!(deployment["spec"]["replicas"], 2);
    let role = one(&all, "Role");
    let names = &role["rules"][1]["resourceNames"];
    assert_eq!(options.lease.unwrap().to_string(), format!("{namespace}/{}", names[0].as_str().unwrap()));
    let service = read("service.yaml").remove(0);
    let annotations = &service["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations[CLASS], options.class.as_str());
    let concurrency = &service["spec"]["template"]["spec"]["containerConcurrency"];
    let spec = PodAutoscalerSpec {
        container_concurrency: serde_json::from_value(concurrency.clone()).unwrap(),
        ..PodAutoscalerSpec::default()
    };
    let mut pa = PodAutoscaler::new("resnet", spec);
    pa.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
    let settings = Settings::of(&pa, &options.defaults).unwrap();
    assert_eq!((settings.min, settings.max, settings.target.as_milli()), (0, 8, 27_000));
}

#[test]
fn the_readme_shows_what_a_dry_run_prints() {
    let output = Command::new(env!("CARGO_BIN_EXE_knative")).arg("--dry-run").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.lines().count() > 10 && include_str!("../../README.md").contains(&printed), "{printed}");
}

#[test]
fn a_dry_run_takes_a_load_of_its_own_and_names_what_does_not_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let play = |load: &str| {
        std::fs::write(file.path(), load).unwrap();
        let flag = format!("--dry-run={}", file.path().display());
        let output =
            Command::new(env!("CARGO_BIN_EXE_knative")).args([&flag, "--policy=heuristic"]).output().unwrap();
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let (ok, printed) = play("0 10\n20 100\n");
    assert!(ok && printed.lines().any(|line| line.starts_with("    20     100        4")), "{printed}");
    for (load, why) in [
        ("", "need a line"),
        ("now 3", "line 1: second: need 0 to 86400"),
        ("0 -3", "line 1: requests per second"),
        ("5 1\n5 2", "line 2: second: need more than the line before"),
        ("7", "line 1: `7`: need SECOND REQUESTS_PER_SECOND"),
    ] {
        let (ok, printed) = play(load);
        assert!(!ok && printed.contains(why), "{load}: {printed}");
    }
}

#[test]
fn a_class_of_knatives_own_domain_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_knative"))
        .args(["--class", "co.autoscaling.knative.dev"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("need another domain than knative.dev"), "{said}");
}

#[test]
fn without_a_cluster_it_says_so() {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_knative"));
    command.env("HOME", home.path()).env("KUBECONFIG", home.path().join("none"));
    let output = command.env_remove("KUBERNETES_SERVICE_HOST").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("no cluster: neither kubeconfig nor service account"),
        "{said}"
    );
}
