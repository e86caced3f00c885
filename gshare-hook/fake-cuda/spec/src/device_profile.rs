//! Profiles: the GPUs of a simulated device and the cost of kernels on them. For the data files see `profiles/`.
//!
//! A kernel's demand and duration come from the first of these sources:
//! 1. its name: `zero…` costs nothing; `spin_<n>ns`, `spin_<n>us`, `spin_<n>ms` lasts exactly that long; `spin_ns` takes its duration in ns
//!    from its first argument, a 64-bit integer. `use_<n>ns` and so on lasts like `spin_<n>ns`, and uses the device address in its first
//!    argument meanwhile. A suffix `_sm<n>` sets the demand, `_full` takes every SM;
//! 2. the first `[[kernel]]` of the profile with the kernel's `name`, or with the beginning of that name and a `*`;
//! 3. the launch: hardware spreads blocks over SMs one by one, so demand = min(blocks, SMs); waves = ceil(blocks / (demand x blocks per
//!    SM)), duration = `fixed_ns` + waves x `ns_per_wave`.

use serde::{Deserialize, Serialize};

/// The GPUs of a device file, all alike, and the costs on them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of the device; " (simulated)" is added.
    pub device_name: String,
    /// Number of GPUs.
    #[serde(default = "one")]
    pub gpus: u32,
    /// Streaming multiprocessors per GPU.
    pub sms: u32,
    /// Memory per GPU in bytes, as `cuDeviceTotalMem` reports it.
    pub memory_bytes: u64,
    /// Memory reserved by the driver, in bytes; NVML counts it in its total.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Resident threads per SM.
    pub threads_per_sm: u32,
    /// Resident blocks per SM.
    pub blocks_per_sm: u32,
    /// Shared memory per SM in bytes.
    pub shared_memory_per_sm_bytes: u32,
    /// Level 2 cache in bytes.
    pub l2_bytes: u32,
    /// SM clock in kHz.
    pub clock_khz: u32,
    /// Memory clock in kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Bytes per second between host and device.
    pub host_bandwidth: u64,
    /// Bytes per second within the device (a copy reads and writes).
    pub device_bandwidth: u64,
    /// Time of an empty copy or memset in ns.
    pub copy_fixed_ns: u64,
    /// Device memory a context takes in bytes.
    pub context_bytes: u64,
    /// Cost of kernels without an entry of their own.
    pub cost: Cost,
    /// Time in the caller of each kind of call.
    #[serde(default)]
    pub calls: Calls,
    /// Costs by name.
    #[serde(default)]
    pub kernel: Vec<KernelCost>,
    /// The board's description of itself to a monitor.
    #[serde(default)]
    pub board: Board,
    /// The MIG slices into which a GPU can be cut.
    #[serde(default)]
    pub mig: Vec<MigSlice>,
    /// MIG devices into which the file's one GPU is cut, by name; an empty list leaves the GPU whole.
    #[serde(default)]
    pub cut: Vec<String>,
}

fn one() -> u32 {
    1
}

/// The board around the GPU, as NVML describes it. Figures come from a data sheet or are typical; only NVML's answers depend on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Board {
    /// PCI device and vendor, such as 0x20b210de.
    pub pci_id: u32,
    /// PCI Express generation, 1 to 6.
    pub pcie_generation: u32,
    /// PCI Express lanes.
    pub pcie_width: u32,
    /// Memory behind the PCI aperture BAR1, in bytes.
    pub bar1_bytes: u64,
    /// Power drawn when nothing runs, in mW.
    pub power_idle_mw: u32,
    /// Lowest power limit that may be set, in mW.
    pub power_min_mw: u32,
    /// Power limit, in mW: the draw of a GPU under constant load.
    pub power_limit_mw: u32,
    /// Temperature when nothing runs, in degrees Celsius.
    pub idle_celsius: u32,
    /// Temperature of a GPU under constant load.
    pub busy_celsius: u32,
    /// Highest temperature of normal operation.
    pub max_celsius: u32,
    /// Temperature at which clocks are lowered.
    pub slowdown_celsius: u32,
    /// Temperature at which the GPU is switched off.
    pub shutdown_celsius: u32,
}

