//! A program's own policies, which a scenario calls by name.

use super::error::ScenarioError;
use super::{
    LoadBalance, PackerName, PipelineName, Policies, RequestName, RouterName, ScalerName, VerticalName,
};
use crate::Make;
use gshare_sched::pack::Packer;
use gshare_sched::pipeline::{Place, Route};
use gshare_sched::platform::{OwnPolicies, WholePolicy};
use gshare_sched::scale::{HorizontalScaler, VerticalScaler};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A program's own policies by their names in `policies.packer`, `policies.scaler`, `policies.vertical`,
/// `policies.router`, `policies.keeper` and `policies.request`, beside our names. Each seed gets a new policy.
///
/// # Example
/// ```
/// use gshare_sched::pack::{MaxRects, MaxRectsConfig};
/// use gshare_sim::scenario::{Own, Scenario};
///
/// let own = Own::default().with_packer("mine", || Box::new(MaxRects::new(MaxRectsConfig::default())));
/// let text = "length = \"1s\"\npolicies = { packer = \"mine\" }\nnode = [{ device = [{ memory = \"16GiB\" }] }]\n\
///     function = [{ name = \"f\", memory = \"1GiB\", work = \"inference\", \
///     profile = [{ sm = \"12%\", rps = 28.5, p50 = \"35ms\" }] }]";
/// let mut scenario = Scenario::parse(text)?;
/// let refused = scenario.plan().unwrap_err().to_string();
/// assert!(refused.contains("policies.packer") && refused.contains("max_rects, dilu"), "{refused}");
/// scenario.own = own;
/// scenario.plan()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct Own {
    packers: BTreeMap<String, Make<dyn Packer>>,
    scalers: BTreeMap<String, Make<dyn HorizontalScaler>>,
    verticals: BTreeMap<String, Make<dyn VerticalScaler>>,
    routers: BTreeMap<String, Make<dyn Route>>,
    requests: BTreeMap<String, Make<dyn WholePolicy>>,
    places: BTreeMap<String, Make<dyn Place>>,
}

impl core::fmt::Debug for Own {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names = |names: Vec<&String>| names.into_iter().cloned().collect::<Vec<_>>();
        f.debug_struct("Own")
            .field("packers", &names(self.packers.keys().collect()))
            .field("scalers", &names(self.scalers.keys().collect()))
            .field("verticals", &names(self.verticals.keys().collect()))
            .field("routers", &names(self.routers.keys().collect()))
            .field("requests", &names(self.requests.keys().collect()))
            .field("places", &names(self.places.keys().collect()))
            .finish()
    }
}

