//! Launch latency: kernels that are shorter than the calls that launch them, or not much longer.
//!
//! A program launches and never waits, each thread on a stream of its own, kernels that take the whole device. Between two kernels
//! the device may have to wait for the next call, and that time is not the program's use. One line a case: a kernel of 0, 1 or 5 us
//! behind calls of 2 or 10 us, one thread or two, limited to 20, 50 or 70 per cent.
//!
//! | column | what |
//! |---|---|
//! | `bare` | what the program uses without the hook, in per cent of the device's time, and its launches a second |
//! | `used` | the same under the limit |
//! | `speed` | launches a second under the limit, in per cent of `bare`'s |
//! | `charged` | what the daemon heard that it used, in per cent of the device's time; and how far that is from `used`, in points |
//! | `missed` | `speed` where less than 97 per cent is left although `bare` is below the limit; `cap` where the limit is missed by more than 2 points although it is above; `charged` where that is off by more than 2 |

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gshare_core::{QuotaRange, ResourceSpec, SmShare};

use super::Stage;
use super::hook_common::{Setup, Truth, launch_and_count, role};

/// Part of its speed that a program below its limit must keep, and points by which a share may be off.
const SPEED: f64 = 0.97;
const POINTS: f64 = 2.0;
const NAME: &str = "tenant-0";

/// The load of a program: length of its kernels and calls, and its threads.
#[derive(Clone, Copy, Debug)]
struct Program {
    kernel_us: u32,
    call_us: u32,
    threads: u32,
}

impl Program {
    fn name(self) -> String {
        format!("calls {} us, kernel {} us, {} threads", self.call_us, self.kernel_us, self.threads)
    }
}

fn programs() -> Vec<Program> {
    let mut all = Vec::new();
    for threads in [1, 2] {
        for call_us in [2, 10] {
            all.extend([0, 1, 5].map(|kernel_us| Program { kernel_us, call_us, threads }));
        }
    }
    all
}

/// The rates of a program over a while, of the device's time and per second.
#[derive(Clone, Copy, Debug)]
struct Pace {
    used: f64,
    charged: f64,
    launches: f64,
}

/// The program, in a process of its own: launches, and says how many there were whenever it is asked.
pub(crate) fn behind_calls() -> ! {
    let number = |name: &str| std::env::var(name).expect("set").parse::<u32>().expect("a number");
    let (us, threads) = (number("BENCH_KERNEL_US"), number("BENCH_THREADS"));
    let kernel = if us == 0 { "zero".to_owned() } else { format!("spin_{us}us_full") };
    let setup = Setup::new(&kernel, 1);
    let (counts, stop) = ([const { AtomicU64::new(0) }; 2], AtomicBool::new(false));
    let barrier = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        for count in counts.iter().take(threads as usize) {
            let (setup, barrier, stop) = (&setup, &barrier, &stop);
            scope.spawn(move || {
                let stream = setup.stream();
                barrier.wait();
                launch_and_count(setup, stream, count, stop);
            });
        }
        barrier.wait();
        for _asked in std::io::stdin().lines() {
            let sum: u64 = counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
            println!("{sum}");
            let _ = std::io::stdout().flush();
        }
        stop.store(true, Ordering::Relaxed);
        std::process::exit(0)
    })
}

/// Runs the program, under the hook and a limit if there is one, and measures it for some seconds after it has had time to settle.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn measure(program: Program, limit: Option<u32>, stage: &Stage, seconds: f64) -> Pace {
    let daemon = limit.map(|limit| {
        let mut config = gshared::Config::at(stage.socket());
        let quota: QuotaRange = format!("0.{limit:02}").parse().expect("a share");
        config.clients.entry(NAME.to_owned()).or_default().spec =
            Some(ResourceSpec::new(quota, SmShare::WHOLE, None).expect("a spec"));
        gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs")
    });
    let hook = limit.map(|_| stage.hook.as_path());
    let mut command: Command = role("calls", stage.place.path(), &stage.driver, hook);
    command
        .env("BENCH_KERNEL_US", program.kernel_us.to_string())
        .env("BENCH_THREADS", program.threads.to_string())
        .env("GSHARE_SIM_CALL_NS", (program.call_us * 1000).to_string())
        .env("GSHARE_NAME", NAME);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program starts");
    let (mut input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    let mut lines = BufReader::new(output).lines();
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let mut look = || {
        writeln!(input, "?").expect("the program runs");
        let count: f64 = lines.next().expect("an answer").expect("a line").parse().expect("a number");
        let charged = daemon.as_ref().map_or(0, |daemon| {
            let clients = daemon.handle().snapshot().expect("a snapshot").clients;
            clients.iter().map(|client| client.total_used_ns.as_nanos()).sum()
        });
        let (now, used) = truth.now(&[child.id()]);
        (now as f64, used[0] as f64, charged as f64, count)
    };
    // Once it answers it has been launching; then it has a few windows to find its pace.
    look();
    std::thread::sleep(Duration::from_millis(if limit.is_some() { 500 } else { 100 }));
    let (from, until) = (look(), {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        look()
    });
    let length = until.0 - from.0;
    let _ = child.kill();
    let _ = child.wait();
    if let Some(daemon) = daemon {
        daemon.stop().expect("the daemon stops");
    }
    Pace {
        used: (until.1 - from.1) / length * 100.0,
        charged: (until.2 - from.2) / length * 100.0,
        launches: (until.3 - from.3) / length * 1e9,
    }
}

/// The table; gives its lines for a report, and how many missed something.
pub(crate) fn table(
    stage: &Stage,
    seconds: f64,
    wanted: impl Fn(&str) -> bool,
    quick: bool,
) -> Vec<serde_json::Value> {
    let began = Instant::now();
    eprintln!(
        "{:<36} {:>8} {:>9} {:>6} {:>7} {:>7} {:>9} {:>6}  missed",
        "launch latency", "bare %", "per s", "limit", "used %", "speed %", "charged %", "off"
    );
    let mut rows = Vec::new();
    for program in programs().into_iter().filter(|program| wanted(&program.name())) {
        let bare = measure(program, None, stage, seconds / 2.0);
        for limit in [20, 50, 70] {
            let pace = measure(program, Some(limit), stage, seconds);
            let (cap, speed) = (f64::from(limit), pace.launches / bare.launches);
            let below = bare.used <= cap;
            let missed: Vec<&str> = [
                (below && speed < SPEED, "speed"),
                (!below && (pace.used - cap).abs() > POINTS, "cap"),
                ((pace.charged - pace.used).abs() > POINTS, "charged"),
            ]
            .iter()
            .filter_map(|&(beyond, what)| beyond.then_some(what))
            .collect();
            eprintln!(
                "{:<36} {:>8.1} {:>9.0} {limit:>6} {:>7.1} {:>7.1} {:>9.1} {:>6.1}  {}",
                program.name(),
                bare.used,
                bare.launches,
                pace.used,
                speed * 100.0,
                pace.charged,
                pace.charged - pace.used,
                missed.join(", ")
            );
            rows.push(serde_json::json!({
                "case": program.name(), "limit": limit, "bare_used": bare.used, "used": pace.used, "speed": speed,
                "charged": pace.charged, "missed": missed,
            }));
            if quick {
                return rows;
            }
        }
    }
    eprintln!("{} cases in {:.0} s", rows.len(), began.elapsed().as_secs_f64());
    rows
}
