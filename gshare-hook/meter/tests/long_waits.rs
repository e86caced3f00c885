//! The reports of long waits to the daemon.

use crate::common::{Behind, Bench, CLIENT, Kernel, MS, limited};
use gshare_core::Timestamp;
use gshare_core::reason::Wait;
use gshare_core::token::ThrottleReason;
use gshare_core::wire::ToClient;

const KERNEL: Kernel = Kernel { function: 0x100, ns: MS };

fn served() -> Bench {
    let bench = Bench::served(limited(50));
    bench.learn(KERNEL.function, KERNEL.ns);
    bench
}

fn throttled(bench: &mut Bench, until_ms: u64) {
    let until = Timestamp::from_nanos((1_000 + until_ms) * MS);
    bench.hear(ToClient::Throttle { client: CLIENT, until, reason: ThrottleReason::LimitReached });
}

#[test]
fn a_wait_is_told_after_ten_milliseconds_once_for_each_reason_and_when_it_is_over() {
    let mut bench = served();
    bench.launches(8, KERNEL);
    bench.run(9 * MS);
    assert_eq!(bench.long_waits(), []);
    bench.run(21 * MS);
    assert_eq!(bench.long_waits(), [(10, Some(Wait::Token))], "once");
    throttled(&mut bench, 60);
    bench.run(50 * MS);
    let limit = [(10, Some(Wait::Token)), (30, Some(Wait::Limit)), (60, Some(Wait::Token))];
    assert_eq!(bench.long_waits(), limit, "a reason that ends by the clock is noticed without an event");
    bench.allow(20 * MS, 60 * MS);
    bench.run(40 * MS);
    assert_eq!(bench.busy, 8 * MS);
    assert_eq!(bench.long_waits()[3..], [(80, None)]);
}

/// Launches always wait for each other, each for a millisecond.
#[test]
fn short_waits_are_not_told_however_many_there_are() {
    let mut bench = served();
    bench.launches(300, KERNEL);
    for _ in 1..=10 {
        bench.run(MS);
        bench.allow(20 * MS, 60 * MS);
        bench.run(21 * MS);
    }
    assert!(bench.busy > 100 * MS && bench.long_waits().is_empty(), "{:?}", bench.long_waits());
}

#[test]
fn a_launch_behind_a_long_kernel_waits_for_room_on_the_device_and_then_for_the_last_token_to_end() {
    let mut bench = served();
    let long = Kernel { function: 0x200, ns: 100 * MS };
    bench.learn(long.function, long.ns);
    bench.launches(3, long);
    bench.run(MS);
    bench.allow(150 * MS, 40 * MS);
    bench.run(60 * MS);
    let waits: Vec<_> = bench.long_waits().into_iter().map(|(_, reason)| reason).collect();
    assert_eq!(waits, [Some(Wait::InFlight), Some(Wait::Draining)], "{:?}", bench.long_waits());
}

#[test]
fn a_launch_that_waits_for_a_measurement_says_so() {
    let mut bench = served();
    bench.measuring = 1;
    bench.run(30 * MS);
    bench.measuring = 0;
    bench.run(20 * MS);
    assert_eq!(bench.long_waits(), [(10, Some(Wait::Measuring)), (30, None)]);
}

#[test]
fn the_next_daemon_is_told_of_a_wait_that_the_last_one_knew() {
    let mut bench = served();
    bench.launches(8, KERNEL);
    bench.run(30 * MS);
    bench.lose(Behind::Daemon);
    bench.run(500 * MS);
    bench.said.clear();
    bench.welcome(limited(50));
    bench.launches(100, KERNEL);
    bench.run(30 * MS);
    assert_eq!(bench.long_waits().len(), 1, "{:?}", bench.long_waits());
}
