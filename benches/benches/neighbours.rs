//! An inference process beside a trainer on the simulated device, under the hook and a daemon: latency and throughput by
//! how the two share (Dilu, section 5.3, with real processes).
//!
//! Requests of 20 kernels of 1 ms come with gamma distributed gaps, 12 per second on average; the trainer launches kernels of 1 ms
//! without a pause. The device is simulated, so times follow the host's timers. On a busy machine they are longer for everybody,
//! and only the ratio to `exclusive` from the same run counts.
//!
//! | sharing | inference | trainer |
//! |---|---|---|
//! | `exclusive` | 50 %:100 % | - |
//! | `fixed` | 50 % | 50 % |
//! | `quotas` | 50 %:100 % | 20 %:100 % |
//! | `co_scaled` | the same, SLO-sensitive with a tolerance of 15 % | the same, best effort |
//!
//! `-- --seconds N --cv A,B` for other loads; `--test` runs each for half a second and measures nothing.
#![allow(missing_docs)]

use gshare_core::Timestamp;
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshared::{Config, Daemon, Handle};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const KERNELS: &str = "20";
const RATE: f64 = 12.0;
const SHARINGS: [&str; 4] = ["exclusive", "fixed", "quotas", "co_scaled"];

/// The command. Cargo builds the libraries that this benchmark depends on, but not the command and the programs it runs.
fn command() -> PathBuf {
    let me = std::env::current_exe().expect("a path");
    // target/PROFILE/deps/neighbours-HASH
    let gshare = me.ancestors().nth(2).expect("a folder").join("gshare");
    let profile = if cfg!(debug_assertions) { "" } else { " --release" };
    let fixture = gshare.with_file_name("gshare-fixture");
    let command = format!("cargo build{profile} -p gshare-cli --features fixtures");
    assert!(
        gshare.exists() && fixture.exists(),
        "{} or {} is missing: {command}",
        gshare.display(),
        fixture.display()
    );
    gshare
}

/// A program that ends with its handle.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(gshare: &Path, dir: &Path, name: &str, options: &[&str], program: &[&str]) -> Program {
    let mut command = Command::new(gshare);
    command.args(["run", "--sim", "--name", name, "--socket"]).arg(dir.join("sock")).args(options);
    command.arg("--").arg(gshare.with_file_name("gshare-fixture")).args(program);
    command.env("GSHARE_SIM_DEVICE", dir.join("device"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    Program(command.spawn().expect("starts"))
}

fn launches(daemon: &Handle, name: &str) -> u64 {
    let snapshot = daemon.snapshot().expect("a snapshot");
    snapshot.clients.iter().find(|client| client.name == name).map_or(0, |client| client.launches)
}

/// Sends a line at each due time, and gives the time from each to its answer.
fn drive(program: &mut Program, dues: &[Duration]) -> Vec<Duration> {
    let mut input = program.0.stdin.take().expect("piped");
    let output = BufReader::new(program.0.stdout.take().expect("piped"));
    let mut lines = output.lines();
    lines.next().expect("ready").expect("a line");
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for due in dues {
                std::thread::sleep((begin + *due).saturating_duration_since(Instant::now()));
                if writeln!(input, "batch").is_err() {
                    return;
                }
            }
        });
        let answered = dues.iter().zip(lines).map(|(due, line)| {
            line.expect("an answer");
            Instant::now().saturating_duration_since(begin + *due)
        });
        answered.collect()
    })
}

/// Latencies in order, and the trainer's kernels per second.
fn share(gshare: &Path, sharing: &str, dues: &[Duration]) -> (Vec<Duration>, f64) {
    let dir = tempfile::tempdir().expect("a folder");
    let running = Daemon::new(Config::at(dir.path().join("sock"))).expect("a daemon").spawn().expect("runs");
    let daemon = running.handle();
    let (infer, train): (&[&str], &[&str]) = match sharing {
        "fixed" => (&["--quota", "0.5"], &["--quota", "0.5"]),
        "co_scaled" => {
            (&["--quota", "0.5:1.0", "--slo-sensitive=15"], &["--quota", "0:1.0", "--best-effort"])
        }
        _ => (&["--quota", "0.5:1.0"], &["--quota", "0.2:1.0"]),
    };
    let trainer = (sharing != "exclusive").then(|| start(gshare, dir.path(), "train", train, &["spin"]));
    let serve = ["spin", "--answer", KERNELS];
    let mut program = start(gshare, dir.path(), "infer", infer, &serve);
    if trainer.is_some() {
        let patience = Instant::now() + Duration::from_secs(20);
        while launches(daemon, "train") == 0 {
            assert!(Instant::now() < patience, "the trainer never launched");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let (before, begin) = (launches(daemon, "train"), Instant::now());
    let mut latencies = drive(&mut program, dues);
    let trained = (launches(daemon, "train") - before) as f64 / begin.elapsed().as_secs_f64();
    drop((program, trainer));
    running.stop().expect("stops");
    latencies.sort_unstable();
    (latencies, trained)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let quick = args.iter().any(|arg| arg == "--test");
    let seconds: f64 =
        value("--seconds").map_or(if quick { 0.5 } else { 30.0 }, |text| text.parse().expect("a number"));
    let cvs = value("--cv").map_or("1,6", String::as_str);
    let gshare = command();
    for cv in cvs.split(',').map(|cv| cv.parse::<f64>().expect("a number")) {
        let mut arrivals = Arrivals::gamma(RATE, cv).expect("a load");
        let (mut rng, mut last, mut dues) = (Rng::new(1), Timestamp::ZERO, Vec::new());
        while let Some(next) = arrivals.next_after(last, &mut rng)
            && next.saturating_since(Timestamp::ZERO).as_secs_f64() < seconds
        {
            dues.push(next.saturating_since(Timestamp::ZERO).into());
            last = next;
        }
        println!("cv {cv}: {} requests in {seconds} s, simulated device", dues.len());
        let mut alone = f64::NAN;
        for sharing in SHARINGS {
            let (latencies, trained) = share(&gshare, sharing, &dues);
            let at = |percent: usize| {
                let rank = (latencies.len() * percent).div_ceil(100).saturating_sub(1);
                latencies.get(rank).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e3)
            };
            if sharing == "exclusive" {
                alone = at(95);
            }
            println!(
                "  {sharing:<10} p50 {:>7.1} ms  p95 {:>7.1} ms  {:>5.2} x exclusive  trainer {trained:>6.1} kernels/s",
                at(50),
                at(95),
                at(95) / alone
            );
        }
    }
}
