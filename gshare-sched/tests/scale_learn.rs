//! The co-scaler in both modes under any history, and its additions to the paper: owners which learn their launching cycles alone.

#[path = "support/scale_vertical.rs"]
mod support;

use gshare_core::{
    ClientId, Duration, Engine as _, GpuId, ModelId, Quota, QuotaRange, ServiceClass, Timestamp,
};
use gshare_sched::scale::{DiluVertical, DiluVerticalConfig, ScaleState, VerticalEvent, VerticalScaler as _};
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

const OWNER: ClientId = ClientId::new(0, 0);
const TRAINER: ClientId = ClientId::new(1, 0);

struct Bench(DiluVertical, Timestamp);

impl Bench {
    fn new(learn: bool) -> Self {
        let mut config = DiluVerticalConfig::default();
        config.learn = learn;
        let mut bench = Self(DiluVertical::new(config).unwrap(), Timestamp::from_millis(1_000));
        let quota = |request, limit| {
            let percent = |percent| Quota::from_percent(percent).unwrap();
            QuotaRange::new(percent(request), percent(limit)).unwrap()
        };
        let gpu = GpuId::new(0);
        let class = ServiceClass::slo_sensitive(60).unwrap();
        bench.tell(VerticalEvent::ClientJoined { client: OWNER, gpu, quota: quota(30, 60), class });
        let class = ServiceClass::BestEffort;
        bench.tell(VerticalEvent::ClientJoined { client: TRAINER, gpu, quota: quota(20, 100), class });
        bench
    }

    fn tell(&mut self, event: VerticalEvent) {
        self.0.handle(self.1, event, &mut Vec::new()).unwrap();
    }

    /// A period in which both launch something.
    fn period(&mut self) {
        for client in [OWNER, TRAINER] {
            self.tell(VerticalEvent::UsageReported { client, tokens: 100, largest_kernel: 1 });
        }
        self.1 = self.0.next_deadline().unwrap();
        self.tell(VerticalEvent::DeadlineReached);
    }

    /// Periods in which the owner launches nothing.
    fn rest(&mut self, periods: usize) {
        for _ in 0..periods {
            let (client, tokens, largest_kernel) = (TRAINER, 100, 1);
            self.tell(VerticalEvent::UsageReported { client, tokens, largest_kernel });
            self.1 = self.0.next_deadline().unwrap();
            self.tell(VerticalEvent::DeadlineReached);
        }
    }

    /// A client with a known cycle of 20 ms alone; the trainer has its request of 1000.
    fn learned() -> Self {
        let mut bench = Self::new(true);
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
        let (client, model, batch, last_launch) = (OWNER, ModelId::new(0), 1, self.1);
        self.tell(VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch });
    }

    fn tokens(&self) -> (u64, u64) {
        let of = |client| self.0.client(client).unwrap().issued_tokens;
        (of(OWNER), of(TRAINER))
    }

    fn state(&self) -> ScaleState {
        self.0.gpu(GpuId::new(0)).unwrap().state
    }
}

#[test]
fn a_neighbour_that_never_rests_is_noticed_only_by_an_owner_that_learns() {
    // Beside the trainer a cycle takes 50 ms, alone 20 ms. As printed, 50 is the shortest there is.
    let mut printed = Bench::new(false);
    for _ in 0..30 {
        printed.cycle(50);
    }
    printed.period();
    assert_eq!(printed.state(), ScaleState::Contention, "never an emergency");
    let mut ours = Bench::new(true);
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
    let mut bench = Bench::new(true);
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
    let mut ours = Bench::new(true);
    ours.period();
    assert_eq!(ours.tokens(), (3_000, 1_000), "the trainer has its request, the owner its limit");
    let mut printed = Bench::new(false);
    printed.period();
    assert_eq!(printed.tokens(), (1_500, 1_000), "2500 tokens are no client's");
    ours.1 = ours.1.saturating_add(Duration::from_secs(1));
    ours.tell(VerticalEvent::DeadlineReached);
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
    bench.tell(VerticalEvent::UsageReported { client: OWNER, tokens: 1_500, largest_kernel: 1 });
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
        bench.tell(VerticalEvent::UsageReported { client: OWNER, tokens: 1, largest_kernel: 0 });
        bench.rest(1);
    }
    assert_eq!(bench.tokens().1, 1_000);

    let mut printed = Bench::new(false);
    printed.cycle(20);
    let before = printed.tokens();
    printed.rest(20);
    assert_eq!(printed.tokens(), before, "as printed, half a second must pass");
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
