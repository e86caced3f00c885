//! Functions in container images, by podman. Without podman, or if podman can run no container, the test reports this and ends.

use crate::common::{Provider, within};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const SHARE: &str =
    r#""annotations":{"fastgshare/gpu_quota_request":"0.2","fastgshare/gpu_sm_partition":"24"}"#;

fn podman(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("podman").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Libraries of a program or a library, with the loader among them.
fn libraries(file: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(file).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// An image of one program and its libraries. Removed at the end of the test.
struct Image(String);

impl Image {
    /// The image, if podman can make and run one.
    fn make() -> Option<Self> {
        let skipped = |why: String| println!("skipped: no podman that runs containers: {why}");
        podman(&["--version"]).map_err(skipped).ok()?;
        let root = tempfile::tempdir().unwrap();
        let built = Path::new(env!("CARGO_BIN_EXE_gpu_function"));
        let deps = built.parent().unwrap().join("deps");
        let files = [built.to_owned(), deps.join("libgshare_hook.so"), deps.join("libfake_cuda.so")];
        for library in files.iter().flat_map(|file| libraries(file)).collect::<BTreeSet<_>>() {
            let to = root.path().join(library.strip_prefix("/").unwrap());
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(&library, to).unwrap();
        }
        // The image's command is not this one.
        std::fs::copy(built, root.path().join("function")).unwrap();
        std::os::unix::fs::symlink("function", root.path().join("other")).unwrap();
        // Tests of this program run at once, and each removes its own image.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("localhost/gshare-test:{}-{number}", std::process::id());
        let mut tar =
            Command::new("tar").arg("-cC").arg(root.path()).arg(".").stdout(Stdio::piped()).spawn().unwrap();
        let import = Command::new("podman")
            .args(["import", "--quiet", "--change", "ENTRYPOINT [\"/function\"]", "-", &name])
            .stdin(tar.stdout.take().unwrap())
            .output()
            .unwrap();
        assert!(tar.wait().unwrap().success());
        if !import.status.success() {
            skipped(String::from_utf8_lossy(&import.stderr).into_owned());
            return None;
        }
        let image = Self(name);
        // With an invalid port the program ends at once, with a message.
        let ran = podman(&["run", "--rm", "--network=host", "--env=KERNELS=0", "--env=PORT=x", &image.0]);
        match ran {
            Err(said) if said.contains("PORT") => Some(image),
            said => {
                skipped(format!("{said:?}"));
                None
            }
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = podman(&["rmi", "--force", &self.0]);
    }
}

fn start(state: &Path) -> Provider {
    Provider::start(state, &["--sim=v100"])
}

fn label(state: &Path) -> String {
    format!("io.gshare.host={}", state.canonicalize().unwrap().join("containers").display())
}

/// Containers of the host with this state, running or not.
fn containers(state: &Path) -> usize {
    let filter = format!("--filter=label={}", label(state));
    podman(&["ps", "--all", "--quiet", &filter]).unwrap().lines().count()
}

fn deploy(provider: &Provider, body: &str) {
    let (status, said) = provider.call("POST", "/system/functions", body);
    assert_eq!(status, 202, "{said}");
}

/// Process on this host of the only instance of a function.
fn pid(provider: &Provider, name: &str) -> Option<u64> {
    let status: Value =
        serde_json::from_str(&provider.call("GET", &format!("/system/function/{name}"), "").1).unwrap();
    status["gshare"]["instances"][0]["pids"][0].as_u64()
}

fn text(pid: u64, file: &str) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/{file}")).unwrap()).into_owned()
}

/// One request; the function's process, as it sees itself.
fn answer(provider: &Provider, name: &str) -> u64 {
    let (status, said) = provider.call("POST", &format!("/function/{name}/"), "");
    assert_eq!(status, 200, "{said}");
    serde_json::from_str::<Value>(&said).unwrap()["pid"].as_u64().unwrap()
}

#[test]
fn a_function_in_an_image_has_a_share_and_ends_with_its_instance_and_with_its_host() {
    let Some(image) = Image::make() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut provider = start(dir.path());
    for name in ["mine", "others"] {
        let secret = format!(r#"{{"name":"{name}","value":"secret of {name}"}}"#);
        assert_eq!(provider.call("POST", "/system/secrets", &secret).0, 202);
    }
    let body = format!(
        r#"{{"service":"f","image":"{}","secrets":["mine"],"readOnlyRootFilesystem":true,{SHARE}}}"#,
        image.0
    );
    deploy(&provider, &body);
    provider.replicas("f", 1);
    assert_eq!(answer(&provider, "f"), 1, "the first process of its container");
    let first = pid(&provider, "f").unwrap();
    assert!(text(first, "cmdline").starts_with("/function"), "the image's own command");
    let maps = text(first, "maps");
    assert!(maps.contains("libgshare_hook.so") && maps.contains("libfake_cuda.so"), "{maps}");
    assert!(!text(first, "environ").contains("LD_PRELOAD"), "the hook is named in a file");
    assert!(text(first, "mountinfo").lines().any(|line| line.contains(" / / ro")), "read-only");

    // The function sees its own secret at OpenFaaS's path, and no other.
    assert_eq!(provider.call("GET", "/function/f/secret/mine", "").1, "secret of mine");
    assert_eq!(provider.call("GET", "/function/f/secret/others", "").0, 404);

    // The daemon metered its kernels under its requested share.
    within(|| {
        let state: Value = serde_json::from_str(&provider.call("GET", "/system/state", "").1).unwrap();
        let of = &state["functions"][0];
        of["clients"][0]["quota_request"].as_f64() == Some(0.2) && of["gpu_seconds"].as_f64() > Some(0.0)
    });
    let logs = provider.call("GET", "/system/logs?name=f", "").1;
    assert!(logs.contains("serving, 5 kernels a request"), "{logs}");

    // Another command in the same image.
    let other = format!(
        r#"{{"service":"g","image":"{}","envProcess":"/other --not-looked-at","envVars":{{"KERNELS":"0"}},
        "annotations":{{"gshare/profile":"none"}}}}"#,
        image.0
    );
    deploy(&provider, &other);
    provider.replicas("g", 1);
    assert!(text(pid(&provider, "g").unwrap(), "cmdline").starts_with("/other\0--not-looked-at"));
    assert_eq!(containers(dir.path()), 2);
    assert_eq!(provider.call("DELETE", "/system/functions", r#"{"functionName":"g"}"#).0, 202);
    within(|| containers(dir.path()) == 1);

    // A killed container is removed, and another takes its place.
    let killed = Command::new("kill").args(["-KILL", &first.to_string()]).status().unwrap();
    assert!(killed.success());
    within(|| pid(&provider, "f").is_some_and(|pid| pid != first) && containers(dir.path()) == 1);
    provider.replicas("f", 1);
    assert_eq!(answer(&provider, "f"), 1);
    let second = pid(&provider, "f").unwrap();

    // The host is killed, and leaves no container behind.
    provider.child.kill().unwrap();
    provider.child.wait().unwrap();
    within(|| containers(dir.path()) == 0 && !Path::new(&format!("/proc/{second}")).exists());

    // Nor does a host killed with its shells, once it starts again: its kept functions run then, and nothing else.
    let left = ["create", "--network=host", "--label", &label(dir.path()), &image.0];
    podman(&left).unwrap();
    let provider = start(dir.path());
    provider.replicas("f", 1);
    assert_eq!((answer(&provider, "f"), containers(dir.path())), (1, 1));
    let third = pid(&provider, "f").unwrap();
    assert_eq!(provider.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#).0, 202);
    within(|| containers(dir.path()) == 0 && !Path::new(&format!("/proc/{third}")).exists());
}

#[test]
fn limits_of_a_container_are_kept_by_the_kernel() {
    let Some(image) = Image::make() else { return };
    let dir = tempfile::tempdir().unwrap();
    let provider = start(dir.path());
    let body = format!(
        r#"{{"service":"f","image":"{}","limits":{{"memory":"256Mi","cpu":"1500m"}},"envVars":{{"KERNELS":"0"}},
        "annotations":{{"gshare/profile":"none"}}}}"#,
        image.0
    );
    deploy(&provider, &body);
    provider.replicas("f", 1);
    let members = text(pid(&provider, "f").unwrap(), "cgroup");
    let limit = members.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
        let root = roots[usize::from(controllers != "memory")];
        let files = ["memory.limit_in_bytes", "memory.max"].map(|file| Path::new(root).join(path).join(file));
        files.into_iter().find_map(|file| std::fs::read_to_string(file).ok())
    });
    assert_eq!(limit.as_deref().map(str::trim), Some("268435456"), "{members}");
}

