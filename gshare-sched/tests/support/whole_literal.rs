//! Algorithms 1 and 2 of GPU-enabled FaaS written down literally, with their gaps closed as the pool of whole devices says.
//!
//! Every decision walks the whole queue and all GPUs, and every request counts its own skips: slow, and plain to check. It is for
//! requests without tenants, deadlines, minimums or a host tier, under LRU.

use gshare_core::{Duration, Timestamp};
use std::collections::BTreeMap;

/// GPUs and models by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    GpuJoined {
        gpu: u32,
        kind: u8,
        memory: u64,
    },
    GpuLost {
        gpu: u32,
    },
    ModelAdded {
        model: u32,
        bytes: u64,
        load: Duration,
        infer: Duration,
    },
    ModelLimited {
        model: u32,
        copies: u32,
    },
    Arrived {
        request: u64,
        model: u32,
    },
    Evicted {
        gpu: u32,
        model: u32,
    },
    Loaded {
        gpu: u32,
        model: u32,
        took: Duration,
    },
    LoadFailed {
        gpu: u32,
        model: u32,
    },
    /// The model's process died under its request.
    NotResident {
        gpu: u32,
    },
    /// The model's process died without a request.
    Died {
        gpu: u32,
        model: u32,
    },
    Completed {
        gpu: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Evict {
        gpu: u32,
        model: u32,
    },
    Load {
        gpu: u32,
        model: u32,
    },
    Run {
        gpu: u32,
        request: u64,
        model: u32,
    },
    /// As many loads for it failed as may.
    Reject {
        request: u64,
    },
}

#[derive(Debug, Clone)]
struct Request {
    id: u64,
    model: u32,
    /// Place in the order of arrival.
    number: u64,
    arrived: Timestamp,
    skips: u32,
    failed_loads: u8,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Loading,
    Resident,
    Evicting,
}

#[derive(Debug, Clone)]
struct Copied {
    model: u32,
    state: State,
    used: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum Doing {
    #[default]
    Nothing,
    MakingRoom,
    Loading,
    Running,
}

#[derive(Debug, Clone, Default)]
struct Gpu {
    kind: u8,
    memory: u64,
    copies: Vec<Copied>,
    doing: Doing,
    running: Option<Request>,
    local: Vec<Request>,
    until: Timestamp,
    dispatches: u64,
}

#[derive(Debug, Clone, Default)]
struct Model {
    bytes: u64,
    /// Times to load, learned, and to run, by kind.
    times: BTreeMap<u8, (Duration, Duration)>,
    expected: (Duration, Duration),
    /// The most copies.
    most: Option<usize>,
}

enum Outcome {
    Here,
    Elsewhere,
    Stays,
}

/// The literal scheduler.
#[derive(Debug, Default)]
pub(crate) struct Literal {
    /// `None`: load balancing.
    limit: Option<u32>,
    skip_age: Duration,
    max_loads: u8,
    now: Timestamp,
    queue: Vec<Request>,
    gpus: BTreeMap<u32, Gpu>,
    models: BTreeMap<u32, Model>,
    kind_memory: BTreeMap<u8, u64>,
    numbers: u64,
    uses: u64,
}

impl Literal {
    pub(crate) fn new(limit: Option<u32>, skip_age: Duration, max_loads: u8) -> Self {
        Self { limit, skip_age, max_loads, ..Self::default() }
    }

