//! NVIDIA's Multi-Process Service (MPS): the daemon finds, starts and queries it through its control program.
//!
//! Kernels of several processes run side by side only under MPS. Without it the driver gives the processes time slices, and an
//! SM partition has no effect. The control program, `nvidia-cuda-mps-control`, reads commands from its standard input.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The control program, and the directory of the pipes through which clients reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    program: PathBuf,
    pipe_dir: PathBuf,
}

/// MPS's default directory for its pipes, without `CUDA_MPS_PIPE_DIRECTORY`.
const DEFAULT_PIPE_DIR: &str = "/tmp/nvidia-mps";
/// The directory for the pipes in `gshared.service`: programs do not see the private /tmp of the service.
const SERVICE_PIPE_DIR: &str = "/run/gshare/mps";

/// Longest wait for an answer of the control program.
const ANSWERS_IN: Duration = Duration::from_secs(5);
/// Longest wait for the end of the control daemon.
const ENDS_IN: Duration = Duration::from_secs(2);

/// The named directory; else the first place with a control daemon's pipe; else MPS's own default.
fn pipe_dir(named: Option<OsString>, places: &[&str]) -> PathBuf {
    let named = named.filter(|text| !text.is_empty()).map(PathBuf::from);
    let used = || places.iter().map(PathBuf::from).find(|dir| dir.join("control").exists());
    named.or_else(used).unwrap_or_else(|| DEFAULT_PIPE_DIR.into())
}

impl Mps {
    /// Looks for the control program on `PATH`, and for its pipes in `CUDA_MPS_PIPE_DIRECTORY`, in the service's directory and
    /// in the default directory.
    pub fn find() -> Option<Self> {
        let path = std::env::var_os("PATH")?;
        let program = std::env::split_paths(&path)
            .map(|dir| dir.join("nvidia-cuda-mps-control"))
            .find(|file| file.is_file())?;
        let named = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
        let pipe_dir = pipe_dir(named, &[SERVICE_PIPE_DIR, DEFAULT_PIPE_DIR]);
        Some(Self { program, pipe_dir })
    }

    /// A control program and a pipe directory in other places.
    pub fn at(program: impl Into<PathBuf>, pipe_dir: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), pipe_dir: pipe_dir.into() }
    }

    /// The control program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The value of `CUDA_MPS_PIPE_DIRECTORY` with which programs find the control daemon.
    pub fn pipe_dir(&self) -> &Path {
        &self.pipe_dir
    }

    /// Whether a control daemon answers.
    pub fn is_running(&self) -> bool {
        self.pipe_dir.join("control").exists() && self.ask("get_server_list").is_ok()
    }

    /// Starts the control daemon, unless a control daemon answers already. Returns whether this call started it.
    pub fn start(&self) -> io::Result<bool> {
        if self.is_running() {
            return Ok(false);
        }
        // Programs of every user read the directory.
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.pipe_dir)?;
        let status = self.command().arg("-d").stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        if !status.success() {
            return Err(io::Error::other(format!("{} -d: {status}", self.program.display())));
        }
        Ok(true)
    }

    /// Tells the control daemon to end, with its servers.
    ///
    /// # Errors
    /// An error of kind [`TimedOut`](io::ErrorKind::TimedOut) while a server has clients, since MPS ends after its clients.
    pub fn stop(&self) -> io::Result<()> {
        self.ask_within(ENDS_IN, "quit").map(drop)
    }

    /// Sends one command and returns its answer.
    ///
    /// # Errors
    /// The control program does not start, fails, or gives no answer within 5 s.
    pub fn ask(&self, command: &str) -> io::Result<String> {
        self.ask_within(ANSWERS_IN, command)
    }

    fn ask_within(&self, limit: Duration, command: &str) -> io::Result<String> {
        let mut child =
            self.command().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            writeln!(stdin, "{command}")?;
        }
        let [output, error] = [read(child.stdout.take()), read(child.stderr.take())];
        let deadline = Instant::now() + limit;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() >= deadline {
                child.kill()?;
                child.wait()?;
                let what = format!("{command}: no answer within {} s", limit.as_secs_f64());
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let text =
            |read: Option<JoinHandle<String>>| read.and_then(|read| read.join().ok()).unwrap_or_default();
        if !status.success() {
            return Err(io::Error::other(format!("{command}: {status}: {}", text(error).trim())));
        }
        Ok(text(output).trim().to_owned())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe_dir);
        command
    }
}

/// Reads the whole output of a program in a separate thread, since a program does not end while its pipe is full.
fn read(from: Option<impl Read + Send + 'static>) -> Option<JoinHandle<String>> {
    from.map(|mut from| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // The program's status tells whether its output is valid.
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A shell script stands for the control program and keeps its state in the pipe directory, as the real program does.
    #[test]
    fn the_control_daemon_is_started_once_and_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let (program, pipes) = (dir.path().join("nvidia-cuda-mps-control"), dir.path().join("pipes"));
        let script = "#!/bin/sh\ncd \"$CUDA_MPS_PIPE_DIRECTORY\" || exit 1\n\
            if [ \"$1\" = -d ]; then echo started >> log; : > control; exit; fi\n\
            read -r line; echo \"$line\" >> log\n\
            case $line in get_server_list) echo 17;; quit) rm control;; hang) exec sleep 1000;; *) echo bad >&2; exit 1;; esac\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mps = Mps::at(&program, &pipes);
        assert!(!mps.is_running());
        assert!(mps.start().unwrap());
        assert!(!mps.start().unwrap(), "it runs already");
        assert_eq!(mps.ask("get_server_list").unwrap(), "17");
        assert!(mps.ask("nonsense").unwrap_err().to_string().contains("bad"));
        let error = mps.ask_within(Duration::from_millis(50), "hang").unwrap_err();
        assert_eq!(error.to_string(), "hang: no answer within 0.05 s");
        mps.stop().unwrap();
        assert!(!mps.is_running());
    }

    #[test]
    fn programs_look_for_the_pipes_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let places = ["service", "default"].map(|name| dir.path().join(name).display().to_string());
        let find = |named: Option<&str>| {
            let found = pipe_dir(named.map(OsString::from), &places.each_ref().map(String::as_str));
            found.display().to_string()
        };
        assert_eq!(find(None), DEFAULT_PIPE_DIR, "there are none yet");
        for place in places.iter().rev() {
            std::fs::create_dir(place).unwrap();
            std::fs::write(Path::new(place).join("control"), "").unwrap();
            assert_eq!(find(None), *place);
        }
        assert_eq!((find(Some("/named")), find(Some(""))), ("/named".to_owned(), places[0].clone()));
    }

    /// The constant and the unit file must name the same directory.
    #[test]
    fn the_service_has_its_pipes_where_programs_look() {
        let unit = include_str!("../dist/gshared.service");
        assert!(
            unit.contains(&format!("Environment=CUDA_MPS_PIPE_DIRECTORY={SERVICE_PIPE_DIR}\n")),
            "{unit}"
        );
        assert!(unit.contains("PrivateTmp=yes\n") && !unit.contains("/tmp/"), "{unit}");
    }
}
