//! The pod of an instance: made from its launch, and read back by the next leader. Pure.

use super::hash;
use super::injection::{ENVIRONMENT, Injected, PLACE, VISIBLE, containers, inject, mount, set};
use super::nodes::GPU_TAINT;
use super::template::{port_of, template};
use crate::api::FunctionDeployment;
use crate::deployment::Wants;
use crate::host::Launch;
use gshare_core::{QuotaRange, ResourceSpec, RunId, SmShare};
use gshare_sched::platform::Part;
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EnvVar, Pod, Probe, ProjectedVolumeSource, SeccompProfile, SecretProjection,
    TCPSocketAction, Toleration, Volume, VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::sync::Arc;

/// Label of a pod of the host: the name of its function.
pub const FUNCTION: &str = "gshare.io/function";
/// Label of a pod: the version of its function, by [`version_of`]; of a trial, [`TRIAL`].
pub const VERSION: &str = "gshare.io/version";
/// The version of a pod in which a function is measured. The next leader does not keep it.
pub const TRIAL: &str = "trial";
/// Label of a pod: the number of its instance, with the leader that made it.
const INSTANCE: &str = "gshare.io/instance";
/// Folder of the secrets in a container.
const SECRETS: &str = "/var/openfaas/secrets";
/// Variable with the booked time, and the most.
const QUOTA: &str = "GSHARE_QUOTA";
/// Variable with the booked part of the SMs; `GSHARE_SM` has the largest part.
const BOOKED: &str = "GSHARE_SM_BOOKED";

/// The version of a function: changes with its deployment.
pub fn version_of(deployment: &FunctionDeployment) -> String {
    // A deployment is read from JSON, so that it can be written.
    format!("{:016x}", hash(&serde_json::to_string(deployment).unwrap_or_default()))
}

/// The share of an instance's process on its part of a device, as its pod states it.
///
/// # Errors
/// If the share does not fit together, which no share of a platform does.
pub fn share_of(part: &Part, time: QuotaRange) -> Result<ResourceSpec, String> {
    // Without a limit on memory, a byte is booked.
    let memory = part.share.memory().filter(|memory| memory.get() > 1);
    ResourceSpec::new(time, part.share.sm_limit(), memory).map_err(|error| error.to_string())
}

/// The pod of an instance.
#[derive(Debug)]
pub struct PodOf {
    /// Namespace and name.
    pub name: (String, String),
    /// The run of its processes: random, since a process with its name and run joins the share.
    pub run: RunId,
    /// The instance's launch.
    pub launch: Launch,
    /// Its part of a device.
    pub part: Part,
    /// Its share as the daemon is told it.
    pub share: ResourceSpec,
    /// Node, and number of the GPU there.
    pub place: (String, u32),
    /// UUID of its MIG device, if its part is one.
    pub slice: Option<String>,
    /// The files of the node.
    pub injected: Arc<Injected>,
    /// Whether the pod is of a trial.
    pub trial: bool,
}

