//! The pod template of a function: volumes, node selectors, further containers, and the rest of a pod beyond the fields of a `GpuFunction`.
//! Pure.
//!
//! The container [`CONTAINER`] of the template is the function's program, and runs the function's image with its arguments. The host
//! keeps every other field, and adds a port and a probe where the template gives none.

use crate::api::FunctionDeployment;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use serde_json::{Value, json};

/// Annotation of a deployment with its pod template, as JSON.
pub const TEMPLATE: &str = "gshare/pod_template";
/// The container with the program of the function.
pub const CONTAINER: &str = "function";
/// The port at which a program in a pod listens, on all addresses, unless its container states another.
pub const PORT: u16 = 8080;

/// The template of a deployment, with the container of its program first.
///
/// # Errors
/// Names the annotation and the field. A field that pods lack is an error: dropped in silence, a mistyped `resources` would run without
/// its limits.
pub fn template(deployment: &FunctionDeployment) -> Result<PodTemplateSpec, String> {
    let Some(text) = deployment.annotations.as_ref().and_then(|all| all.get(TEMPLATE)) else {
        let spec = Some(with_program(PodSpec::default()));
        return Ok(PodTemplateSpec { spec, ..PodTemplateSpec::default() });
    };
    let at = |path: &str, why: &dyn core::fmt::Display| format!("annotations: {TEMPLATE}{path}: {why}");
    let given: Value = serde_json::from_str(text).map_err(|error| at("", &error))?;
    let read: PodTemplateSpec = serde_path_to_error::deserialize(&given).map_err(|error| {
        let path = error.path().to_string();
        at(&if path == "." { String::new() } else { format!(".{path}") }, error.inner())
    })?;
    let kept = serde_json::to_value(&read).map_err(|error| at("", &error))?;
    if let Some(path) = unknown(&given, &kept, "") {
        return Err(at(&path, &"is no field of a pod: leave it out"));
    }
    let other = given["metadata"].as_object().into_iter().flatten().map(|(key, _)| key);
    if let Some(key) = other.into_iter().find(|key| !["labels", "annotations"].contains(&key.as_str())) {
        return Err(at(
            &format!(".metadata.{key}"),
            &"the host names and owns its pods: need labels or annotations",
        ));
    }
    let metadata = read.metadata.clone().unwrap_or_default();
    let keys = metadata.labels.iter().flatten().chain(metadata.annotations.iter().flatten());
    if let Some((key, _)) = keys.into_iter().find(|(key, _)| key.contains("gshare.io/")) {
        return Err(at(".metadata", &format!("`{key}`: gshare.io/ is for the host: leave it out")));
    }
    let spec = read.spec.unwrap_or_default();
    let program = spec.containers.iter().find(|one| one.name == CONTAINER);
    let says = |of: fn(&Container) -> bool| program.is_some_and(of);
    let restarts = spec.restart_policy.as_deref().is_some_and(|policy| policy != "Never");
    let refused = [
        ("nodeName", spec.node_name.is_some(), "the host chooses the node: need a nodeSelector"),
        ("schedulerName", spec.scheduler_name.is_some(), "the host chooses the node: leave it out"),
        ("restartPolicy", restarts, "the host replaces a pod that has ended: need Never"),
        ("containers", says(|one| one.image.is_some()), "function: image: is a field of the function"),
        ("containers", says(|one| one.args.is_some()), "function: args: is a field of the function"),
    ];
    if let Some((field, _, why)) = refused.into_iter().find(|(_, is, _)| *is) {
        return Err(at(&format!(".spec.{field}"), &why));
    }
    Ok(PodTemplateSpec { spec: Some(with_program(spec)), ..read })
}

/// Refuses a template with which a container reaches more of its node than its share.
///
/// # Errors
/// Names the annotation and the field.
pub fn unprivileged(deployment: &FunctionDeployment) -> Result<(), String> {
    let spec = template(deployment)?.spec.unwrap_or_default();
    let security = |one: &Container| {
        let security = one.security_context.clone().unwrap_or_default();
        let added = security.capabilities.and_then(|all| all.add).unwrap_or_default();
        // Pod Security's level `restricted` allows this capability alone.
        (security.privileged == Some(true), added.iter().any(|name| name != "NET_BIND_SERVICE"))
    };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let (privileged, added): (Vec<_>, Vec<_>) = containers.map(security).unzip();
    let asked = [
        ("hostNetwork", spec.host_network == Some(true)),
        ("hostPID", spec.host_pid == Some(true)),
        ("hostIPC", spec.host_ipc == Some(true)),
        ("volumes: hostPath", spec.volumes.iter().flatten().any(|volume| volume.host_path.is_some())),
        ("containers: securityContext.privileged", privileged.contains(&true)),
        ("containers: securityContext.capabilities.add", added.contains(&true)),
    ];
    match asked.into_iter().find(|(_, is)| *is) {
        Some((field, _)) => Err(format!(
            "annotations: {TEMPLATE}.spec.{field}: gives a container its node: leave it out, or set host.kubernetes.privileged_pods"
        )),
        None => Ok(()),
    }
}

