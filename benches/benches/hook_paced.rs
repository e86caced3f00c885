//! Speed of programs paced by their host, and of streams that wait, under a limit above their use, on two drivers.
//!
//! The time between two events is not the device's time for the work between them. A program keeps the device waiting if its
//! kernels are shorter than the calls that launch them, and a stream may wait for the host. A limit counts the device's time alone.
//! Each case runs twice, in turns of a fraction of a second: bare, and under the hook and a limit; on the simulated driver and on
//! `benches/stub-driver`, which shares no code with it. In cases *beside*, a program that is never idle shares the device.
//!
//! | column | what |
//! |---|---|
//! | `bare %` | the program's use without the hook, in per cent of the device's time |
//! | `per s` | its launches a second, or its rounds where it waits |
//! | `used %` | the same as `bare %` under the limit |
//! | `speed` | launches a second under the limit, in per cent of those without the hook; time in which a thread could run and got no CPU is left out |
//! | `charged` | the use reported to the daemon, in per cent of the device's time |
//! | `beside` | the busy neighbour's launches a second, in per cent of its launches when it runs alone under the same daemon |
//! | `missed` | `speed` below 97 per cent where the use is below the limit; `cap` beyond the limit by more than 2 points; `charged` off by more than 2 points; `beside` below 98 |
//!
//! `--seconds N` (2) for each of the two, `--only TEXT` for the cases with this text in their names.
#![allow(unsafe_code, reason = "the driver's C functions")]

use std::ffi::{CStr, c_void};
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

mod hook_common;
use hook_common::{Setup, Truth, daemon, driver, launch_and_count, missed, ok, role, synchronise};

/// A program below its limit must keep this part of its speed, in per cent, and so must its neighbour; then the points by which a
/// share may be off.
const SPEED: f64 = 97.0;
const BESIDE: f64 = 98.0;
const POINTS: f64 = 2.0;
/// For how long a stream waits.
const WAIT: Duration = Duration::from_millis(20);
/// Kernels before and behind a wait.
const AROUND: u64 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    Fake,
    Stub,
    /// The stub, with launch calls that queue their work at their beginning.
    StubEarly,
    /// The stub, with streams that cannot wait for a word.
    StubWordless,
}

impl Driver {
    fn file_name(self) -> &'static str {
        if self == Self::Fake { "libfake_cuda.so" } else { "libstub_driver.so" }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fake => "fake",
            Self::Stub => "stub",
            Self::StubEarly => "stub, early",
            Self::StubWordless => "stub, no words",
        }
    }
}

/// The event for which a stream waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    Nothing,
    Host,
    Word,
    Event,
}

/// The load of a program.
#[derive(Clone, Copy, Debug)]
struct Program {
    kernel_us: u32,
    call_us: u32,
    threads: u32,
    waits: For,
}

impl Program {
    fn name(self) -> String {
        let Self { kernel_us, call_us, threads, waits } = self;
        match waits {
            For::Nothing => format!("calls {call_us} us, kernel {kernel_us} us, {threads} threads"),
            _ => format!("waits for {}, kernel {kernel_us} us", format!("{waits:?}").to_lowercase()),
        }
    }
}

fn programs() -> Vec<Program> {
    let mut all = Vec::new();
    for threads in [1, 2] {
        for call_us in [2, 10] {
            let of = |kernel_us| Program { kernel_us, call_us, threads, waits: For::Nothing };
            all.extend([0, 1, 5, 50].map(of));
        }
    }
    let waiting = |waits| Program { kernel_us: 5, call_us: 2, threads: 1, waits };
    all.extend([For::Host, For::Word, For::Event].map(waiting));
    all
}

// ---- the program ------------------------------------------------------------------------------------------------------------

unsafe extern "C" fn sleep(_: *mut c_void) {
    std::thread::sleep(WAIT);
}

