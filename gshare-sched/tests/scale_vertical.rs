//! Fast scaling up and down beside a slow, literal model of Algorithm 2 with its resolutions, one test per resolution, and the invariants
//! under any history.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use gshare_core::{
    BasisPoints, ClientId, Duration, Engine, GpuId, ModelId, Quota, QuotaRange, ServiceClass, Timestamp,
};
use gshare_sched::scale::{
    DiluVertical, DiluVerticalConfig, ScaleState, TokenBalance, VerticalAction, VerticalError, VerticalEvent,
    VerticalScaler,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

#[path = "support/scale_vertical_model.rs"]
mod model;

const GPU: GpuId = GpuId::new(0);
/// The published tolerance, 60 %.
const PUBLISHED: ServiceClass = ServiceClass::slo_sensitive(60).unwrap();
const OWNER: ClientId = ClientId::new(0, 0);
const TRAINER: ClientId = ClientId::new(1, 0);
const PERIOD: Duration = Duration::from_millis(5);

fn quota(request: u16, limit: u16) -> QuotaRange {
    let percent = |percent| Quota::from_percent(percent).unwrap();
    QuotaRange::new(percent(request), percent(limit)).unwrap()
}

/// A scaler with a book of its issued tokens, action by action.
struct Bench {
    scaler: DiluVertical,
    now: Timestamp,
    issued: BTreeMap<ClientId, u64>,
    homes: BTreeMap<ClientId, GpuId>,
    states: BTreeMap<GpuId, ScaleState>,
    /// The highest sum after any single action, per GPU.
    peak: BTreeMap<GpuId, u64>,
}

impl Bench {
    fn new() -> Self {
        Self::with(DiluVerticalConfig::default())
    }

    fn with(config: DiluVerticalConfig) -> Self {
        Self {
            scaler: DiluVertical::new(config).unwrap(),
            now: Timestamp::from_millis(1_000),
            issued: BTreeMap::new(),
            homes: BTreeMap::new(),
            states: BTreeMap::new(),
            peak: BTreeMap::new(),
        }
    }

    fn handle(&mut self, event: VerticalEvent) -> Result<Vec<VerticalAction>, VerticalError> {
        let actions = self.scaler.orders(self.now, event)?;
        if let VerticalEvent::ClientJoined { client, gpu, .. } = event {
            self.homes.insert(client, gpu);
        }
        for action in &actions {
            match *action {
                VerticalAction::Issue { client, tokens } => {
                    self.issued.insert(client, tokens);
                    let home = self.homes[&client];
                    let sum =
                        self.issued.iter().filter(|(id, _)| self.homes[id] == home).map(|(_, n)| n).sum();
                    let peak = self.peak.entry(home).or_default();
                    *peak = (*peak).max(sum);
                }
                VerticalAction::StateChanged { gpu, state } => {
                    self.states.insert(gpu, state);
                }
            }
        }
        if let VerticalEvent::ClientLeft { client } = event {
            self.issued.remove(&client);
            self.homes.remove(&client);
        }
        Ok(actions)
    }

    fn join(&mut self, client: ClientId, gpu: GpuId, range: QuotaRange, class: ServiceClass) {
        self.handle(VerticalEvent::ClientJoined { client, gpu, quota: range, class }).unwrap();
    }

    fn owner_and_trainer() -> Self {
        let mut bench = Self::new();
        bench.join(OWNER, GPU, quota(30, 60), PUBLISHED);
        bench.join(TRAINER, GPU, quota(20, 100), ServiceClass::BestEffort);
        bench
    }

    fn launch(&mut self, client: ClientId, tokens: u64, largest_kernel: u64) {
        self.handle(VerticalEvent::UsageReported { client, tokens, largest_kernel }).unwrap();
    }

    fn cycle(&mut self, client: ClientId, batch: u32, millis: u64) {
        let (first_launch, last_launch) = (self.now.saturating_sub(Duration::from_millis(millis)), self.now);
        let model = ModelId::new(0);
        self.handle(VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch })
            .unwrap();
    }

    /// One period with a launch of each `busy` client.
    fn period(&mut self, busy: &[ClientId]) -> Vec<VerticalAction> {
        for &client in busy {
            self.launch(client, 1, 1);
        }
        self.now = self.scaler.next_deadline().unwrap();
        self.handle(VerticalEvent::DeadlineReached).unwrap()
    }

    fn periods(&mut self, count: usize, busy: &[ClientId]) {
        for _ in 0..count {
            self.period(busy);
        }
    }

    /// One period in which the owner also ends a cycle of `millis`.
    fn period_with_cycle(&mut self, busy: &[ClientId], millis: u64) {
        self.cycle(OWNER, 1, millis);
        self.period(busy);
    }

    fn tokens(&self, client: ClientId) -> u64 {
        self.scaler.client(client).unwrap().issued_tokens
    }

    fn state(&self, gpu: GpuId) -> ScaleState {
        self.scaler.gpu(gpu).unwrap().state
    }
}