    pub(crate) fn handle(&mut self, now: Timestamp, event: Event, out: &mut Vec<Order>) {
        self.now = now;
        match event {
            Event::GpuJoined { gpu, kind, memory } => {
                self.kind_memory.insert(kind, memory);
                self.gpus.insert(gpu, Gpu { kind, memory, until: now, ..Gpu::default() });
                for model in self.models.values_mut() {
                    model.times.entry(kind).or_insert(model.expected);
                }
            }
            Event::GpuLost { gpu } => {
                let mut lost = self.gpus.remove(&gpu).unwrap();
                if let (Doing::Running, Some(request)) = (lost.doing, &mut lost.running) {
                    // A dispatched request begins anew.
                    request.failed_loads = 0;
                }
                for request in lost.local.into_iter().chain(lost.running) {
                    self.requeue(request);
                }
            }
            Event::ModelAdded { model, bytes, load, infer } => {
                self.models.insert(model, Model { bytes, expected: (load, infer), ..Model::default() });
            }
            Event::ModelLimited { model, copies } => {
                self.models.get_mut(&model).unwrap().most = Some(copies as usize);
            }
            Event::Arrived { request: id, model } => {
                let number = self.numbers;
                self.numbers += 1;
                self.queue.push(Request { id, model, number, arrived: now, skips: 0, failed_loads: 0 });
            }
            Event::Evicted { gpu, model } => {
                let on = self.gpus.get_mut(&gpu).unwrap();
                let gone = on.copies.iter().position(|c| c.model == model && c.state == State::Evicting);
                on.copies.remove(gone.unwrap());
                self.load_if_room(gpu, out);
            }
            Event::Loaded { gpu, model, took } => {
                let kind = self.gpus[&gpu].kind;
                let (load, _) = self.models.get_mut(&model).unwrap().times.get_mut(&kind).unwrap();
                let (mean, took) = (load.as_nanos(), took.as_nanos());
                let error = took.abs_diff(mean) / 8;
                let mean = if took >= mean { mean + error } else { mean - error };
                *load = Duration::from_nanos(mean.max(1));
                self.copy(gpu, model).unwrap().state = State::Resident;
                self.run(gpu, out);
            }
            Event::LoadFailed { gpu, model } => {
                let request = self.gpus.get_mut(&gpu).unwrap().running.take().unwrap();
                self.lose(gpu, model);
                self.retry(request, out);
                self.go_on(gpu, out);
            }
            Event::NotResident { gpu } => {
                let mut request = self.gpus.get_mut(&gpu).unwrap().running.take().unwrap();
                // A dispatched request begins anew.
                request.failed_loads = 0;
                if self.beyond(request.model) > 0 {
                    self.lose(gpu, request.model);
                    self.requeue(request);
                    self.go_on(gpu, out);
                } else {
                    let (load, infer) = self.costs(request.model, gpu);
                    self.copy(gpu, request.model).unwrap().state = State::Loading;
                    let on = self.gpus.get_mut(&gpu).unwrap();
                    on.running = Some(request);
                    on.until = now + load + infer;
                    on.doing = Doing::MakingRoom;
                    self.load_if_room(gpu, out);
                }
            }
            Event::Died { gpu, model } => {
                self.lose(gpu, model);
                self.load_if_room(gpu, out);
            }
            Event::Completed { gpu } => {
                let model = self.gpus.get_mut(&gpu).unwrap().running.take().unwrap().model;
                if self.beyond(model) > 0 {
                    self.copy(gpu, model).unwrap().state = State::Evicting;
                    self.requeue_local(gpu, model);
                    out.push(Order::Evict { gpu, model });
                }
                self.go_on(gpu, out);
            }
        }
        let over: Vec<u32> = self.models.keys().copied().filter(|model| self.beyond(*model) > 0).collect();
        for model in over {
            self.trim(model, out);
        }
        self.schedule(out);
    }

    fn fits(&self, model: u32, kind: u8) -> bool {
        self.models[&model].bytes <= self.kind_memory[&kind]
    }

    fn costs(&self, model: u32, gpu: u32) -> (Duration, Duration) {
        self.models[&model].times[&self.gpus[&gpu].kind]
    }

    fn copy(&mut self, gpu: u32, model: u32) -> Option<&mut Copied> {
        let copies = &mut self.gpus.get_mut(&gpu)?.copies;
        copies.iter_mut().find(|copy| copy.model == model && copy.state != State::Evicting)
    }

