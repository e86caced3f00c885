//! A token's round trip beside the floor under it: a bare `SOCK_SEQPACKET` echo between two processes.
//!
//! The echo is a blocking `recv` and a `send` of as many bytes; nothing can be faster between two processes that sleep while they
//! wait. The token is returned and asked for again in one frame, so a round trip is two events of the engine, journalled, with 64
//! clients attached. Rounds of both alternate, so the machine's other work meets both. Both servers run on the same CPU: beside the
//! client's, and then on it, for left alone the kernel puts one pair on one CPU and the other on two. Only the ratio of the
//! percentiles counts. `--test` runs each a few times and measures nothing.

mod child;

use child::{Child, cpus, micros, pin};
use gshare_core::wire::{MAX_FRAME, OnDaemonLoss, Sequence, ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId, DeviceUuid, Duration, ResourceSpec, RunId, UseState};
use gshared::config::JournalConfig;
use gshared::{Config, Daemon};
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with, socketpair,
};
use rustix::process::getpid;
use std::path::Path;
use std::time::Instant;

const CLIENTS: u64 = 64;
const ROUNDS: usize = 200;
const PER_ROUND: usize = 500;

struct Client {
    socket: OwnedFd,
    sent: Sequence,
    frame: Vec<u8>,
}

impl Client {
    fn connect(path: &Path) -> Self {
        let address = SocketAddrUnix::new(path).expect("a short path");
        loop {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let socket = socket.expect("a socket");
            if connect(&socket, &address).is_ok() {
                return Self { socket, sent: Sequence::default(), frame: Vec::new() };
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn send(&mut self, message: &ToDaemon) {
        self.frame.clear();
        message.encode(self.sent.stamp(), &mut self.frame);
        send(&self.socket, &self.frame, SendFlags::NOSIGNAL).expect("the daemon lives");
    }

    fn receive(&mut self) -> ToClient {
        let mut bytes = [0; MAX_FRAME];
        let (length, _) = recv(&self.socket, &mut bytes, RecvFlags::empty()).expect("the daemon lives");
        ToClient::decode(&bytes[..length]).expect("a frame").1
    }

    fn attach(&mut self, n: u64) -> ClientId {
        let (pid_start, spec, on_loss) = (0, ResourceSpec::UNLIMITED, OnDaemonLoss::Open);
        self.send(&ToDaemon::Hello {
            pid_start,
            pid: 0,
            run: RunId::new(u128::from(n) + 1),
            name: format!("c{n}"),
            program: "b".into(),
            spec,
            on_loss,
        });
        self.send(&ToDaemon::Attach {
            ordinal: 0,
            device: DeviceUuid::gpu([7; 16]),
            device_memory: Bytes(1 << 30),
            allocated: Bytes(0),
            part: None,
            used: Duration::ZERO,
            allowed: Duration::ZERO,
        });
        loop {
            if let ToClient::Attached { client, .. } = self.receive() {
                return client;
            }
        }
    }

    fn granted(&mut self) {
        while !matches!(self.receive(), ToClient::Allow { .. }) {}
    }

    /// Gives the token back and gets another.
    fn round_trip(&mut self, client: ClientId, turn: &mut u32) {
        *turn += 1;
        self.send(&wants(client, *turn));
        self.granted();
    }
}

/// The frame with which a client ends a turn, of which it used a nanosecond, and asks for the next.
fn wants(client: ClientId, turn: u32) -> ToDaemon {
    let used = Duration::from_nanos(turn.into());
    ToDaemon::use_of_time(client, turn, used, UseState::Wants)
}

fn echo(socket: &OwnedFd) {
    let mut bytes = [0; MAX_FRAME];
    while let Ok((length, _)) = recv(socket, &mut bytes, RecvFlags::empty())
        && length > 0
        && send(socket, &bytes[..length], SendFlags::NOSIGNAL).is_ok()
    {}
}

fn timed(out: &mut Vec<u64>, count: usize, mut work: impl FnMut()) {
    for _ in 0..count {
        let start = Instant::now();
        work();
        out.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
}

fn main() {
    let test = gshare_bench::runs_as_test();
    let (rounds, per_round) = if test { (2, 10) } else { (ROUNDS, PER_ROUND) };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("gshare.sock");
    let mut config = Config::at(&path);
    config.journal = Some(JournalConfig::new(dir.path().join("journal")));
    let daemon = Child::run(move || Daemon::new(config).and_then(Daemon::run).expect("the daemon runs"));
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("two sockets");
    let echoer = Child::run(|| echo(&far));

    let mut others: Vec<Client> = (1..CLIENTS).map(|_| Client::connect(&path)).collect();
    for (client, n) in others.iter_mut().zip(1..) {
        client.attach(n);
    }
    let mut client = Client::connect(&path);
    let id = client.attach(0);
    client.send(&wants(id, 0));
    client.granted();
    let mut turn = 0;
    let mut frame = Vec::new();
    wants(id, 1).encode(0, &mut frame);
    let mut answer = [0; MAX_FRAME];
    let mut bare = || {
        send(&near, &frame, SendFlags::NOSIGNAL).expect("the echo lives");
        recv(&near, &mut answer, RecvFlags::empty()).expect("the echo lives");
    };
    let cpus = cpus();
    for (placement, server) in [("two CPUs", cpus.get(1)), ("one CPU", cpus.first())] {
        let (Some(server), Some(here)) = (server, cpus.first()) else { continue };
        pin(getpid(), &[*here]);
        for child in [&daemon, &echoer] {
            pin(child.pid(), &[*server]);
        }
        let (mut floor, mut token) = (Vec::new(), Vec::new());
        timed(&mut Vec::new(), per_round, &mut bare);
        timed(&mut Vec::new(), per_round, || client.round_trip(id, &mut turn));
        for _ in 0..rounds {
            timed(&mut floor, per_round, &mut bare);
            timed(&mut token, per_round, || client.round_trip(id, &mut turn));
        }
        if test {
            continue;
        }
        floor.sort_unstable();
        token.sort_unstable();
        println!(
            "{placement}: {} round trips each, {CLIENTS} clients attached, journal on; aim 1.3 at p50, p99",
            floor.len()
        );
        println!("{:<6} {:>12} {:>12} {:>7}", "", "echo [us]", "token [us]", "ratio");
        for (name, per_mille) in [("p50", 500), ("p90", 900), ("p99", 990), ("p99.9", 999)] {
            let (echo, token) = (micros(&floor, per_mille), micros(&token, per_mille));
            println!("{name:<6} {echo:>12.2} {token:>12.2} {:>7.2}", token / echo);
        }
    }
}