impl Default for Board {
    fn default() -> Self {
        Self {
            pci_id: 0x0000_10de,
            pcie_generation: 4,
            pcie_width: 16,
            bar1_bytes: 256 << 20,
            power_idle_mw: 50_000,
            power_min_mw: 100_000,
            power_limit_mw: 300_000,
            idle_celsius: 30,
            busy_celsius: 65,
            max_celsius: 85,
            slowdown_celsius: 90,
            shutdown_celsius: 95,
        }
    }
}

/// A MIG device: an instance of the GPU, with one compute instance that fills it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigSlice {
    /// Name of the slice, such as `1g.10gb`.
    pub name: String,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// Duration by launch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Per kernel.
    pub fixed_ns: u64,
    /// Per wave of blocks.
    pub ns_per_wave: u64,
}

/// CPU time of a driver call, in ns. Work starts at the end of the call which queues it, at the earliest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    /// Launching a kernel.
    pub launch_ns: u32,
    /// Launching a graph.
    pub graph_ns: u32,
    /// Extra time for each node of a launched graph.
    pub graph_node_ns: u32,
    /// Recording an event, waiting for one, and other small stream operations.
    pub event_ns: u32,
    /// Starting a copy or fill.
    pub copy_ns: u32,
}

impl Default for Calls {
    /// A driver of CUDA 12.6 on a recent server; for the sources see `profiles/a100.toml`.
    fn default() -> Self {
        Self { launch_ns: 3_000, graph_ns: 2_500, graph_node_ns: 1, event_ns: 500, copy_ns: 3_000 }
    }
}

impl Calls {
    /// The same driver on a slower or faster host, where launching a kernel takes `launch_ns`.
    #[must_use]
    pub fn scaled_to(self, launch_ns: u32) -> Self {
        let of = if self.launch_ns == 0 { Self::default() } else { self };
        let longer = |ns: u32| u64::from(ns) * u64::from(launch_ns) / u64::from(of.launch_ns);
        let scaled = |ns: u32| u32::try_from(longer(ns)).unwrap_or(u32::MAX);
        Self {
            launch_ns,
            graph_ns: scaled(of.graph_ns),
            graph_node_ns: scaled(of.graph_node_ns),
            event_ns: scaled(of.event_ns),
            copy_ns: scaled(of.copy_ns),
        }
    }
}

/// Duration of kernels by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCost {
    /// Name, or its beginning followed by `*`.
    pub name: String,
    /// Duration in ns of any launch.
    pub duration_ns: Option<u64>,
    /// Duration in ns per block, instead.
    pub ns_per_block: Option<u64>,
    /// Demand in SMs; without it, by launch size.
    pub sms: Option<u32>,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// Neither a built-in name nor a readable file.
    #[error("profile {0:?}: no built-in profile of this name ({known}) and not readable: {1}", known = built_in().join(", "))]
    Unknown(String, std::io::Error),
    /// The file is not a profile.
    #[error("profile {0:?}: {1}")]
    Syntax(String, toml::de::Error),
    /// The file builds on a profile that is not built in.
    #[error("profile {0:?}: base {1}: need one of {known}", known = built_in().join(", "))]
    Base(String, String),
    /// A number is out of range.
    #[error("profile {0:?}: {1} must be {2}")]
    Range(String, &'static str, &'static str),
    /// The GPU has no such MIG slice.
    #[error("profile {0:?}: no MIG slice {1:?}; it has {2}")]
    Slice(String, String, String),
    /// The slices need more of a resource than the GPU has.
    #[error("profile {0:?}: slices of {1} {2} are cut off {3}")]
    Cut(String, u64, &'static str, u64),
}

