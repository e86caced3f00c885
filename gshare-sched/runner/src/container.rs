//! Processes in containers, by podman.
//!
//! # Problem
//! A function may come as an OCI image. Its process is to be treated like all others: under the hook, with its share, ended on
//! request, and not left behind by a killed host. But a container is a child of podman's monitor and not of the host, so
//! neither a signal to `podman run` nor the death of the host ends it.
//!
//! # Algorithm
//! 1. [`Image::named`] decides which texts name an image.
//! 2. `Container::arguments` makes the arguments of `podman run`. Pure.
//! 3. A shell with a pipe from the host looks after each container. When a byte comes in, or the host is gone, the shell
//!    kills `podman run` and removes the container. The shell ends after the container, so memory on a GPU is free then.
//! 4. The hook is named in a read-only `/etc/ld.so.preload` of the container. The loader of musl does not read the file, so a container of
//!    Alpine starts without the hook. With `LD_PRELOAD` it would not start. The share is in `share.env` beside the hook, so a
//!    program keeps its share even if it clears its environment.
//! 5. All containers have a label with the folder of their host. If the shells were killed as well, the host finds the containers
//!    by this label when it starts again ([`Podman::sweep`]).
//!
//! # Cost
//! Some 0.4 s for a start and as much for an end, which podman takes.

use crate::confine::{Limits, User};
use crate::{Hook, HookedProcess};
use gshare_core::RunId;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::OnceLock;

/// Why a deployment cannot be a container. Each names the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// The text begins as an image does, and is none.
    #[error(
        "image: `{text}`: `{registry}` is read as a registry: need REGISTRY/NAME, REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST, \
         with a name of a-z, 0-9 and separators; the path of a program begins with / or ./"
    )]
    NotAnImage {
        /// As given.
        text: String,
        /// Its first part.
        registry: String,
    },
    /// A name with a tag and without a registry, which podman would look for in several places or in none.
    #[error(
        "image: `{text}`: has a tag and no registry: need REGISTRY/NAME:TAG, such as localhost/{text}; \
         the path of a program begins with / or ./"
    )]
    NoRegistry {
        /// As given.
        text: String,
    },
    /// There is nothing to run it with.
    #[error(
        "image: `{image}`: is a container image, and no podman is on the PATH of this host: install podman 4.1 or later, \
         or name a program: by its path in image, or in envProcess with an image that names no registry"
    )]
    NoPodman {
        /// The image.
        image: Image,
    },
    /// Podman would split the path.
    #[error("a container cannot be given {path}: its path has a colon in it; put it elsewhere")]
    Colon {
        /// The path.
        path: PathBuf,
    },
}

/// Reference of a container image, with its registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image(String);

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Image {
    /// The image named by a text. The first part of an image, before the first `/`, is a registry: as for other tools, it has a dot or
    /// a colon in it, or is `localhost`. Texts that begin with `/` or `.` are paths; all others are names, and no images.
    ///
    /// # Errors
    /// When the rest of the text is not as references of images are.
    pub fn named(text: &str) -> Result<Option<Self>, ContainerError> {
        let Some((registry, rest)) = text.split_once('/') else { return Ok(None) };
        let is_registry = registry == "localhost" || registry.contains(['.', ':']);
        if !is_registry || text.starts_with('.') {
            return Ok(None);
        }
        if registry_is_valid(registry) && rest_is_valid(rest) {
            return Ok(Some(Self(text.to_owned())));
        }
        Err(ContainerError::NotAnImage { text: text.to_owned(), registry: registry.to_owned() })
    }

    /// Refuses the short name of an image, such as `functions/alpine:latest`, where a program is to be named.
    ///
    /// # Errors
    /// When the text has a tag after a name, and is neither an image nor the path of a file.
    pub fn refuse_short(text: &str) -> Result<(), ContainerError> {
        let is_path = text.starts_with(['/', '.']) || text.contains(char::is_whitespace);
        if !is_path && rest_is_valid(text) && text.contains([':', '@']) {
            return Err(ContainerError::NoRegistry { text: text.to_owned() });
        }
        Ok(())
    }
}

