//! Loading a safetensors file into the store, beside `dd` to memory, a bare parallel copy, and the loader in Python.
//!
//! The bench makes the file (`--gib N`, 4 by default), and loads it with a warm and with a cold page cache. A load of the store is
//! a PUT by a client: the header is checked, each byte hashed, the arena sealed. `dd` copies the same file to a file in memory; the
//! plain copy is `pread` and `pwrite` by as many threads, pieces of 1 MiB, into a memory file. Neither hashes. "Past the cache" is
//! the same with `O_DIRECT`, for a cold cache. In each of `--runs` rounds every loader loads once, and medians are compared. The
//! Python loader runs where `python3` (or `GSHARE_BENCH_PYTHON`) has the packages safetensors and numpy. `--test` loads 16 MiB once
//! and measures nothing.

use gshare_core::Bytes;
use gshare_modelstore::client::Client;
use gshare_modelstore::safetensors::{Dtype, Header};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::{Access, MemoryTier};
use rustix::fs::{Advice, MemfdFlags, OFlags, fadvise, memfd_create};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const MIB: u64 = 1 << 20;

fn argument(name: &str) -> Option<u64> {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1)?.parse().ok()
}

/// A model of tensors of 1 to 64 MiB, as in a transformer.
fn make(path: &Path, bytes: u64) {
    let mut sizes = Vec::new();
    let mut left = bytes;
    for size in [64, 16, 16, 4, 1].into_iter().cycle() {
        let size = (size * MIB).min(left);
        if size == 0 {
            break;
        }
        sizes.push([size]);
        left -= size;
    }
    let names: Vec<String> = (0..sizes.len()).map(|n| format!("layers.{n}.weight")).collect();
    let list: Vec<(&str, Dtype, &[u64])> =
        names.iter().zip(&sizes).map(|(name, size)| (&name[..], Dtype::U8, &size[..])).collect();
    let mut file = File::create(path).expect("room for the file");
    file.write_all(&Header::encode(&list)).expect("room for the file");
    let mut block = vec![0u8; 1 << 20];
    let mut state = 1u64;
    for _ in 0..bytes / MIB {
        for chunk in block.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block).expect("room for the file");
    }
    file.sync_all().expect("the file is written");
}

/// The page cache, with the file in it or not.
fn prepare(file: &File, cold: bool) {
    if cold {
        fadvise(file, 0, None, Advice::DontNeed).expect("a file");
    } else {
        let mut buffer = vec![0; 4 << 20];
        let mut at = 0;
        while let Ok(read @ 1..) = file.read_at(&mut buffer, at) {
            at += read as u64;
        }
    }
}

/// A copy that does not look at its bytes; of whole blocks, if past the cache.
///
/// Its time leaves out freeing the memory, as the store's time leaves out evicting.
fn plain_copy(file: &File, bytes: u64, threads: usize) -> File {
    let arena = File::from(memfd_create("copy", MemfdFlags::CLOEXEC).expect("a memory file"));
    arena.set_len(bytes.next_multiple_of(2 * MIB)).expect("memory");
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = vec![0; (1 << 20) + 4_096];
                let aligned = buffer.as_ptr().align_offset(4_096);
                let buffer = &mut buffer[aligned..];
                loop {
                    let at = next.fetch_add(MIB, Ordering::Relaxed);
                    if at >= bytes {
                        return;
                    }
                    let part = usize::try_from((bytes - at).min(MIB)).unwrap_or(0);
                    file.read_exact_at(&mut buffer[..part], at).expect("the file");
                    arena.write_all_at(&buffer[..part], at).expect("memory");
                }
            });
        }
    });
    arena
}

/// Target file of `dd`; its memory is freed outside its time.
fn target() -> PathBuf {
    Path::new("/dev/shm").join(format!("gshare-bench-{}", std::process::id()))
}

fn dd(path: &Path, flags: &[&str]) -> bool {
    let status = Command::new("dd")
        .arg(format!("if={}", path.display()))
        .arg(format!("of={}", target().display()))
        .arg("status=none")
        .args(flags)
        .status();
    status.is_ok_and(|status| status.success())
}

