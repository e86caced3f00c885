//! `gshare store` as a user or a script meets it.

use crate::common::Local;
use crate::hooked;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Store {
    child: Child,
    dir: tempfile::TempDir,
}

impl Store {
    fn start() -> Self {
        Self::with(&[])
    }

    fn with(flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = gshare(dir.path());
        let child =
            command.args(["serve", "--host", "64MiB"]).args(flags).stderr(Stdio::null()).spawn().unwrap();
        within(|| listens(&dir.path().join("store.sock")).then_some(()));
        Self { child, dir }
    }

    fn run(&self, args: &[&str]) -> Output {
        gshare(self.dir.path()).args(args).output().unwrap()
    }

    fn json(&self, args: &[&str]) -> serde_json::Value {
        let output = self.run(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).expect("exactly one JSON object")
    }

    fn error(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks again and again until there is an answer, even if a simulator has to be built first.
fn within<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = ask() {
            return value;
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "it did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a store listens at the socket, which is there a moment before.
fn listens(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_ok()
}

fn gshare(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    command.args(["store", "--socket"]).arg(dir.join("store.sock"));
    command.env("GSHARE_SIM_DEVICE", dir.join("device"));
    command
}

/// A safetensors file of one tensor, `w`.
fn model(path: &Path) -> Vec<u8> {
    let header = r#"{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([7; 24]);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn a_model_is_put_listed_got_verified_and_evicted() {
    let store = Store::start();
    let file = store.dir.path().join("tiny.safetensors");
    let bytes = model(&file);
    let path = file.to_str().unwrap();

    let put = store.json(&["put", "tiny", path, "--access", "public"]);
    assert_eq!(put["bytes"], 2 << 20);
    assert!(store.error(&["put", "tiny", path]).contains("taken"));
    let listed = store.json(&["ls"]);
    assert_eq!(listed["models"][0]["name"], "tiny");
    assert_eq!(listed["models"][0]["tiers"]["host"]["state"], "committed");
    let got = store.json(&["get", "tiny"]);
    assert_eq!(got["content"], put["content"]);
    assert_eq!(got["tensors"][0]["shape"], serde_json::json!([2, 3]));
    assert_eq!(store.json(&["get", put["content"].as_str().unwrap()])["bytes"], 2 << 20);
    let text = String::from_utf8(store.run(&["ls"]).stdout).unwrap();
    assert!(text.contains("tiny") && text.contains("host committed"), "{text}");
    store.json(&["verify", "tiny"]);
    store.json(&["pin", "tiny"]);
    assert!(store.error(&["evict", "tiny"]).contains("in use"));
    store.json(&["unpin", "tiny"]);
    store.json(&["forget", "tiny"]);
    assert!(store.error(&["get", "tiny"]).contains("no model"));
    // Its memory is freed after the answer.
    let stat = within(|| Some(store.json(&["stat"])).filter(|stat| stat["host"]["promised_bytes"] == 0));
    assert_eq!(stat["loads"], 1);

    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    assert!(store.error(&["put", "tiny", path]).contains("data of 24 bytes, but the file has 23"));
}

#[test]
fn without_a_store_the_error_says_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let output = gshare(dir.path()).arg("ls").output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("gshare store serve"));
}

#[test]
fn a_store_on_a_simulated_gpu_holds_a_model_there_and_ends_when_it_is_told_to() {
    let mut store = Store::with(&["--gpu", "64MiB", "--sim=v100"]);
    let file = store.dir.path().join("tiny.safetensors");
    model(&file);
    let put = store.json(&["put", "tiny", file.to_str().unwrap(), "--tier", "gpu"]);
    let stat = store.json(&["stat"]);
    let of = |tier: &str| stat[tier]["committed_bytes"].as_u64();
    assert_eq!((of("gpu"), of("host")), (Some(2 << 20), Some(0)));
    assert_eq!(store.json(&["get", "tiny", "--tier", "gpu"])["content"], put["content"]);
    let loaded = store.json(&["get", "tiny"]);
    assert_eq!(loaded["content"], put["content"], "in host memory as well, since it was asked for");
    let pid = i32::try_from(store.child.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(store.child.wait().unwrap().success());
    assert!(!store.dir.path().join("store.sock").exists());
}

#[test]
fn a_store_on_a_simulated_gpu_ends_when_the_command_is_killed() {
    let mut store = Store::with(&["--gpu", "64MiB", "--sim=v100"]);
    let server = store.json(&["stat"])["pid"].as_u64().unwrap();
    assert_ne!(server, u64::from(store.child.id()), "a process of its own");
    store.child.kill().unwrap();
    store.child.wait().unwrap();
    within(|| (!store.dir.path().join("store.sock").exists()).then_some(()));
}

#[test]
fn a_file_of_settings_gives_memory_of_a_gpu_and_options_override_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.toml");
    let file = path.to_str().unwrap();
    std::fs::write(&path, "gpu = \"1MiB\"\n[users.12345]\nbytes = \"1GiB\"\n").unwrap();
    let model_at = dir.path().join("tiny.safetensors");
    model(&model_at);
    for (flags, fits) in [(&[][..], false), (&["--gpu", "64MiB"], true)] {
        let store = Store::with(&[&["--config", file, "--sim=v100"], flags].concat());
        let put = store.run(&["put", "tiny", model_at.to_str().unwrap(), "--tier", "gpu"]);
        assert_eq!(put.status.success(), fits, "{flags:?}: an arena has 2 MiB and more");
    }
    let refused = |text: &str, flags: &[&str]| {
        std::fs::write(&path, text).unwrap();
        let output = gshare(dir.path()).args(["serve", "--config", file]).args(flags).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused("device = 1", &[]).contains("`device` is about memory of a GPU"));
    assert!(refused("gpus = 3", &[]).contains("gpus"));
    assert!(refused("mode = \"9\"", &[]).contains("not a mode"));
    assert!(refused("[users.me]\nbytes = \"1GiB\"", &[]).contains("not a uid"));
    assert!(refused("[limits]\nload_burst = 0", &[]).contains("load_burst"));
}

#[test]
fn a_file_of_settings_limits_how_many_models_a_user_has_and_how_often_one_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.toml");
    let uid = rustix::process::getuid().as_raw();
    let text = format!(
        "[limits]\nmodels = 0\n[users.{uid}]\nmodels = 2\nload_interval = \"3600s\"\nload_burst = 3\n"
    );
    std::fs::write(&path, text).unwrap();
    let store = Store::with(&["--config", path.to_str().unwrap()]);
    for (name, tensor) in [("a", "x"), ("b", "y"), ("c", "z")] {
        let header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([7; 24]);
        std::fs::write(store.dir.path().join(name), bytes).unwrap();
    }
    let file = |name: &str| store.dir.path().join(name).to_str().unwrap().to_owned();
    store.json(&["put", "a", &file("a")]);
    store.json(&["put", "b", &file("b")]);
    // The third model takes the place of one that no client holds; the fourth load comes too soon.
    store.json(&["put", "c", &file("c")]);
    assert_eq!(store.json(&["stat"])["host"]["arenas"], 2);
    store.json(&["forget", "c"]);
    assert!(store.error(&["put", "d", &file("c")]).contains("too many loads"));
}

