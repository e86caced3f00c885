//! The lazy list by CV against lists made by brute force.

use crate::support::*;
use gshare_core::dag::{Component, ComponentSet, Dag};
use gshare_core::{Bytes, Duration};
use gshare_sched::pipeline::{Goal, HandOff, Mode, PartitionConfig, Partitioner};
use proptest::prelude::*;

const MODES: [Mode; 3] = [Mode::SeriesCut, Mode::IdealChain, Mode::AcyclicQuotient];

fn goal() -> Goal {
    Goal::default().with_hand_off(ONE_PER_BYTE)
}

fn partitioner(mode: Mode) -> Partitioner {
    Partitioner::new(PartitionConfig::default().with_mode(mode)).unwrap()
}

/// Compares the two lists to the last tie; answers their length.
fn compare(dag: &Dag, mode: Mode) -> usize {
    let ranked = partitioner(mode).by_cv(dag, &goal()).unwrap();
    assert_eq!((ranked.mode, ranked.fell_back), (mode, None));
    let lazy: Vec<_> = ranked.pipelines.collect();
    let listed = list(dag, mode, &ONE_PER_BYTE, true);
    for (place, (lazy, listed)) in lazy.iter().zip(&listed).enumerate() {
        assert_eq!(stages_of(lazy), listed.stages, "{mode}, place {place} of {}", listed.cuts.len());
        assert_eq!(lazy.balance, listed.balance);
    }
    assert_eq!(lazy.len(), listed.len(), "{mode}");
    lazy.len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_chain_is_listed_as_by_brute_force_in_every_mode(times in times(1..=10usize)) {
        let dag = chain_of(&times);
        for mode in MODES {
            prop_assert_eq!(compare(&dag, mode), 1 << (times.len() - 1));
        }
    }

    #[test]
    fn a_random_dag_is_listed_as_by_brute_force_in_every_mode(dag in random_dag(9)) {
        for mode in MODES {
            // The widest have millions of chains: too many to list by brute force, not to count.
            if mode != Mode::IdealChain || count_chains(&dag) <= 20_000 {
                compare(&dag, mode);
            }
        }
    }

    #[test]
    fn every_mode_has_all_pipelines_of_the_one_before(dag in random_dag(7)) {
        prop_assume!(count_chains(&dag) <= 5_000);
        let sets = |mode| -> std::collections::BTreeSet<Vec<ComponentSet>> {
            let sorted = |stages: &Stages| {
                let mut blocks: Vec<ComponentSet> = stages.iter().flatten().copied().collect();
                blocks.sort();
                blocks
            };
            let config = PartitionConfig::default().with_mode(mode);
            let ranked = Partitioner::new(config).unwrap().by_cv(&dag, &goal()).unwrap();
            ranked.pipelines.map(|pipeline| sorted(&stages_of(&pipeline))).collect()
        };
        let [series, chains, quotients] = MODES.map(sets);
        prop_assert_eq!(&chains, &quotients, "chains differ from quotients only in the order of stages");
        prop_assert!(series.is_subset(&quotients), "spread branches are blocks side by side");
    }
}

#[test]
fn chains_of_11_to_14_are_listed_as_by_brute_force() {
    for n in 11..=14u64 {
        let even: Vec<u64> = (0..n).map(|_| 7).collect();
        let few: Vec<u64> = (0..n).map(|i| 1 + i * i % 3).collect();
        let many: Vec<u64> = (0..n).map(|i| 1_000_003 * (i * 7 % 11 + 1) % 997 + 1).collect();
        for times in [even, few, many] {
            assert_eq!(compare(&chain_of(&times), Mode::SeriesCut), 1 << (n - 1));
        }
    }
}

fn edges(pairs: &[(usize, usize)]) -> Vec<(usize, usize, u64)> {
    pairs.iter().map(|&(from, to)| (from, to, 1)).collect()
}