/// Seconds of one load in Python, measured inside, so that its start does not count.
fn python(path: &Path) -> Option<f64> {
    let program = std::env::var_os("GSHARE_BENCH_PYTHON").unwrap_or_else(|| "python3".into());
    let script = "import sys, time, numpy\nfrom safetensors.numpy import load_file\nstart = time.perf_counter()\n\
        tensors = load_file(sys.argv[1])\nprint(time.perf_counter() - start)";
    let output = Command::new(program).args(["-c", script]).arg(path).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Seconds of the work; its result is freed afterwards.
fn seconds<T>(work: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    let left = work();
    let took = start.elapsed().as_secs_f64();
    drop(left);
    took
}

fn median(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::INFINITY)
}

fn main() {
    let test = gshare_bench::runs_as_test();
    let bytes = if test { 16 * MIB } else { argument("--gib").unwrap_or(4) << 30 };
    let runs = if test { 1 } else { argument("--runs").unwrap_or(5) };
    let dir =
        tempfile::tempdir_in(PathBuf::from(env!("CARGO_TARGET_TMPDIR"))).expect("a directory on a disk");
    let path = dir.path().join("model.safetensors");
    make(&path, bytes);
    let file = File::open(&path).expect("the file");
    let mut config = ServerConfig::at(dir.path().join("store.sock"));
    config.store.host = Bytes(bytes + (1 << 30));
    let threads = config.threads;
    let socket = config.socket.clone();
    let store = Server::new(config).expect("a store").spawn().expect("threads");
    let client = Client::connect(socket).expect("the store");
    let load = || {
        let stored = client.put_file("model", Access::Public, MemoryTier::Host, &file, |_, _| {});
        stored.expect("the model is loaded");
    };
    if test {
        load();
        plain_copy(&file, bytes, threads);
        println!("store_load: ok");
        return;
    }
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let gigabytes = bytes as f64 / 1e9;
    let direct =
        OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits().cast_signed()).open(&path).ok();
    println!("{gigabytes:.2} GB, {threads} threads, medians of {runs}");
    let names = [
        "store (checked, hashed, sealed)",
        "plain copy, same threads",
        "plain copy past the cache",
        "dd to a file in memory",
        "dd past the cache",
        "safetensors.numpy.load_file",
    ];
    for cold in [false, true] {
        let mut times = [const { Vec::new() }; 6];
        for run in 0..runs {
            // Each loader begins once, because the first finds memory in another state than the later loaders.
            for turn in 0..names.len() as u64 {
                let which = usize::try_from((run + turn) % names.len() as u64).expect("less than 6");
                prepare(&file, cold);
                let took = match (which, &direct) {
                    (0, _) => {
                        let took = seconds(load);
                        client.evict("model", true).expect("no client holds it");
                        Some(took)
                    }
                    (1, _) => Some(seconds(|| plain_copy(&file, bytes, threads))),
                    (2, Some(direct)) if cold => Some(seconds(|| plain_copy(direct, bytes, 2 * threads))),
                    (3, _) => Some(seconds(|| assert!(dd(&path, &["bs=1M"]), "dd"))),
                    (4, Some(_)) if cold => {
                        Some(seconds(|| assert!(dd(&path, &["bs=16M", "iflag=direct"]), "dd")))
                    }
                    (5, _) => python(&path),
                    _ => None,
                };
                let _ = std::fs::remove_file(target());
                times[which].push(took.unwrap_or(f64::INFINITY));
            }
        }
        println!("{}", if cold { "cold" } else { "in the page cache" });
        let ours = median(&times[0]);
        for (name, all) in names.iter().zip(&times) {
            let (middle, best) = (median(all), all.iter().copied().fold(f64::INFINITY, f64::min));
            if middle.is_finite() {
                let ratio = middle / ours;
                let speed = gigabytes / middle;
                println!(
                    "  {name:<34} {middle:7.3} s  {speed:6.2} GB/s  store is {ratio:.2} x; best {best:.3} s"
                );
            }
        }
        if times[5].iter().any(|took| took.is_infinite()) {
            println!("  {}: this python3 has no safetensors and numpy", names[5]);
        }
        let floor =
            |from: &[Vec<f64>]| from.iter().map(|all| median(all)).fold(f64::INFINITY, f64::min) / ours;
        println!(
            "  store is {:.2} x of dd, {:.2} x of the fastest that does not hash",
            floor(&times[3..5]),
            floor(&times[1..5])
        );
    }
    store.stop();
}
