//! Model check of the book of allocations and the memory account, under every interleaving of two threads.
//!
//! Built with `--cfg loom` only: `.ci/run loom`.
#![cfg(loom)]
#![allow(dead_code)] // what the library uses and these tests do not

#[path = "../src/device/book.rs"]
mod book;
#[path = "../src/sys/lock.rs"]
mod lock;
mod sys {
    pub(crate) use crate::lock;
}

use gshare_core::Bytes;
use gshare_meter::MemoryAccount;
use loom::sync::Arc;
use loom::thread;

use book::{Book, Key, Kind, Record};

fn record(bytes: u64) -> Record {
    Record { bytes, device: 0, context: 0, links: 1 }
}

fn limited(limit: u64) -> MemoryAccount {
    let account = MemoryAccount::new(1 << 30);
    account.limit_to(Some(Bytes(limit)));
    account.grant(Bytes(limit));
    account
}

fn held(book: &Book) -> u64 {
    book.select(|_, _| true).iter().map(|(_, record)| record.bytes).sum()
}

#[test]
fn two_threads_never_take_more_than_there_is_and_the_account_is_the_sum_of_the_book() {
    loom::model(|| {
        let shared = Arc::new((Book::default(), limited(100)));
        let work = |name: u64| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (book, account) = &*shared;
                if account.reserve(60).is_err() {
                    return 0;
                }
                book.insert(Key(Kind::Pointer, name), record(60));
                1
            })
        };
        let (a, b) = (work(1), work(2));
        let passed = a.join().unwrap() + b.join().unwrap();
        let (book, account) = &*shared;
        assert_eq!(passed, 1, "100 bytes hold one of two times 60");
        assert_eq!(account.used(), held(book));
    });
}

#[test]
fn of_two_frees_of_one_address_one_gives_back() {
    loom::model(|| {
        let shared = Arc::new((Book::default(), limited(100)));
        let key = Key(Kind::Pointer, 7);
        shared.1.reserve(40).unwrap();
        shared.0.insert(key, record(40));
        let work = || {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if let Some(record) = shared.0.remove(key) {
                    shared.1.release(record.bytes);
                }
            })
        };
        let (a, b) = (work(), work());
        a.join().unwrap();
        b.join().unwrap();
        assert_eq!((shared.1.used(), held(&shared.0)), (0, 0));
    });
}

#[test]
fn a_handle_goes_with_its_last_reference_and_once() {
    loom::model(|| {
        let shared = Arc::new((Book::default(), limited(100)));
        let key = Key(Kind::Handle, 9);
        shared.1.reserve(40).unwrap();
        shared.0.insert(key, record(40));
        assert!(shared.0.link(key), "a mapping beside the handle");
        let work = || {
            let shared = Arc::clone(&shared);
            thread::spawn(move || match shared.0.unlink(key) {
                Some(record) => {
                    shared.1.release(record.bytes);
                    1
                }
                None => 0,
            })
        };
        let (a, b) = (work(), work());
        assert_eq!(a.join().unwrap() + b.join().unwrap(), 1);
        assert_eq!((shared.1.used(), held(&shared.0)), (0, 0));
    });
}
