//! Programs of different paces: hosts that pause between their kernels beside hosts that do not.
//!
//! A program launches a kernel that takes the whole device, waits for it, pauses and starts over. A pausing program keeps its token
//! meanwhile, so no other program can use this time. The table has one line a case: two to four programs with kernels of 10 us to
//! 20 ms and pauses of 0 to 1 ms, with limits equal to their requests or of the whole device.
//!
//! | column | what |
//! |---|---|
//! | `asked` | requests in per cent |
//! | `of own %` | GPU time of each, in per cent of what it uses when it has the device alone and unhooked |
//! | `short` | the most that any is short of its request, in points of its own speed |
//! | `gap ms` | the longest time without GPU time of any program, beside a window and the longest kernel, or what its request makes unavoidable |
//! | `missed` | `share` where a program is short by more than 2 points, `gap` where the wait is longer than that by more than two looks |

use std::process::Child;
use std::time::Duration;

use super::hook_common::{Kind, Programs, Setup, Then, Truth, daemon, launch_forever, missed, role};
use super::{LOOK_MS, Stage, WINDOW_MS, look, name, parts};

/// Points of its own speed that a program may be short of its request.
const POINTS: f64 = 2.0;

/// A program: request in per cent, kernel and pause in us.
#[derive(Clone, Copy, Debug)]
struct Program {
    request: u32,
    kernel_us: u32,
    pause_us: u32,
}

#[derive(Clone, Debug)]
struct Case {
    programs: Vec<Program>,
    /// Limits are those requests, or else the whole device.
    capped: bool,
}

impl Case {
    fn name(&self) -> String {
        let one = |Program { kernel_us, pause_us, .. }: &Program| format!("{kernel_us}+{pause_us}");
        let paces: Vec<String> = self.programs.iter().map(one).collect();
        format!("paces {} {}", paces.join(" "), if self.capped { "capped" } else { "free" })
    }

    /// The longest time without the device that is no fault, in ms.
    fn longest_wait(&self) -> f64 {
        let kernel = |program: &Program| f64::from(program.kernel_us) / 1e3;
        let longest = self.programs.iter().map(kernel).fold(0.0, f64::max);
        let unavoidable = |program: &Program| kernel(program) * (100.0 / f64::from(program.request) - 1.0);
        self.programs.iter().map(unavoidable).fold(WINDOW_MS, f64::max) + longest
    }
}

fn cases() -> Vec<Case> {
    let paces: [&[(u32, u32, u32)]; 8] = [
        &[(50, 10, 100), (50, 2_000, 0)],
        &[(30, 100, 100), (70, 2_000, 0)],
        &[(30, 1_000, 1_000), (70, 100, 0)],
        &[(50, 20_000, 0), (50, 100, 20)],
        &[(70, 10, 300), (30, 20_000, 0)],
        &[(10, 100, 300), (20, 1_000, 1_000), (70, 5_000, 0)],
        &[(10, 20_000, 0), (20, 100, 100), (70, 1_000, 0)],
        &[(10, 10, 100), (20, 1_000, 0), (30, 100, 1_000), (40, 5_000, 0)],
    ];
    let case = |capped| {
        paces.into_iter().map(move |programs| {
            let program = |&(request, kernel_us, pause_us)| Program { request, kernel_us, pause_us };
            Case { programs: programs.iter().map(program).collect(), capped }
        })
    };
    [true, false].into_iter().flat_map(case).collect()
}

/// The program, in a process of its own.
pub(crate) fn pace() -> ! {
    let number = |name: &str| std::env::var(name).expect("set").parse::<u64>().expect("a number");
    let (kernel, pause) = (number("BENCH_KERNEL_US"), Duration::from_micros(number("BENCH_PAUSE_US")));
    let setup = Setup::new(&format!("spin_{kernel}us_full"), 1);
    let then = if pause.is_zero() { Then::Synchronise } else { Then::Pause(pause) };
    launch_forever(&setup, Kind::Kernel, std::ptr::null_mut(), then)
}

