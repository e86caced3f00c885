//! A GET of the model store beside the floor under it: a bare request and reply with one descriptor, between two processes.
//!
//! The echo is a blocking `recv` and a `sendmsg` of as many bytes as the store's answer, with one descriptor; nothing that hands
//! out memory can be faster. A GET is timed until the model is mapped, its manifest checked and its tensors can be read. Rounds of
//! both alternate, so that what else the machine does meets both; the ratios of the percentiles are what counts.
//! `--test` runs each a few times and measures nothing.
#![allow(unsafe_code, reason = "fork, to have other processes")]

use gshare_core::store::{Access, MemoryTier};
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::safetensors::Dtype;
use gshare_modelstore::server::{Server, ServerConfig};
use rustix::cmsg_space;
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType, recv, recvmsg, send, sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Instant;

const CROWD: usize = 64;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(40);
/// Bytes of a request for a short name, and of the answer to it.
const REQUEST: usize = 22;
const ANSWER: usize = 65;

/// Runs `work` in a child process, which is killed at the end.
struct Child(libc::pid_t);

impl Child {
    fn run(work: impl FnOnce()) -> Self {
        // SAFETY: this process has one thread.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            work();
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        Self(pid)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: signals and reaps a child of this process.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// Answers every packet with `ANSWER` bytes and a descriptor, a thread per connection.
fn echo(sockets: Vec<OwnedFd>) {
    let file = rustix::fs::memfd_create("echo", rustix::fs::MemfdFlags::CLOEXEC).expect("a memory file");
    std::thread::scope(|scope| {
        for socket in sockets {
            let file = &file;
            scope.spawn(move || {
                let mut bytes = [0; 1_024];
                while let Ok((1.., _)) = recv(&socket, &mut bytes, RecvFlags::empty()) {
                    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    let files = [file.as_fd()];
                    control.push(SendAncillaryMessage::ScmRights(&files));
                    let parts = [IoSlice::new(&bytes[..ANSWER])];
                    if sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

fn ask(socket: &OwnedFd) {
    send(socket, &[0; REQUEST], SendFlags::NOSIGNAL).expect("the echo lives");
    let mut bytes = [0; 1_024];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("the echo lives");
    assert_eq!(control.drain().count(), 1, "a descriptor");
}

/// Times of `count` runs. Between them the other side gets time to be idle again: it may still be busy with what was given back.
fn timed(out: &mut Vec<u64>, count: usize, mut work: impl FnMut() -> u64) {
    for _ in 0..count {
        let begun = Instant::now();
        while begun.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        out.push(work());
    }
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn micros(sorted: &[u64], per_mille: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let micros = sorted[(sorted.len() - 1) * per_mille / 1000] as f64 / 1000.0;
    micros
}

fn report(what: &str, mut got: Vec<u64>, floor: &[u64]) {
    got.sort_unstable();
    let (p50, p99) = (micros(&got, 500), micros(&got, 990));
    let (floor50, floor99) = (micros(floor, 500), micros(floor, 990));
    println!(
        "{what:<34} p50 {p50:7.1} us ({:.2} x)   p99 {p99:7.1} us ({:.2} x)",
        p50 / floor50,
        p99 / floor99
    );
}

/// Time of one GET; the reference is given back outside of it.
fn get(client: &Client, name: &str) -> u64 {
    let start = Instant::now();
    let model = client.get(name, &GetOptions::default()).expect("the model is there");
    let took = nanos(start);
    assert!(model.memory().is_some());
    took
}

fn put(client: &Client, name: &str, tensors: usize) {
    let names: Vec<String> = (0..tensors).map(|n| format!("layer{}.block{}.weight", n / 7, n % 7)).collect();
    let list: Vec<(&str, Dtype, &[u64])> =
        names.iter().map(|name| (&name[..], Dtype::F16, &[64, 32][..])).collect();
    client.put(name, Access::Public, MemoryTier::Host, &list).and_then(|put| put.commit()).expect("room");
}

fn connect(path: &Path) -> Client {
    loop {
        if let Ok(client) = Client::connect(path) {
            return client;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Runs `work` in many threads at once; all their times.
fn crowd<T: Send>(each: Vec<T>, count: usize, work: impl Fn(&T) -> u64 + Sync) -> Vec<u64> {
    let work = &work;
    std::thread::scope(|scope| {
        let running: Vec<_> = (each.into_iter())
            .map(|one| scope.spawn(move || (0..count).map(|_| work(&one)).collect::<Vec<u64>>()))
            .collect();
        running.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn main() {
    let test = std::env::args().any(|argument| argument == "--test");
    let (rounds, per_round) = if test { (2, 10) } else { (100, 200) };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store.sock");
    let config = ServerConfig::at(&path);
    let _store = Child::run(move || Server::new(config).expect("a store").spawn().expect("threads").join());
    let pairs: Vec<(OwnedFd, OwnedFd)> = (0..=CROWD)
        .map(|_| {
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("sockets")
        })
        .collect();
    let (mut near, far): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let _echo = Child::run(|| echo(far));

    let client = connect(&path);
    let models = [("ten", 10), ("five hundred", 500)];
    models.iter().for_each(|(name, tensors)| put(&client, name, *tensors));
    let alone = near.pop().expect("one more than the crowd");
    let bare = || {
        let start = Instant::now();
        ask(&alone);
        nanos(start)
    };
    let mut floor = Vec::new();
    let mut got = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        timed(&mut floor, per_round, bare);
        for ((name, _), got) in models.iter().zip(&mut got) {
            timed(got, per_round, || get(&client, name));
        }
    }
    floor.sort_unstable();
    let clients: Vec<Client> = (0..CROWD).map(|_| connect(&path)).collect();
    let crowd_rounds = if test { 2 } else { 300 };
    let mut crowd_floor = crowd(near, crowd_rounds, |socket| {
        let start = Instant::now();
        ask(socket);
        nanos(start)
    });
    crowd_floor.sort_unstable();
    let start = Instant::now();
    let all = crowd(clients, crowd_rounds, |client| get(client, "five hundred"));
    let seconds = start.elapsed().as_secs_f64();
    if test {
        println!("store_get: ok");
        return;
    }
    println!(
        "echo with one descriptor           p50 {:7.1} us            p99 {:7.1} us",
        micros(&floor, 500),
        micros(&floor, 990)
    );
    for ((_, tensors), got) in models.iter().zip(got) {
        report(&format!("GET of {tensors} tensors"), got, &floor);
    }
    println!(
        "echo, {CROWD} clients at once           p50 {:7.1} us            p99 {:7.1} us",
        micros(&crowd_floor, 500),
        micros(&crowd_floor, 990)
    );
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let rate = all.len() as f64 / seconds;
    report(&format!("GET of 500 tensors, {CROWD} at once"), all, &crowd_floor);
    println!("{rate:.0} GETs per second from {CROWD} clients");
}
