//! The manifests, and what the README shows.

use clap::Parser as _;
use gshare_examples::knative::Options;
use gshare_examples::knative::api::{CLASS, PodAutoscaler, PodAutoscalerSpec};
use gshare_examples::knative::settings::Settings;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("knative")
}

fn documents(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder().join(file)).unwrap();
    serde_saphyr::from_multiple(&text).unwrap()
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("{pointer} of {value}"))
}

/// All that the kustomization lists.
fn resources() -> (Value, Vec<Value>) {
    let kustomization = documents("kustomization.yaml").remove(0);
    let files = kustomization["resources"].as_array().unwrap().iter();
    let all = files.flat_map(|file| documents(file.as_str().unwrap())).collect();
    (kustomization, all)
}

fn names(all: &[Value]) -> BTreeSet<(String, String)> {
    let name = |one: &Value| (text(one, "/kind").to_owned(), text(one, "/metadata/name").to_owned());
    all.iter().map(name).collect()
}

#[test]
fn the_manifests_fit_together() {
    let (kustomization, all) = resources();
    let one = |kind: &str| {
        let mut of = all.iter().filter(|one| one["kind"] == *kind);
        let found = of.next().unwrap_or_else(|| panic!("{kind}"));
        assert!(of.next().is_none(), "two of {kind}");
        found
    };
    for resource in &all {
        text(resource, "/apiVersion");
    }
    let namespace = text(one("Namespace"), "/metadata/name");
    assert_eq!(text(&kustomization, "/namespace"), namespace);
    let (role, binding, account) = (one("ClusterRole"), one("ClusterRoleBinding"), one("ServiceAccount"));
    assert_eq!(text(binding, "/roleRef/name"), text(role, "/metadata/name"));
    assert_eq!(text(binding, "/subjects/0/name"), text(account, "/metadata/name"));
    assert_eq!(text(binding, "/subjects/0/namespace"), namespace);
    let deployment = one("Deployment");
    assert_eq!(deployment["spec"]["replicas"], 1, "no leader is elected");
    assert_eq!(text(deployment, "/spec/strategy/type"), "Recreate");
    let template = &deployment["spec"]["template"];
    assert_eq!(deployment["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]);
    assert_eq!(text(template, "/spec/serviceAccountName"), text(account, "/metadata/name"));
    let container = &template["spec"]["containers"][0];
    assert_eq!(text(container, "/image"), text(&kustomization, "/images/0/name"));
    // The program takes these arguments, and its class is that of the example.
    let arguments = container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap());
    let options = Options::try_parse_from(["knative"].into_iter().chain(arguments)).unwrap();
    let service = documents("service.yaml").remove(0);
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
fn kubectl_renders_the_kustomization() {
    let Ok(output) = Command::new("kubectl").arg("kustomize").arg(folder()).output() else {
        return eprintln!(
            "kubectl is not here: the kustomization is not rendered; that its parts fit is tested without it"
        );
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rendered: Vec<Value> =
        serde_saphyr::from_multiple(&String::from_utf8(output.stdout).unwrap()).unwrap();
    assert_eq!(names(&rendered), names(&resources().1));
    let deployment = rendered.iter().find(|one| one["kind"] == "Deployment").unwrap();
    assert_eq!(text(deployment, "/metadata/namespace"), "gshare");
    assert_eq!(text(deployment, "/spec/template/spec/containers/0/image"), "gshare-knative:latest");
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
