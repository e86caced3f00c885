//! The desired number of pods for a target's load: a [`HorizontalScaler`] with the rules of Knative's annotations. Pure.
//!
//! # Problem
//! The engines know each instance, but a Deployment knows only numbers. And Knative's annotations add two rules to the engines':
//! additional pods when the target wakes up (`activation-scale`), and fewer pods
//! only after a delay (`scale-down-delay`).
//!
//! # Algorithm
//! - A pod serves `target` of load, so the profile of a target is one point. Load and target are in thousandths of a
//!   request, at a time or per second: the engines do not care which.
//! - Starting instances become ready in order, as more pods are ready. A drained instance is gone at once, since the
//!   Deployment handles its requests. A late instance is given up and may be started again.
//! - *Desired* is the number of starting and ready instances. While the target wakes up from 0, it is at least
//!   `activation-scale` until so many pods were ready. Within `scale-down-delay` it does not fall.
//! - A target that already runs at the first look keeps its pods as instances.
//!
//! # Which engine
//! | policy | engine | for |
//! |---|---|---|
//! | lazy | [`LazyHorizontal`]: the horizontal half of co-scaling (Dilu, section 3.4) | nodes with vertical scaling in their daemons: these absorb bursts, and pods serve lasting load |
//! | heuristic | [`HeuristicHorizontal`] | nodes without vertical scaling |
//!
//! The vertical half works in periods of 5 ms on launches that only a node's daemon sees. Orders in annotations would
//! arrive by the API server and the kubelet, hundreds of periods late. So it runs in the daemons, for containers of class
//! `slo-sensitive`, and the two halves exchange nothing.
//!
//! The `window` annotation sets the engine's window; otherwise the engine has its own. Lazy scaling starts a pod when half
//! of a window (20 of 40 s) was above capacity, and removes a pod when three quarters of it were below.

use super::settings::{Metric, Settings};
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{ConfigError, Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::scale::{
    Fleet, FleetConfig, FunctionScale, HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalError,
    HorizontalOrder, HorizontalScaler, LazyHorizontal, LazyHorizontalConfig,
};
use std::collections::VecDeque;

/// The one function of an engine.
const FUNCTION: FunctionId = FunctionId::new(0);

/// Time between two looks at the load of a target.
pub const TICK: Duration = Duration::from_secs(1);

/// The deciding engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// Load must stay before a pod is started (Dilu, section 3.4.2).
    Lazy,
    /// As many pods as the highest load of late asks for (FaST-GShare, Algorithm 1).
    Heuristic,
}

