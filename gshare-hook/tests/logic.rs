//! The parts of the hook that need no driver, as ordinary Rust: the book of allocations and the configuration.
//!
//! The library itself is a cdylib only, so its pure files are included here.
#![allow(dead_code)] // what the library uses and these tests do not

#[path = "../src/device/book.rs"]
mod book;
#[path = "../src/sys/lock.rs"]
mod lock;
mod sys {
    pub(crate) use crate::lock;
}
#[path = "../src/sys/config.rs"]
mod config;

use std::collections::BTreeMap;
use std::ffi::OsString;

use gshare_core::wire::OnDaemonLoss;
use gshare_core::{Bytes, ResourceSpec};
use proptest::prelude::*;

use book::{Book, Key, Kind, Record};
use config::Config;

// ---- memory ---------------------------------------------------------------------------------------------------------

#[test]
fn a_physical_handle_is_struck_out_with_its_last_link() {
    let book = Book::default();
    let key = Key(Kind::Handle, 9);
    let record = Record { bytes: 64, device: 0, context: 0, links: 1 };
    book.insert(key, record);
    assert!(book.link(key));
    assert_eq!(book.unlink(key), None);
    assert_eq!(book.unlink(key).map(|r| r.bytes), Some(64));
    assert!(!book.link(key));
}

proptest! {
    /// Against an ordered map of the same operations.
    #[test]
    fn book_equals_a_plain_map(operations in prop::collection::vec((0u8..3, 0u64..20, 1u64..100), 0..200)) {
        let book = Book::default();
        let mut model = BTreeMap::new();
        for (operation, name, bytes) in operations {
            let key = Key(Kind::Pointer, name << 8);
            let record = Record { bytes, device: 0, context: (name % 3) as usize, links: 1 };
            match operation {
                0 => prop_assert_eq!(book.insert(key, record), model.insert(key.1, record)),
                1 => prop_assert_eq!(book.remove(key), model.remove(&key.1)),
                _ => {
                    let mut gone: Vec<u64> = book.drain(|_, r| r.context == 2).into_iter().map(|(k, _)| k.1).collect();
                    gone.sort_unstable();
                    let expected: Vec<u64> = model.iter().filter(|(_, r)| r.context == 2).map(|(k, _)| *k).collect();
                    model.retain(|_, r| r.context != 2);
                    prop_assert_eq!(gone, expected);
                }
            }
        }
        for (name, record) in model {
            prop_assert_eq!(book.get(Key(Kind::Pointer, name)), Some(record));
        }
    }
}

// ---- configuration --------------------------------------------------------------------------------------------------

fn config(variables: &[(&str, &str)]) -> Config {
    Config::read(|key| {
        variables.iter().find(|(name, _)| *name == key).map(|(_, value)| OsString::from(value))
    })
}

#[test]
fn an_empty_environment_asks_for_nothing() {
    let config = config(&[]);
    assert!(!config.disabled && !config.limited && config.complaints.is_empty());
    assert_eq!(config.spec, ResourceSpec::UNLIMITED);
    assert_eq!(config.socket, config::DEFAULT_SOCKET);
    assert_eq!(config.on_loss, OnDaemonLoss::Open);
}

#[test]
fn all_variables_are_read() {
    let config = config(&[
        ("GSHARE_DISABLE", "1"),
        ("GSHARE_SOCKET", "/tmp/g.sock"),
        ("GSHARE_NAME", "alice"),
        ("GSHARE_RUN", "4d"),
        ("GSHARE_QUOTA", "0.3:0.8"),
        ("GSHARE_SM", "24"),
        ("GSHARE_MEM", "256MiB"),
        ("GSHARE_ON_DAEMON_LOSS", "closed"),
        ("GSHARE_DAEMON_WAIT", "250ms"),
    ]);
    assert!(config.disabled && config.limited && config.complaints.is_empty(), "{config:?}");
    assert_eq!((config.name.as_deref(), config.run), (Some("alice"), Some(gshare_core::RunId::new(77))));
    assert_eq!(config.spec.quota().to_string(), "30%:80%");
    assert_eq!(config.spec.memory(), Some(Bytes::from_mib(256)));
    assert_eq!(config.on_loss, OnDaemonLoss::Closed);
    assert_eq!(config.daemon_wait.get(), gshare_core::Duration::from_millis(250));
}

#[test]
fn what_cannot_be_read_is_named_and_left_out() {
    let config =
        config(&[("GSHARE_QUOTA", "1.7"), ("GSHARE_MEM", "lots"), ("GSHARE_ON_DAEMON_LOSS", "maybe")]);
    assert_eq!(config.spec, ResourceSpec::UNLIMITED);
    for (complaint, key) in
        config.complaints.iter().zip(["GSHARE_QUOTA", "GSHARE_MEM", "GSHARE_ON_DAEMON_LOSS"])
    {
        assert!(complaint.starts_with(key), "{complaint}");
    }
    assert_eq!(config.complaints.len(), 3);
}

#[test]
fn a_wait_for_the_daemon_is_within_its_bounds() {
    for (text, wait) in [("200ms", 200), ("600s", 600_000)] {
        assert_eq!(config(&[("GSHARE_DAEMON_WAIT", text)]).daemon_wait.get().as_nanos(), wait * 1_000_000);
    }
    for text in ["199ms", "601s"] {
        let config = config(&[("GSHARE_DAEMON_WAIT", text)]);
        assert_eq!(config.complaints, [format!("GSHARE_DAEMON_WAIT={text}: need 200ms to 600s")]);
        assert_eq!(config.daemon_wait, gshare_core::wire::DaemonWait::default());
    }
}

#[test]
fn a_name_or_an_sm_share_alone_is_no_limit() {
    assert!(!config(&[("GSHARE_NAME", "a"), ("GSHARE_SM", "50")]).limited);
    assert!(config(&[("GSHARE_MEM", "1GiB")]).limited);
    assert!(config(&[("GSHARE_QUOTA", "0.5")]).limited);
    assert!(!config(&[("GSHARE_QUOTA", "0.5:1")]).limited);
}

#[test]
fn a_class_is_read_and_a_bad_one_is_left_out() {
    use gshare_core::ServiceClass;
    let class = |text| config(&[("GSHARE_CLASS", text)]);
    assert_eq!(class("best-effort").class, Some(ServiceClass::BestEffort));
    assert_eq!(class("slo-sensitive:15").class, ServiceClass::slo_sensitive(15));
    let bad = class("urgent");
    assert_eq!((bad.class, bad.complaints.len()), (None, 1));
}
