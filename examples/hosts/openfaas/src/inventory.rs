//! Devices of this node: their description for the platform, and the environment that a process needs to see them.
//!
//! NVML lists real and simulated devices alike. This process itself sees no simulated driver. So for each `--sim` it starts a
//! copy of itself (`--inventory`) that does: each simulated board has its own device file.

use anyhow::{Context as _, bail, ensure};
use gshare_core::{Bytes, GpuId, GpuKind, NodeId, ProfileId};
use gshare_fake_cuda_spec::Spec;
use gshare_runner::confine::User;
use gshare_runner::container::Mount;
use gshare_runner::libraries::{SimulatorDir, prepend};
use gshare_sched::mig::SliceAt;
use gshare_sched::platform::{DeviceSpec, MigLayout, Part, Regime};
use gshared::nvml::{self, Found, LostDevice, News, Nvml, NvmlHealth};
use gshared::{ClientSnapshot, Snapshot};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// Prints the devices that this process sees, as JSON. Hidden command for the host's copy of itself.
///
/// # Errors
/// If NVML does not answer.
pub fn print_inventory() -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(&nvml::inventory(&Nvml::init()?)?)?);
    Ok(())
}

/// Answers each input line with a line of JSON: the lost devices and the sensors, or `null` if NVML cannot tell. Ends with its input.
/// Hidden command for the host's copy of itself.
///
/// # Errors
/// If the answer cannot be written.
pub fn print_lost() -> anyhow::Result<()> {
    let mut health = NvmlHealth::default();
    for line in std::io::stdin().lock().lines() {
        line?;
        let mut answer = serde_json::to_vec(&health.look())?;
        answer.push(b'\n');
        match std::io::stdout().write_all(&answer) {
            // A host that was killed reads no more.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            written => written?,
        }
    }
    Ok(())
}

/// Health of simulated boards. A copy of this program in each board's environment answers.
#[derive(Debug)]
struct SimulatedHealth(Vec<Board>);

#[derive(Debug)]
struct Board {
    environment: Vec<(OsString, OsString)>,
    asked: Option<(Child, BufReader<ChildStdout>)>,
    /// The last report, kept while the copy cannot tell.
    news: News,
}

impl Board {
    fn ask(&mut self) -> anyhow::Result<Option<News>> {
        if self.asked.is_none() {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("--print-lost").envs(self.environment.iter().map(|(key, value)| (key, value)));
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let answers = child.stdout.take().context("its output is a pipe")?;
            self.asked = Some((child, BufReader::new(answers)));
        }
        let (child, answers) = self.asked.as_mut().context("it was started above")?;
        writeln!(child.stdin.as_mut().context("its input is a pipe")?)?;
        let mut line = String::new();
        answers.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    /// Ends the copy; the next question starts a new copy.
    fn end(&mut self) {
        if let Some((mut child, _)) = self.asked.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.end();
    }
}

impl SimulatedHealth {
    fn look(&mut self) -> Option<News> {
        let mut all = News::default();
        for board in &mut self.0 {
            match board.ask() {
                Ok(Some(news)) => board.news = news,
                Ok(None) => {}
                Err(error) => {
                    eprintln!("openfaas: the health of a simulated board: {error}");
                    board.end();
                }
            }
            all.0.extend_from_slice(&board.news.0);
            all.1.extend_from_slice(&board.news.1);
        }
        Some(all)
    }
}

/// A device of the platform.
#[derive(Debug, Clone)]
pub struct Device {
    /// The driver's name for the device.
    pub name: String,
    /// The device as the platform knows it.
    pub spec: DeviceSpec,
    /// UUID of the GPU, used if it has no MIG devices.
    uuid: String,
    /// MIG devices with their UUIDs, by place.
    slices: Vec<(SliceAt, String)>,
    /// Variables that lead a process to the driver of this device.
    environment: Vec<(OsString, OsString)>,
}

impl Device {
    /// Value of `CUDA_VISIBLE_DEVICES` for a part: the UUID of the device or of the slice.
    fn visible(&self, part: &Part) -> &str {
        let slice = part.slice.and_then(|at| self.slices.iter().find(|(place, _)| *place == at));
        slice.map_or(&self.uuid, |(_, uuid)| uuid)
    }

