//! The times at which refused pods are tried again, with the time as an input.

use super::decisions::fastpod;
use gshare_examples::kubernetes::fastpod::FaSTPod;
use gshare_examples::kubernetes::fastpod::backoff::{BATCH, Backoff, FIRST, LIMIT, LONGEST, WINDOW};
use kube::ResourceExt as _;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

const TICK: Duration = Duration::from_millis(10);

fn refuse(backoff: &mut Backoff, fastpod: &FaSTPod, now: Instant) -> bool {
    let (namespace, uid) = (fastpod.namespace().unwrap(), fastpod.uid().unwrap());
    backoff.refuse((&namespace, &uid), fastpod.metadata.generation, now, "quota")
}

/// Refused FaSTPods, by UID, and whether each may be tried.
fn told(backoff: &mut Backoff, fastpods: &[FaSTPod], now: Instant) -> BTreeMap<String, bool> {
    backoff.refused(fastpods, now).into_iter().map(|(uid, refused)| (uid, refused.retry)).collect()
}

#[test]
fn pauses_double_up_to_the_longest() {
    let (mut backoff, one, start) = (Backoff::default(), fastpod("f", 9, [12, 30, 1024]), Instant::now());
    let (mut now, mut pauses) = (start, Vec::new());
    for _ in 0..9 {
        let is_new = refuse(&mut backoff, &one, now);
        assert_eq!(is_new, pauses.is_empty());
        // Others of the same batch are the same refusal.
        assert!(!refuse(&mut backoff, &one, now));
        let pause = backoff.next(now).unwrap();
        assert!(!told(&mut backoff, std::slice::from_ref(&one), now + pause - TICK)["uid-f"]);
        now += pause;
        assert!(told(&mut backoff, std::slice::from_ref(&one), now)["uid-f"]);
        pauses.push(pause.as_secs());
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    assert_eq!((FIRST.as_secs(), LONGEST.as_secs()), (1, 60));
}

/// A due FaSTPod without room is no reason to look again and again.
#[test]
fn what_is_due_waits_for_a_change_and_not_for_a_time() {
    let (mut backoff, start) = (Backoff::default(), Instant::now());
    let all = [fastpod("f", 9, [12, 30, 1024]), fastpod("g", 9, [12, 30, 1024])];
    refuse(&mut backoff, &all[0], start);
    refuse(&mut backoff, &all[1], start);
    let later = start + FIRST;
    assert_eq!(told(&mut backoff, &all, later), [("uid-f".into(), true), ("uid-g".into(), true)].into());
    assert_eq!(backoff.next(later), None);
    // One was tried, and refused again.
    refuse(&mut backoff, &all[1], later);
    assert_eq!(backoff.next(later), Some(2 * FIRST));
    // Due between the look and the question: not forgotten.
    assert!(!told(&mut backoff, &all, later + 2 * FIRST - TICK)["uid-g"]);
    assert_eq!(backoff.next(later + 2 * FIRST + TICK), Some(Duration::ZERO));
}

#[test]
fn a_pod_that_is_made_or_a_changed_fastpod_ends_it() {
    let (mut backoff, now) = (Backoff::default(), Instant::now());
    let mut one = fastpod("f", 9, [12, 30, 1024]);
    refuse(&mut backoff, &one, now);
    backoff.accept("uid-f");
    assert_eq!((told(&mut backoff, std::slice::from_ref(&one), now).len(), backoff.next(now)), (0, None));
    assert!(refuse(&mut backoff, &one, now), "as if for the first time");
    one.metadata.generation = Some(2);
    assert_eq!(told(&mut backoff, std::slice::from_ref(&one), now).len(), 0);
    refuse(&mut backoff, &one, now);
    assert_eq!(told(&mut backoff, &[], now).len(), 0, "it was deleted");
}

/// However many FaSTPods a tenant makes or changes, no second has more refusals than the limit.
#[test]
fn a_namespace_is_refused_ten_times_a_second_at_most() {
    let (mut backoff, start) = (Backoff::default(), Instant::now());
    let mut refusals = Vec::new();
    for tick in 0..1000 {
        let now = start + TICK * tick;
        // As many new FaSTPods as the limit allows.
        for index in 0..backoff.allowance("team", now) {
            refuse(&mut backoff, &fastpod(&format!("f{tick}-{index}"), 1, [12, 30, 1024]), now);
            refusals.push(now);
        }
        assert_eq!(backoff.allowance("other", now), BATCH, "others make theirs as ever");
    }
    for (index, first) in refusals.iter().enumerate() {
        let within = refusals[index..].iter().take_while(|time| **time - *first < WINDOW).count();
        assert!(within <= LIMIT, "{within} in a second");
    }
    assert!(refusals.len() >= 9 * LIMIT, "and not far fewer: {}", refusals.len());
    // One at a time for a while, then in batches again.
    let last = *refusals.last().unwrap();
    told(&mut backoff, &[], last + LONGEST - TICK);
    assert_eq!(backoff.allowance("team", last + LONGEST - TICK), 1);
    told(&mut backoff, &[], last + LONGEST);
    assert_eq!(backoff.allowance("team", last + LONGEST), BATCH);
}
