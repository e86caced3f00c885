//! The co-scaler's shares for hooked programs, in `gshare top` and `gshare status --json`, on the simulated driver.

use crate::common::{self, Local, Process, attached, spec, within};
use crate::hooked;
use gshare_core::ServiceClass;
use gshare_core::wire::ToClient;
use gshare_sched::scale::ScaleState;
use rustix::process::Signal;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const CLASSES: &str = "[[client]]\nname = 'owner'\nquota = '0.4:0.9'\nclass = 'slo-sensitive:40'\n\
    [[client]]\nname = 'trainer'\nquota = '0.2:1.0'\nclass = 'best-effort'\n";

fn gshare(socket: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare"));
    let output = command.args(arguments).arg("--socket").arg(socket).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Waits until both `top` and `status --json` show these classes and states, name by name. A state that comes and goes is
/// asked for again and again.
fn shown(socket: &Path, clients: &[(&str, &str, &str)]) {
    within(|| {
        let table = gshare(socket, &["top", "--count", "1"]);
        let row = |name: &str| table.lines().find(|line| line.starts_with(name));
        assert!(
            table.lines().any(|line| line.starts_with("gpu0 GPU-") && line.contains(" simulated, ")),
            "{table}"
        );
        let state = |line: &str, state: &str| line.rsplit_once(", at most ")?.0.contains(state).then_some(());
        clients.iter().try_for_each(|(name, _, wanted)| state(row(name)?, wanted))
    });
    within(|| {
        let status: serde_json::Value = serde_json::from_str(&gshare(socket, &["status", "--json"])).unwrap();
        let all = status["clients"].as_array().unwrap();
        assert_eq!(all.len(), clients.len(), "{status}");
        assert_eq!(status["devices"][0]["simulated"], true, "{status}");
        assert!(all.iter().all(|client| client["held_by"]["time"] == "hook"), "{status}");
        clients.iter().try_for_each(|(name, class, wanted)| {
            let one = all.iter().find(|client| client["name"] == *name)?;
            let has = one["class"] == *class || one["class"].get(class).is_some();
            assert!(has, "{one}");
            let limit = one["scaled_limit"].as_f64()?;
            assert!((0.01..=1.0).contains(&limit), "{one}");
            (one["scale_state"]["state"] == *wanted).then_some(())
        })
    });
}

/// Dilu, section 3.4.1: the states of Algorithm 2, with the classes that the daemon's configuration names; the programs say
/// nothing of themselves.
#[test]
fn each_state_of_the_co_scaler_is_shown_by_top_and_by_status() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), CLASSES);
    let socket = daemon.socket();
    let spinners = hooked::Spinners::new(dir.path(), &socket);
    let trainer = spinners.start("trainer", 1, &[], &[]);
    trainer.works(&daemon);
    shown(&socket, &[("trainer", "best_effort", "none")]);

    let mut owner = spinners.serve("owner", 2, &[]);
    owner.works(&daemon);
    let both = |state| [("owner", "slo_sensitive", state), ("trainer", "best_effort", state)];
    // It launched one kernel and waits for its first line.
    shown(&socket, &both("recovery"));

    let mut input = owner.0.stdin.take().unwrap();
    let mut answers = BufReader::new(owner.0.stdout.take().unwrap()).lines();
    assert_eq!(answers.next().unwrap().unwrap(), "ready");
    let mut iterate = |kernels: u32| {
        writeln!(input, "{kernels}").unwrap();
        answers.next().unwrap().unwrap()
    };
    // Sizes of one bucket: the longer takes nearly twice as long, alone or beside others.
    for (state, sizes) in [("contention", [34, 34]), ("emergency", [34, 64])] {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut sizes = sizes.iter().cycle();
                while !over.load(Ordering::Relaxed) {
                    iterate(*sizes.next().unwrap());
                }
            });
            struct Over<'a>(&'a AtomicBool);
            impl Drop for Over<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let _over = Over(&over);
            shown(&socket, &both(state));
        });
    }
    drop(owner);
    within(|| (daemon.snapshot().clients.len() == 1).then_some(()));
    shown(&socket, &[("trainer", "best_effort", "none")]);

    // Without its class it has the whole of its quota, and is not scaled.
    std::fs::write(dir.path().join("gshared.toml"), CLASSES.replace("class = 'best-effort'", "")).unwrap();
    daemon.signal(Signal::HUP);
    within(|| daemon.snapshot().clients[0].class.is_none().then_some(()));
    let table = gshare(&socket, &["top", "--count", "1"]);
    assert!(
        table.lines().any(|line| line.starts_with("trainer") && line.ends_with("-  time hook")),
        "{table}"
    );
    drop(trainer);
    assert_eq!(spinners.said(), "");
}

#[test]
fn a_class_of_the_configuration_goes_before_that_of_the_process_and_changes_while_it_runs() {
    let tolerant = ServiceClass::slo_sensitive(70).unwrap();
    let daemon =
        Local::with(|config| config.clients.entry("owner".into()).or_default().class = Some(tolerant));
    let mut owner = common::Client::connect(&daemon.socket());
    owner.enter(1, "owner", spec("0.4:0.9", 100, None));
    assert_eq!(
        owner.receive(),
        Some(ToClient::Class { class: tolerant }),
        "so that it reports its iterations"
    );
    owner.send(&gshare_core::wire::ToDaemon::Class { class: ServiceClass::BestEffort });
    owner.attach(gshare_core::Bytes::ZERO);
    let (_other, _) = attached(&daemon.socket(), 2, "other", spec("0.5:1.0", 100, None));
    let classes = || daemon.snapshot().clients.into_iter().map(|client| client.class).collect::<Vec<_>>();
    assert_eq!(classes(), [Some(tolerant), None]);

    let handle = daemon.running.as_ref().unwrap().handle();
    let mut config = gshared::Config::at(daemon.socket());
    config.clients.entry("other".into()).or_default().class = Some(ServiceClass::SLO_SENSITIVE);
    handle.reload(config.clone()).unwrap();
    assert_eq!(
        classes(),
        [Some(ServiceClass::BestEffort), Some(ServiceClass::SLO_SENSITIVE)],
        "its own word, now"
    );
    // More than the GPU would be promised: nothing changes.
    let mut too_much = config.clone();
    too_much.clients.entry("other".into()).or_default().spec = Some(spec("0.8:1.0", 100, None));
    let error = handle.reload(too_much).unwrap_err().to_string();
    assert!(error.contains("sum of requests is 120%: 120% taken"), "{error}");
    assert_eq!(classes(), [Some(ServiceClass::BestEffort), Some(ServiceClass::SLO_SENSITIVE)]);
    // Side by side that much can be met, and is more time than can be scaled: the share stays fixed.
    config.clients.entry("owner".into()).or_default().spec = Some(spec("0.4:0.9", 50, None));
    config.clients.entry("other".into()).or_default().spec = Some(spec("0.8:1.0", 50, None));
    handle.reload(config.clone()).unwrap();
    assert_eq!(classes(), [Some(ServiceClass::BestEffort), None]);
    config.clients.entry("other".into()).or_default().spec = Some(spec("0.6:1.0", 100, None));
    handle.reload(config).unwrap();
    let snapshot = daemon.snapshot();
    assert_eq!(snapshot.clients[1].class, Some(ServiceClass::SLO_SENSITIVE), "it fits again");
    assert!(matches!(snapshot.clients[1].scale_state, Some(ScaleState::Recovery | ScaleState::None)));
}
