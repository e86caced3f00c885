//! The JSON schema of `gshare engine token`.
//!
//! The types here say what the events and actions of [`gshare_core::token`] look like as JSON. They are for hosts to
//! read; nothing is decided on them. The tests hold them to the real ones, both ways.
#![allow(dead_code, reason = "only their shape is used")]

use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

/// Schemas by name: `input`, `output`, `config`.
pub(crate) fn token() -> serde_json::Value {
    serde_json::json!({
        "input": schema_for!(Input),
        "output": schema_for!(Output),
        "config": schema_for!(Config),
    })
}

/// A line in.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Input {
    /// The time in ns since an epoch of the host's choice; never less than on the line before.
    now_ns: u64,
    event: Event,
}

/// A line out.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, deny_unknown_fields)]
enum Output {
    /// The event was handled.
    Handled {
        now_ns: u64,
        actions: Vec<Action>,
        /// When to come back with `deadline_reached`, in ns; null for never.
        next_deadline_ns: Option<u64>,
    },
    /// The event was refused; nothing changed.
    Refused {
        error: String,
        /// Number of the line in, from 1.
        line: u64,
    },
}

/// What happened. A client is `generation << 32 | slot`; a slot is used again only with a higher generation.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
enum Event {
    /// A client that was not there before.
    ClientJoined { client: u64, gpu: u32, share: Share },
    /// Another share from now on.
    ShareChanged { client: u64, share: Share },
    /// The client is gone, with whatever it held.
    ClientLeft { client: u64 },
    /// It wants its first token, or more time ahead of the end of the one it holds.
    TokenRequested { client: u64 },
    /// It launches no more under this lease. `used_ns`: GPU time used under it in all.
    TokenReturned { client: u64, lease: u64, used_ns: u64 },
    /// GPU time used under the lease so far.
    UsageReported { client: u64, lease: u64, used_ns: u64 },
    /// The time of `next_deadline_ns` has come.
    DeadlineReached,
}

/// What a client may take.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Share {
    quota: Quota,
    /// Share of the SMs in 1/10 000, more than 0.
    #[schemars(range(min = 1, max = 10_000))]
    sm: u16,
}

/// Shares of GPU time in a window, in 1/10 000: `request <= limit`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Quota {
    /// Guaranteed.
    #[schemars(range(max = 10_000))]
    request: u16,
    /// The most; more than 0.
    #[schemars(range(min = 1, max = 10_000))]
    limit: u16,
}

/// What to do about it.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
enum Action {
    /// Let the client launch: `budget_ns` of GPU time since the lease began, until `expires_ns`.
    Grant { client: u64, lease: u64, budget_ns: u64, expires_ns: u64 },
    /// Stop the client: its lease is void.
    Revoke { client: u64, lease: u64, reason: RevokeReason },
    /// It will get no token before `until_ns`.
    Throttle { client: u64, until_ns: u64, reason: ThrottleReason },
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum RevokeReason {
    Expired,
    ShareReduced,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ThrottleReason {
    LimitReached,
}

/// Settings; each may be left out.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Config {
    /// Length of the window over which quotas are settled.
    window_ns: Option<u64>,
    /// The longest token.
    max_token_ns: Option<u64>,
    /// The shortest token worth giving ahead of a reservation.
    min_token_ns: Option<u64>,
    /// Time beyond its budget after which a token expires.
    slack_ns: Option<u64>,
    /// Time after its expiry at which a token that was not returned is revoked.
    grace_ns: Option<u64>,
    /// The most overuse that is carried.
    max_debt_ns: Option<u64>,
    /// How many ready clients behind a reservation are looked at.
    backfill_depth: Option<u32>,
    /// Number of client slots.
    max_clients: Option<u32>,
    /// Number of GPUs.
    max_gpus: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::token::{RevokeReason as Revoked, ThrottleReason as Throttled};
    use gshare_core::{
        ClientId, Duration, GpuId, LeaseId, ResourceSpec, Share, Timestamp, TokenAction, TokenEvent,
    };
    use gshare_sched::token::MultiTokenConfig;

    /// The real value as JSON is read by the type here, and what that writes is read as the same real value.
    fn agree<Real, Here>(real: &Real)
    where
        Real: Serialize + for<'de> Deserialize<'de> + PartialEq + std::fmt::Debug,
        Here: Serialize + for<'de> Deserialize<'de>,
    {
        let json = serde_json::to_value(real).unwrap();
        let here: Here =
            serde_json::from_value(json.clone()).unwrap_or_else(|error| panic!("{json}: {error}"));
        let back = serde_json::to_value(here).unwrap();
        assert_eq!(json, back);
        assert_eq!(serde_json::from_value::<Real>(back).unwrap(), *real);
    }

    #[test]
    fn the_schema_is_of_the_events_actions_and_settings_there_are() {
        let (client, lease) = (ClientId::new(3, 1), LeaseId(9));
        let share = Share { quota: ResourceSpec::UNLIMITED.quota(), sm: ResourceSpec::UNLIMITED.sm() };
        let used = Duration::from_nanos(5);
        for event in [
            TokenEvent::ClientJoined { client, gpu: GpuId(1), share },
            TokenEvent::ShareChanged { client, share },
            TokenEvent::ClientLeft { client },
            TokenEvent::TokenRequested { client },
            TokenEvent::TokenReturned { client, lease, used },
            TokenEvent::UsageReported { client, lease, used },
            TokenEvent::DeadlineReached,
        ] {
            agree::<TokenEvent, Event>(&event);
        }
        let (until, expires) = (Timestamp::from_nanos(7), Timestamp::from_nanos(8));
        for action in [
            TokenAction::Grant { client, lease, budget: used, expires },
            TokenAction::Revoke { client, lease, reason: Revoked::Expired },
            TokenAction::Revoke { client, lease, reason: Revoked::ShareReduced },
            TokenAction::Throttle { client, until, reason: Throttled::LimitReached },
        ] {
            agree::<TokenAction, Action>(&action);
        }
        agree::<MultiTokenConfig, Config>(&MultiTokenConfig::default());
        assert!(token()["input"]["properties"]["now_ns"].is_object());
    }
}