/// Why a target cannot be decided about.
#[derive(Debug, thiserror::Error)]
pub enum DeciderError {
    /// A setting that the engine refuses.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Bounds that exclude each other.
    #[error(transparent)]
    Bounds(#[from] HorizontalError),
    /// A target of load that is no number.
    #[error(transparent)]
    Profile(#[from] gshare_core::profile::ProfileError),
}

/// Decides for one target.
pub struct Decider {
    settings: Settings,
    policy: Policy,
    patience: std::time::Duration,
    scaler: Box<dyn HorizontalScaler>,
    fleet: Fleet,
    named: u64,
    /// In the order in which they were started, with that time.
    starting: VecDeque<(InstanceId, Timestamp)>,
    /// The time of the last report of load.
    reported: Option<Timestamp>,
    /// From 0 pods to as many as it is to wake up with.
    waking: bool,
    /// Desired numbers within the delay, with their times; the numbers never increase.
    recent: VecDeque<(Timestamp, u32)>,
    desired: Option<u32>,
}

gshare_core::debug_fields!(Decider { settings, desired });

impl Decider {
    /// A decider for a target with `replicas` pods now. A pod that is not ready within `patience` is given up.
    ///
    /// # Errors
    /// If a setting is out of the engine's bounds.
    pub fn new(
        settings: &Settings,
        policy: Policy,
        patience: std::time::Duration,
        now: Timestamp,
        replicas: u32,
    ) -> Result<Self, DeciderError> {
        let scaler = engine(settings, policy)?;
        let point = ProfilePoint::measured(
            SmShare::WHOLE,
            Quota::WHOLE,
            1,
            settings.target.as_f64(),
            Duration::from_millis(1),
            Duration::from_millis(1),
        )?;
        let max = settings.max.max(1);
        let spec = FunctionScale {
            profile: ProfileTable::sparse(vec![point])?,
            max_p95: None,
            min_instances: settings.min,
            max_instances: max,
        };
        let mut decider = Self {
            settings: settings.clone(),
            policy,
            patience,
            fleet: Fleet::new(FUNCTION, spec, &scaler.config())?,
            scaler,
            named: 0,
            starting: VecDeque::new(),
            reported: None,
            waking: replicas == 0,
            recent: VecDeque::new(),
            desired: None,
        };
        for _ in 0..replicas.min(max) {
            decider.start(now);
        }
        decider.keep_minimum(now);
        Ok(decider)
    }

    /// Applies new annotations. Keeps the history of the load if only bounds have changed.
    ///
    /// # Errors
    /// When a setting is out of the engine's bounds; nothing changed then.
    pub fn retune(&mut self, settings: &Settings, now: Timestamp) -> Result<(), DeciderError> {
        if *settings == self.settings {
            return Ok(());
        }
        let bounded = Settings { min: settings.min, max: settings.max, ..self.settings.clone() };
        if bounded == *settings {
            let max = settings.max.max(1);
            self.fleet.set_bounds(FUNCTION, settings.min, max)?;
            while let Some((youngest, _)) = self.fleet.youngest().filter(|_| self.fleet.deployed() > max) {
                self.end(youngest);
            }
            self.keep_minimum(now);
            self.settings = bounded;
        } else {
            let mut new = Self::new(settings, self.policy, self.patience, now, self.fleet.deployed())?;
            (new.desired, new.waking) = (self.desired, self.waking);
            *self = new;
        }
        Ok(())
    }

    /// Takes the number of ready pods and the load; `None`: no pod and no activator could be asked. Once per [`TICK`]: an earlier load is
    /// left out. Returns the desired number of pods, if any load was ever known.
    pub fn observe(&mut self, now: Timestamp, ready: u32, load: Option<RequestRate>) -> Option<u32> {
        while self.fleet.deployed() as usize - self.starting.len() < ready as usize
            && let Some((instance, _)) = self.starting.pop_front()
        {
            self.fleet.ready(now, instance);
        }
        let patience = Duration::from_nanos(u64::try_from(self.patience.as_nanos()).unwrap_or(u64::MAX));
        while let Some(&(instance, since)) = self.starting.front()
            && now.saturating_since(since) >= patience
        {
            self.end(instance);
        }
        let Some(load) = load else { return self.desired };
        let early = |last| now < last + Duration::from_nanos(TICK.as_nanos() / 2);
        if self.reported.is_some_and(early) {
            return self.desired;
        }
        self.reported = Some(now);
        self.keep_minimum(now);
        let mut orders = Vec::new();
        self.scaler.decide(now, FUNCTION, &self.fleet, load, &mut orders);
        for order in orders {
            match order {
                HorizontalOrder::Start(_) => self.start(now),
                HorizontalOrder::Remove(instance) => self.end(instance),
                HorizontalOrder::Unmet(_) => {}
            }
        }
        let deployed = self.fleet.deployed();
        if deployed == 0 {
            self.waking = true;
        } else if ready >= self.settings.activation {
            self.waking = false;
        }
        let awake =
            if self.waking && deployed > 0 { deployed.max(self.settings.activation) } else { deployed };
        while self.recent.back().is_some_and(|(_, pods)| *pods <= awake) {
            self.recent.pop_back();
        }
        self.recent.push_back((now, awake));
        let delay = Duration::from_nanos(u64::try_from(self.settings.delay.as_nanos()).unwrap_or(u64::MAX));
        while self.recent.len() > 1
            && self.recent.front().is_some_and(|(at, _)| now.saturating_since(*at) > delay)
        {
            self.recent.pop_front();
        }
        self.desired = self.recent.front().map(|(_, pods)| *pods);
        self.desired
    }

    /// The desired number of pods, if any load was ever known.
    pub const fn desired(&self) -> Option<u32> {
        self.desired
    }

    /// Settings of this target.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    fn start(&mut self, now: Timestamp) {
        let instance = InstanceId::new(self.named);
        self.named += 1;
        self.fleet.started(now, instance, 0);
        self.starting.push_back((instance, now));
    }

    fn end(&mut self, instance: InstanceId) {
        self.starting.retain(|(other, _)| *other != instance);
        self.fleet.remove(instance);
    }

    fn keep_minimum(&mut self, now: Timestamp) {
        while self.fleet.lacks() {
            self.start(now);
        }
    }
}

fn engine(settings: &Settings, policy: Policy) -> Result<Box<dyn HorizontalScaler>, ConfigError> {
    Ok(match policy {
        Policy::Lazy => Box::new(LazyHorizontal::new(lazy(settings, fleet()))?),
        Policy::Heuristic => {
            let mut config = HeuristicHorizontalConfig::default();
            config.fleet = fleet();
            if settings.windowed {
                config.predict_reports = reports(settings);
            }
            // The target has this number already.
            config.headroom = gshare_core::BasisPoints::ZERO;
            Box::new(HeuristicHorizontal::new(config)?)
        }
    })
}

fn reports(settings: &Settings) -> u32 {
    u32::try_from(settings.window.as_secs()).unwrap_or(u32::MAX)
}

fn fleet() -> FleetConfig {
    let mut fleet = FleetConfig::default();
    fleet.tick = TICK;
    fleet.max_functions = 1;
    fleet
}

fn lazy(settings: &Settings, fleet: FleetConfig) -> LazyHorizontalConfig {
    let mut config = LazyHorizontalConfig::default();
    config.fleet = fleet;
    config.keep_alive = Duration::from_secs(settings.window.as_secs());
    if settings.windowed {
        config.window_reports = reports(settings);
        config.out_reports = (config.window_reports / 2).max(1);
        config.in_reports = (config.window_reports / 4 * 3).max(1);
        config.cooldown = Duration::from_secs(u64::from(config.out_reports));
    }
    config
}

/// The load reported by one pod, in requests.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PodLoad {
    /// At a time.
    pub concurrent: f64,
    /// The part of them that came through an activator.
    pub proxied: f64,
    /// Per second.
    pub rate: f64,
}