/// Kernels, a wait, kernels, and a synchronisation, again and again.
fn wait_in_rounds(setup: &Setup, waits: For, rounds: &AtomicU64, stop: &AtomicBool) {
    let (stream, other) = (setup.stream(), setup.stream());
    // SAFETY: the driver's functions by their C signatures, with handles of this context.
    unsafe {
        let way = setup.hooked;
        let (launch, wait) = (driver!(way, cuLaunchKernel), driver!(way, cuStreamSynchronize));
        let host = driver!(way, cuLaunchHostFunc);
        let (record, wait_event) = (driver!(way, cuEventRecord), driver!(way, cuStreamWaitEvent));
        let wait_word = driver!(way, cuStreamWaitValue32_v2);
        let (mut event, mut word, mut address) = (null_mut(), null_mut(), 0);
        ok(driver!(way, cuEventCreate)(&raw mut event, 2));
        ok(driver!(way, cuMemAllocHost_v2)(&raw mut word, 64));
        ok(driver!(way, cuMemHostGetDevicePointer_v2)(&raw mut address, word, 0));
        let word = &*word.cast::<AtomicU32>();
        let launch = || {
            (0..AROUND).for_each(|_| {
                ok(launch(setup.function, 1, 1, 1, 1, 1, 1, 0, stream, null_mut(), null_mut()));
            });
        };
        let mut number = word.load(Ordering::Acquire);
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            launch();
            match waits {
                For::Nothing => {}
                For::Host => ok(host(stream, Some(sleep), null_mut())),
                For::Word => ok(wait_word(stream, address, number, 0)),
                For::Event => {
                    ok(host(other, Some(sleep), null_mut()));
                    ok(record(event, other));
                    ok(wait_event(stream, event, 0));
                }
            }
            launch();
            if waits == For::Word {
                std::thread::sleep(WAIT);
                word.store(number, Ordering::Release);
            }
            ok(wait(stream));
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// For how long the calling thread was ready to run while other threads had the CPUs, in ns.
fn without_a_cpu() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The program, in a process of its own. Each line of its input is a number of seconds: the program runs for that time and prints its work.
fn program() -> ! {
    let number = |name: &str| std::env::var(name).expect("set").parse::<u32>().expect("a number");
    let (us, threads) = (number("BENCH_KERNEL_US"), number("BENCH_THREADS"));
    let waits = match std::env::var("BENCH_WAITS").expect("set").as_str() {
        "Host" => For::Host,
        "Word" => For::Word,
        "Event" => For::Event,
        _ => For::Nothing,
    };
    let kernel = if us == 0 { "zero".to_owned() } else { format!("spin_{us}us_full") };
    let setup = Setup::new(&kernel, 1);
    // SAFETY: a function of the stub, by its C signature; the simulated driver has none.
    let busy = unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"stub_busy_ns".as_ptr());
        let found = if found.is_null() {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            libc::dlsym(driver, c"stub_busy_ns".as_ptr())
        } else {
            found
        };
        std::mem::transmute::<*mut c_void, Option<extern "C" fn() -> u64>>(found)
    };
    for line in std::io::stdin().lines() {
        let seconds: f64 = line.expect("a line").parse().expect("seconds");
        let (count, queued, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    if waits == For::Nothing {
                        launch_and_count(&setup, setup.stream(), &count, &stop);
                        synchronise(&setup);
                    } else {
                        wait_in_rounds(&setup, waits, &count, &stop);
                    }
                    queued.fetch_add(without_a_cpu(), Ordering::Relaxed);
                });
            }
            std::thread::sleep(Duration::from_secs_f64(seconds));
            stop.store(true, Ordering::Relaxed);
        });
        let took = began.elapsed().as_nanos();
        let queued = queued.into_inner() / u64::from(threads);
        println!("{} {took} {queued} {}", count.into_inner(), busy.map_or(0, |busy| busy()));
        let _ = std::io::stdout().flush();
    }
    std::process::exit(0)
}

// ---- the bench --------------------------------------------------------------------------------------------------------------

struct Process {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    truth: Option<Truth>,
    pid: u32,
    done: Sums,
}

/// Launches and times of a program so far: its own time and the device's, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    launches: f64,
    ns: f64,
    /// The part of the time in which its threads waited for a CPU.
    queued: f64,
    used: f64,
}

impl Sums {
    fn rate(self) -> f64 {
        self.launches / (self.ns - self.queued) * 1e9
    }

    fn since(self, before: Self) -> Self {
        Self {
            launches: self.launches - before.launches,
            ns: self.ns - before.ns,
            queued: self.queued - before.queued,
            used: self.used - before.used,
        }
    }
}

/// Folder of a driver's programs, with a device of its own.
struct Stage<'a> {
    hook: &'a Path,
    driver: Driver,
    driver_dir: PathBuf,
    place: PathBuf,
}

