//! The hook under many processes, many allocations and many launches, on the simulated device. Nothing hangs, nothing is lost from
//! the account, and the table has the cost of a call beside the bare call.
//!
//! | row | what |
//! |---|---|
//! | `64 processes` | started at once; each launches and synchronises, allocates and frees; then the daemon's account is empty |
//! | `10,000 x 4 KiB`, `10,000 x 64 MiB` | allocations that live at once, and their frees; what `cuMemGetInfo` says is what was allocated, to the byte |
//! | `1,000,000 launches` | from 8 threads, of a kernel of 1 us; GPU time in the daemon's account beside the device's own |
//!
//! `--json` prints one JSON object on stdout.

use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

mod hook_common;
use hook_common::{
    Kind, Setup, Truth, build, large_profile, launches, memory_info, occupy, release, role, synchronise,
};

const PROCESSES: usize = 64;
const ALLOCATIONS: usize = 10_000;
const THREADS: u64 = 8;

/// The output of a child: one line of numbers.
fn numbers(mut command: Command) -> Vec<u64> {
    let done = command.stdin(Stdio::null()).output().expect("this program starts");
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text} {}", String::from_utf8_lossy(&done.stderr));
    text.split_whitespace().map(|word| word.parse().expect("a number")).collect()
}

fn count(name: &str) -> u64 {
    std::env::var(name).expect("set by the parent").parse().expect("a number")
}

fn ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).expect("not for centuries")
}

/// The roles of children.
fn play(name: &str) {
    match name {
        // Launches, allocates, goes; prints how long it took to its first launch.
        "visitor" => {
            let start = Instant::now();
            let setup = Setup::new("spin_1us", 1);
            launches(&setup, setup.hooked, Kind::Kernel, null_mut(), 1);
            let first = ns(start);
            launches(&setup, setup.hooked, Kind::Kernel, null_mut(), 100);
            synchronise(&setup);
            release(&setup, occupy(&setup, 20, 1 << 20));
            println!("{first}");
        }
        // Prints ns per allocation, ns per free, and the drift of cuMemGetInfo in bytes.
        "allocations" => {
            let setup = Setup::new("zero", 1);
            let bytes = usize::try_from(count("BENCH_BYTES")).expect("64 bits");
            let number = count("BENCH_COUNT");
            let before = memory_info(&setup);
            let start = Instant::now();
            let kept = occupy(&setup, usize::try_from(number).expect("64 bits"), bytes);
            let allocated = ns(start);
            let during = memory_info(&setup);
            let start = Instant::now();
            release(&setup, kept);
            let freed = ns(start);
            let after = memory_info(&setup);
            let drift = (before - during).abs_diff(number * bytes as u64) + before.abs_diff(after);
            println!("{} {} {drift}", allocated / number, freed / number);
        }
        // Prints ns per launch.
        "launches" => {
            let setup = Setup::new("spin_1us", 1);
            let each = count("BENCH_COUNT") / THREADS;
            let work = || {
                let stream = setup.stream();
                let time = launches(&setup, setup.hooked, Kind::Kernel, stream, each).wall;
                synchronise(&setup);
                setup.destroy(stream);
                time
            };
            let total: Duration = std::thread::scope(|scope| {
                let all: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
                all.into_iter().map(|thread| thread.join().expect("no launch fails")).sum()
            });
            // The helper closes its account when nothing has been launched for a while.
            std::thread::sleep(Duration::from_millis(100));
            println!("{} {}", total.as_nanos() / u128::from(each * THREADS), std::process::id());
            // The device keeps an account while its process lives: the parent reads the account before it lets this process end.
            let _ = std::io::stdin().read_line(&mut String::new());
        }
        other => panic!("{other} is no role"),
    }
}

struct Stage {
    place: tempfile::TempDir,
    hook: std::path::PathBuf,
    driver: std::path::PathBuf,
}

impl Stage {
    fn child(&self, name: &str, hooked: bool) -> Command {
        let mut command =
            role(name, self.place.path(), &self.driver, Some(self.hook.as_path()).filter(|_| hooked));
        // 64 contexts and 640 GB are more than any card has room for.
        command.env("GSHARE_SIM_PROFILE", self.place.path().join("large.toml"));
        command
    }

    fn daemon(&self) -> gshared::Running {
        let config = gshared::Config::at(self.place.path().join("gshare.sock"));
        gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs")
    }
}

/// ms until all of `PROCESSES` are through, and the slowest first launch; bare, then hooked.
fn processes(stage: &Stage, hooked: bool) -> (f64, f64) {
    let start = Instant::now();
    let children: Vec<_> = (0..PROCESSES)
        .map(|_| stage.child("visitor", hooked).stdout(Stdio::piped()).spawn().expect("this program starts"))
        .collect();
    let mut slowest = 0f64;
    for child in children {
        let done = child.wait_with_output().expect("it ends");
        assert!(done.status.success(), "a visitor failed");
        let first: f64 = String::from_utf8_lossy(&done.stdout).trim().parse().expect("a number");
        slowest = slowest.max(first / 1e6);
    }
    (start.elapsed().as_secs_f64() * 1e3, slowest)
}

