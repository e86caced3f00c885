//! Any bytes as a history of a co-scaler, beside a book of its clients. Shared by the property test, the
//! committed regressions and the fuzz target.

use gshare_core::{BasisPoints, ClientId, Duration, GpuId, Quota, QuotaRange, ServiceClass, Timestamp};
use gshare_sched::scale::{DiluVertical, Iteration, VerticalScaler as _};
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
    let mut scaler = DiluVertical::default();
    bytes.byte()?;
    let mut now = Timestamp::from_millis(1_000);
    let mut book: BTreeMap<ClientId, GpuId> = BTreeMap::new();
    loop {
        let kind = bytes.byte()? % 8;
        let client = ClientId::new(u32::try_from(bytes.byte()? % 8).ok()?, 0);
        let gpu = GpuId::new(u32::try_from(bytes.byte()? % 3).ok()?);
        let (picture, due) = (format!("{scaler:?}"), scaler.next_deadline());
        let told = match kind {
            0 => {
                let tolerance = BasisPoints::new(bytes.points()?)?;
                let owner = bytes.byte()? % 2 == 0;
                let class =
                    if owner { ServiceClass::SloSensitive { tolerance } } else { ServiceClass::BestEffort };
                let joined = scaler.join(now, client, gpu, bytes.quota()?, class);
                if joined.is_ok() {
                    book.insert(client, gpu);
                }
                joined
            }
            1 => {
                book.remove(&client);
                scaler.leave(now, client);
                assert!(scaler.client(client).is_none());
                Ok(())
            }
            2 => scaler.set_quota(now, client, bytes.quota()?),
            3 | 4 => {
                scaler.used(now, client, bytes.byte()? % 3);
                bytes.word()?;
                Ok(())
            }
            5 => {
                let last_launch = now.saturating_sub(Duration::from_micros(bytes.byte()?));
                let first_launch = last_launch.saturating_sub(Duration::from_micros(bytes.word()?));
                let batch = u32::try_from(bytes.byte()?).ok()?;
                scaler.iterated(now, client, Iteration { batch, first_launch, last_launch })
            }
            _ => {
                let late = Duration::from_micros(bytes.byte()? * 100);
                let due = scaler.next_deadline().unwrap_or(now).max(now);
                now =
                    due.saturating_add(if late < Duration::from_millis(20) { Duration::ZERO } else { late });
                scaler.catch_up(now);
                Ok(())
            }
        };
        assert!(told.is_ok() || format!("{scaler:?}") == picture, "an error changes nothing");
        for gpu in (0..3).map(GpuId::new) {
            let all = book.iter().filter(|(_, home)| **home == gpu).map(|(client, _)| client);
            let issued: u64 = all.map(|client| scaler.client(*client).expect("here").issued_tokens).sum();
            let known = scaler.gpu(gpu).map_or((0, 0), |gpu| (gpu.issued_tokens, gpu.max_tokens));
            assert!(issued == known.0 && issued <= known.1, "{issued} of {known:?} tokens are out on {gpu}");
        }
        for client in book.keys() {
            let known = scaler.client(*client).expect("here");
            // Another share counts from the next period on.
            let ended = kind > 5 && due.is_some_and(|due| due <= now);
            let starves = ended && known.issued_tokens < known.floor_tokens;
            assert!(known.floor_tokens >= 1 && !starves, "{client} starves");
        }
    }
}