/// `HOST` or `HOST:PORT`.
fn registry_is_valid(registry: &str) -> bool {
    let (host, port) = registry.split_once(':').unwrap_or((registry, "443"));
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    let ends = host.bytes().next().zip(host.bytes().last());
    ends.is_some_and(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
        && host.bytes().all(inner)
        && port.parse::<u16>().is_ok()
}

/// `NAME`, `NAME:TAG`, `NAME@sha256:DIGEST` or all three.
fn rest_is_valid(rest: &str) -> bool {
    let (rest, digest) = rest.split_once('@').map_or((rest, None), |(rest, digest)| (rest, Some(digest)));
    let (name, tag) = rest.split_once(':').map_or((rest, None), |(name, tag)| (name, Some(tag)));
    let small = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let part = |part: &str| {
        let ends = part.bytes().next().zip(part.bytes().last());
        ends.is_some_and(|(first, last)| small(first) && small(last))
            && part.bytes().all(|byte| small(byte) || b"._-".contains(&byte))
    };
    let tagged = |tag: &str| {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        (1..=128).contains(&tag.len())
            && tag.bytes().next().is_some_and(word)
            && tag.bytes().all(|byte| word(byte) || b".-".contains(&byte))
    };
    let digested = |digest: &str| {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    name.split('/').all(part) && tag.is_none_or(tagged) && digest.is_none_or(digested)
}

/// A file or folder of the host, visible in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its path on the host.
    pub host: PathBuf,
    /// Its path in the container.
    pub inside: PathBuf,
    /// Whether the container may write there.
    pub writable: bool,
}

impl Mount {
    /// A file or folder to read, at its path on the host.
    pub fn read(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { inside: path.clone(), host: path, writable: false }
    }

    fn argument(&self) -> Result<OsString, ContainerError> {
        let mut argument = OsString::new();
        for (path, after) in [(&self.host, ":"), (&self.inside, if self.writable { ":rw" } else { ":ro" })] {
            if path.as_os_str().as_bytes().contains(&b':') {
                return Err(ContainerError::Colon { path: path.clone() });
            }
            argument.push(path);
            argument.push(after);
        }
        Ok(argument)
    }
}

/// The properties of a container, beside its command and its environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The image.
    pub image: Image,
    /// Files and folders of the host, other than the hook's.
    pub mounts: Vec<Mount>,
    /// Devices: paths, or names of CDI.
    pub devices: Vec<OsString>,
    /// Limits of host memory and time on CPUs.
    pub limits: Limits,
    /// The user of its processes; with the numbers of the host.
    pub user: User,
    /// Whether its processes may get no more rights than this user has.
    pub confined: bool,
    /// Whether its file system is read-only, but for temporary files.
    pub read_only: bool,
    /// Whether it shares the host's shared memory, as clients of MPS do.
    pub host_ipc: bool,
}

impl Container {
    /// The arguments of `podman`, without an instance's own arguments: its name, labels and files.
    fn arguments(&self, command: &Command, own: &[OsString]) -> Result<Vec<OsString>, ContainerError> {
        let mut all: Vec<OsString> =
            ["run", "--rm", "--network=host", "--log-driver=none", "--no-healthcheck"]
                .map(OsString::from)
                .into();
        let mut add = |text: String| all.push(text.into());
        add(format!("--user={}:{}", self.user.uid, self.user.gid));
        if self.confined {
            add("--cap-drop=all".to_owned());
            add("--security-opt=no-new-privileges".to_owned());
        }
        if self.read_only {
            add("--read-only".to_owned());
        }
        if self.host_ipc {
            add("--ipc=host".to_owned());
        }
        if let Some(bytes) = self.limits.memory {
            add(format!("--memory={bytes}b"));
        }
        if let Some(milli) = self.limits.cpu_milli {
            add(format!("--cpus={}.{:03}", milli / 1000, milli % 1000));
        }
        all.extend_from_slice(own);
        for device in &self.devices {
            all.extend([OsString::from("--device"), device.clone()]);
        }
        for mount in &self.mounts {
            all.extend([OsString::from("--volume"), mount.argument()?]);
        }
        for (key, value) in command.get_envs() {
            let Some(value) = value else { continue };
            let mut pair = key.to_owned();
            pair.push("=");
            pair.push(value);
            all.extend([OsString::from("--env"), pair]);
        }
        let mut words = command.get_args().peekable();
        if words.peek().is_some() {
            // The image's own would come before these.
            all.push("--entrypoint=".into());
        }
        all.push(self.image.0.clone().into());
        all.extend(words.map(OsStr::to_owned));
        Ok(all)
    }
}

