//! The configuration of a node: its limits, its devices, and the share promised to each name.

use super::printable::{is_printable, printable};
use super::time_admission;
use core::fmt;
use gshare_core::wire::MAX_TEXT;
use gshare_core::{Bytes, ConfigError, DeviceUuid, Duration, ResourceSpec, ServiceClass, Share};
use std::collections::{BTreeMap, BTreeSet};

gshare_core::config! {
    /// The configuration of a [`Node`](super::Node). `Default` lets every client in and learns devices from clients.
    #[derive(Debug, Clone, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
    pub struct NodeConfig {
        /// The most clients (process, GPU) and the most instances on GPUs at a time; 1 to 2^20. 1024: more than a node's GPUs serve.
        pub max_clients: u32 = 1024, with_max_clients;
        /// Whether an unlisted client gets the share its process asks for. True.
        pub allow_unlisted: bool = true, with_allow_unlisted;
        /// Whether every client is only observed ([`ResourceSpec::OBSERVED`]), even if its name has a listed share. False.
        pub observe: bool = false, with_observe;
        /// Whether a refused process may run all the same, within the limits it would have had. False.
        pub refused_run: bool = false, with_refused_run;
        /// The most GPU time a client should have in flight; more than 0. 5 ms: half a token.
        #[cfg_attr(feature = "serde", serde(rename = "in_flight_ns"))]
        pub in_flight: Duration = Duration::from_millis(5), with_in_flight;
        /// The memory of each device withheld from clients. 0.
        #[cfg_attr(feature = "serde", serde(rename = "memory_headroom_bytes"))]
        pub memory_headroom: Bytes = Bytes::ZERO, with_memory_headroom;
        /// The most host memory for the parked clients of one user. No bound.
        #[cfg_attr(feature = "serde", serde(rename = "park_memory_bytes"))]
        pub park_memory: Bytes = Bytes(u64::MAX), with_park_memory;
        /// The most overuse kept of a departed instance, equal to the token scheduler's bound on overuse. 10 s.
        #[cfg_attr(feature = "serde", serde(rename = "max_debt_ns"))]
        pub max_debt: Duration = Duration::from_secs(10), with_max_debt;
        /// Whether processes of an earlier daemon may still be there. Their memory is then kept for them until they had the time to come
        /// back ([`SETTLE`](super::SETTLE)). True. A daemon without a known predecessor says false, and its first allocation does not
        /// wait. A reload leaves the field as it is.
        pub predecessor: bool = true, with_predecessor;
        /// The devices of the node. Empty: the node learns each device from the first client on it.
        pub devices: Vec<DeviceConfig> = Vec::new(), with_devices;
        /// The listed names with their settings.
        pub clients: BTreeMap<String, ClientConfig> = BTreeMap::new(), with_clients;
    }
}

/// The number of devices for which a node of `max_clients` clients needs schedulers, since each client may bring a device of its own.
/// At least 64, and at most 4,096, the bound of the schedulers.
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
    /// The UUID, as `nvidia-smi -L` prints it.
    pub uuid: DeviceUuid,
    /// The device's memory; `None`: the driver's figure, or the first client's where the driver gives none.
    #[cfg_attr(feature = "serde", serde(default, rename = "memory_bytes"))]
    pub memory: Option<Bytes>,
}

/// Settings of one name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct ClientConfig {
    /// The share, in place of the request of the processes; `None`: the name is not listed, and gets the request.
    pub spec: Option<ResourceSpec>,
    /// The class, in place of the class stated by the processes; `None`: the stated class.
    pub class: Option<ServiceClass>,
    /// The only user of the name; `None`: the user of the first process, while the processes live.
    pub user: Option<u32>,
    /// The only device with a reservation for the request; `None`: all devices have one.
    pub device: Option<DeviceUuid>,
}

gshare_core::with_fields!(ClientConfig {
    with_spec(spec: Option<ResourceSpec>),
    with_class(class: Option<ServiceClass>),
    with_user(user: Option<u32>),
    with_device(device: Option<DeviceUuid>),
});

impl NodeConfig {
    /// The settings of `name`; the defaults if no settings are listed.
    pub(super) fn of(&self, name: &str) -> ClientConfig {
        self.clients.get(name).copied().unwrap_or_default()
    }

    /// The spec of a client: the listed spec of its name, or else the spec asked for.
    pub(super) fn spec_of(&self, name: &str, asked: ResourceSpec) -> ResourceSpec {
        if self.observe { ResourceSpec::OBSERVED } else { self.of(name).spec.unwrap_or(asked) }
    }

