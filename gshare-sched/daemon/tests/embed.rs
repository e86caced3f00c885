//! The daemon inside another program, with parts of its own.

use crate::common::{self, Client, attached, within};
use gshare_core::token::{ClientStatus, TokenError};
use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, Duration, Engine, GpuId, QuotaRange, ResourceSpec, ServiceClass, Timestamp, TokenAction,
    TokenEvent, TokenScheduler, UseState,
};
use gshare_sched::scale::{ClientScale, GpuScale, Iteration, ScaleState, VerticalError, VerticalScaler};
use gshared::{Config, Daemon, DaemonError, ManualClock};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Two daemons in one process: sockets, clients and metrics are each one's own.
#[test]
fn two_daemons_in_one_process_know_nothing_of_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [dir.path().join("a.sock"), dir.path().join("b.sock")];
    let daemons: Vec<_> =
        paths.iter().map(|path| Daemon::new(Config::at(path)).unwrap().spawn().unwrap()).collect();
    let (_client, _) = attached(&paths[0], 1, "alice", ResourceSpec::UNLIMITED);
    let clients = |n: usize| daemons[n].handle().snapshot().unwrap().clients.len();
    assert_eq!((clients(0), clients(1)), (1, 0));
    let connects = |n: usize| {
        let text = daemons[n].handle().metrics().unwrap();
        text.lines().find_map(|line| line.strip_prefix("gshare_connects_total ")).unwrap().to_owned()
    };
    assert_eq!((connects(0).as_str(), connects(1).as_str()), ("1", "0"));
    let taken = Daemon::new(Config::at(&paths[0])).unwrap_err();
    assert!(matches!(taken, DaemonError::InUse { .. }), "{taken}");
}

/// As when several `gshare run` find that none listens: one serves, at a socket that stays, and the others say so.
#[test]
fn of_daemons_that_start_at_once_one_serves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    for round in 0..50 {
        // Left by one that was killed.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let start = std::sync::Barrier::new(4);
        let build = || {
            start.wait();
            Daemon::new(Config::at(&path))
        };
        let built: Vec<_> = std::thread::scope(|scope| {
            let starting: Vec<_> = (0..4).map(|_| scope.spawn(build)).collect();
            starting.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let (mut serving, refused): (Vec<_>, Vec<_>) = built.into_iter().partition(Result::is_ok);
        assert_eq!(serving.len(), 1, "round {round}: {refused:?}");
        assert!(refused.iter().all(|one| matches!(one, Err(DaemonError::InUse { .. }))), "{refused:?}");
        let daemon = serving.pop().unwrap().unwrap().spawn().unwrap();
        drop(attached(&path, 1, "alice", ResourceSpec::UNLIMITED));
        daemon.stop().unwrap();
        assert!(!path.exists(), "round {round}");
    }
}

/// A token ends by the host's clock, not by the machine's.
#[test]
fn the_clock_is_the_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1)));
    let daemon =
        Daemon::builder(Config::at(&path)).clock(Arc::clone(&clock) as _).build().unwrap().spawn().unwrap();
    let (mut client, id) = attached(&path, 1, "alice", ResourceSpec::UNLIMITED);
    client.ask(id);
    let until = |message: &ToClient| match message {
        ToClient::Allow { turn: 0, until, .. } => Some(*until),
        _ => None,
    };
    assert!(client.until(until) < Timestamp::from_millis(1_000));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(daemon.handle().snapshot().unwrap().clients[0].holds_token, "time stands still");
    clock.set(Timestamp::from_millis(1_000));
    daemon.handle().wake();
    assert_eq!(client.until(until), Timestamp::from_millis(1_000), "stopped");
}

