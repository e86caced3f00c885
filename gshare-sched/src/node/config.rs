//! The configuration of a node: its limits, its devices, and the share that is promised to each name.

use super::printable::{is_printable, printable};
use core::fmt;
use gshare_core::wire::MAX_TEXT;
use gshare_core::{Bytes, ConfigError, DeviceUuid, Duration, ResourceSpec, ServiceClass};
use std::collections::BTreeMap;

gshare_core::config! {
    /// The configuration of a [`Node`](super::Node). `Default` lets every client in and learns devices from clients.
    #[derive(Debug, Clone, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
    pub struct NodeConfig {
        /// Most clients (process, GPU) and most instances on GPUs at a time; 1 to 2^20. 1024: more than a node's GPUs serve.
        pub max_clients: u32 = 1024, with_max_clients;
        /// Whether a client that is not listed gets the share that its process asks for. True.
        pub allow_unlisted: bool = true, with_allow_unlisted;
        /// Whether a process that is refused may run all the same, within the limits that it would have had. False.
        pub refused_run: bool = false, with_refused_run;
        /// Most GPU time that a client should have in flight; more than 0. 5 ms: half a token.
        #[cfg_attr(feature = "serde", serde(rename = "in_flight_ns"))]
        pub in_flight: Duration = Duration::from_millis(5), with_in_flight;
        /// Memory of each device that is not handed out. 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_headroom_bytes"))]
        pub memory_headroom: Bytes = Bytes::ZERO, with_memory_headroom;
        /// Most overuse that is kept of an instance that left; that of the token scheduler. 10 s.
        #[cfg_attr(feature = "serde", serde(rename = "max_debt_ns"))]
        pub max_debt: Duration = Duration::from_secs(10), with_max_debt;
        /// True if processes may still be there that another daemon served before: their memory is kept for them until they
        /// had the time to come back ([`SETTLE`](super::SETTLE)). True. A daemon that knows of no predecessor says false, and the first
        /// allocation under it does not wait. A reload leaves it as it is.
        pub predecessor: bool = true, with_predecessor;
        /// The devices of the node. Empty: each device that a client attaches to is learned.
        pub devices: Vec<DeviceConfig> = Vec::new(), with_devices;
        /// Listed names, and what is promised to each.
        pub clients: BTreeMap<String, ClientConfig> = BTreeMap::new(), with_clients;
    }
}

/// Number of devices for which a node of `max_clients` clients needs schedulers: a client may bring one of its own. 64 at least,
/// and at most the 4,096 that schedulers take.
pub const fn max_gpus(max_clients: u32) -> u32 {
    match max_clients {
        ..64 => 64,
        4096.. => 4096,
        clients => clients,
    }
}

/// A device of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeviceConfig {
    /// UUID, as `nvidia-smi -L` prints it.
    pub uuid: DeviceUuid,
    /// Its memory; `None`: as the driver says, or where that is not known its first client.
    #[cfg_attr(feature = "serde", serde(default, rename = "memory_bytes"))]
    pub memory: Option<Bytes>,
}

/// Settings of one name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct ClientConfig {
    /// The share, in place of the one that its processes ask for; `None`: the name is not listed, and has what they ask for.
    pub spec: Option<ResourceSpec>,
    /// The class, in place of the one that its processes say; `None`: as they say.
    pub class: Option<ServiceClass>,
    /// The only user who may use the name; `None`: the first one, while its processes live.
    pub user: Option<u32>,
    /// The only device on which its request is reserved; `None`: on all.
    pub device: Option<DeviceUuid>,
}

gshare_core::with_fields!(ClientConfig {
    with_spec(spec: Option<ResourceSpec>),
    with_class(class: Option<ServiceClass>),
    with_user(user: Option<u32>),
    with_device(device: Option<DeviceUuid>),
});

impl NodeConfig {
    /// The settings of `name`; the defaults if the name is not listed.
    pub(super) fn of(&self, name: &str) -> ClientConfig {
        self.clients.get(name).copied().unwrap_or_default()
    }

    /// Checks every field against its bounds.
    ///
    /// # Errors
    /// The first field that is out of its bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        let most = 1 << 20;
        if !(1..=most).contains(&self.max_clients) {
            return Err(ConfigError::new("max_clients", self.max_clients, format!("need 1 to {most}")));
        }
        for (field, time) in [("in_flight", self.in_flight), ("max_debt", self.max_debt)] {
            if time.is_zero() {
                return Err(ConfigError::new(field, time, "need more than 0"));
            }
        }
        for (n, device) in self.devices.iter().enumerate() {
            let field = format!("device `{}`", device.uuid);
            if self.devices[..n].iter().any(|other| other.uuid == device.uuid) {
                return Err(ConfigError::new(field, "listed twice", "need one entry for each device"));
            }
            if device.memory == Some(Bytes::ZERO) {
                return Err(ConfigError::new(format!("{field}: memory"), "0", "need more than 0, or none"));
            }
        }
        for name in self.clients.keys() {
            if name.is_empty() || name.len() > MAX_TEXT || !is_printable(name) {
                let bound = format!("need 1 to {MAX_TEXT} bytes that can be printed");
                return Err(ConfigError::new("client: name", printable(name), bound));
            }
        }
        Ok(())
    }

    /// Checks that `new` differs only in what may change while the node runs.
    pub(super) fn check_live(&self, new: &Self) -> Result<(), ConfigError> {
        new.check()?;
        let keys: [(&str, &dyn fmt::Debug, &dyn fmt::Debug); 3] = [
            ("max_clients", &self.max_clients, &new.max_clients),
            ("max_debt", &self.max_debt, &new.max_debt),
            ("device", &self.devices, &new.devices),
        ];
        for (key, now, new) in keys {
            let (now, new) = (format!("{now:?}"), format!("{new:?}"));
            if now != new {
                return Err(ConfigError::new(key, new, format!("need {now} while the node runs")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_out_of_its_bounds_is_named() {
        let error = |change: fn(&mut NodeConfig)| {
            let mut config = NodeConfig::default();
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        assert!(NodeConfig::default().check().is_ok());
        assert_eq!(error(|config| config.max_clients = 0), "max_clients is 0: need 1 to 1048576");
        assert_eq!(error(|config| config.in_flight = Duration::ZERO), "in_flight is 0ns: need more than 0");
        let twice = |config: &mut NodeConfig| {
            config.devices = vec![DeviceConfig { uuid: DeviceUuid::gpu([1; 16]), memory: None }; 2];
        };
        assert!(error(twice).ends_with("is listed twice: need one entry for each device"));
        let name = |config: &mut NodeConfig| {
            config.clients.insert("a\u{1b}[2J".into(), ClientConfig::default());
        };
        assert_eq!(error(name), "client: name is a\\u{1b}[2J: need 1 to 120 bytes that can be printed");
    }
}
