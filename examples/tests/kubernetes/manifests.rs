//! The manifests and the programs that they start. `kubernetes/test_chart.py` renders them and holds them against the schemas.

use super::support::api_server::documents;
use clap::Parser as _;
use gshare_examples::kubernetes::dra::command::Options;
use gshare_examples::kubernetes::plugin::Sockets;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes")
}

fn manifest(path: &str) -> String {
    let path = folder().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The objects of some manifests.
pub(crate) fn objects(paths: &[&str]) -> Vec<Value> {
    paths.iter().flat_map(|path| documents(&manifest(path))).collect()
}

/// The one object of a kind.
pub(crate) fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let of: Vec<_> = objects.iter().filter(|object| object["kind"] == *kind).collect();
    assert_eq!(of.len(), 1, "{kind}");
    of[0]
}

/// Objects with a template of pods.
fn workloads() -> Vec<Value> {
    let all = objects(&["daemon/daemon.yaml", "host/host.yaml", "dra/driver.yaml", "by-node/node.yaml"]);
    all.into_iter().filter(|object| object["spec"]["template"].is_object()).collect()
}

/// The words of a container's command.
fn words(container: &Value) -> Vec<String> {
    serde_json::from_value(container["command"].clone()).unwrap()
}

#[test]
fn the_program_of_the_node_sees_the_directories_that_its_options_name() {
    let of_node = objects(&["by-node/node.yaml"]);
    let pod = &one(&of_node, "DaemonSet")["spec"]["template"]["spec"];
    let on_node = Options::try_parse_from(words(&pod["containers"][0])).unwrap();
    assert!(on_node.hooks);
    for volume in pod["volumes"].as_array().unwrap() {
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["name"] == volume["name"]).unwrap();
        assert_eq!(mount["mountPath"], volume["hostPath"]["path"], "as the node names it");
    }
    let sockets = Sockets::below(&on_node.kubelet, "x");
    let hook = Path::new(&on_node.hook).parent().unwrap();
    let (plugin, registration) = (sockets.plugin(), sockets.registration());
    for path in [plugin.ancestors().nth(2).unwrap(), registration.parent().unwrap(), hook] {
        let is_there = |volume: &Value| volume["hostPath"]["path"] == path.to_str().unwrap();
        assert!(pod["volumes"].as_array().unwrap().iter().any(is_there), "{}", path.display());
    }
    // On kind the driver has simulated GPUs.
    let on_kind = objects(&["dra/driver.yaml", "kind/kustomization.yaml"]);
    let mut words = words(&one(&on_kind, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]);
    let patch = documents(one(&on_kind, "Kustomization")["patches"][0]["patch"].as_str().unwrap());
    words.push(patch[0][0]["value"].as_str().unwrap().to_owned());
    assert_eq!(Options::try_parse_from(words).unwrap().sim, Some(2));
}