#[allow(clippy::cast_precision_loss, reason = "a report")]
fn main() {
    if let Ok(name) = std::env::var("GSHARE_BENCH_ROLE") {
        return play(&name);
    }
    let quick = gshare_bench::runs_as_test();
    let json = std::env::args().any(|argument| argument == "--json");
    macro_rules! say {
        ($($text:tt)*) => { if json { eprintln!($($text)*) } else { println!($($text)*) } };
    }
    let place = tempfile::tempdir().expect("a temporary directory");
    let (hook, driver) = build(place.path());
    large_profile(&place.path().join("large.toml"));
    let stage = Stage { place, hook, driver };
    let daemon = stage.daemon();
    let mut rows = Vec::new();

    let ((bare, bare_first), (hooked, hooked_first)) = (processes(&stage, false), processes(&stage, true));
    let snapshot = daemon.handle().snapshot().expect("the daemon answers");
    let held: u64 = snapshot.devices.iter().map(|device| device.held_bytes.0).sum();
    say!("simulated device");
    say!("{:<28} {:>12} {:>12}   {}", "", "bare", "hooked", "drift");
    say!(
        "{:<28} {bare:>9.0} ms {hooked:>9.0} ms   {} clients, {held} bytes left at the daemon; slowest first launch {bare_first:.0} and {hooked_first:.0} ms",
        "64 processes at once",
        snapshot.clients.len()
    );
    rows.push(serde_json::json!({
        "row": "64 processes at once", "bare_ms": bare, "hooked_ms": hooked, "clients_left": snapshot.clients.len(),
        "bytes_left": held, "slowest_first_launch_bare_ms": bare_first, "slowest_first_launch_hooked_ms": hooked_first,
    }));

    let number = if quick { 100 } else { ALLOCATIONS };
    for (name, bytes) in [("x 4 KiB", 4u64 << 10), ("x 64 MiB", 64 << 20)] {
        let run = |hooked| {
            let mut child = stage.child("allocations", hooked);
            child.env("BENCH_BYTES", bytes.to_string()).env("BENCH_COUNT", number.to_string());
            if hooked {
                child.env("GSHARE_MEM", "700GiB");
            }
            numbers(child)
        };
        let (bare, hooked) = (run(false), run(true));
        for (at, what) in ["allocation", "free"].into_iter().enumerate() {
            let name = format!("{number} {name}: {what}");
            say!("{name:<28} {:>9} ns {:>9} ns   {} bytes", bare[at], hooked[at], hooked[2]);
            rows.push(serde_json::json!({
                "row": name, "bare_ns": bare[at], "hooked_ns": hooked[at], "drift_bytes": hooked[2],
            }));
        }
    }

    let number = if quick { 8_000u64 } else { 1_000_000 };
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let mut run = |hooked: bool| {
        let mut child = stage.child("launches", hooked);
        child.env("BENCH_COUNT", number.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        if hooked {
            child.env("GSHARE_NAME", "launches").env("GSHARE_QUOTA", "0.99");
        }
        let mut child = child.spawn().expect("this program starts");
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().expect("piped"));
        std::io::BufRead::read_line(&mut out, &mut line).expect("it prints a line");
        let mut words = line.split_whitespace().map(|word| word.parse::<u64>().expect("a number"));
        let (cost, _pid) = (words.next().expect("two"), words.next().expect("two"));
        let (_, busy) = truth.now(&[child.id()]);
        let snapshot = daemon.handle().snapshot().expect("the daemon answers");
        let booked: u64 = snapshot.clients.iter().map(|client| client.total_used_ns.as_nanos()).sum();
        drop(child.stdin.take());
        child.wait().expect("it ends");
        (cost, busy[0], booked)
    };
    let ((bare, ..), (hooked, busy, booked)) = (run(false), run(true));
    let drift = (booked as f64 - busy as f64) / busy.max(1) as f64 * 100.0;
    say!(
        "{:<28} {bare:>9} ns {hooked:>9} ns   booked {:.1} ms, device {:.1} ms: {drift:+.2} %",
        format!("{number} launches, 8 threads"),
        booked as f64 / 1e6,
        busy as f64 / 1e6
    );
    rows.push(serde_json::json!({
        "row": "launches from 8 threads", "launches": number, "bare_ns": bare, "hooked_ns": hooked,
        "booked_ns": booked, "device_ns": busy, "drift_percent": drift,
    }));
    daemon.stop().expect("the daemon stops");
    if json {
        println!("{}", serde_json::json!({ "device": "simulated", "rows": rows }));
    }
}
