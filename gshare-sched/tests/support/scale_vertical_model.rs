//! Algorithm 2 with its resolutions, written down line by line and without a thought for speed: every window is kept
//! whole and summed up, every minimum is searched for.

use super::*;

struct MClient {
    id: ClientId,
    quota: QuotaRange,
    class: ServiceClass,
    last: u64,
    issued: bool,
    /// `RW`: tokens launched in each of the periods that ended, the newest at the back.
    rate_window: VecDeque<u64>,
    current: u64,
    /// Every kernel report: period, largest kernel.
    kernels: Vec<(u64, u64)>,
    /// Every KLC since the share last changed: end, model, batch, microseconds.
    cycles: Vec<(Timestamp, ModelId, u32, u64)>,
    /// Ratio of the last one, until when it counts, whether it came in this period.
    verdict: Option<(u64, Timestamp, bool)>,
}

struct MGpu {
    max_tokens: u64,
    clients: Vec<MClient>,
    state: ScaleState,
    calm: u32,
}

#[derive(Default)]
pub(crate) struct Model {
    window: u64,
    gpus: BTreeMap<GpuId, MGpu>,
    homes: BTreeMap<ClientId, GpuId>,
    period: u64,
    period_end: Timestamp,
    /// The largest `MaxTokens` before calibrations that do not count yet.
    last_max: BTreeMap<GpuId, u64>,
}

fn share(points: u16, tokens: u64) -> u64 {
    (u128::from(points) * u128::from(tokens) / 10_000).max(1) as u64
}

fn request(quota: QuotaRange, max: u64) -> u64 {
    share(quota.request().get().max(quota.limit().get().min(100)), max)
}

fn limit(quota: QuotaRange, max: u64) -> u64 {
    share(quota.limit().get(), max).max(request(quota, max))
}

fn grown(tokens: u64) -> u64 {
    tokens + share(3_000, tokens)
}

/// Shares out `rest`: (cap, weight) to parts.
fn fill(rest: u64, wants: &[(u64, u64)]) -> Vec<u64> {
    let mut capped = vec![false; wants.len()];
    loop {
        let left: u64 = rest - wants.iter().zip(&capped).filter(|(_, c)| **c).map(|(w, _)| w.0).sum::<u64>();
        let open = |capped: &[bool]| -> u128 {
            wants.iter().zip(capped).filter(|(w, c)| !**c && w.0 > 0).map(|(w, _)| u128::from(w.1)).sum()
        };
        let total = open(&capped);
        let full: Vec<usize> = (0..wants.len())
            .filter(|&i| !capped[i] && wants[i].0 > 0 && wants[i].1 > 0)
            .filter(|&i| u128::from(wants[i].0) * total <= u128::from(left) * u128::from(wants[i].1))
            .collect();
        // One at a time, the one that is furthest below its proportion: the engine takes a whole pass at once.
        let Some(&first) = full.first() else {
            let (mut weights, mut given) = (0u128, 0u64);
            return (0..wants.len())
                .map(|i| {
                    if capped[i] {
                        return wants[i].0;
                    }
                    if wants[i].0 == 0 || wants[i].1 == 0 || total == 0 {
                        return 0;
                    }
                    weights += u128::from(wants[i].1);
                    let upto = (u128::from(left) * weights / total) as u64;
                    let part = upto - given;
                    given = upto;
                    part
                })
                .collect();
        };
        let least = |&i: &usize| (u128::from(wants[i].0) << 20) / u128::from(wants[i].1);
        capped[full.iter().copied().min_by_key(least).unwrap_or(first)] = true;
    }
}

impl MClient {
    fn slo(&self) -> bool {
        self.class.is_slo_sensitive()
    }

    fn idle(&self) -> bool {
        self.rate_window.iter().sum::<u64>() == 0
    }

    fn floor(&self, max: u64, block: u64, window: u64) -> u64 {
        let request = request(self.quota, max);
        if self.slo() {
            return request;
        }
        let recent = self.kernels.iter().filter(|(period, _)| period / window + 1 >= block);
        let largest = recent.map(|(_, kernel)| *kernel).max().unwrap_or(0);
        largest.max(request / 100).max(1).min(request)
    }
}

impl Model {
    pub(crate) fn new(window: u64) -> Self {
        Self { window, ..Self::default() }
    }

