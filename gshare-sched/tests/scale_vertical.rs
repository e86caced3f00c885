//! The co-scaler under any history, and owners which learn their launching cycles alone.

#[path = "support/scale_vertical.rs"]
mod support;

use gshare_core::{ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Timestamp};
use gshare_sched::scale::{DiluVertical, Iteration, ScaleState, VerticalError, VerticalScaler as _};
use proptest::prelude::*;

proptest! {
    /// Sums, floors and limits hold after each action; an error changes nothing.
    #[test]
    fn any_history_keeps_the_book(bytes in prop::collection::vec(any::<u8>(), 1..600)) {
        support::run_bytes(&bytes);
    }
}

/// Inputs that once broke the co-scaler, and a few that reach far, as the fuzz target writes them.
#[test]
fn regressions_of_the_fuzz_target_hold() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/regressions/coscale");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        support::run_bytes(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "the regressions lie in {folder}");
}

const GPU: GpuId = GpuId::new(0);
const OWNER: ClientId = ClientId::new(0, 0);
const TRAINER: ClientId = ClientId::new(1, 0);

fn quota(request: u16, limit: u16) -> QuotaRange {
    let percent = |percent| Quota::from_percent(percent).unwrap();
    QuotaRange::new(percent(request), percent(limit)).unwrap()
}

struct Bench(DiluVertical, Timestamp);

impl Bench {
    fn new() -> Self {
        let mut bench = Self(DiluVertical::default(), Timestamp::from_millis(1_000));
        let class = ServiceClass::slo_sensitive(60).unwrap();
        bench.join(OWNER, quota(30, 60), class).unwrap();
        bench.join(TRAINER, quota(20, 100), ServiceClass::BestEffort).unwrap();
        bench
    }

    fn join(
        &mut self,
        client: ClientId,
        quota: QuotaRange,
        class: ServiceClass,
    ) -> Result<(), VerticalError> {
        self.0.join(self.1, client, GPU, quota, class)
    }

    fn used(&mut self, client: ClientId, tokens: u64) {
        self.0.used(self.1, client, tokens);
    }

    fn end_period(&mut self) {
        self.1 = self.0.next_deadline().unwrap();
        self.0.catch_up(self.1);
    }

    /// A period in which both launch something.
    fn period(&mut self) {
        self.used(OWNER, 100);
        self.rest(1);
    }

    /// Periods in which the owner launches nothing.
    fn rest(&mut self, periods: usize) {
        for _ in 0..periods {
            self.used(TRAINER, 100);
            self.end_period();
        }
    }

    /// A client with a known cycle of 20 ms alone; the trainer has its request of 1000.
    fn learned() -> Self {
        let mut bench = Self::new();
        bench.cycle(50);
        (0..3).for_each(|_| bench.period());
        bench.cycle(20);
        bench
    }

    /// A cycle of the owner that takes `millis`, period by period.
    fn cycle(&mut self, millis: u64) {
        let first_launch = self.1;
        for _ in 0..millis / 5 {
            self.period();
        }
        let iteration = Iteration { batch: 1, first_launch, last_launch: self.1 };
        self.0.iterated(self.1, OWNER, iteration).unwrap();
    }

    fn tokens(&self) -> (u64, u64) {
        let of = |client| self.0.client(client).unwrap().issued_tokens;
        (of(OWNER), of(TRAINER))
    }

    fn state(&self) -> ScaleState {
        self.0.gpu(GPU).unwrap().state
    }
}

/// Beside the trainer a cycle takes 50 ms, alone 20 ms. As printed, 50 is the shortest there is, and never an emergency.
#[test]
fn a_neighbour_that_never_rests_is_noticed_by_an_owner_that_learns() {
    let mut ours = Bench::new();
    ours.cycle(50);
    ours.period();
    let (owner, trainer) = ours.tokens();
    assert_eq!((owner, trainer), (3_000, 10), "to the limit, and to the floor, to see what it takes alone");
    ours.period();
    ours.period();
    ours.cycle(20);
    ours.period();
    assert_eq!((ours.tokens().1, ours.state()), (1_000, ScaleState::Contention), "it goes on where it was");
    ours.cycle(50);
    ours.period();
    assert_eq!(ours.state().to_string(), "emergency x2.50");
}

#[test]
fn learning_ends_and_is_not_begun_again_at_once() {
    let mut bench = Bench::new();
    bench.cycle(50);
    let mut quiet = 0;
    for _ in 0..500 {
        bench.period();
        quiet += u32::from(bench.tokens().1 == 10);
    }
    assert!((90..=110).contains(&quiet), "one window of 100 periods, with no cycle that ends: {quiet}");
    bench.cycle(50);
    bench.period();
    assert_eq!(bench.tokens().1, 1_000, "not before half a minute is over");
    bench.rest(6_000);
    bench.cycle(50);
    bench.period();
    assert_eq!(bench.tokens().1, 10, "then it is tried again");
}