const fn emergency(severity_basis_points: u16) -> ScaleState {
    ScaleState::Emergency { severity_basis_points }
}

/// The example of the scaler's documentation, number by number.
#[test]
fn the_example_of_the_essay() {
    let mut bench = Bench::owner_and_trainer();
    bench.periods(30, &[TRAINER]);
    assert_eq!((bench.tokens(OWNER), bench.tokens(TRAINER)), (1_500, 3_500));
    assert_eq!(bench.state(GPU), ScaleState::Recovery);
    bench.period_with_cycle(&[OWNER, TRAINER], 25);
    assert_eq!(bench.state(GPU), ScaleState::Contention);
    assert_eq!((bench.tokens(OWNER), bench.tokens(TRAINER)), (1_500, 3_500));
    bench.cycle(OWNER, 1, 50);
    let actions = bench.period(&[OWNER, TRAINER]);
    let issue = |client, tokens| VerticalAction::Issue { client, tokens };
    let state = VerticalAction::StateChanged { gpu: GPU, state: emergency(20_000) };
    assert_eq!(actions, [issue(TRAINER, 500), issue(OWNER, 3_000), state]);
    bench.period_with_cycle(&[OWNER, TRAINER], 27);
    assert_eq!(bench.state(GPU), ScaleState::Contention);
    assert_eq!((bench.tokens(OWNER), bench.tokens(TRAINER)), (1_500, 500));
    for _ in 0..4 {
        bench.period_with_cycle(&[OWNER, TRAINER], 27);
    }
    assert_eq!(bench.tokens(TRAINER), 650, "five cycles that were well");
    bench.periods(99, &[TRAINER]);
    assert_eq!((bench.state(GPU), bench.tokens(TRAINER)), (ScaleState::Contention, 650));
    let grown: Vec<_> = (0..3)
        .map(|_| {
            bench.period(&[TRAINER]);
            bench.tokens(TRAINER)
        })
        .collect();
    assert_eq!((bench.state(GPU), grown), (ScaleState::Recovery, vec![845, 1_098, 1_427]));
    bench.periods(10, &[TRAINER]);
    assert_eq!(bench.tokens(TRAINER), 3_500);
}

/// Dilu, Algorithm 2, line 27.
#[test]
fn resolution_01_others_shrink_by_one_plus_delta_t_at_most_four() {
    // dT = 0.8: divided by that, the trainer would gain.
    let mut bench = Bench::owner_and_trainer();
    bench.periods(30, &[TRAINER]);
    bench.period_with_cycle(&[OWNER, TRAINER], 50);
    bench.period_with_cycle(&[OWNER, TRAINER], 90);
    assert_eq!((bench.state(GPU), bench.tokens(TRAINER)), (emergency(18_000), 1_000 * 10 / 18));
    let mut bench = Bench::owner_and_trainer();
    bench.period_with_cycle(&[OWNER, TRAINER], 10);
    bench.period_with_cycle(&[OWNER, TRAINER], 900);
    assert_eq!((bench.state(GPU), bench.tokens(TRAINER)), (emergency(40_000), 250));
}

