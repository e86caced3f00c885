//! Functions in container images: the choice of an image, and the access of its container to this host.
//!
//! # Which deployments use an image
//! A deployment uses an image if its `image` names a registry: the part before the first `/` contains a dot or a colon, or is
//! `localhost`, as in `localhost/my-fn:1` or `registry.example/team/fn`. Then `envProcess` replaces the image's own command.
//! Any other `image` is only a name for the program in `envProcess`, or, without `envProcess`, the program itself. A relative
//! path with a dot in its first folder must begin with `./`, or it would look like a registry.
//!
//! # Access
//! A container sees the same paths as a process of this host, read-only: hook, daemon's socket, model and model store, and the
//! real or simulated device. Secrets are at `/var/openfaas/secrets`, the usual place for functions of OpenFaaS. The container
//! uses the host's network and listens at `127.0.0.1:$PORT`; `$port` repeats it for OpenFaaS's watchdog. It runs as the user of
//! `host.function_user` or as the host's own user, never as the image's, because the daemon and the files know no other.

use super::deployment::Wants;
use super::host::Launch;
use super::inventory::Device;
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

/// The folder of secrets in a container.
const SECRETS: &str = "/var/openfaas/secrets";

/// Starts a process of an instance in a container.
///
/// # Errors
/// If a file for the container cannot be made, or podman is missing.
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
        let client = runner.store_client.iter().flat_map(|client| [&client.python, &client.shared_object]);
        mounts.extend(client.map(Mount::read));
    }
    let uses_gpu = !matches!(plan.wants, Wants::NoGpu { .. }) && runner.hook.is_some();
    let mut devices = Vec::new();
    if uses_gpu && runner.devices.simulated {
        mounts.push(Mount::read(SIMULATOR.find()?));
        // All devices of one process belong to the same board.
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