const BUILT_IN: [(&str, &str); 8] = [
    ("v100", include_str!("../profiles/v100.toml")),
    ("a100", include_str!("../profiles/a100.toml")),
    ("h100", include_str!("../profiles/h100.toml")),
    ("h200", include_str!("../profiles/h200.toml")),
    ("b200", include_str!("../profiles/b200.toml")),
    ("gb200", include_str!("../profiles/gb200.toml")),
    ("t4", include_str!("../profiles/t4.toml")),
    ("tiny", include_str!("../profiles/tiny.toml")),
];

/// Names of the built-in profiles.
pub fn built_in() -> Vec<&'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).collect()
}

fn of_name(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    BUILT_IN.iter().find(|(name, _)| *name == lower).map(|(_, text)| *text)
}

/// The text of a profile by name (`a100`, …; case does not matter) or path. One with `base = "a100"` takes from that built-in profile
/// each key that it leaves out.
pub fn load_text(spec: &str) -> Result<String, ProfileError> {
    let text = match of_name(spec) {
        Some(text) => text.to_owned(),
        None => std::fs::read_to_string(spec).map_err(|e| ProfileError::Unknown(spec.to_owned(), e))?,
    };
    on_base(text, spec)
}

fn on_base(text: String, origin: &str) -> Result<String, ProfileError> {
    let syntax = |e| ProfileError::Syntax(origin.to_owned(), e);
    let mut own: toml::Table = toml::from_str(&text).map_err(syntax)?;
    let Some(base) = own.remove("base") else { return Ok(text) };
    let named = base.as_str().filter(|name| of_name(name).is_some());
    let named = named.ok_or_else(|| ProfileError::Base(origin.to_owned(), base.to_string()))?;
    let mut all: toml::Table = toml::from_str(&load_text(named)?).map_err(syntax)?;
    overlay(&mut all, own);
    Ok(all.to_string())
}

/// Puts the keys of `own` over the keys of `base`, also within tables. A list replaces a list.
fn overlay(base: &mut toml::Table, own: toml::Table) {
    for (key, value) in own {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(own)) => overlay(base, own),
            (_, value) => drop(base.insert(key, value)),
        }
    }
}

/// How a kernel's name determines its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// Source of the duration.
    pub duration: Duration,
    /// Demand in SMs, if the name or the profile sets it.
    pub sms: Option<u32>,
}

/// Source of a kernel's duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duration {
    /// A fixed number of ns.
    Fixed(u64),
    /// A number of ns for each block.
    PerBlock(u64),
    /// The first argument, in ns.
    FirstArgument,
    /// By launch size.
    BySize,
}

