//! Times of programs without the GPU under the token engine, and errors of their shares, in virtual time.
//!
//! A [program](gshare_sim::token::paced) launches a kernel, waits for it, pauses, and starts over. Here programs with equal kernels
//! share one GPU for ten seconds. A kernel cannot be cut: a kernel of length `k` of a client with the share `r` comes every `k / r`
//! at best, so `k / r - k` without the GPU cannot be avoided. The bench prints a row per length of the kernels and set of shares,
//! over 40 cases each. Kernels, pauses, hand-overs and arrivals differ a little among the cases, since a pattern may repeat for
//! ever:
//!
//! - `off`: the largest share error of any client over the ten seconds, in points. No client uses the GPU while a host with it
//!   pauses: where the shares with those pauses are more than the whole GPU, each is to be less by the same part;
//! - `beyond`: the excess of a client's longest time without the GPU over a window (100 ms), or over the unavoidable time if it is
//!   longer: mean over all clients, and the largest;
//! - `cases`: the number of cases with an excess of more than 1 ms.
//!
//! Then programs of different paces share a GPU: a program's pause must take nothing of another program's request.
//!
//! Target: no program is without the GPU for longer than a window, and no busy program gets less than its request, as a part of its
//! speed alone, by more than 2 points. Nothing here is timed, and load does not matter.

use gshare_core::{ClientId, Duration, Quota, QuotaRange, Share, SmShare, Timestamp};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::token::drive::Driver;
use gshare_sim::token::paced::{Pace, Paced};
use gshare_sim::token::{Terms, check};

/// Shares in per cent.
const SHARES: [&[u64]; 12] = [
    &[30, 70],
    &[10, 90],
    &[20, 80],
    &[25, 25, 50],
    &[10, 20, 30, 40],
    &[20, 20, 60],
    &[20; 5],
    &[20, 50],
    &[20],
    &[40],
    &[60],
    &[80],
];
/// Lengths in us of the kernels of ten cases each.
const KERNELS: [(&str, [u64; 10]); 6] = [
    ("10 us - 1.5 ms", [10, 13, 57, 100, 111, 170, 307, 640, 1_000, 1_500]),
    ("5 ms", [5_000, 5_002, 5_004, 5_009, 5_018, 5_028, 5_040, 5_055, 5_078, 5_106]),
    ("10 ms", [10_000, 10_004, 10_009, 10_019, 10_037, 10_056, 10_080, 10_111, 10_156, 10_213]),
    ("20 ms", [20_000, 20_008, 20_019, 20_038, 20_074, 20_113, 20_160, 20_222, 20_313, 20_426]),
    ("30 ms", [30_000, 30_013, 30_029, 30_057, 30_111, 30_170, 30_240, 30_333, 30_470, 30_640]),
    ("50 ms", [50_000, 50_021, 50_048, 50_095, 50_185, 50_283, 50_400, 50_555, 50_783, 51_066]),
];
/// Pause of the program and hand-over, in us.
const HOSTS: [(u64, u64); 4] = [(1, 110), (20, 140), (100, 170), (30, 300)];

#[derive(Default)]
struct Row {
    off: f64,
    sum: f64,
    clients: f64,
    worst: f64,
    cases: u32,
}

fn main() {
    // `cargo bench -- --test` only asks whether it runs.
    let quick = gshare_bench::runs_as_test();
    let lengths = if quick { 1 } else { 10 };
    println!("virtual time; {} cases a row", lengths * HOSTS.len());
    println!(
        "{:15}{:15}{:>12}{:>22}{:>8}",
        "kernels", "shares %", "off points", "beyond ms mean, most", "cases"
    );
    for (name, kernels) in KERNELS {
        for shares in SHARES {
            let mut row = Row::default();
            for (index, &kernel) in (0..).zip(&kernels[..lengths]) {
                for host in HOSTS {
                    row.add(shares, kernel, host, Duration::from_micros(700 + 3_100 * index));
                }
            }
            let shares = shares.iter().map(u64::to_string).collect::<Vec<_>>().join("/");
            let Row { off, sum, clients, worst, cases } = row;
            println!("{name:15}{shares:15}{off:>12.2}{:>14.1}{worst:>8.1}{cases:>8}", sum / clients);
        }
    }
    println!(
        "\nrequest:limit %, kernel/pause in us: part of its own speed in %, longest time without the GPU in ms"
    );
    for case in MIXED {
        mixed(case);
    }
}

/// Request and limit in per cent, kernel and pause in us.
type Paces = [(u64, u64, u64, u64)];
/// A pausing program beside busy ones, and long kernels beside short ones.
const MIXED: [&Paces; 11] = [
    &[(50, 50, 10, 100), (50, 50, 1_000, 1)],
    &[(30, 30, 10, 100), (70, 70, 1_000, 1)],
    &[(20, 100, 10, 100), (20, 100, 1_000, 1)],
    &[(50, 50, 10, 20), (50, 50, 1_000, 1)],
    &[(50, 50, 1_000, 1_000), (50, 50, 1_000, 1)],
    &[(10, 10, 10, 100), (20, 20, 100, 1), (70, 70, 1_000, 1)],
    &[(50, 50, 20_000, 1), (50, 50, 100, 1)],
    &[(30, 100, 20_000, 1), (70, 100, 10, 1)],
    &[(30, 100, 10, 1), (70, 100, 20_000, 1)],
    &[(10, 100, 1_000, 1_000), (20, 100, 20_000, 1), (70, 100, 10, 50)],
    &[(10, 10, 20_000, 1_000), (20, 20, 5_000, 300), (70, 70, 10, 1)],
];