/// Variables of the share, which the hook reads from a file.
const SHARE: [&str; 7] =
    ["GSHARE_SOCKET", "GSHARE_NAME", "GSHARE_RUN", "GSHARE_QUOTA", "GSHARE_SM", "GSHARE_MEM", "GSHARE_CLASS"];
/// Label of the containers of a host: its folder.
const LABEL: &str = "io.gshare.host";
/// Looks after a container: `$0` is podman, `$1` the container's name, and the other arguments run it. The standard input is the lifeline.
/// The shell writes nothing itself: the host may be gone, and a signal for the broken pipe would end the shell.
const SHELL: &str = r#"
podman=$0 name=$1
shift
exec 3<&0 </dev/null
"$podman" "$@" 3<&- &
client=$!
exec >/dev/null 2>&1
{ read -r _ <&3; kill -KILL "$client"; } &
watch=$!
wait "$client"
status=$?
kill "$watch"
"$podman" rm --force --ignore --time 0 "$name" 3<&-
exit "$status"
"#;

/// Podman on this host, and the folder for files of its containers.
#[derive(Debug)]
pub struct Podman {
    program: PathBuf,
    folder: PathBuf,
}

impl Podman {
    /// Podman on the `PATH`, for a host with the files of its containers in this folder. The folder is made with the first container.
    pub fn find(folder: PathBuf) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_program = |path: &PathBuf| {
            path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        let program = std::env::split_paths(&path).map(|dir| dir.join("podman")).find(is_program)?;
        Some(Self { program, folder })
    }