    pub(crate) fn last_max(&self, gpu: GpuId) -> u64 {
        self.last_max.get(&gpu).copied().unwrap_or(0)
    }

    fn client(&mut self, id: ClientId) -> (&mut MClient, &mut u32) {
        let gpu = self.gpus.get_mut(&self.homes[&id]).unwrap();
        (gpu.clients.iter_mut().find(|client| client.id == id).unwrap(), &mut gpu.calm)
    }

    pub(crate) fn handle(&mut self, now: Timestamp, event: VerticalEvent) -> Vec<VerticalAction> {
        let mut actions = Vec::new();
        if !self.homes.is_empty() {
            let mut first = true;
            let mut ended = Vec::new();
            while self.period_end <= now {
                // The launches count for the first period ended; the others were silent.
                for gpu in self.gpus.values_mut() {
                    for client in &mut gpu.clients {
                        let sample = if first { std::mem::take(&mut client.current) } else { 0 };
                        client.rate_window.push_back(sample);
                        while client.rate_window.len() as u64 > self.window {
                            client.rate_window.pop_front();
                        }
                    }
                }
                first = false;
                ended.push(self.period);
                self.period += 1;
                self.period_end = self.period_end.saturating_add(PERIOD);
            }
            if let Some(&last) = ended.last() {
                let window = self.window;
                for (&id, gpu) in &mut self.gpus {
                    self.last_max.remove(&id);
                    gpu.issue(id, now, last / window, window, &mut actions);
                }
            }
        }
        self.apply(now, event, &mut actions);
        actions
    }

    fn apply(&mut self, now: Timestamp, event: VerticalEvent, actions: &mut Vec<VerticalAction>) {
        let new_gpu = |max_tokens| MGpu { max_tokens, clients: Vec::new(), state: ScaleState::None, calm: 0 };
        match event {
            VerticalEvent::Calibrated { gpu, max_tokens } => {
                let home = self.gpus.entry(gpu).or_insert_with(|| new_gpu(max_tokens));
                let before = self.last_max.entry(gpu).or_default();
                *before = (*before).max(home.max_tokens);
                home.max_tokens = max_tokens;
            }
            VerticalEvent::ClientJoined { client, gpu, quota, class } => {
                if self.homes.is_empty() {
                    self.period_end = now.saturating_add(PERIOD);
                }
                self.homes.insert(client, gpu);
                let home = self.gpus.entry(gpu).or_insert_with(|| new_gpu(5_000));
                let out: u64 = home.clients.iter().filter(|c| c.issued).map(|c| c.last).sum();
                let request = request(quota, home.max_tokens);
                home.clients.push(MClient {
                    id: client,
                    quota,
                    class,
                    last: if class.is_slo_sensitive() {
                        request
                    } else {
                        request.min(home.max_tokens.saturating_sub(out))
                    },
                    issued: false,
                    rate_window: VecDeque::new(),
                    current: 0,
                    kernels: Vec::new(),
                    cycles: Vec::new(),
                    verdict: None,
                });
            }
            VerticalEvent::QuotaChanged { client, quota } => {
                let (client, _) = self.client(client);
                client.quota = quota;
                client.cycles.clear();
                client.verdict = None;
            }
            VerticalEvent::ClientLeft { client } => {
                let gpu = self.homes.remove(&client).unwrap();
                let home = self.gpus.get_mut(&gpu).unwrap();
                home.clients.retain(|other| other.id != client);
                if home.clients.is_empty() {
                    home.calm = 0;
                    if home.state != ScaleState::None {
                        home.state = ScaleState::None;
                        actions.push(VerticalAction::StateChanged { gpu, state: ScaleState::None });
                    }
                }
            }
            VerticalEvent::UsageReported { client, tokens, largest_kernel } => {
                let period = self.period;
                let (client, _) = self.client(client);
                if tokens > 0 {
                    client.current += tokens;
                    client.kernels.push((period, largest_kernel));
                }
            }
            VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch } => {
                let window = PERIOD.saturating_mul(self.window);
                let micros = last_launch.saturating_since(first_launch).as_nanos() / 1_000;
                let (client, calm) = self.client(client);
                if micros < 10_000 || !client.slo() {
                    return;
                }
                client.cycles.push((now, model, batch, micros));
                let bucket = |batch: u32| batch.next_power_of_two();
                let alike =
                    client.cycles.iter().rev().filter(|c| c.1 == model && bucket(c.2) == bucket(batch));
                let recent = alike.take(20).filter(|c| now.saturating_since(c.0) <= Duration::from_secs(30));
                let shortest = recent.map(|c| c.3).min().unwrap();
                let ratio = micros * 10_000 / shortest;
                let until = now.saturating_add(window).saturating_add(Duration::from_micros(micros));
                client.verdict = Some((ratio, until, true));
                *calm = if ratio <= 12_000 { *calm + 1 } else { 0 };
            }
            _ => {}
        }
    }
}