impl PodOf {
    /// Makes it. It is bound by its creation, so that no scheduler moves it and no leader has to bind it.
    ///
    /// # Errors
    /// Names the field of its template.
    pub fn make(&self) -> Result<Pod, String> {
        let (namespace, name) = &self.name;
        let version = &self.launch.version;
        let (plan, deployment) = (&version.plan, &version.deployment);
        let (node, gpu) = &self.place;
        let template = template(deployment)?;
        let mut spec = template.spec.unwrap_or_default();
        if let Some(program) = spec.containers.first_mut() {
            self.fill(program);
        }
        (spec.node_name, spec.restart_policy) = (Some(node.clone()), Some("Never".into()));
        let has_account = spec.service_account_name.is_some();
        spec.automount_service_account_token.get_or_insert(has_account);
        spec.enable_service_links.get_or_insert(false);
        // Nodes are chosen in spite of this taint, and with the effect `NoExecute` it would end the pod.
        spec.tolerations.get_or_insert_default().push(Toleration {
            key: Some(GPU_TAINT.into()),
            operator: Some("Exists".into()),
            ..Toleration::default()
        });
        if let Some(volume) = secrets(deployment) {
            spec.volumes.get_or_insert_default().push(volume);
        }
        let metadata = template.metadata.unwrap_or_default();
        let mut annotations = metadata.annotations.unwrap_or_default();
        let place = format!("{node}/{gpu}");
        let mut told = vec![(BOOKED, self.part.share.sm().to_string())];
        if matches!(plan.wants, Wants::NoGpu { .. }) {
            // NVIDIA's runtime gives the container no GPU, even if its image or its deployment asks for all.
            told.push((VISIBLE, "void".to_owned()));
            // The host books the least share for it.
            told.extend([(PLACE, place), (QUOTA, self.share.quota().to_string())]);
        } else {
            let full = format!("{namespace}/{name}");
            // The node's MPS has whole GPUs.
            let mps = self.injected.mps.clone().filter(|_| self.slice.is_none());
            let injected = Injected { mps, ..Injected::clone(&self.injected) };
            injected.ask(&mut spec);
            let file = inject(&mut spec, (&full, self.run), &self.share, &place, &injected);
            annotations.insert(ENVIRONMENT.into(), file);
            told.extend(self.slice.clone().map(|uuid| (VISIBLE, uuid)));
            told.extend(plan.class.map(|class| ("GSHARE_CLASS", class.to_string())));
        }
        containers(&mut spec).for_each(|container| set(container, &told));
        let version = if self.trial { TRIAL.to_owned() } else { version_of(deployment) };
        let instance = self.launch.instance.number().to_string();
        let own =
            [(FUNCTION, own_name(&deployment.service).to_owned()), (VERSION, version), (INSTANCE, instance)];
        let mut labels = metadata.labels.unwrap_or_default();
        labels.extend(own.map(|(name, value)| (name.to_owned(), value)));
        Ok(Pod {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(namespace.clone()),
                labels: Some(labels),
                annotations: Some(annotations).filter(|all| !all.is_empty()),
                ..ObjectMeta::default()
            },
            spec: Some(spec),
            ..Pod::default()
        })
    }

    /// Fills in the container of the program.
    fn fill(&self, container: &mut Container) {
        let version = &self.launch.version;
        let (plan, deployment) = (&version.plan, &version.deployment);
        let port = port_of(container);
        let ours = [
            ("PORT", port.to_string()),
            ("HOST", "0.0.0.0".to_owned()),
            ("OPENFAAS_NAME", deployment.service.clone()),
            ("secret_mount_path", SECRETS.to_owned()),
        ];
        let mut env = deployment.env_vars.clone().unwrap_or_default();
        env.extend(ours.map(|(name, value)| (name.to_owned(), value)));
        let serves = !matches!(plan.wants, Wants::Training { .. });
        let listens = TCPSocketAction { port: IntOrString::Int(port.into()), host: None };
        let probe = Probe {
            tcp_socket: Some(listens),
            period_seconds: Some(1),
            // An instance is not ended for this: the platform bounds its start.
            failure_threshold: Some(i32::MAX),
            ..Probe::default()
        };
        container.image = Some(deployment.image.clone());
        // `envProcess` is the command of the image's entry point.
        container.args = Some(plan.command.clone()).filter(|words| !words.is_empty());
        set(container, &Vec::from_iter(env));
        if serves {
            let port = ContainerPort { container_port: port.into(), ..ContainerPort::default() };
            container.ports.get_or_insert_with(|| vec![port]);
            container.readiness_probe.get_or_insert(probe);
        }
        ask(container, deployment);
        if deployment.secrets.as_ref().is_some_and(|all| !all.is_empty()) {
            container.volume_mounts.get_or_insert_default().push(mount("secrets", SECRETS, true));
        }
        let security = container.security_context.get_or_insert_default();
        security.allow_privilege_escalation.get_or_insert(false);
        let read_only = security.read_only_root_filesystem.unwrap_or_default();
        security.read_only_root_filesystem = Some(read_only || deployment.read_only_root_filesystem);
        let profile = || SeccompProfile { type_: "RuntimeDefault".into(), ..SeccompProfile::default() };
        security.seccomp_profile.get_or_insert_with(profile);
    }
}