    /// Removes the containers left behind by a host with this folder, and their files.
    ///
    /// # Errors
    /// When podman does not answer, or the files cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let mut filter = OsString::from("--filter=label=");
        filter.push(self.label());
        let left = self.ask([words(&["ps", "--all", "--quiet", "--no-trunc"]), vec![filter]].concat())?;
        let left: Vec<&str> = left.split_whitespace().collect();
        if !left.is_empty() {
            self.ask([words(&["rm", "--force", "--ignore", "--time=0"]), words(&left)].concat())?;
        }
        std::fs::remove_dir_all(&self.folder)
    }

    fn label(&self) -> OsString {
        let mut label = OsString::from(format!("{LABEL}="));
        label.push(&self.folder);
        label
    }

    fn ask(&self, arguments: Vec<OsString>) -> io::Result<String> {
        let output = Command::new(&self.program).args(arguments).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("{}: {}", self.program.display(), said.trim())));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A folder for the files of one instance, which everybody may read.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self) -> io::Result<tempfile::TempDir> {
        std::fs::create_dir_all(&self.folder)?;
        let folder = tempfile::Builder::new().prefix("c-").tempdir_in(&self.folder)?;
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(folder)
    }

    /// Starts a container with the command's arguments and environment; its program is not looked at. Without arguments the
    /// container runs its image's command. The rest is as for [`HookedProcess::start`]. `folder` comes from [`Podman::folder`], and is
    /// removed with the container.
    ///
    /// # Errors
    /// When a path cannot be given to a container, or its shell cannot be started. A refusal of podman is an end of the
    /// process, with podman's message on standard error.
    pub fn start(
        &self,
        mut container: Container,
        mut command: Command,
        name: &str,
        run: RunId,
        hook: Option<&Hook>,
        folder: tempfile::TempDir,
    ) -> io::Result<HookedProcess> {
        let invalid = |error: ContainerError| io::Error::new(io::ErrorKind::InvalidInput, error);
        if let Some(hook) = hook {
            command
                .env("GSHARE_SOCKET", &hook.socket)
                .env("GSHARE_NAME", name)
                .env("GSHARE_RUN", run.to_string());
            container.mounts.extend(hook_mounts(hook, &command, folder.path())?);
        }
        let pid_file = folder.path().join("pid");
        // One word: names of instances have parts.
        let own_name = format!("gshare-{}-{run}", name.replace('/', "-"));
        let pair = |option: &str, value: &OsStr| {
            let mut text = OsString::from(option);
            text.push(value);
            text
        };
        let mut own = vec![
            pair("--name=", OsStr::new(&own_name)),
            pair("--label=", &self.label()),
            pair("--pidfile=", pid_file.as_os_str()),
        ];
        if !rustix::process::geteuid().is_root() {
            // Else its user would be another user of the host.
            own.push("--userns=keep-id".into());
        }
        let arguments = container.arguments(&command, &own).map_err(invalid)?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(SHELL).arg(&self.program).arg(own_name).args(arguments);
        // A group of its own: a terminal's signal to the host's group is not for the container.
        shell.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = shell.spawn()?;
        let lifeline = child.stdin.take();
        let lifeline = lifeline.ok_or_else(|| io::Error::other("the shell's input is no pipe"))?;
        HookedProcess::of_container(
            child,
            Lifeline { lifeline, pid_file, pid: OnceLock::new(), _folder: folder },
        )
    }
}

/// The mounts of the hook, of the daemon's socket, and of two files made for this container with the hook's path and the share.
fn hook_mounts(hook: &Hook, command: &Command, folder: &Path) -> io::Result<[Mount; 4]> {
    // Here, too, a path is refused if the loader would split it.
    crate::preload(&hook.preload).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let mut line = hook.preload.clone().into_os_string();
    line.push("\n");
    let mut share = OsString::new();
    for (key, value) in command.get_envs().filter(|(key, _)| SHARE.iter().any(|known| key == known)) {
        let Some(value) = value else { continue };
        share.push(key);
        share.push("=");
        share.push(value);
        share.push("\n");
    }
    let made = |file: &str, text: &OsStr, inside: PathBuf| {
        let host = folder.join(file);
        std::fs::write(&host, text.as_bytes())?;
        std::fs::set_permissions(&host, std::fs::Permissions::from_mode(0o644))?;
        Ok::<_, io::Error>(Mount { host, inside, writable: false })
    };
    Ok([
        Mount::read(&hook.preload),
        Mount::read(&hook.socket),
        made("ld.so.preload", &line, "/etc/ld.so.preload".into())?,
        made("share.env", &share, hook.preload.with_file_name("share.env"))?,
    ])
}

/// Devices of this machine's GPUs for a container: the vendor's name in CDI if its specification is there, which brings the driver's
/// libraries along; else the device files.
pub fn gpus() -> Vec<OsString> {
    gpus_in(&["/etc/cdi", "/var/run/cdi"].map(Path::new), Path::new("/dev"))
}

fn gpus_in(specs: &[&Path], dev: &Path) -> Vec<OsString> {
    let files = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    // YAML or JSON; other vendors' specifications name the vendor's devices, too.
    let named = |file: PathBuf| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.replace([' ', '"', '\''], "").contains("kind:nvidia.com/gpu")
    };
    if specs.iter().flat_map(|dir| files(dir)).any(named) {
        return vec!["nvidia.com/gpu=all".into()];
    }
    let ours = |path: &PathBuf| {
        let name = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"nvidia"));
        name && path.metadata().is_ok_and(|meta| meta.is_dir() || meta.file_type().is_char_device())
    };
    let mut found: Vec<OsString> = files(dev).filter(ours).map(PathBuf::into_os_string).collect();
    found.sort();
    found
}

