//! How exactly the hook and the daemon keep shares of GPU time, on the simulated device, which knows the truth.
//!
//! Unmodified programs that always have work share one device; the device's own account gives each program's part of it. The table
//! has one line a case: caps of 30/70, 10/90 and 25/25/50, and one process capped at 10 to 90 per cent; kernels of 10 us, 1 ms and
//! 30 ms, by programs that synchronise after every launch and by programs that never do; and graphs of ten kernels. Then the table
//! has, for each length of kernel, the GPU time after the revocation of a lease while the device was full of work.
//!
//! | column | what |
//! |---|---|
//! | `shares` | of the device's time, from the moment all have launched |
//! | `off` | the largest difference to a cap, in points; then the same within the first second alone |
//! | `alone` | what one such program gets without the hook, with the device to itself, before and after the case: the host's part of its time is no GPU time |
//! | `of own` | the largest difference to a cap of what each gets as a part of `alone`, in points: of the speed it would have; then the same within the first second |
//! | `gap ms` | the longest time without GPU time of any process, beside what the caps and the kernel's length make unavoidable |
//! | `missed` | what is beyond its bar: 2 points over the whole time (`share`) and over the first second (`first s`), and a gap of one window or what is unavoidable (`gap`), to the 2 ms between two looks; `pace` where that was not judged, see below |
//!
//! For programs that never synchronise the bar is `off`, for programs that wait for each kernel `of own`: no way to share a device
//! lets the latter meet the first bar. Between two kernels such a program's host is busy and its queue empty. While one process
//! holds the device alone, no process uses that time: a program that is 30 per cent busy alone cannot get 70. Nor would it help to
//! let both launch at once, in the order in which they come. With caps of 30 and 70 there are 70 pauses of one program for 30
//! kernels of the other, and four of seven stay empty. So a cap can promise such a program only a part of its speed alone; any
//! further loss of two programs to each other counts against the cap.
//!
//! The speed of a program alone depends on the host, and on many a machine it changes within a minute. So it is measured before and
//! after a case for four tenths of the case's time each: on a machine where it wanders by 1.2 per cent from second to second, less
//! says little. A case is measured again, three times at most, while its program's speeds before and after differ by more than 5
//! per cent. If they still do, `of own` says nothing, and `pace` stands in the last column in its place.
//!
//! A hand-over of the device wakes four threads one after the other. The bench must not measure the machine's sleep, so CPUs are
//! kept awake where this is allowed (`/dev/cpu_dma_latency`), for programs alone too; `--asleep` leaves them as they are. The first
//! line says which of the two applied.
//!
//! Then come programs of different paces, see `hook_paces`. Cases run with calls that take as long as the profile says, or with
//! `--calls NS` that long. Programs paced by their host have a bench of their own, `hook_paced`.
//!
//! `--seconds N` (10), `--only TEXT` for the cases with this text in their names, `--json` for one JSON object on stdout. Nothing
//! here is a test: on a machine with busy CPUs the device waits for programs that wait for a CPU, and shares come out lower.

use std::io::Write;
use std::path::PathBuf;
use std::process::Child;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser as _;
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, Engine, Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler, UseState,
};

mod hook_common;
mod hook_paces;
use hook_common::{
    Kind, Programs, SIMULATED, Setup, Then, Truth, build, daemon, launch_forever, missed, role,
};

/// One line of the table.
#[derive(Clone, Debug)]
struct Case {
    caps: Vec<u32>,
    kernel_us: u32,
    program: &'static str,
}

impl Case {
    fn name(&self) -> String {
        let caps: Vec<String> = self.caps.iter().map(u32::to_string).collect();
        format!("{} {} {}", caps.join("/"), length(self.kernel_us), self.program)
    }

    /// The longest time that a process must be without the device, in ms: all the others' kernels and whole windows of its
    /// own cap's pause, in kernels that cannot be cut.
    fn unavoidable_ms(&self) -> f64 {
        let smallest = f64::from(*self.caps.iter().min().expect("a case has processes")) / 100.0;
        let kernel = f64::from(self.kernel_us) / 1e3 * if self.program == "graph" { 10.0 } else { 1.0 };
        // One kernel must be followed by this much of a pause for the cap to hold.
        let pause = kernel * (1.0 - smallest) / smallest;
        pause.max(WINDOW_MS * (1.0 - smallest))
    }
}

fn length(us: u32) -> String {
    if us >= 1000 { format!("{} ms", us / 1000) } else { format!("{us} us") }
}