/// FluidFaaS, section 5.2.2: a sequence of five models has 2^4 partitions. Figure 7's DAG is 1, 2 -> 3 -> 4 -> 5.
#[test]
fn the_modes_have_as_many_pipelines_as_counted_by_hand() {
    let two_chains: Vec<(usize, usize)> =
        vec![(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6), (3, 7), (6, 7)];
    #[rustfmt::skip]
    let table = [
        ("chain of 5", 5, vec![(0, 1), (1, 2), (2, 3), (3, 4)], [16, 16]),
        ("application 3", 5, vec![(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)], [16, 16]),
        ("Figure 7", 5, vec![(0, 2), (1, 2), (2, 3), (3, 4)], [24, 20]),
        ("diamond", 4, vec![(0, 1), (0, 2), (1, 3), (2, 3)], [12, 11]),
        ("if and else", 6, vec![(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5)], [48, 44]),
        ("fork of three", 6, vec![(0, 1), (1, 2), (1, 3), (1, 4), (2, 5), (3, 5), (4, 5)], [104, 76]),
        ("two chains of 3", 8, two_chains, [1_008, 565]),
        ("no edges", 4, vec![], [75, 15]),
    ];
    for (name, n, pairs, expected) in table {
        let dag = dag_of(&vec![3; n], &edges(&pairs));
        let count = |mode| {
            let config = PartitionConfig::default().with_mode(mode);
            Partitioner::new(config).unwrap().by_cv(&dag, &goal()).unwrap().pipelines.count()
        };
        let counts = [count(Mode::IdealChain), count(Mode::AcyclicQuotient)];
        assert_eq!(counts, expected, "{name}");
    }
}

#[test]
fn application_3_of_the_paper_is_a_chain_whose_branch_counts_its_share() {
    // Deblur, super-resolution for 40 %, background removal, segmentation, classification; the bypass is transitive.
    let pairs = edges(&[(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)]);
    let dag = dag_with_runs(&[40, 100, 30, 20, 10], &[10_000, 4_000, 10_000, 10_000, 10_000], &pairs);
    assert_eq!(compare(&dag, Mode::SeriesCut), 16);
    let first = partitioner(Mode::SeriesCut).by_cv(&dag, &goal()).unwrap().pipelines.nth(1).unwrap();
    assert_eq!(first.balance.total, 140, "40 + 0.4 * 100 + 30 + 20 + 10");
}

#[test]
fn the_worked_example_comes_in_the_order_of_the_essay() {
    let dag = chain_of(&[2, 3, 4, 1]);
    let list: Vec<String> = partitioner(Mode::SeriesCut)
        .by_cv(&dag, &goal())
        .unwrap()
        .pipelines
        .map(|pipeline| {
            let time = |stage: &Vec<ComponentSet>| {
                stage[0].iter().map(|one| [2, 3, 4, 1][one]).sum::<u64>().to_string()
            };
            stages_of(&pipeline).iter().map(time).collect::<Vec<_>>().join("|")
        })
        .collect();
    assert_eq!(list, ["10", "5|5", "2|3|5", "2|3|4|1", "5|4|1", "2|8", "2|7|1", "9|1"]);
}

#[test]
fn a_fork_may_run_its_branches_side_by_side_and_lasts_as_long_as_the_longest() {
    // 0 -> (1 | 2) -> 3, branches of 6 and 4.
    let dag = dag_of(&[5, 6, 4, 7], &edges(&[(0, 1), (0, 2), (1, 3), (2, 3)]));
    let all = partitioner(Mode::SeriesCut).by_cv(&dag, &goal()).unwrap().pipelines;
    let spread: Vec<_> = all.filter(|pipeline| pipeline.parts.len() > pipeline.stages() as usize).collect();
    assert_eq!(spread.len(), 1, "only where the fork is a stage of its own");
    assert_eq!(stages_of(&spread[0])[1].len(), 2);
    assert_eq!(spread[0].balance, gshare_sched::pipeline::Balance::of([5, 6, 7].map(Duration::from_nanos)));
}

#[test]
fn more_forks_than_are_tried_both_ways_still_make_a_list() {
    // Twelve diamonds in a row.
    let pairs: Vec<(usize, usize)> = (0..12)
        .flat_map(|d| {
            [(3 * d, 3 * d + 1), (3 * d, 3 * d + 2), (3 * d + 1, 3 * d + 3), (3 * d + 2, 3 * d + 3)]
        })
        .collect();
    let dag = dag_of(&[3; 37], &edges(&pairs));
    let most = partitioner(Mode::SeriesCut).by_cv(&dag, &goal()).unwrap().pipelines.take(3_000);
    let mut last = None;
    for pipeline in most {
        let spread = pipeline.parts.len() - pipeline.stages() as usize;
        assert!(spread <= 6);
        assert!(last.is_none_or(|last| last <= pipeline.balance.cv()), "in order");
        last = Some(pipeline.balance.cv());
    }
}