/// Dilu, Algorithm 2, line 27: once per KLC, not once per period, and not below the floor.
#[test]
fn resolution_02_one_step_per_finished_cycle_down_to_a_floor() {
    let mut bench = Bench::owner_and_trainer();
    bench.periods(30, &[TRAINER]);
    bench.period_with_cycle(&[OWNER, TRAINER], 25);
    bench.period_with_cycle(&[OWNER, TRAINER], 50);
    assert_eq!(bench.tokens(TRAINER), 500);
    bench.periods(50, &[OWNER, TRAINER]);
    assert_eq!(
        (bench.state(GPU), bench.tokens(TRAINER)),
        (emergency(20_000), 500),
        "no new cycle, no new step"
    );
    for _ in 0..15 {
        bench.period_with_cycle(&[OWNER, TRAINER], 50);
    }
    assert_eq!(bench.tokens(TRAINER), 10, "1% of its request of 1000");
    bench.launch(TRAINER, 300, 300);
    bench.period(&[OWNER]);
    assert_eq!(bench.tokens(TRAINER), 300, "its largest kernel of late");
    bench.launch(TRAINER, 90_000, 90_000);
    bench.period(&[OWNER]);
    assert_eq!(bench.tokens(TRAINER), 1_000, "but never more than its request");
}

/// Dilu, section 3.4.1: "only the current instance can reset or modify the EMERGENCY state".
#[test]
fn resolution_03_states_belong_to_owners_and_join_on_the_gpu() {
    let mut bench = Bench::owner_and_trainer();
    let other = ClientId::new(2, 0);
    bench.join(other, GPU, quota(10, 20), PUBLISHED);
    let all = [OWNER, TRAINER, other];
    bench.period_with_cycle(&all, 20);
    bench.cycle(other, 1, 20);
    bench.period_with_cycle(&all, 40);
    assert_eq!(bench.state(GPU), emergency(20_000));
    bench.cycle(other, 1, 20);
    bench.period(&all);
    assert_eq!(bench.state(GPU), emergency(20_000), "the other's good cycle resets nothing");
    bench.cycle(other, 1, 60);
    bench.period(&all);
    assert_eq!(bench.state(GPU), emergency(30_000), "the most severe counts");
    bench.period_with_cycle(&all, 20);
    assert_eq!(bench.state(GPU), emergency(30_000));
    let own = |client| bench.scaler.client(client).unwrap().state;
    assert_eq!(
        (own(OWNER), own(other), own(TRAINER)),
        (ScaleState::Contention, emergency(30_000), ScaleState::None)
    );
    bench.cycle(other, 1, 20);
    bench.period(&all);
    assert_eq!(bench.state(GPU), ScaleState::Contention);
}

/// Limits on a GPU may add up to gamma = 1.5 of it (Dilu, section 3.3).
#[test]
fn resolution_04_owners_in_need_share_by_deficit_and_severity() {
    let mut bench = Bench::new();
    let other = ClientId::new(2, 0);
    bench.join(OWNER, GPU, quota(30, 80), PUBLISHED);
    bench.join(other, GPU, quota(40, 90), PUBLISHED);
    let all = [OWNER, other];
    bench.cycle(other, 1, 20);
    bench.period_with_cycle(&all, 20);
    bench.cycle(other, 1, 80);
    bench.period_with_cycle(&all, 40);
    // 1500 are left over the requests; deficits are 2500 each, severities 2 and 4.
    assert_eq!((bench.tokens(OWNER), bench.tokens(other)), (1_500 + 500, 2_000 + 1_000));
}

/// Dilu, Algorithm 2, line 14 looks at the last KLC even if nothing runs any more.
#[test]
fn resolution_05_an_emergency_ends_within_one_window_of_idleness() {
    let mut bench = Bench::owner_and_trainer();
    bench.period_with_cycle(&[OWNER, TRAINER], 20);
    bench.period_with_cycle(&[OWNER, TRAINER], 80);
    assert_eq!(bench.state(GPU), emergency(40_000));
    bench.periods(99, &[TRAINER]);
    assert_eq!(bench.state(GPU), emergency(40_000), "the window is not over");
    bench.period(&[TRAINER]);
    assert_eq!(bench.state(GPU), ScaleState::Recovery);
    bench.period(&[OWNER, TRAINER]);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "it comes back with a clean slate");
}