/// As one that is started for a single user does, by the host's clock: however late a client or its end is noticed.
#[test]
fn a_daemon_that_is_told_to_ends_some_time_after_its_last_client() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let mut config = Config::at(&path);
    config.idle_exit = Some(Duration::from_millis(200));
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1)));
    let daemon = Daemon::builder(config).clock(Arc::clone(&clock) as _).build().unwrap().spawn().unwrap();
    let handle = daemon.handle();
    let pass = |ms: u64| {
        clock.set(Timestamp::from_millis(ms));
        handle.wake();
    };
    // The daemon may answer the first requests before it checks its deadlines.
    let stays = || (0..100).all(|_| handle.snapshot().is_ok());
    pass(200);
    assert!(stays(), "it waits for the first one");
    let mut client = Client::connect(&path);
    client.enter(1, "alice", ResourceSpec::UNLIMITED);
    pass(100_000);
    assert!(stays(), "a client is connected");
    drop(client);
    within(|| (handle.snapshot().unwrap().connections == 0).then_some(()));
    pass(100_199);
    assert!(stays(), "a client may come yet");
    pass(100_200);
    within(|| matches!(handle.snapshot(), Err(DaemonError::Stopped)).then_some(()));
    daemon.stop().unwrap();
    assert!(!path.exists());
}

/// Else a tenant that starts a process per job is never held to its limit.
#[test]
fn what_a_process_overused_is_paid_back_by_the_next_of_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_000)));
    let builder = Daemon::builder(Config::at(&path)).clock(Arc::clone(&clock) as _);
    let daemon = builder.build().unwrap().spawn().unwrap();
    let handle = daemon.handle();
    let pass = |ms: u64| {
        clock.set(Timestamp::from_millis(ms));
        handle.wake();
        handle.snapshot().unwrap().clients
    };
    let gone = || within(|| handle.snapshot().unwrap().clients.is_empty().then_some(()));
    let tenth = common::spec("0.1", 100, None);
    let (mut job, id) = attached(&path, 1, "alice", tenth);
    job.ask(id);
    job.granted();
    job.gives_back(id, Duration::from_millis(60), UseState::Idle);
    drop(job);
    gone();
    let (mut other, other_id) = attached(&path, 2, "bob", tenth);
    other.ask(other_id);
    other.granted();
    drop(other);
    gone();
    let waits = |run: u64| {
        let (mut next, id) = attached(&path, run, "alice", tenth);
        next.ask(id);
        let until = next.until(|message| match message {
            ToClient::Throttle { until, .. } => Some(*until),
            _ => None,
        });
        assert_eq!(until, Timestamp::from_millis(1_600), "60 ms at a tenth");
        next
    };
    drop(waits(3));
    gone();
    assert!(pass(1_300).is_empty());
    let mut next = waits(4);
    let clients = pass(1_599);
    assert_eq!((clients[0].holds_token, clients[0].waiting_ns), (false, Some(Duration::from_millis(299))));
    pass(1_600);
    next.granted();
    drop(next);
    gone();
    // The last process left without a word about its token, which is charged in full: 10 ms at a tenth.
    let (mut last, id) = attached(&path, 5, "alice", tenth);
    last.ask(id);
    let until = last.until(|message| match message {
        ToClient::Throttle { until, .. } => Some(*until),
        _ => None,
    });
    assert_eq!(until, Timestamp::from_millis(1_700));
    pass(1_700);
    last.granted();
}

/// Grants a second to each client that asks; keeps their totals and no other books.
#[derive(Debug, Default)]
struct Generous {
    clients: Vec<ClientStatus>,
}

impl Engine for Generous {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        out: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                self.clients.push(ClientStatus::joined(client, gpu, share));
            }
            TokenEvent::ClientLeft { client } => self.clients.retain(|status| status.client != client),
            TokenEvent::Used { client, used, state } => {
                let status = self.clients.iter_mut().find(|status| status.client == client);
                status.expect("a client that joined").total_used = used;
                if state == UseState::Wants {
                    let budget = Duration::from_millis(1_000);
                    let (allowed, until) = (used.saturating_add(budget), now.saturating_add(budget));
                    out.push(TokenAction::Allow { client, allowed, until });
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }
}

impl TokenScheduler for Generous {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.clients.iter().find(|status| status.client == client).copied()
    }

    fn window(&self) -> Duration {
        Duration::from_millis(1_000)
    }
}

#[test]
fn the_policy_is_the_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let daemon = Daemon::builder(Config::at(&path)).engine(Box::<Generous>::default()).build().unwrap();
    let daemon = daemon.spawn().unwrap();
    let mut holders: Vec<_> =
        (0..3).map(|n| attached(&path, n, &format!("client-{n}"), ResourceSpec::UNLIMITED)).collect();
    for (client, id) in &mut holders {
        client.ask(*id);
        assert_eq!(client.granted(), Duration::from_millis(1_000), "all of it to all of them at once");
    }
    assert_eq!(daemon.handle().snapshot().unwrap().clients.len(), 3);
}

