//! `gshare status`: the clients of this node's GPUs.

use super::out::table;
use super::{Form, Where, print_json};
use gshare_core::Bytes;
use gshare_core::reason::Reason;
use gshare_core::wire::Residence;
use gshare_sched::node::FactSource;
use gshared::enforce::Partition;
use gshared::{ClientSnapshot, Snapshot};
use std::fmt::Write as _;

/// Show the daemon, its devices and its clients.
///
/// In JSON shares are fractions of 1; times are in ns, memory in bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare status           of this node's daemon, or of this user's private one
  gshare status --json")]
pub(crate) struct Options {
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    form: Form,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut snapshot = options.place.snapshot()?;
    look_who_holds(&mut snapshot);
    if options.form.json {
        return print_json(&snapshot);
    }
    print!("{}", text(&snapshot));
    Ok(())
}

/// Finds the enforcer of each client's limits on this node.
pub(super) fn look_who_holds(snapshot: &mut Snapshot) {
    let nodes = [false, true].map(Partition::of_node);
    for client in &mut snapshot.clients {
        let device = snapshot.devices.iter().find(|device| device.gpu == client.gpu);
        let simulated = device.is_some_and(|device| device.simulated);
        let (partition, memory) = (client.sm < 1.0, client.memory_limit_bytes.is_some());
        client.held_by = Some(nodes[usize::from(simulated)].held_by(client.pid, partition, memory));
    }
}

/// The text of a client's enforcers, such as `time hook, SMs nothing`.
fn held_by(client: &ClientSnapshot) -> String {
    let Some(held) = &client.held_by else { return "-".to_owned() };
    if client.observed {
        return "observed only".to_owned();
    }
    let name = |holder: &Option<String>| holder.clone().unwrap_or_else(|| "nothing".to_owned());
    let mut parts = vec![format!("time {}", name(&held.time))];
    if client.sm < 1.0 {
        parts.push(format!("SMs {}", name(&held.sm)));
    }
    if client.memory_limit_bytes.is_some() {
        parts.push(format!("memory {}", name(&held.memory)));
    }
    parts.join(", ")
}

/// The state of a client: of its movable memory, if it has any, and of its scaling.
fn state(client: &ClientSnapshot) -> String {
    let parking = client.parking.and_then(|parking| {
        let (bytes, obstacle) = (parking.bytes, parking.obstacle.map(Reason::from));
        match (parking.residence, obstacle) {
            (Residence::Resident, None) => None,
            (Residence::Resident, Some(why)) if bytes == Bytes::ZERO => Some(format!("unparkable: {why}")),
            (Residence::Resident, Some(why)) => Some(format!("not parked: {why}")),
            (Residence::Parking, _) => Some(format!("parking {bytes}")),
            (Residence::Parked, _) => Some(format!("parked {bytes}")),
            (Residence::Missed, _) if parking.returns_since.is_some() => {
                Some(format!("waits for room for {bytes}"))
            }
            (Residence::Missed | Residence::Returning, None) => Some(format!("returning {bytes}")),
            (Residence::Missed | Residence::Returning, Some(why)) => {
                Some(format!("returning {bytes}: {why}"))
            }
        }
    });
    let scaling = client.scale_state.zip(client.scaled_request.zip(client.scaled_limit));
    let scaling = scaling.map(|(state, (least, most))| {
        format!("{state}, at least {:.1}%, at most {:.1}%", least * 100.0, most * 100.0)
    });
    let parts: Vec<String> = parking.into_iter().chain(scaling).collect();
    if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
}

/// The tables of `status` and `top`.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "gshared {} pid {} at {}: {} processes, {} clients",
        snapshot.version,
        snapshot.pid,
        snapshot.socket.display(),
        snapshot.processes,
        snapshot.clients.len()
    );
    for device in &snapshot.devices {
        let memory = if device.memory_bytes == Bytes::ZERO {
            "memory unknown".into()
        } else {
            let clients = snapshot.clients.iter().filter(|client| client.gpu == device.gpu);
            let used: Bytes = clients.map(|client| client.memory_bytes).sum();
            format!("{used} of {} used, {} kept for limits", device.memory_bytes, device.held_bytes)
        };
        let simulated = if device.simulated { "simulated, " } else { "" };
        let source = match device.memory_source {
            FactSource::Client if device.memory_bytes > Bytes::ZERO => ", as its first client says",
            _ => "",
        };
        let model = snapshot.model_of(device).map(|name| format!("{name}, ")).unwrap_or_default();
        let _ = writeln!(out, "{} {} {model}{simulated}{memory}{source}", device.gpu, device.uuid);
    }
    for device in snapshot.lost.iter().flatten() {
        let _ = writeln!(out, "WARNING: {} is lost: {}", device.uuid, device.why);
    }
    for other in &snapshot.neighbours {
        let _ = writeln!(out, "WARNING: {other}");
    }
    if let Some(why) = &snapshot.journal_failure {
        let _ = writeln!(out, "WARNING: no journal is written: {why}");
    }
    if snapshot.journal_lost > 0 {
        let _ = writeln!(out, "the journal has lost {} events", snapshot.journal_lost);
    }
    if snapshot.clients.is_empty() {
        return out;
    }
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let head = [
        "NAME", "PID", "GPU", "REQUEST", "LIMIT", "USED", "SM", "MEMORY", "OF", "WAITED", "LAUNCHES",
        "TOKEN", "STATE", "HELD BY",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for client in &snapshot.clients {
        rows.push([
            client.name.clone(),
            client.pid.to_string(),
            client.gpu.number().to_string(),
            percent(client.quota_request),
            if client.observed { "observed".to_owned() } else { percent(client.quota_limit) },
            percent(client.measured),
            percent(client.sm),
            client.memory_bytes.to_string(),
            client.memory_limit_bytes.map_or_else(|| "-".into(), |bytes| bytes.to_string()),
            client.waited_ns.to_string(),
            client.launches.to_string(),
            match (client.holds_token, client.waiting_ns) {
                (true, _) => "holds".into(),
                (false, Some(waiting)) => format!("waits {waiting}"),
                (false, None) => "-".into(),
            },
            state(client),
            held_by(client),
        ]);
    }
    out + &table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_its_model_and_a_second_daemon_is_told() {
        let snapshot = serde_json::from_value(serde_json::json!({
            "now_ns": 0, "epoch": 1, "pid": 42, "version": "0.1.0", "socket": "/run/g.sock", "connections": 0, "processes": 0,
            "drops": {}, "journal_lost": 0, "clients": [],
            "devices": [{"gpu": 0, "uuid": "GPU-7", "memory_bytes": 16_u64 << 30, "held_bytes": 0, "clients": 0}],
            "sensors": [{"uuids": ["GPU-7"], "name": "NVIDIA H200", "celsius": null, "milliwatts": null}],
            "neighbours": [{"uuid": "GPU-7", "pid": 4711, "uid": 1000}],
        }));
        let text = text(&snapshot.unwrap());
        assert!(text.contains("gpu0 GPU-7 NVIDIA H200, 0 B of 16 GiB used"), "{text}");
        assert!(
            text.contains("WARNING: GPU-7 is shared out by a second daemon, process 4711 of user 1000"),
            "{text}"
        );
    }
}
