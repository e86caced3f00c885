//! The use of the devices by each client, for people and for bills. No decision of the node depends on it.
//!
//! A process states totals, so a lost frame loses nothing. **Busy** is the time with its kernels on the device. Clients
//! with launches that never wait may use the device at the same time, and the driver then gives them invisible turns.
//! **Occupied** is therefore the client's own part of the device: its busy time, weighed by its share of the SMs. Where the
//! clients of a device together were busy for longer than the device has time, each of them counts in proportion.
//!
//! Example: two observed clients launch without a pause for 10 s. Each is busy for 10 s, and occupies the device for 5 s.
//! Clients with tokens take turns, so their occupied time is their busy time.

use super::{Client, Node};
use gshare_core::{ClientId, Duration, GpuId, SmShare, Timestamp};

/// The shortest time over which the busy times of a device's clients are compared with its own time. A report is late by 100 ms at
/// most.
const PERIOD: Duration = Duration::from_secs(1);
/// The most time of a device left over from one comparison for reports that come in the next.
const LEFT_OVER: Duration = Duration::from_millis(200);

/// A client's use of its device since its process began to use the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct Usage {
    /// Time with the client's kernels on the device.
    #[cfg_attr(feature = "serde", serde(rename = "busy_ns"))]
    pub busy: Duration,
    /// The client's own part of the device's time. It grows with each comparison, about once a second.
    #[cfg_attr(feature = "serde", serde(rename = "occupied_ns"))]
    pub occupied: Duration,
    /// Memory in use times its time, in byte-seconds.
    pub byte_seconds: u64,
    /// Kernels launched.
    pub launches: u64,
    /// Time of the waits of the client's threads for a token.
    #[cfg_attr(feature = "serde", serde(rename = "waited_ns"))]
    pub waited: Duration,
}

impl Usage {
    /// The use since an earlier time.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            busy: self.busy.saturating_sub(earlier.busy),
            occupied: self.occupied.saturating_sub(earlier.occupied),
            byte_seconds: self.byte_seconds.saturating_sub(earlier.byte_seconds),
            launches: self.launches.saturating_sub(earlier.launches),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }

    /// Adds another use.
    pub fn add(&mut self, other: &Self) {
        self.busy = self.busy.saturating_add(other.busy);
        self.occupied = self.occupied.saturating_add(other.occupied);
        self.byte_seconds = self.byte_seconds.saturating_add(other.byte_seconds);
        self.launches = self.launches.saturating_add(other.launches);
        self.waited = self.waited.saturating_add(other.waited);
    }
}

/// The state of a device's comparisons.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Comparison {
    since: Timestamp,
    left_over: Duration,
}

impl Comparison {
    /// The first comparison, from now on.
    pub(super) fn begin(now: Timestamp) -> Self {
        Self { since: now, left_over: Duration::ZERO }
    }
}

impl Client {
    /// Busy time not yet in a comparison, weighed by the client's share of the SMs.
    fn uncounted(&self, sm: SmShare) -> Duration {
        let busy = self.usage.busy.saturating_sub(self.counted);
        busy.scaled(u64::from(sm.get()), u64::from(SmShare::WHOLE.get()))
    }
}

impl Node {
    /// Compares the clients of a device with its time, if a period is over. `at_once`: in any case.
    pub(super) fn compare_use(&mut self, now: Timestamp, gpu: GpuId, at_once: bool) {
        let Some(Some(device)) = self.devices.get_mut(gpu.index()) else { return };
        let Comparison { since, left_over } = device.comparison;
        let length = now.saturating_since(since);
        if length < PERIOD && !at_once {
            return;
        }
        device.comparison.since = now;
        let on: Vec<ClientId> =
            self.clients.iter().filter(|(_, client)| self.is_on(client, gpu)).map(|(id, _)| id).collect();
        let weighed = |id: &ClientId| {
            let client = self.clients.get(*id).expect("a client that was just found");
            let sm = self.spec_of(client.tenant).map_or(SmShare::WHOLE, |spec| spec.sm());
            client.uncounted(sm)
        };
        let parts: Vec<Duration> = on.iter().map(weighed).collect();
        let sum: Duration = parts.iter().copied().sum();
        let room = length.saturating_add(left_over);
        if let Some(Some(device)) = self.devices.get_mut(gpu.index()) {
            device.comparison.left_over = room.saturating_sub(sum).min(LEFT_OVER);
        }
        for (id, part) in on.into_iter().zip(parts) {
            let client = self.clients.get_mut(id).expect("a client that was just found");
            let own = if sum > room { part.scaled(room.as_nanos(), sum.as_nanos()) } else { part };
            client.usage.occupied = client.usage.occupied.saturating_add(own);
            client.counted = client.usage.busy;
        }
    }

    /// Compares the clients of all devices with the devices' time.
    pub(super) fn compare_all_use(&mut self, now: Timestamp) {
        for gpu in 0..u32::try_from(self.devices.len()).unwrap_or(u32::MAX) {
            self.compare_use(now, GpuId::new(gpu), true);
        }
    }
}
