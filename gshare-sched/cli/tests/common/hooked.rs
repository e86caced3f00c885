//! The built hook and simulated driver, and programs under them.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use crate::common::{Process, within};
use fake_cuda::sim::SimDevice;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The folder of the hook and the simulated driver: cargo builds both beside this test, which depends on them.
pub fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// `gshare run --sim` on a device of the test's own.
pub fn run(dir: &Path, socket: &Path, options: &[&str]) -> Command {
    run_private(dir, &[&["--socket", socket.to_str().unwrap()], options].concat())
}

/// The same under the private daemon.
pub fn run_private(dir: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command
        .args(["run", "--sim=tiny"])
        .args(options)
        .arg("--")
        .env("GSHARE_SIM_DEVICE", dir.join("device"))
        .env_remove("GSHARE_SOCKET")
        .stderr(Stdio::null());
    command
}

/// Programs that launch for ever, hooked without `gshare run` between, so that a kill hits the program itself.
pub struct Spinners {
    dir: PathBuf,
    links: PathBuf,
    socket: PathBuf,
}

impl Spinners {
    pub fn new(dir: &Path, socket: &Path) -> Self {
        let links = dir.join("driver");
        std::fs::create_dir(&links).unwrap();
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            std::os::unix::fs::symlink(libraries().join("libfake_cuda.so"), links.join(name)).unwrap();
        }
        Self { dir: dir.to_owned(), links, socket: socket.to_owned() }
    }

    pub fn start(&self, name: &str, run: u64, environment: &[(&str, &str)], arguments: &[&str]) -> Spinner {
        Spinner(self.command(name, run, environment, arguments).spawn().unwrap())
    }

    /// One that computes when it is told to, by lines on its standard input.
    pub fn serve(&self, name: &str, run: u64, environment: &[(&str, &str)]) -> Spinner {
        let mut command = self.command(name, run, environment, &["--answer", "1"]);
        Spinner(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// A program other than the launching client, with pipes for its standard input and output.
    pub fn program(&self, program: &Path, name: &str, run: u64, environment: &[(&str, &str)]) -> Spinner {
        let mut command = self.hooked(program, name, run, environment);
        Spinner(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn command(&self, name: &str, run: u64, environment: &[(&str, &str)], arguments: &[&str]) -> Command {
        let mut command =
            self.hooked(Path::new(env!("CARGO_BIN_EXE_gshare-fixture")), name, run, environment);
        command.arg("spin").args(arguments);
        command
    }

    fn hooked(&self, program: &Path, name: &str, run: u64, environment: &[(&str, &str)]) -> Command {
        let mut path = OsString::from(&self.links);
        if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(rest);
        }
        let mut command = Command::new(program);
        command
            .env("LD_PRELOAD", libraries().join("libgshare_hook.so"))
            .env("LD_LIBRARY_PATH", path)
            .env("GSHARE_SIM_DEVICE", self.dir.join("device"))
            .env("GSHARE_SIM_PROFILE", "tiny")
            .env("GSHARE_SOCKET", &self.socket)
            .env("GSHARE_NAME", name)
            .env("GSHARE_RUN", run.to_string())
            .envs(environment.iter().copied())
            .stderr(Stdio::from(
                std::fs::OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(self.dir.join("programs"))
                    .unwrap(),
            ));
        command
    }

    /// The simulated device's account of its processes.
    pub fn truth(&self) -> Truth {
        let device = SimDevice::open(&self.dir.join("device"), &fake_cuda::Spec::default());
        Truth(device.unwrap().truth())
    }

    /// Standard error of the programs.
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.dir.join("programs")).unwrap_or_default()
    }
}

pub struct Truth(fake_cuda::sim::Truth);

impl Truth {
    /// Time with a kernel of the process running, in ns.
    pub fn gpu_time(&self, spinner: &Spinner) -> u64 {
        self.try_gpu_time(spinner).unwrap()
    }

    /// The same; `None` before the process uses the device.
    pub fn try_gpu_time(&self, spinner: &Spinner) -> Option<u64> {
        let own = self.0.processes.iter().find(|process| process.pid == spinner.0.id())?;
        Some(own.gpus.first()?.busy_ns)
    }
}

pub struct Spinner(pub Child);

impl Spinner {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    /// Waits until it has used GPU time under the daemon.
    pub fn works(&self, daemon: &Process) {
        within(|| {
            let snapshot = daemon.snapshot();
            let own = snapshot.clients.iter().find(|client| client.pid == self.pid())?;
            (own.total_used_ns.as_nanos() > 0).then_some(())
        });
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
