use super::super::dry::Cluster;
use super::*;
use crate::knative::api::CLASS;
use proptest::prelude::*;

const START: Timestamp = Timestamp::UNIX_EPOCH;

fn after(seconds: u64) -> Timestamp {
    START + Duration::from_secs(seconds)
}

/// Changes at any time, by others and by the passage of time.
#[derive(Debug, Clone)]
enum Op {
    Desired(Option<u32>),
    Sleep(u64),
    /// Annotations: fewest, most, first.
    Annotate(u32, u32, u32),
    Reachable(bool),
    /// Pods are lost; the Deployment makes others.
    Crash,
    /// Another client scales the target.
    Meddle(u32),
    /// The activator does not get the requests any more, or gets them again.
    Route(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop::option::of(0u32..6).prop_map(Op::Desired),
        2 => Just(Op::Desired(Some(0))),
        6 => prop_oneof![0u64..10, 10u64..100, 500u64..700].prop_map(Op::Sleep),
        1 => (0u32..3, 3u32..6, 0u32..5).prop_map(|(min, max, initial)| Op::Annotate(min, max, initial)),
        1 => any::<bool>().prop_map(Op::Reachable),
        1 => Just(Op::Crash),
        1 => (0u32..6).prop_map(Op::Meddle),
        1 => any::<bool>().prop_map(Op::Route),
    ]
}

fn annotate(cluster: &mut Cluster, name: &str, value: u32) {
    let annotations = cluster.pa.metadata.annotations.get_or_insert_default();
    annotations.insert(format!("autoscaling.knative.dev/{name}"), value.to_string());
}

proptest! {
    /// After any events, in any order: a write is never repeated, the last pods go only after requests have gone to the
    /// activator for long enough, and the conditions are true.
    #[test]
    fn a_pass_is_enough_and_pods_are_never_taken_from_under_requests(
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let defaults = Defaults::default();
        let mut cluster = Cluster::new(&[], START);
        let (mut now, mut desired, mut routed) = (START, None, true);
        let mut initialized = false;
        for op in ops {
            match op {
                Op::Desired(pods) => desired = pods,
                Op::Sleep(seconds) => now += Duration::from_secs(seconds),
                Op::Annotate(min, max, initial) => {
                    annotate(&mut cluster, "min-scale", min);
                    annotate(&mut cluster, "max-scale", max);
                    annotate(&mut cluster, "initial-scale", initial);
                }
                Op::Reachable(reachable) => {
                    cluster.pa.spec.reachability = if reachable { "Reachable" } else { "Unreachable" }.into();
                    cluster.pa.metadata.generation = cluster.pa.metadata.generation.map(|old| old + 1);
                }
                Op::Crash => {
                    let replicas = cluster.replicas;
                    cluster.apply(Write::Scale(0), now);
                    cluster.apply(Write::Scale(replicas), now);
                }
                Op::Meddle(replicas) => cluster.apply(Write::Scale(replicas), now),
                Op::Route(on) => routed = on,
            }
            cluster.settle(now);
            let settings = Settings::of(&cluster.pa, &defaults).unwrap();
            let before = cluster.clone();
            let old = before.pa.status.clone().unwrap_or_default();
            let observe = |cluster: &Cluster| {
                let observed = Observed {
                    pa: &cluster.pa,
                    sks: cluster.sks.as_ref(),
                    replicas: Some(cluster.replicas),
                    // Pods that were asked to go are not gone yet.
                    ready: before.ready(now),
                    desired,
                    backed: routed && cluster.sks.as_ref().is_some_and(|sks| sks.spec.mode == Mode::Proxy),
                };
                reconcile(&observed, &settings, &defaults, now)
            };
            let pass = observe(&before);
            for write in pass.writes.clone() {
                cluster.apply(write, now);
            }
            prop_assert_eq!(observe(&cluster).writes, vec![], "a second pass, after {:?}", pass);

            let status = cluster.pa.status.clone().unwrap_or_default();
            let sks = cluster.sks.as_ref().unwrap();
            // Written only in bounds; 0 only as the last step.
            for write in &pass.writes {
                let Write::Scale(pods) = write else { continue };
                prop_assert!((settings.min..=settings.max).contains(pods) || *pods == 1, "{pods} of {settings:?}");
                if *pods > 0 {
                    continue;
                }
                let active = old.condition(ACTIVE).unwrap();
                let held = elapsed(active.since(now), now);
                match active.status.as_str() {
                    "False" => {
                        let sks = before.sks.as_ref().unwrap();
                        let proxied = sks.status.as_ref().unwrap().condition("ActivatorEndpointsPopulated");
                        let proxied = proxied.filter(|proxied| proxied.status == "True");
                        let proxied = proxied.map_or(Duration::ZERO, |at| elapsed(at.since(now), now));
                        prop_assert!(routed && sks.spec.mode == Mode::Proxy);
                        prop_assert!(held.max(proxied) >= defaults.scale_to_zero_grace);
                    }
                    "Unknown" => prop_assert!(held >= defaults.progress_deadline),
                    other => prop_assert!(false, "0 pods of a target that is {other}"),
                }
            }
            let active = status.condition(ACTIVE).unwrap();
            prop_assert_eq!(sks.spec.mode == Mode::Proxy, active.status == "False");
            prop_assert!(active.status != "True" || before.ready(now) > 0);
            let three = [ACTIVE, INITIALIZED, SKS_READY].map(|kind| status.is_true(kind));
            prop_assert_eq!(status.is_true(READY), three == [true; 3]);
            prop_assert!(status.is_true(INITIALIZED) || !initialized, "latched");
            initialized = status.is_true(INITIALIZED);
            prop_assert_eq!(status.observed_generation, cluster.pa.metadata.generation);
            prop_assert!(status.conditions.is_sorted_by_key(|condition| &condition.kind));
            for condition in &status.conditions {
                let same = old.condition(&condition.kind).filter(|old| old.status == condition.status);
                if let Some(old) = same {
                    prop_assert_eq!(&old.last_transition_time, &condition.last_transition_time);
                }
            }
            if desired.is_some_and(|desired| desired > 0) {
                prop_assert!(cluster.replicas >= settings.min.max(1) || sks.status.is_none());
            }
        }
    }
}