fn with_program(mut spec: PodSpec) -> PodSpec {
    let at = spec.containers.iter().position(|one| one.name == CONTAINER);
    let program = at.map(|at| spec.containers.remove(at));
    let program = program.unwrap_or_else(|| Container { name: CONTAINER.into(), ..Container::default() });
    spec.containers.insert(0, program);
    spec
}

/// The port of a container: the first that it states.
pub fn port_of(container: &Container) -> u16 {
    let stated = container.ports.iter().flatten().next();
    stated.and_then(|port| u16::try_from(port.container_port).ok()).unwrap_or(PORT)
}

/// The path of the first field of `given` that was not read. An empty field is as good as an absent field.
fn unknown(given: &Value, kept: &Value, path: &str) -> Option<String> {
    let empty = [json!(null), json!([]), json!({})];
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => {
            given.iter().filter(|(_, value)| !empty.contains(value)).find_map(|(key, value)| {
                let path = format!("{path}.{key}");
                kept.get(key).map_or(Some(path.clone()), |kept| unknown(value, kept, &path))
            })
        }
        (Value::Array(given), Value::Array(kept)) => {
            let mut both = given.iter().zip(kept).enumerate();
            both.find_map(|(index, (given, kept))| unknown(given, kept, &format!("{path}[{index}]")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_with_a_fault_is_refused_by_its_field() {
        let of = |text: &str| {
            let annotations = Some([(TEMPLATE.to_owned(), text.to_owned())].into());
            template(&FunctionDeployment { annotations, ..FunctionDeployment::default() })
        };
        for (text, why) in [
            ("[", "annotations: gshare/pod_template: EOF"),
            (r#"{"spec":{"volume":[]}}"#, ""),
            (r#"{"spec":{"nodeSelecter":{"a":"b"}}}"#, "gshare/pod_template.spec.nodeSelecter: is no field"),
            (
                r#"{"spec":{"containers":[{"name":"function","resource":{"limits":{"cpu":"1"}}}]}}"#,
                "gshare/pod_template.spec.containers[0].resource: is no field",
            ),
            (r#"{"spec":{"priority":"high"}}"#, "gshare/pod_template.spec.priority: "),
            (r#"{"spec":{"nodeName":"n1"}}"#, "spec.nodeName: the host chooses the node"),
            (r#"{"spec":{"restartPolicy":"Always"}}"#, "spec.restartPolicy: the host replaces"),
            (r#"{"spec":{"containers":[{"name":"function","image":"i"}]}}"#, "function: image: "),
            (r#"{"metadata":{"labels":{"gshare.io/function":"g"}}}"#, "`gshare.io/function`: gshare.io/"),
            (
                r#"{"metadata":{"finalizers":["a/b"]}}"#,
                "gshare/pod_template.metadata.finalizers: the host names",
            ),
            (r#"{"metadata":{"ownerReferences":[]}}"#, ".metadata.ownerReferences: "),
        ] {
            match of(text) {
                Ok(_) => assert_eq!(why, "", "{text}"),
                Err(error) => assert!(!why.is_empty() && error.contains(why), "{text}: {error}"),
            }
        }
        let read = of(
            r#"{"spec":{"containers":[{"name":"sidecar"},{"name":"function","ports":[{"containerPort":9}]}]}}"#,
        );
        let containers = read.unwrap().spec.unwrap().containers;
        assert_eq!((containers[0].name.as_str(), port_of(&containers[0])), (CONTAINER, 9));
        assert_eq!((containers[1].name.as_str(), port_of(&containers[1])), ("sidecar", PORT));
    }

    #[test]
    fn a_template_that_gives_a_container_its_node_is_refused_by_its_field() {
        let of = |text: &str| {
            let annotations = Some([(TEMPLATE.to_owned(), text.to_owned())].into());
            unprivileged(&FunctionDeployment { annotations, ..FunctionDeployment::default() })
        };
        for (text, field) in [
            (r#"{"spec":{"hostNetwork":true}}"#, "hostNetwork"),
            (r#"{"spec":{"hostPID":true}}"#, "hostPID"),
            (r#"{"spec":{"hostIPC":true}}"#, "hostIPC"),
            (r#"{"spec":{"volumes":[{"name":"v","hostPath":{"path":"/"}}]}}"#, "volumes: hostPath"),
            (
                r#"{"spec":{"containers":[{"name":"s","securityContext":{"privileged":true}}]}}"#,
                "containers: securityContext.privileged",
            ),
            (
                r#"{"spec":{"initContainers":[{"name":"s","securityContext":{"privileged":true}}]}}"#,
                "containers: securityContext.privileged",
            ),
            (
                r#"{"spec":{"containers":[{"name":"s","securityContext":{"capabilities":{"add":["SYS_ADMIN"]}}}]}}"#,
                "containers: securityContext.capabilities.add",
            ),
        ] {
            let why = of(text).unwrap_err();
            assert!(
                why.starts_with(&format!("annotations: {TEMPLATE}.spec.{field}: gives")),
                "{text}: {why}"
            );
        }
        let bound = r#"{"spec":{"hostPID":false,"volumes":[{"name":"v","emptyDir":{}}],"containers":[{"name":"s",
            "securityContext":{"privileged":false,"capabilities":{"drop":["ALL"],"add":["NET_BIND_SERVICE"]}}}]}}"#;
        assert_eq!(of(bound), Ok(()));
    }
}