/// Points that a share may be off.
const BAR: f64 = 2.0;
/// How much the speed of a program alone may differ before and after a case, and how often the case is tried.
const STEADY: f64 = 0.05;
const TRIES: usize = 3;
/// The longest time that a process is to be without the device where its cap allows it, in ms; and between two looks at it.
const WINDOW_MS: f64 = 100.0;
const LOOK_MS: f64 = 2.0;

const KERNELS: [u32; 3] = [10, 1_000, 30_000];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shared: [&[u32]; 3] = [&[30, 70], &[10, 90], &[25, 25, 50]];
    for caps in shared {
        for program in ["sync", "never"] {
            cases.extend(KERNELS.map(|kernel_us| Case { caps: caps.to_vec(), kernel_us, program }));
        }
        cases.push(Case { caps: caps.to_vec(), kernel_us: 100, program: "graph" });
    }
    for cap in (10..=90).step_by(10) {
        cases.extend(KERNELS.map(|kernel_us| Case { caps: vec![cap], kernel_us, program: "never" }));
    }
    cases
}

/// The programs of a case, under the hook.
fn start(case: &Case, stage: &Stage) -> Programs {
    Programs((0..case.caps.len()).map(|index| spin(case, stage, Some(name(index)))).collect())
}

/// A program of this case, under the hook if it has a name.
fn spin(case: &Case, stage: &Stage, name: Option<String>) -> Child {
    let hook = name.as_ref().map(|_| stage.hook.as_path());
    let mut command = role("spin", stage.place.path(), &stage.driver, hook);
    if let Some(name) = name {
        command.env("GSHARE_NAME", name);
    }
    command.env("BENCH_KERNEL_US", case.kernel_us.to_string()).env("BENCH_PROGRAM", case.program);
    if let Some(ns) = &stage.call_ns {
        command.env("GSHARE_SIM_CALL_NS", ns);
    }
    command.spawn().expect("this program starts")
}

/// The case, and the speed of its program alone before and after it: the try with the least change of this speed.
fn at_a_steady_pace(case: &Case, stage: &Stage, seconds: f64) -> (Outcome, [f64; 2]) {
    let mut best: Option<(Outcome, [f64; 2])> = None;
    // Only programs that synchronise are judged by it.
    let alone_for = seconds * if case.program == "sync" { 0.4 } else { 0.05 };
    let mut before = alone(case, stage, alone_for);
    for _ in 0..TRIES {
        let outcome = measure(case, stage, seconds);
        let after = alone(case, stage, alone_for);
        let paces = [before, after];
        before = after;
        if best.as_ref().is_none_or(|(_, least)| change(paces) < change(*least)) {
            best = Some((outcome, paces));
        }
        if is_steady(paces) || case.program != "sync" {
            break;
        }
    }
    best.expect("there is a first try")
}

/// The difference between both speeds, as a part of the faster.
fn change([before, after]: [f64; 2]) -> f64 {
    (before - after).abs() / before.max(after).max(f64::MIN_POSITIVE)
}

fn is_steady(paces: [f64; 2]) -> bool {
    change(paces) <= STEADY
}

/// The share of one program of this case with the device to itself, without the hook. The bench looks as often as in the case,
/// because a look takes the device's lock, and the program may wait for it.
fn alone(case: &Case, stage: &Stage, seconds: f64) -> f64 {
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let program = Programs(vec![spin(case, stage, None)]);
    let pids = program.pids();
    let first = stage.wait_for_all(&mut truth, &pids);
    let (last, _) = look(&mut truth, &pids, &first, seconds, |_| {});
    parts(&first, &last)[0]
}

fn name(index: usize) -> String {
    format!("tenant-{index}")
}

/// The libraries, and a device.
struct Stage {
    hook: PathBuf,
    driver: PathBuf,
    place: tempfile::TempDir,
    /// How long a call that launches takes, unless as the profile says.
    call_ns: Option<String>,
}

impl Stage {
    fn new(call_ns: Option<String>) -> Self {
        let place = tempfile::tempdir().expect("a temporary directory");
        let (hook, driver) = build(place.path(), SIMULATED);
        Self { hook, driver, place, call_ns }
    }

    fn socket(&self) -> PathBuf {
        self.place.path().join("gshare.sock")
    }