/// A cluster after a load of `pods` pods for a minute.
fn running(pods: u32) -> (Cluster, Settings, Defaults) {
    let defaults = Defaults::default();
    let mut cluster = Cluster::new(&[], START);
    let settings = Settings::of(&cluster.pa, &defaults).unwrap();
    for second in 0..60 {
        cluster.settle(after(second));
        cluster.pass(&settings, &defaults, Some(pods), after(second));
    }
    cluster.settle(after(60));
    (cluster, settings, defaults)
}

#[test]
fn a_target_that_never_gets_its_pods_is_given_up() {
    let defaults = Defaults::default();
    let mut cluster = Cluster::new(&[("initial-scale", "1")], START);
    let settings = Settings::of(&cluster.pa, &defaults).unwrap();
    for second in [0, 1, 2] {
        cluster.settle(after(second));
        cluster.pass(&settings, &defaults, None, after(second));
    }
    let status = cluster.pa.status.clone().unwrap();
    assert_eq!((cluster.active(), status.desired_scale), ("Unknown", Some(-1)), "not ready after 2 s");
    // No pod becomes ready.
    cluster.apply(Write::Scale(0), after(2));
    cluster.apply(Write::Scale(1), after(5_000));
    let pass = cluster.pass(&settings, &defaults, None, after(609));
    assert_eq!((pass.writes, pass.wake), (vec![], Some(Duration::from_secs(1))));
    cluster.pass(&settings, &defaults, None, after(610));
    let status = cluster.pa.status.clone().unwrap();
    let active = status.condition(ACTIVE).unwrap();
    assert_eq!((active.status.as_str(), active.reason.as_str()), ("False", "TimedOut"));
    assert_eq!(cluster.replicas, 0);
    cluster.settle(after(611));
    cluster.pass(&settings, &defaults, Some(0), after(611));
    let status = cluster.pa.status.clone().unwrap();
    assert_eq!(status.condition(ACTIVE).unwrap().reason, "TimedOut", "still the reason");
}

#[test]
fn a_revision_that_starts_with_nothing_is_inactive_at_once() {
    let defaults = Defaults::default();
    let mut cluster = Cluster::new(&[("initial-scale", "0")], START);
    cluster.apply(Write::Scale(0), START);
    let settings = Settings::of(&cluster.pa, &defaults).unwrap();
    for second in 0..3 {
        cluster.settle(after(second));
        cluster.pass(&settings, &defaults, None, after(second));
    }
    let status = cluster.pa.status.clone().unwrap();
    assert_eq!(cluster.active(), "False");
    assert!(status.is_true(INITIALIZED) && !status.is_true(READY));
    assert_eq!(cluster.sks.as_ref().unwrap().spec.mode, Mode::Proxy);
}

