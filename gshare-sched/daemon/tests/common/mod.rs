//! A client of the wire without a hook, and daemons as threads and as processes.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]
#![allow(unsafe_code, reason = "fork, to be another user")]

use gshare_core::wire::{MAX_FRAME, OnDaemonLoss, Sequence, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, ResourceSpec, RunId, UseState};
use gshared::nvml::DeviceFact;
use gshared::{Config, Daemon, Running, Snapshot};
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration as StdDuration, Instant};

/// A device that every test client attaches to unless it says otherwise.
pub const DEVICE: DeviceUuid = DeviceUuid::gpu(*b"the only device!");
/// Its memory.
pub const DEVICE_MEMORY: Bytes = Bytes::from_gib(1);
/// Far beyond anything a machine under load needs; reached only by a failure.
pub const PATIENCE: StdDuration = StdDuration::from_secs(60);

/// `request:limit`, SM per cent, MiB of memory.
pub fn spec(quota: &str, sm: u16, mib: Option<u64>) -> ResourceSpec {
    let sm = gshare_core::SmShare::from_percent(sm).unwrap();
    ResourceSpec::new(quota.parse().unwrap(), sm, mib.map(Bytes::from_mib)).unwrap()
}

pub struct Client {
    pub socket: OwnedFd,
    pub sent: Sequence,
    received: Sequence,
    /// Turns that are over and GPU time used, of the client that it speaks for.
    pub turn: u32,
    pub used: Duration,
    /// The user and the ticket of the connection, as the daemon told them.
    pub ticket: Option<(u32, u128)>,
}

impl Client {
    pub fn try_connect(path: &Path) -> rustix::io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(PATIENCE),
        )?;
        Ok(Self {
            socket,
            sent: Sequence::default(),
            received: Sequence::default(),
            turn: 0,
            used: Duration::ZERO,
            ticket: None,
        })
    }

    pub fn connect(path: &Path) -> Self {
        Self::try_connect(path).unwrap()
    }

    /// Connects, waiting for a daemon that is about to be there.
    pub fn connect_soon(path: &Path) -> Self {
        within(|| Self::try_connect(path).ok())
    }

    pub fn send_bytes(&self, bytes: &[u8]) {
        // The caller learns of a dropped connection at its next read.
        let _ = send(&self.socket, bytes, SendFlags::NOSIGNAL);
    }

    pub fn send(&mut self, message: &ToDaemon) {
        let mut bytes = Vec::new();
        message.encode(self.sent.stamp(), &mut bytes);
        self.send_bytes(&bytes);
    }

    /// The next frame; `None` at the end of the connection. Tickets are kept.
    pub fn receive(&mut self) -> Option<ToClient> {
        loop {
            let bytes = self.receive_bytes()?;
            let (sequence, message) = ToClient::decode(&bytes).unwrap();
            self.received.check(sequence).unwrap();
            match message {
                ToClient::Ticket { uid, ticket } => self.ticket = Some((uid, ticket)),
                message => return Some(message),
            }
        }
    }

    /// The frame that proves the user of an earlier connection.
    pub fn resume(&mut self, (uid, ticket): (u32, u128)) {
        self.send(&ToDaemon::Resume { uid, ticket });
    }

    /// The bytes of the next frame; `None` at the end of the connection.
    pub fn receive_bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = [0; MAX_FRAME];
        // With a timeout it is not begun again by itself when this process was stopped meanwhile.
        let length =
            match rustix::io::retry_on_intr(|| recv(&self.socket, &mut bytes[..], RecvFlags::empty())) {
                Ok((length, _)) => length,
                Err(rustix::io::Errno::CONNRESET) => 0,
                Err(errno) => panic!("nothing came: {errno}"),
            };
        (length > 0).then(|| bytes[..length].to_vec())
    }

    /// The next frame that `pick` wants.
    pub fn until<T>(&mut self, pick: impl Fn(&ToClient) -> Option<T>) -> T {
        loop {
            let message = self.receive().expect("the connection is open");
            if let Some(value) = pick(&message) {
                return value;
            }
        }
    }

    pub fn hello(&mut self, run: u64, name: &str, spec: ResourceSpec) {
        self.send(&ToDaemon::Hello {
            pid_start: 0,
            pid: 0,
            run: RunId::new(run.into()),
            name: name.into(),
            program: "test".into(),
            spec,
            on_loss: OnDaemonLoss::Open,
        });
    }

    /// Says Hello and is let in; gives the epoch.
    pub fn enter(&mut self, run: u64, name: &str, spec: ResourceSpec) -> u64 {
        self.hello(run, name, spec);
        match self.receive() {
            Some(ToClient::Welcome { epoch }) => epoch,
            other => panic!("{other:?}"),
        }
    }

    pub fn attach(&mut self, allocated: Bytes) -> (ClientId, ResourceSpec) {
        self.turn = 0;
        self.send(&attach_to(0, DEVICE, DEVICE_MEMORY, allocated));
        self.until(|message| match message {
            ToClient::Attached { client, spec, .. } => Some((*client, *spec)),
            _ => None,
        })
    }

    /// Waits for the token; gives the total that it allows.
    pub fn granted(&mut self) -> Duration {
        self.until(|message| match message {
            ToClient::Allow { allowed, .. } => Some(*allowed),
            _ => None,
        })
    }

    /// Asks for a token.
    pub fn ask(&mut self, client: ClientId) {
        self.says(client, UseState::Wants);
    }

    /// Gives its token back, of which it used so much; `state`: whether it wants the next one.
    pub fn gives_back(&mut self, client: ClientId, used: Duration, state: UseState) {
        self.turn += 1;
        self.used = self.used.saturating_add(used);
        self.says(client, state);
    }

    pub fn says(&mut self, client: ClientId, state: UseState) {
        let (turn, used) = (self.turn, self.used);
        self.send(&ToDaemon::use_of_time(client, turn, used, state));
    }

    pub fn reserve(&mut self, client: ClientId, bytes: Bytes, wish: Bytes) -> Result<Bytes, Bytes> {
        self.send(&ToDaemon::MemoryReserve { client, bytes, wish });
        self.until(|message| match message {
            ToClient::MemoryGrant { bytes, .. } => Some(Ok(*bytes)),
            ToClient::MemoryDeny { free, .. } => Some(Err(*free)),
            _ => None,
        })
    }

    /// The rest of the connection, up to its end.
    pub fn rest(&mut self) -> Vec<ToClient> {
        std::iter::from_fn(|| self.receive()).collect()
    }
}

