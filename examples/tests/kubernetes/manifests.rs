//! The definition, the manifests and the README's examples.

use super::api_server::documents;
use super::kustomize::{check, one, rendered};
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

#[test]
fn the_manifests_belong_together_and_kubectl_renders_the_same() {
    for directory in ["", "daemon", "dra", "all-namespaces", "by-node", "host"] {
        // Each object named by a part exists, but for the namespace.
        let objects = check(&folder().join(directory));
        for object in &objects {
            let namespace = object["metadata"]["namespace"].as_str();
            let known = ["gshare-system", "gshare-functions"];
            assert!(namespace.is_none_or(|namespace| known.contains(&namespace)), "{object}");
        }
    }
    // The host leaves the mounts to the program of the node, below the kubelet's directory.
    let by_node = rendered(&folder().join("by-node"));
    let named = |name: &str| {
        let found = by_node.iter().find(|o| o["kind"] != "ServiceAccount" && o["metadata"]["name"] == name);
        found.unwrap()["spec"]["template"]["spec"].clone()
    };
    let of = |name: &str| {
        let found = by_node.iter().find(|o| o["kind"] == "Deployment" && o["metadata"]["name"] == name);
        found.unwrap()["spec"]["template"]["spec"]["containers"][0]["command"].clone()
    };
    let words = of("gshare-up");
    for set in ["host.kubernetes.mounts=\"node\"", "host.kubernetes.all_namespaces=true"] {
        assert!(words.as_array().unwrap().contains(&json!(format!("--set={set}"))), "{words}");
    }
    let pod = named("gshare-hook");
    let words = pod["containers"][0]["command"].as_array().unwrap().iter();
    let on_node = Options::try_parse_from(words.map(|word| word.as_str().unwrap())).unwrap();
    assert!(on_node.hooks);
    for volume in pod["volumes"].as_array().unwrap() {
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["name"] == volume["name"]).unwrap();
        assert_eq!(mount["mountPath"], volume["hostPath"]["path"], "as the node names it");
    }
    let sockets = Sockets::below(&on_node.kubelet, "x");
    let hook = Path::new(&on_node.hook).parent().unwrap();
    for path in [sockets.plugins.as_path(), &sockets.registry, hook] {
        let is_there = |volume: &Value| volume["hostPath"]["path"] == path.to_str().unwrap();
        assert!(pod["volumes"].as_array().unwrap().iter().any(is_there), "{}", path.display());
    }
}

/// The first field of an object which its type lacks; or the reason why it is unreadable.
fn stray<K: serde::Serialize + serde::de::DeserializeOwned>(object: &Value) -> Option<String> {
    let read: K = match serde_path_to_error::deserialize(object) {
        Ok(read) => read,
        Err(error) => return Some(error.to_string()),
    };
    unread(object, &json!(read), "")
}

fn unread(given: &Value, read: &Value, path: &str) -> Option<String> {
    match (given, read) {
        (Value::Object(given), Value::Object(read)) => {
            given.iter().find_map(|(key, value)| match read.get(key) {
                Some(read) => unread(value, read, &format!("{path}/{key}")),
                None => Some(format!("{path}/{key}: no such field")),
            })
        }
        (Value::Array(given), Value::Array(read)) if given.len() == read.len() => {
            let mut both = given.iter().zip(read).enumerate();
            both.find_map(|(index, (given, read))| unread(given, read, &format!("{path}/{index}")))
        }
        (given, read)
            if given == read || given.as_f64().is_some_and(|number| read.as_f64() == Some(number)) =>
        {
            None
        }
        (given, read) => Some(format!("{path}: {given} is read as {read}")),
    }
}

