//! The smallest host: it packs, places, scales and dispatches with the engines of `gshare-sched`, and brings one policy
//! of its own. Time is virtual here; a real host passes its clock, and carries the orders out on processes.
//!
//! `cargo run -p gshare-examples --bin custom`

use gshare_core::PlacementId;
use gshare_core::pack::{Demand, GpuSpec, Packer};
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::scale::{
    FunctionScale, HorizontalAction, HorizontalError, HorizontalEvent, HorizontalScaler, InstanceCounts,
    InstanceId,
};
use gshare_core::{
    Bytes, ClientId, Duration, Engine, FunctionId, GpuId, LeaseId, QuotaRange, Share, Timestamp, TokenAction,
    TokenEvent, TokenScheduler,
};
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use std::collections::BTreeMap;

/// The host's own policy, in place of the scalers of `gshare_sched::scale`: as many instances as the last tick needed.
#[derive(Default)]
struct AsManyAsNeeded {
    points: BTreeMap<FunctionId, ProfilePoint>,
    running: Vec<(FunctionId, InstanceId)>,
    named: u64,
}

impl Engine for AsManyAsNeeded {
    type Event = HorizontalEvent;
    type Action = HorizontalAction;
    type Error = HorizontalError;

    fn handle(
        &mut self,
        _now: Timestamp,
        event: HorizontalEvent,
        actions: &mut Vec<HorizontalAction>,
    ) -> Result<(), HorizontalError> {
        match event {
            HorizontalEvent::FunctionAdded { function, spec } => {
                self.points.extend(spec.profile.most_effective(|_| true).map(|point| (function, *point)));
            }
            HorizontalEvent::LoadReported { function, rate } => {
                let point =
                    *self.points.get(&function).ok_or(HorizontalError::UnknownFunction { function })?;
                let needed = rate.as_milli().div_ceil(point.throughput.as_milli()).max(1);
                let mine: Vec<_> =
                    self.running.iter().filter(|(of, _)| *of == function).map(|(_, i)| *i).collect();
                for _ in mine.len() as u64..needed {
                    self.named += 1;
                    let instance = InstanceId(self.named);
                    self.running.push((function, instance));
                    actions.push(HorizontalAction::Start { function, instance, point });
                }
                let surplus = mine.into_iter().skip(usize::try_from(needed).unwrap_or(usize::MAX));
                actions.extend(surplus.map(|instance| HorizontalAction::Drain { instance }));
            }
            HorizontalEvent::InstanceGone { instance } | HorizontalEvent::StartRefused { instance } => {
                self.running.retain(|(_, other)| *other != instance);
            }
            _ => {}
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }
}

impl HorizontalScaler for AsManyAsNeeded {
    fn instances(&self, function: FunctionId) -> Option<InstanceCounts> {
        let ready = self.running.iter().filter(|(of, _)| *of == function).count();
        let ready = u32::try_from(ready).ok()?;
        self.points.contains_key(&function).then_some(InstanceCounts { ready, ..InstanceCounts::default() })
    }

