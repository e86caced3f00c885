//! Costs, intervals, launching cycles and the memory account, each by itself.

use gshare_core::Bytes;
use gshare_meter::MemoryAccount;
use gshare_meter::cost::{self, CostTable, SUSPECTS, Suspicion, shape, surely};
use gshare_meter::coverage::{Behind, Coverage, Overlap, Turns};
use gshare_meter::cycle::{Cycle, Cycles};
use gshare_meter::segment::Work;
use proptest::prelude::*;

// ---- cost -----------------------------------------------------------------------------------------------------------

#[test]
fn first_sample_is_taken_as_it_is_and_a_disturbed_one_is_forgotten() {
    let table = CostTable::new();
    let (row, known) = table.find(0x1000, shape(64));
    assert_eq!(known, None);
    let mut seen = Vec::new();
    for sample in [1000, 1000, 9000, 1000, 1000] {
        table.learn(row, sample);
        seen.push(table.find(0x1000, shape(64)).1.unwrap());
    }
    assert_eq!(seen, [1000, 1000, 3000, 2000, 1500]);
}

#[test]
fn samples_that_may_be_too_long_are_believed_only_when_many_agree_and_then_the_least() {
    let mut suspicion = Suspicion::default();
    let samples: Vec<u64> = (0..u64::from(SUSPECTS)).map(|n| 4_000 + (n * 7 + 3) % 11).collect();
    let least = samples.iter().min().copied();
    let proven: Vec<Option<u64>> = samples.iter().map(|&sample| suspicion.add(sample, false)).collect();
    assert_eq!(proven.last(), Some(&least));
    assert!(proven[..proven.len() - 1].iter().all(Option::is_none), "{proven:?}");
    assert_eq!(suspicion.add(9_000, false), None, "and the count begins again");
    assert!(Suspicion::of_first(true).cost_itself && !Suspicion::default().cost_itself);
    assert_eq!(surely(64_000_000, 500_000), 63_500_000, "all of them may hold the end of another's turn");
    assert_eq!(surely(6_400_000, 500_000), 6_300_000, "but no kernel is taken for much less than it is");
}

#[test]
fn functions_and_sizes_have_rows_of_their_own() {
    let table = CostTable::new();
    for handle in 1..=200u64 {
        for size in [1u64, 1 << 10, 1 << 20] {
            let (row, _) = table.find(handle << 8, shape(size));
            table.learn(row, handle * 10 + size.trailing_zeros() as u64);
        }
    }
    for handle in 1..=200u64 {
        for size in [1u64, 1 << 10, 1 << 20] {
            let known = table.find(handle << 8, shape(size)).1;
            assert_eq!(known, Some(handle * 10 + size.trailing_zeros() as u64));
        }
    }
}

#[test]
fn functions_that_nobody_launches_any_more_make_room_for_new_ones() {
    let table = CostTable::new();
    let ours: Vec<u64> = (1..=50).map(|n| n << 20).collect();
    // A program with just-in-time compilation: 200,000 functions launched once each, and fifty functions launched all the time.
    for handle in 0..200_000u64 {
        let (row, known) = table.find(handle << 4 | 8, 0);
        assert_eq!(known, None, "a row that was another's says nothing about function {handle}");
        table.learn(row, 7);
        for &own in ours.iter().filter(|_| handle % 100 == 0) {
            let (row, known) = table.find(own, 0);
            assert!(handle == 0 || known == Some(own), "{known:?} for {own} after {handle}");
            table.learn(row, own);
        }
    }
}

#[test]
fn so_many_launches_are_measured_for_a_doubt() {
    let table = CostTable::new();
    let (row, _) = table.find(0x1000, shape(64));
    table.doubt(row);
    assert!(!table.is_doubted(row) && !table.take_doubt(row), "nothing is known that could be doubted");
    table.learn(row, 1000);
    table.doubt(row);
    assert!(table.is_doubted(row));
    assert_eq!((0..9).filter(|_| table.take_doubt(row)).count(), cost::MEASURED_FOR_A_DOUBT as usize);
    assert!(table.is_doubted(row), "until that launch was measured");
    table.not_measured(row);
    assert!(!table.is_doubted(row));
}

#[test]
fn a_handle_that_is_gone_is_unknown_again() {
    let table = CostTable::new();
    let (row, _) = table.find(0x10, 0);
    table.probe(row);
    table.learn(row, 5);
    table.forget(0x10, 0);
    assert_eq!((table.known(row), table.probes(row)), (None, 0));
}

#[test]
fn what_is_known_stays_when_a_handle_goes_that_was_never_launched_here() {
    let table = CostTable::new();
    // Enough functions to fill the table.
    let rows: Vec<_> = (0..200_000u64).map(|handle| table.find(handle << 4 | 8, 0).0).collect();
    rows.iter().for_each(|&row| table.learn(row, 7));
    (200_000..300_000u64).for_each(|handle| table.forget(handle << 4 | 8, 0));
    assert!(rows.iter().all(|&row| table.known(row) == Some(7)));
}

