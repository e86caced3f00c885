//! Unmodified programs under the hook, the daemon and the simulated driver.

use crate::common::{self, Local, Process, within};
use crate::hooked;
use gshare_core::{Bytes, TokenAction, TokenEvent};
use gshared::journal::TokenStep;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn the_exit_code_of_the_program_is_passed_on() {
    let daemon = Local::start();
    let run = |program: &[&str]| {
        let mut command = hooked::run(daemon.dir.path(), &daemon.socket(), &[]);
        command.args(program).status().unwrap().code()
    };
    assert_eq!(run(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(run(&["true"]), Some(0));
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]), Some(128 + 9));
    assert_eq!(run(&["/nonexistent/program"]), Some(127));
    assert_eq!(run(&["/"]), Some(126), "a directory");
}

#[test]
fn signals_are_forwarded_to_the_program() {
    let daemon = Local::start();
    let mut command = hooked::run(daemon.dir.path(), &daemon.socket(), &[]);
    let script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.01; done";
    let mut child = command.args(["sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 6]).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(42));
}

/// Under `nohup`, and as a job in the background of a script.
#[test]
fn signals_that_are_ignored_stay_so_in_the_program() {
    let daemon = Local::start();
    let mut command = Command::new("sh");
    let inner = hooked::run(daemon.dir.path(), &daemon.socket(), &[]);
    command.args(["-c", "trap '' HUP INT QUIT; exec \"$0\" \"$@\""]);
    command.arg(inner.get_program()).args(inner.get_args()).args(["grep", "SigIgn", "/proc/self/status"]);
    for (key, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mask = u64::from_str_radix(text.trim().trim_start_matches("SigIgn:").trim(), 16).unwrap();
    assert_eq!(mask & 0x4007, 7, "the last is SIGTERM: {text}");
}

/// A program may import for longer than a private daemon waits for a client.
#[test]
fn a_private_daemon_stays_as_long_as_the_program_it_was_started_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = hooked::run_private(dir.path(), &[]);
    command.env("XDG_RUNTIME_DIR", dir.path()).env("GSHARE_IDLE_EXIT", "200ms");
    command.args(["sh", "-c", "sleep 1.5; \"$0\" status --json", env!("CARGO_BIN_EXE_gshare")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&status["connections"], &status["processes"]), (&1.into(), &1.into()));
    let socket = dir.path().join("gshare/gshare-sim.sock");
    assert_eq!(status["socket"], socket.to_str().unwrap());
    within(|| (!socket.exists()).then_some(()));
}

/// Each of a user's private daemons added to it, and none took anything away.
#[test]
fn the_log_of_private_daemons_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let (place, log) = (dir.path().join("gshare"), dir.path().join("gshare/gshare-sim.log"));
    std::fs::DirBuilder::new().mode(0o700).create(&place).unwrap();
    std::fs::write(&log, "of an earlier daemon\n".repeat(200_000)).unwrap();
    let mut command = hooked::run_private(dir.path(), &[]);
    command.env("XDG_RUNTIME_DIR", dir.path()).env("GSHARE_IDLE_EXIT", "200ms").arg("true");
    assert!(command.status().unwrap().success());
    within(|| (!place.join("gshare-sim.sock").exists()).then_some(()));
    let kept = std::fs::read_to_string(&log).unwrap();
    assert!(kept.len() < 1 << 20 && kept.starts_with("of an earlier daemon\n"), "{} bytes", kept.len());
    assert!(kept.contains("INFO"), "the new daemon's lines are there");
}

/// The daemon that was named may have a configuration, which a private one has not.
#[test]
fn a_socket_that_was_named_is_not_given_a_daemon_of_another_kind() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    let output = hooked::run(dir.path(), &socket, &[])
        .args(["sh", "-c", "echo it ran"])
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(&format!("no daemon listens at {}", socket.display())), "{error}");
    assert!(!output.status.success() && output.stdout.is_empty() && !socket.exists());
}

