//! Histories for the property test and the fuzzer alike.
#![allow(unreachable_pub, reason = "shared by a test and a fuzz target")]

#[path = "literal.rs"]
pub mod literal;
#[path = "store_history.rs"]
pub mod store_history;

use gshare_core::{BasisPoints, Bytes, Duration};
use gshare_modelstore::engine::{Store, StoreConfig};
use literal::{Literal, Lockstep};
use std::collections::BTreeMap;
use store_history::{StoreDriver, StoreOp, StoreWorld};

pub const WORLD: StoreWorld = StoreWorld { clients: 6, models: 8, tenants: 3, unit: Bytes(1_000_000) };

/// Two tiers that hold a few models each; `shape` varies the watermarks and sizes.
pub fn config(shape: u8) -> StoreConfig {
    let mut config = StoreConfig::default();
    config.gpu = Bytes(1_000_000 * u64::from(shape % 7) * 4);
    config.host = Bytes(1_000_000 * (12 + u64::from(shape % 5) * 7));
    config.high = BasisPoints::from_percent([100, 95, 80][usize::from(shape % 3)]).unwrap();
    config.low = BasisPoints::from_percent([80, 60, 0][usize::from(shape / 3 % 3)]).unwrap();
    config.demote = shape % 8 != 7;
    config.half_life = Duration::from_millis(500);
    config.write_timeout = Duration::from_secs(20);
    config.host_to_gpu = Bytes(1_000_000_000);
    (config.max_clients, config.max_models) = (6, 7);
    config
}

/// Plays a history against the store and the literal one, with a book beside both.
/// Answers with how often each order and each refusal was seen.
pub fn play(shape: u8, ops: impl IntoIterator<Item = StoreOp>) -> Result<BTreeMap<String, u64>, String> {
    let lockstep =
        Lockstep { store: Store::new(config(shape)).unwrap(), literal: Literal::new(config(shape)) };
    let mut driver = StoreDriver::new(WORLD, lockstep);
    for op in ops {
        driver.apply(op)?;
    }
    driver.settle()?;
    Ok(driver.seen().clone())
}
