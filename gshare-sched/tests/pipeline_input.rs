//! DAGs from outside: findings and seeds of the fuzz target `dag`, and hostile input.
#![allow(clippy::cast_possible_truncation, clippy::cast_lossless, reason = "small numbers of a test")]

#[path = "support/dag_bytes.rs"]
mod dag_bytes;

use gshare_core::dag::Dag;

#[test]
fn regressions_of_the_fuzz_target_hold() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/regressions/dag");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        dag_bytes::run_bytes(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "the regressions lie in {folder}");
}

/// A few thousand DAGs of random bytes, so that an ordinary run says something too.
#[test]
fn random_bytes_are_refused_or_cut_within_bounds() {
    let mut state = 11u64;
    for _ in 0..300 {
        let length = 20 + state as usize % 200;
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as u8
            })
            .collect();
        dag_bytes::run_bytes(&bytes);
    }
}

fn refused(text: &str) -> String {
    serde_json::from_str::<Dag>(text).unwrap_err().to_string()
}

fn component(name: &str, time: u64, memory: u64) -> String {
    format!(
        r#"{{"name":"{name}","profiles":[{{"slice":"1g.10gb","time_ns":{time},"memory_bytes":{memory}}}]}}"#
    )
}

fn dag(components: &[String], edges: &[(usize, usize)]) -> String {
    let edge = |(from, to): &(usize, usize)| format!(r#"{{"from":"c{from}","to":"c{to}","bytes":1}}"#);
    let edges: Vec<String> = edges.iter().map(edge).collect();
    format!(r#"{{"name":"x","components":[{}],"edges":[{}]}}"#, components.join(","), edges.join(","))
}

#[test]
fn input_made_to_hurt_is_refused_with_its_bound_and_soon() {
    let many: Vec<String> = (0..10_000).map(|one| component(&format!("c{one}"), 1, 1)).collect();
    assert!(refused(&dag(&many, &[])).contains("10000"), "{}", refused(&dag(&many, &[])));
    assert!(refused(&dag(&many, &[])).contains("128"));
    let ring: Vec<(usize, usize)> = (0..100).map(|one| (one, (one + 1) % 100)).collect();
    let text = refused(&dag(&many[..100], &ring));
    assert!(text.contains("cycle"), "{text}");
    assert!(refused(&dag(&[component("c0", u64::MAX, 1)], &[])).contains("c0"));
    assert!(refused(&dag(&[component("c0", 1, u64::MAX)], &[])).contains("c0"));
    assert!(refused(&dag(&[component("c0", 0, 1)], &[])).contains("c0"));
    // 128 components without an edge have 2^128 ideals: modes that need them say so and fall back.
    let wide = dag(&many[..128], &[]);
    let bytes = wide.as_bytes();
    dag_bytes::run_bytes(bytes);
}