#[test]
fn a_program_under_run_is_a_client_with_the_share_it_was_given() {
    let daemon = Local::start();
    let options = ["--name", "alice", "--quota", "0.25:0.5", "--sm", "40", "--mem", "256MiB"];
    let mut command = hooked::run(daemon.dir.path(), &daemon.socket(), &options);
    let mut child = command
        .arg(env!("CARGO_BIN_EXE_gshare-fixture"))
        .args(["spin", "--memory", "16MiB"])
        .spawn()
        .unwrap();
    let client = within(|| {
        let client = daemon.snapshot().clients.into_iter().next()?;
        (client.total_used_ns.as_nanos() > 0).then_some(client)
    });
    assert_eq!((client.name.as_str(), client.program.as_str()), ("alice", "gshare-fixture"));
    assert_eq!((client.quota_request, client.quota_limit, client.sm), (0.25, 0.5, 0.4));
    assert_eq!(client.memory_limit_bytes, Some(Bytes::from_mib(256)));
    assert!(client.memory_bytes >= Bytes::from_mib(16), "{}", client.memory_bytes);
    // The name is taken, and the second run is told before it starts.
    let mut second = hooked::run(daemon.dir.path(), &daemon.socket(), &["--name", "alice"]);
    let output = second.arg("true").stderr(Stdio::piped()).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("`alice` is in use"));
    for (name, value, bound) in [
        ("GSHARE_ON_DAEMON_LOSS", "maybe", "`open` or `closed`"),
        ("GSHARE_DAEMON_WAIT", "199ms", "200ms to 600s"),
    ] {
        let mut wrong = hooked::run(daemon.dir.path(), &daemon.socket(), &[]);
        let output = wrong.arg("true").env(name, value).stderr(Stdio::piped()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(name) && error.contains(bound), "{error}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_demo_prints_one_object_of_the_form_it_promises() {
    let output = Command::new(env!("CARGO_BIN_EXE_gshare"))
        .args(["lab", "shares", "--json", "--seconds", "1", "--sim=tiny"])
        .env("GSHARE_HOOK_LIBRARY", hooked::libraries().join("libgshare_hook.so"))
        .env("GSHARE_SIM_LIBRARY", hooked::libraries().join("libfake_cuda.so"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["device"], "simulated");
    let clients = |phase: usize| -> Vec<(String, f64, f64)> {
        let clients = report["phases"][phase]["clients"].as_array().unwrap();
        let read = |client: &serde_json::Value| {
            let number = |key: &str| client[key].as_f64().unwrap();
            assert_eq!(number("sm"), 1.0);
            let measured = number("measured");
            assert!(measured > 0.0 && measured < 1.0, "{client}");
            (client["name"].as_str().unwrap().to_owned(), number("request"), number("limit"))
        };
        clients.iter().map(read).collect()
    };
    let all = [("alice", 0.2, 0.2), ("bob", 0.3, 0.3), ("carol", 0.5, 0.5)];
    assert_eq!(clients(0), all.map(|(name, request, limit)| (name.to_owned(), request, limit)));
    let rest = [("alice", 0.2, 1.0), ("bob", 0.3, 1.0)];
    assert_eq!(clients(1), rest.map(|(name, request, limit)| (name.to_owned(), request, limit)));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("simulated device"), "{said}");
}

/// Kills of holders and restarts of the daemon, by the number that `GSHARE_CHAOS` asks for: `200` or `200,20`.
fn chaos() -> (u64, u64) {
    let text = std::env::var("GSHARE_CHAOS").unwrap_or_default();
    let (kills, restarts) = text.split_once(',').unwrap_or((&text, ""));
    (kills.parse().unwrap_or(10), restarts.parse().unwrap_or(2))
}

fn recorded(dir: &Path) -> String {
    format!("[journal]\ndir = '{}'\nactions = true\nkeep_files = 100\n", dir.join("journal").display())
}

/// A program with the whole device launches without tokens while it is alone, and with tokens beside a neighbour.
#[test]
fn a_program_with_the_whole_device_takes_tokens_while_another_one_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), "");
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let whole = spinners.start("whole", 1, &[("GSHARE_QUOTA", "1:1")], &[]);
    let charged = || {
        let snapshot = daemon.snapshot();
        let own = snapshot.clients.iter().find(|client| client.pid == whole.pid());
        own.map(|client| client.total_used_ns.as_nanos())
    };
    within(|| (charged().is_some() && spinners.truth().gpu_time(&whole) > 20_000_000).then_some(()));
    assert_eq!(charged(), Some(0), "alone");
    let neighbour = spinners.start("neighbour", 2, &[("GSHARE_QUOTA", "0:1")], &[]);
    // How much each has of it is the simulations' business: here it depends on the CPUs too.
    within(|| (charged()? > 200_000_000).then_some(()));
    drop(neighbour);
    within(|| (daemon.snapshot().clients.len() == 1).then_some(()));
    // It returns its last token, and takes no more.
    within(|| {
        let (before, ran) = (charged()?, spinners.truth().gpu_time(&whole));
        within(|| (spinners.truth().gpu_time(&whole) > ran + 50_000_000).then_some(()));
        (charged()? == before).then_some(())
    });
}

