//! A GET of the model store beside the floor under it: a bare request and reply with one descriptor, between two processes.
//!
//! The echo is a blocking `recv` and a `sendmsg` of as many bytes as the store's answer, with one descriptor; no server that
//! hands out memory can be faster. A GET is timed until its caller has the reference and the descriptor of the arena with its
//! manifest. "mapped" is timed until the arena is mapped, its manifest checked and its tensors readable, which a client does at
//! the first look at a tensor. Later steps are outside both times: a packet without an answer gives back a GET's reference, and
//! the echo's descriptor too, after it was closed. Rounds of both alternate, so the machine's other work meets both, and both
//! servers run on the same CPU: beside the client's, and then on it. Only the ratios of the percentiles count. "two files" is a
//! model written by a client, with its manifest in a file of its own. The crowd is of processes. `--test` runs each a few times
//! and measures nothing.

mod child;

use child::{Child, cpus, micros, pin};
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use rustix::cmsg_space;
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{read, write};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType, recv, recvmsg, send, sendmsg, socketpair,
};
use rustix::pipe::pipe;
use rustix::process::getpid;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Instant;

const CROWD: usize = 64;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(40);
/// Bytes of a request for a short name, and of the answer to it.
const REQUEST: usize = 22;
const ANSWER: usize = 65;
/// Bytes of the packet that gives a reference back.
const RELEASE: usize = 16;

