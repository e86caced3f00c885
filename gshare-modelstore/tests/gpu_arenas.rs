//! Models in memory of a simulated GPU: the store without a context, a loader that comes and goes, clients in other processes.

#![allow(clippy::cast_possible_truncation, reason = "small models")]

mod common;

use common::{data_of, model_file};
use gshare_core::Bytes;
use gshare_modelstore::backend::ModelBackend;
use gshare_modelstore::backend::cuda::{CudaMap, PinnedBackend, VmmBackend, run_loader};
use gshare_modelstore::client::{Client, ClientError, GetOptions};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const ROLE: &str = "CUDA_TEST_ROLE";
const DIR: &str = "CUDA_TEST_DIR";
const GPU: GetOptions = GetOptions { tier: MemoryTier::Gpu, timeout: std::time::Duration::from_secs(60) };

/// Starts the test's executable in another role, on the simulated device in `dir`.
fn role(role: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "roles", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(DIR, dir);
    command.env("LD_LIBRARY_PATH", dir.join("lib")).env("GSHARE_SIM_DEVICE", dir.join("device"));
    command.env("GSHARE_SIM_PROFILE", "v100").env_remove("CUDA_VISIBLE_DEVICES");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

fn start(name: &str, dir: &Path) -> Child {
    let mut child = role(name, dir).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(b"READY") {
        assert_eq!(out.read(&mut byte).unwrap(), 1, "{name} ended: {}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    child.stdout = Some(out);
    child
}

/// Memory that processes have on the simulated GPU: of this process, and of all.
fn used(dir: &Path, pid: u32) -> (u64, u64) {
    let truth =
        fake_cuda::sim::SimDevice::open(&dir.join("device"), &fake_cuda::Spec::default()).unwrap().truth();
    let of = |process: &fake_cuda::sim::ProcessTruth| process.gpus[0].memory_bytes.values().sum::<u64>();
    let live = || truth.processes.iter().filter(|process| process.live);
    (live().filter(|process| process.pid == pid).map(of).sum(), live().map(of).sum())
}

fn device() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fake_cuda::install_into(&dir.path().join("lib")).unwrap();
    dir
}

fn serve(dir: &Path, gpu: Box<dyn ModelBackend>, bytes: Bytes) {
    let mut config = ServerConfig::at(dir.join("store.sock"));
    config.store.gpu = bytes;
    let running = Server::with_backends(config, Box::new(PinnedBackend), Some(gpu)).unwrap().spawn().unwrap();
    println!("READY");
    running.join();
}

/// The work of the other processes. Without a role, nothing.
#[test]
fn roles() {
    let (Ok(role), Some(dir)) = (std::env::var(ROLE), std::env::var_os(DIR).map(PathBuf::from)) else {
        return;
    };
    let program = std::env::current_exe().unwrap();
    match role.as_str() {
        "vmm-store" | "small-store" => {
            let loader = [
                "env",
                &format!("{ROLE}=loader"),
                program.to_str().unwrap(),
                "--exact",
                "roles",
                "--nocapture",
            ];
            let bytes = if role == "small-store" { Bytes::from_mib(8) } else { Bytes::from_gib(1) };
            let gpu = VmmBackend::new(0, loader.map(Into::into).to_vec()).unwrap();
            serve(&dir, Box::new(gpu), bytes);
        }
        "loader" => run_loader().unwrap(),
        "vmm-reader" => {
            let model = Client::connect(dir.join("store.sock")).unwrap().get("m", &GPU).unwrap();
            let map = CudaMap::new(&model, 0).unwrap();
            let read = |name: &str| {
                let entry = model.manifest().unwrap().tensor(name).unwrap();
                let mut out = vec![0; entry.bytes as usize];
                map.read(entry.offset, &mut out).unwrap();
                assert_eq!(out, data_of(name, entry.bytes), "{name}");
                assert_eq!(entry.hash, *blake3::hash(&out).as_bytes());
            };
            ["w", "b"].into_iter().for_each(read);
            println!("READY");
            // Until the store is gone, and once more.
            std::io::stdin().read_exact(&mut [0]).unwrap();
            ["w", "b"].into_iter().for_each(read);
            println!("STILL");
        }
        other => panic!("{other}"),
    }
}

fn put(dir: &Path) -> Client {
    let client = Client::connect(dir.join("store.sock")).unwrap();
    let file = model_file(&[("w", 5_000_000), ("b", 77)]);
    client.put_file("m", Access::Public, MemoryTier::Gpu, &file, |_, _| {}).unwrap();
    client
}

#[test]
fn a_store_without_a_context_shares_gpu_memory_and_readers_live_on() {
    let dir = device();
    let mut store = start("vmm-store", dir.path());
    let client = put(dir.path());
    let arena = 6 << 20;
    assert_eq!(used(dir.path(), store.id()), (arena, arena), "the model and no context; the loader is gone");
    let mut reader = role("vmm-reader", dir.path());
    reader.stdin(Stdio::piped());
    let mut readers: Vec<Child> = (0..2).map(|_| reader.spawn().unwrap()).collect();
    for reader in &mut readers {
        let (mut seen, mut byte) = (Vec::new(), [0]);
        while !seen.ends_with(b"READY") {
            assert_eq!(
                reader.stdout.as_mut().unwrap().read(&mut byte).unwrap(),
                1,
                "{}",
                String::from_utf8_lossy(&seen)
            );
            seen.push(byte[0]);
        }
    }
    let (mine, all) = used(dir.path(), store.id());
    let contexts = all - mine;
    assert_eq!(mine, arena, "one copy, charged to its maker");
    assert!(contexts > 0 && contexts < 2 * (400 << 20), "two contexts and nothing else: {contexts}");
    assert!(matches!(client.verify("m"), Err(ClientError::Refused { .. })), "says that it cannot look");
    store.kill().unwrap();
    store.wait().unwrap();
    for mut reader in readers {
        use std::io::Write as _;
        reader.stdin.take().unwrap().write_all(b"!").unwrap();
        let output = reader.wait_with_output().unwrap();
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("STILL"),
            "a reader lives on without its store"
        );
    }
    assert_eq!(used(dir.path(), 0).1, 0, "and then the memory is free");
}

#[test]
fn a_model_goes_from_host_memory_to_the_gpu() {
    let dir = device();
    let mut store = start("vmm-store", dir.path());
    let client = Client::connect(dir.path().join("store.sock")).unwrap();
    let mut put = client
        .put(
            "m",
            Access::Public,
            MemoryTier::Host,
            &[("w", gshare_modelstore::safetensors::Dtype::U8, &[3_000_000])],
        )
        .unwrap();
    put.write("w", 0, &data_of("w", 3_000_000)).unwrap();
    let stored = put.commit().unwrap();
    assert_eq!(client.get("m", &GPU).unwrap().content(), stored.content, "hashed again on the way");
    store.kill().unwrap();
    store.wait().unwrap();
}

/// Bytes that the kernel keeps in memory for a process.
fn locked_by(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Waits until a condition holds: the kernel takes its time, so memory is freed only after the answer to its release.
fn comes_to<T: PartialEq + std::fmt::Debug>(see: impl Fn() -> T, wanted: &T, what: &str) {
    let begun = std::time::Instant::now();
    loop {
        let seen = see();
        if seen == *wanted {
            return;
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{what}: {seen:?}, not {wanted:?}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Waits until the store holds no reference: it learns from the closing of a socket that a reader has ended.
fn unreferenced(client: &Client) {
    let references = || ["host", "gpu"].map(|tier| client.stat().unwrap()[tier]["references"].as_u64());
    comes_to(references, &[Some(0); 2], "references");
}

#[test]
fn what_has_to_leave_the_gpu_is_in_locked_host_memory_then_and_comes_back_from_there() {
    let dir = device();
    let mut store = start("small-store", dir.path());
    let contexts = used(dir.path(), store.id()).0;
    let gpu = || used(dir.path(), store.id()).0 - contexts;
    let client = put(dir.path());
    let first = client.get("m", &GPU).unwrap().content();
    let pinned = || client.stat().unwrap()["host"]["pinned_bytes"].as_u64().unwrap();
    assert_eq!(pinned(), 0, "nothing is in host memory yet");
    let file = model_file(&[("other", 3_000_000)]);
    client.put_file("n", Access::Public, MemoryTier::Gpu, &file, |_, _| {}).unwrap();
    assert_eq!(client.stat().unwrap()["demotions"], 1);
    comes_to(gpu, &(4 << 20), "the GPU holds one of them");
    client.verify("m").unwrap();
    let model = client.get("m", &GetOptions::default()).unwrap();
    assert_eq!(model.content(), first, "hashed again on the way");
    for (name, bytes) in [("w", 5_000_000), ("b", 77)] {
        assert_eq!(model.bytes_of(name).unwrap(), data_of(name, bytes));
    }
    if memmap2::MmapMut::map_anon(16 << 20).unwrap().lock().is_ok() {
        assert_eq!((pinned(), locked_by(store.id())), (6 << 20, 6 << 20), "the kernel keeps it");
    }
    drop(model);
    assert_eq!(client.get("m", &GPU).unwrap().content(), first);
    let stat = client.stat().unwrap();
    assert_eq!((&stat["demotions"], &stat["loads"]), (&2.into(), &3.into()), "the other way round: {stat}");
    comes_to(gpu, &(6 << 20), "the other one");
    unreferenced(&client);
    ["m", "n"].into_iter().for_each(|name| client.evict(name, true).unwrap());
    comes_to(|| (pinned(), locked_by(store.id())), &(0, 0), "given back with the arenas");
    store.kill().unwrap();
    store.wait().unwrap();
}