/// The load of a target: the reports of its `ready` pods (silent pods count like the others), and the requests at
/// activators. `None` without any report.
pub fn load(metric: Metric, ready: u32, pods: &[PodLoad], waiting: Option<f64>) -> Option<RequestRate> {
    if pods.is_empty() && (ready > 0 || waiting.is_none()) {
        return None;
    }
    let each = |pod: &PodLoad| match (metric, waiting) {
        (Metric::Rps, _) => pod.rate,
        // Activators count the requests that go through them.
        (Metric::Concurrency, Some(_)) => (pod.concurrent - pod.proxied).max(0.0),
        (Metric::Concurrency, None) => pod.concurrent,
    };
    let told: f64 = pods.iter().map(each).sum();
    #[expect(clippy::cast_precision_loss, reason = "at most some thousand pods")]
    let all = if pods.is_empty() { 0.0 } else { told * (f64::from(ready) / pods.len() as f64).max(1.0) };
    let waiting = match metric {
        Metric::Concurrency => waiting.unwrap_or(0.0),
        // The number of waiting requests is no rate, but it must wake the target up.
        Metric::Rps if pods.is_empty() => waiting.unwrap_or(0.0),
        Metric::Rps => 0.0,
    };
    super::settings::milli((all + waiting).min(1e6)).map(RequestRate::from_milli)
}

#[cfg(test)]
mod tests {
    use super::super::api::{PodAutoscaler, PodAutoscalerSpec};
    use super::super::settings::Defaults;
    use super::*;
    use proptest::prelude::*;

    fn settings(annotations: &[(&str, &str)]) -> Settings {
        let mut pa = PodAutoscaler::new("f", PodAutoscalerSpec::default());
        let base = [("metric", "rps"), ("target", "10"), ("target-utilization-percentage", "100")];
        let all = base.iter().chain(annotations);
        let key = |name: &str| format!("autoscaling.knative.dev/{name}");
        pa.metadata.annotations = Some(all.map(|(name, value)| (key(name), (*value).to_owned())).collect());
        Settings::of(&pa, &Defaults::default()).unwrap()
    }

    fn decider(annotations: &[(&str, &str)], policy: Policy, replicas: u32) -> Decider {
        let patience = std::time::Duration::from_secs(600);
        Decider::new(&settings(annotations), policy, patience, Timestamp::ZERO, replicas).unwrap()
    }