#[test]
fn without_a_gpu_the_error_says_how_to_simulate_one() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = gshare(dir.path()).args(["serve", "--gpu", "1GiB"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("--sim"));
}

#[test]
fn a_shim_without_a_store_says_what_to_do_and_starts_nothing() {
    let (dir, daemon) = (tempfile::tempdir().unwrap(), Local::start());
    let (mark, socket) = (dir.path().join("started"), dir.path().join("none.sock"));
    let mut command = hooked::run(dir.path(), &daemon.socket(), &["--shim"]);
    let output =
        command.env("GSHARE_STORE", &socket).arg("touch").arg(&mark).stderr(Stdio::piped()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && !mark.exists(), "{error}");
    assert!(error.contains("none.sock") && error.contains("gshare store serve"), "{error}");
}

/// The library is only named here: the tests of the Python package load it.
#[test]
fn a_shim_stands_first_on_the_path_of_python_as_long_as_the_program_runs() {
    let (store, daemon) = (Store::start(), Local::start());
    let (dir, library) = (store.dir.path(), hooked::libraries().join("libgshare_hook.so"));
    let mut command = hooked::run(dir, &daemon.socket(), &["--shim=store.sock"]);
    let script = "echo $PYTHONPATH $GSHARE_STORE $GSHARE_STORE_LIBRARY; cd ${PYTHONPATH%%:*} && stat -c %a . && find . -type f | sort";
    command.args(["sh", "-c", script]).current_dir(dir);
    command.env("PYTHONPATH", "/before").env("GSHARE_STORE", "/other").env("GSHARE_STORE_LIBRARY", &library);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let (first, rest) = text.split_once('\n').unwrap();
    let words: Vec<&str> = first.split(' ').collect();
    let [path, socket, named] = words[..] else { panic!("{text}") };
    let shim = Path::new(path.strip_suffix(":/before").unwrap());
    let canonical = |path: &Path| path.canonicalize().unwrap();
    assert_eq!(canonical(Path::new(socket)), canonical(&dir.join("store.sock")));
    assert_eq!(Path::new(named), canonical(&library));
    let files =
        ["gshare_store/__init__.py", "gshare_store/_dlpack.py", "gshare_store/shim.py", "sitecustomize.py"];
    assert_eq!(
        rest.lines().collect::<Vec<_>>(),
        [&["700".to_owned()][..], &files.map(|file| format!("./{file}"))].concat()
    );
    assert!(!shim.exists(), "gone with the program");
}