#[test]
fn a_width_that_explodes_falls_back_to_series_cuts_and_says_so() {
    // 60 components without an edge have 2^60 ideals.
    let dag = dag_of(&[3; 60], &[]);
    for mode in [Mode::IdealChain, Mode::AcyclicQuotient] {
        let ranked = partitioner(mode).by_cv(&dag, &goal()).unwrap();
        assert_eq!(ranked.mode, Mode::SeriesCut);
        let why = ranked.fell_back.unwrap();
        assert_eq!(why.to_string(), format!("{mode} has more than 20000 ideals (max_ideals)"));
        assert_eq!(ranked.pipelines.count(), 2, "all on one slice, or each on its own");
    }
    // 14 have 16384 ideals, but 3^14 possible stages.
    let dag = dag_of(&[3; 14], &[]);
    let ranked = partitioner(Mode::IdealChain).by_cv(&dag, &goal()).unwrap();
    assert_eq!(ranked.fell_back.unwrap().what, "possible stages");
}

#[test]
fn the_largest_dag_with_the_longest_times_is_listed() {
    let hour = gshare_core::dag::MAX_TIME.as_nanos();
    let dag = chain_of(&[hour; 128]);
    let ranked = partitioner(Mode::IdealChain).by_cv(&dag, &goal()).unwrap();
    let cvs: Vec<f64> = ranked.pipelines.take(500).map(|pipeline| pipeline.balance.cv()).collect();
    assert!(cvs.windows(2).all(|pair| pair[0] <= pair[1]));
    assert!(cvs[..7].iter().all(|cv| *cv == 0.0), "1, 2, 4, ... 64 equal stages");
}

#[test]
fn a_missing_reference_profile_is_refused_by_name() {
    let on = |name: &str, slice: &str| {
        Component::new(name).with_profile(slice, 1, Duration::from_millis(1), Bytes::from_mib(1))
    };
    let dag = Dag::builder("").component(on("a", "1g.10gb")).component(on("b", "2g.20gb")).build().unwrap();
    let refused = |goal: Goal| partitioner(Mode::SeriesCut).by_cv(&dag, &goal).unwrap_err().to_string();
    assert_eq!(
        refused(Goal::default()),
        "no slice profile with batch 1 is common to all components: `b` has none of the others'"
    );
    let named = Goal::default().with_reference("1g.10gb");
    assert_eq!(refused(named), "component `b` has no profile for 1g.10gb, batch 1");
    assert!(refused(Goal::default().with_batch(8)).starts_with("no slice profile with batch 8"));
}

#[test]
fn settings_that_cannot_be_are_refused_by_name_and_bound() {
    let mut config = PartitionConfig::default();
    config.max_ideals = 100_000;
    assert!(Partitioner::new(config.clone()).is_ok());
    config.max_ideals += 1;
    let error = Partitioner::new(config).unwrap_err();
    assert!(error.field == "max_ideals");
    assert_eq!(error.to_string(), "max_ideals is 100001: need 2 to 100000");
}

#[test]
fn hand_offs_break_ties_before_the_cuts_do() {
    // 1|1|1|1 in two equal stages only one way; in three, 2|1|1, 1|2|1 and 1|1|2 are equal by CV. The edge 1 -> 2 is
    // fat, so the one that keeps it inside a stage comes first.
    let dag = dag_of(&[1; 4], &[(0, 1, 0), (1, 2, 1_000), (2, 3, 0)]);
    let three =
        partitioner(Mode::SeriesCut).by_cv(&dag, &goal()).unwrap().pipelines.filter(|p| p.stages() == 3);
    let first = three.map(|pipeline| stages_of(&pipeline)).next().unwrap();
    assert_eq!(first[1][0].iter().collect::<Vec<_>>(), [1, 2]);
    let free = Goal::default().with_hand_off(HandOff::FREE);
    let mut three =
        partitioner(Mode::SeriesCut).by_cv(&dag, &free).unwrap().pipelines.filter(|p| p.stages() == 3);
    assert_eq!(stages_of(&three.next().unwrap())[2][0].len(), 2, "without a cost, the smallest cuts: 1|1|2");
}
