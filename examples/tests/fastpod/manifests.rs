//! The definition, the manifests and the README's examples.

use super::api_server::documents;
use super::decisions::settled;
use super::kustomize::{check, one, rendered};
use clap::Parser as _;
use gshare_examples::kubernetes::fastpod::pod_share::{Profiles, share};
use gshare_examples::kubernetes::fastpod::pods::Mounts;
use gshare_examples::kubernetes::fastpod::{FaSTPod, command};
use gshare_examples::kubernetes::plugin::Sockets;
use kube::ResourceExt as _;
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
fn the_definition_is_the_one_that_is_checked_in() {
    assert_eq!(command::crd().unwrap(), manifest("fastpod/crd.yaml"), "write it: fastpod --crd");
}

/// The checked-in schema of the definition, as a JSON schema.
fn schema() -> jsonschema::Validator {
    let definition = documents(&manifest("fastpod/crd.yaml")).remove(0);
    jsonschema::validator_for(&definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]).unwrap()
}

#[test]
fn the_schema_accepts_the_examples_and_refuses_each_bad_one() {
    let schema = schema();
    let examples = documents(&manifest("fastpod/example.yaml"));
    assert!(!examples.is_empty());
    for example in &examples {
        assert!(schema.is_valid(example), "{example}");
        let read: FaSTPod = serde_json::from_value(example.clone()).unwrap();
        assert!(share(read.annotations(), &Profiles::new()).is_ok(), "what the schema cannot see");
        // A status as the controller writes it.
        let mut told = example.clone();
        told["status"] = settled();
        assert!(schema.is_valid(&told), "{told}");
    }
    let good = &examples[0];
    for (path, bad) in [
        ("/spec", Value::Null),
        ("/spec", json!([])),
        ("/spec/replicas", json!(-1)),
        ("/spec/replicas", json!(1001)),
        ("/spec/replicas", json!(1.5)),
        ("/spec/replicas", json!("2")),
        ("/spec/selector", json!("app=rnnt")),
        ("/spec/selector/matchLabels", json!({"app": 5})),
        ("/spec/podSpec", json!({})),
        ("/spec/podSpec", json!("image")),
        ("/spec/podSpec/containers", json!([])),
        ("/spec/podSpec/containers", json!({"name": "rnnt"})),
        // As Figure 4 prints them.
        ("/spec/podSpec/containers/0", json!({"image": "x"})),
        ("/spec/podSpec/containers/0", json!({"name": "rnnt"})),
        ("/spec/podSpec/containers/0/name", json!("Not_A_Name")),
        ("/spec/podSpec/containers/0/image", json!("")),
        ("/spec/podSpec/nodeName", json!("a")),
        ("/spec/podSpec/restartPolicy", json!("Never")),
        ("/status", json!({"replicas": "two"})),
        ("/status", json!({"boundDeviceIDs": ["a/0"]})),
        ("/status", json!({"conditions": [{"type": "Placed"}]})),
    ] {
        let mut changed = good.clone();
        let (parent, key) = path.rsplit_once('/').unwrap();
        let parent = changed.pointer_mut(parent).unwrap();
        match key.parse::<usize>() {
            Ok(index) => parent[index] = bad.clone(),
            Err(_) => parent[key] = bad.clone(),
        }
        assert!(!schema.is_valid(&changed), "{path}: {bad}");
    }
    let mut missing = good.clone();
    missing.as_object_mut().unwrap().remove("spec");
    assert!(!schema.is_valid(&missing));
}