impl Stage<'_> {
    fn start(&self, program: Program, name: Option<&str>) -> Process {
        let hook = name.map(|_| self.hook);
        let mut command = role("program", &self.place, &self.driver_dir, hook);
        command
            .env("BENCH_KERNEL_US", program.kernel_us.to_string())
            .env("BENCH_THREADS", program.threads.to_string())
            .env("BENCH_WAITS", format!("{:?}", program.waits))
            .env("GSHARE_SIM_CALL_NS", (program.call_us * 1000).to_string())
            .env("STUB_CALL_NS", (program.call_us * 1000).to_string())
            .env("STUB_DEVICE", self.place.join("stub"));
        match self.driver {
            Driver::StubEarly => _ = command.env("STUB_EARLY", "1"),
            Driver::StubWordless => _ = command.env("STUB_WITHOUT_WORDS", "1"),
            Driver::Fake | Driver::Stub => {}
        }
        if let Some(name) = name {
            command.env("GSHARE_NAME", name);
        }
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let truth = (self.driver == Driver::Fake).then(|| Truth::of(&self.place, &self.driver_dir));
        let lines = BufReader::new(output).lines();
        let mut running = Process { pid: child.id(), child, input, lines, truth, done: Sums::default() };
        running.run(0.3);
        running
    }
}

impl Process {
    fn begin(&mut self, seconds: f64) {
        writeln!(self.input, "{seconds}").expect("the program runs");
    }

    #[allow(clippy::cast_precision_loss, reason = "a report")]
    fn end(&mut self) {
        let line = self.lines.next().expect("an answer").expect("a line");
        let mut numbers = line.split(' ').map(|number| number.parse::<f64>().expect("a number"));
        let mut next = || numbers.next().expect("four numbers");
        self.done.launches += next();
        self.done.ns += next();
        self.done.queued += next();
        let used = next();
        self.done.used = self.truth.as_mut().map_or(used, |truth| truth.now(&[self.pid]).1[0] as f64);
    }

    fn run(&mut self, seconds: f64) {
        self.begin(seconds);
        self.end();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const TURN: f64 = 0.25;
const NAME: &str = "paced";
const NEIGHBOUR: &str = "busy";

/// A client's use by the daemon's account after the last report, in ns.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn charged(daemon: &gshared::Running) -> f64 {
    std::thread::sleep(Duration::from_millis(60));
    let clients = daemon.handle().snapshot().expect("a snapshot").clients;
    let of = |client: &&gshared::ClientSnapshot| client.name.as_str() == NAME;
    clients.iter().find(of).map_or(0.0, |client| client.total_used_ns.as_nanos() as f64)
}

/// A case's figures, in per cent.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    bare: f64,
    per_second: f64,
    used: f64,
    speed: f64,
    charged: f64,
    beside: Option<f64>,
}

fn in_turns(bare: &mut Process, hooked: &mut Process, daemon: &gshared::Running, seconds: f64) -> Outcome {
    let (bare_before, before, charged_before) = (bare.done, hooked.done, charged(daemon));
    let mut left = seconds;
    while left > 0.0 {
        bare.run(TURN.min(left));
        hooked.run(TURN.min(left));
        left -= TURN;
    }
    let charge = charged(daemon) - charged_before;
    let (alone, under) = (bare.done.since(bare_before), hooked.done.since(before));
    Outcome {
        bare: alone.used / alone.ns * 100.0,
        per_second: alone.rate(),
        used: under.used / under.ns * 100.0,
        speed: under.rate() / alone.rate() * 100.0,
        charged: charge / under.ns * 100.0,
        beside: None,
    }
}

/// The speed of a busy neighbour beside a program, in per cent of the neighbour's speed alone.
fn beside(stage: &Stage, hooked: &mut Process, seconds: f64) -> f64 {
    let busy = Program { kernel_us: 1000, call_us: 2, threads: 1, waits: For::Nothing };
    let mut neighbour = stage.start(busy, Some(NEIGHBOUR));
    let (mut alone, mut shared) = (Sums::default(), Sums::default());
    let mut left = seconds;
    while left > 0.0 {
        for with in [false, true] {
            let before = neighbour.done;
            if with {
                hooked.begin(TURN);
            }
            neighbour.run(TURN);
            if with {
                hooked.end();
            }
            let took = neighbour.done.since(before);
            let sums = if with { &mut shared } else { &mut alone };
            sums.launches += took.launches;
            sums.ns += took.ns;
            sums.queued += took.queued;
        }
        left -= TURN;
    }
    shared.rate() / alone.rate() * 100.0
}