/// The same for an owner that goes on launching and never ends another iteration.
#[test]
fn resolution_05_a_cycle_counts_for_a_window_and_its_own_length() {
    let mut bench = Bench::owner_and_trainer();
    bench.period_with_cycle(&[OWNER, TRAINER], 20);
    bench.period_with_cycle(&[OWNER, TRAINER], 80);
    bench.periods(114, &[OWNER, TRAINER]);
    assert_eq!(bench.state(GPU), emergency(40_000));
    bench.period(&[OWNER, TRAINER]);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "500 ms and 80 ms after the cycle");
}

/// Dilu, Algorithm 2, line 19.
#[test]
fn resolution_06_an_owner_alone_grows_from_its_request_to_its_limit() {
    let mut bench = Bench::owner_and_trainer();
    let grown: Vec<_> = (0..4)
        .map(|_| {
            bench.period(&[OWNER]);
            bench.tokens(OWNER)
        })
        .collect();
    assert_eq!(grown, [1_950, 2_535, 3_000, 3_000]);
}

/// Dilu, Algorithm 2, lines 24-25: "without collocation instances".
#[test]
fn resolution_07_none_means_no_owner_and_shares_in_proportion() {
    let mut bench = Bench::new();
    bench.join(TRAINER, GPU, quota(20, 60), ServiceClass::BestEffort);
    bench.period(&[TRAINER]);
    assert_eq!((bench.state(GPU), bench.tokens(TRAINER)), (ScaleState::None, 3_000), "its limit");
    let other = ClientId::new(2, 0);
    bench.join(other, GPU, quota(30, 100), ServiceClass::BestEffort);
    bench.period(&[TRAINER, other]);
    assert_eq!((bench.tokens(TRAINER), bench.tokens(other)), (2_000, 3_000), "2 to 3, not a limit each");
    bench.join(OWNER, GPU, quota(30, 60), PUBLISHED);
    bench.period(&[TRAINER, other]);
    assert_eq!(bench.state(GPU), ScaleState::Recovery);
    bench.handle(VerticalEvent::ClientLeft { client: OWNER }).unwrap();
    bench.period(&[TRAINER, other]);
    assert_eq!(bench.state(GPU), ScaleState::None);
}

/// `T_min` ages and is kept per batch size; cycles too short to measure are not looked at.
#[test]
fn resolution_08_a_larger_batch_is_no_violation_and_minima_age() {
    let mut bench = Bench::owner_and_trainer();
    let both = [OWNER, TRAINER];
    bench.period_with_cycle(&both, 20);
    bench.cycle(OWNER, 32, 200);
    bench.period(&both);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "ten times as long, for another batch size");
    bench.period_with_cycle(&both, 40);
    assert_eq!(bench.state(GPU), emergency(20_000));
    for _ in 0..19 {
        bench.period_with_cycle(&both, 40);
    }
    assert_eq!(bench.state(GPU), ScaleState::Contention, "20 cycles later the lucky one is forgotten");
    bench.period_with_cycle(&both, 9);
    bench.period_with_cycle(&both, 40);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "9 ms is below two periods and no minimum");
    bench.handle(VerticalEvent::QuotaChanged { client: OWNER, quota: quota(20, 60) }).unwrap();
    bench.period_with_cycle(&both, 400);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "another share, other minima");
}

/// Microseconds, not periods: 25 ms and 44 ms are 5 and 9 periods, 1.76; 25.0 and 39.9 are 5 and 8, but 1.596.
#[test]
fn resolution_08_cycles_are_measured_in_microseconds() {
    let mut bench = Bench::owner_and_trainer();
    let iteration = |bench: &mut Bench, micros| {
        let (first_launch, last_launch) =
            (bench.now.saturating_sub(Duration::from_micros(micros)), bench.now);
        let (client, model, batch) = (OWNER, ModelId::new(0), 1);
        bench
            .handle(VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch })
            .unwrap();
        bench.period(&[OWNER, TRAINER]);
    };
    iteration(&mut bench, 25_000);
    iteration(&mut bench, 40_000);
    assert_eq!(bench.state(GPU), ScaleState::Contention, "1.6 is tolerated");
    iteration(&mut bench, 40_003);
    assert_eq!(bench.state(GPU), emergency(16_001));
}