    fn cached(&self, gpu: u32, model: u32) -> bool {
        self.gpus[&gpu].copies.iter().any(|copy| copy.model == model && copy.state != State::Evicting)
    }

    fn idle(&self, gpu: u32) -> bool {
        self.gpus[&gpu].doing == Doing::Nothing
    }

    /// Hole 18: back to the place of its arrival, skipped as often as the one behind it.
    fn requeue(&mut self, mut request: Request) {
        let place = self.queue.partition_point(|other| other.number < request.number);
        request.skips = self.queue.get(place).map_or(0, |behind| behind.skips);
        self.queue.insert(place, request);
    }

    fn retry(&mut self, mut request: Request, out: &mut Vec<Order>) {
        request.failed_loads += 1;
        if request.failed_loads >= self.max_loads {
            out.push(Order::Reject { request: request.id });
        } else {
            self.requeue(request);
        }
    }

    /// Hole 2: every request before one that leaves is skipped.
    fn leave(&mut self, at: usize) -> Request {
        self.queue[..at].iter_mut().for_each(|request| request.skips += 1);
        self.queue.remove(at)
    }

    fn holders(&self, model: u32) -> Vec<u32> {
        self.gpus.keys().copied().filter(|gpu| self.cached(*gpu, model)).collect()
    }

    /// The idle GPU with a copy and the least run time of the model.
    fn idle_holder(&self, model: u32) -> Option<u32> {
        let idle = self.holders(model).into_iter().filter(|j| self.idle(*j));
        idle.min_by_key(|j| (self.costs(model, *j).1, self.gpus[j].dispatches, *j))
    }

    fn full(&self, model: u32) -> bool {
        self.models[&model].most.is_some_and(|most| self.holders(model).len() >= most)
    }

    /// Superfluous copies of a model.
    fn beyond(&self, model: u32) -> usize {
        self.models[&model].most.map_or(0, |most| self.holders(model).len().saturating_sub(most))
    }

    /// A limit was lowered: copies for which room is made go, then those that are unused, the least recently used first.
    fn trim(&mut self, model: u32, out: &mut Vec<Order>) {
        for gpu in self.holders(model) {
            let on = self.gpus.get_mut(&gpu).unwrap();
            let coming = on.doing == Doing::MakingRoom && on.running.as_ref().unwrap().model == model;
            if coming && self.beyond(model) > 0 {
                let request = self.gpus.get_mut(&gpu).unwrap().running.take().unwrap();
                self.lose(gpu, model);
                self.requeue(request);
                self.go_on(gpu, out);
            }
        }
        let mut unused: Vec<(u64, u32)> = Vec::new();
        for gpu in self.holders(model) {
            let on = &self.gpus[&gpu];
            let uses = on.running.iter().chain(&on.local).any(|request| request.model == model);
            let copy = on.copies.iter().find(|copy| copy.model == model && copy.state == State::Resident);
            if let Some(copy) = copy.filter(|_| !uses) {
                unused.push((copy.used, gpu));
            }
        }
        unused.sort_unstable();
        unused.truncate(self.beyond(model));
        for (_, gpu) in unused {
            self.copy(gpu, model).unwrap().state = State::Evicting;
            out.push(Order::Evict { gpu, model });
        }
    }

    fn lose(&mut self, gpu: u32, model: u32) {
        let on = self.gpus.get_mut(&gpu).unwrap();
        on.copies.retain(|copy| copy.model != model || copy.state == State::Evicting);
        self.requeue_local(gpu, model);
    }

    fn requeue_local(&mut self, gpu: u32, model: u32) {
        let on = self.gpus.get_mut(&gpu).unwrap();
        let (back, stay) = std::mem::take(&mut on.local).into_iter().partition(|r| r.model == model);
        on.local = stay;
        let back: Vec<Request> = back;
        back.into_iter().for_each(|request| self.requeue(request));
    }

