//! What the ring of a hooked process tells.

use std::time::Duration as StdDuration;

use crate::common::daemon::{Daemon, Manners};
use crate::common::{Run, program};
use gshare_core::wait_ring::{Denial, Event, FromDaemon, Snapshot, Why};
use gshare_core::{Bytes, ResourceSpec};

/// Runs a program with a ring that stays; gives its standard error and the ring, if there is one.
fn traced(run: Run, words: Option<&str>) -> (String, Option<Snapshot>) {
    let place = tempfile::tempdir().unwrap();
    let mut run =
        run.env("GSHARE_TRACE_RING", place.path().join("ring.%p")).env("GSHARE_SIM_PROFILE", "tiny");
    if let Some(words) = words {
        run = run.env("GSHARE_TRACE", words);
    }
    let done = run.finish();
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    let ring = place.path().read_dir().unwrap().next();
    let ring = ring.map(|entry| Snapshot::read(&std::fs::read(entry.unwrap().path()).unwrap()).unwrap());
    (done.stderr, ring)
}

fn events(snapshot: &Snapshot) -> impl Iterator<Item = Event> {
    snapshot.records.iter().map(|record| record.event)
}

fn waits(snapshot: &Snapshot) -> Vec<Why> {
    let why = |event| match event {
        Event::Waited { why, .. } => Some(why),
        _ => None,
    };
    events(snapshot).filter_map(why).collect()
}

#[test]
fn a_wait_under_a_limit_without_a_daemon_is_explained() {
    let run = Run::hooked(&program("link", &[]), &["works", "500"]).env("GSHARE_QUOTA", "0.1:0.3");
    let (_, ring) = traced(run, None);
    let ring = ring.unwrap();
    let limited = |why: &Why| matches!(why, Why::LocalWindow { limit, left_ns } if limit.get() == 3_000 && *left_ns < 200_000_000);
    assert!(waits(&ring).iter().any(limited), "{ring:?}");
    let alone = |event| matches!(event, Event::DeviceAsked { answer: FromDaemon::Alone, .. });
    assert!(events(&ring).any(alone), "{ring:?}");
    assert!(events(&ring).any(|event| matches!(event, Event::NotConnected { errno: 2, .. })), "{ring:?}");
    assert!(ring.records.iter().all(|record| record.thread != 0));
}

#[test]
fn a_wait_for_a_daemon_that_gives_no_token_is_explained_while_it_lasts() {
    let place = tempfile::tempdir().unwrap();
    // From its own start on, and programs may start late.
    let manners = Manners { keeps_waiting: StdDuration::from_secs(3), ..Manners::default() };
    let daemon = Daemon::start_as(&place.path().join("g.sock"), manners);
    let run = Run::hooked(&program("link", &[]), &["works", "100"]).env("GSHARE_SOCKET", &daemon.socket);
    let (_, ring) = traced(run, None);
    let ring = ring.unwrap();
    let token = |event| matches!(event, Event::Waiting { why: Why::Token { .. }, .. });
    assert!(events(&ring).any(token), "{ring:?}");
    let place_of = |is: fn(&Event) -> bool| events(&ring).position(|event| is(&event));
    let asked = place_of(|event| matches!(event, Event::TokenRequested {}));
    let granted = place_of(|event| matches!(event, Event::Granted { .. }));
    assert!(asked.is_some() && asked < granted, "{ring:?}");
    assert!(events(&ring).any(|event| matches!(event, Event::Attached { .. })), "{ring:?}");
}

/// A graph was forgotten on the current device only: the second one was charged what the first had cost.
#[test]
fn a_graph_that_has_the_name_of_one_that_is_gone_is_measured_whichever_device_is_current() {
    let between = program("between", &["-shared"]);
    let run = Run::hooked(&program("odd", &["-rdynamic"]), &["graph_names"]).preload(&between, false);
    let (_, ring) = traced(run.env("GSHARE_QUOTA", "0.9"), None);
    let ring = ring.unwrap();
    // The second launch of each waits until the first is measured.
    let measured = waits(&ring).iter().filter(|why| matches!(why, Why::Measuring {})).count();
    assert_eq!(measured, 2, "{ring:?}");
}

#[test]
fn a_denial_is_explained_with_the_account() {
    let run = || Run::hooked(&program("limit", &[]), &[]).env("GSHARE_MEM", "64MiB");
    let (_, ring) = traced(run(), None);
    let ring = ring.unwrap();
    let denied = events(&ring).find(|event| matches!(event, Event::Denied { .. }));
    let (bytes, limit) = (Bytes::from_mib(1).0, Bytes::from_mib(64).0);
    assert_eq!(denied, Some(Event::Denied { bytes, used: limit, limit, denial: Denial::OverLimit }));
    assert!(!events(&ring).any(|event| matches!(event, Event::Charged { .. })), "charges were not asked for");
    let (_, ring) = traced(run(), Some("memory"));
    let ring = ring.unwrap();
    let charged = events(&ring).filter(|event| matches!(event, Event::Charged { .. })).count();
    assert_eq!(charged, 2 * 64);
    assert!(waits(&ring).is_empty());
}

#[test]
fn a_daemon_that_denies_memory_is_named() {
    let place = tempfile::tempdir().unwrap();
    let spec = ResourceSpec::UNLIMITED;
    let spec = ResourceSpec::new(spec.quota(), spec.sm(), Some(Bytes::from_mib(32))).unwrap();
    let daemon = Daemon::start_as(&place.path().join("g.sock"), Manners { spec, ..Manners::default() });
    let run = Run::hooked(&program("limit", &[]), &[]).env("GSHARE_SOCKET", &daemon.socket);
    let ring = traced(run, None).1.unwrap();
    let memory = Bytes::from_mib(32).0;
    assert!(
        events(&ring).any(|event| matches!(event, Event::Attached { memory: m, .. } if m == memory)),
        "{ring:?}"
    );
    assert!(
        events(&ring).any(|event| matches!(event, Event::Denied { limit, .. } if limit == memory)),
        "{ring:?}"
    );
}

#[test]
fn unknown_words_are_reported_and_none_is_no_ring() {
    let run = || Run::hooked(&program("link", &[]), &["works", "20"]).env("GSHARE_QUOTA", "0.1:0.3");
    let (said, ring) = traced(run(), Some("gate,everything"));
    assert!(
        said.contains("GSHARE_TRACE=gate,everything: everything unknown; known are gate, memory, link, none"),
        "{said}"
    );
    assert!(ring.is_some());
    assert_eq!(traced(run(), Some("none")), (String::new(), None));
    // A file that is there is left alone.
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("there");
    std::fs::write(&file, "mine").unwrap();
    let done = run().env("GSHARE_TRACE_RING", &file).finish();
    assert!(done.code == Some(0) && done.stderr.contains("File exists"), "{}", done.stderr);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
}