/// Checks the numbers in the essays for the first estimate and for a change of a cost.
#[test]
fn an_unknown_function_is_taken_for_half_a_millisecond_and_eight_samples_change_a_cost() {
    assert_eq!(CostTable::new().guess(), 500_000);
    for (outside, samples) in [(false, 8), (true, 32)] {
        let mut suspicion = Suspicion::default();
        let believed = (1..).find(|_| suspicion.add(4_000, outside).is_some());
        assert_eq!(believed, Some(samples), "from other processes' turns: {outside}");
    }
}

proptest! {
    #[test]
    fn shape_rises_with_size_and_one_shape_spans_at_most_a_quarter(a in 0u64..1 << 50, b in 0u64..1 << 50) {
        let (low, high) = (a.min(b), a.max(b));
        prop_assert!(shape(low) <= shape(high));
        if shape(low) == shape(high) && low >= 8 {
            prop_assert!(high - low <= low / 4, "{low} {high}");
        }
    }

    #[test]
    fn cost_stays_between_the_smallest_and_the_largest_sample(samples in prop::collection::vec(0u64..1 << 31, 1..40)) {
        let table = CostTable::new();
        let (row, _) = table.find(1, 1);
        for &sample in &samples {
            table.learn(row, sample);
        }
        let known = table.known(row).unwrap();
        prop_assert!(samples.iter().min().unwrap() <= &known && &known <= samples.iter().max().unwrap());
    }
}

// ---- intervals ------------------------------------------------------------------------------------------------------

#[test]
fn overlapping_streams_are_merged_not_summed() {
    let mut coverage = Coverage::new();
    assert_eq!(covered(&mut coverage, 0, 10), 10);
    assert_eq!(covered(&mut coverage, 5, 12), 2);
    assert_eq!(covered(&mut coverage, 3, 7), 0);
}

/// All of an interval.
fn covered(coverage: &mut Coverage, start: u64, end: u64) -> u64 {
    let room = coverage.room(start, end);
    let growth = coverage.add(start, end, end - start, u64::MAX);
    assert_eq!(growth, room);
    growth
}

#[test]
fn what_streams_that_ran_dry_took_is_added_up_as_long_as_it_fits() {
    let mut coverage = Coverage::new();
    let mut taken = |start, end, amount| coverage.add(start, end, amount, u64::MAX);
    assert_eq!([taken(20, 30, 4), taken(20, 30, 4), taken(20, 30, 4)], [4, 4, 2]);
    // Half of [40, 60) is full, so a work of 12 in [30, 60) fits beside it.
    assert_eq!([taken(40, 60, 20), taken(30, 60, 12), taken(0, 60, 100)], [20, 10, 20]);
    assert_eq!(taken(0, 60, 100), 0, "all of it is taken");
}

#[test]
fn what_runs_for_long_is_covered_however_much_comes_and_goes_beside_it() {
    let mut coverage = Coverage::new();
    let second = 1_000_000_000;
    // A kernel of ten seconds from the start, and short kernels on another stream.
    let beside: u64 =
        (0..100).map(|n| coverage.add(n * second / 10, n * second / 10 + 1_000_000, 1_000_000, 0)).sum();
    assert_eq!(beside + coverage.add(0, 10 * second, 10 * second, u64::MAX), 10 * second);
}

/// A stream looked at a second late.
#[test]
fn a_straggler_of_the_last_two_seconds_takes_its_time() {
    let mut coverage = Coverage::new();
    let ms = 1_000_000;
    let mut add = |start, end| coverage.add(start * ms, end * ms, (end - start) * ms, u64::MAX) / ms;
    assert_eq!([add(0, 1), add(100, 101), add(1_900, 1_901)], [1, 1, 1]);
    assert_eq!(add(1, 3), 2);
    assert_eq!([add(5_000, 5_001), add(1_000, 1_001)], [1, 0], "too late");
}

#[test]
fn a_stream_that_ran_dry_is_charged_its_prediction_at_most() {
    let work = |length, whole| Work { length, most: length, whole };
    assert_eq!(work(900, false).taken(300, true), 300);
    assert_eq!(work(200, false).taken(300, true), 200);
    assert_eq!(work(900, true).taken(300, true), 900);
    assert_eq!(work(900, true).taken(300, false), 300, "another process's time may be in it");
}