    /// Mounts of a simulated device for a container: the driver's folder and the device file.
    pub fn mounts(&self) -> Vec<Mount> {
        let find = |name: &str| self.environment.iter().find(|(key, _)| key == name);
        let value = |name: &str| find(name).map(|(_, value)| value);
        // The driver's folder comes first, before the folders of the host's own environment.
        let folders = value("LD_LIBRARY_PATH").into_iter().flat_map(std::env::split_paths).take(1);
        let file = value("GSHARE_SIM_DEVICE").map(|file| Mount { writable: true, ..Mount::read(file) });
        folders.map(Mount::read).chain(file).collect()
    }

    /// UUIDs by which the node's daemon may know the device: of the GPU, or of its MIG devices.
    pub fn uuids(&self) -> impl Iterator<Item = &str> {
        let whole = self.slices.is_empty().then_some(self.uuid.as_str());
        whole.into_iter().chain(self.slices.iter().map(|(_, uuid)| uuid.as_str()))
    }
}

/// All devices of this node.
#[derive(Debug, Default)]
pub struct Inventory {
    /// Devices by the platform's id.
    pub all: BTreeMap<GpuId, Device>,
    /// Whether all devices are simulated; the simulated driver enforces SM partitions without MPS.
    pub simulated: bool,
    /// Folders of simulated drivers. The host takes them, since a thread may hold this inventory at the end.
    pub simulators: Vec<SimulatorDir>,
    /// Environment of each simulated board.
    boards: Vec<Vec<(OsString, OsString)>>,
}

impl Inventory {
    /// The node itself as the one device, with its host memory: for functions that use no GPU.
    pub fn none() -> Self {
        let mut devices = Self::default();
        let about = rustix::system::sysinfo();
        let memory = (about.totalram as u64).saturating_mul(about.mem_unit.into());
        let spec = DeviceSpec::new(NodeId::new(0), Bytes(memory));
        let (name, uuid) = ("no GPU".to_owned(), String::new());
        let device = Device { name, spec, uuid, slices: Vec::new(), environment: Vec::new() };
        devices.all.insert(GpuId::new(0), device);
        devices
    }

    /// Whether this machine's driver finds a device.
    pub fn are_here() -> bool {
        inventory(&[]).is_ok_and(|found| !found.is_empty())
    }

    /// Finds the devices of this machine's driver, or of simulated boards with files in `state`. GPUs with a number in `whole`
    /// serve one request at a time.
    ///
    /// # Errors
    /// If a driver does not answer, a MIG layout is unknown, or a GPU in `whole` is missing or has MIG devices.
    pub fn find(boards: &[Spec], whole: &[u32], state: &Path) -> anyhow::Result<Self> {
        let mut devices = Self { simulated: !boards.is_empty(), ..Self::default() };
        if boards.is_empty() {
            let found = inventory(&[])
                .context("no devices are found: --sim simulates some, --set host.no_gpu=true does without")?;
            devices.add(found, &[])?;
        }
        for (number, spec) in boards.iter().flat_map(single).enumerate() {
            spec.resolve().with_context(|| format!("--sim={spec}"))?;
            let dir = SimulatorDir::new()?;
            let mut environment: Vec<(OsString, OsString)> =
                spec.variables().into_iter().map(|(key, value)| (key.into(), value.into())).collect();
            environment.push(("LD_LIBRARY_PATH".into(), prepend("LD_LIBRARY_PATH", dir.path())));
            let file = if number == 0 { "device".to_owned() } else { format!("device.{number}") };
            environment.push(("GSHARE_SIM_DEVICE".into(), state.join(file).into_os_string()));
            devices.add(inventory(&environment)?, &environment)?;
            devices.simulators.push(dir);
            devices.boards.push(environment);
        }
        for number in whole {
            let device = devices.all.get_mut(&GpuId::new(*number));
            let device = device.with_context(|| format!("host.whole: there is no GPU {number}"))?;
            ensure!(device.spec.mig.is_none(), "host.whole: GPU {number} is cut into MIG devices");
            device.spec.regime = Some(Regime::Whole);
        }
        Ok(devices)
    }