impl MGpu {
    /// `IssueToken` for all clients of a GPU.
    fn issue(
        &mut self,
        id: GpuId,
        now: Timestamp,
        block: u64,
        window: u64,
        actions: &mut Vec<VerticalAction>,
    ) {
        let max = self.max_tokens;
        let busy: Vec<bool> = self.clients.iter().map(|client| !client.idle()).collect();
        let mut own = vec![ScaleState::None; self.clients.len()];
        let mut target = vec![0; self.clients.len()];
        let mut weight = vec![10_000; self.clients.len()];
        let mut step = false;
        for (i, client) in self.clients.iter_mut().enumerate().filter(|(_, client)| client.slo()) {
            let others_busy = busy.iter().enumerate().any(|(j, busy)| j != i && *busy);
            let (request, limit) = (request(client.quota, max), limit(client.quota, max));
            let ratio = client.verdict.filter(|verdict| now < verdict.1).map_or(10_000, |verdict| verdict.0);
            let fresh = client.verdict.is_some_and(|verdict| verdict.2);
            if let Some(verdict) = client.verdict.as_mut() {
                verdict.2 = false;
            }
            if !busy[i] {
                (own[i], target[i]) = (ScaleState::Recovery, request);
                client.verdict = None;
            } else if ratio > 16_000 {
                (own[i], target[i]) = (emergency(ratio.min(40_000) as u16), limit);
                weight[i] = ratio.min(40_000);
                step |= fresh;
            } else if !others_busy {
                (own[i], target[i]) = (ScaleState::Recovery, grown(client.last.max(request)).min(limit));
            } else {
                (own[i], target[i]) = (ScaleState::Contention, request);
            }
        }
        let state = own.iter().copied().max().unwrap_or_default();
        let calm = state == ScaleState::Contention && self.calm >= 5;
        if calm {
            self.calm = 0;
        }
        for (i, client) in self.clients.iter().enumerate().filter(|(_, client)| !client.slo()) {
            let (request, limit) = (request(client.quota, max), limit(client.quota, max));
            target[i] = match state {
                ScaleState::None => limit,
                ScaleState::Emergency { severity_basis_points: n } if step => {
                    request.min(client.last) * 10_000 / u64::from(n)
                }
                ScaleState::Emergency { .. } => request.min(client.last),
                ScaleState::Recovery => grown(client.last).min(limit),
                _ if calm => grown(client.last).min(limit),
                _ => client.last.min(limit),
            };
        }
        let base: Vec<u64> = self
            .clients
            .iter()
            .map(|client| match state {
                ScaleState::None => request(client.quota, max),
                _ => client.floor(max, block, window),
            })
            .collect();
        let mut tokens = base.clone();
        for owners in [true, false] {
            let rest = max - tokens.iter().sum::<u64>();
            let who: Vec<usize> = (0..base.len()).filter(|&i| self.clients[i].slo() == owners).collect();
            let wants: Vec<(u64, u64)> = who
                .iter()
                .map(|&i| {
                    let more = target[i].saturating_sub(base[i]);
                    (more, if owners { more * weight[i] } else { request(self.clients[i].quota, max) })
                })
                .collect();
            for (i, part) in who.into_iter().zip(fill(rest, &wants)) {
                tokens[i] += part;
            }
        }
        for grows in [false, true] {
            for (client, &tokens) in self.clients.iter_mut().zip(&tokens) {
                let before = if client.issued { client.last } else { 0 };
                if before != tokens && (before < tokens) == grows {
                    actions.push(VerticalAction::Issue { client: client.id, tokens });
                    (client.last, client.issued) = (tokens, true);
                }
            }
        }
        if state != self.state {
            self.state = state;
            actions.push(VerticalAction::StateChanged { gpu: id, state });
        }
    }
}