#[test]
fn what_nobody_wants_goes_to_a_busy_owner() {
    let mut ours = Bench::new();
    ours.period();
    assert_eq!(ours.tokens(), (3_000, 1_000), "the trainer has its request, the owner its limit");
    ours.1 = ours.1.saturating_add(Duration::from_secs(1));
    ours.0.catch_up(ours.1);
    assert_eq!(ours.tokens().0, 1_500, "an idle owner has what it is promised");
}

#[test]
fn a_queue_puts_up_with_less_of_a_longer_cycle_than_an_owner_that_is_seldom_asked() {
    // 25 % longer than alone, with a tolerance of 60 %.
    let state = |pause: usize, millis: u64| {
        let mut bench = Bench::learned();
        bench.cycle(20);
        bench.rest(pause);
        bench.cycle(millis);
        bench.period();
        bench.state()
    };
    assert_eq!(state(0, 25).to_string(), "emergency x1.25", "5 % are put up with in a queue");
    assert_eq!(state(0, 20), ScaleState::Contention, "never less than that");
    assert_eq!(state(5, 25).to_string(), "emergency x1.25", "it rests half of the time: 23 %");
    assert_eq!(state(10, 25), ScaleState::Contention, "two thirds of the time: 33 %");
    assert_eq!(state(80, 30), ScaleState::Contention, "hardly ever asked: 54 %");
    assert_eq!(state(80, 35).to_string(), "emergency x1.75");
}

#[test]
fn what_others_have_beside_an_owner_follows_how_much_longer_its_cycles_are() {
    let mut bench = Bench::learned();
    let mut after = |millis| {
        bench.cycle(millis);
        bench.period();
        bench.tokens().1
    };
    assert_eq!(after(40), 250, "a quarter of 1000: far more than half of 5 %");
    assert_eq!(after(40), 63);
    assert_eq!(after(20), 252, "four times as much: not longer at all");
    assert_eq!((after(20), after(20)), (1_008, 3_500), "and on, up to what is not guaranteed");
}

#[test]
fn an_owner_that_runs_out_has_its_limit_before_others_have_more() {
    let mut bench = Bench::learned();
    bench.cycle(20);
    bench.period();
    assert_eq!(bench.tokens().1, 3_500);
    bench.used(OWNER, 1_500);
    bench.period();
    assert_eq!(bench.tokens(), (3_000, 2_000));
    bench.cycle(20);
    bench.period();
    assert_eq!(bench.tokens(), (1_500, 3_500), "it uses less again, and its cycle is not longer");
}

#[test]
fn while_the_owner_rests_others_are_lent_what_is_not_guaranteed() {
    let mut bench = Bench::learned();
    bench.rest(80);
    // Half longer, with a tolerance of 54 %: the trainer keeps its tokens.
    bench.cycle(30);
    bench.rest(1);
    assert_eq!(bench.tokens().1, 1_000);
    bench.rest(1);
    assert_eq!(bench.tokens(), (1_500, 3_500), "two periods without a launch");
    bench.rest(10);
    assert_eq!(bench.tokens(), (1_500, 3_500));
    bench.period();
    assert_eq!(bench.tokens().1, 1_000, "back where it was, one period after the launch");
    bench.period();
    // The client is in the middle of an iteration, and waits for tokens.
    for _ in 0..5 {
        bench.used(OWNER, 1);
        bench.rest(1);
    }
    assert_eq!(bench.tokens().1, 1_000);
}

#[test]
fn what_an_emergency_took_is_lent_back_between_the_batches_and_taken_again_with_the_next() {
    let mut bench = Bench::learned();
    bench.cycle(40);
    bench.rest(1);
    assert_eq!(bench.state().to_string(), "emergency x2.00");
    let squeezed = bench.tokens().1;
    assert!(squeezed <= 500, "{squeezed}");
    bench.rest(1);
    assert_eq!(bench.tokens(), (1_500, 3_500));
    bench.period();
    assert_eq!(bench.tokens().1, squeezed);
    // The owner falls silent for good: nothing is taken back.
    bench.cycle(20);
    bench.rest(150);
    assert_eq!((bench.tokens(), bench.state()), ((1_500, 3_500), ScaleState::Recovery));
}

/// The example of the scaler's documentation, number by number.
#[test]
fn the_example_of_the_essay() {
    let mut bench = Bench::new();
    bench.cycle(50);
    bench.period();
    assert_eq!(bench.tokens(), (3_000, 10));
    (0..2).for_each(|_| bench.period());
    bench.cycle(20);
    bench.period();
    assert_eq!(bench.tokens().1, 1_000);
    bench.cycle(50);
    bench.period();
    assert_eq!((bench.state().to_string(), bench.tokens()), ("emergency x2.50".to_owned(), (3_000, 250)));
    bench.cycle(20);
    bench.rest(2);
    assert_eq!(bench.tokens(), (1_500, 3_500));
}