/// A scaler that gives each client its half of a GPU, and counts the clients.
struct Halves(Arc<AtomicUsize>);

impl VerticalScaler for Halves {
    fn join(
        &mut self,
        _: Timestamp,
        _: ClientId,
        _: GpuId,
        _: QuotaRange,
        _: ServiceClass,
    ) -> Result<(), VerticalError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn set_quota(&mut self, _: Timestamp, _: ClientId, _: QuotaRange) -> Result<(), VerticalError> {
        Ok(())
    }

    fn leave(&mut self, _: Timestamp, _: ClientId) {}

    fn used(&mut self, _: Timestamp, _: ClientId, _: u64) {}

    fn iterated(&mut self, _: Timestamp, _: ClientId, _: Iteration) -> Result<(), VerticalError> {
        Ok(())
    }

    fn catch_up(&mut self, _: Timestamp) {}

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }

    fn gpu(&self, _: GpuId) -> Option<GpuScale> {
        Some(GpuScale { state: ScaleState::Contention, max_tokens: 2, issued_tokens: 2 })
    }

    fn client(&self, _: ClientId) -> Option<ClientScale> {
        let (gpu, class, state) = (GpuId::new(0), ServiceClass::SLO_SENSITIVE, ScaleState::Contention);
        Some(ClientScale { gpu, class, state, issued_tokens: 1, floor_tokens: 1 })
    }
}

/// A client of a class is the vertical scaler's, and its shares are then the host's to move.
#[test]
fn the_vertical_scaler_is_the_hosts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let joined = Arc::new(AtomicUsize::new(0));
    let own = Halves(Arc::clone(&joined));
    let daemon = Daemon::builder(Config::at(&path)).scaler(Box::new(own)).build().unwrap().spawn().unwrap();
    let mut client = Client::connect(&path);
    client.enter(1, "alice", ResourceSpec::UNLIMITED.with_quota("0.2:0.4".parse().unwrap()));
    client.send(&ToDaemon::Class { class: ServiceClass::SLO_SENSITIVE });
    client.attach(Bytes::ZERO);
    within(|| (joined.load(Ordering::Relaxed) == 1).then_some(()));
    daemon.stop().unwrap();
}

/// A scheduler with broken books.
#[derive(Debug, Default)]
struct Broken(Generous);

impl Engine for Broken {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        assert!(!matches!(event, TokenEvent::Used { .. }), "a promise\nis broken");
        self.0.handle(now, event, actions)
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }
}

impl TokenScheduler for Broken {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.0.client(client)
    }

    fn window(&self) -> Duration {
        self.0.window()
    }
}

/// The next daemon takes its sockets, and admits the client with the memory it states.
#[test]
fn a_fault_in_the_engine_ends_the_daemon_and_its_clients_go_on_with_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let at = path.clone();
    let broken = common::Forked::run(None, move || {
        gshared::command::end_on_panic();
        let daemon = Daemon::builder(Config::at(at)).engine(Box::<Broken>::default()).build().unwrap();
        let _ = daemon.run();
    });
    let limited = common::spec("0.5", 100, Some(256));
    within(|| Client::try_connect(&path).ok());
    let (mut client, id) = attached(&path, 1, "alice", limited);
    client.ask(id);
    assert_eq!(broken.code(), gshared::command::FAULT);
    client.rest();

    let daemon = Daemon::new(Config::at(&path)).unwrap().spawn().unwrap();
    let mut again = Client::connect(&path);
    again.enter(1, "alice", limited);
    let (_, spec) = again.attach(Bytes::from_mib(100));
    assert_eq!(spec, limited, "it keeps its limit");
    let snapshot = daemon.handle().snapshot().unwrap();
    assert_eq!(snapshot.devices[0].held_bytes, Bytes::from_mib(100), "and its memory");
}