    fn go_on(&mut self, gpu: u32, out: &mut Vec<Order>) {
        let now = self.now;
        let on = self.gpus.get_mut(&gpu).unwrap();
        on.until = now;
        if on.local.is_empty() {
            on.doing = Doing::Nothing;
        } else {
            on.running = Some(on.local.remove(0));
            self.run(gpu, out);
        }
    }

    fn run(&mut self, gpu: u32, out: &mut Vec<Order>) {
        let (request, model) = {
            let request = self.gpus[&gpu].running.as_ref().unwrap();
            (request.id, request.model)
        };
        let infer = self.costs(model, gpu).1;
        self.uses += 1;
        let (uses, now) = (self.uses, self.now);
        self.copy(gpu, model).unwrap().used = uses;
        let on = self.gpus.get_mut(&gpu).unwrap();
        on.doing = Doing::Running;
        on.dispatches += 1;
        on.until = now + infer;
        out.push(Order::Run { gpu, request, model });
    }

    fn load_if_room(&mut self, gpu: u32, out: &mut Vec<Order>) {
        if self.gpus[&gpu].doing != Doing::MakingRoom {
            return;
        }
        let model = self.gpus[&gpu].running.as_ref().unwrap().model;
        let leaving = self.gpus[&gpu].copies.iter().any(|c| c.model == model && c.state == State::Evicting);
        if self.free(gpu) >= self.models[&model].bytes && !leaving {
            self.gpus.get_mut(&gpu).unwrap().doing = Doing::Loading;
            out.push(Order::Load { gpu, model });
        }
    }

    /// Memory without a copy; a copy for which room is being made takes none yet.
    fn free(&self, gpu: u32) -> u64 {
        let on = &self.gpus[&gpu];
        let coming = match (on.doing, &on.running) {
            (Doing::MakingRoom, Some(request)) => Some(request.model),
            _ => None,
        };
        let takes = |copy: &&Copied| copy.state == State::Evicting || Some(copy.model) != coming;
        let taken: u64 = on.copies.iter().filter(takes).map(|copy| self.models[&copy.model].bytes).sum();
        on.memory - taken
    }

    /// LRU victims on an idle GPU, without superfluous ones (hole 13); `None` if they would not suffice (holes 11, 12).
    fn victims(&self, gpu: u32, model: u32) -> Option<Vec<u32>> {
        let on = &self.gpus[&gpu];
        let bytes = |model: u32| self.models[&model].bytes;
        let leaving: u64 =
            on.copies.iter().filter(|c| c.state == State::Evicting).map(|c| bytes(c.model)).sum();
        let available = self.free(gpu) + leaving;
        let mut candidates: Vec<(u64, u32)> = on
            .copies
            .iter()
            .filter(|copy| copy.state == State::Resident)
            .map(|copy| (copy.used, copy.model))
            .collect();
        candidates.sort_unstable();
        let mut victims: Vec<u32> = Vec::new();
        let enough =
            |victims: &[u32]| available + victims.iter().map(|v| bytes(*v)).sum::<u64>() >= bytes(model);
        for (_, candidate) in candidates {
            if enough(&victims) {
                break;
            }
            victims.push(candidate);
        }
        if !enough(&victims) {
            return None;
        }
        for index in (0..victims.len()).rev() {
            let mut fewer = victims.clone();
            fewer.remove(index);
            if enough(&fewer) {
                victims = fewer;
            }
        }
        Some(victims)
    }

    fn hit(&mut self, gpu: u32, at: usize, out: &mut Vec<Order>) {
        let request = self.leave(at);
        self.gpus.get_mut(&gpu).unwrap().running = Some(request);
        self.run(gpu, out);
    }

    fn miss(&mut self, gpu: u32, at: usize, victims: &[u32], out: &mut Vec<Order>) {
        let request = self.leave(at);
        let model = request.model;
        for &victim in victims {
            self.copy(gpu, victim).unwrap().state = State::Evicting;
            out.push(Order::Evict { gpu, model: victim });
        }
        let (load, infer) = self.costs(model, gpu);
        self.uses += 1;
        let (used, now) = (self.uses, self.now);
        let on = self.gpus.get_mut(&gpu).unwrap();
        on.copies.push(Copied { model, state: State::Loading, used });
        on.running = Some(request);
        on.doing = Doing::MakingRoom;
        on.until = now + load + infer;
        self.load_if_room(gpu, out);
    }

