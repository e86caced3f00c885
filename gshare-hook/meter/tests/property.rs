//! Random orders of events: invariants under any frames of a daemon and any actions of a program.

use crate::common::{Behind, Bench, CLIENT, DEVICE, Kernel, MS, limited, with_memory};
use gshare_core::token::ThrottleReason;
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient};
use gshare_core::{Bytes, Duration, GpuId, ResourceSpec, Timestamp};
use gshare_meter::{MeterEvent, Ticket};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// Cost of the longest kernel here, in ns.
const LONGEST: u64 = MS;

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(u64),
    Launch(usize, u64),
    /// An answer for the present turn, or for a finished turn. `lasts: 0` takes the token back.
    Allow {
        back: u32,
        budget: u64,
        lasts: u64,
    },
    Throttle,
    Reserve(u64),
    Release(u64),
    MemoryGrant(u64),
    MemoryDeny,
    Part(u64),
    Recall,
    View,
    AnswerView,
    Change(u16, Option<u64>),
    Welcome,
    Attach,
    Refuse {
        code: u8,
        runs: bool,
    },
    Lose {
        comes_back: bool,
    },
    Probe(bool),
    OfOthers,
}

fn step() -> impl Strategy<Value = Step> {
    let memory = 1..100 * MIB;
    prop_oneof![
        4 => (1_000..20 * MS).prop_map(Step::Pass),
        1 => (20 * MS..6_000 * MS).prop_map(Step::Pass),
        4 => (1usize..20, 1_000..LONGEST).prop_map(|(count, ns)| Step::Launch(count, ns)),
        6 => (0..20 * MS, 0..40 * MS).prop_map(|(budget, lasts)| Step::Allow { back: 0, budget, lasts }),
        1 => (0..20 * MS, 0..40 * MS).prop_map(|(budget, lasts)| Step::Allow { back: 1, budget, lasts }),
        1 => (0u32..2, 0..20 * MS).prop_map(|(back, budget)| Step::Allow { back, budget, lasts: 0 }),
        1 => Just(Step::Throttle),
        2 => memory.clone().prop_map(Step::Reserve),
        2 => memory.clone().prop_map(Step::Release),
        2 => memory.clone().prop_map(Step::MemoryGrant),
        1 => Just(Step::MemoryDeny),
        1 => memory.clone().prop_map(Step::Part),
        1 => Just(Step::Recall),
        1 => Just(Step::View),
        1 => Just(Step::AnswerView),
        1 => (1u16..=100, prop::option::of(memory)).prop_map(|(limit, memory)| Step::Change(limit, memory)),
        3 => Just(Step::Welcome),
        3 => Just(Step::Attach),
        1 => (0u8..6, any::<bool>()).prop_map(|(code, runs)| Step::Refuse { code, runs }),
        1 => any::<bool>().prop_map(|comes_back| Step::Lose { comes_back }),
        1 => any::<bool>().prop_map(Step::Probe),
        1 => Just(Step::OfOthers),
    ]
}

fn spec(limit: u16, memory: Option<u64>) -> ResourceSpec {
    memory.map_or(limited(limit), |bytes| with_memory(limited(limit), bytes))
}

struct Case {
    bench: Bench,
    spec: ResourceSpec,
    asked: Vec<u64>,
}

impl Case {
    fn new(spec: ResourceSpec, on_loss: OnDaemonLoss) -> Self {
        let bench = Bench::new(spec, on_loss, Behind::Daemon);
        Self { bench, spec, asked: vec![0] }
    }