#[test]
fn a_stopped_daemon_leaves_no_sockets_and_its_handles_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let daemon = Daemon::new(Config::at(&path)).unwrap().spawn().unwrap();
    let handle = daemon.handle().clone();
    let mut client = Client::connect(&path);
    client.enter(1, "alice", ResourceSpec::UNLIMITED);
    daemon.stop().unwrap();
    assert_eq!(client.receive(), None);
    let mut left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    left.sort();
    let told = ["gshare.sock.key", "gshare.sock.left"];
    assert_eq!(left, told, "the next daemon is told that a process was connected, and knows its ticket");
    assert!(matches!(handle.snapshot(), Err(DaemonError::Stopped)));
}

#[test]
fn metrics_are_served_where_the_configuration_says() {
    use std::io::{Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gshare.sock");
    let mut config = Config::at(&path);
    let endpoint = dir.path().join("metrics.sock");
    config.metrics = Some(gshared::config::MetricsAddress::Unix(endpoint.clone()));
    let daemon = Daemon::new(config).unwrap().spawn().unwrap();
    let (client, _) = attached(
        &path,
        1,
        "alice",
        "0.2:0.5".parse().map(|q| ResourceSpec::UNLIMITED.with_quota(q)).unwrap(),
    );
    let get = |url: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&endpoint).unwrap();
        write!(stream, "GET {url} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = get("/metrics");
    let uid = rustix::process::geteuid().as_raw();
    let uuid = &daemon.handle().snapshot().unwrap().devices[0].uuid;
    // The test may run in a container.
    let labels = format!("{{name=\"alice\",class=\"none\",uuid=\"{uuid}\",uid=\"{uid}\",pod=\"");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let series = format!("gshare_client_limit_ratio{labels}");
    let limit = text.lines().find(|line| line.starts_with(&series)).unwrap_or_else(|| panic!("{text}"));
    assert!(limit.ends_with("\"} 0.5"), "{limit}");
    assert!(text.contains("gshare_dropped_connections_total{reason=\"slow\"} 0"), "{text}");
    assert!(text.trim_end().ends_with("# EOF"), "{text}");
    assert!(get("/nothing").starts_with("HTTP/1.1 404"));
    drop(client);
    within(|| daemon.handle().snapshot().unwrap().clients.is_empty().then_some(()));
    assert!(get("/metrics").contains("alice"), "the last use of a client is in one more answer");
    assert!(!get("/metrics").contains("alice"), "a client that is gone leaves no label");
    daemon.stop().unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A process that cleans up a directory may be faster than the daemon that was told to stop.
#[test]
fn a_daemon_whose_sockets_are_gone_ends_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::new(Config::at(dir.path().join("gone.sock"))).unwrap().spawn().unwrap();
    daemon.handle().snapshot().unwrap();
    drop(dir);
    let stopping = std::thread::spawn(move || daemon.stop());
    within(|| stopping.is_finished().then_some(()));
    stopping.join().unwrap().unwrap();
}

#[test]
fn a_lost_device_is_in_the_snapshot_until_it_is_back_and_a_driver_that_hangs_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    // A driver that is asked once for each answer that it is given; `None`: it does not tell.
    let (tell, told) = std::sync::mpsc::channel();
    let news = move || told.recv().unwrap_or_default();
    let builder = Daemon::builder(Config::at(dir.path().join("gshare.sock"))).health(news);
    let daemon = builder.build().unwrap().spawn().unwrap();
    let handle = daemon.handle();
    let lost = || handle.snapshot().unwrap().lost;
    // The driver has not answered yet, and snapshots are given all the same.
    assert!(lost().is_none());
    let news = r#"[[{"uuid":"GPU-1","why":"it is gone"}],[{"uuids":["GPU-0"],"name":"A100","celsius":60,"milliwatts":null}]]"#;
    tell.send(Some(serde_json::from_str(news).unwrap())).unwrap();
    within(|| lost().is_some_and(|lost| lost.len() == 1 && lost[0].uuid == "GPU-1").then_some(()));
    assert_eq!(handle.snapshot().unwrap().sensors[0].celsius, Some(60));
    tell.send(None).unwrap();
    tell.send(Some(gshared::nvml::News::default())).unwrap();
    within(|| lost().is_some_and(|lost| lost.is_empty()).then_some(()));
    // It is asked a last time, which it does not answer.
    daemon.stop().unwrap();
}
