//! Clients, loaders and stores in processes of their own, which are killed, write where they must not, or run as another user.
//!
//! `cargo test --release -p gshare-modelstore --test processes -- --nocapture` prints how long the store took to notice;
//! with `GSHARE_TEST_KILLS=500`, for 500 clients in a GET, 500 in a PUT, and 500 stores.
#![allow(unsafe_code, reason = "a client that writes to memory that is read-only")]

mod common;

use common::{TestStore, data_of, model_file, refused};
use gshare_core::Bytes;
use gshare_modelstore::client::{Client, GetOptions};
use gshare_modelstore::frame::Code;
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::AsRawFd as _;
use std::io::{Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const HOST: MemoryTier = MemoryTier::Host;
const ROLE: &str = "STORE_TEST_ROLE";
const SOCKET: &str = "STORE_TEST_SOCKET";

/// Starts the test's executable in another role.
fn role(role: &str, socket: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "roles", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(SOCKET, socket).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Starts a role and waits until it prints READY.
fn start(name: &str, socket: &Path) -> Child {
    let mut child = role(name, socket).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"READY") {
        assert_eq!(out.read(&mut byte).unwrap(), 1, "{name} ended: {}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    child.stdout = Some(out);
    child
}

fn ready() {
    print!("READY");
    std::io::stdout().flush().unwrap();
}

/// The work of the other processes. Without a role, nothing.
#[test]
fn roles() {
    let (Ok(role), Ok(socket)) = (std::env::var(ROLE), std::env::var(SOCKET)) else { return };
    let connect = || Client::connect(&socket).unwrap();
    match role.as_str() {
        "getter" => {
            let client = connect();
            ready();
            let mut held = Vec::new();
            loop {
                held.push(client.get("m", &GetOptions::default()).unwrap());
                if held.len() > 20 {
                    held.clear();
                }
            }
        }
        "putter" => {
            let client = connect();
            ready();
            for round in 0.. {
                let name = format!("put-{}-{round}", std::process::id());
                let mut put =
                    client.put(&name, Access::Public, HOST, &[("w", Dtype::U8, &[1 << 20])]).unwrap();
                let _ = client.get("m", &GetOptions::default()).map(drop);
                (0..16).for_each(|part| put.write("w", part << 16, &[7; 1 << 16]).unwrap());
                put.commit().unwrap();
                client.evict(&name, true).unwrap();
            }
        }
        "store" => {
            let mut config = ServerConfig::at(&socket);
            config.models = Some(PathBuf::from(&socket).parent().unwrap().join("models"));
            let running = Server::new(config).unwrap().spawn().unwrap();
            ready();
            running.join();
        }
        "scribbler" => {
            let model = connect().get("m", &GetOptions::default()).unwrap();
            let memory = model.memory().unwrap().as_ptr().cast_mut();
            ready();
            // SAFETY: none; the kernel is to stop this.
            unsafe { memory.write_volatile(1) };
        }
        "stranger" => stranger(&connect()),
        other => panic!("{other}"),
    }
}

/// One test at a time: they count the descriptors of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until the number of descriptors is back at `before` or lower; an earlier test may have closed some since.
fn no_more_than(before: usize) {
    let begun = Instant::now();
    while descriptors() > before {
        assert!(begun.elapsed() < Duration::from_secs(60), "descriptors leak: {} of {before}", descriptors());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How many of a kind are killed.
fn kills(usual: u64) -> u64 {
    std::env::var("GSHARE_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A number from a seed, so that kills come at different moments.
fn below(seed: u64, end: u64) -> u64 {
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % end
}

#[test]
fn whoever_is_killed_gives_everything_back() {
    let _alone = alone();
    let store = TestStore::new(|_| {});
    store.client().put_file("m", Access::Public, HOST, &model_file(&[("w", 1 << 20)]), |_, _| {}).unwrap();
    store.until("references", 0);
    store.until_clients(0);
    let bytes = store.stat("host", "promised_bytes");
    let before = descriptors();
    let mut took = Vec::new();
    for round in 0..2 * kills(200) {
        let name = if round % 2 == 0 { "getter" } else { "putter" };
        let mut child = start(name, &store.path());
        std::thread::sleep(Duration::from_micros(below(round, 4_000)));
        child.kill().unwrap();
        let killed = Instant::now();
        child.wait().unwrap();
        store.until("references", 0);
        took.push(killed.elapsed());
        // The model that the killed process had begun is gone; a committed write may stay until its eviction.
        let client = store.client();
        for model in client.list().unwrap()["models"].as_array().unwrap() {
            let name = model["name"].as_str().unwrap();
            if name != "m" {
                let _ = client.verify(name);
                while client
                    .evict(name, true)
                    .is_err_and(|_| client.list().unwrap().to_string().contains(name))
                {}
            }
        }
        store.until("promised_bytes", bytes);
    }
    store.until_clients(0);
    no_more_than(before);
    took.sort();
    let at = |per_mille: usize| took[(took.len() - 1) * per_mille / 1000];
    println!(
        "from kill -9 to no reference, {} times: median {:?}, p99 {:?}, most {:?}",
        took.len(),
        at(500),
        at(990),
        at(1000)
    );
}

#[test]
fn a_store_that_is_killed_takes_nothing_from_its_readers_and_starts_again() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let models = dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let mut file = std::fs::File::create(models.join("m.safetensors")).unwrap();
    file.write_all(&Header::encode(&[("w", Dtype::U8, &[100_000])])).unwrap();
    file.write_all(&data_of("w", 100_000)).unwrap();
    let socket = dir.path().join("store.sock");
    let before = descriptors();
    for round in 0..kills(100) {
        let mut child = start("store", &socket);
        let client = Client::connect(&socket).unwrap();
        let model = client.get("m", &GetOptions::default()).unwrap();
        let put = client.put("half", Access::Public, HOST, &[("w", Dtype::U8, &[1 << 20])]).unwrap();
        std::thread::sleep(Duration::from_micros(below(round, 2_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(model.bytes_of("w").unwrap(), data_of("w", 100_000));
        assert!(client.get("m", &GetOptions::default()).is_err());
        drop(put);
        let mut again = start("store", &socket);
        let other = Client::connect(&socket).unwrap();
        assert_eq!(other.get("m", &GetOptions::default()).unwrap().content(), model.content());
        assert_eq!(refused(other.get("half", &GetOptions::default())), Code::UnknownModel);
        assert_eq!(model.bytes_of("w").unwrap(), data_of("w", 100_000));
        again.kill().unwrap();
        again.wait().unwrap();
    }
    no_more_than(before);
}

#[test]
fn a_client_that_writes_to_a_shared_map_is_refused_by_the_kernel() {
    let _alone = alone();
    let store = TestStore::new(|_| {});
    let client = store.client();
    client.put_file("m", Access::Public, HOST, &model_file(&[("w", 1 << 20)]), |_, _| {}).unwrap();
    let model = client.get("m", &GetOptions::default()).unwrap();
    let (_, file) = model.handle();
    let file = file.unwrap();
    let map = |file: std::os::fd::RawFd| {
        // SAFETY: never made: the kernel refuses.
        unsafe { memmap2::MmapOptions::new().len(4_096).map_mut(file) }
    };
    assert!(map(file.as_raw_fd()).is_err(), "a map for writing");
    let again = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if let Ok(again) = again {
        use std::os::unix::fs::FileExt as _;
        assert!(map(again.as_raw_fd()).is_err(), "a map for writing of the file, opened again");
        assert!(
            again.write_at(b"x", 0).is_err() && again.set_len(0).is_err() && again.set_len(1 << 30).is_err()
        );
    }
    let memory = model.memory().unwrap();
    // SAFETY: asks for an operation which the kernel refuses; were it granted, nothing would be written.
    let opened = unsafe {
        let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        rustix::mm::mprotect(memory.as_ptr().cast_mut().cast(), 4_096, flags)
    };
    assert!(opened.is_err(), "the map, opened for writing");
    let mut scribbler = start("scribbler", &store.path());
    assert_eq!(
        scribbler.wait().unwrap().signal(),
        Some(11),
        "a write to the map is a fault of the one who writes"
    );
    client.verify("m").unwrap();
    assert_eq!(model.bytes_of("w").unwrap(), data_of("w", 1 << 20));
}

/// The answers that a client of another uid gets.
fn stranger(client: &Client) {
    assert_ne!(rustix::process::getuid().as_raw(), 0);
    let options = GetOptions::default();
    assert_eq!(refused(client.get("private", &options)), Code::NotAllowed);
    assert_eq!(refused(client.get("group", &options)), Code::NotAllowed);
    let public = client.get("public", &options).unwrap();
    assert_eq!(
        refused(client.get_content(public.content(), &options).and_then(|_| client.get("x", &options))),
        Code::UnknownModel
    );
    assert_eq!(refused(client.evict("public", false)), Code::NotAllowed);
    assert_eq!(refused(client.pin("public", true)), Code::NotAllowed);
    assert_eq!(refused(client.verify("private")), Code::NotResident);
    let listed = client.list().unwrap();
    assert_eq!(listed["models"].as_array().unwrap().len(), 1, "sees what it may read: {listed}");
    // Its limit is one arena of 4 MiB.
    let big = client.put("big", Access::Private, HOST, &[("w", Dtype::U8, &[5 << 20])]);
    assert_eq!(refused(big), Code::TenantBytes);
    client.store("mine", Dtype::U8, &[4], &[1, 2, 3, 4]).unwrap();
    assert_eq!(refused(client.store("more", Dtype::U8, &[3 << 20], &[0; 3 << 20])), Code::TenantBytes);
    println!("STRANGER DONE");
}

#[test]
fn a_client_of_another_uid_gets_what_is_public_and_its_own_limits() {
    let _alone = alone();
    if !rustix::process::geteuid().is_root() {
        println!("not shown: only root can become another user");
        return;
    }
    let store = TestStore::new(|config| {
        let mut limits = gshare_modelstore::store::StoreLimits::default();
        limits.bytes = Bytes::from_mib(4);
        config.limits.insert(65_534, limits);
    });
    let client = store.client();
    for (name, access) in [("private", Access::Private), ("group", Access::Group), ("public", Access::Public)]
    {
        client.put_file(name, access, HOST, &model_file(&[(name, 1_000)]), |_, _| {}).unwrap();
    }
    // The executable, where others may read it.
    let dir = store.path().parent().unwrap().to_owned();
    let mode = std::os::unix::fs::PermissionsExt::from_mode;
    std::fs::set_permissions(&dir, mode(0o755)).unwrap();
    let program = dir.join("stranger");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "roles", "--nocapture"]).env(ROLE, "stranger").env(SOCKET, store.path());
    let out = command.uid(65_534).gid(65_534).current_dir("/").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && text.contains("STRANGER DONE"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(
        client.get("private", &GetOptions::default()).unwrap().bytes_of("private").unwrap(),
        data_of("private", 1_000)
    );
}
