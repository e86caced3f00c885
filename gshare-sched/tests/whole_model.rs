//! The pool of whole devices against the literal, O(queue) algorithms: the same orders on random cases.

#[path = "support/whole_pair.rs"]
mod pair;

use pair::{Cluster, Pair, Step, run_bytes};
use proptest::prelude::*;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u32..6).prop_map(|model| Step::Arrive { model }),
        10 => (any::<prop::sample::Index>(), 0u8..12)
            .prop_map(|(which, luck)| Step::Answer { which: which.index(1 << 16), badly: luck == 0 }),
        1 => (0u32..4).prop_map(|gpu| Step::Lose { gpu }),
        1 => (0u32..4).prop_map(|gpu| Step::Join { gpu }),
        1 => (0u32..6, 0u32..4).prop_map(|(model, gpu)| Step::Die { model, gpu }),
        1 => (0u32..6, 1u32..4).prop_map(|(model, copies)| Step::Limit { model, copies }),
        2 => (0u64..3_000).prop_map(|millis| Step::Wait { millis }),
        2 => (0u64..6).prop_map(|halves| Step::Wait { millis: halves * 500 }),
        1 => Just(Step::Wait { millis: 40_000 }),
    ]
}

fn cluster() -> impl Strategy<Value = Cluster> {
    // Half of the times are multiples of 500 ms, so that finish times are equal and ties are broken.
    let profile = || {
        let load = prop_oneof![100u64..4_000, (1u64..8).prop_map(|halves| halves * 500)];
        let infer = prop_oneof![100u64..1_500, (1u64..3).prop_map(|halves| halves * 500)];
        (load, infer)
    };
    (
        prop_oneof![1 => Just(None), 4 => (0u32..5).prop_map(Some)],
        prop::collection::vec(0u8..2, 0..4),
        [3u64..9, 3u64..9],
        prop::collection::vec((1u64..6, profile()), 6),
    )
        .prop_map(|(limit, gpus, memory, models)| {
            let models = models.into_iter().map(|(size, (load, infer))| (size, load, infer)).collect();
            Cluster { limit, gpus, memory, models }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Algorithms 1 and 2 with their gaps closed, decided from indices, agree with the literal algorithms.
    #[test]
    fn the_pool_decides_as_the_literal_algorithms(
        cluster in cluster(), steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut pair = Pair::new(cluster);
        for (id, step) in (0..).zip(&steps) {
            pair.take(step, id);
        }
    }

    #[test]
    fn any_bytes_are_a_run_in_which_the_two_agree(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        run_bytes(&bytes);
    }
}

/// Two GPUs of different kinds would finish at the same instant: the lower kind, then the lower number, in both.
#[test]
fn equal_finish_times_are_broken_alike() {
    for kinds in [[1], [0]] {
        let cluster = Cluster {
            limit: Some(2),
            gpus: kinds.to_vec(),
            memory: [4, 4],
            models: vec![(2, 3_000, 500); 6],
        };
        let mut pair = Pair::new(cluster);
        let answer = |which| Step::Answer { which, badly: false };
        // The same model on both GPUs, both busy with it from the same instant on; then more for it, and for others.
        let both = [
            Step::Arrive { model: 0 },
            answer(0),
            Step::Arrive { model: 1 },
            answer(1),
            answer(0),
            answer(0),
        ];
        let more = [0, 0, 1, 1, 0, 2, 3, 0, 1].map(|model| Step::Arrive { model });
        let rest =
            (0..40).map(|step| if step % 5 == 4 { Step::Wait { millis: 500 } } else { answer(step % 2) });
        for (id, step) in (0..).zip(both.into_iter().chain(more).chain(rest)) {
            pair.take(&step, id);
        }
    }
}

/// Histories that fuzzing found once: `fuzz/regressions/whole/*`, as the fuzzer wrote them.
#[test]
fn runs_that_once_went_wrong_do_not_any_more() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/regressions/whole");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        println!("{}", file.display());
        run_bytes(&std::fs::read(&file).unwrap());
    }
}