/// An EMERGENCY owner's limit and the others' remaining tokens would exceed the GPU.
#[test]
fn resolution_09_what_shrinks_is_issued_before_what_grows() {
    let mut bench = Bench::owner_and_trainer();
    bench.periods(30, &[TRAINER]);
    bench.period_with_cycle(&[OWNER, TRAINER], 20);
    bench.period_with_cycle(&[OWNER, TRAINER], 60);
    assert_eq!((bench.tokens(OWNER), bench.tokens(TRAINER)), (3_000, 333));
    assert_eq!(bench.peak[&GPU], 5_000, "never 3500 and 3000");
}

/// `R_last` of an instance that has just joined.
#[test]
fn resolution_10_a_newcomer_starts_at_its_request_or_what_is_free() {
    let mut bench = Bench::new();
    bench.join(OWNER, GPU, quota(30, 90), PUBLISHED);
    bench.periods(10, &[OWNER]);
    assert_eq!(bench.tokens(OWNER), 4_500);
    bench.join(TRAINER, GPU, quota(20, 100), ServiceClass::BestEffort);
    assert_eq!(bench.tokens(TRAINER), 0, "issued at the end of the period, not before");
    bench.period(&[OWNER, TRAINER]);
    assert_eq!((bench.tokens(OWNER), bench.tokens(TRAINER)), (1_500, 500), "500 were free");
    let other = ClientId::new(2, 0);
    bench.join(other, GPU, quota(50, 50), PUBLISHED);
    bench.period(&[OWNER, TRAINER]);
    assert_eq!(bench.tokens(other), 2_500);
}

/// Dilu, section 3.4.1, "Kernel Redirect": block while tokens < kernel.
#[test]
fn resolution_11_a_kernel_larger_than_the_tokens_runs_and_is_paid_back() {
    let mut bench = Bench::owner_and_trainer();
    bench.period_with_cycle(&[OWNER, TRAINER], 20);
    for _ in 0..10 {
        bench.period_with_cycle(&[OWNER, TRAINER], 80);
    }
    let floor = bench.scaler.client(TRAINER).unwrap().floor_tokens;
    let kernel = 70_000;
    assert!(kernel > 5_000, "more than the GPU can do in a period");
    let (mut balance, mut waited, mut waits) = (TokenBalance::default(), 0, Vec::new());
    for _ in 0..1_000 {
        let tokens = bench.tokens(TRAINER);
        assert!(tokens >= floor);
        balance.refill(tokens);
        if balance.spend(kernel) {
            waits.push(waited);
            bench.launch(TRAINER, kernel, kernel);
            waited = 0;
        }
        waited += 1;
        bench.period_with_cycle(&[OWNER], 80);
    }
    assert!(waits.len() >= 10, "it runs: {waits:?}");
    assert!(*waits.iter().max().unwrap() <= kernel / 1_000 + 1, "{waits:?}");
}

/// `MaxTokens` is the period in microseconds unless it is calibrated.
#[test]
fn resolution_12_tokens_are_microseconds_unless_they_are_calibrated() {
    let mut bench = Bench::with(DiluVerticalConfig::default());
    let class = PUBLISHED;
    let join = VerticalEvent::ClientJoined { client: OWNER, gpu: GPU, quota: quota(30, 60), class };
    bench.handle(VerticalEvent::Calibrated { gpu: GPU, max_tokens: 1_000_000 }).unwrap();
    bench.handle(join).unwrap();
    bench.period(&[]);
    assert_eq!(bench.tokens(OWNER), 300_000);
    bench.handle(VerticalEvent::Calibrated { gpu: GPU, max_tokens: 2_000_000 }).unwrap();
    assert_eq!(bench.tokens(OWNER), 300_000, "from the next period on");
    bench.period(&[]);
    assert_eq!(bench.tokens(OWNER), 600_000);
    assert_eq!(Bench::owner_and_trainer().scaler.gpu(GPU).unwrap().max_tokens, 5_000);
}