fn start(program: Program, name: Option<String>, stage: &Stage) -> Child {
    let hook = name.as_ref().map(|_| stage.hook.as_path());
    let mut command = role("pace", stage.place.path(), &stage.driver, hook);
    command
        .env("BENCH_KERNEL_US", program.kernel_us.to_string())
        .env("BENCH_PAUSE_US", program.pause_us.to_string());
    if let Some(name) = name {
        command.env("GSHARE_NAME", name);
    }
    command.spawn().expect("this program starts")
}

/// Parts of the device's time that these programs use together in `seconds` seconds, after they have had time to settle, and
/// the longest time in ms in which one of them used nothing.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn watch(programs: &Programs, stage: &Stage, settle: Duration, seconds: f64) -> (Vec<f64>, f64) {
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let pids = programs.pids();
    stage.wait_for_all(&mut truth, &pids);
    std::thread::sleep(settle);
    let first = truth.now(&pids);
    let (last, gap) = look(&mut truth, &pids, &first, seconds, |_| {});
    (parts(&first, &last), gap as f64 / 1e6)
}

fn alone(program: Program, stage: &Stage, seconds: f64) -> f64 {
    let programs = Programs(vec![start(program, None, stage)]);
    watch(&programs, stage, Duration::from_millis(50), seconds).0[0]
}

fn measure(case: &Case, stage: &Stage, seconds: f64) -> (Vec<f64>, f64) {
    let share = |(index, program): (usize, &Program)| {
        let request = format!("0.{:02}", program.request);
        (name(index), if case.capped { request } else { request + ":1" })
    };
    let daemon = daemon(stage.place.path(), case.programs.iter().enumerate().map(share));
    let started = case.programs.iter().enumerate();
    let programs = Programs(started.map(|(index, &one)| start(one, Some(name(index)), stage)).collect());
    let result = watch(&programs, stage, Duration::from_millis(500), seconds);
    drop(programs);
    daemon.stop().expect("the daemon stops");
    result
}

/// Prints the table; gives its rows.
pub(crate) fn table(
    stage: &Stage,
    seconds: f64,
    wanted: impl Fn(&str) -> bool,
    quick: bool,
) -> Vec<serde_json::Value> {
    let mut cases: Vec<Case> = cases().into_iter().filter(|case| wanted(&case.name())).collect();
    cases.truncate(if quick { 1 } else { cases.len() });
    eprintln!(
        "\n{:<58} {:<12} {:<28} {:>6} {:>14}  missed",
        "paces (us)", "asked", "of own %", "short", "gap ms"
    );
    let mut rows = Vec::new();
    for case in &cases {
        let alone = |program: &Program| alone(*program, stage, (seconds / 4.0).min(1.0));
        let before: Vec<f64> = case.programs.iter().map(alone).collect();
        let (parts, gap) = measure(case, stage, seconds);
        let after: Vec<f64> = case.programs.iter().map(alone).collect();
        let own = parts.iter().zip(before.iter().zip(&after));
        let of_own: Vec<f64> =
            own.map(|(part, (before, after))| part / f64::midpoint(*before, *after) * 100.0).collect();
        let asked: Vec<u32> = case.programs.iter().map(|program| program.request).collect();
        let short = of_own.iter().zip(&asked).map(|(own, &asked)| f64::from(asked) - own).fold(0.0, f64::max);
        let longest = case.longest_wait();
        let missed = missed(&[(short > POINTS, "share"), (gap > longest + 2.0 * LOOK_MS, "gap")]);
        let list = |numbers: &mut dyn Iterator<Item = String>| numbers.collect::<Vec<_>>().join("/");
        eprintln!(
            "{:<58} {:<12} {:<28} {short:>6.2} {:>14}  {}",
            case.name(),
            list(&mut asked.iter().map(u32::to_string)),
            list(&mut of_own.iter().map(|own| format!("{own:.1}"))),
            format!("{gap:.0} ({longest:.0})"),
            missed.join(", ")
        );
        rows.push(serde_json::json!({
            "case": case.name(), "asked_percent": asked, "of_own_percent": of_own, "alone": [before, after],
            "short_points": short, "gap_ms": gap, "longest_ms": longest, "missed": missed,
        }));
    }
    rows
}