/// The way to end a container, and to find its first process.
#[derive(Debug)]
pub(crate) struct Lifeline {
    lifeline: ChildStdin,
    pid_file: PathBuf,
    pid: OnceLock<u32>,
    _folder: tempfile::TempDir,
}

impl Lifeline {
    /// Has the shell end the container; the shell may have ended already.
    pub(crate) fn end(&self) {
        let _ = io::Write::write(&mut &self.lifeline, b"\n");
    }

    /// The number of its first process on the host, once there is one.
    pub(crate) fn pid(&self) -> Option<u32> {
        if let Some(pid) = self.pid.get() {
            return Some(*pid);
        }
        let pid = std::fs::read_to_string(&self.pid_file).ok()?.trim().parse().ok()?;
        Some(*self.pid.get_or_init(|| pid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> Image {
        Image::named(text).unwrap().unwrap()
    }

    #[test]
    fn an_image_names_its_registry_and_all_else_is_a_program() {
        let digest = format!("registry.example/a@sha256:{}", "0f".repeat(32));
        for text in [
            "localhost/my-fn:1",
            "localhost/my-fn",
            "registry.example/x/y_z:1.2-rc",
            "host:5000/a",
            &digest,
            "10.0.0.1/a/b",
        ] {
            assert_eq!(image(text).to_string(), text);
        }
        for text in [
            "resnet",
            "resnet:1",
            "/opt/x:1",
            "/bin/true",
            "./my.dir/run:1",
            "../a.b/c",
            "target/debug/gpu_function",
            "",
            "python3 -m http.server 127.0.0.1:80",
            "functions/alpine:latest",
            "a.out",
        ] {
            assert_eq!(Image::named(text), Ok(None), "{text}");
        }
        for text in [
            "localhost/My-Fn",
            "localhost/",
            "localhost//a",
            "localhost/a:",
            "localhost/a b",
            "-v.x/a",
            "host:port/a",
            "localhost/a@sha256:12",
            "localhost/a:b:c",
            "localhost/../a",
        ] {
            let said = Image::named(text).unwrap_err().to_string();
            assert!(
                said.starts_with(&format!("image: `{text}`: ")) && said.contains("REGISTRY/NAME"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_short_name_with_a_tag_is_told_how_to_name_its_registry() {
        for text in ["resnet:1", "functions/alpine:latest"] {
            let said = Image::refuse_short(text).unwrap_err().to_string();
            assert!(said.contains(text) && said.contains(&format!("localhost/{text}")), "{said}");
        }
        for text in ["resnet", "/opt/x:1", "./x:1", "target/debug/gpu_function", "python3 -m a:b"] {
            assert_eq!(Image::refuse_short(text), Ok(()), "{text}");
        }
    }

    fn container() -> Container {
        Container {
            image: image("localhost/f:1"),
            mounts: Vec::new(),
            devices: Vec::new(),
            limits: Limits::default(),
            user: User { uid: 7, gid: 8 },
            confined: false,
            read_only: false,
            host_ipc: false,
        }
    }

    fn arguments(container: &Container, command: &Command, own: &[&str]) -> Vec<String> {
        let own: Vec<OsString> = own.iter().map(OsString::from).collect();
        let all = container.arguments(command, &own).unwrap();
        all.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn the_arguments_say_all_that_the_container_is() {
        let mut command = Command::new("not looked at");
        command.env("B", "a line\nand = another").env("A", "1").env_remove("C");
        let plain = arguments(&container(), &command, &["--name=n"]);
        let begin = ["run", "--rm", "--network=host", "--log-driver=none", "--no-healthcheck", "--user=7:8"];
        let end = ["--name=n", "--env", "A=1", "--env", "B=a line\nand = another", "localhost/f:1"];
        assert_eq!(plain, [&begin[..], &end[..]].concat());

        let mut all = container();
        all.mounts = vec![
            Mount::read("/a/hook.so"),
            Mount { host: "/state/device".into(), inside: "/dev/simulated".into(), writable: true },
        ];
        all.devices = vec!["nvidia.com/gpu=all".into()];
        all.limits = Limits { memory: Some(1 << 20), cpu_milli: Some(1_050) };
        (all.confined, all.read_only, all.host_ipc) = (true, true, true);
        let mut command = Command::new("not looked at");
        command.args(["python3", "-u", "--name=x"]);
        let words = arguments(&all, &command, &[]).join(" ");
        let expected = "run --rm --network=host --log-driver=none --no-healthcheck --user=7:8 --cap-drop=all \
            --security-opt=no-new-privileges --read-only --ipc=host --memory=1048576b --cpus=1.050 \
            --device nvidia.com/gpu=all --volume /a/hook.so:/a/hook.so:ro --volume /state/device:/dev/simulated:rw \
            --entrypoint= localhost/f:1 python3 -u --name=x";
        assert_eq!(words, expected);
    }

    #[test]
    fn a_path_that_podman_would_split_is_refused() {
        let mut bad = container();
        bad.mounts = vec![Mount::read("/a:b/x")];
        let said = bad.arguments(&Command::new(""), &[]).unwrap_err().to_string();
        assert!(said.contains("/a:b/x") && said.contains("colon"), "{said}");
    }

    #[test]
    fn the_hook_is_named_in_a_file_and_the_share_beside_the_hook() {
        let folder = tempfile::tempdir().unwrap();
        let hook = Hook { preload: "/opt/g/libgshare_hook.so".into(), socket: "/run/g.sock".into() };
        let mut command = Command::new("");
        command.env("GSHARE_QUOTA", "30%").env("GSHARE_OTHER", "a\nGSHARE_QUOTA=100%").env("PORT", "1");
        let mounts = hook_mounts(&hook, &command, folder.path()).unwrap();
        let inside = mounts.each_ref().map(|mount| mount.inside.to_str().unwrap());
        let expected = ["/opt/g/libgshare_hook.so", "/run/g.sock", "/etc/ld.so.preload", "/opt/g/share.env"];
        assert_eq!((inside, mounts.iter().any(|mount| mount.writable)), (expected, false));
        let read = |at: usize| std::fs::read_to_string(&mounts[at].host).unwrap();
        assert_eq!(
            (read(2), read(3)),
            ("/opt/g/libgshare_hook.so\n".to_owned(), "GSHARE_QUOTA=30%\n".to_owned())
        );
        let hook = Hook { preload: "/opt/a b/hook.so".into(), ..hook };
        assert!(hook_mounts(&hook, &command, folder.path()).unwrap_err().to_string().contains("/opt/a b"));
    }

    #[test]
    fn a_gpu_is_given_by_its_name_in_cdi_or_else_by_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let [cdi, dev] = ["cdi", "dev"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(dev.join("nvidia-caps")).unwrap();
        std::fs::write(dev.join("nvidia.log"), "no device").unwrap();
        std::fs::create_dir(dev.join("other")).unwrap();
        assert_eq!(gpus_in(&[&cdi], &dev), [dev.join("nvidia-caps").into_os_string()]);
        std::fs::create_dir(&cdi).unwrap();
        let other = r#"{"kind": "example.com/share", "note": "nvidia.com/gpu=0"}"#;
        std::fs::write(cdi.join("other.json"), other).unwrap();
        assert_eq!(gpus_in(&[&cdi], &dev).len(), 1);
        std::fs::write(cdi.join("nvidia.yaml"), "kind: nvidia.com/gpu\n").unwrap();
        assert_eq!(gpus_in(&[&cdi], &dev), ["nvidia.com/gpu=all"]);
    }
}
