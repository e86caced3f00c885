//! The store against a real etcd server on the loopback, which the test starts.
//!
//! The server is the program named by `GSHARE_ETCD`, else `etcd` on the path. Where there is none the tests say so and do
//! nothing, unless `GSHARE_CI` is set: then that is a failure.

use gshare_core::{Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, Timestamp};
use gshare_etcd::EtcdStore;
use gshare_sched::request::shared_state::{Seen, reconcile};
use gshare_sched::request::{
    GpuRecord, LocalityScheduler, ModelProfile, RequestEvent, RequestScheduler, SchedulerConfig, StateError,
    StateStore, Version,
};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration as StdDuration, Instant};

const NOW: Timestamp = Timestamp::ZERO;
const LONG: Duration = Duration::from_secs(600);

struct Server {
    child: Child,
    url: String,
    _dir: tempfile::TempDir,
}

impl Server {
    /// `None` where there is no etcd.
    fn start() -> Option<Self> {
        let program = std::env::var_os("GSHARE_ETCD").filter(|text| !text.is_empty());
        let named = program.is_some();
        let program = program.unwrap_or_else(|| "etcd".into());
        // The system says which ports are free. Another process may take one before etcd does: then try again.
        for _ in 0..5 {
            let dir = tempfile::tempdir().unwrap();
            let free = || TcpListener::bind("127.0.0.1:0").unwrap();
            let (client, peer) = (free(), free());
            let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
            let (url, peer_url) = (url(&client), url(&peer));
            drop((client, peer));
            let child = Command::new(&program)
                .arg("--data-dir")
                .arg(dir.path().join("data"))
                .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
                .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
                .args(["--initial-cluster", &format!("default={peer_url}"), "--unsafe-no-fsync"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            let child = match child {
                Ok(child) => child,
                Err(error) if named || std::env::var_os("GSHARE_CI").is_some() => {
                    panic!("{}: {error}", program.display())
                }
                Err(_) => {
                    println!("skipped: no etcd");
                    return None;
                }
            };
            let mut server = Self { child, url, _dir: dir };
            let start = Instant::now();
            while start.elapsed() < StdDuration::from_secs(30) {
                if server.store("/probe").version(GpuId::new(0)).is_ok() {
                    return Some(server);
                }
                if server.child.try_wait().unwrap().is_some() {
                    break;
                }
                std::thread::sleep(StdDuration::from_millis(20));
            }
        }
        panic!("etcd does not start")
    }

    fn store(&self, prefix: &str) -> EtcdStore {
        let mut store = EtcdStore::new([&self.url], prefix);
        // Several servers start at once, on a machine that may be busy.
        store.set_timeout(StdDuration::from_secs(60));
        store
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn record(models: &[u32]) -> GpuRecord {
    let models = models.iter().copied().map(ModelId::new).collect();
    GpuRecord { busy: true, free_at: Timestamp::from_millis(5), models }
}

#[test]
fn a_write_must_name_the_version_it_replaces() {
    let Some(server) = Server::start() else { return };
    let (mut store, gpu) = (server.store("/a"), GpuId::new(3));
    assert_eq!((store.version(gpu), store.get(NOW, gpu)), (Ok(Version(0)), Ok(None)));
    let first = store.put(NOW, gpu, record(&[1]), Version(0), LONG).unwrap();
    let mut other = server.store("/a/");
    let error = other.put(NOW, gpu, record(&[2]), Version(0), LONG).unwrap_err();
    assert_eq!(error.to_string(), "record of gpu3 is at version 1, not 0");
    assert_eq!(store.get(NOW, gpu), Ok(Some((first, record(&[1])))), "nothing was written");
    assert_eq!(other.put(NOW, gpu, record(&[2, 5]), first, LONG), Ok(Version(2)));
    assert_eq!(store.get(NOW, gpu), Ok(Some((Version(2), record(&[2, 5])))));
    // In the order of numbers, not of texts; other prefixes are other stores.
    for gpu in [10, 2, 30] {
        store.put(NOW, GpuId::new(gpu), record(&[]), Version(0), LONG).unwrap();
    }
    assert_eq!(store.live(NOW), Ok(vec![GpuId::new(2), gpu, GpuId::new(10), GpuId::new(30)]));
    assert_eq!(server.store("/b").live(NOW), Ok(vec![]));
}

#[test]
fn a_record_ends_with_its_lease_and_its_version_does_not() {
    let Some(server) = Server::start() else { return };
    let (mut store, mut renewed, gpu) = (server.store("/a"), server.store("/a"), GpuId::new(0));
    // Long enough to be renewed in time by a process that has to wait for its turn.
    let lease = Duration::from_secs(4);
    let version = store.put(NOW, gpu, record(&[1]), Version(0), lease).unwrap();
    let mut kept = renewed.put(NOW, GpuId::new(1), record(&[1]), Version(0), lease).unwrap();
    assert_eq!(store.live(NOW), Ok(vec![gpu, GpuId::new(1)]));
    let start = Instant::now();
    while store.get(NOW, gpu).unwrap().is_some() {
        assert!(start.elapsed() < StdDuration::from_secs(60), "the lease does not end");
        kept = renewed.put(NOW, GpuId::new(1), record(&[1]), kept, lease).unwrap();
        std::thread::sleep(StdDuration::from_millis(100));
    }
    assert_eq!(store.live(NOW), Ok(vec![GpuId::new(1)]), "what is renewed lives");
    assert_eq!(store.version(gpu), Ok(version));
    let old = store.put(NOW, gpu, record(&[1]), Version(0), lease);
    assert!(matches!(old, Err(StateError::Conflict { .. })), "an old writer still loses");
    // The lease is gone with the record: the next write gets a new one.
    assert_eq!(store.put(NOW, gpu, record(&[4]), version, LONG), Ok(Version(2)));
    assert_eq!(store.get(NOW, gpu), Ok(Some((Version(2), record(&[4])))));
}

#[test]
fn of_many_writers_with_one_version_one_wins() {
    let Some(server) = Server::start() else { return };
    let gpu = GpuId::new(9);
    let won: usize = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|writer| {
                let mut store = server.store("/race");
                scope.spawn(move || store.put(NOW, gpu, record(&[writer]), Version(0), LONG).is_ok())
            })
            .collect();
        writers.into_iter().map(|writer| usize::from(writer.join().unwrap())).sum()
    });
    assert_eq!(won, 1);
    assert_eq!(server.store("/race").version(gpu), Ok(Version(1)));
}

#[test]
fn what_is_no_record_is_a_miss_and_a_dead_server_is_unavailable() {
    let Some(mut server) = Server::start() else { return };
    let mut store = server.store("/a");
    let gpu = GpuId::new(0);
    let version = store.put(NOW, gpu, record(&[1]), Version(0), LONG).unwrap();
    // {"busy": …} it is not.
    let body = r#"{"key": "L2EvcmVjb3JkLzA=", "value": "bm9uc2Vuc2U="}"#;
    ureq::post(format!("{}/v3/kv/put", server.url)).send(body).unwrap();
    assert_eq!(store.get(NOW, gpu), Ok(None));
    store.put(NOW, gpu, record(&[2]), version, LONG).unwrap();
    assert!(store.get(NOW, gpu).unwrap().is_some());
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    assert!(matches!(store.get(NOW, gpu), Err(StateError::Unavailable { .. })));
    let put = store.put(NOW, gpu, record(&[3]), Version(2), LONG);
    assert!(matches!(put, Err(StateError::Unavailable { .. })));
}

/// Hole 17: a scheduler that believes what the store does not hold takes it as a miss.
#[test]
fn a_scheduler_catches_up_with_what_the_nodes_wrote() {
    let Some(server) = Server::start() else { return };
    let mut store = server.store("/cluster");
    let mut scheduler = LocalityScheduler::new(SchedulerConfig::default()).unwrap();
    let gpu = GpuId::new(0);
    let second = Duration::from_secs(1);
    let profile = ModelProfile { load_disk: second, load_host: second, infer: second };
    let (model, kind, node, memory) = (ModelId::new(0), GpuKind::new(0), NodeId::new(0), Bytes::from_gib(1));
    let mut tell = |event| scheduler.handle(NOW, event, &mut Vec::new()).unwrap();
    tell(RequestEvent::GpuJoined { gpu, kind, node, memory });
    tell(RequestEvent::ModelAdded { model, memory });
    tell(RequestEvent::ModelProfiled { model, kind, profile });
    let request = gshare_core::RequestId::new(1);
    tell(RequestEvent::Arrived { request, model, tenant: gshare_core::TenantId::new(0), deadline: None });
    tell(RequestEvent::Loaded { gpu, model, took: second });
    tell(RequestEvent::Completed { gpu, request, took: second });
    assert_eq!(scheduler.gpu(gpu).unwrap().models, [model]);
    let mut seen = Seen::default();
    let version = store.put(NOW, gpu, record(&[0]), Version(0), LONG).unwrap();
    assert_eq!(reconcile(NOW, &store, &scheduler, &[gpu], &mut seen), []);
    // The node lost it.
    store.put(NOW, gpu, record(&[]), version, LONG).unwrap();
    let news = reconcile(NOW, &store, &scheduler, &[gpu], &mut seen);
    assert_eq!(news, [RequestEvent::Dropped { gpu, model }]);
    // A node that never wrote is a lost one; a store that does not answer tells nothing.
    let other = server.store("/elsewhere");
    let news = reconcile(NOW, &other, &scheduler, &[gpu], &mut Seen::default());
    assert_eq!(news, [RequestEvent::GpuLost { gpu }]);
    drop(server);
    assert_eq!(reconcile(NOW, &store, &scheduler, &[gpu], &mut seen), []);
}