impl Profile {
    /// Reads a profile's text; `origin` is for messages.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text).map_err(|e| ProfileError::Syntax(origin.to_owned(), e))?;
        let range = |field, bound| Err(ProfileError::Range(origin.to_owned(), field, bound));
        match &profile {
            p if p.gpus == 0 || p.gpus > 16 => range("gpus", "1 to 16"),
            p if p.sms == 0 || p.sms > 1024 => range("sms", "1 to 1024"),
            p if p.memory_bytes == 0 || p.memory_bytes > 1 << 42 => range("memory_bytes", "1 to 2^42"),
            p if p.host_bandwidth == 0 => range("host_bandwidth", "positive"),
            p if p.device_bandwidth == 0 => range("device_bandwidth", "positive"),
            p if p.threads_per_sm == 0 => range("threads_per_sm", "positive"),
            p if p.blocks_per_sm == 0 => range("blocks_per_sm", "positive"),
            p if !(1..=6).contains(&p.board.pcie_generation) => range("pcie_generation", "1 to 6"),
            p if !(1..=32).contains(&p.board.pcie_width) => range("pcie_width", "1 to 32"),
            p if p.board.power_idle_mw > p.board.power_limit_mw => {
                range("power_idle_mw", "at most power_limit_mw")
            }
            p if p.board.idle_celsius > p.board.busy_celsius => range("idle_celsius", "at most busy_celsius"),
            p if p.cut.len() > 7 => range("cut", "at most 7 slices"),
            p if !p.cut.is_empty() && p.gpus > 1 => range("gpus", "1 where it is cut into slices"),
            p if p.mig.iter().any(|s| s.sms == 0 || s.memory_bytes == 0) => range("mig", "of SMs and memory"),
            p => p.checked_cut(origin).map(|()| profile),
        }
    }

    fn checked_cut(&self, origin: &str) -> Result<(), ProfileError> {
        let (mut sms, mut memory) = (0, 0);
        for name in &self.cut {
            let Some(slice) = self.slice(name) else {
                let known: Vec<&str> = self.mig.iter().map(|s| s.name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(ProfileError::Slice(origin.to_owned(), name.clone(), known));
            };
            sms += u64::from(slice.sms);
            memory += slice.memory_bytes;
        }
        for (cut, what, all) in
            [(sms, "SMs", u64::from(self.sms)), (memory, "bytes", self.memory_bytes + self.reserved_bytes)]
        {
            if cut > all {
                return Err(ProfileError::Cut(origin.to_owned(), cut, what, all));
            }
        }
        Ok(())
    }

    fn slice(&self, name: &str) -> Option<&MigSlice> {
        self.mig.iter().find(|s| s.name == name)
    }

    /// The devices open to a process, each with its own SMs and memory: the GPUs, or the MIG devices of the one GPU.
    pub fn devices(&self) -> Vec<Self> {
        if self.cut.is_empty() {
            return vec![self.clone(); self.gpus as usize];
        }
        let device = |slice: &MigSlice| Self {
            device_name: format!("{} MIG {}", self.device_name, slice.name),
            sms: slice.sms,
            memory_bytes: slice.memory_bytes,
            ..self.clone()
        };
        self.cut.iter().filter_map(|name| self.slice(name)).map(device).collect()
    }

    /// The cost stated by the kernel's name.
    pub fn named(&self, name: &str) -> Named {
        if let Some(named) = by_name(name, self.sms) {
            return named;
        }
        let found = self.kernel.iter().find(|k| match k.name.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => k.name == name,
        });
        let Some(cost) = found else { return Named { duration: Duration::BySize, sms: None } };
        let duration = match (cost.duration_ns, cost.ns_per_block) {
            (Some(ns), _) => Duration::Fixed(ns),
            (None, Some(ns)) => Duration::PerBlock(ns),
            (None, None) => Duration::BySize,
        };
        Named { duration, sms: cost.sms }
    }

    /// Demand in SMs and duration in ns of a launch. `first` is the kernel's first argument, if its name refers to it.
    pub fn cost(&self, named: Named, blocks: u64, threads: u32, first: Option<u64>) -> (u32, u64) {
        let fit = u64::from((self.threads_per_sm / threads.max(1)).clamp(1, self.blocks_per_sm));
        let by_size = u32::try_from(blocks.clamp(1, u64::from(self.sms))).unwrap_or(self.sms);
        let sms = named.sms.unwrap_or(by_size).clamp(1, self.sms);
        let ns = match named.duration {
            Duration::Fixed(ns) => ns,
            Duration::PerBlock(ns) => ns.saturating_mul(blocks),
            Duration::FirstArgument => first.unwrap_or(0),
            Duration::BySize => {
                let waves = blocks.div_ceil(u64::from(sms) * fit);
                self.cost.fixed_ns.saturating_add(waves.saturating_mul(self.cost.ns_per_wave))
            }
        };
        (sms, ns)
    }

    /// Duration of a copy in ns: between host and device, or within the device.
    pub fn copy_ns(&self, bytes: u64, crosses: bool) -> u64 {
        let bandwidth = if crosses { self.host_bandwidth } else { self.device_bandwidth };
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth);
        self.copy_fixed_ns.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX / 4))
    }
}

/// Whether a kernel's name states a time above 0, such as `spin_5us`: such a kernel is launched for its time, not for an output.
pub fn states_time(name: &str) -> bool {
    by_name(name, 0).is_some_and(|named| named.duration != Duration::Fixed(0))
}

