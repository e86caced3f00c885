//! Functions that the seed draws, so that a policy is judged on worlds nobody tuned it for.
//!
//! Rates follow a Pareto distribution, so that few functions have most of the load; their sum is a part of what the devices of a
//! regime could serve. Arrivals are Poisson, gamma with a CV of up to 7, bursts, or a random walk. Times, speed-ups, batches, SLOs,
//! memory and loading times differ by function too. A drawn function has the form of a written one.

use super::Scenario;
use super::error::ScenarioError;
use super::function::FunctionText;
use super::units::Text;
use crate::rng::Rng;
use gshare_core::Quota;
use gshare_sched::platform::Regime;
use serde::Deserialize;
use std::fmt::Write as _;

/// The numbers of functions to draw, beside the written functions.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DrawText {
    /// Inference functions on shared devices.
    #[serde(default)]
    pub inference: u32,
    /// Inference functions on whole devices.
    #[serde(default)]
    pub whole: u32,
    /// Pipelines on slices.
    #[serde(default)]
    pub pipelines: u32,
    /// Training jobs, every second one best effort, the others with a guaranteed share.
    #[serde(default)]
    pub trainers: u32,
    /// The fewest and the most instances of an inference function on shared devices; default 0 and 8.
    #[serde(default = "zero_to_eight")]
    pub instances: (u32, u32),
    /// The mean load of the devices of each regime.
    pub load: Text<Quota>,
}

const fn zero_to_eight() -> (u32, u32) {
    (0, 8)
}

/// The drawn functions of one seed.
struct Draw {
    rng: Rng,
    instances: (u32, u32),
    text: String,
}

impl Scenario {
    /// The scenario with the functions that `seed` draws; the same scenario without [`draw`](Self::draw).
    ///
    /// # Errors
    /// [`ScenarioError::Field`] for a load of 0.
    pub fn drawn(&self, seed: u64) -> Result<Self, ScenarioError> {
        let Some(draw) = self.draw else { return Ok(self.clone()) };
        let load = draw.load.0.as_fraction();
        if load <= 0.0 {
            return Err(ScenarioError::field("draw.load", "0%", "need more"));
        }
        let devices = |regime| {
            let all = self.node.iter().flat_map(|node| &node.device);
            let of = |device: &super::DeviceText| match &device.mig {
                Some(_) => Regime::Sliced,
                None => device.regime.unwrap_or(Regime::Fractional),
            };
            load * f64::from(
                all.filter(|device| of(device) == regime).map(|device| device.count).sum::<u32>(),
            )
        };
        let mut drawn =
            Draw { rng: Rng::new(seed ^ 0x5EED_D4A3), instances: draw.instances, text: String::new() };
        drawn.all(draw.inference, devices(Regime::Fractional), Draw::inference);
        drawn.all(draw.whole, devices(Regime::Whole), Draw::whole);
        // A device's slices serve about twice as many requests as the device at once.
        drawn.all(draw.pipelines, 2.0 * devices(Regime::Sliced), Draw::pipeline);
        for number in 0..draw.trainers {
            drawn.trainer(number);
        }
        #[derive(Deserialize)]
        struct Functions {
            function: Vec<FunctionText>,
        }
        let Functions { function } = toml::from_str(&drawn.text)?;
        let function = self.function.iter().cloned().chain(function).collect();
        Ok(Self { function, draw: None, ..self.clone() })
    }
}