#[test]
fn the_tokens_of_a_client_that_died_are_back_within_one_period() {
    let mut bench = Bench::owner_and_trainer();
    bench.periods(30, &[TRAINER]);
    let other = ClientId::new(2, 0);
    bench.join(other, GPU, quota(50, 50), ServiceClass::BestEffort);
    bench.periods(30, &[TRAINER, other]);
    let held = bench.tokens(other);
    assert!(held >= 1_250 && bench.tokens(TRAINER) < 3_500);
    bench.handle(VerticalEvent::ClientLeft { client: other }).unwrap();
    assert_eq!(bench.scaler.gpu(GPU).unwrap().issued_tokens, 1_500 + bench.tokens(TRAINER), "free at once");
    let before = bench.tokens(TRAINER);
    bench.period(&[TRAINER]);
    assert_eq!(bench.tokens(TRAINER), (before * 13 / 10).min(3_500), "and shared out with the period");
}

#[test]
fn a_gpu_does_not_touch_another() {
    let events = |bench: &mut Bench, with_second: bool| {
        let second = GpuId::new(1);
        let (a, b) = (ClientId::new(5, 0), ClientId::new(6, 0));
        if with_second {
            bench.join(a, second, quota(50, 100), PUBLISHED);
            bench.join(b, second, quota(50, 100), ServiceClass::BestEffort);
        }
        let mut seen = Vec::new();
        for step in 0..300 {
            let mut busy = vec![TRAINER];
            if step % 7 < 4 {
                busy.push(OWNER);
                bench.cycle(OWNER, 1, 20 + step % 5 * 9);
            }
            if with_second {
                busy.extend([a, b]);
                bench.cycle(a, 1, 11 + step % 11 * 13);
            }
            bench.period(&busy);
            seen.push((bench.state(GPU), bench.tokens(OWNER), bench.tokens(TRAINER)));
        }
        seen
    };
    assert_eq!(events(&mut Bench::owner_and_trainer(), true), events(&mut Bench::owner_and_trainer(), false));
}

#[test]
fn what_cannot_be_is_refused_by_name_and_changes_nothing() {
    let mut bench = Bench::owner_and_trainer();
    bench.periods(3, &[TRAINER]);
    let class = ServiceClass::BestEffort;
    let gpu = GPU;
    let other = ClientId::new(2, 0);
    let refused = [
        (
            VerticalEvent::ClientJoined { client: other, gpu, quota: quota(51, 100), class },
            "gpu0: 5050 tokens would be guaranteed in each period, of 5000 (max_tokens)",
        ),
        (
            VerticalEvent::ClientJoined { client: OWNER, gpu, quota: quota(1, 1), class },
            "client0.0 cannot join: slot 0 is taken or its generation is not newer",
        ),
        (
            VerticalEvent::ClientJoined { client: other, gpu: GpuId::new(64), quota: quota(1, 1), class },
            "unknown gpu64: number must be below 64 (max_gpus)",
        ),
        (
            VerticalEvent::ClientJoined { client: ClientId::new(4096, 0), gpu, quota: quota(1, 1), class },
            "client4096.0 cannot join: slot must be below 4096 (max_clients)",
        ),
        (
            VerticalEvent::ClientJoined {
                client: other,
                gpu,
                quota: quota(1, 1),
                class: ServiceClass::SloSensitive { tolerance: BasisPoints::ZERO },
            },
            "client2.0: tolerance is 0, need more than 0 and at most 100%",
        ),
        (
            VerticalEvent::QuotaChanged { client: TRAINER, quota: quota(80, 100) },
            "gpu0: 5500 tokens would be guaranteed in each period, of 5000 (max_tokens)",
        ),
        (
            VerticalEvent::Calibrated { gpu, max_tokens: 0 },
            "max_tokens of gpu0 is 0: need 1 to 1099511627776",
        ),
        (VerticalEvent::ClientLeft { client: ClientId::new(0, 1) }, "unknown client client0.1"),
        (
            VerticalEvent::IterationFinished {
                client: OWNER,
                model: ModelId::new(0),
                batch: 0,
                first_launch: bench.now,
                last_launch: bench.now,
            },
            "client0.0: batch is 0, need more",
        ),
    ];
    let before = (bench.scaler.gpu(GPU), bench.scaler.client(OWNER), bench.scaler.client(TRAINER));
    for (event, message) in refused {
        assert_eq!(bench.handle(event).unwrap_err().to_string(), message);
        let after = (bench.scaler.gpu(GPU), bench.scaler.client(OWNER), bench.scaler.client(TRAINER));
        assert_eq!(after, before);
    }
    let backwards = VerticalEvent::IterationFinished {
        client: OWNER,
        model: ModelId::new(0),
        batch: 1,
        first_launch: bench.now,
        last_launch: bench.now.saturating_sub(Duration::from_nanos(1)),
    };
    assert!(matches!(bench.handle(backwards), Err(VerticalError::BadIteration { .. })));
    bench.now = bench.now.saturating_sub(Duration::from_nanos(1));
    let back = bench.handle(VerticalEvent::DeadlineReached);
    assert!(matches!(back, Err(VerticalError::TimeWentBack { .. })));
}