#[test]
fn a_new_revision_has_its_first_pods_before_anything_is_known_of_its_load() {
    let defaults = Defaults::default();
    let mut cluster = Cluster::new(&[("initial-scale", "3")], START);
    let settings = Settings::of(&cluster.pa, &defaults).unwrap();
    for second in 0..10 {
        cluster.settle(after(second));
        cluster.pass(&settings, &defaults, None, after(second));
    }
    assert_eq!((cluster.replicas, cluster.active()), (3, "True"));
    assert!(cluster.pa.status.as_ref().unwrap().is_true(INITIALIZED));
    // Reached once, it counts no more.
    cluster.pass(&settings, &defaults, Some(1), after(10));
    assert_eq!(cluster.replicas, 1);
}

#[test]
fn the_last_pods_wait_for_the_activator() {
    let (mut cluster, settings, defaults) = running(2);
    assert_eq!((cluster.replicas, cluster.active()), (2, "True"));
    // Active for less than the window: one pod stays.
    let pass = cluster.pass(&settings, &defaults, Some(0), after(60));
    assert_eq!((cluster.replicas, cluster.active()), (1, "True"));
    let left = pass.wake.unwrap();
    cluster.settle(after(60) + left);
    cluster.pass(&settings, &defaults, Some(0), after(60) + left);
    let sks = cluster.sks.clone().unwrap();
    assert_eq!((cluster.replicas, cluster.active(), sks.spec.mode), (1, "False", Mode::Proxy));
    let inactive = after(60) + left;
    cluster.settle(inactive);
    // In its grace period, and then without an answer of the activator.
    let observed = |cluster: &Cluster, now, backed| {
        let (ready, replicas) = (cluster.ready(now), Some(cluster.replicas));
        let observed = Observed {
            pa: &cluster.pa,
            sks: cluster.sks.as_ref(),
            replicas,
            ready,
            desired: Some(0),
            backed,
        };
        reconcile(&observed, &settings, &defaults, now)
    };
    let scales = |pass: &Pass| pass.writes.contains(&Write::Scale(0));
    let early = observed(&cluster, inactive + Duration::from_secs(10), true);
    assert!(!scales(&early) && !early.probe);
    assert_eq!(early.wake, Some(Duration::from_secs(20)));
    let alone = observed(&cluster, inactive + Duration::from_secs(30), false);
    assert!(!scales(&alone) && alone.probe);
    assert_eq!(alone.wake, Some(PROBE));
    assert!(scales(&observed(&cluster, inactive + Duration::from_secs(30), true)));
}

#[test]
fn a_service_of_somebody_else_is_left_alone() {
    let (mut cluster, settings, defaults) = running(1);
    let owners = &mut cluster.sks.as_mut().unwrap().metadata.owner_references;
    owners.as_mut().unwrap()[0].uid = "2".into();
    let pass = cluster.pass(&settings, &defaults, Some(5), after(61));
    assert!(matches!(pass.writes.as_slice(), [Write::Status(_)]), "{pass:?}");
    let status = cluster.pa.status.clone().unwrap();
    assert_eq!(status.condition(ACTIVE).unwrap().reason, "NotOwned");
    assert_eq!(status.condition(READY).unwrap().reason, "NotOwned");
    assert_eq!(cluster.pass(&settings, &defaults, Some(5), after(62)).writes, vec![]);
}

#[test]
fn a_target_that_is_not_there_is_looked_for_again() {
    let (mut cluster, settings, defaults) = running(1);
    let target = &mut cluster.pa.spec.scale_target_ref;
    (target.kind, target.name) = (Some("Deployment".into()), Some("d".into()));
    let observed = Observed {
        pa: &cluster.pa,
        sks: cluster.sks.as_ref(),
        replicas: None,
        ready: 0,
        desired: Some(2),
        backed: false,
    };
    let pass = reconcile(&observed, &settings, &defaults, after(61));
    assert!(pass.writes.iter().all(|write| !matches!(write, Write::Scale(_))));
    assert_eq!(pass.wake, Some(MISSING));
    let Some(Write::Status(status)) = pass.writes.last() else { panic!("{pass:?}") };
    let active = status.condition(ACTIVE).unwrap();
    assert_eq!((active.status.as_str(), active.reason.as_str()), ("Unknown", "TargetNotFound"));
    assert_eq!(active.message, "There is no Deployment \"d\" to scale.");
}

#[test]
fn conditions_of_others_stay() {
    let (mut cluster, settings, defaults) = running(1);
    let other = Condition { kind: "Paused".into(), status: "True".into(), ..Condition::default() };
    cluster.pa.status.as_mut().unwrap().conditions.push(other.clone());
    cluster.pass(&settings, &defaults, Some(3), after(61));
    let status = cluster.pa.status.clone().unwrap();
    assert_eq!(status.condition("Paused"), Some(&other));
    assert!(!status.conditions.iter().any(|condition| condition.kind == CLASS));
}
