//! The output of `kubectl kustomize` for a directory, by the few rules used here: files and directories of resources, a namespace, labels,
//! the names of images. If kubectl is installed, it must give the same.

use super::api_server::documents;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const CLUSTER_WIDE: [&str; 8] = [
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "DeviceClass",
    "Namespace",
    "PriorityClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    documents(&text)
}

/// The objects in the order of their files.
pub(crate) fn rendered(directory: &Path) -> Vec<Value> {
    let kustomization = read(&directory.join("kustomization.yaml")).remove(0);
    let mut objects = Vec::new();
    for (key, value) in kustomization.as_object().unwrap() {
        match key.as_str() {
            "apiVersion" => assert_eq!(value, "kustomize.config.k8s.io/v1beta1"),
            "kind" => assert_eq!(value, "Kustomization"),
            "resources" | "namespace" | "labels" | "images" | "patches" => {}
            other => panic!("{other}: not known to this test"),
        }
    }
    for resource in kustomization["resources"].as_array().unwrap() {
        let path = directory.join(resource.as_str().unwrap());
        objects.extend(if path.is_dir() { rendered(&path) } else { read(&path) });
    }
    for object in &mut objects {
        if let Some(namespace) = kustomization["namespace"].as_str() {
            settle(object, namespace);
        }
        for labels in kustomization["labels"].as_array().into_iter().flatten() {
            assert_eq!(labels.as_object().unwrap().len(), 1, "pairs alone: selectors are left as they are");
            for (key, value) in labels["pairs"].as_object().unwrap() {
                object["metadata"]["labels"][key] = value.clone();
            }
        }
        for image in kustomization["images"].as_array().into_iter().flatten() {
            let new = format!("{}:{}", image["newName"].as_str().unwrap(), image["newTag"].as_str().unwrap());
            for kind in ["containers", "initContainers"] {
                let containers = object.pointer_mut(&format!("/spec/template/spec/{kind}"));
                for container in containers.and_then(Value::as_array_mut).into_iter().flatten() {
                    if container["image"] == image["name"] {
                        container["image"] = json!(new);
                    }
                }
            }
        }
    }
    for patch in kustomization["patches"].as_array().into_iter().flatten() {
        let target = &patch["target"];
        let is_meant = |object: &&mut Value| {
            object["kind"] == target["kind"] && object["metadata"]["name"] == target["name"]
        };
        let object = objects.iter_mut().find(is_meant).unwrap_or_else(|| panic!("no {target}"));
        for step in documents(patch["patch"].as_str().unwrap()).remove(0).as_array().unwrap() {
            let list = step["path"].as_str().unwrap().strip_suffix("/-").expect("adds to a list");
            assert_eq!(step["op"], "add");
            object.pointer_mut(list).unwrap().as_array_mut().unwrap().push(step["value"].clone());
        }
    }
    objects
}

fn settle(object: &mut Value, namespace: &str) {
    let kind = object["kind"].as_str().unwrap().to_owned();
    if kind == "Namespace" {
        object["metadata"]["name"] = json!(namespace);
    } else if !CLUSTER_WIDE.contains(&kind.as_str()) {
        object["metadata"]["namespace"] = json!(namespace);
    }
    for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
        if subject["kind"] == "ServiceAccount" {
            subject["namespace"] = json!(namespace);
        }
    }
}

/// Checks that the objects name only each other, and the place of each; and that kubectl renders the same.
pub(crate) fn check(directory: &Path) -> Vec<Value> {
    let objects = rendered(directory);
    let name = |object: &Value| {
        let of = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        (of("/kind"), of("/metadata/namespace"), of("/metadata/name"))
    };
    let mut names: Vec<_> = objects.iter().map(name).collect();
    names.sort();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all, "each object once: {names:?}");
    let there = |kind: &str, namespace: &Value, name: &Value| {
        let namespace = namespace.as_str().unwrap_or_default();
        let wanted = (kind.to_owned(), namespace.to_owned(), name.as_str().unwrap().to_owned());
        assert!(names.contains(&wanted), "{wanted:?} is not there: {names:?}");
    };
    for object in &objects {
        assert!(object["apiVersion"].is_string(), "{object}");
        let (kind, namespace, _) = name(object);
        let wide = CLUSTER_WIDE.contains(&kind.as_str());
        assert_eq!(namespace.is_empty(), wide, "{kind} {}", object["metadata"]["name"]);
        match kind.as_str() {
            "ClusterRoleBinding" | "RoleBinding" => {
                let role = object["roleRef"]["kind"].as_str().unwrap();
                there(role, &object["metadata"]["namespace"], &object["roleRef"]["name"]);
                let subject = &object["subjects"][0];
                there("ServiceAccount", &subject["namespace"], &subject["name"]);
            }
            "Deployment" | "DaemonSet" => {
                let pod = &object["spec"]["template"];
                there("ServiceAccount", &object["metadata"]["namespace"], &pod["spec"]["serviceAccountName"]);
                let labels = pod["metadata"]["labels"].as_object().unwrap();
                let selector = object["spec"]["selector"]["matchLabels"].as_object().unwrap();
                assert!(selector.iter().all(|(key, value)| labels.get(key) == Some(value)), "{object}");
            }
            _ => {}
        }
    }
    match Command::new("kubectl").arg("kustomize").arg(directory).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let mut theirs = documents(&String::from_utf8(output.stdout).unwrap());
            let mut ours = objects.clone();
            for all in [&mut theirs, &mut ours] {
                all.sort_by_key(name);
                all.iter_mut().for_each(plain);
            }
            assert_eq!(theirs, ours);
        }
        Err(error) => eprintln!("no kubectl here ({error}): rendered by the rules of this test alone"),
    }
    objects
}

/// Makes every number a float, so that 1000 and 1000.0 are the same.
fn plain(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let number = number.as_f64().unwrap();
            *value = json!(number);
        }
        Value::Array(all) => all.iter_mut().for_each(plain),
        Value::Object(all) => all.values_mut().for_each(plain),
        _ => {}
    }
}

/// The one object of a kind.
pub(crate) fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut of = objects.iter().filter(|object| object["kind"] == *kind);
    let found = of.next().unwrap_or_else(|| panic!("{kind}"));
    assert!(of.next().is_none(), "two of {kind}");
    found
}