fn mixed(case: &Paces) {
    let (mut driver, window) = driver();
    let mut paced = Paced::new(&mut driver, Duration::from_micros(150));
    for (slot, &(request, limit, kernel, pause)) in (0..).zip(case) {
        let now = Timestamp::from_nanos(1_700_000 * u64::from(slot));
        let pace = Pace { kernel: Duration::from_micros(kernel), pause: Duration::from_micros(pause) };
        paced.run(now).expect("no rule is broken");
        paced.start(now, ClientId::new(slot, 0), share(request, limit), pace).expect("no rule is broken");
    }
    let from = Timestamp::ZERO.saturating_add(window.saturating_mul(2));
    let length = Duration::from_secs(10);
    let clients = || (0..).map(|slot| ClientId::new(slot, 0)).zip(case);
    paced.run(from).expect("no rule is broken");
    let before: Vec<_> = clients().map(|(id, _)| paced.got(id).busy).collect();
    paced.run(from.saturating_add(length)).expect("no rule is broken");
    let text = clients().zip(before).map(|((id, &(request, limit, kernel, pause)), before)| {
        let got = paced.got(id);
        let alone = kernel as f64 / (kernel + pause) as f64;
        let part = ms(got.busy.saturating_sub(before)) / ms(length) / alone * 100.0;
        format!("{request}:{limit} {kernel}/{pause}: {part:.1} % {:.0} ms", ms(got.gap))
    });
    println!("{}", text.collect::<Vec<_>>().join(";  "));
}

/// An engine under audit, and its window. The engine waits for a kernel longer than its token, as the daemon does.
fn driver() -> (Driver, Duration) {
    let mut config = MultiTokenConfig::default();
    config.grace = Duration::from_millis(50);
    let window = config.window;
    let terms = Terms::multi_token(window, config.max_token, (config.slack, config.grace), config.max_debt);
    let engine = MultiToken::new(config).expect("defaults");
    (Driver::new(Box::new(engine), terms, check::always()), window)
}

impl Row {
    /// Runs a case: each program starts `apart` after the previous program.
    fn add(&mut self, shares: &[u64], kernel: u64, (pause, hand_over): (u64, u64), apart: Duration) {
        let (mut driver, window) = driver();
        let mut paced = Paced::new(&mut driver, Duration::from_micros(hand_over));
        let pace = Pace { kernel: Duration::from_micros(kernel), pause: Duration::from_micros(pause) };
        let clients: Vec<ClientId> = (0..).take(shares.len()).map(|slot| ClientId::new(slot, 0)).collect();
        for (&client, &share) in clients.iter().zip(shares) {
            let now = Timestamp::ZERO.saturating_add(apart.saturating_mul(client.slot().into()));
            paced.run(now).expect("no rule is broken");
            paced.start(now, client, self::share(share, share), pace).expect("no rule is broken");
        }
        // The windows of the arrivals are not compared.
        let from = Timestamp::ZERO.saturating_add(window.saturating_mul(2));
        let length = Duration::from_secs(10);
        paced.run(from).expect("no rule is broken");
        let before: Vec<Duration> = clients.iter().map(|&client| paced.got(client).busy).collect();
        paced.run(from.saturating_add(length)).expect("no rule is broken");

        let alone = ms(pace.kernel) / (ms(pace.kernel) + ms(pace.pause));
        let needed = (shares.iter().sum::<u64>() as f64 / 100.0 / alone).max(1.0);
        let mut most = 0.0_f64;
        for ((&client, &share), before) in clients.iter().zip(shares).zip(before) {
            let got = paced.got(client);
            let (share, part) = (share as f64, ms(got.busy.saturating_sub(before)) / ms(length));
            let off = part * 100.0 * needed - share;
            self.off = self.off.max(off.abs());
            let unavoidable = ms(pace.kernel) * (100.0 / share - 1.0);
            let beyond = (ms(got.gap) - unavoidable.max(ms(window))).max(0.0);
            most = most.max(beyond);
            self.sum += beyond;
            self.clients += 1.0;
        }
        self.worst = self.worst.max(most);
        self.cases += u32::from(most > 1.0);
    }
}

fn share(request: u64, limit: u64) -> Share {
    let quota = |percent: u64| u16::try_from(percent * 100).ok().and_then(Quota::new);
    let range =
        quota(request).zip(quota(limit)).and_then(|(request, limit)| QuotaRange::new(request, limit).ok());
    Share { quota: range.expect("at most 100 %"), sm: SmShare::WHOLE }
}

fn ms(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}