/// Answers every request with `ANSWER` bytes and a descriptor, a thread per connection.
fn echo(sockets: Vec<OwnedFd>) {
    let file = memfd_create("echo", MemfdFlags::CLOEXEC).expect("a memory file");
    std::thread::scope(|scope| {
        for socket in sockets {
            let file = &file;
            scope.spawn(move || {
                let mut bytes = [0; 1_024];
                while let Ok((length @ 1.., _)) = recv(&socket, &mut bytes, RecvFlags::empty()) {
                    if length == RELEASE {
                        continue;
                    }
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

/// Time of one echo; its descriptor is given back outside of it.
fn ask(socket: &OwnedFd) -> u64 {
    let mut bytes = [0; 1_024];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let start = Instant::now();
    send(socket, &[0; REQUEST], SendFlags::NOSIGNAL).expect("the echo lives");
    recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("the echo lives");
    let took = nanos(start);
    assert_eq!(control.drain().count(), 1, "a descriptor");
    send(socket, &[0; RELEASE], SendFlags::NOSIGNAL).expect("the echo lives");
    took
}

/// Times of `count` runs. Between them the other side gets time, and on one CPU the CPU, to be idle again: it may still be busy
/// with the returned reference.
fn timed(out: &mut Vec<u64>, count: usize, mut work: impl FnMut() -> u64) {
    for _ in 0..count {
        std::thread::sleep(PAUSE);
        out.push(work());
    }
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn report(what: &str, mut got: Vec<u64>, floor: &[u64]) {
    got.sort_unstable();
    let (p50, p99) = (micros(&got, 500), micros(&got, 990));
    let (floor50, floor99) = (micros(floor, 500), micros(floor, 990));
    println!(
        "  {what:<41} p50 {p50:7.1} us ({:.2} x)   p99 {p99:7.1} us ({:.2} x)",
        p50 / floor50,
        p99 / floor99
    );
}

/// Time of one GET; the reference is given back outside of it.
fn get(client: &Client, name: &str, mapped: bool) -> u64 {
    let start = Instant::now();
    let model = client.get(name, &GetOptions::default()).expect("the model is there");
    if mapped {
        assert!(model.memory().is_ok());
    }
    nanos(start)
}

/// A model that the store loads from a file, or a model that the client writes.
fn put(client: &Client, name: &str, tensors: usize, from_file: bool) {
    let names: Vec<String> = (0..tensors).map(|n| format!("layer{}.block{}.weight", n / 7, n % 7)).collect();
    let list: Vec<(&str, Dtype, &[u64])> =
        names.iter().map(|name| (&name[..], Dtype::F16, &[64, 32][..])).collect();
    let stored = if from_file {
        let (mut file, header) = (tempfile::tempfile().expect("a file"), Header::encode(&list));
        file.write_all(&header).expect("room for the file");
        // The size of the written model, but other content.
        file.write_all(&vec![1; tensors * 64 * 32 * 2]).expect("room for the file");
        client.put_file(name, Access::Public, MemoryTier::Host, &file, |_, _| {})
    } else {
        client.put(name, Access::Public, MemoryTier::Host, &list).and_then(|put| put.commit())
    };
    stored.expect("room");
}

fn connect(path: &Path) -> Client {
    loop {
        if let Ok(client) = Client::connect(path) {
            return client;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Runs `work` in many processes at once, each of which first makes its own input. Gives all their times, and the seconds for all
/// of it.
fn crowd<T>(count: usize, make: impl Fn(usize) -> T, work: impl Fn(&T) -> u64) -> (Vec<u64>, f64) {
    let (start, started) = pipe().expect("a pipe");
    let (up, ready) = pipe().expect("a pipe");
    let memory = || File::from(memfd_create("times", MemfdFlags::CLOEXEC).expect("a memory file"));
    let children: Vec<(Child, File)> = (0..CROWD)
        .map(|n| {
            let times = memory();
            let child = Child::run(|| {
                let own = make(n);
                write(&ready, b"1").expect("the parent waits");
                read(&start, &mut [0; 1]).expect("the parent gives the start");
                let took: Vec<u8> = (0..count).flat_map(|_| work(&own).to_le_bytes()).collect();
                times.write_all_at(&took, 0).expect("memory");
            });
            (child, times)
        })
        .collect();
    let mut seen = 0;
    while seen < CROWD {
        seen += read(&up, &mut [0; CROWD]).expect("they come up");
    }
    let begun = Instant::now();
    write(&started, &[1; CROWD]).expect("they wait");
    let times = children.into_iter().flat_map(|(child, times)| {
        child.join();
        let mut took = vec![0; count * 8];
        times.read_exact_at(&mut took, 0).expect("all of its times");
        took.chunks_exact(8).map(|time| u64::from_le_bytes(time.try_into().expect("8"))).collect::<Vec<_>>()
    });
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    (times, begun.elapsed().as_secs_f64())
}

fn rate(times: &[u64], seconds: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let rate = times.len() as f64 / seconds;
    rate
}

fn main() {
    let test = gshare_bench::runs_as_test();
    let (rounds, per_round) = if test { (2, 10) } else { (100, 200) };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store.sock");
    let config = ServerConfig::at(&path);
    let store = Child::run(move || Server::new(config).expect("a store").spawn().expect("threads").join());
    let pairs: Vec<(OwnedFd, OwnedFd)> = (0..=CROWD)
        .map(|_| {
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("sockets")
        })
        .collect();
    let (mut near, far): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let echo = Child::run(|| echo(far));

    let client = connect(&path);
    let models = [("ten", 10, true), ("five hundred", 500, true), ("written", 500, false)];
    models.iter().for_each(|&(name, tensors, from_file)| put(&client, name, tensors, from_file));
    let rows: Vec<_> = [false, true].iter().flat_map(|&mapped| models.map(|model| (model, mapped))).collect();
    let alone = near.pop().expect("one more than the crowd");
    let cpus = cpus();
    for (placement, server) in [("two CPUs", cpus.get(1)), ("one CPU", cpus.first())] {
        let (Some(server), Some(here)) = (server, cpus.first()) else { continue };
        pin(getpid(), &[*here]);
        for child in [&store, &echo] {
            pin(child.pid(), &[*server]);
        }
        let (mut floor, mut got) = (Vec::new(), vec![Vec::new(); rows.len()]);
        for _ in 0..rounds {
            timed(&mut floor, per_round, || ask(&alone));
            for (((name, ..), mapped), got) in rows.iter().zip(&mut got) {
                timed(got, per_round, || get(&client, name, *mapped));
            }
        }
        if test {
            continue;
        }
        floor.sort_unstable();
        let [p50, p99] = [500, 990].map(|at| micros(&floor, at));
        println!(
            "{placement}\n  echo with one descriptor                  p50 {p50:7.1} us            p99 {p99:7.1} us"
        );
        for (((_, tensors, from_file), mapped), got) in rows.iter().zip(got) {
            let how = if *from_file { "" } else { ", two files" };
            let then = if *mapped { ", mapped" } else { "" };
            report(&format!("GET of {tensors} tensors{how}{then}"), got, &floor);
        }
    }
    for process in [getpid(), store.pid(), echo.pid()] {
        pin(process, &cpus);
    }
    let crowd_rounds = if test { 2 } else { 500 };
    let (floor, floor_seconds) = crowd(crowd_rounds, |n| &near[n], |socket| ask(socket));
    let got = [false, true]
        .map(|mapped| crowd(crowd_rounds, |_| connect(&path), |client| get(client, "five hundred", mapped)));
    if test {
        println!("store_get: ok");
        return;
    }
    let [p50, p99] = [500, 990].map(|at| micros(&floor, at));
    println!("{CROWD} processes at once");
    println!("  echo with one descriptor                  p50 {p50:7.1} us            p99 {p99:7.1} us");
    println!("  {:.0} echoes per second", rate(&floor, floor_seconds));
    for (what, (got, seconds)) in ["GET of 500 tensors", "GET of 500 tensors, mapped"].iter().zip(got) {
        let per_second = rate(&got, seconds);
        report(what, got, &floor);
        println!("  {per_second:.0} per second");
    }
}