    /// Algorithm 1.
    fn schedule(&mut self, out: &mut Vec<Order>) {
        let mut idle: Vec<(u64, u32)> = self
            .gpus
            .iter()
            .filter(|(gpu, _)| self.idle(**gpu))
            .map(|(gpu, on)| (on.dispatches, *gpu))
            .collect();
        idle.sort_unstable();
        for (_, gpu) in idle {
            // Hole 4: the GPU may have been given a request in this round.
            if self.idle(gpu) {
                self.serve(gpu, out);
            }
        }
    }

    fn serve(&mut self, gpu: u32, out: &mut Vec<Order>) {
        let kind = self.gpus[&gpu].kind;
        let mut at = 0;
        let limit = self.limit;
        while let (Some(limit), true) = (limit, at < self.queue.len()) {
            let request = &self.queue[at];
            let due = request.skips >= limit || self.now.saturating_since(request.arrived) >= self.skip_age;
            if !self.fits(request.model, kind) {
                at += 1;
            } else if self.cached(gpu, request.model) {
                return self.hit(gpu, at, out);
            } else if due {
                match self.locality_load_balance(gpu, at, out) {
                    Outcome::Here => return,
                    Outcome::Elsewhere => {}
                    Outcome::Stays => at += 1,
                }
            } else {
                at += 1;
            }
        }
        at = 0;
        while at < self.queue.len() {
            if !self.fits(self.queue[at].model, kind) {
                at += 1;
                continue;
            }
            match self.locality_load_balance(gpu, at, out) {
                Outcome::Here => return,
                Outcome::Elsewhere => {}
                Outcome::Stays => at += 1,
            }
        }
    }

    /// Algorithm 2; for load balancing only its first and last branch.
    fn locality_load_balance(&mut self, gpu: u32, at: usize, out: &mut Vec<Order>) -> Outcome {
        let model = self.queue[at].model;
        if self.cached(gpu, model) {
            self.hit(gpu, at, out);
            return Outcome::Here;
        }
        let holders = self.holders(model);
        // Holes 7, 8, 10: the best busy GPU, by whole finish times.
        let free_at = |j: u32| {
            let local: Duration =
                self.gpus[&j].local.iter().map(|request| self.costs(request.model, j).1).sum();
            self.gpus[&j].until + local
        };
        let finish = |j: u32| {
            let free = free_at(j);
            (free.max(self.now) + self.costs(model, j).1, self.gpus[&j].kind, free, j)
        };
        let best = holders.iter().filter(|j| !self.idle(**j)).map(|j| finish(*j)).min();
        if self.limit.is_some() {
            if let Some(j) = self.idle_holder(model) {
                self.hit(j, at, out);
                return Outcome::Elsewhere;
            }
            let (load, infer) = self.costs(model, gpu);
            if let Some((_, _, _, j)) = best.filter(|(finish, ..)| *finish < self.now + load + infer) {
                let request = self.leave(at);
                self.gpus.get_mut(&j).unwrap().local.push(request);
                return Outcome::Elsewhere;
            }
        }
        if self.full(model) {
            // No copy may be added: an existing copy serves the request.
            if let Some(j) = self.idle_holder(model) {
                self.hit(j, at, out);
                return Outcome::Elsewhere;
            }
            let Some((.., j)) = best else { return Outcome::Stays };
            let request = self.leave(at);
            self.gpus.get_mut(&j).unwrap().local.push(request);
            return Outcome::Elsewhere;
        }
        match self.victims(gpu, model) {
            Some(victims) => {
                self.miss(gpu, at, &victims, out);
                Outcome::Here
            }
            None => Outcome::Stays,
        }
    }
}
