//! Functions in container images: what a container sees of this host.
//!
//! # Which deployments are images
//! A deployment is run from an image when its `image` names a registry: the part before the first `/` has a dot or a colon in it, or is
//! `localhost`, as in `localhost/my-fn:1` or `registry.example/team/fn`. Then `envProcess` is the command in the image, in place of the image's own; without
//! `envProcess` the image's own runs. Every other `image` is a name, and the program is `envProcess`; without `envProcess` it is the program
//! itself. The path of a program whose first folder has a dot in its name begins with `./`.
//!
//! # What a container gets
//! A container gets what a process of this host gets, at the same paths and read-only: hook, daemon's socket, model and model store; its secrets at
//! `/var/openfaas/secrets`, where functions of OpenFaaS look for them; the device, simulated or real. It is on the host's network, and listens at
//! `127.0.0.1:$PORT`; `$port` is the same for OpenFaaS's watchdog. Its user is that of `--function-user`, or else the host's own, and never
//! the one that the image names: the daemon and the files know no other.

use super::deployment::Wants;
use super::devices::Device;
use super::host::Launch;
use super::node::Node;
use gshare_core::RunId;
use gshare_runner::HookedProcess;
use gshare_runner::confine::User;
use gshare_runner::container::{Container, Image, Mount, gpus};
use gshare_runner::libraries::SIMULATOR;
use gshare_sched::platform::Part;
use std::io;
use std::path::Path;
use std::process::Command;

/// The folder of a container in which its function finds its secrets.
const SECRETS: &str = "/var/openfaas/secrets";

/// Starts a process of an instance in a container, under this name and run.
///
/// # Errors
/// When a file for it cannot be made, or there is no podman.
pub fn start(
    node: &Node,
    image: &Image,
    launch: &Launch,
    parts: &[Part],
    port: u16,
    (name, run): (&str, RunId),
) -> io::Result<HookedProcess> {
    let (plan, deployment, runner) = (&launch.version.plan, &launch.version.deployment, &node.runner);
    let podman = runner.podman.as_ref().ok_or_else(|| io::Error::other("there is no podman"))?;
    let folder = podman.folder()?;
    let user = runner.user.unwrap_or_else(host_user);
    let secrets = folder.path().join("secrets");
    std::fs::create_dir(&secrets)?;
    node.store.copy_secrets(deployment, &secrets, user)?;

    let mut command = Command::new(image.to_string());
    command.args(&plan.command).env("port", port.to_string());
    node.environment(&mut command, launch, parts, port, Path::new(SECRETS))?;
    let mut mounts = vec![Mount { host: secrets, inside: SECRETS.into(), writable: false }];
    if let Some(model) = &plan.model {
        mounts.extend([Mount::read(&model.path), Mount::read(node.store_of(launch))]);
        let client = runner.store_client.iter().flat_map(|client| [&client.python, &client.library]);
        mounts.extend(client.map(Mount::read));
    }
    let uses_gpu = !matches!(plan.wants, Wants::NoGpu { .. }) && runner.hook.is_some();
    let mut devices = Vec::new();
    if uses_gpu && runner.devices.simulated {
        mounts.push(Mount::read(SIMULATOR.find()?));
        // Several devices of a process are one board's.
        let device = parts.first().and_then(|part| runner.devices.all.get(&part.gpu));
        mounts.extend(device.into_iter().flat_map(Device::mounts));
    } else if uses_gpu {
        devices = gpus();
        mounts.extend(runner.mps.iter().map(|pipes| Mount { writable: true, ..Mount::read(pipes) }));
    }
    let container = Container {
        image: image.clone(),
        mounts,
        devices,
        limits: plan.limits,
        user,
        confined: runner.user.is_some(),
        read_only: deployment.read_only_root_filesystem,
        host_ipc: uses_gpu && runner.mps.is_some(),
    };
    podman.start(container, command, name, run, node.hook(launch), folder)
}

fn host_user() -> User {
    use rustix::process::{getegid, geteuid};
    User { uid: geteuid().as_raw(), gid: getegid().as_raw() }
}