#[test]
fn killed_holders_give_their_token_up_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Process::start(dir.path(), &recorded(dir.path()));
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let survivor = spinners.start("survivor", 1, &[], &[]);
    survivor.works(&daemon);
    let mut killed = Vec::new();
    for round in 0..chaos().0 {
        let victim = spinners.start("victim", 2 + round, &[("GSHARE_QUOTA", "0.5:1")], &[]);
        victim.works(&daemon);
        let id = within(|| {
            let snapshot = daemon.snapshot();
            let own = snapshot.clients.iter().find(|client| client.pid == victim.pid())?;
            own.holds_token.then_some(own.client)
        });
        killed.push((id, common::now()));
        drop(victim);
        within(|| daemon.snapshot().clients.iter().all(|client| client.client != id).then_some(()));
    }
    // More than one token: the survivor was allowed another one since the last kill.
    let used = || {
        let snapshot = daemon.snapshot();
        let own = snapshot.clients.iter().find(|client| client.pid == survivor.pid()).unwrap();
        own.total_used_ns.as_nanos()
    };
    let before = used();
    within(|| (used() > before + 200_000_000).then_some(()));
    daemon.signal(rustix::process::Signal::TERM);
    daemon.child.wait().unwrap();
    let lines = common::journal_lines(dir.path());
    let compared = common::replays_to_the_same_actions(&lines);
    // Time from the kill to the event, and from the event to the next grant, by the journal.
    let (mut noticed, mut granted) = (Vec::new(), Vec::new());
    for (id, at) in &killed {
        let left = lines.iter().position(|line| {
            let gone = TokenEvent::ClientLeft { client: *id };
            line.tokens().any(|step| step == TokenStep::TokenEvent { token: gone })
        });
        let left = left.expect("its leaving is in the journal");
        let now = lines[left].now_ns.unwrap();
        noticed.push(now.saturating_sub(at.as_nanos()) / 1000);
        let next = lines[left..].iter().find(|line| {
            let granted = |step| matches!(step, TokenStep::TokenOrder { order: TokenAction::Allow { .. } });
            line.tokens().any(granted)
        });
        granted.push((next.expect("the survivor goes on").now_ns.unwrap() - now) / 1000);
    }
    noticed.sort_unstable();
    granted.sort_unstable();
    let most = |times: &[u64]| (times[times.len() / 2], times[times.len() - 1]);
    eprintln!(
        "{} kills of a holder: noticed after {:?} us (median, most), granted again {:?} us later; {compared} outcomes \
         compared with the journal",
        killed.len(),
        most(&noticed),
        most(&granted)
    );
    assert_eq!(spinners.said(), "");
}