/// The name of a function in its namespace. Functions of other namespaces than the host's are known as `NAME.NAMESPACE`.
pub fn own_name(service: &str) -> &str {
    service.rsplit_once('.').map_or(service, |(name, _)| name)
}

/// The volume of a function's secrets. Each is a Secret with one value of the same name.
fn secrets(deployment: &FunctionDeployment) -> Option<Volume> {
    let names = deployment.secrets.as_ref().filter(|all| !all.is_empty())?;
    let source = |name: &String| VolumeProjection {
        secret: Some(SecretProjection { name: name.clone(), ..SecretProjection::default() }),
        ..VolumeProjection::default()
    };
    let sources = Some(names.iter().map(source).collect());
    Some(Volume {
        name: "secrets".into(),
        projected: Some(ProjectedVolumeSource { sources, default_mode: Some(0o444) }),
        ..Volume::default()
    })
}

/// Asks for CPU and memory, and limits them, as the deployment says.
fn ask(container: &mut Container, deployment: &FunctionDeployment) {
    let is_known = |name: &str| ["cpu", "memory"].contains(&name);
    for (given, is_limit) in [(&deployment.limits, true), (&deployment.requests, false)] {
        for (name, value) in given.iter().flatten().filter(|(name, _)| is_known(name)) {
            let resources = container.resources.get_or_insert_default();
            let field = if is_limit { &mut resources.limits } else { &mut resources.requests };
            field.get_or_insert_default().insert(name.clone(), Quantity(value.clone()));
        }
    }
}

/// The place and the share of a pod, by its spec: the spec never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The function, by its name in its namespace.
    pub function: String,
    /// The version of the function.
    pub version: String,
    /// Node, and number of the GPU there.
    pub place: (String, u32),
    /// The booked time, and the most.
    pub time: QuotaRange,
    /// The booked part of the SMs.
    pub sm: SmShare,
}

impl Given {
    /// Reads it back. None: the pod was not made by a host.
    pub fn of(pod: &Pod) -> Option<Self> {
        let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).cloned();
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        let environment: Vec<&EnvVar> = containers.flat_map(|one| one.env.iter().flatten()).collect();
        let value = |name: &str| {
            environment.iter().find(|variable| variable.name == name).and_then(|one| one.value.as_deref())
        };
        let (node, gpu) = value(PLACE)?.rsplit_once('/')?;
        Some(Self {
            function: label(FUNCTION)?,
            version: label(VERSION)?,
            place: (node.to_owned(), gpu.parse().ok()?),
            time: value(QUOTA)?.parse().ok()?,
            sm: value(BOOKED)?.parse().ok()?,
        })
    }
}

/// The name of a pod: of its function, the leader that made it, and the number of pods that this leader has made before.
pub fn name(function: &str, leader: &str, number: u64) -> String {
    format!("{}-{leader}-{number}", own_name(function))
}

#[cfg(test)]
mod tests {
    use super::super::injection::{Mounts, RESOURCE};
    use super::*;
    use crate::host::tests::training;
    use gshare_core::Bytes;
    use k8s_openapi::api::core::v1::PodSpec;

    /// The pod of a worker of a training job with a third of a GPU.
    fn made(injected: &Injected, slice: Option<&str>) -> Pod {
        let (_host, [mut launch, _], _orders) = training();
        let time = QuotaRange::new("0.3".parse().unwrap(), "0.8".parse().unwrap()).unwrap();
        let sm = SmShare::from_percent(12).unwrap();
        let (limit, memory) = (SmShare::from_percent(24).unwrap(), Some(Bytes::from_gib(1)));
        let share = gshare_core::GpuShare::new(time, sm, limit, memory).unwrap();
        for part in &mut launch.parts {
            part.share = share;
        }
        let part = launch.own_parts()[0];
        PodOf {
            name: ("team".into(), "f-1".into()),
            run: RunId::new(7),
            launch,
            part,
            share: share_of(&part, part.share.time()).unwrap(),
            place: ("n1".into(), 3),
            slice: slice.map(str::to_owned),
            injected: Arc::new(injected.clone()),
            trial: false,
        }
        .make()
        .unwrap()
    }

