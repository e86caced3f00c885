//! The state that nodes share ([`StateStore`]), in etcd (GPU-enabled FaaS, sections III-C and III-E: the datastore).
//!
//! # Problem
//! Schedulers and GPU managers on several machines must agree on what each GPU holds, and what a dead node said must not
//! be believed. etcd has what that takes: versions that are compared in a transaction, and leases that end with their holder.
//!
//! # How it works
//! Two keys per GPU, in decimal, below a prefix:
//!
//! | key | value | lease |
//! |---|---|---|
//! | `<prefix>/version/<gpu>` | empty; etcd's own count of its writes is the [`Version`] | none: an old writer loses for ever |
//! | `<prefix>/record/<gpu>` | the [`GpuRecord`] as JSON | the writer's: gone when it is not renewed |
//!
//! A write is one transaction: if the version is still the expected one, both keys are put. A read is one transaction over
//! both, so a record and its version belong together. All that a store does not surely hold is a miss: a record whose lease
//! has ended is not there, one that cannot be read as a record counts as not there, and a server that does not answer is
//! [`StateError::Unavailable`], which a reader takes as a miss.
//!
//! etcd is spoken to through its JSON gateway (`/v3/kv/txn`, `/v3/lease/grant`, `/v3/lease/keepalive`): HTTP and JSON, no
//! code generators. A lease is granted once per GPU and kept alive by further writes.
//!
//! # Example
//! ```no_run
//! use gshare_sched::request::{GpuRecord, StateStore};
//! use gshare_core::{Duration, GpuId, ModelId, Timestamp};
//!
//! let mut store = gshare_etcd::EtcdStore::new(["http://127.0.0.1:2379"], "/gshare");
//! let (now, gpu) = (Timestamp::ZERO, GpuId::new(0));
//! let record = GpuRecord { busy: false, free_at: now, models: vec![ModelId::new(7)] };
//! let version = store.version(gpu)?;
//! store.put(now, gpu, record, version, Duration::from_secs(10))?;
//! # Ok::<(), gshare_sched::request::StateError>(())
//! ```
//!
//! # Differences from the contract
//! - Time is etcd's: the `now` of a call is not looked at, and leases are whole seconds, rounded up; etcd raises short ones
//!   to its own least (2 s by default), and ends them up to a second late.
//! - `free_at` is by the clock of the node that wrote it: compare it with a time of that node only.
//!
//! # Limits
//! Plain HTTP without authentication: for a loopback address or a trusted network; a proxy beside it can add both. A call
//! blocks for a round trip, or [`EtcdStore::set_timeout`] per endpoint.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gshare_core::{Duration, GpuId, Timestamp};
use gshare_sched::request::{GpuRecord, StateError, StateStore, Version};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration as StdDuration;

/// A [`StateStore`] in etcd 3.4 or later. See the [crate].
#[derive(Debug, Clone)]
pub struct EtcdStore {
    endpoints: Vec<String>,
    prefix: String,
    agent: ureq::Agent,
    /// Seconds and id of the lease under which a GPU's record was last written.
    leases: BTreeMap<GpuId, (u64, String)>,
}

/// The largest answer that is read: a record with a million models is smaller.
const MAX_ANSWER: u64 = 64 << 20;

impl EtcdStore {
    /// A store at `endpoints` (`http://host:port`; the first that answers is used), below `prefix`. Nothing is sent yet.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>, prefix: impl Into<String>) -> Self {
        let prefix = prefix.into();
        let mut store = Self {
            endpoints: endpoints.into_iter().map(|url| url.into().trim_end_matches('/').to_owned()).collect(),
            prefix: prefix.trim_end_matches('/').to_owned(),
            agent: ureq::Agent::new_with_defaults(),
            leases: BTreeMap::new(),
        };
        store.set_timeout(StdDuration::from_secs(2));
        store
    }

    /// How long one endpoint may take to answer. 2 s by default: an election takes about one.
    pub fn set_timeout(&mut self, timeout: StdDuration) {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        self.agent = config.into();
    }

    fn call(&self, path: &str, body: &Value) -> Result<Value, StateError> {
        let mut reason = "no endpoint".to_owned();
        for endpoint in &self.endpoints {
            match self.call_one(&format!("{endpoint}{path}"), body) {
                Ok(answer) => return Ok(answer),
                Err(error) => reason = format!("{endpoint}: {error}"),
            }
        }
        Err(StateError::Unavailable { reason })
    }

    fn call_one(&self, url: &str, body: &Value) -> Result<Value, String> {
        let sent = self.agent.post(url).content_type("application/json").send(body.to_string());
        let mut answer = sent.map_err(|error| error.to_string())?;
        let text = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string();
        let text = text.map_err(|error| error.to_string())?;
        let value: Value = serde_json::from_str(&text).map_err(|error| format!("no JSON: {error}"))?;
        if answer.status().is_success() {
            return Ok(value);
        }
        let message = value.get("error").or_else(|| value.get("message")).and_then(Value::as_str);
        Err(format!("status {}: {}", answer.status().as_u16(), message.unwrap_or("")))
    }

    fn version_key(&self, gpu: GpuId) -> String {
        STANDARD.encode(format!("{}/version/{}", self.prefix, gpu.number()))
    }

    fn record_key(&self, gpu: GpuId) -> String {
        STANDARD.encode(format!("{}/record/{}", self.prefix, gpu.number()))
    }

    /// The lease of a GPU's record, kept alive or granted again.
    fn lease(&mut self, gpu: GpuId, seconds: u64) -> Result<String, StateError> {
        if let Some((granted, id)) = self.leases.get(&gpu)
            && *granted == seconds
        {
            let answer = self.call("/v3/lease/keepalive", &json!({"ID": id}))?;
            // A lease that has ended is answered without a time to live.
            if number(&answer["result"]["TTL"]).is_some_and(|left| left > 0) {
                return Ok(id.clone());
            }
        }
        let answer = self.call("/v3/lease/grant", &json!({"TTL": seconds.to_string()}))?;
        let id = text(&answer["ID"]).ok_or_else(|| strange("lease/grant"))?;
        self.leases.insert(gpu, (seconds, id.clone()));
        Ok(id)
    }
}