/// The first frame about a device, of a process that has used nothing of it.
pub fn attach_to(ordinal: u32, device: DeviceUuid, device_memory: Bytes, allocated: Bytes) -> ToDaemon {
    let (used, allowed) = (Duration::ZERO, Duration::ZERO);
    ToDaemon::Attach { ordinal, device, device_memory, allocated, part: None, used, allowed }
}

/// A client that was let in and has attached.
pub fn attached(path: &Path, run: u64, name: &str, spec: ResourceSpec) -> (Client, ClientId) {
    let mut client = Client::connect(path);
    client.enter(run, name, spec);
    let (id, _) = client.attach(Bytes::ZERO);
    (client, id)
}

/// The daemons' clock.
pub fn now() -> gshare_core::Timestamp {
    gshared::Clock::now(&gshared::MonotonicClock)
}

/// Everything of a daemon's journal, in order.
pub fn journal_lines(dir: &Path) -> Vec<gshared::journal::Line> {
    let files = gshared::journal::segments(&dir.join("journal")).unwrap();
    files.iter().flat_map(|file| gshared::journal::read(file).unwrap().map(Result::unwrap)).collect()
}

/// Asks again and again until there is an answer.
pub fn within<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ask() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "it did not come");
        std::thread::sleep(StdDuration::from_millis(1));
    }
}

/// A daemon in this process with its own directory.
pub struct Local {
    pub running: Option<Running>,
    pub dir: tempfile::TempDir,
}

impl Local {
    pub fn start() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::at(dir.path().join("gshare.sock"));
        change(&mut config);
        let running = Some(Daemon::new(config).unwrap().spawn().unwrap());
        Self { running, dir }
    }

    /// On a node with these devices in its driver.
    pub fn with_facts(find: impl FnMut(DeviceUuid) -> Option<DeviceFact> + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::at(dir.path().join("gshare.sock"));
        let daemon = Daemon::builder(config).facts(find).build().unwrap();
        Self { running: Some(daemon.spawn().unwrap()), dir }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("gshare.sock")
    }

    pub fn snapshot(&self) -> Snapshot {
        self.running.as_ref().unwrap().handle().snapshot().unwrap()
    }

    pub fn drops(&self, reason: &str) -> u64 {
        self.snapshot().drops[reason]
    }
}