    /// Waits until all have launched something.
    fn wait_for_all(&self, truth: &mut Truth, pids: &[u32]) -> Seen {
        let start = Instant::now();
        loop {
            let (now, busy) = truth.now(pids);
            if busy.iter().all(|&busy| busy > 0) {
                return (now, busy);
            }
            assert!(start.elapsed() < Duration::from_secs(60), "a program launches nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The result of a case.
#[derive(Debug)]
struct Outcome {
    shares: Vec<f64>,
    first_second: Vec<f64>,
    gap_ms: f64,
}

impl Case {
    /// The largest difference to a cap, in points, of these shares of `whole`.
    fn off(&self, shares: &[f64], whole: f64) -> f64 {
        let each = shares.iter().zip(&self.caps);
        each.map(|(share, &cap)| (share / whole * 100.0 - f64::from(cap)).abs()).fold(0.0, f64::max)
    }
}

#[allow(clippy::cast_precision_loss, reason = "a report")]
fn measure(case: &Case, stage: &Stage, seconds: f64) -> Outcome {
    let shares = case.caps.iter().enumerate().map(|(index, cap)| (name(index), format!("0.{cap:02}")));
    let daemon = daemon(stage.place.path(), shares);
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let programs = start(case, stage);
    let pids = programs.pids();
    let first = stage.wait_for_all(&mut truth, &pids);
    let mut second = None;
    let (last, gap) = look(&mut truth, &pids, &first, seconds, |seen| {
        if seen.0 - first.0 >= 1_000_000_000 {
            second.get_or_insert_with(|| seen.clone());
        }
    });
    drop(programs);
    daemon.stop().expect("the daemon stops");
    let first_second = second.map_or(Vec::new(), |second| parts(&first, &second));
    Outcome { shares: parts(&first, &last), first_second, gap_ms: gap as f64 / 1e6 }
}

/// A time, and the GPU time of each process until then, in ns.
type Seen = (u64, Vec<u64>);

/// Looks at the truth for this long, and shows `each` look. Gives the last look, and the longest time in which a process got
/// nothing.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn look(
    truth: &mut Truth,
    pids: &[u32],
    first: &Seen,
    seconds: f64,
    mut each: impl FnMut(&Seen),
) -> (Seen, u64) {
    let mut changed: Vec<(u64, u64)> = first.1.iter().map(|&busy| (first.0, busy)).collect();
    let (mut gap, mut seen) = (0, first.clone());
    while (seen.0 - first.0) as f64 / 1e9 < seconds {
        std::thread::sleep(Duration::from_secs_f64(LOOK_MS / 1e3));
        seen = truth.now(pids);
        for (changed, &used) in changed.iter_mut().zip(&seen.1) {
            if used == changed.1 {
                gap = gap.max(seen.0 - changed.0);
            } else {
                *changed = (seen.0, used);
            }
        }
        each(&seen);
    }
    (seen, gap)
}

/// Each process's part of the time between two looks.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn parts(first: &Seen, last: &Seen) -> Vec<f64> {
    let length = (last.0 - first.0).max(1) as f64;
    last.1.iter().zip(&first.1).map(|(&used, &first)| (used - first) as f64 / length).collect()
}

/// A policy that lends one client the device without a limit, and takes the token back every 100 ms, for 100 ms.
#[derive(Debug, Default)]
struct TakeBack {
    client: Option<ClientStatus>,
    /// Since when its request has not been answered.
    asked: Option<Timestamp>,
    /// When something is due: the token is taken back, or granted again.
    due: Option<Timestamp>,
    revoked: Arc<Mutex<Vec<Timestamp>>>,
}

const TURN: gshare_core::Duration = gshare_core::Duration::from_millis(100);

impl TakeBack {
    fn wants(&mut self, now: Timestamp, actions: &mut Vec<TokenAction>) {
        self.asked = Some(now);
        if self.due.is_none() {
            self.grant(now, actions);
        }
    }

    fn grant(&mut self, now: Timestamp, actions: &mut Vec<TokenAction>) {
        if let Some(status) = self.client.as_mut().filter(|_| self.asked.is_some()) {
            let budget = gshare_core::Duration::from_secs(10);
            let (allowed, until) = (status.total_used.saturating_add(budget), now.saturating_add(budget));
            (status.holds, self.asked, self.due) = (Some(until), None, Some(now.saturating_add(TURN)));
            actions.push(TokenAction::Allow { client: status.client, allowed, until });
        }
    }
}

impl Engine for TakeBack {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                self.client = Some(ClientStatus::joined(client, gpu, share));
            }
            TokenEvent::ClientLeft { .. } => (self.client, self.due) = (None, None),
            TokenEvent::Used { used, state, .. } => {
                if let Some(status) = &mut self.client {
                    status.total_used = used;
                    if matches!(state, UseState::Idle | UseState::Wants) {
                        status.holds = None;
                    }
                }
                if matches!(state, UseState::Wants | UseState::Extends) {
                    self.wants(now, actions);
                }
            }
            TokenEvent::DeadlineReached if self.due.is_some_and(|due| due <= now) => {
                let held =
                    self.client.as_mut().and_then(|status| Some((status.client, status.holds.take()?)));
                if let Some((client, _)) = held {
                    self.due = Some(now.saturating_add(TURN));
                    self.revoked.lock().expect("no thread panics").push(now);
                    actions.push(TokenAction::Stop { client });
                } else {
                    self.due = None;
                    self.asked = Some(now);
                    self.grant(now, actions);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.due
    }
}

impl TokenScheduler for TakeBack {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        let mut status = self.client.filter(|status| status.client == client)?;
        status.waiting_since = self.asked.filter(|_| status.holds.is_none());
        Some(status)
    }

    fn window(&self) -> gshare_core::Duration {
        TURN
    }
}

/// GPU time after each of `times` revocations, in ms, sorted; and the bound on the work in flight.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn overshoot(kernel_us: u32, times: usize, stage: &Stage) -> (Vec<f64>, f64) {
    let config = gshared::Config::at(stage.socket());
    let bound = config.in_flight.as_nanos() as f64 / 1e6;
    let policy = TakeBack::default();
    let revoked = Arc::clone(&policy.revoked);
    let daemon = gshared::Daemon::builder(config).engine(Box::new(policy)).build();
    let daemon = daemon.and_then(gshared::Daemon::spawn).expect("the daemon runs");
    let mut truth = Truth::of(stage.place.path(), &stage.driver);
    let programs = start(&Case { caps: vec![99], kernel_us, program: "never" }, stage);
    let pids = programs.pids();
    stage.wait_for_all(&mut truth, &pids);
    let mut samples = Vec::new();
    // One more: the first turn is spent on learning a kernel's cost.
    while revoked.lock().expect("no thread panics").len() <= times + 1 {
        let (now, busy) = truth.now(&pids);
        samples.push((now, busy[0]));
        std::thread::sleep(Duration::from_micros(500));
    }
    drop(programs);
    daemon.stop().expect("the daemon stops");
    let revoked = revoked.lock().expect("no thread panics").clone();
    let mut after: Vec<f64> = revoked[1..=times]
        .iter()
        .filter_map(|at| {
            let at = at.as_nanos();
            let before = samples.iter().rposition(|&(now, _)| now <= at)?;
            let (then, busy) = samples[before];
            // The device was full of work: it was busy from the sample on.
            let grew = samples.get(before + 1).is_some_and(|&(_, next)| next > busy);
            let at_revoke = busy + if grew { at - then } else { 0 };
            let end = at + TURN.as_nanos() * 9 / 10;
            let (_, last) = samples[samples.iter().rposition(|&(now, _)| now <= end)?];
            Some(last.saturating_sub(at_revoke) as f64 / 1e6)
        })
        .collect();
    after.sort_by(f64::total_cmp);
    (after, bound)
}