proptest! {
    /// Compares with a bitmap of the time line.
    #[test]
    fn growths_sum_to_the_union_in_any_order(intervals in prop::collection::vec((0usize..300, 0usize..60), 0..40)) {
        let mut coverage = Coverage::new();
        let mut line = [false; 400];
        for (start, length) in intervals {
            let before = line.iter().filter(|&&covered| covered).count();
            line[start..start + length].fill(true);
            let after = line.iter().filter(|&&covered| covered).count();
            prop_assert_eq!(covered(&mut coverage, start as u64, (start + length) as u64), (after - before) as u64);
        }
    }

    /// A growth never exceeds the room or the request, in any order, and is no smaller where there is room.
    #[test]
    fn what_segments_take_fits(segments in prop::collection::vec((0u64..300, 1u64..60, 0u64..60), 0..40)) {
        let mut coverage = Coverage::new();
        let mut total = 0;
        for (start, length, amount) in segments {
            let amount = amount.min(length);
            let room = coverage.room(start, start + length);
            let growth = coverage.add(start, start + length, amount, u64::MAX);
            // Parts of a piece are whole ns.
            prop_assert!(growth <= amount && growth + 60 >= amount.min(room), "{growth} of {amount}, room {room}");
            total += growth;
        }
        prop_assert_eq!(coverage.room(0, 400) + total, 400);
    }

    /// Far stragglers are not counted twice, and memory stays bounded: the sum never exceeds the union.
    #[test]
    fn growth_never_passes_the_union_over_long_times(
        intervals in prop::collection::vec((0u64..20_000_000_000, 0u64..500_000_000), 0..60),
    ) {
        let mut coverage = Coverage::new();
        let total: u64 = intervals.iter().map(|&(start, length)| coverage.add(start, start + length, length, u64::MAX)).sum();
        let mut sorted = intervals.clone();
        sorted.sort_unstable();
        let (mut union, mut end) = (0, 0);
        for (start, length) in sorted {
            let (from, to) = (start.max(end), start + length);
            union += to.saturating_sub(from);
            end = end.max(to);
        }
        prop_assert!(total <= union);
    }
}

#[test]
fn short_work_is_charged_the_part_that_it_covered_when_all_of_it_was_measured() {
    let mut overlap = Overlap::default();
    let ms = 1_000_000;
    assert!(!overlap.look(ms, 1), "no other thread");
    assert!(overlap.look(2 * ms, 4) && overlap.look(3 * ms, 4));
    assert_eq!(overlap.of(80), 80, "nothing is known");
    // Three of four simultaneous segments cover nothing new.
    (0..8).for_each(|n| overlap.seen(3 * ms, 80, if n % 4 == 0 { 80 } else { 0 }));
    overlap.seen(ms, 1_000, 1_000);
    assert!(!overlap.look(7 * ms, 4));
    assert_eq!(overlap.of(80), 20);
    // In the next window, two of four segments do.
    assert!(overlap.look(103 * ms, 4));
    (0..8).for_each(|n| overlap.seen(104 * ms, 80, if n % 2 == 0 { 80 } else { 0 }));
    assert!(!overlap.look(108 * ms, 4));
    assert_eq!(overlap.of(80), 30, "half-way");
    assert!(!overlap.look(109 * ms, 1));
    assert_eq!(overlap.of(80), 80);
}

#[test]
fn what_a_turn_waits_for_the_one_before_does_not_add_up() {
    let (kernel, early) = (30_000_000_u64, 500_000);
    let mut behind = [Behind::default(); 3];
    let (mut launched, mut free) = (0, 0);
    for turn in 0..300 {
        let own = &mut behind[turn % 3];
        let waited = u64::saturating_sub(free, launched);
        // Otherwise each turn would wait a third of a millisecond longer, up to 100 ms.
        assert!(waited < 4 * early, "{waited} ns in turn {turn}");
        free = launched.max(free) + kernel;
        let handed_over = (launched + own.most() + kernel - early).min(free);
        own.seen(waited.min(early));
        launched = handed_over + 100_000 + (turn as u64 * 7_919) % 100_000;
    }
}

#[test]
fn what_turns_waited_for_is_forgotten_by_a_quarter_with_each_turn() {
    let mut behind = Behind::default();
    let most = [400, 0, 0, 350, 0].map(|waited| {
        behind.seen(waited);
        behind.most()
    });
    assert_eq!(most, [400, 300, 225, 350, 263]);
}

#[test]
fn a_turn_in_sixteen_ends_before_it_is_handed_over_and_no_other_says_what_its_last_work_took() {
    let mut turns = Turns::default();
    let ended: Vec<u64> =
        (0..40).filter(|&turn| (turns.ends_first(), turns.hand_over(turn * 1_000)).0).collect();
    assert_eq!(ended, [0, 1, 2, 3, 16, 32]);
    // The last handover was at 39,000.
    assert!(turns.outlasted(38_900, 39_400));
    assert!(!turns.outlasted(38_000, 38_900), "over before");
    assert!(!turns.outlasted(41_000, 42_000), "of the next turn");
}