    fn take(&mut self, step: Step) {
        let memory = &self.bench.ground.memory;
        // Bytes held under a limit, in use or not.
        let held = memory.used() + (memory.free_alone() - memory.within_part());
        match step {
            Step::Pass(ns) => self.bench.run(ns),
            Step::Launch(count, ns) => {
                let kernel = Kernel { function: ns << 4, ns };
                self.bench.learn(kernel.function, ns);
                self.bench.launches(count, kernel);
            }
            Step::Allow { back, budget, lasts } => {
                let turn = self.bench.turn.wrapping_sub(back);
                self.bench.allow_up_to(turn, self.bench.used + budget, self.bench.now + lasts);
            }
            Step::Throttle => {
                let until = Timestamp::from_nanos(self.bench.now + 30 * MS);
                let reason = ThrottleReason::LimitReached;
                self.bench.hear(ToClient::Throttle { client: CLIENT, until, reason });
            }
            Step::Reserve(bytes) => {
                let ticket = self.bench.reserve(bytes);
                self.asked.push(ticket);
                let memory = &self.bench.ground.memory;
                if !self.bench.connected
                    && self.bench.answer(ticket) == Some(true)
                    && let Some(limit) = memory.limit()
                {
                    let part = memory.part().map_or(0, Bytes::get);
                    let most = part.min(limit).max(held);
                    assert!(memory.used() <= most, "{} bytes of {most}", memory.used());
                }
            }
            Step::Release(bytes) => {
                let bytes = bytes.min(self.bench.ground.memory.used());
                if let Some(surplus) = self.bench.ground.memory.release(bytes) {
                    self.bench.feed(MeterEvent::MemoryFreed { device: DEVICE, bytes: surplus });
                }
            }
            Step::MemoryGrant(bytes) => {
                self.bench.hear(ToClient::MemoryGrant { client: CLIENT, bytes: Bytes(bytes) });
            }
            Step::MemoryDeny => {
                self.bench.hear(ToClient::MemoryDeny { client: CLIENT, free: Bytes::ZERO });
            }
            Step::Part(bytes) => {
                self.bench.hear(ToClient::MemoryPart { client: CLIENT, bytes: Bytes(bytes) });
            }
            Step::Recall => {
                self.bench.hear(ToClient::MemoryAsk { client: CLIENT, round: 1, recall: 1 });
            }
            Step::View => {
                let ticket = self.bench.view();
                self.asked.push(ticket);
            }
            Step::AnswerView => self.bench.hear(ToClient::MemoryView { client: CLIENT }),
            Step::Change(limit, memory) => {
                self.spec = spec(limit, memory);
                self.bench.hear(ToClient::ShareChanged { client: CLIENT, spec: self.spec });
            }
            Step::Welcome => self.bench.hear(ToClient::Welcome { epoch: 1 }),
            Step::Attach => self.bench.attached(self.spec),
            Step::Refuse { code, runs } => {
                let code = [
                    RefusalCode::DuplicateName,
                    RefusalCode::NotAllowed,
                    RefusalCode::Full,
                    RefusalCode::BadSpec,
                    RefusalCode::UnknownDevice,
                    RefusalCode::Protocol,
                ][usize::from(code)];
                let (text, spec) = (String::new(), self.spec);
                self.bench.hear(if runs {
                    ToClient::Unserved { code, text, spec: Some(spec) }
                } else {
                    ToClient::Refused { code, text }
                });
            }
            Step::Lose { comes_back } => {
                let behind = if comes_back { Behind::Daemon } else { Behind::Nobody };
                if self.bench.connected {
                    self.bench.lose(behind);
                } else {
                    self.bench.behind = behind;
                }
            }
            Step::Probe(answered) => {
                self.bench.feed(if answered { MeterEvent::ProbeAnswered } else { MeterEvent::ProbeFailed });
            }
            Step::OfOthers => {
                let (ordinal, client, gpu) = (9, gshare_core::ClientId::new(77, 1), GpuId::new(4));
                let (window, in_flight) = (Duration::from_millis(10), Duration::ZERO);
                self.bench.hear(ToClient::Attached {
                    ordinal,
                    client,
                    gpu,
                    spec: self.spec,
                    window,
                    in_flight,
                });
                let until = Timestamp::from_nanos(self.bench.now + MS);
                let allowed = Duration::from_millis(500);
                self.bench.hear(ToClient::Allow { client, turn: 0, allowed, until });
            }
        }
    }

    fn check(&mut self) {
        let bench = &self.bench;
        assert!(bench.most_queued <= 4 * MS + LONGEST, "{} ns queued", bench.most_queued);
        for ticket in &self.asked {
            bench.answer(*ticket);
        }
    }
}

proptest! {
    #[test]
    fn what_is_queued_is_bounded_and_questions_are_answered_once(
        steps in prop::collection::vec(step(), 1..120),
        limit in 1u16..=100,
        memory in prop::option::of(1..200 * MIB),
        closed in any::<bool>(),
    ) {
        let on_loss = if closed { OnDaemonLoss::Closed } else { OnDaemonLoss::Open };
        let mut case = Case::new(spec(limit, memory), on_loss);
        for step in steps {
            case.take(step);
            case.check();
        }
        // Then the daemon is gone, and the process ends.
        let leaves = case.bench.number();
        case.asked.push(leaves);
        case.bench.feed(MeterEvent::Leaving { ticket: Ticket(leaves) });
        case.take(Step::Pass(200 * MS));
        prop_assert_eq!(case.bench.answer(leaves), Some(true));
        if case.bench.connected {
            case.bench.lose(Behind::Nobody);
        }
        case.bench.behind = Behind::Nobody;
        case.take(Step::Pass(6_000 * MS));
        case.check();
        for ticket in &case.asked {
            prop_assert!(case.bench.answer(*ticket).is_some(), "question {} has no answer", ticket);
        }
        prop_assert!(case.bench.used <= case.bench.busy, "{} ns reported of {}", case.bench.used, case.bench.busy);
    }
}