fn by_name(name: &str, all: u32) -> Option<Named> {
    let with_number = name.rsplit_once("_sm").and_then(|(rest, n)| Some((rest, Some(n.parse().ok()?))));
    let full = name.strip_suffix("_full").map(|rest| (rest, Some(all)));
    let (rest, sms) = full.or(with_number).unwrap_or((name, None));
    let uses = rest.strip_prefix("use_");
    let duration = match rest.strip_prefix("spin_").or(uses) {
        _ if rest == "zero" => Duration::Fixed(0),
        Some("ns") if uses.is_some() => return None,
        Some("ns") => Duration::FirstArgument,
        time => {
            let (n, unit) = time?.split_at(time?.bytes().take_while(u8::is_ascii_digit).count());
            let unit = match unit {
                "ns" => 1,
                "us" => 1_000,
                "ms" => 1_000_000,
                _ => return None,
            };
            Duration::Fixed(n.parse::<u64>().ok()?.saturating_mul(unit))
        }
    };
    Some(Named { duration, sms })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a100() -> Profile {
        Profile::parse(&load_text("A100").unwrap(), "A100").unwrap()
    }

    #[test]
    fn every_built_in_profile_reads() {
        for name in built_in() {
            let profile = Profile::parse(&load_text(name).unwrap(), name).unwrap();
            // A slice of a base would be one of another GPU.
            let fits = |s: &MigSlice| {
                s.sms <= profile.sms && s.memory_bytes <= profile.memory_bytes + profile.reserved_bytes
            };
            assert!(profile.mig.iter().all(fits), "{name}");
        }
    }

    #[test]
    fn a_built_in_profile_may_build_on_another() {
        let read = |name: &str| Profile::parse(&load_text(name).unwrap(), name).unwrap();
        let (h200, b200, gb200) = (read("h200"), read("b200"), read("GB200"));
        assert_eq!((b200.compute_capability, gb200.compute_capability), ((10, 0), (10, 0)));
        assert_eq!((gb200.calls, gb200.l2_bytes), (h200.calls, b200.l2_bytes));
        assert_eq!((b200.host_bandwidth, gb200.host_bandwidth), (h200.host_bandwidth, 450_000_000_000));
        assert_eq!((gb200.board.pci_id, gb200.board.bar1_bytes), (0x2941_10de, h200.board.bar1_bytes));
        assert_eq!(
            gb200.mig.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
            ["1g.23gb", "1g.47gb", "2g.47gb"]
        );
    }

    #[test]
    fn names_say_duration_and_demand() {
        let p = a100();
        let fixed = |ns, sms| Named { duration: Duration::Fixed(ns), sms };
        assert_eq!(p.named("zero"), fixed(0, None));
        assert_eq!(p.named("spin_1000us"), fixed(1_000_000, None));
        assert_eq!(p.named("spin_30ms_full"), fixed(30_000_000, Some(108)));
        assert_eq!(p.named("spin_7ns_sm12"), fixed(7, Some(12)));
        assert_eq!(p.named("spin_ns_sm3"), Named { duration: Duration::FirstArgument, sms: Some(3) });
        for other in [
            "spin_",
            "spin_5",
            "spin_5h",
            "matmul_small",
            "spin_99999999999999999999ns",
            "zero_fill",
            "use_flags",
        ] {
            assert_eq!(p.named(other), Named { duration: Duration::BySize, sms: None }, "{other}");
            assert!(!states_time(other), "{other}");
        }
        assert!(["spin_1000us", "spin_7ns_sm12", "spin_ns", "use_3us_full"].into_iter().all(states_time));
        assert!(!states_time("zero"), "a program may have a kernel of this name");
    }

    #[test]
    fn cost_by_size_counts_waves() {
        let p = a100();
        let by_size = p.named("matmul");
        let fit = u64::from(p.threads_per_sm / 1024);
        let (sms, one) = p.cost(by_size, 108 * fit, 1024, None);
        let (_, two) = p.cost(by_size, 108 * fit + 1, 1024, None);
        assert_eq!((sms, two - one), (108, p.cost.ns_per_wave));
        assert_eq!(p.cost(by_size, 1, 32, None), (1, p.cost.fixed_ns + p.cost.ns_per_wave));
        assert_eq!(p.cost(p.named("spin_ns"), 4, 32, Some(77)), (4, 77));
    }

    #[test]
    fn a_cut_gpu_is_as_many_devices_as_slices() {
        let cut = |list: &str| {
            Profile::parse(&format!("cut = {list}\n{}", load_text("a100").unwrap()), "x")
                .map_err(|e| e.to_string())
        };
        let devices = cut(r#"["3g.40gb", "1g.10gb"]"#).unwrap().devices();
        assert_eq!(devices.iter().map(|d| d.sms).collect::<Vec<_>>(), [42, 14]);
        assert_eq!(devices[1].device_name, "NVIDIA A100-SXM4-80GB MIG 1g.10gb");
        assert_eq!(a100().devices(), [a100()]);
        assert!(cut(r#"["1g.5gb"]"#).unwrap_err().contains("no MIG slice \"1g.5gb\"; it has 1g.10gb"));
        assert!(cut(r#"["4g.40gb", "4g.40gb"]"#).unwrap_err().contains("slices of 112 SMs are cut off 108"));
        let text = cut(r#"["7g.80gb", "1g.10gb"]"#).unwrap_err();
        assert!(text.contains("SMs are cut off 108"), "{text}");
    }

    #[test]
    fn calls_keep_their_proportions() {
        let calls = a100().calls;
        assert_eq!(calls, Calls::default());
        let slower = calls.scaled_to(6_000);
        assert_eq!((slower.launch_ns, slower.graph_ns, slower.event_ns), (6_000, 5_000, 1_000));
        let none = Calls { launch_ns: 0, graph_ns: 0, graph_node_ns: 0, event_ns: 0, copy_ns: 0 };
        assert_eq!(calls.scaled_to(0), none);
        assert_eq!(none.scaled_to(3_000), calls);
    }

    #[test]
    fn a_profile_on_a_base_changes_its_own_keys_alone() {
        let on = |text: &str| on_base(text.to_owned(), "own.toml");
        let text = on(
            "base = \"A100\"\nsms = 54\n[calls]\nlaunch_ns = 7000\n[[kernel]]\nname = \"*\"\nduration_ns = 500\n",
        );
        let own = Profile::parse(&text.unwrap(), "own.toml").unwrap();
        let wanted = Profile {
            sms: 54,
            calls: Calls { launch_ns: 7_000, ..a100().calls },
            kernel: vec![KernelCost {
                name: "*".into(),
                duration_ns: Some(500),
                ns_per_block: None,
                sms: None,
            }],
            ..a100()
        };
        assert_eq!(own, wanted);
        let whole = load_text("a100").unwrap();
        assert_eq!(on(&whole).unwrap(), whole, "without a base the text is as written");
        let refused = |text: &str| on(text).unwrap_err().to_string();
        assert_eq!(
            refused("base = \"a1000\""),
            "profile \"own.toml\": base \"a1000\": need one of v100, a100, h100, h200, b200, gb200, t4, tiny"
        );
        assert!(refused("base = 5").contains("base 5: need one of"), "{}", refused("base = 5"));
        assert!(refused("base = ").contains("own.toml"));
    }

    #[test]
    fn a_bad_profile_names_the_key() {
        let text = load_text("a100").unwrap();
        let unknown = Profile::parse(&format!("wrong = 1\n{text}"), "x").unwrap_err().to_string();
        assert!(unknown.contains("wrong"), "{unknown}");
        let zero = Profile::parse(&text.replace("sms = 108", "sms = 0"), "x").unwrap_err().to_string();
        assert!(zero.contains("sms must be 1 to 1024"), "{zero}");
        assert!(load_text("/nowhere/at/all").unwrap_err().to_string().contains("a100"));
    }
}