impl StateStore for EtcdStore {
    fn put(
        &mut self,
        _now: Timestamp,
        gpu: GpuId,
        record: GpuRecord,
        expected: Version,
        lease: Duration,
    ) -> Result<Version, StateError> {
        let seconds = lease.as_nanos().div_ceil(1_000_000_000).max(1);
        let id = self.lease(gpu, seconds)?;
        let (version_key, record_key) = (self.version_key(gpu), self.record_key(gpu));
        let record = serde_json::to_string(&record).map_err(|error| unavailable(&error.to_string()))?;
        let body = json!({
            "compare": [{
                "key": version_key,
                "target": "VERSION",
                "result": "EQUAL",
                "version": expected.0.to_string(),
            }],
            "success": [
                {"request_put": {"key": version_key, "value": ""}},
                {"request_put": {"key": record_key, "value": STANDARD.encode(record), "lease": id}},
            ],
            "failure": [{"request_range": {"key": version_key}}],
        });
        let answer = match self.call("/v3/kv/txn", &body) {
            Ok(answer) => answer,
            Err(error) => {
                // Perhaps the lease has ended in between: the next write gets another.
                self.leases.remove(&gpu);
                return Err(error);
            }
        };
        if answer["succeeded"].as_bool() == Some(true) {
            return Ok(Version(expected.0 + 1));
        }
        let found = version_of(&answer["responses"][0]["response_range"]);
        Err(StateError::Conflict { gpu, expected, found })
    }

    fn get(&self, _now: Timestamp, gpu: GpuId) -> Result<Option<(Version, GpuRecord)>, StateError> {
        let body = json!({"success": [
            {"request_range": {"key": self.version_key(gpu)}},
            {"request_range": {"key": self.record_key(gpu)}},
        ]});
        let answer = self.call("/v3/kv/txn", &body)?;
        let version = version_of(&answer["responses"][0]["response_range"]);
        let Some(value) = text(&answer["responses"][1]["response_range"]["kvs"][0]["value"]) else {
            return Ok(None);
        };
        // Something else wrote there: not a record, so a miss.
        let bytes = STANDARD.decode(value).ok();
        let record = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(record.map(|record| (version, record)))
    }

    fn version(&self, gpu: GpuId) -> Result<Version, StateError> {
        let body = json!({"success": [{"request_range": {"key": self.version_key(gpu)}}]});
        let answer = self.call("/v3/kv/txn", &body)?;
        Ok(version_of(&answer["responses"][0]["response_range"]))
    }

    fn live(&self, _now: Timestamp) -> Result<Vec<GpuId>, StateError> {
        let start = format!("{}/record/", self.prefix);
        // The first key behind all that begin so: '/' + 1.
        let end = format!("{}/record0", self.prefix);
        let body = json!({
            "key": STANDARD.encode(&start),
            "range_end": STANDARD.encode(end),
            "keys_only": true,
        });
        let answer = self.call("/v3/kv/range", &body)?;
        let keys = answer["kvs"].as_array().into_iter().flatten();
        let mut gpus: Vec<GpuId> = keys
            .filter_map(|kv| {
                let key = STANDARD.decode(kv["key"].as_str()?).ok()?;
                let key = String::from_utf8(key).ok()?;
                key.strip_prefix(&start)?.parse().ok().map(GpuId::new)
            })
            .collect();
        gpus.sort_unstable();
        Ok(gpus)
    }
}

/// How often the key in the answer to a range was written.
fn version_of(range: &Value) -> Version {
    Version(number(&range["kvs"][0]["version"]).unwrap_or(0))
}

/// A 64-bit integer: the gateway writes them as text.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn unavailable(reason: &str) -> StateError {
    StateError::Unavailable { reason: reason.to_owned() }
}

fn strange(call: &str) -> StateError {
    unavailable(&format!("{call}: an answer that is not etcd's"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_without_a_server_is_unavailable_and_says_where() {
        // No server listens at port 1 of the loopback.
        let mut store = EtcdStore::new(["http://127.0.0.1:1/"], "/gshare/");
        let reason = store.version(GpuId::new(0)).unwrap_err().to_string();
        assert!(reason.starts_with("the store cannot be reached: http://127.0.0.1:1: "), "{reason}");
        let record = GpuRecord { busy: false, free_at: Timestamp::ZERO, models: Vec::new() };
        let put = store.put(Timestamp::ZERO, GpuId::new(0), record, Version(0), Duration::from_secs(1));
        assert!(matches!(put, Err(StateError::Unavailable { .. })));
        assert!(EtcdStore::new(Vec::<String>::new(), "").live(Timestamp::ZERO).is_err());
    }
}
