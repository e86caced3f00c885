//! Kubernetes as the runner of instances: the common parts of its programs, and a host that runs pods.

#[cfg(test)]
#[allow(dead_code, reason = "the tests of other hosts use the rest")]
#[path = "../../../../tests/support/api_server.rs"]
mod api_server;
pub mod daemons;
pub mod function;
pub mod injection;
pub mod lease;
pub mod nodes;
pub mod objects;
pub mod places;
pub mod pod_spec;
pub mod pod_state;
pub mod pods;
mod refusals;
pub mod scope;
pub mod template;
pub mod up;
pub mod watching;
#[cfg(test)]
mod world;
pub mod writes;

use gshare_core::RunId;

/// The domain of these hosts' names: API groups, annotations, drivers.
pub const DOMAIN: &str = "gshare.io";

/// Message of the API server for people, with its code and reason, and nothing of how it is held in memory; without its answer, the causes.
pub fn said(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => {
            let message = if status.message.is_empty() { &status.reason } else { &status.message };
            format!("{message} ({} {})", status.code, status.reason)
        }
        other => {
            let causes = std::iter::successors(std::error::Error::source(other), |cause| cause.source());
            let causes = causes.map(ToString::to_string);
            causes.fold(other.to_string(), |said, cause| match said.ends_with(&cause) {
                true => said,
                false => format!("{said}: {cause}"),
            })
        }
    }
}

/// Waits until the program is asked to end.
pub async fn ended() {
    if let Err(error) = crate::told_to_end().await {
        eprintln!("signals: {error}");
    }
}

/// Hash of a text that stays the same from build to build (FNV-1a).
pub fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The run id of the processes of an API object, from its UID: 122 random bits that a pod knows only of its own object.
/// Without a UID the id comes from the name.
pub fn run_of(uid: &str, name: &str) -> RunId {
    let digits: String = uid.chars().filter(|digit| *digit != '-').collect();
    let bits = u128::from_str_radix(&digits, 16).unwrap_or(0);
    RunId::new((bits ^ u128::from(hash(name))).max(1))
}
