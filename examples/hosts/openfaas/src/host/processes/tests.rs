use super::super::Turn;
use super::super::tests::training;
use super::*;
use crate::api::FunctionDeployment;
use crate::deployment::Plan;
use crate::running::LocalProcess;
use crossbeam_channel::Receiver;
use gshare_core::{Bytes, Duration, GpuId, NodeId, RequestId};
use gshare_runner::HookedProcess;
use gshare_sched::platform::{DeviceSpec, PlatformSettings};
use std::io::Read as _;
use std::process::{Command, Stdio};
use tokio::sync::mpsc::UnboundedReceiver;

const NOW: Timestamp = Timestamp::ZERO;

fn process(script: &str) -> LocalProcess {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
    let process = HookedProcess::start(command, "f", gshare_runner::new_run().unwrap(), None).unwrap();
    LocalProcess { process, port: 1 }
}

/// Waits until an ending process has ended.
fn wait(host: &mut Host, instance: InstanceId, index: usize) {
    while !host.has_ended(NOW, instance, index) {
        std::thread::yield_now();
    }
}

/// Starts the second worker of a job after the first worker has failed in this way.
fn starts_late(way: &str, fails: impl Fn(&mut Host, InstanceId)) {
    let (mut host, [first, second], _orders) = training();
    let id = first.instance;
    fails(&mut host, id);
    let mut late = process("sleep 10; echo has lived");
    let mut output = late.process.take_output().0.unwrap();
    host.started(NOW, id, second.index, late);
    assert_eq!(host.life(id), Some((Life::Starting, None)), "{way}: half of a job is not ready");
    let mut said = String::new();
    output.read_to_string(&mut said).unwrap();
    assert_eq!(said, "", "{way}");
    wait(&mut host, id, second.index);
    assert!(!host.instances.contains_key(&id), "{way}: its share is free again");
    host.invariants();
}

/// A host of one device with a daemon, and two functions of which one has room at a time.
struct TakingTurns {
    host: Host,
    orders: Receiver<Order>,
    now: Timestamp,
}

impl TakingTurns {
    fn start() -> Self {
        let (sender, orders) = crossbeam_channel::unbounded();
        let platform = PlatformSettings::default().build().unwrap();
        let host = Host::new(platform, Bytes::from_mib(64), sender).with_parking(true);
        let mut turns = Self { host, orders, now: NOW };
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
        turns
            .host
            .tell(NOW, PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec })
            .map_err(|error| error.message)
            .unwrap();
        turns
    }

    /// Function `a` runs, and its memory is to move for `b`.
    fn parks_a() -> (Self, InstanceId, Move) {
        let mut turns = Self::start();
        turns.deploy("a", "");
        let a = turns.begin();
        turns.deploy("b", "");
        let out = turns.moves();
        (turns, a, out)
    }

    /// Deploys a function of 9 GiB.
    fn deploy(&mut self, name: &str, annotations: &str) {
        let text = format!(
            r#"{{"service":"{name}","image":"/bin/sleep 1000","annotations":{{"fastgshare/gpu_quota_request":"0.4",
            "fastgshare/gpu_mem":"9GiB"{annotations}}}}}"#
        );
        let deployment: FunctionDeployment = serde_json::from_str(&text).unwrap();
        let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message).unwrap();
        self.host
            .deploy(self.now, Version { deployment, plan }, 0, None)
            .map_err(|error| error.message)
            .unwrap();
    }

    /// The next order within some seconds.
    fn order(&mut self) -> Order {
        for _ in 0..1_000 {
            if let Ok(order) = self.orders.try_recv() {
                return order;
            }
            self.now = self.now.saturating_add(Duration::from_millis(10));
            self.host.deadline(self.now);
        }
        panic!("no order in ten seconds")
    }

    /// Starts the process of the next order.
    fn begin(&mut self) -> InstanceId {
        let Order::Run(launch) = self.order() else { panic!("no process is to start") };
        assert!(launch.parks);
        self.host.started(self.now, launch.instance, 0, process("sleep 1000"));
        self.host.listens(self.now, launch.instance, 0);
        launch.instance
    }

    fn moves(&mut self) -> Move {
        match self.order() {
            Order::Move(order) => order,
            other => panic!("no memory is to move: {other:?}"),
        }
    }

    fn request(&mut self, name: &str) -> (RequestId, UnboundedReceiver<Turn>) {
        let (turn, turns) = tokio::sync::mpsc::unbounded_channel();
        (self.host.arrive(self.now, name, turn).map_err(|error| error.message).unwrap(), turns)
    }
}