/// Each object of the manifests and examples against the types of the API of Kubernetes 1.34, without unknown fields: the checks of
/// `kubectl apply --validate=strict`.
#[test]
fn every_object_has_the_type_that_it_says_and_no_other_field() {
    use k8s_openapi::api::{admissionregistration, apps, core, networking, policy, rbac, resource};
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions;
    let mut objects = Vec::new();
    for directory in ["", "by-node", "host", "kind"] {
        objects.extend(rendered(&folder().join(directory)));
    }
    for example in ["dra/example.yaml", "dra/allocated-claim.yaml"] {
        objects.extend(documents(&manifest(example)));
    }
    for object in &objects {
        let (version, kind) = (object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
        let check: fn(&Value) -> Option<String> = match (version, kind) {
            ("v1", "Namespace") => stray::<core::v1::Namespace>,
            ("v1", "ServiceAccount") => stray::<core::v1::ServiceAccount>,
            ("v1", "Service") => stray::<core::v1::Service>,
            ("v1", "ConfigMap") => stray::<core::v1::ConfigMap>,
            ("v1", "Pod") => stray::<core::v1::Pod>,
            ("apps/v1", "DaemonSet") => stray::<apps::v1::DaemonSet>,
            ("apps/v1", "Deployment") => stray::<apps::v1::Deployment>,
            ("policy/v1", "PodDisruptionBudget") => stray::<policy::v1::PodDisruptionBudget>,
            ("networking.k8s.io/v1", "NetworkPolicy") => stray::<networking::v1::NetworkPolicy>,
            ("rbac.authorization.k8s.io/v1", "Role") => stray::<rbac::v1::Role>,
            ("rbac.authorization.k8s.io/v1", "RoleBinding") => stray::<rbac::v1::RoleBinding>,
            ("rbac.authorization.k8s.io/v1", "ClusterRole") => stray::<rbac::v1::ClusterRole>,
            ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => stray::<rbac::v1::ClusterRoleBinding>,
            ("resource.k8s.io/v1", "DeviceClass") => stray::<resource::v1::DeviceClass>,
            ("resource.k8s.io/v1", "ResourceClaim") => stray::<resource::v1::ResourceClaim>,
            ("resource.k8s.io/v1", "ResourceClaimTemplate") => stray::<resource::v1::ResourceClaimTemplate>,
            ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => {
                stray::<admissionregistration::v1::ValidatingAdmissionPolicy>
            }
            ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
                stray::<admissionregistration::v1::ValidatingAdmissionPolicyBinding>
            }
            ("apiextensions.k8s.io/v1", "CustomResourceDefinition") => {
                stray::<apiextensions::v1::CustomResourceDefinition>
            }
            other => panic!("{other:?}"),
        };
        if let Some(why) = check(object) {
            panic!("{kind} {}: {why}", object["metadata"]["name"]);
        }
    }
    let mut mistyped = rendered(&folder()).into_iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    mistyped["spec"]["template"]["spec"]["tolerates"] = json!([]);
    let why = stray::<apps::v1::DaemonSet>(&mistyped).unwrap();
    assert_eq!(why, "/spec/template/spec/tolerates: no such field");
}

/// Settings which operators look for first, in each manifest of both hosts.
#[test]
fn workloads_say_how_they_are_scheduled_updated_bounded_and_confined() {
    let objects = rendered(&folder().join("by-node"));
    let workloads: Vec<_> =
        objects.iter().filter(|object| object.pointer("/spec/template/spec/containers").is_some()).collect();
    let names: Vec<_> = workloads.iter().map(|one| one["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["gshared", "gshare-up", "gshare-dra", "gshare-hook"]);
    for workload in workloads {
        let (name, spec) = (&workload["metadata"]["name"], &workload["spec"]);
        let pod = &spec["template"]["spec"];
        let labels = &spec["selector"]["matchLabels"];
        let is_of_nodes = workload["kind"] == "DaemonSet";
        let class = if is_of_nodes { "system-node-critical" } else { "system-cluster-critical" };
        assert_eq!(pod["priorityClassName"], class, "{name}");
        let update = if is_of_nodes { "updateStrategy" } else { "strategy" };
        // Of this host the leader alone is ready: an update or a drain that waits for the other would never end.
        let one_is_ready = *name == "gshare-up";
        let most = if one_is_ready { json!("100%") } else { json!(1) };
        assert_eq!(spec[update]["rollingUpdate"]["maxUnavailable"], most, "{name}");
        if is_of_nodes {
            let gpu = json!([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]);
            assert_eq!(pod["tolerations"], gpu, "{name}");
        } else {
            assert_eq!(spec["replicas"], 2, "{name}");
            let apart =
                &pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0];
            assert_eq!(&apart["podAffinityTerm"]["labelSelector"]["matchLabels"], labels, "{name}");
            let budget = objects.iter().find(|object| {
                object["kind"] == "PodDisruptionBudget" && object["metadata"]["name"] == *name
            });
            assert_eq!(budget.is_none(), one_is_ready, "{name}: PodDisruptionBudget");
            if let Some(budget) = budget {
                assert_eq!(budget["spec"]["selector"]["matchLabels"], *labels, "{name}");
                assert_eq!(budget["spec"]["maxUnavailable"], 1, "{name}");
            }
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

/// Most clusters demand containers that do not run as root.
#[test]
fn the_daemon_takes_containers_of_any_user() {
    let objects = documents(&manifest("daemon/daemon.yaml"));
    let config = one(&objects, "ConfigMap")["data"]["gshared.toml"].as_str().unwrap();
    assert!(gshared::Config::parse(config).unwrap().allow_any_user);
}

/// The probes ask the admin socket of the daemon's configuration, by a command in the image.
#[test]
fn the_daemon_is_asked_whether_it_answers() {
    let objects = documents(&manifest("daemon/daemon.yaml"));
    let daemon = &one(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let config = one(&objects, "ConfigMap")["data"]["gshared.toml"].as_str().unwrap();
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
    for file in ["host/host.yaml", "by-node/node.yaml", "dra/driver.yaml", "daemon/daemon.yaml"] {
        for object in documents(&manifest(file)) {
            let containers = object.pointer("/spec/template/spec/containers").and_then(Value::as_array);
            for container in
                containers.into_iter().flatten().filter(|container| container["image"] == "gshare")
            {
                let program = container["command"][0].as_str().unwrap();
                for recipe in RECIPES {
                    let has = copied(recipe).iter().any(|word| word.ends_with(&format!("/{program}")));
                    assert!(has, "{file}: {recipe}: {program}");
                }
            }
        }
    }
}