    const fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(second * 1_000)
    }

    fn rps(rate: u64) -> Option<RequestRate> {
        Some(RequestRate::per_second(rate))
    }

    /// Dilu, section 3.4.2: a burst starts nothing, load that stays does.
    #[test]
    fn lazy_scaling_waits_for_load_that_stays() {
        let mut lazy = decider(&[], Policy::Lazy, 1);
        for second in 0..19 {
            assert_eq!(lazy.observe(at(second), 1, rps(15)), Some(1));
        }
        for second in 19..50 {
            assert_eq!(lazy.observe(at(second), 1, rps(5)), Some(1), "a burst");
        }
        let desired: Vec<_> = (50..90).map(|second| lazy.observe(at(second), 1, rps(15)).unwrap()).collect();
        assert_eq!((desired[0], desired[39]), (1, 2));
    }

    #[test]
    fn heuristic_scaling_starts_what_is_missing_at_once() {
        let mut heuristic = decider(&[("max-scale", "4")], Policy::Heuristic, 1);
        assert_eq!(heuristic.observe(at(0), 1, rps(30)), Some(3));
        assert_eq!(heuristic.observe(at(1), 3, rps(100)), Some(4));
    }

    #[test]
    fn nothing_is_desired_before_anything_is_known() {
        let mut new = decider(&[], Policy::Lazy, 3);
        assert_eq!(new.observe(at(0), 3, None), None);
        assert_eq!(new.observe(at(1), 3, rps(25)), Some(3), "what runs is kept");
        assert_eq!(new.observe(at(2), 3, None), Some(3));
    }

    #[test]
    fn it_wakes_up_with_as_many_as_are_asked_for() {
        let mut sleeper = decider(&[("activation-scale", "3")], Policy::Lazy, 0);
        assert_eq!(sleeper.observe(at(0), 0, rps(0)), Some(0));
        assert_eq!(sleeper.observe(at(1), 0, rps(1)), Some(3));
        assert_eq!(sleeper.observe(at(2), 2, rps(1)), Some(3));
        assert_eq!(sleeper.observe(at(3), 3, rps(1)), Some(1), "were there once");
        assert_eq!(sleeper.observe(at(4), 2, rps(1)), Some(1));
    }

    #[test]
    fn other_bounds_hold_at_once_and_keep_what_is_known() {
        let mut lazy = decider(&[], Policy::Lazy, 1);
        lazy.observe(at(0), 1, rps(5));
        lazy.retune(&settings(&[("min-scale", "2")]), at(1)).unwrap();
        assert_eq!(lazy.observe(at(1), 1, rps(5)), Some(2));
        lazy.retune(&settings(&[("min-scale", "2"), ("scale-down-delay", "10s")]), at(2)).unwrap();
        assert_eq!(lazy.desired(), Some(2));
        assert_eq!(lazy.observe(at(2), 2, rps(5)), Some(2));
    }

    #[test]
    fn load_is_what_pods_and_activators_say() {
        let pod = |concurrent, proxied, rate| PodLoad { concurrent, proxied, rate };
        let pods = [pod(4.0, 1.0, 20.0), pod(2.0, 0.0, 10.0)];
        let milli = |load: Option<RequestRate>| load.map(RequestRate::as_milli);
        assert_eq!(milli(load(Metric::Concurrency, 2, &pods, None)), Some(6_000));
        assert_eq!(milli(load(Metric::Concurrency, 2, &pods, Some(3.0))), Some(8_000), "none counted twice");
        assert_eq!(milli(load(Metric::Rps, 2, &pods, Some(3.0))), Some(30_000));
        assert_eq!(milli(load(Metric::Rps, 4, &pods, None)), Some(60_000), "two did not answer");
        assert_eq!(milli(load(Metric::Rps, 0, &[], Some(2.0))), Some(2_000), "wakes it up");
        assert_eq!(load(Metric::Rps, 1, &[], Some(2.0)), None, "there is one, and it said nothing");
        assert_eq!(load(Metric::Concurrency, 0, &[], None), None);
    }

    proptest! {
        /// Loads, pods and annotations in any order: the desired number stays within its bounds, and within the delay it
        /// equals its maximum in that time.
        #[test]
        fn desired_is_bounded_and_falls_only_after_its_delay(
            policy in prop_oneof![Just(Policy::Lazy), Just(Policy::Heuristic)],
            min in 0u32..3,
            more in 1u32..5,
            activation in 1u32..4,
            delay in 0u64..20,
            replicas in 0u32..9,
            steps in prop::collection::vec((0u32..8, prop::option::of(0u64..90), 1u64..4), 1..120),
        ) {
            let max = min + more;
            let all = [
                ("min-scale", min.to_string()),
                ("max-scale", max.to_string()),
                ("activation-scale", activation.to_string()),
                ("scale-down-delay", format!("{delay}s")),
                ("window", "6s".to_owned()),
            ];
            let all: Vec<_> = all.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let mut decider = decider(&all, policy, replicas);
            let mut seen: Vec<(u64, u32)> = Vec::new();
            let mut second = 0;
            for (ready, load, pause) in steps {
                second += pause;
                let desired = decider.observe(at(second), ready, load.map(RequestRate::per_second));
                if load.is_none() {
                    continue;
                }
                let deployed = decider.fleet.deployed();
                let awake = if decider.waking && deployed > 0 { deployed.max(activation.min(max)) } else { deployed };
                seen.push((second, awake));
                let recent = seen.iter().filter(|(at, _)| second - at <= delay).map(|(_, pods)| *pods);
                prop_assert_eq!(desired, recent.max());
                prop_assert!(desired.is_some_and(|pods| (min..=max).contains(&pods)));
            }
        }
    }
}