#[test]
fn a_parked_instance_keeps_its_process_and_comes_back_with_its_memory() {
    let (mut turns, a, out) = TakingTurns::parks_a();
    let pid = turns.host.pids(a);
    assert_eq!((out.instance, &out.clients[..], out.on), (a, &["a-0".to_owned()][..], true));
    turns.host.moved(turns.now, &out, Ok(()));
    let b = turns.begin();
    assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), pid.clone()));
    let mut request = turns.request("a");
    let other = turns.moves();
    assert_eq!((other.instance, other.on), (b, true));
    turns.host.moved(turns.now, &other, Ok(()));
    let back = turns.moves();
    assert_eq!((back.instance, back.on, turns.host.pids(a)), (a, false, pid));
    // An answer to the earlier order comes late.
    turns.host.moved(turns.now, &out, Err("late".to_owned()));
    turns.host.moved(turns.now, &back, Ok(()));
    assert!(
        matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a && go.load.is_some_and(|load| load.parked))
    );
    turns.host.invariants();
}

#[test]
fn an_instance_ends_if_it_starts_in_less_time_than_its_memory_moves() {
    let later = |turns: &mut TakingTurns, ms| turns.now = turns.now.saturating_add(Duration::from_millis(ms));
    let mut turns = TakingTurns::start();
    turns.deploy("a", "");
    let Order::Run(launch) = turns.order() else { panic!("no process is to start") };
    let a = launch.instance;
    turns.host.started(turns.now, a, 0, process("sleep 1000"));
    later(&mut turns, 100);
    turns.host.listens(turns.now, a, 0);
    turns.deploy("b", "");
    let out = turns.moves();
    later(&mut turns, 300);
    turns.host.moved(turns.now, &out, Ok(()));
    turns.begin();
    let mut request = turns.request("a");
    let other = turns.moves();
    turns.host.moved(turns.now, &other, Ok(()));
    let back = turns.moves();
    later(&mut turns, 300);
    turns.host.moved(turns.now, &back, Ok(()));
    assert!(matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a));
    turns.host.end(turns.now, request.0);
    let _request = turns.request("b");
    while turns.host.life(a) == Some((Life::Ready, None)) {
        later(&mut turns, 10);
        turns.host.deadline(turns.now);
    }
    wait(&mut turns.host, a, 0);
    assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), vec![]));
}

#[test]
fn an_instance_that_cannot_be_parked_ends_and_starts_again() {
    let (mut turns, a, out) = TakingTurns::parks_a();
    turns.host.moved(turns.now, &out, Err("its memory is managed".to_owned()));
    wait(&mut turns.host, a, 0);
    assert_eq!((turns.host.life(a), turns.host.pids(a)), (Some((Life::Parked, None)), vec![]));
    turns.begin();
    let _request = turns.request("a");
    let out = turns.moves();
    turns.host.moved(turns.now, &out, Ok(()));
    assert_eq!(turns.begin(), a);
    turns.host.invariants();
}

#[test]
fn a_process_is_replaced_if_its_memory_does_not_come_back() {
    let (mut turns, a, out) = TakingTurns::parks_a();
    let pid = turns.host.pids(a);
    turns.host.moved(turns.now, &out, Ok(()));
    turns.begin();
    let mut request = turns.request("a");
    let out = turns.moves();
    turns.host.moved(turns.now, &out, Ok(()));
    let back = turns.moves();
    turns.host.moved(turns.now, &back, Err("no room".to_owned()));
    wait(&mut turns.host, a, 0);
    assert_eq!(turns.begin(), a);
    assert_ne!(turns.host.pids(a), pid);
    assert!(matches!(request.1.try_recv(), Ok(Turn::Go(go)) if go.instance == a));
    turns.host.invariants();
}