/// The daemon's program: `gshared`, or in tests of the command line `gshare daemon`. Cargo names programs to tests of their
/// own package alone.
fn program() -> Command {
    match (option_env!("CARGO_BIN_EXE_gshared"), option_env!("CARGO_BIN_EXE_gshare")) {
        (Some(gshared), _) => Command::new(gshared),
        (None, gshare) => {
            let mut command = Command::new(gshare.expect("this package has one of the two programs"));
            command.arg("daemon");
            command
        }
    }
}

/// A daemon as a process of its own.
pub struct Process {
    pub child: Child,
    pub dir: PathBuf,
}

impl Process {
    /// Starts it in `dir` with its journal there; returns when it listens.
    pub fn start(dir: &Path, config: &str) -> Self {
        let file = dir.join("gshared.toml");
        std::fs::write(&file, config).unwrap();
        let child = program()
            .arg("--config")
            .arg(&file)
            .arg("--socket")
            .arg(dir.join("gshare.sock"))
            .stderr(Stdio::from(
                std::fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).unwrap(),
            ))
            .spawn()
            .unwrap();
        let process = Self { child, dir: dir.to_owned() };
        within(|| Client::try_connect(&process.socket()).ok());
        // The socket for queries is bound after it, and the one of a daemon that was killed is still there.
        within(|| gshared::admin::snapshot(&dir.join("gshare-admin.sock")).ok());
        process
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("gshare.sock")
    }

    pub fn snapshot(&self) -> Snapshot {
        gshared::admin::snapshot(&self.dir.join("gshare-admin.sock")).unwrap()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Resident memory in KiB.
    pub fn rss(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Drops the privileges of this process.
pub fn become_user(uid: u32) {
    // SAFETY: plain system calls.
    assert!(unsafe { libc::setgid(uid) == 0 && libc::setuid(uid) == 0 }, "only root can become another user");
}

/// Runs `work` in a forked child, as another user if given; kills it when dropped.
pub struct Forked(rustix::process::Pid);

impl Forked {
    pub fn run(uid: Option<u32>, work: impl FnOnce()) -> Self {
        // SAFETY: the child runs `work`, which allocates; glibc makes malloc usable after fork, and the child calls
        // nothing else that another thread might have locked.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            uid.into_iter().for_each(become_user);
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if done { 0 } else { 1 }) };
        }
        Self(rustix::process::Pid::from_raw(pid).unwrap())
    }

    pub fn pid(&self) -> i32 {
        self.0.as_raw_nonzero().get()
    }

    pub fn kill(&self) {
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::KILL);
    }

    /// Waits; whether `work` came to its end.
    pub fn wait(self) -> bool {
        self.code() == 0
    }

    /// Waits for the end of the process; gives its exit code.
    pub fn code(self) -> i32 {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        let pid = unsafe { libc::waitpid(self.pid(), &raw mut status, 0) };
        assert_eq!(pid, self.pid());
        std::mem::forget(self);
        if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: waits for a child of this process.
        unsafe { libc::waitpid(self.pid(), std::ptr::null_mut(), 0) };
    }
}

/// Replays one run's events and compares the node's actions with the record; gives the number of outcomes compared.
pub fn replays_to_the_same_actions(lines: &[gshared::journal::Line]) -> u64 {
    let mut replay = gshared::journal::Replay::new(&lines[0]).unwrap();
    let (mut compared, mut actions) = (0, serde_json::Value::Null);
    for line in lines {
        if let Some(done) = replay.line(line).unwrap() {
            assert_ne!(done.same, Some(false), "{line:?}: {:?}", done.actions);
            compared += u64::from(done.same.is_some());
            actions = serde_json::to_value(done.actions).unwrap();
        }
        if let Some(recorded) = &line.actions {
            assert_eq!(&actions, &serde_json::Value::from(recorded.clone()));
        }
    }
    assert!(compared > 0);
    compared
}