// ---- memory ---------------------------------------------------------------------------------------------------------

#[test]
fn a_limit_is_reserved_granted_and_given_back() {
    let account = MemoryAccount::new(16 << 30);
    assert_eq!(account.view(10 << 30, 16 << 30), (10 << 30, 16 << 30));
    account.limit_to(Some(Bytes(256 << 20)));
    assert_eq!(account.reserve(1 << 20), Err(1 << 20));
    account.grant(Bytes(256 << 20));
    assert_eq!(account.reserve(200 << 20), Ok(()));
    assert_eq!(account.reserve(100 << 20), Err(44 << 20));
    assert_eq!(account.view(10 << 30, 16 << 30), (56 << 20, 256 << 20));
    let surplus = account.release(200 << 20).expect("much is idle");
    assert_eq!(account.used(), 0);
    assert!(surplus.0 >= 200 << 20, "{surplus}");
}

#[test]
fn the_view_leaves_out_what_the_other_processes_of_the_instance_use() {
    let account = MemoryAccount::new(16 << 30);
    account.limit_to(Some(Bytes(1_000)));
    account.grant(Bytes(100));
    account.reserve(100).unwrap();
    account.set_siblings(vec![(7, 250), (8, 50)]);
    assert_eq!((account.used_by_all(), account.view(1 << 30, 16 << 30)), (400, (600, 1_000)));
    account.set_siblings(vec![(7, 250)]);
    assert_eq!(account.view(1 << 30, 16 << 30), (650, 1_000));
}

#[test]
fn memory_of_other_instances_is_free_for_a_process_whose_memory_can_move_unless_they_keep_it() {
    let account = MemoryAccount::new(1_000);
    account.limit_to(Some(Bytes(900)));
    account.grant(Bytes(100));
    account.reserve(100).unwrap();
    assert_eq!(account.free_in_turns(70, 1_000), 70, "no daemon has said so");
    account.set_kept(Some(0));
    assert_eq!(account.free_in_turns(70, 1_000), 900);
    account.set_kept(Some(300));
    account.set_siblings(vec![(7, 50)]);
    assert_eq!((account.free_in_turns(70, 1_000), account.used_by_all()), (550, 150));
    account.set_kept(None);
    assert_eq!(account.free_in_turns(70, 1_000), 70);
}

#[test]
fn a_process_is_alone_while_the_connected_daemon_gives_it_the_whole_limit() {
    let account = MemoryAccount::new(16 << 30);
    account.limit_to(Some(Bytes(1_000)));
    assert!(!account.is_alone(), "no daemon has said so");
    account.set_siblings(vec![(7, 250)]);
    account.set_part(Bytes(1_000));
    assert!(account.is_alone());
    assert_eq!(account.view(1 << 30, 16 << 30), (1_000, 1_000), "a former sibling counts no more");
    account.set_part(Bytes(500));
    assert!(!account.is_alone(), "a sibling came");
    account.set_part(Bytes(1_000));
    account.restate();
    assert!(!account.is_alone(), "the next daemon has not said so");
    account.set_part(Bytes(1_000));
    account.limit_to(None);
    assert!(!account.is_alone(), "no limit is divided");
}

#[test]
fn the_view_never_goes_below_zero() {
    let account = MemoryAccount::new(1 << 30);
    account.reserve(500).unwrap();
    account.limit_to(Some(Bytes(100)));
    assert_eq!(account.view(1 << 30, 1 << 30), (0, 100));
}

// ---- cycles ---------------------------------------------------------------------------------------------------------

/// Dilu, section 3.4.1: a launching cycle goes from the first to the last launch of an iteration.
#[test]
fn a_cycle_goes_from_its_first_launch_to_the_call_that_waits_for_it() {
    let ms = |n: u64| n * 1_000_000;
    let mut cycles = Cycles::default();
    assert_eq!(cycles.look(ms(1), 0, 4, false), None, "a wait for nothing");
    assert_eq!(cycles.look(ms(2), 3, 4, false), None);
    assert_eq!(cycles.look(ms(20), 3, 4, true), None, "a thread waits for credit: no pause");
    assert_eq!(cycles.look(ms(21), 7, 4, false), None);
    assert_eq!(cycles.look(ms(22), 7, 5, false), Some(Cycle { first: ms(2), last: ms(21), launches: 7 }));
    assert_eq!(cycles.look(ms(23), 7, 6, false), None, "it is told once");
    assert_eq!(cycles.look(ms(30), 9, 6, false), None);
    assert_eq!(cycles.look(ms(35), 9, 6, false), None);
    let polled = Some(Cycle { first: ms(30), last: ms(30), launches: 2 });
    assert_eq!(cycles.look(ms(36), 9, 6, false), polled, "a program that never waits");
}
