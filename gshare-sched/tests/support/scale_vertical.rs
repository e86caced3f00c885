//! Any bytes as a configuration and a history of a co-scaler, beside a book of the issued tokens. Shared by the property test, the
//! committed regressions and the fuzz target.

use gshare_core::{
    BasisPoints, ClientId, Duration, Engine as _, GpuId, ModelId, Quota, QuotaRange, ServiceClass, Timestamp,
};
use gshare_sched::scale::{
    DiluVertical, DiluVerticalConfig, VerticalAction, VerticalEvent, VerticalScaler as _,
};
use std::collections::BTreeMap;

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(u64::from(*first))
    }

    /// 0 to 65,535.
    fn word(&mut self) -> Option<u64> {
        Some(self.byte()? << 8 | self.byte()?)
    }

    fn points(&mut self) -> Option<u16> {
        u16::try_from(self.word()? % 10_001).ok()
    }

    fn quota(&mut self) -> Option<QuotaRange> {
        let (a, b) = (self.points()?, self.points()?);
        // A limit of 0 is no range.
        QuotaRange::new(Quota::new(a.min(b))?, Quota::new(a.max(b).max(1))?).ok()
    }
}

/// Runs a history to the end of the bytes.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let _ = run(&mut Bytes(bytes));
}

fn run(bytes: &mut Bytes<'_>) -> Option<()> {
    let mut config = DiluVerticalConfig::default();
    let flags = bytes.byte()?;
    config.learn = flags & 1 != 0;
    config.window_periods = if flags & 4 != 0 { 3 } else { 100 };
    config.max_gpus = 2;
    config.max_clients = 6;
    let mut scaler = DiluVertical::new(config).expect("within its bounds");
    let mut now = Timestamp::from_millis(1_000);
    let mut generations = [0u32; 8];
    let mut book: BTreeMap<ClientId, (GpuId, u64)> = BTreeMap::new();
    let mut actions = Vec::new();
    let mut allowed = [0; 2];
    loop {
        let kind = bytes.byte()? % 8;
        let slot = usize::try_from(bytes.byte()? % 8).ok()?;
        let id = ClientId::new(u32::try_from(slot).ok()?, generations[slot]);
        let gpu = GpuId::new(u32::try_from(bytes.byte()? % 3).ok()?);
        let event = match kind {
            0 => {
                let tolerance = BasisPoints::new(bytes.points()?)?;
                let owner = bytes.byte()? % 2 == 0;
                let class =
                    if owner { ServiceClass::SloSensitive { tolerance } } else { ServiceClass::BestEffort };
                VerticalEvent::ClientJoined { client: id, gpu, quota: bytes.quota()?, class }
            }
            1 => VerticalEvent::ClientLeft { client: id },
            2 => VerticalEvent::QuotaChanged { client: id, quota: bytes.quota()? },
            3 | 4 => VerticalEvent::UsageReported {
                client: id,
                tokens: bytes.byte()? % 3,
                largest_kernel: bytes.word()?,
            },
            5 => {
                let last_launch = now.saturating_sub(Duration::from_micros(bytes.byte()?));
                let first_launch = last_launch.saturating_sub(Duration::from_micros(bytes.word()?));
                let (model, batch) =
                    (ModelId::new(u32::from(flags & 8 != 0)), u32::try_from(bytes.byte()?).ok()?);
                VerticalEvent::IterationFinished { client: id, model, batch, first_launch, last_launch }
            }
            6 if flags & 2 != 0 => VerticalEvent::Calibrated { gpu, max_tokens: bytes.word()? },
            _ => {
                let late = Duration::from_micros(bytes.byte()? * 100);
                let due = scaler.next_deadline().unwrap_or(now).max(now);
                now =
                    due.saturating_add(if late < Duration::from_millis(20) { Duration::ZERO } else { late });
                VerticalEvent::DeadlineReached
            }
        };
        let most = |scaler: &DiluVertical, gpu| scaler.gpu(GpuId::new(gpu)).map_or(0, |gpu| gpu.max_tokens);
        let due = scaler.next_deadline();
        let picture = format!("{scaler:?}");
        actions.clear();
        if scaler.handle(now, event, &mut actions).is_err() {
            assert_eq!(format!("{scaler:?}"), picture, "an error changes nothing");
            assert!(actions.is_empty(), "and orders nothing");
            continue;
        }
        // Until the end of a period, tokens from before a calibration may be out.
        let now_allowed = [most(&scaler, 0), most(&scaler, 1)];
        let at_most = [allowed[0].max(now_allowed[0]), allowed[1].max(now_allowed[1])];
        allowed = if due == scaler.next_deadline() { at_most } else { now_allowed };
        match event {
            VerticalEvent::ClientJoined { client, gpu, .. } => drop(book.insert(client, (gpu, 0))),
            VerticalEvent::ClientLeft { client } => generations[client.index()] += 1,
            _ => {}
        }
        for action in &actions {
            let &VerticalAction::Issue { client, tokens } = action else { continue };
            let (gpu, held) = book.get_mut(&client).expect("orders are for clients that are here");
            *held = tokens;
            let gpu = *gpu;
            let out: u64 = book.values().filter(|(home, _)| *home == gpu).map(|(_, tokens)| tokens).sum();
            let at_most = at_most[gpu.index()];
            assert!(out <= at_most, "{out} of {at_most} tokens are out on {gpu} after {action:?}");
        }
        if let VerticalEvent::ClientLeft { client } = event {
            book.remove(&client);
        }
        for (client, (_, tokens)) in &book {
            let known = scaler.client(*client).expect("here");
            assert_eq!(known.issued_tokens, *tokens, "what was ordered is what is issued");
            assert!(known.floor_tokens >= 1 && known.floor_tokens <= known.guaranteed_tokens);
            assert!(known.guaranteed_tokens <= known.limit_tokens);
            if event == VerticalEvent::DeadlineReached && !actions.is_empty() {
                assert!(*tokens >= 1, "{client} starves");
            }
        }
    }
}