#[test]
fn a_killed_daemon_is_survived_and_accounts_agree_after_its_return() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Process::start(dir.path(), &recorded(dir.path()));
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let limited = [("GSHARE_QUOTA", "0.3:0.5"), ("GSHARE_MEM", "256MiB")];
    let programs = [
        spinners.start("alice", 1, &limited, &["--memory", "48MiB"]),
        spinners.start("bob", 2, &limited, &["--memory", "16MiB"]),
    ];
    programs.iter().for_each(|program| program.works(&daemon));
    let accounts = |daemon: &Process| -> Vec<(String, Bytes)> {
        let mut all: Vec<_> =
            daemon.snapshot().clients.into_iter().map(|client| (client.name, client.memory_bytes)).collect();
        all.sort();
        all
    };
    // Allocated bytes, and at most a chunk beyond them for later small allocations.
    let agrees = |accounts: &[(String, Bytes)]| {
        let within = |account: &(String, Bytes), mib: u64| {
            (Bytes::from_mib(mib)..=Bytes::from_mib(mib + 16)).contains(&account.1)
        };
        assert!(within(&accounts[0], 48) && within(&accounts[1], 16), "{accounts:?}");
    };
    agrees(&accounts(&daemon));
    let (mut times, mut progress) = (Vec::new(), Vec::new());
    for _ in 0..chaos().1 {
        daemon.signal(rustix::process::Signal::KILL);
        drop(daemon);
        // By the device's own account, once the earlier queue is done.
        let down = |before: &hooked::Truth| {
            let now = spinners.truth();
            programs.each_ref().map(|program| now.gpu_time(program) - before.gpu_time(program))
        };
        std::thread::sleep(std::time::Duration::from_millis(200));
        let (before, start) = (spinners.truth(), std::time::Instant::now());
        within(|| down(&before).iter().all(|ns| *ns > 10_000_000).then_some(()));
        let share = |ns: u64| ns * 100 / u64::try_from(start.elapsed().as_nanos()).unwrap();
        progress.extend(down(&before).map(share));
        daemon = Process::start(dir.path(), &recorded(dir.path()));
        let start = std::time::Instant::now();
        within(|| (daemon.snapshot().clients.len() == 2).then_some(()));
        times.push(start.elapsed());
        programs.iter().for_each(|program| program.works(&daemon));
        agrees(&accounts(&daemon));
    }
    times.sort_unstable();
    progress.sort_unstable();
    eprintln!(
        "{} restarts: {:?} to {:?} % of the device each while the daemon was down, both registered again after {:?} at \
         most",
        times.len(),
        progress.first(),
        progress.last(),
        times.last()
    );
    daemon.signal(rustix::process::Signal::TERM);
    daemon.child.wait().unwrap();
    let lines = common::journal_lines(dir.path());
    for run in lines.chunk_by(|_, next| next.segment != Some(0)) {
        assert!(common::replays_to_the_same_actions(run) > 0);
    }
    assert_eq!(spinners.said(), "");
}

/// By the device's own account, beside a process of another instance that may take half as much: with one account for the
/// instance the worker gets twice that, whether a sibling only holds a context or works as well.
#[test]
fn a_sibling_that_only_holds_a_context_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Process::start(dir.path(), &recorded(dir.path()));
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let half = [("GSHARE_QUOTA", "0.5")];
    let rival = spinners.start("rival", 1, &[("GSHARE_QUOTA", "0.25")], &[]);
    let worker = spinners.start("twins", 2, &half, &[]);
    let sibling = spinners.serve("twins", 2, &half);
    [&rival, &worker, &sibling].iter().for_each(|program| program.works(&daemon));
    // Of the first second of GPU time that the rival has from now on: per cent that each of the others had of it.
    let beside_rival = |others: &[&hooked::Spinner]| -> Vec<u64> {
        let before = spinners.truth();
        let now = within(|| {
            let now = spinners.truth();
            (now.gpu_time(&rival) - before.gpu_time(&rival) > 1_000_000_000).then_some(now)
        });
        let had = |program: &hooked::Spinner| now.gpu_time(program) - before.gpu_time(program);
        others.iter().map(|program| had(program) * 100 / had(&rival)).collect()
    };
    let idle = beside_rival(&[&worker, &sibling]);
    assert!(idle[0] >= 160 && idle[1] == 0, "{idle:?} of 200 and 0");
    let mut limits: Vec<_> = daemon.snapshot().clients.iter().map(|client| client.quota_limit).collect();
    limits.sort_by(f64::total_cmp);
    assert_eq!(limits, [0.25, 0.5, 0.5], "each may take what the instance may");
    drop(sibling);
    let twin = spinners.start("twins", 2, &half, &[]);
    twin.works(&daemon);
    let busy = beside_rival(&[&worker, &twin]);
    assert!(
        busy[0] + busy[1] >= 160 && busy.iter().all(|part| (70..=130).contains(part)),
        "{busy:?} of 100 each"
    );
    eprintln!("of a rival's 100 %: worker and idle sibling {idle:?}, two workers {busy:?}");
    assert_eq!(spinners.said(), "");
}