    /// Checks every field against its bounds.
    ///
    /// # Errors
    /// The first field out of its bounds.
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
        for (name, client) in &self.clients {
            if name.is_empty() || name.len() > MAX_TEXT || !is_printable(name) {
                let bound = format!("need 1 to {MAX_TEXT} bytes that can be printed");
                return Err(ConfigError::new("client: name", printable(name), bound));
            }
            self.check_client(name, client)?;
        }
        self.check_requests()
    }

    /// Checks the settings of one name.
    fn check_client(&self, name: &str, client: &ClientConfig) -> Result<(), ConfigError> {
        let field = |key: &str| format!("client `{name}`: {key}");
        if let Some(uuid) = client.device
            && !self.devices.is_empty()
            && self.devices.iter().all(|device| device.uuid != uuid)
        {
            return Err(ConfigError::new(field("device"), uuid, "need one that a [[device]] lists"));
        }
        let Some(spec) = client.spec else { return Ok(()) };
        if client.class.is_some_and(ServiceClass::is_slo_sensitive) && spec.quota().request().is_zero() {
            let bound = "need a quota with a request above 0, a guaranteed share to come back to";
            return Err(ConfigError::new(field("class"), "slo-sensitive", bound));
        }
        // A name without a device may come to any device, and the smaller devices refuse it when it attaches.
        let usable = self.devices.iter().filter(|device| client.device.is_none_or(|own| own == device.uuid));
        let sizes: Option<Vec<Bytes>> = usable.map(|device| device.memory).collect();
        let memory = spec.guaranteed().or(spec.memory());
        if let (Some(memory), Some(most)) = (memory, sizes.and_then(|sizes| sizes.into_iter().max()))
            && memory > most
        {
            return Err(ConfigError::new(
                field("memory"),
                memory,
                format!("need at most the device's {most}"),
            ));
        }
        Ok(())
    }

    /// Checks for each device whether the requests reserved there can be met together.
    fn check_requests(&self) -> Result<(), ConfigError> {
        let named = self.clients.values().filter_map(|client| client.device);
        let mut uuids: BTreeSet<_> =
            named.chain(self.devices.iter().map(|device| device.uuid)).map(Some).collect();
        if self.devices.is_empty() {
            // A device without an entry.
            uuids.insert(None);
        }
        for uuid in uuids {
            let reserved: Vec<Share> = self.reserved_on(uuid).map(|(_, share)| share).collect();
            time_admission::check(&[], &reserved).map_err(|excess| excess.on(uuid))?;
        }
        Ok(())
    }

    /// The listed names with a reservation on a device, and their shares. `None`: a device without an entry.
    pub(super) fn reserved_on(&self, uuid: Option<DeviceUuid>) -> impl Iterator<Item = (&str, Share)> {
        let here = move |client: &ClientConfig| client.device.is_none() || client.device == uuid;
        self.clients.iter().filter(move |(_, client)| here(client)).filter_map(|(name, client)| {
            client.spec.map(|spec| (name.as_str(), Share { quota: spec.quota(), sm: spec.sm() }))
        })
    }

    /// Refuses `new` if a field differs that is fixed while the node runs.
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
    use gshare_core::SmShare;

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

    #[test]
    fn what_is_promised_fits_on_the_devices() {
        let device = |n: u8| DeviceUuid::gpu([n; 16]);
        let client = |quota: &str, sm: u16, memory: Option<u64>, on: Option<u8>| {
            let sm = SmShare::from_percent(sm).unwrap();
            let spec = ResourceSpec::new(quota.parse().unwrap(), sm, memory.map(Bytes::from_gib)).unwrap();
            ClientConfig::default().with_spec(Some(spec)).with_device(on.map(device))
        };
        let check = |devices: &[(u8, u64)], clients: &[ClientConfig]| {
            let devices = devices
                .iter()
                .map(|&(n, memory)| DeviceConfig { uuid: device(n), memory: Some(Bytes::from_gib(memory)) });
            let clients = ["a", "b", "c"].into_iter().map(str::to_owned).zip(clients.iter().copied());
            let config =
                NodeConfig::default().with_devices(devices.collect()).with_clients(clients.collect());
            config.check().map_err(|error| error.to_string())
        };
        let whole = |on| client("0.9", 100, None, on);
        assert_eq!(
            check(&[], &[whole(None), whole(None)]).unwrap_err(),
            "any device: sum of requests is 180%: 0% taken, 180% reserved for listed names: need at most 100%, or SMs \
             that fit side by side"
        );
        assert_eq!(check(&[], &[whole(Some(1)), whole(Some(2))]), Ok(()), "one on each device");
        assert!(check(&[], &[whole(Some(1)), whole(None)]).unwrap_err().starts_with("device `GPU-01010101-"));
        assert!(check(&[(1, 80), (2, 80)], &[whole(Some(1)), whole(Some(1))]).is_err());
        let half = client("0.9", 50, None, None);
        assert_eq!(check(&[], &[half, half]), Ok(()), "side by side");
        let large = |on| client("0.1", 100, Some(81), on);
        assert_eq!(
            check(&[(1, 16), (2, 80)], &[large(None)]).unwrap_err(),
            "client `a`: memory is 81 GiB: need at most the device's 80 GiB"
        );
        assert_eq!(check(&[(1, 16), (2, 96)], &[large(None)]), Ok(()));
        assert!(check(&[(1, 16), (2, 96)], &[large(Some(1))]).unwrap_err().ends_with("the device's 16 GiB"));
        let elsewhere = check(&[(1, 16)], &[whole(Some(7))]).unwrap_err();
        assert!(elsewhere.ends_with("need one that a [[device]] lists"), "{elsewhere}");
    }
}