/// A daemon that starts again does not know which of its parked programs were held.
#[test]
fn a_parked_instance_that_its_daemon_does_not_hold_is_ordered_again() {
    let (mut turns, a, out) = TakingTurns::parks_a();
    turns.host.not_held("a-0");
    assert!(turns.orders.is_empty(), "its memory still moves");
    turns.host.moved(turns.now, &out, Ok(()));
    let b = turns.begin();
    for name in ["b-1", "a-7", "c-0", "a"] {
        turns.host.not_held(name);
    }
    assert!(turns.orders.is_empty(), "{b} is not parked, and the others are no processes of this host");
    turns.host.not_held("a-0");
    let again = turns.moves();
    assert_eq!((again.instance, &again.clients[..], again.on), (a, &["a-0".to_owned()][..], true));
    turns.host.not_held("a-0");
    assert!(turns.orders.is_empty(), "it is ordered already");
    // The return is ordered when the order to hold is over, which it must not overtake.
    let _request = turns.request("a");
    let other = turns.moves();
    assert_ne!(other.instance, a);
    turns.host.moved(turns.now, &other, Ok(()));
    assert!(turns.orders.is_empty(), "its return waits");
    turns.host.moved(turns.now, &again, Ok(()));
    let back = turns.moves();
    assert_eq!((back.instance, back.on), (a, false));
    turns.host.moved(turns.now, &back, Ok(()));
    assert_eq!(turns.host.life(a), Some((Life::Ready, None)));
    turns.host.invariants();
}

#[test]
fn a_parked_instance_that_cannot_be_held_any_more_ends() {
    let (mut turns, a, out) = TakingTurns::parks_a();
    turns.host.moved(turns.now, &out, Ok(()));
    turns.begin();
    turns.host.not_held("a-0");
    let again = turns.moves();
    turns.host.moved(turns.now, &again, Err("the user's host memory is taken".to_owned()));
    wait(&mut turns.host, a, 0);
    assert_eq!(turns.host.pids(a), [] as [u32; 0]);
    turns.host.invariants();
}

#[test]
fn an_instance_that_may_not_be_parked_ends() {
    let mut turns = TakingTurns::start();
    turns.deploy("a", r#","gshare/park":"false""#);
    let Order::Run(launch) = turns.order() else { panic!("no process is to start") };
    assert!(!launch.parks);
    turns.host.started(turns.now, launch.instance, 0, process("sleep 1000"));
    turns.host.listens(turns.now, launch.instance, 0);
    turns.deploy("b", "");
    while turns.host.life(launch.instance) == Some((Life::Ready, None)) {
        turns.now = turns.now.saturating_add(Duration::from_millis(10));
        turns.host.deadline(turns.now);
    }
    wait(&mut turns.host, launch.instance, 0);
    assert_eq!(turns.host.life(launch.instance), Some((Life::Parked, None)));
}

#[test]
fn a_worker_that_is_started_after_another_one_has_failed_ends_too() {
    starts_late("dies", |host, id| {
        host.started(NOW, id, 0, process("exit 1"));
        wait(host, id, 0);
    });
    starts_late("cannot start", |host, id| host.failed(NOW, id, 0, "no such file".to_owned()));
    starts_late("is broken off", |host, id| {
        host.started(NOW, id, 0, process("sleep 1000"));
        host.unreachable(id);
        wait(host, id, 0);
    });
}

#[test]
fn a_worker_that_is_started_after_another_one_is_done_completes_the_job() {
    let (mut host, [first, second], _orders) = training();
    let id = first.instance;
    host.started(NOW, id, first.index, process("exit 0"));
    wait(&mut host, id, first.index);
    host.started(NOW, id, second.index, process("exit 0"));
    assert_eq!(host.life(id), Some((Life::Ready, None)));
    wait(&mut host, id, second.index);
    assert!(host.view("f").unwrap().state == "completed");
    host.invariants();
}
