//! Building the libraries and the C programs, and running programs bare and hooked on a simulated device of their own.
#![allow(dead_code, unreachable_pub)] // each test file uses its part

pub mod daemon;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use fake_cuda::sim::{ProcessTruth, SimDevice};

/// The files under test.
pub struct Built {
    /// The hook.
    pub hook: PathBuf,
    /// A directory with `libcuda.so.1` and `libnvidia-ml.so.1`.
    pub driver: PathBuf,
    /// Folder of the compiled programs.
    programs: PathBuf,
}

/// Both libraries, which cargo builds beside this test since it depends on them.
pub fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let exe = std::env::current_exe().expect("a test has a path");
        let deps = exe.parent().expect("a test lies in a folder");
        let target = deps.parent().expect("target/PROFILE/deps/test");
        // One folder per test binary, since the binaries run side by side.
        let place = target.join("hook-tests").join(exe.file_stem().expect("a test has a name"));
        let (driver, programs) = (place.join("driver"), place.join("programs"));
        std::fs::create_dir_all(&driver).expect("target is writable");
        std::fs::create_dir_all(&programs).expect("target is writable");
        for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
            let link = driver.join(name);
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(deps.join("libfake_cuda.so"), &link).expect("target is writable");
        }
        Built { hook: deps.join("libgshare_hook.so"), driver, programs }
    })
}

/// The program of `tests/programs/NAME.c`, compiled once by each test binary that needs it.
pub fn program(name: &str, flags: &[&str]) -> PathBuf {
    static COMPILED: Mutex<BTreeMap<String, &'static OnceLock<PathBuf>>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().expect("no test panics while it looks");
    let place = *compiled.entry(name.to_owned()).or_insert_with(|| Box::leak(Box::default()));
    drop(compiled);
    place.get_or_init(|| compile(name, flags)).clone()
}

fn compile(name: &str, flags: &[&str]) -> PathBuf {
    let built = built();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(format!("{name}.c"));
    let shared = flags.contains(&"-shared");
    let place = built.programs.join(if shared { format!("{name}.so") } else { name.to_owned() });
    let done = Command::new("gcc")
        .args(["-O1", "-g", "-Wall", "-Werror", "-Wno-unused-function", "-o"])
        .arg(&place)
        .arg(&source)
        .args(if shared { &["-fPIC"][..] } else { &[] })
        .args(flags.iter().filter(|flag| **flag != "-nodriver"))
        .arg("-L")
        .arg(&built.driver)
        .args(if flags.contains(&"-nodriver") { &[][..] } else { &["-Wl,--no-as-needed", "-lcuda"] })
        .args(["-ldl", "-lpthread"])
        .output()
        .expect("gcc runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    place
}

/// A run of a program on a device of its own.
pub struct Run {
    command: Command,
    place: tempfile::TempDir,
    preload: Vec<PathBuf>,
}

/// A program's standard output, and its traces on the device.
pub struct Done {
    pub stdout: String,
    pub stderr: String,
    pub code: Option<i32>,
    pub truth: Vec<ProcessTruth>,
}

impl Run {
    /// The program without the hook.
    pub fn bare(program: &Path, arguments: &[&str]) -> Self {
        let place = tempfile::tempdir().expect("a temporary directory");
        let mut command = Command::new(program);
        command.args(arguments);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("GSHARE_") {
                command.env_remove(name);
            }
        }
        command
            .env("LD_LIBRARY_PATH", &built().driver)
            .env("GSHARE_SIM_DEVICE", place.path().join("device"))
            .env_remove("CUDA_VISIBLE_DEVICES");
        Self { command, place, preload: Vec::new() }
    }

    /// The program with the hook, without a daemon unless the caller names one.
    pub fn hooked(program: &Path, arguments: &[&str]) -> Self {
        let mut run = Self::bare(program, arguments);
        run.preload.push(built().hook.clone());
        run.command.env("GSHARE_SOCKET", run.place.path().join("nobody.sock"));
        run
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Another library, before (`true`) or after the hook.
    pub fn preload(mut self, library: &Path, before: bool) -> Self {
        let at = if before { 0 } else { self.preload.len() };
        self.preload.insert(at, library.to_owned());
        self
    }

    /// Runs on a driver without this function.
    pub fn on_a_driver_without(mut self, function: &str) -> Self {
        let folder = self.place.path().join("driver");
        std::fs::create_dir(&folder).expect("a temporary directory");
        let mut library = std::fs::read(built().driver.join("libcuda.so.1")).expect("the driver is built");
        let name = format!("\0{function}\0").into_bytes();
        let found: Vec<usize> =
            library.windows(name.len()).enumerate().filter(|(_, w)| **w == *name).map(|(at, _)| at).collect();
        assert!(!found.is_empty(), "the driver has {function}");
        found.into_iter().for_each(|at| library[at + 3] = b'_');
        std::fs::write(folder.join("libcuda.so.1"), library).expect("a temporary directory");
        self.command.env("LD_LIBRARY_PATH", folder);
        self
    }

    pub fn device(&self) -> PathBuf {
        self.place.path().join("device")
    }

    /// Runs the program to its end, no longer than [`patience`].
    pub fn finish(self) -> Done {
        self.finish_with("")
    }

    /// [`finish`](Self::finish), with standard input.
    pub fn finish_with(mut self, input: &str) -> Done {
        use std::io::Write as _;
        let preload: Vec<_> = self.preload.iter().map(|path| path.display().to_string()).collect();
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", &patience().to_string(), "env"]);
        // Only the program is hooked, its launcher is not.
        if !preload.is_empty() {
            command.arg(format!("LD_PRELOAD={}", preload.join(":")));
        }
        command.arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(std::process::Stdio::piped());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the program reads");
        let Output { status, stdout, stderr } = child.wait_with_output().expect("the program ends");
        let truth = SimDevice::open(&self.device(), &fake_cuda::Spec::default())
            .map_or_else(|_| Vec::new(), |device| device.truth().processes);
        self.command.env_clear();
        Done {
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            code: status.code(),
            truth,
        }
    }
}

/// The seconds that a program may run: a minute, or `GSHARE_TEST_SECONDS`. A wait for a report lasts a quarter of them at most.
pub fn patience() -> u32 {
    number("GSHARE_TEST_SECONDS", 60)
}

/// A number from the environment.
pub fn number(name: &str, usual: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// Runs two programs at the same time, each on its own device.
pub fn side_by_side(one: Run, other: Run) -> (Done, Done) {
    std::thread::scope(|scope| {
        let one = scope.spawn(|| one.finish());
        let other = other.finish();
        (one.join().expect("the program runs"), other)
    })
}

/// Asserts equal output and an equal end of the bare and the hooked run.
pub fn assert_same(what: &str, bare: &Done, hooked: &Done) {
    assert_eq!(
        hooked.stdout, bare.stdout,
        "{what}: hooked (left) and bare (right); stderr: {}",
        hooked.stderr
    );
    assert_eq!(hooked.code, bare.code, "{what}: {}", hooked.stderr);
}
