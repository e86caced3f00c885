//! Pauses after refusals: of pods by the API server, and of pods by the kubelet of a node.

use super::writes::Tenant;
use crate::host::Version;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// First and longest pause after a refused pod, in which the host sends no other pod of the function.
const PAUSES: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(60));
/// Mean time between two tries of a tenant's functions with refused pods. However many there are, they leave the host and the server to others.
const PACE: Duration = Duration::from_secs(1);

/// A refusal: until when nothing is tried again, for how long, and why.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    until: Instant,
    pub(super) pause: Duration,
    why: String,
}

impl Refusal {
    /// A refusal now, after `last`. The pause is the first one of these, or twice the last one, up to the longest.
    pub(super) fn after(last: Option<&Self>, (first, most): (Duration, Duration), why: String) -> Self {
        let pause = last.map_or(first, |last| (last.pause * 2).min(most));
        Self { until: Instant::now() + pause, pause, why }
    }

    /// Its reason, in its pause.
    pub(super) fn holds(&self) -> Option<&str> {
        (Instant::now() < self.until).then_some(&self.why)
    }
}

/// The last refusals of pods by the API server, by tenant and version of a function. Another version is tried at once.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<Tenant, BTreeMap<usize, (Weak<Version>, Refusal)>>);

/// The key of a version. No other has its address while a refusal keeps a pointer to it.
fn key(version: &Arc<Version>) -> usize {
    Arc::as_ptr(version).addr()
}

impl Refusals {
    fn of(&mut self, tenant: &Tenant, version: &Arc<Version>) -> Option<&mut Refusal> {
        self.0.get_mut(tenant)?.get_mut(&key(version)).map(|(_, refusal)| refusal)
    }

    /// Why no pod of a function is sent now.
    pub(super) fn holds(&mut self, tenant: &Tenant, version: &Arc<Version>) -> Option<String> {
        self.of(tenant, version)?.holds().map(str::to_owned)
    }

    /// The same before a pod is sent: once the pause is over, others of the function wait for the answer.
    pub(super) fn keeps(&mut self, tenant: &Tenant, version: &Arc<Version>) -> Option<String> {
        let refusal = self.of(tenant, version)?;
        let why = refusal.holds().map(str::to_owned);
        if why.is_none() {
            refusal.until = Instant::now() + PAUSES.0;
        }
        why
    }

    /// A pod was refused. The pause is at least the time in which all of the tenant's functions with refused pods have a try.
    pub(super) fn refuse(&mut self, tenant: &Tenant, version: &Arc<Version>, why: &str) {
        let mut refusal = Refusal::after(self.of(tenant, version).as_deref(), PAUSES, why.to_owned());
        let now = Instant::now();
        // A version that is gone, or is tried no more, matters no more.
        self.0.retain(|_, own| {
            own.retain(|_, (version, last)| version.strong_count() > 0 && last.until + 2 * PAUSES.1 > now);
            !own.is_empty()
        });
        let own = self.0.entry(tenant.clone()).or_default();
        let turn = PACE * u32::try_from(own.len()).unwrap_or(u32::MAX);
        refusal.until = refusal.until.max(now + turn);
        own.insert(key(version), (Arc::downgrade(version), refusal));
    }

    /// A pod was made. After a refusal of its function the tenant's others may try again, one each [`PACE`], since what hindered them may be
    /// gone too.
    pub(super) fn made(&mut self, tenant: &Tenant, version: &Arc<Version>) {
        let Some(own) = self.0.get_mut(tenant) else { return };
        if own.remove(&key(version)).is_some() {
            let turns = (0..).map(|turn| Instant::now() + PACE * turn);
            own.values_mut()
                .zip(turns)
                .for_each(|((_, refusal), turn)| refusal.until = refusal.until.min(turn));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::FunctionDeployment;
    use crate::deployment::Plan;
    use gshare_core::TenantId;
    use std::collections::BTreeSet;
    use tokio::time::{advance, sleep};

    fn version(name: &str) -> Arc<Version> {
        let deployment = format!(
            r#"{{"service":"{name}","image":"localhost/f:1","annotations":{{"gshare/profile":"none"}}}}"#
        );
        let deployment: FunctionDeployment = serde_json::from_str(&deployment).unwrap();
        let plan = Plan::of(&deployment, &BTreeMap::new()).unwrap();
        Arc::new(Version { deployment, plan })
    }

    fn tenant(number: u32) -> Tenant {
        (String::new(), TenantId::new(number))
    }

    #[tokio::test(start_paused = true)]
    async fn however_many_functions_of_a_tenant_are_refused_one_is_tried_a_second_and_each_has_its_turn() {
        let (mut refusals, bad) = (Refusals::default(), tenant(1));
        let functions: Vec<_> = (0..1_000).map(|number| version(&format!("f{number}"))).collect();
        let good = version("good");
        for one in &functions {
            assert_eq!(refusals.keeps(&bad, one), None, "a first try");
            refusals.refuse(&bad, one, "quota");
        }
        let (mut tries, mut tried) = (0, BTreeSet::new());
        for _ in 0..1_200 {
            advance(Duration::from_secs(1)).await;
            for one in functions
                .iter()
                .filter(|one| refusals.keeps(&bad, one).is_none())
                .cloned()
                .collect::<Vec<_>>()
            {
                (tries, _) = (tries + 1, tried.insert(one.deployment.service.clone()));
                refusals.refuse(&bad, &one, "quota");
            }
            assert_eq!(refusals.holds(&tenant(2), &good), None);
            assert_eq!(refusals.holds(&bad, &good), None, "its other functions");
        }
        assert!(tries <= 1_300, "{tries} tries in 1,200 s");
        assert_eq!(tried.len(), functions.len());
        drop(functions);
        refusals.refuse(&bad, &good, "quota");
        advance(PAUSES.0).await;
        assert_eq!(refusals.holds(&bad, &good), None, "deleted functions take no turns");
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_pause_as_one_does_and_a_pod_that_is_made_lets_all_try_again() {
        let (mut refusals, of) = (Refusals::default(), tenant(0));
        let (one, two) = (version("one"), version("two"));
        for pause in [4, 8, 16, 32, 60, 60] {
            refusals.refuse(&of, &one, "quota");
            sleep(Duration::from_secs(pause) - Duration::from_millis(1)).await;
            assert_eq!(refusals.keeps(&of, &one).as_deref(), Some("quota"), "{pause} s");
            sleep(Duration::from_millis(1)).await;
            assert_eq!(refusals.keeps(&of, &one), None);
            assert_eq!(refusals.keeps(&of, &one).as_deref(), Some("quota"), "one pod is on its way");
        }
        assert_eq!(refusals.keeps(&of, &version("one")), None, "another version");
        refusals.refuse(&of, &two, "quota");
        refusals.made(&of, &one);
        assert_eq!((refusals.holds(&of, &one), refusals.holds(&of, &two)), (None, None));
    }
}