#[test]
fn the_manifests_belong_together_and_kubectl_renders_the_same() {
    for directory in ["", "daemon", "dra", "fastpod", "by-node", "host"] {
        // Each object named by a part exists, but for the namespace.
        let objects = check(&folder().join(directory));
        for object in &objects {
            let namespace = object["metadata"]["namespace"].as_str();
            let known = ["gshare-system", "gshare-functions"];
            assert!(namespace.is_none_or(|namespace| known.contains(&namespace)), "{object}");
        }
    }
    // The program takes these arguments.
    let objects = check(&folder().join("fastpod"));
    let container = &one(&objects, "Deployment")["spec"]["template"]["spec"]["containers"][0];
    let words = container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
    let options = command::Options::try_parse_from(words).unwrap();
    assert_eq!(options.mounts, Mounts::HostPath);
    let mount = container["volumeMounts"][0]["mountPath"].as_str().unwrap();
    assert_eq!(options.profiles.as_deref(), Some(Path::new(mount)));
    // The controller of the other directory leaves mounts to the node's program there, below the kubelet's directory.
    let by_node = rendered(&folder().join("by-node"));
    let named = |name: &str| {
        by_node.iter().find(|o| o["kind"] != "ServiceAccount" && o["metadata"]["name"] == name).unwrap()
    };
    let options_of = |name: &str| {
        let pod = &named(name)["spec"]["template"]["spec"];
        let words = pod["containers"][0]["command"].as_array().unwrap().clone();
        (
            command::Options::try_parse_from(words.iter().map(|word| word.as_str().unwrap())).unwrap(),
            pod.clone(),
        )
    };
    assert_eq!(options_of("fastpod").0.mounts, Mounts::Node);
    let (on_node, pod) = options_of("fastpod-node");
    assert!(on_node.node);
    for volume in pod["volumes"].as_array().unwrap() {
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["name"] == volume["name"]).unwrap();
        assert_eq!(mount["mountPath"], volume["hostPath"]["path"], "as the node names it");
    }
    let sockets = Sockets::below(&on_node.kubelet, "x");
    for path in [&sockets.plugins, &sockets.registry, &on_node.hook_dir] {
        let is_there = |volume: &Value| volume["hostPath"]["path"] == path.to_str().unwrap();
        assert!(pod["volumes"].as_array().unwrap().iter().any(is_there), "{}", path.display());
    }
    // Two replicas need a lease, and its rights agree with the manifest.
    assert_eq!(one(&objects, "Deployment")["spec"]["replicas"], 2);
    let role = one(&objects, "Role");
    let lease = [&role["metadata"]["namespace"], &role["rules"][1]["resourceNames"][0]];
    let lease = lease.map(|part| part.as_str().unwrap()).join("/");
    assert_eq!(options.lease.unwrap().to_string(), lease);
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
    for directory in ["", "by-node", "host", "kind", "../knative"] {
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
    let mut objects = rendered(&folder().join("by-node"));
    objects.extend(rendered(&folder().with_file_name("knative")));
    let is_new = |one: &Value| one["metadata"]["name"] == "gshare-up";
    objects.extend(rendered(&folder().join("host")).into_iter().filter(is_new));
    let workloads: Vec<_> =
        objects.iter().filter(|object| object.pointer("/spec/template/spec/containers").is_some()).collect();
    let names: Vec<_> = workloads.iter().map(|one| one["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["gshared", "gshare-dra", "fastpod", "fastpod-node", "knative", "gshare-up"]);
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

fn fastpod(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_fastpod")).args(arguments).output().unwrap();
    let said = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8(said).unwrap())
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
    for file in [
        "fastpod/controller.yaml",
        "host/host.yaml",
        "by-node/node.yaml",
        "dra/driver.yaml",
        "daemon/daemon.yaml",
    ] {
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

#[test]
fn without_a_cluster_the_places_are_printed_as_the_readme_shows() {
    let example = folder().join("fastpod/example.yaml");
    let (ok, printed) = fastpod(&["--dry-run", example.to_str().unwrap()]);
    assert!(ok && printed.lines().count() == 4, "{printed}");
    assert!(include_str!("../../README.md").contains(&printed), "{printed}");
}

#[test]
fn a_dry_run_takes_shares_from_profiles_and_names_what_does_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let fastpods = write(
        "f.yaml",
        "apiVersion: gshare.io/v1alpha1\nkind: FaSTPod\nmetadata:\n  name: f\n  annotations:\n    gshare.io/profile: resnet\n\
         spec:\n  replicas: 5\n  podSpec:\n    containers:\n      - name: f\n        image: f\n",
    );
    let profiles = directory.path().to_str().unwrap();
    let (ok, said) = fastpod(&["--dry-run", &fastpods, "--profiles", profiles]);
    assert!(
        ok && said.contains("f: BadShare: annotations: gshare.io/profile: `resnet`: not one of []"),
        "{said}"
    );
    let table = write(
        "resnet.json",
        r#"{"sparse": true, "points": [{"sm_basis_points": 5000, "quota_basis_points": 6000, "batch": 1,
            "throughput_milli_rps": 9000, "p50_ns": 5, "p95_ns": 6}]}"#,
    );
    let (ok, said) = fastpod(&["--dry-run", &fastpods, "--profiles", profiles, "--gpus", "2"]);
    assert!(ok && said.contains("f: NoRoom: 1 of 5 new pods"), "{said}");
    assert_eq!(said.matches("60%    50%").count(), 4, "{said}");
    std::fs::write(&table, "{}").unwrap();
    let (ok, said) = fastpod(&["--dry-run", &fastpods, "--profiles", profiles]);
    assert!(!ok && said.contains("resnet.json") && said.contains("points"), "{said}");
    let bad = write("bad.yaml", "kind: FaSTPod\n");
    let (ok, said) = fastpod(&["--dry-run", &bad]);
    assert!(!ok && said.contains("bad.yaml"), "{said}");
}

#[test]
fn without_a_cluster_it_says_so() {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastpod"));
    command.env("HOME", home.path()).env("KUBECONFIG", home.path().join("none"));
    let output = command.env_remove("KUBERNETES_SERVICE_HOST").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("no API server. Without a cluster: --dry-run"),
        "{said}"
    );
}