#[derive(Debug, clap::Parser)]
struct Options {
    /// Seconds of each case
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Leave sleeping CPUs asleep
    #[arg(long)]
    asleep: bool,
    /// Only the cases with this text in their names
    #[arg(long)]
    only: Option<String>,
    /// How long a call that launches takes, in ns; by default as the profile says
    #[arg(long)]
    calls: Option<String>,
    /// Print one JSON object on stdout
    #[arg(long)]
    json: bool,
    /// One short case of each table
    #[arg(long)]
    test: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn seconds(&self) -> f64 {
        if self.test { self.seconds.min(0.3) } else { self.seconds }
    }
}

/// Keeps CPUs awake while it lives, if this user may.
fn keep_awake() -> Option<std::fs::File> {
    let mut file = std::fs::OpenOptions::new().write(true).open("/dev/cpu_dma_latency").ok()?;
    file.write_all(&0i32.to_ne_bytes()).ok()?;
    Some(file)
}

fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(f64::NAN)
}

fn table(options: &Options, stage: &Stage) {
    // With --json the table is for people only.
    macro_rules! say {
        ($($text:tt)*) => { if options.json { eprintln!($($text)*) } else { println!($($text)*) } };
    }
    let wanted = |name: &str| options.only.as_ref().is_none_or(|text| name.contains(text.as_str()));
    let mut cases: Vec<Case> = cases().into_iter().filter(|case| wanted(&case.name())).collect();
    if options.test {
        cases.truncate(1);
    }
    let (mut rows, mut worst, mut worst_of_own) = (Vec::new(), 0f64, 0f64);
    let awake = if options.asleep { None } else { keep_awake() };
    eprintln!(
        "simulated device; CPUs {}; {} s a case, {} cases; load {:.1}",
        if awake.is_some() { "kept awake" } else { "as they are" },
        options.seconds(),
        cases.len(),
        load()
    );
    say!(
        "{:<26} {:<22} {:>6} {:>8} {:>8} {:>7} {:>8} {:>16}  {}",
        "case",
        "shares %",
        "off",
        "first s",
        "alone",
        "of own",
        "first s",
        "gap ms (least)",
        "missed"
    );
    for case in &cases {
        let (Outcome { shares, first_second, gap_ms }, paces) =
            at_a_steady_pace(case, stage, options.seconds());
        let text: Vec<String> = shares.iter().map(|share| format!("{:.2}", share * 100.0)).collect();
        let least = case.unavoidable_ms();
        let alone = f64::midpoint(paces[0], paces[1]);
        let steady = is_steady(paces) || case.program != "sync";
        let (off, first) = (case.off(&shares, 1.0), case.off(&first_second, 1.0));
        let (of_own, first_of_own) = (case.off(&shares, alone), case.off(&first_second, alone));
        let percents = paces.map(|pace| format!("{:.0}", pace * 100.0)).join(", ");
        let barred = if case.program == "sync" { [of_own, first_of_own] } else { [off, first] };
        let missed = missed(&[
            (!steady, "pace"),
            (steady && barred[0] > BAR, "share"),
            (steady && barred[1] > BAR, "first s"),
            (gap_ms > least.max(WINDOW_MS) + LOOK_MS, "gap"),
        ]);
        say!(
            "{:<26} {:<22} {off:>6.2} {first:>8.2} {percents:>8} {of_own:>7.2} {first_of_own:>8.2} {gap_ms:>8.0} {:>7}  {}",
            case.name(),
            text.join(" "),
            format!("({least:.0})"),
            missed.join(", ")
        );
        if case.program != "sync" {
            worst = worst.max(off);
        }
        if steady {
            worst_of_own = worst_of_own.max(of_own);
        }
        rows.push(serde_json::json!({
            "case": case.name(), "shares": shares, "off_points": off, "off_first_second_points": first,
            "alone": paces, "of_own_points": of_own, "of_own_first_second_points": first_of_own,
            "gap_ms": gap_ms, "gap_least_ms": least, "missed": missed,
        }));
    }
    say!(
        "programs without waits are off by at most {worst:.2} points of the device, all by {worst_of_own:.2} of their own speed, in {} cases",
        rows.len()
    );
    let mut revokes = Vec::new();
    say!("\n{:<26} {:>10} {:>10} {:>10}", "GPU time after a revoke", "median ms", "worst ms", "bound ms");
    for kernel_us in KERNELS.into_iter().filter(|&us| wanted(&format!("revoke {}", length(us)))) {
        let (after, bound) = overshoot(kernel_us, if options.test { 1 } else { 20 }, stage);
        let (Some(&median), Some(&most)) = (after.get(after.len() / 2), after.last()) else { continue };
        // A running kernel cannot be stopped, so no bound can mean less than one kernel.
        let bound = bound.max(f64::from(kernel_us) / 1e3);
        say!("{:<26} {median:>10.2} {most:>10.2} {bound:>10.2}", format!("revoke {}", length(kernel_us)));
        revokes.push(serde_json::json!({
            "kernel_us": kernel_us, "median_ms": median, "worst_ms": most, "bound_ms": bound,
        }));
    }
    let paces = hook_paces::table(stage, options.seconds().min(5.0), wanted, options.test);
    if options.json {
        println!(
            "{}",
            serde_json::json!({
                "device": "simulated", "cpus_awake": awake.is_some(), "rows": rows, "revokes": revokes, "paces": paces,
            })
        );
    }
}

fn main() {
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("spin") {
        let us: u32 = std::env::var("BENCH_KERNEL_US").expect("set").parse().expect("a number");
        let program = std::env::var("BENCH_PROGRAM").expect("set");
        let setup = Setup::new(&format!("spin_{us}us_full"), 10);
        let kind = if program == "graph" { Kind::Graph } else { Kind::Kernel };
        let then = if program == "sync" { Then::Synchronise } else { Then::Launch };
        launch_forever(&setup, kind, null_mut(), then);
    }
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("pace") {
        hook_paces::pace();
    }
    let options = Options::parse();
    table(&options, &Stage::new(options.calls.clone()));
}
