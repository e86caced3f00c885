//! Policies of a program's own, which a scenario calls by name.

use super::error::ScenarioError;
use super::{PackerName, Policies, ScalerName};
use gshare_core::pack::Packer;
use gshare_core::scale::HorizontalScaler;
use gshare_sched::platform::OwnPolicies;
use std::collections::BTreeMap;
use std::sync::Arc;

type Make<P> = Arc<dyn Fn() -> Box<P> + Send + Sync>;

/// Policies of a program's own by the names that `policies.packer` and `policies.scaler` may have besides ours. Each seed gets a new
/// one.
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
}

impl core::fmt::Debug for Own {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names = |names: Vec<&String>| names.into_iter().cloned().collect::<Vec<_>>();
        f.debug_struct("Own")
            .field("packers", &names(self.packers.keys().collect()))
            .field("scalers", &names(self.scalers.keys().collect()))
            .finish()
    }
}

impl Own {
    /// Adds a packer; one of this name before is replaced.
    #[must_use]
    pub fn with_packer(
        mut self,
        name: &str,
        make: impl Fn() -> Box<dyn Packer> + Send + Sync + 'static,
    ) -> Self {
        self.packers.insert(name.to_owned(), Arc::new(make));
        self
    }

    /// Adds a scaler; one of this name before is replaced.
    #[must_use]
    pub fn with_scaler(
        mut self,
        name: &str,
        make: impl Fn() -> Box<dyn HorizontalScaler> + Send + Sync + 'static,
    ) -> Self {
        self.scalers.insert(name.to_owned(), Arc::new(make));
        self
    }

    /// New ones of those that these policies name.
    ///
    /// # Errors
    /// [`ScenarioError::Field`] with the names that there are, for another one.
    pub(super) fn make(&self, policies: &Policies) -> Result<OwnPolicies, ScenarioError> {
        let mut own = OwnPolicies::default();
        if let PackerName::Own(name) = &policies.packer {
            own.packer = Some(named("policies.packer", name, &["max_rects", "dilu"], &self.packers)?());
        }
        if let ScalerName::Own(name) = &policies.scaler {
            let ours = ["heuristic", "lazy", "peaks"];
            own.scaler = Some(named("policies.scaler", name, &ours, &self.scalers)?());
        }
        Ok(own)
    }
}

fn named<'a, P: ?Sized>(
    field: &str,
    name: &str,
    ours: &[&str],
    own: &'a BTreeMap<String, Make<P>>,
) -> Result<&'a Make<P>, ScenarioError> {
    own.get(name).ok_or_else(|| {
        let names: Vec<&str> = ours.iter().copied().chain(own.keys().map(String::as_str)).collect();
        ScenarioError::field(field, name, &format!("one of {}", names.join(", ")))
    })
}