    #[test]
    fn a_pod_states_its_place_and_share_in_its_spec_and_is_read_back() {
        let pod = made(&Injected::default(), None);
        let given = Given::of(&pod).unwrap();
        assert_eq!((given.function.as_str(), &given.place), ("f", &("n1".to_owned(), 3)));
        assert_eq!((given.time.to_string(), given.sm.to_string()), ("30%:80%".into(), "12%".into()));
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!((spec.node_name.as_deref(), spec.restart_policy.as_deref()), (Some("n1"), Some("Never")));
        let tolerated = &spec.tolerations.as_ref().unwrap()[0];
        assert_eq!((tolerated.key.as_deref(), &tolerated.effect), (Some("nvidia.com/gpu"), &None));
        let value = |name: &str| {
            let all = spec.containers[0].env.as_ref().unwrap();
            all.iter().find(|one| one.name == name).and_then(|one| one.value.clone()).unwrap()
        };
        // The daemon bounds it by the largest part of the SMs.
        assert_eq!((value("GSHARE_SM"), value("GSHARE_NAME")), ("24%".into(), "team/f-1".into()));
        assert_eq!((value("NVIDIA_VISIBLE_DEVICES"), value("PORT")), ("3".into(), "8080".into()));
        // Annotations and labels that tenants might change say nothing of a share.
        let mut changed = pod.clone();
        changed.metadata.annotations = None;
        assert_eq!(Given::of(&changed), Some(given));
    }

    #[test]
    fn a_variable_is_set_in_init_containers_too() {
        let own = |value: &str| {
            let mut container = Container::default();
            set(&mut container, &[("A", value.to_owned())]);
            container
        };
        let init_containers = Some(vec![own("all")]);
        let mut spec = PodSpec { containers: vec![own("all")], init_containers, ..PodSpec::default() };
        containers(&mut spec).for_each(|container| set(container, &[("A", "void".to_owned())]));
        assert_eq!((spec.containers, spec.init_containers), (vec![own("void")], Some(vec![own("void")])));
    }

    #[test]
    fn a_pod_on_a_mig_device_sees_that_device_alone_and_no_pipes_of_mps() {
        let injected = Injected { mps: Some(("/pipes".into(), "/shm".into())), ..Injected::default() };
        let value = |pod: &Pod, name: &str| {
            let all = pod.spec.as_ref().unwrap().containers[0].env.clone().unwrap();
            all.into_iter().find(|one| one.name == name).and_then(|one| one.value)
        };
        let pipes = |pod: &Pod| value(pod, "CUDA_MPS_PIPE_DIRECTORY");
        let (sliced, shared) = (made(&injected, Some("MIG-7")), made(&injected, None));
        assert_eq!(value(&sliced, "NVIDIA_VISIBLE_DEVICES").as_deref(), Some("MIG-7"));
        assert_eq!(value(&sliced, PLACE).as_deref(), Some("n1/3"));
        assert_eq!((pipes(&sliced), pipes(&shared).as_deref()), (None, Some("/tmp/nvidia-mps")));
    }

    #[test]
    fn with_mounts_of_the_node_a_pod_has_no_volume_of_it_and_asks_for_the_hook() {
        let paths = |pod: &Pod| {
            let volumes = pod.spec.as_ref().unwrap().volumes.clone().unwrap();
            volumes.into_iter().filter_map(|volume| volume.host_path).count()
        };
        assert_eq!(paths(&made(&Injected::default(), None)), 3);
        let pod = made(&Injected { mounts: Mounts::Node, ..Injected::default() }, None);
        let resources = pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap();
        assert_eq!((paths(&pod), resources.limits.unwrap()[RESOURCE].0.as_str()), (0, "1"));
    }
}