    /// Environment of a process with these parts: `CUDA_VISIBLE_DEVICES`, and the path to the driver. Empty for parts on
    /// unknown devices.
    ///
    /// # Errors
    /// If the parts are on simulated boards with a driver each: a process sees only one of them.
    pub fn variables(&self, parts: &[Part]) -> std::io::Result<Vec<(OsString, OsString)>> {
        let devices: Vec<(&Device, &Part)> =
            parts.iter().filter_map(|part| Some((self.all.get(&part.gpu)?, part))).collect();
        let Some((first, _)) = devices.first() else { return Ok(Vec::new()) };
        if devices.iter().any(|(device, _)| device.environment != first.environment) {
            return Err(std::io::Error::other(
                "its devices are on several simulated boards: need one --sim with as many devices",
            ));
        }
        let visible: Vec<&str> = devices.iter().map(|(device, part)| device.visible(part)).collect();
        let mut variables = first.environment.clone();
        variables.push(("CUDA_VISIBLE_DEVICES".into(), visible.join(",").into()));
        Ok(variables)
    }

    /// Gives the files of simulated devices to another user. Files of real devices are open to all users.
    ///
    /// # Errors
    /// If a file belongs to another user.
    pub fn give(&self, user: User) -> std::io::Result<()> {
        let all = self.all.values().flat_map(|device| &device.environment);
        for (_, file) in all.filter(|(name, _)| name == "GSHARE_SIM_DEVICE") {
            std::os::unix::fs::chown(file, Some(user.uid), Some(user.gid))?;
        }
        for simulator in &self.simulators {
            std::fs::set_permissions(simulator.path(), std::fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// A source of lost simulated devices for a daemon in this process: its own NVML does not see them. None without simulated boards.
    pub fn health(&self) -> Option<impl FnMut() -> Option<News> + Send + use<>> {
        let board = |environment: &Vec<_>| Board {
            environment: environment.clone(),
            asked: None,
            news: News::default(),
        };
        let boards: Vec<Board> = self.boards.iter().map(board).collect();
        let mut health = (!boards.is_empty()).then(|| SimulatedHealth(boards))?;
        Some(move || health.look())
    }

    /// The daemon's clients on these devices, each with its device and the part of the GPU that its MIG device is.
    pub fn clients<'a>(
        &self,
        snapshot: &'a Snapshot,
    ) -> impl Iterator<Item = (GpuId, f64, &'a ClientSnapshot)> {
        let part = |uuid: &str| {
            self.all.iter().find_map(|(gpu, device)| {
                let slice = device.slices.iter().find(|(_, own)| own == uuid).map(|(at, _)| at.profile);
                let part = || {
                    let model = device.spec.mig.as_ref()?.model();
                    Some(model.share_of(model.get(slice?)?)?.as_fraction())
                };
                device.uuids().any(|own| own == uuid).then(|| (*gpu, part().unwrap_or(1.0)))
            })
        };
        let known = snapshot.devices.iter().filter_map(|of| Some((of.gpu, part(&of.uuid)?)));
        let known: BTreeMap<GpuId, (GpuId, f64)> = known.collect();
        snapshot.clients.iter().filter_map(move |client| {
            let (gpu, part) = known.get(&client.gpu)?;
            Some((*gpu, *part, client))
        })
    }

    /// The reason for the loss of a device, if the list contains it.
    pub fn why_lost<'a>(&self, gpu: GpuId, lost: &'a [LostDevice]) -> Option<&'a str> {
        let device = self.all.get(&gpu)?;
        let found = lost.iter().find(|one| device.uuids().any(|uuid| uuid == one.uuid))?;
        Some(&found.why)
    }

