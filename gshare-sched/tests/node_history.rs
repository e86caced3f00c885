//! Any history of a node: see `support/node_history.rs`, which the fuzz target `node_meter` runs too.
#![allow(unreachable_pub, reason = "the support is shared with the fuzz target")]

use proptest::prelude::*;

#[path = "support/node_history.rs"]
mod support;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_a_node_that_keeps_its_book(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        support::run_bytes(&bytes);
    }
}