/// Writes two functions for each kind of policy: one adds a policy, the other reads a program's own policies.
macro_rules! own {
    ($($(#[$adds:meta])* $with:ident, $all:ident: $policy:ident;)*) => {
        impl Own {
            $(
                $(#[$adds])*
                #[must_use]
                pub fn $with(
                    mut self,
                    name: &str,
                    make: impl Fn() -> Box<dyn $policy> + Send + Sync + 'static,
                ) -> Self {
                    self.$all.insert(name.to_owned(), Arc::new(make));
                    self
                }

                /// The added policies of this kind, by name, for programs that run them elsewhere.
                pub fn $all(&self) -> impl Iterator<Item = (&str, &Make<dyn $policy>)> {
                    self.$all.iter().map(|(name, make)| (name.as_str(), make))
                }
            )*
        }
    };
}

own! {
    /// Adds a packer, or replaces the packer of this name.
    with_packer, packers: Packer;
    /// Adds a scaler, or replaces the scaler of this name.
    with_scaler, scalers: HorizontalScaler;
    /// Adds a vertical scaler, or replaces the vertical scaler of this name. The daemons of a scenario use it at depth `kernels`.
    with_vertical, verticals: VerticalScaler;
    /// Adds a router, or replaces the router of this name.
    with_router, routers: Route;
    /// Adds a way to cut functions and to choose their MIG slices, or replaces the one of this name.
    with_place, places: Place;
    /// Adds a policy of whole devices, or replaces the policy of this name.
    with_requests, requests: WholePolicy;
}

impl Own {
    /// Makes new instances of the program's own policies named in `policies`.
    ///
    /// # Errors
    /// [`ScenarioError::Field`] with the known names, for an unknown name.
    pub(super) fn make(&self, policies: &Policies) -> Result<OwnPolicies, ScenarioError> {
        let mut own = OwnPolicies::default();
        if let PackerName::Own(name) = &policies.packer {
            own.packer = Some(named("policies.packer", name, &["max_rects", "dilu"], &self.packers)?());
        }
        if let ScalerName::Own(name) = &policies.scaler {
            own.scaler = Some(named("policies.scaler", name, &["heuristic", "lazy"], &self.scalers)?());
        }
        if let RouterName::Own(name) = &policies.router {
            own.router = Some(named("policies.router", name, &["paper", "ours"], &self.routers)?());
        }
        match &policies.request {
            RequestName::LoadBalance => own.requests = Some(Box::new(LoadBalance)),
            RequestName::Own(name) => {
                let ours = ["load_balance", "lalb", "lalbo3", "ours"];
                own.requests = Some(named("policies.request", name, &ours, &self.requests)?());
            }
            _ => {}
        }
        if let PipelineName::Own(name) = &policies.keeper {
            own.place = Some(named("policies.keeper", name, &["paper", "ours"], &self.places)?().into());
        }
        Ok(own)
    }

    /// The constructor of the vertical scaler in `policies`, if it is a program's own scaler.
    ///
    /// # Errors
    /// As for [`make`](Self::make).
    pub(super) fn vertical(
        &self,
        policies: &Policies,
    ) -> Result<Option<Make<dyn VerticalScaler>>, ScenarioError> {
        let VerticalName::Own(name) = &policies.vertical else { return Ok(None) };
        named("policies.vertical", name, &["true", "false"], &self.verticals)
            .map(|make| Some(Arc::clone(make)))
    }
}

fn named<'a, M>(
    field: &str,
    name: &str,
    ours: &[&str],
    own: &'a BTreeMap<String, M>,
) -> Result<&'a M, ScenarioError> {
    own.get(name).ok_or_else(|| {
        let names: Vec<&str> = ours.iter().copied().chain(own.keys().map(String::as_str)).collect();
        ScenarioError::field(field, name, &format!("one of {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;
    use crate::world;
    use gshare_core::dag::Dag;
    use gshare_core::{FunctionId, InstanceId, RequestId, Timestamp};
    use gshare_sched::node::vertical_scaler;
    use gshare_sched::pipeline::{AssignedSlice, Change, Goal, Home, Node, Offers, Partitioner};
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const TEXT: &str = r#"
        length = "5s"
        policies = { router = "mine" }
        node = [{ device = [{ memory = "80GiB", mig = { model = "A100-80", slices = ["2g.20gb"] } }] }]
        [[function]]
        name = "chain"
        work = "pipeline"
        memory = "2GiB"
        slo = "1s"
        dag.component = [{ name = "one", memory = "2GiB", on = [["2g.20gb", "20ms"]] }]
        load = { shape = "poisson", rate = 5 }
    "#;

    /// Serves the latest request first.
    #[derive(Default)]
    struct Latest(BTreeMap<FunctionId, BTreeSet<RequestId>>, Arc<AtomicUsize>);

    impl Latest {
        fn last(&self, function: FunctionId) -> Option<RequestId> {
            self.0.get(&function)?.last().copied()
        }
    }

    impl Route for Latest {
        fn note(&mut self, _: Timestamp, _: &Offers, change: Change) {
            match change {
                Change::Waits { request, function, .. } => {
                    self.0.entry(function).or_default().insert(request);
                    self.1.fetch_add(1, Ordering::Relaxed);
                }
                Change::Left { request, function, .. } => {
                    self.0.entry(function).or_default().remove(&request);
                }
                _ => {}
            }
        }

        fn next(&mut self, _: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId> {
            self.last(offers.get(instance)?.function)
        }

        fn next_on(
            &mut self,
            _: Timestamp,
            offers: &Offers,
            slice: AssignedSlice,
        ) -> Option<(InstanceId, RequestId)> {
            offers.on(slice).find_map(|(id, offer)| Some((id, self.last(offer.function)?)))
        }

        fn is_short(&self, _: Timestamp, _: &Offers, function: FunctionId) -> bool {
            self.waiting(function) > 3
        }

        fn waiting(&self, function: FunctionId) -> usize {
            self.0.get(&function).map_or(0, BTreeSet::len)
        }
    }

    #[test]
    fn a_router_of_a_programs_own_routes_the_requests_of_a_scenario() {
        let mut scenario = Scenario::parse(TEXT).unwrap();
        let refused = scenario.plan().unwrap_err().to_string();
        assert!(refused.contains("policies.router") && refused.contains("paper, ours"), "{refused}");
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        scenario.own = Own::default()
            .with_router("mine", move || Box::new(Latest(BTreeMap::new(), Arc::clone(&counted))));
        let plan = scenario.plan().unwrap();
        let outcome = world::run(&plan, 0, || scenario.platform()).unwrap();
        let answered: u64 = outcome.functions.iter().map(|one| one.answered).sum();
        assert!(
            count.load(Ordering::Relaxed) > 10 && answered > 10,
            "{count:?} requests, {answered} answered"
        );
    }

    /// Finds nothing for a function, and counts its questions.
    struct Nowhere(Arc<AtomicUsize>);

    impl Place for Nowhere {
        fn find(&self, _: FunctionId, _: &Dag, _: &Goal, _: &Node, _: bool) -> Option<Home> {
            self.0.fetch_add(1, Ordering::Relaxed);
            None
        }
    }

    #[test]
    fn a_place_of_a_programs_own_has_the_slices_of_a_scenario() {
        let asked = Arc::new(AtomicUsize::new(0));
        let run = |name: &str| {
            let text = TEXT.replace("router = \"mine\"", &format!("keeper = \"{name}\""));
            let mut scenario = Scenario::parse(&text).unwrap();
            let counted = Arc::clone(&asked);
            scenario.own = Own::default()
                .with_place("ours too", || Box::new(Partitioner))
                .with_place("nowhere", move || Box::new(Nowhere(Arc::clone(&counted))));
            let plan = scenario.plan().map_err(|error| error.to_string())?;
            Ok::<_, String>(world::run(&plan, 0, || scenario.platform()).unwrap())
        };
        assert_eq!(run("ours too").unwrap().hash, run("ours").unwrap().hash);
        let nowhere = run("nowhere").unwrap();
        assert!(asked.load(Ordering::Relaxed) > 0);
        assert_eq!(nowhere.functions[0].answered, 0);
        let refused = run("hers").unwrap_err();
        assert!(
            refused.contains("policies.keeper is hers: one of paper, ours, nowhere, ours too"),
            "{refused}"
        );
    }

    #[test]
    fn a_vertical_scaler_of_a_programs_own_is_in_the_daemons_of_a_scenario() {
        let text = |vertical: &str, depth: &str| {
            let function = |name: &str| {
                format!(
                    "[[function]]\nname = \"{name}\"\nwork = \"inference\"\nmemory = \"1GiB\"\n\
                     class = \"slo-sensitive\"\nload = {{ shape = \"poisson\", rate = 15 }}\n\
                     profile = [{{ sm = \"100%\", quota = \"30%\", rps = 15.0, p50 = \"20ms\" }}]\n"
                )
            };
            format!(
                "length = \"5s\"\ndepth = \"{depth}\"\npolicies = {{ vertical = {vertical} }}\n\
                 node = [{{ device = [{{ memory = \"8GiB\" }}] }}]\n{}{}",
                function("a"),
                function("b")
            )
        };
        let made = Arc::new(AtomicUsize::new(0));
        let run = |vertical: &str, depth: &str| {
            let mut scenario = Scenario::parse(&text(vertical, depth)).map_err(|error| error.to_string())?;
            let count = Arc::clone(&made);
            scenario.own = Own::default().with_vertical("mine", move || {
                count.fetch_add(1, Ordering::Relaxed);
                vertical_scaler()
            });
            let plan = scenario.plan().map_err(|error| error.to_string())?;
            Ok::<_, String>(world::run(&plan, 0, || scenario.platform()).unwrap().hash)
        };
        let ours = run("true", "kernels");
        assert_eq!(made.load(Ordering::Relaxed), 0);
        assert_eq!(run("\"mine\"", "kernels"), ours);
        assert_eq!(made.load(Ordering::Relaxed), 1);
        for (vertical, depth, says) in [
            ("\"hers\"", "kernels", "policies.vertical is hers: one of true, false, mine"),
            ("\"mine\"", "requests", "policies.vertical is mine: true or false, or depth = `kernels`"),
            ("3", "kernels", "the name of a vertical scaler"),
        ] {
            let refused = run(vertical, depth).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
    }

    #[test]
    fn a_policy_of_a_programs_own_has_the_whole_devices() {
        let function = |name: &str| {
            format!(
                "[[function]]\nname = \"{name}\"\nwork = \"inference\"\nmemory = \"3GiB\"\nregime = \"whole\"\n\
                 loads = [\"2s\", \"1s\"]\nload = {{ shape = \"poisson\", rate = 1 }}\n\
                 profile = [{{ sm = \"100%\", rps = 10.0, p50 = \"100ms\" }}]\n"
            )
        };
        let functions: String = ["a", "b", "c", "d", "e"].map(function).concat();
        let run = |name: &str| {
            let text = format!(
                "length = \"20s\"\npolicies = {{ request = \"{name}\" }}\n\
                 node = [{{ device = [{{ memory = \"8GiB\", regime = \"whole\", count = 2 }}] }}]\n{functions}"
            );
            let mut scenario = Scenario::parse(&text).unwrap();
            scenario.own = Own::default().with_requests("mine", || Box::new(LoadBalance));
            world::run(&scenario.plan().unwrap(), 0, || scenario.platform()).unwrap().hash
        };
        assert_eq!(run("mine"), run("load_balance"));
        assert_ne!(run("mine"), run("ours"));
    }
}