    fn add(&mut self, found: Vec<Found>, environment: &[(OsString, OsString)]) -> anyhow::Result<()> {
        for gpu in found {
            let number = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
            let mut spec = DeviceSpec::new(NodeId::new(0), gpu.memory).with_kind(self.kind(&gpu.name));
            let mut slices = Vec::new();
            if !gpu.mig.is_empty() {
                let (layout, places) =
                    layout(&gpu.mig).with_context(|| format!("{}: {}", gpu.name, gpu.uuid))?;
                (spec, slices) = (spec.with_mig(layout), places);
            }
            let environment = environment.to_vec();
            let device = Device { name: gpu.name, spec, uuid: gpu.uuid, slices, environment };
            self.all.insert(GpuId::new(number), device);
        }
        Ok(())
    }

    /// The kind of the devices with this name, or a new kind.
    fn kind(&self, name: &str) -> GpuKind {
        let same = self.all.values().find(|device| device.name == name).map(|device| device.spec.kind);
        let next = self.all.values().map(|device| device.spec.kind.number() + 1).max().unwrap_or(0);
        same.unwrap_or(GpuKind::new(next))
    }
}

/// Splits simulated GPUs with MIG devices into boards of one GPU, each with its own driver.
fn single(spec: &Spec) -> Vec<Spec> {
    match spec.devices {
        Some(count) if !spec.mig.is_empty() => {
            let mut one = spec.clone();
            one.devices = None;
            vec![one; count as usize]
        }
        _ => vec![spec.clone()],
    }
}

/// The GPU model with MIG profiles of these names, and the place of each MIG device. If NVML reports no places, devices of one
/// profile are interchangeable and take the profile's places in order.
pub(crate) fn layout(slices: &[Found]) -> anyhow::Result<(MigLayout, Vec<(SliceAt, String)>)> {
    let profile = |slice: &Found| {
        let rest = slice.name.split_once("MIG ").map_or("", |(_, rest)| rest);
        rest.split(' ').next().unwrap_or_default().to_owned()
    };
    let names: Vec<String> = slices.iter().map(profile).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let layout = gshare_sched::mig::GpuModel::names().find_map(|model| MigLayout::named(model, &names).ok());
    let Some(layout) = layout else { bail!("no known model has MIG devices {}", names.join(", ")) };
    let mut free: Vec<SliceAt> = layout.slices().to_vec();
    let mut places = Vec::new();
    for (slice, name) in slices.iter().zip(&names) {
        let profile: ProfileId = layout.model().profile(name)?;
        let at = free.iter().position(|at| at.profile == profile).context("a place for each MIG device")?;
        places.push((free.remove(at), slice.uuid.clone()));
    }
    Ok((layout, places))
}

/// The GPUs that NVML shows to a process with this environment.
fn inventory(environment: &[(OsString, OsString)]) -> anyhow::Result<Vec<Found>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--inventory").envs(environment.iter().map(|(key, value)| (key, value)));
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("{}", why_it_ended(&output));
    }
    serde_json::from_slice(&output.stdout).context("the inventory of devices")
}

/// The child's error, or its end if a signal left it no time to say one.
fn why_it_ended(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    match (said.trim().trim_start_matches("error: "), output.status.signal()) {
        // The file of a simulated device has holes, and a write to a hole of a full disk is a bus error.
        ("", Some(bus)) if bus == rustix::process::Signal::BUS.as_raw() => {
            "--state: the disk has no room for the file of a simulated device: free some, or choose another folder".to_owned()
        }
        ("", _) => format!("the program that lists the devices ended: {}", output.status),
        (said, _) => said.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_dies_of_a_signal_leaves_a_reason() {
        let why = |status, stderr: &str| {
            let status = std::process::ExitStatus::from_raw(status);
            why_it_ended(&Output { status, stdout: Vec::new(), stderr: stderr.into() })
        };
        assert_eq!(why(1 << 8, "error: no NVML\n"), "no NVML");
        assert!(why(7, "").starts_with("--state: the disk has no room"));
        assert!(why(9, "").contains("signal: 9"));
    }
}