fn report(driver: Driver, program: Program, limit: u32, outcome: Outcome) -> bool {
    let Outcome { bare, per_second, used, speed, charged, beside } = outcome;
    let below = bare <= f64::from(limit);
    let missed = missed(&[
        (below && speed < SPEED, "speed"),
        (!below && (used - f64::from(limit)).abs() > POINTS, "cap"),
        ((charged - used).abs() > POINTS, "charged"),
        (beside.is_some_and(|beside| beside < BESIDE), "beside"),
    ]);
    println!(
        "{:<14} {:<34} {limit:>5} {bare:>7.1} {per_second:>9.0} {used:>7.1} {speed:>7.1} {charged:>8.1} {:>7}  {}",
        driver.name(),
        program.name(),
        beside.map_or("-".into(), |beside| format!("{beside:.1}")),
        missed.join(", ")
    );
    missed.is_empty()
}

/// Limits for a program that uses so many per cent by itself.
fn limits(bare: f64) -> Vec<u32> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a percentage")]
    let least = (bare * 1.1).ceil() as u32;
    let mut limits = vec![least.clamp(10, 70), 20, 50, 70];
    limits.sort_unstable();
    limits.dedup();
    // Below its use a limit throttles, which is measured once.
    let first = limits.iter().position(|&limit| limit >= least).unwrap_or(limits.len());
    limits.split_off(first.saturating_sub(1).min(limits.len() - 1))
}

fn main() {
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("program") {
        program();
    }
    let quick = gshare_bench::runs_as_test();
    let argument = |name: &str| std::env::args().skip_while(|argument| argument != name).nth(1);
    let seconds = argument("--seconds").map_or(2.0, |text| text.parse().expect("a number"));
    let seconds = if quick { 0.2 } else { seconds };
    let only = argument("--only").unwrap_or_default();
    let root = tempfile::tempdir().expect("a temporary directory");
    println!(
        "{:<14} {:<34} {:>5} {:>7} {:>9} {:>7} {:>7} {:>8} {:>7}  missed",
        "driver", "program", "limit", "bare %", "per s", "used %", "speed", "charged", "beside"
    );
    let (mut cases, mut kept) = (0, 0);
    for driver in [Driver::Fake, Driver::Stub, Driver::StubEarly, Driver::StubWordless] {
        let of_driver = root.path().join(driver.name());
        std::fs::create_dir(&of_driver).expect("a temporary directory is writable");
        let (hook, driver_dir) = hook_common::build(&of_driver, driver.file_name());
        let stage = |name: &str| {
            let place = of_driver.join(name);
            std::fs::create_dir_all(&place).expect("a temporary directory is writable");
            Stage { hook: &hook, driver, driver_dir: driver_dir.clone(), place }
        };
        let (alone, under) = (stage("bare"), stage("hooked"));
        let wanted = |program: &Program| format!("{}: {}", driver.name(), program.name()).contains(&only);
        let mut programs: Vec<Program> = programs().into_iter().filter(wanted).collect();
        if driver == Driver::StubWordless {
            programs.retain(|program| program.waits != For::Word);
        }
        if quick {
            programs.retain(|program| program.kernel_us == 5 && program.threads == 1);
        }
        for program in programs {
            let mut bare = alone.start(program, None);
            let before = bare.done;
            bare.run(TURN);
            let used = bare.done.since(before);
            for limit in limits(used.used / used.ns * 100.0) {
                let shares =
                    [(NAME, format!("0.{limit:02}")), (NEIGHBOUR, format!("0.{:02}:1.0", 100 - limit))];
                let daemon = daemon(&under.place, shares.map(|(name, share)| (name.to_owned(), share)));
                let mut hooked = under.start(program, Some(NAME));
                let mut outcome = in_turns(&mut bare, &mut hooked, &daemon, seconds);
                if program.waits != For::Nothing {
                    outcome.beside = Some(beside(&under, &mut hooked, seconds));
                }
                kept += usize::from(report(driver, program, limit, outcome));
                cases += 1;
                drop(hooked);
                daemon.stop().expect("the daemon stops");
                if quick {
                    break;
                }
            }
        }
    }
    println!("{kept} of {cases} cases are within their bars");
}