/// Settings which operators look for first, in each manifest of both hosts.
#[test]
fn workloads_say_how_they_are_scheduled_updated_bounded_and_confined() {
    let workloads = workloads();
    let names: Vec<_> = workloads.iter().map(|one| one["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["gshared", "gshare-up", "gshare-dra", "gshare-hook"]);
    for workload in &workloads {
        let (name, spec) = (&workload["metadata"]["name"], &workload["spec"]);
        let pod = &spec["template"]["spec"];
        let labels = &spec["selector"]["matchLabels"];
        let is_of_nodes = workload["kind"] == "DaemonSet";
        let class = if is_of_nodes { "system-node-critical" } else { "system-cluster-critical" };
        assert_eq!(pod["priorityClassName"], class, "{name}");
        let update = if is_of_nodes { "updateStrategy" } else { "strategy" };
        // Of this host the leader alone is ready: an update or a drain that waits for the other would never end.
        let most = if is_of_nodes { json!(1) } else { json!("100%") };
        assert_eq!(spec[update]["rollingUpdate"]["maxUnavailable"], most, "{name}");
        if is_of_nodes {
            let gpu = json!([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]);
            assert_eq!(pod["tolerations"], gpu, "{name}");
        } else {
            assert_eq!(spec["replicas"], 2, "{name}");
            let apart =
                &pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0];
            assert_eq!(&apart["podAffinityTerm"]["labelSelector"]["matchLabels"], labels, "{name}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        }
        let main = &pod["containers"][0];
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            assert!(main[probe].is_object(), "{name}: {probe}");
        }
        let own = json!([{"name": "http", "containerPort": 8080}]);
        let port = json!([{"name": "metrics", "containerPort": 9478}]);
        let port = if name == "gshare-up" { own } else { port };
        assert_eq!(main["ports"], port, "{name}: Prometheus reaches its metrics");
        let all = ["containers", "initContainers"].into_iter().filter_map(|kind| pod[kind].as_array());
        for container in all.flatten() {
            let what = format!("{name}: {}", container["name"]);
            for resource in ["cpu", "memory"] {
                assert!(container["resources"]["requests"][resource].is_string(), "{what}: {resource}");
            }
            let confined = &container["securityContext"];
            assert_eq!(confined["allowPrivilegeEscalation"], false, "{what}");
            // The daemon has processes of all users of its node as clients, and writes its journal.
            if container["name"] != "gshared" {
                assert_eq!(confined["readOnlyRootFilesystem"], true, "{what}");
                assert_eq!(confined["capabilities"]["drop"], json!(["ALL"]), "{what}");
            }
        }
    }
}

/// The probes ask the admin socket of the daemon's configuration, by a command in the image.
#[test]
fn the_daemon_is_asked_whether_it_answers_and_takes_containers_of_any_user() {
    let objects = documents(&manifest("daemon/daemon.yaml"));
    let daemon = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let config = one(&objects, "ConfigMap")["data"]["gshared.toml"].as_str().unwrap();
    // Most clusters demand containers that do not run as root.
    assert!(gshared::Config::parse(config).unwrap().allow_any_user);
    let (_, socket) = config.split_once("\nadmin_socket = \"").unwrap();
    let socket = socket.trim_end().trim_end_matches('"').replace("-admin.sock", ".sock");
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let command = json!(["gshare", "status", "--socket", socket]);
        assert_eq!(daemon[probe]["exec"]["command"], command, "{probe}");
        assert!(daemon[probe]["timeoutSeconds"].as_u64() >= Some(5), "{probe}: a process is started");
    }
    for recipe in RECIPES {
        assert!(copied(recipe).iter().any(|word| word.ends_with("/gshare")), "{recipe}");
    }
}

/// Containers find the hook at the preload's path; both files are put into place whole.
#[test]
fn the_daemon_brings_the_hook_and_the_preload_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let [image, host] = ["image", "host"].map(|name| directory.path().join(name));
    for path in [&image, &host] {
        std::fs::create_dir(path).unwrap();
    }
    std::fs::write(image.join("libgshare_hook.so"), "hook").unwrap();
    let daemon = documents(&manifest("daemon/daemon.yaml")).pop().unwrap();
    let command =
        daemon["spec"]["template"]["spec"]["initContainers"][0]["command"].as_array().unwrap().clone();
    let script = command.last().unwrap().as_str().unwrap();
    let script = script.replace("/opt/gshare", host.to_str().unwrap());
    let script = script.replace("cp /usr/lib/gshare", &format!("cp {}", image.display()));
    let run = || {
        let options: Vec<_> =
            command[1..command.len() - 1].iter().map(|word| word.as_str().unwrap()).collect();
        let mut shell = Command::new(command[0].as_str().unwrap());
        shell.args(options).arg(&script).status().unwrap().success()
    };
    for _ in 0..2 {
        assert!(run());
        let read = |name: &str| std::fs::read_to_string(host.join(name)).unwrap();
        assert_eq!(read("libgshare_hook.so"), "hook");
        assert_eq!(read("ld.so.preload"), "/usr/lib/gshare/libgshare_hook.so\n");
        assert_eq!(std::fs::read_dir(&host).unwrap().count(), 2, "nothing else");
    }
    // An image without the hook is no success.
    std::fs::remove_file(image.join("libgshare_hook.so")).unwrap();
    assert!(!run());
}

/// Two recipes of one image: the second compiles nothing.
const RECIPES: [&str; 2] = ["Containerfile", "Containerfile.prebuilt"];

/// Words of a recipe's last stage, which is the image.
fn copied(recipe: &str) -> Vec<String> {
    let text = manifest(recipe);
    let (_, last) = text.rsplit_once("\nFROM ").unwrap();
    last.split_whitespace().map(str::to_owned).collect()
}

/// Containers use other images: the hook of the image is the one built and checked by package.py, for glibc 2.17.
#[test]
fn the_image_has_the_hook_for_an_old_c_library() {
    let shipped = "package/x86_64-unknown-linux-gnu/release/libgshare_hook.so";
    let (built, prebuilt) = (manifest(RECIPES[0]), copied(RECIPES[1]));
    assert!(
        built.contains("python3 gshare-hook/package/package.py")
            && built.contains(&format!("target/{shipped}"))
    );
    assert!(prebuilt.iter().any(|word| word == shipped));
    for recipe in RECIPES {
        assert!(
            copied(recipe).contains(&"/usr/lib/gshare/".to_owned()),
            "{recipe}: where the daemon's pod takes it from"
        );
    }
}

#[test]
fn the_image_has_the_programs_that_the_manifests_start() {
    for workload in workloads() {
        let containers = workload["spec"]["template"]["spec"]["containers"].as_array().unwrap().iter();
        for container in containers.filter(|container| container["image"] == "gshare") {
            let program = format!("/{}", container["command"][0].as_str().unwrap());
            for recipe in RECIPES {
                assert!(copied(recipe).iter().any(|word| word.ends_with(&program)), "{recipe}: {program}");
            }
        }
    }
}
