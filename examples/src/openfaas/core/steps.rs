//! A step of load on virtual time: replicas that serve a request at a time, within a quota of 40 ms in each 100 ms.

use super::*;
use std::sync::mpsc::channel;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const SLO: u64 = 69;
/// What a request takes of the GPU.
const WORK: u64 = 10;
/// What a replica may take of it in a window, and its length. There is no slack: limit and request are the same.
const QUOTA: (u64, u64) = (40, 100);
/// From being asked for to listening.
const START: u64 = 150;

/// What came of a load, in requests.
#[derive(Debug, Default)]
struct Seen {
    sent: usize,
    late: usize,
    /// Replicas that are starting or ready, at the end of each second.
    replicas: Vec<u64>,
}

#[derive(Debug)]
struct Replica {
    ready_at: u64,
    ready: bool,
    left: u64,
    request: Option<RequestId>,
    quota: u64,
}

/// Plays `phases` of requests/s and seconds, with Poisson arrivals. One step is a millisecond.
fn play(phases: &[(u64, u64)], seed: u64) -> Seen {
    let (sender, launches) = channel();
    let mut core = Core::new(1, Bytes::from_gib(4), 1024, Duration::from_secs(60), sender).unwrap();
    let body = serde_json::json!({"service": "f", "image": "x", "annotations": {
        "fastgshare/gpu_quota_request": "0.4", "fastgshare/gpu_sm_partition": "24", "gshare/requests_per_second": "27"}});
    let (deployment, plan) = FunctionDeployment::parse(body.to_string().as_bytes()).unwrap();
    core.deploy(Timestamp::ZERO, deployment, plan, 0, None).unwrap();

    let mut seen = Seen::default();
    let mut replicas: BTreeMap<InstanceId, Replica> = BTreeMap::new();
    let mut open: Vec<(u64, RequestId, UnboundedReceiver<Turn>)> = Vec::new();
    let mut random = seed;
    // A second for the first replica.
    let (mut due, mut start) = (1_000.0, 1_000);
    let mut phases = phases.iter();
    let (mut rate, mut end) = (0, start);
    for ms in 0.. {
        let now = Timestamp::from_millis(ms);
        if ms == end {
            let Some(&(next, seconds)) = phases.next() else { break };
            (rate, start, end) = (next, end, end + seconds * 1_000);
            due = f64::max(due, start as f64);
        }
        if ms % 1_000 == 0 {
            core.tick(now);
            seen.replicas.push(core.view("f").unwrap().replicas);
        }
        while rate > 0 && due < ms as f64 {
            let (turn, turns) = unbounded_channel();
            open.push((ms, core.arrive(now, "f", turn).unwrap(), turns));
            seen.sent += 1;
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let uniform = ((random >> 11) as f64 / (1_u64 << 53) as f64).max(1e-12);
            due -= uniform.ln() * 1_000.0 / rate as f64;
        }
        for launch in launches.try_iter() {
            let replica =
                Replica { ready_at: ms + START, ready: false, left: 0, request: None, quota: QUOTA.0 };
            replicas.insert(launch.instance, replica);
        }
        for (instance, replica) in &mut replicas {
            if !replica.ready && replica.ready_at <= ms {
                replica.ready = true;
                core.ready(now, *instance);
            }
        }
        for (_, request, turns) in &mut open {
            while let Ok(Turn::Go { instance, .. }) = turns.try_recv() {
                assert!(core.reached("f", *request, instance));
                let replica = replicas.get_mut(&instance).unwrap();
                assert_eq!(replica.request, None);
                (replica.request, replica.left) = (Some(*request), WORK);
            }
        }
        for replica in replicas.values_mut() {
            if ms % QUOTA.1 == 0 {
                replica.quota = QUOTA.0;
            }
            if replica.request.is_some() && replica.quota > 0 {
                (replica.left, replica.quota) = (replica.left - 1, replica.quota - 1);
            }
            if replica.left == 0
                && let Some(request) = replica.request.take()
            {
                let place = open.iter().position(|(_, other, _)| *other == request).unwrap();
                seen.late += usize::from(ms + 1 - open.swap_remove(place).0 > SLO);
                core.end(now, "f", request);
            }
        }
        let doomed = |id: &InstanceId| core.instances[id].stage == Stage::Doomed;
        let gone: Vec<_> = replicas.extract_if(.., |id, _| doomed(id)).collect();
        for (instance, replica) in gone {
            assert_eq!(replica.request, None, "scaling in loses no request");
            core.gone(now, instance);
        }
    }
    // Those that are still there are not counted as late: their phase has just ended.
    assert!(open.len() < 5, "{}", open.len());
    seen
}

#[test]
fn a_step_of_load_is_late_for_less_than_one_request_in_a_hundred_and_replicas_follow() {
    let (mut sent, mut late) = (0, 0);
    for seed in 1..=20 {
        let seen = play(&[(30, 15), (110, 20), (20, 25)], 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
        println!("{} of {} late, replicas {:?}", seen.late, seen.sent, seen.replicas);
        (sent, late) = (sent + seen.sent, late + seen.late);
        // A second, then 15 of 30, 20 of 110 and 25 of 20 requests/s.
        let (peak, end) = (&seen.replicas[26..36], &seen.replicas[50..]);
        assert!(peak.iter().all(|count| (5..=7).contains(count)), "{:?}", seen.replicas);
        assert!(end.iter().all(|count| (1..=2).contains(count)), "{:?}", seen.replicas);
    }
    println!("{late} of {sent}");
    assert!(late * 100 < sent, "{late} of {sent}");
}