#[test]
fn a_configuration_out_of_bounds_is_refused_by_field() {
    let refused = |change: fn(&mut DiluVerticalConfig)| {
        let mut config = DiluVerticalConfig::default();
        change(&mut config);
        DiluVertical::new(config).unwrap_err().field
    };
    assert_eq!(refused(|config| config.period = Duration::ZERO), "period");
    assert_eq!(refused(|config| config.window_periods = 0), "window_periods");
    assert_eq!(refused(|config| config.max_clients = 0), "max_clients");
    assert_eq!(refused(|config| config.max_gpus = 0), "max_gpus");
}

/// A generated step. Slots and GPUs are few, so that they meet.
#[derive(Debug, Clone)]
enum Step {
    Join {
        slot: u32,
        gpu: u32,
        request: u16,
        more: u16,
        owner: bool,
    },
    Leave {
        slot: u32,
    },
    Quota {
        slot: u32,
        request: u16,
        more: u16,
    },
    Launch {
        slot: u32,
        tokens: u64,
        kernel: u64,
    },
    Cycle {
        slot: u32,
        batch: u32,
        micros: u64,
    },
    Calibrate {
        gpu: u32,
        max_tokens: u64,
    },
    /// Lets time pass: to the end of the period, or past several.
    Periods {
        count: u64,
        late_micros: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let slot = || 0u32..6;
    prop_oneof![
        3 => (slot(), 0u32..2, 0u16..4_000, 1u16..6_000, any::<bool>())
            .prop_map(|(slot, gpu, request, more, owner)| Step::Join { slot, gpu, request, more, owner }),
        1 => slot().prop_map(|slot| Step::Leave { slot }),
        1 => (slot(), 0u16..4_000, 1u16..6_000)
            .prop_map(|(slot, request, more)| Step::Quota { slot, request, more }),
        8 => (slot(), 0u64..3, 0u64..6_000).prop_map(|(slot, tokens, kernel)| Step::Launch { slot, tokens, kernel }),
        8 => (slot(), 1u32..10, 5_000u64..60_000).prop_map(|(slot, batch, micros)| Step::Cycle { slot, batch, micros }),
        1 => (0u32..2, 1u64..9_000).prop_map(|(gpu, max_tokens)| Step::Calibrate { gpu, max_tokens }),
        10 => Just(Step::Periods { count: 1, late_micros: 0 }),
        2 => (0u64..30, 0u64..6_000).prop_map(|(count, late_micros)| Step::Periods { count, late_micros }),
    ]
}

fn event(step: &Step, generations: &BTreeMap<u32, u32>, now: Timestamp) -> VerticalEvent {
    let id = |slot: u32| ClientId::new(slot, generations.get(&slot).copied().unwrap_or(0));
    let range = |request: u16, more: u16| {
        QuotaRange::new(Quota::new(request).unwrap(), Quota::new(request + more).unwrap()).unwrap()
    };
    match *step {
        Step::Join { slot, gpu, request, more, owner } => VerticalEvent::ClientJoined {
            client: id(slot),
            gpu: GpuId::new(gpu),
            quota: range(request, more),
            class: if owner { PUBLISHED } else { ServiceClass::BestEffort },
        },
        Step::Leave { slot } => VerticalEvent::ClientLeft { client: id(slot) },
        Step::Quota { slot, request, more } => {
            VerticalEvent::QuotaChanged { client: id(slot), quota: range(request, more) }
        }
        Step::Launch { slot, tokens, kernel } => {
            VerticalEvent::UsageReported { client: id(slot), tokens, largest_kernel: kernel }
        }
        Step::Cycle { slot, batch, micros } => VerticalEvent::IterationFinished {
            client: id(slot),
            model: ModelId::new(slot % 2),
            batch,
            first_launch: now.saturating_sub(Duration::from_micros(micros)),
            last_launch: now,
        },
        Step::Calibrate { gpu, max_tokens } => VerticalEvent::Calibrated { gpu: GpuId::new(gpu), max_tokens },
        Step::Periods { .. } => VerticalEvent::DeadlineReached,
    }
}

proptest! {
    /// The engine agrees with the model, and the invariants hold after each action.
    #[test]
    fn the_engine_follows_the_model(
        steps in prop::collection::vec(step(), 1..100),
        window_periods in prop_oneof![Just(100u32), 1u32..8],
    ) {
        let mut config = DiluVerticalConfig::default();
        config.window_periods = window_periods;
        let mut model = model::Model::new(u64::from(window_periods));
        let mut bench = Bench::with(config);
        let mut generations = BTreeMap::new();
        for step in &steps {
            if let (Step::Periods { count, late_micros }, Some(end)) = (step, bench.scaler.next_deadline()) {
                let skipped = PERIOD.saturating_mul(count.saturating_sub(1));
                let by = skipped.saturating_add(Duration::from_micros(*late_micros));
                bench.now = bench.now.max(end.saturating_add(by));
            }
            let event = event(step, &generations, bench.now);
            // A calibration counts from the next period on: until its end, tokens of the old period may be out.
            let allowed: BTreeMap<_, _> = (0..2)
                .map(GpuId::new)
                .map(|gpu| (gpu, bench.scaler.gpu(gpu).map_or(5_000, |gpu| gpu.max_tokens).max(model.last_max(gpu))))
                .collect();
            bench.peak.clear();
            let before = format!("{:?}", bench.scaler);
            match bench.handle(event) {
                Ok(actions) => prop_assert_eq!(model.handle(bench.now, event), actions),
                Err(_) => {
                    prop_assert_eq!(format!("{:?}", bench.scaler), before, "an error changes nothing");
                    continue;
                }
            }
            if let VerticalEvent::ClientLeft { client } = event {
                generations.insert(client.slot(), client.generation() + 1);
            }
            for (gpu, peak) in &bench.peak {
                prop_assert!(*peak <= allowed[gpu], "{peak} tokens were out on {gpu}");
            }
            for (&client, &tokens) in &bench.issued {
                prop_assert!(tokens >= 1, "{client} starves");
            }
        }
    }

    /// Beside an owner of any cycles, a best-effort client launches its next kernel within `kernel / floor` periods and one more.
    #[test]
    fn nobody_starves(
        cycles in prop::collection::vec(10u64..200, 200..400),
        kernel in 1u64..20_000,
        request in 0u16..60,
    ) {
        let mut bench = Bench::new();
        bench.join(OWNER, GPU, quota(40, 100), PUBLISHED);
        bench.join(TRAINER, GPU, quota(request, 100), ServiceClass::BestEffort);
        let (mut balance, mut waited) = (TokenBalance::default(), 0);
        bench.period(&[OWNER, TRAINER]);
        let mut least = u64::MAX;
        for &millis in &cycles {
            let known = bench.scaler.client(TRAINER).unwrap();
            prop_assert!(known.issued_tokens >= (known.guaranteed_tokens / 100).max(1));
            least = least.min(known.issued_tokens);
            balance.refill(known.issued_tokens);
            waited += 1;
            while balance.spend(kernel) {
                waited = 0;
                bench.launch(TRAINER, kernel, kernel);
            }
            prop_assert!(waited <= kernel.div_ceil(least) + 1, "{waited} periods at {least} tokens");
            bench.period_with_cycle(&[OWNER], millis);
        }
    }
}