/// Dilu, section 3.4.1: "only the current instance can reset or modify the EMERGENCY state"; Algorithm 2, line 14, looks at the last KLC
/// even if nothing runs any more.
#[test]
fn an_emergency_is_its_owners_and_ends_one_window_and_its_length_after_the_cycle() {
    let mut bench = Bench::learned();
    let other = ClientId::new(2, 0);
    bench.join(other, quota(10, 20), ServiceClass::slo_sensitive(60).unwrap()).unwrap();
    bench.cycle(40);
    bench.used(other, 10);
    bench.period();
    let own = |bench: &Bench, client| bench.0.client(client).unwrap().state.to_string();
    assert_eq!((own(&bench, OWNER), own(&bench, other)), ("emergency x2.00".into(), "contention".into()));
    assert_eq!(bench.state().to_string(), "emergency x2.00", "the worse state is the GPU's");
    (0..106).for_each(|_| bench.period());
    assert_eq!(own(&bench, OWNER), "emergency x2.00");
    bench.period();
    assert_eq!(own(&bench, OWNER), "contention", "500 ms and 40 ms after the cycle");
}

/// Limits on a GPU may add up to gamma = 1.5 of it (Dilu, section 3.3); without an owner each client has its limit, in proportion.
#[test]
fn what_is_wanted_beyond_the_gpu_is_shared_in_proportion() {
    let mut bench = Bench(DiluVertical::default(), Timestamp::from_millis(1_000));
    let other = ClientId::new(2, 0);
    bench.join(TRAINER, quota(20, 60), ServiceClass::BestEffort).unwrap();
    bench.end_period();
    assert_eq!(bench.0.client(TRAINER).unwrap().issued_tokens, 3_000, "its limit");
    bench.join(other, quota(30, 100), ServiceClass::BestEffort).unwrap();
    bench.end_period();
    let of = |bench: &Bench, client| bench.0.client(client).unwrap().issued_tokens;
    assert_eq!((of(&bench, TRAINER), of(&bench, other)), (2_000, 3_000), "2 to 3, not a limit each");
    bench.join(OWNER, quota(30, 60), ServiceClass::SLO_SENSITIVE).unwrap();
    assert_eq!(of(&bench, OWNER), 0, "issued at the end of the period, not before");
    bench.end_period();
    assert_eq!((bench.state(), of(&bench, OWNER)), (ScaleState::Recovery, 1_500));
    bench.0.leave(bench.1, OWNER);
    assert_eq!(
        bench.0.gpu(GPU).unwrap().issued_tokens,
        of(&bench, TRAINER) + of(&bench, other),
        "free at once"
    );
    bench.end_period();
    assert_eq!(bench.state(), ScaleState::None);
}

#[test]
fn what_cannot_be_is_refused_by_name_and_changes_nothing() {
    let mut bench = Bench::new();
    bench.rest(3);
    let (now, other) = (bench.1, ClientId::new(2, 0));
    let before = format!("{:?}", bench.0);
    let refused = |result: Result<(), VerticalError>| result.unwrap_err().to_string();
    let best_effort = ServiceClass::BestEffort;
    assert_eq!(
        refused(bench.join(other, quota(51, 100), best_effort)),
        "gpu0: 5050 tokens would be guaranteed in each period, of 5000 (max_tokens)"
    );
    assert_eq!(refused(bench.join(OWNER, quota(1, 1), best_effort)), "client0.0 cannot join: it is here");
    let none = ServiceClass::SloSensitive { tolerance: gshare_core::BasisPoints::ZERO };
    assert_eq!(
        refused(bench.join(other, quota(1, 1), none)),
        "client2.0: tolerance is 0, need more than 0 and at most 100%"
    );
    assert_eq!(
        refused(bench.0.set_quota(now, TRAINER, quota(80, 100))),
        "gpu0: 5500 tokens would be guaranteed in each period, of 5000 (max_tokens)"
    );
    assert_eq!(refused(bench.0.set_quota(now, other, quota(1, 1))), "unknown client client2.0");
    let iteration = |batch, first_launch| Iteration { batch, first_launch, last_launch: now };
    assert_eq!(refused(bench.0.iterated(now, OWNER, iteration(0, now))), "client0.0: batch is 0, need more");
    let backwards = bench.0.iterated(now, OWNER, iteration(1, now + Duration::from_nanos(1)));
    assert!(matches!(backwards, Err(VerticalError::BadIteration { .. })));
    assert_eq!(format!("{:?}", bench.0), before);
}