    fn tick(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// One running copy: its rectangle, and its place in the token engine.
struct Instance {
    placement: PlacementId,
    gpu: GpuId,
    client: ClientId,
}

fn main() -> anyhow::Result<()> {
    let mut packer: Box<dyn Packer> = Box::new(MaxRects::new(MaxRectsConfig::default()));
    for gpu in 0..2 {
        packer.add_gpu(GpuId(gpu), GpuSpec::new(Bytes::from_gib(16)))?;
    }
    let mut tokens: Box<dyn TokenScheduler> = Box::new(MultiToken::new(MultiTokenConfig::default())?);
    // Ours would be LazyHorizontal::new(LazyHorizontalConfig::default())?.
    let mut scaler: Box<dyn HorizontalScaler> = Box::new(AsManyAsNeeded::default());

    // 24 % of the SMs for 40 % of the time serve 27 requests/s, 10 ms each at that size.
    let (sm, quota) = ("24".parse()?, "0.4".parse()?);
    let p50 = Duration::from_millis(10);
    let point = ProfilePoint::measured(sm, quota, 1, 27.0, p50, p50)?;
    let function = FunctionId(0);
    let profile = ProfileTable::sparse(vec![point])?;
    let spec = FunctionScale { profile, max_p95: None, min_instances: 1, max_instances: 16 };
    let mut now = Timestamp::from_millis(0);
    let mut orders = Vec::new();
    scaler.handle(now, HorizontalEvent::FunctionAdded { function, spec }, &mut orders)?;

    let mut instances: BTreeMap<InstanceId, Instance> = BTreeMap::new();
    println!("load/s  instances  on GPUs  GPU time");
    for load in [20, 60, 110, 250, 110, 20] {
        let rate = RequestRate::per_second(load);
        scaler.handle(now, HorizontalEvent::LoadReported { function, rate }, &mut orders)?;
        for order in std::mem::take(&mut orders) {
            let event = match order {
                HorizontalAction::Start { instance, point, .. } => {
                    match start(now, instance, &point, &mut *packer, &mut *tokens) {
                        Ok(started) => {
                            instances.insert(instance, started);
                            HorizontalEvent::InstanceReady { instance }
                        }
                        Err(error) => {
                            println!("        {instance}: {error}");
                            HorizontalEvent::StartRefused { instance }
                        }
                    }
                }
                HorizontalAction::Drain { instance } => {
                    let Some(gone) = instances.remove(&instance) else { continue };
                    packer.release(gone.placement)?;
                    tokens.handle(now, TokenEvent::ClientLeft { client: gone.client }, &mut Vec::new())?;
                    HorizontalEvent::InstanceGone { instance }
                }
                _ => continue,
            };
            scaler.handle(now, event, &mut orders)?;
        }
        let used = serve(&mut now, &mut *tokens, &instances)?;
        let mut gpus: Vec<_> = instances.values().map(|instance| instance.gpu).collect();
        gpus.dedup();
        println!("{load:>6}  {:>9}  {:>7}  {used:>8}", instances.len(), gpus.len());
    }
    Ok(())
}

/// Gives an instance a rectangle of a GPU, and the same share at run time.
fn start(
    now: Timestamp,
    instance: InstanceId,
    point: &ProfilePoint,
    packer: &mut dyn Packer,
    tokens: &mut dyn TokenScheduler,
) -> anyhow::Result<Instance> {
    let placed = packer.place(&Demand::new(point.quota, point.sm))?.placement;
    let client = ClientId::new(u32::try_from(instance.0)?, 0);
    let share = Share { quota: QuotaRange::new(point.quota, point.quota)?, sm: point.sm };
    tokens.handle(now, TokenEvent::ClientJoined { client, gpu: placed.gpu, share }, &mut Vec::new())?;
    Ok(Instance { placement: placed.id, gpu: placed.gpu, client })
}

/// One second in which every instance is busy: whoever holds a token uses all of it.
fn serve(
    now: &mut Timestamp,
    tokens: &mut dyn TokenScheduler,
    instances: &BTreeMap<InstanceId, Instance>,
) -> anyhow::Result<Duration> {
    let end = now.saturating_add(Duration::from_secs(1));
    let mut used = Duration::ZERO;
    let mut actions = Vec::new();
    let mut returns: BTreeMap<(Timestamp, LeaseId), (ClientId, Duration)> = BTreeMap::new();
    for instance in instances.values() {
        tokens.handle(*now, TokenEvent::TokenRequested { client: instance.client }, &mut actions)?;
    }
    loop {
        for action in actions.drain(..) {
            if let TokenAction::Grant { client, lease, budget, .. } = action {
                returns.insert((now.saturating_add(budget), lease), (client, budget));
            }
        }
        let next =
            [returns.keys().next().map(|(at, _)| *at), tokens.next_deadline()].into_iter().flatten().min();
        let Some(next) = next.filter(|next| *next < end) else { break };
        *now = next;
        match returns.first_entry().filter(|entry| entry.key().0 == next) {
            Some(entry) => {
                let ((_, lease), (client, budget)) = entry.remove_entry();
                used = used.saturating_add(budget);
                tokens.handle(
                    *now,
                    TokenEvent::TokenReturned { client, lease, used: budget, again: true },
                    &mut actions,
                )?;
            }
            None => tokens.handle(*now, TokenEvent::DeadlineReached, &mut actions)?,
        }
    }
    // What is still held at the end of the second goes back unused.
    for ((_, lease), (client, _)) in returns {
        tokens.handle(
            *now,
            TokenEvent::TokenReturned { client, lease, used: Duration::ZERO, again: false },
            &mut actions,
        )?;
    }
    *now = end;
    Ok(used)
}