#[test]
fn an_image_that_is_not_there_is_told_in_the_functions_status() {
    let Some(_) = Image::make() else { return };
    let dir = tempfile::tempdir().unwrap();
    let provider = start(dir.path());
    deploy(&provider, &format!(r#"{{"service":"f","image":"localhost:1/no-such:1",{SHARE}}}"#));
    within(|| {
        let status: Value = serde_json::from_str(&provider.call("GET", "/system/function/f", "").1).unwrap();
        status["gshare"]["problem"].as_str().is_some_and(|why| why.contains("localhost:1/no-such:1"))
    });
}

#[test]
fn without_podman_an_image_is_refused_and_says_what_would_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command
        .args(["--listen", "127.0.0.1:0", "--set", "host.no_gpu=true", "--state"])
        .arg(dir.path())
        .env("PATH", dir.path());
    let provider = Provider::of(&mut command);
    let body = r#"{"service":"f","image":"localhost/my-fn:1"}"#;
    let (status, said) = provider.call("POST", "/system/functions", body);
    assert_eq!(status, 400, "{said}");
    for part in ["image: `localhost/my-fn:1`", "no podman is on the PATH", "install podman", "envProcess"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(provider.call("GET", "/system/functions", "").1, "[]", "nothing was kept");
    // The host runs programs as before.
    provider.deploy("plain", r#","envVars":{"KERNELS":"0"},"annotations":{"gshare/profile":"none"}"#);
    provider.replicas("plain", 1);
}