impl Draw {
    fn unit(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Evenly by factor.
    fn by_factor(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }

    /// `count` functions that keep `devices` devices busy together.
    fn all(&mut self, count: u32, devices: f64, one: fn(&mut Self, u32) -> f64) {
        // A Pareto distribution with an exponent of 1.2, cut where one function has as much as a hundred small ones.
        let weights: Vec<f64> = (0..count).map(|_| self.between(0.004, 1.0).powf(-1.0 / 1.2)).collect();
        let sum: f64 = weights.iter().sum();
        for (number, weight) in (0..count).zip(weights) {
            let seconds = one(self, number);
            self.load(devices * weight / sum / seconds);
        }
    }

    fn load(&mut self, rate: f64) {
        let load = match self.rng.below(5) {
            0 => format!("{{ shape = \"poisson\", rate = {rate:.4} }}"),
            1 | 2 => {
                let cv = self.by_factor(1.0, 7.0);
                format!("{{ shape = \"gamma\", rate = {rate:.4}, cv = {cv:.2} }}")
            }
            3 => {
                let (on, off) = (self.by_factor(3.0, 30.0), self.by_factor(10.0, 120.0));
                let rate = rate * (on + off) / on;
                format!("{{ shape = \"bursts\", on = \"{on:.1}s\", off = \"{off:.1}s\", rate = {rate:.4} }}")
            }
            _ => {
                let mut walk = vec![1.0_f64];
                for _ in 1..40 {
                    walk.push(walk[walk.len() - 1] * self.by_factor(0.6, 1.0 / 0.6));
                }
                let scale = rate * walk.len() as f64 / walk.iter().sum::<f64>();
                let rates: Vec<String> = walk.iter().map(|one| format!("{:.4}", one * scale)).collect();
                format!("{{ shape = \"steps\", every = \"15s\", rates = [{}] }}", rates.join(", "))
            }
        };
        self.line(&format!("load = {load}"));
    }

    fn line(&mut self, line: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn head(&mut self, name: &str, number: u32, work: &str, memory: f64) {
        self.line(&format!(
            "[[function]]\nname = \"{name}-{number}\"\nwork = \"{work}\"\nmemory = \"{memory:.0}MiB\""
        ));
    }

    /// Writes a function on shared devices without its load; answers the device's seconds for a request.
    fn inference(&mut self, number: u32) -> f64 {
        let (memory, alone) = (self.by_factor(1_000.0, 7_000.0), self.by_factor(0.005, 0.1));
        let (knee, steep, batch) = (self.between(0.2, 1.0), self.between(0.6, 1.0), self.between(0.2, 0.9));
        let (slo, disk) = (alone * self.by_factor(4.0, 20.0), self.by_factor(2.0, 9.0));
        self.head("inference", number, "inference", memory);
        let mut points = Vec::new();
        for sm in [0.12, 0.25, 0.5, 1.0_f64] {
            for (quota, size) in [(0.4, 1), (1.0, 1), (1.0, 4)] {
                let time =
                    alone * (knee / sm).max(1.0).powf(steep) * (1.0 + batch * f64::from(size - 1)) / quota;
                let (rps, ms) = (f64::from(size) / time, time * 1e3);
                points.push(format!(
                    "{{ sm = \"{:.0}%\", quota = \"{:.0}%\", batch = {size}, rps = {rps:.3}, p50 = \"{ms:.3}ms\", p95 = \"{:.3}ms\" }}",
                    sm * 100.0, quota * 100.0, ms * 1.15
                ));
            }
        }
        self.line(&format!(
            "class = \"slo-sensitive\"\nslo = \"{:.1}ms\"\npatience = \"30s\"\ninstances = [{}, {}]\nloads = [\"{disk:.2}s\", \"{:.2}s\"]\nprofile = [{}]",
            slo * 1e3, self.instances.0, self.instances.1, disk / 2.5, points.join(", ")
        ));
        // Spread over less than the knee, a request takes no more of the device.
        alone * knee
    }

    /// The same for whole devices, one request at a time.
    fn whole(&mut self, number: u32) -> f64 {
        let (memory, infer) = (self.by_factor(1_000.0, 6_000.0), self.by_factor(0.05, 1.5));
        let disk = self.by_factor(1.5, 5.0);
        let slo = 4.0 * infer + disk * self.between(0.5, 2.0);
        self.head("whole", number, "inference", memory);
        self.line(&format!(
            "regime = \"whole\"\nslo = \"{:.0}ms\"\npatience = \"60s\"\ninstances = [0, 4]\nloads = [\"{disk:.2}s\", \"{:.2}s\"]\n\
             profile = [{{ sm = \"100%\", rps = {:.4}, p50 = \"{:.1}ms\" }}]",
            slo * 1e3, disk / 2.0, 1.0 / infer, infer * 1e3
        ));
        infer
    }

    /// The same for pipelines.
    fn pipeline(&mut self, number: u32) -> f64 {
        let parts = 2 + self.rng.below(2);
        let mut components = Vec::new();
        let (mut memory, mut all) = (0.0, 0.0);
        for part in 0..parts {
            let (own, time) = (self.by_factor(2_000.0, 6_000.0), self.by_factor(0.03, 0.15));
            (memory, all) = (memory + own, all + time);
            let on = [("1g.10gb", 1.0), ("2g.20gb", 0.6), ("3g.40gb", 0.45), ("4g.40gb", 0.37)];
            let on =
                on.map(|(slice, part)| format!("[\"{slice}\", \"{:.2}ms\"]", time * part * 1e3)).join(", ");
            components.push(format!("{{ name = \"c{part}\", memory = \"{own:.0}MiB\", on = [{on}] }}"));
        }
        self.head("pipeline", number, "pipeline", memory);
        let edges: Vec<String> =
            (1..parts).map(|part| format!("[\"c{}\", \"c{part}\", \"4MiB\"]", part - 1)).collect();
        let slo = all * self.by_factor(1.5, 6.0);
        self.line(&format!(
            "slo = \"{:.0}ms\"\npatience = \"30s\"\ninstances = [0, 4]\ndag.component = [{}]\ndag.edge = [{}]",
            slo * 1e3, components.join(", "), edges.join(", ")
        ));
        all * 0.6
    }

    fn trainer(&mut self, number: u32) {
        let (memory, workers) = (self.by_factor(2_000.0, 5_000.0), 1 + self.rng.below(2));
        let (time, sm) = (self.between(20.0, 60.0), self.between(20.0, 50.0));
        // A best-effort worker has little of its own, and takes what others leave.
        let guaranteed = number.is_multiple_of(2);
        let (name, time) = if guaranteed { ("guaranteed", time) } else { ("best_effort", 5.0) };
        self.head(name, number, "training", memory);
        let class = if guaranteed { "" } else { "class = \"best-effort\"\n" };
        self.line(&format!(
            "{class}workers = {workers}\ninstances = [1, 1]\ntrain = \"6h\"\nshare = {{ time = [\"{time:.0}%\", \"100%\"], sm = \"{sm:.0}%\" }}"
        ));
    }
}
