//! One client's account: its charge, its lag, the token it holds and its place among the waiting clients.
//!
//! The [`Ledger`](super::ledger::Ledger) keeps the accounts, and the terms are those of [`multi_token`](super::multi_token).

use super::ledger::Gpu;
use gshare_core::{ClientId, Duration, Share, Timestamp};

/// A token held by a client.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    /// Number of the window to which the token belongs.
    pub(super) window: u64,
    /// The client's total at which the token begins: the larger of its charge and the allowed total of a replaced token, which may still be
    /// in use.
    pub(super) base: Duration,
    /// The client's reported total at the time of the grant.
    pub(super) heard: Duration,
    /// The client's total up to which it may use the GPU.
    pub(super) allowed: Duration,
    pub(super) until: Timestamp,
    /// The time of the grant; an extension does not change it.
    pub(super) since: Timestamp,
    /// Time taken off the client's lag for this token so far.
    pub(super) occupied: Duration,
    /// SMs counted for the token.
    pub(super) sm: u16,
    /// The total at which the client gives the token back for another client: by a recall, or since the token ends before the room
    /// reserved for the other.
    pub(super) recalled: Option<Duration>,
}

/// How long the ledger waits for a token: until `grace` after its end, and for at most `max_debt` of work known to run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    pub(super) grace: Duration,
    pub(super) max_debt: Duration,
}

/// A time in ns as a signed number, for comparisons; a time of 292 years or more saturates.
pub(super) fn signed(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// The part of a window of this `length` in which a `limit` pays `overuse` back; at most the whole window.
fn paid_back(length: Duration, overuse: Duration, limit: Duration) -> Duration {
    length.scaled(overuse.min(limit).as_nanos(), limit.as_nanos())
}

/// A client's time beyond its `request`: its use beyond the request, or half of a negative `lag` if this is more. Use comes first because
/// hand-overs let many short tokens occupy more time, but a pausing host still pays for half of its occupied time.
fn beyond(used: Duration, request: Duration, lag: i64) -> Duration {
    used.saturating_sub(request).max(Duration::from_nanos(lag.min(0).unsigned_abs() / 2))
}

/// One client's account of an ended window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past {
    pub(super) used: Duration,
    /// Missed time of earlier windows, carried into this window.
    pub(super) brought: Duration,
    /// The unused part of the limit and of the time brought in, plus the limits of later windows without an event.
    pub(super) left: Duration,
}

/// The previous window's account, kept because reports of its tokens' use may arrive in this window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Last {
    /// The unused part of the request; unbounded where no time counts as surplus.
    pub(super) unused: Duration,
    /// The unused part of the request and of the missed time brought in from earlier windows.
    pub(super) missed: Duration,
    /// The positive lag kept at the window's end.
    pub(super) lag: Duration,
    /// The unused part of the limit: late use beyond this part is overuse.
    pub(super) left: Duration,
}

/// Place of a ready client in the order of dispatch; the smallest rank goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) ineligible: bool,
    /// Eligible, and not [urgent](Client::urgent).
    pub(super) patient: bool,
    /// Eligible: minus the lag in proportion to the request, less a part of the waiting time. Ineligible: time beyond the request in
    /// proportion to the limit.
    pub(super) key: i64,
    pub(super) asked: u64,
    pub(super) slot: u32,
}

/// A whole request or a whole window, in units of [`Rank::key`].
const WHOLE: i64 = 1 << 16;
/// A client's waiting time, up to `AGED` windows, counts as lag after division by `AGING`. Whole kernels often divide windows into parts
/// equal to within microseconds, and the longer wait then decides.
const AGING: i64 = 12;
const AGED: u64 = 4;

/// A client's place among the waiting clients; a client that does not wait is filed `Nowhere`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filed {
    Nowhere,
    Ready(Rank),
    /// Ready from this time on.
    Paced(Timestamp),
    Throttled,
}

/// Windows without any event after which surplus is forgotten altogether. The number bounds the work of catching up, and by then even a
/// surplus of ten seconds has faded to nothing.
const FORGOTTEN: u64 = 320;

#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) gpu: usize,
    pub(super) share: Share,
    /// The request of this window. A share that changes in the window counts for the rest of it.
    pub(super) request: Duration,
    pub(super) limit: Duration,
    /// The largest limit in force in this window.
    pub(super) largest: Duration,
    pub(super) used: Duration,
    /// Overuse carried into this window.
    pub(super) carried: Duration,
    /// GPU time missing from the client's share, in ns; negative for a client beyond its share.
    pub(super) lag: i64,
    /// Lag of earlier windows, by which the limit of this window is raised.
    pub(super) brought: Duration,
    /// The client joined in this window, so it may not have had a whole window.
    pub(super) fresh: bool,
    /// Time beyond the request, claimed by no other client and fading.
    pub(super) surplus: Duration,
    /// The previous window, as far as known.
    pub(super) last: Last,
    /// The client has a latency to keep.
    pub(super) slo_sensitive: bool,
    /// GPU time since the client joined, as reported and as charged.
    pub(super) heard: Duration,
    pub(super) charged: Duration,
    /// Clock time occupied by the client's last token beyond its charge.
    pub(super) idled: Duration,
    /// Serial number and time of the request answered by the latest token.
    pub(super) answered: (u64, Timestamp),
    pub(super) holds: Option<Token>,
    /// Serial number and time of the request not yet answered by a grant.
    pub(super) asked: Option<(u64, Timestamp)>,
    pub(super) filed: Filed,
    /// Since when it is ready without a token, and the time it was so before.
    pub(super) delayed_since: Option<Timestamp>,
    pub(super) delayed: Duration,
    /// Whether the client has been notified of its throttling.
    pub(super) notified: bool,
}

impl Client {
    /// How long others have kept the client waiting.
    pub(super) fn delays(&self, now: Timestamp) -> Duration {
        let present = self.delayed_since.map_or(Duration::ZERO, |since| now.saturating_since(since));
        self.delayed.saturating_add(present)
    }

    /// GPU time charged under a token.
    pub(super) fn spent(&self, token: &Token) -> Duration {
        self.charged.saturating_sub(token.base)
    }

    /// GPU time still allowed by the client's token of this window.
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        let token = self.holds.filter(|token| token.window == window);
        token.map_or(Duration::ZERO, |token| token.allowed.saturating_sub(self.charged.max(token.base)))
    }

    /// GPU time charged for the token beyond the time since its grant. This time cannot have run yet, since a kernel is charged when it is
    /// launched.
    pub(super) fn running(&self, now: Timestamp) -> Duration {
        self.holds.map_or(Duration::ZERO, |token| {
            self.spent(&token).saturating_sub(now.saturating_since(token.since))
        })
    }

    /// The least time for which the client's token still keeps the GPU.
    pub(super) fn left(&self, window: u64, now: Timestamp) -> Duration {
        self.outstanding(window).max(self.running(now))
    }

    /// GPU time of up to `most` for a next grant which the client can use by `end`: once the rest of its token is used up, and within its
    /// limit.
    pub(super) fn budget(&self, most: Duration, end: Timestamp, window: u64, now: Timestamp) -> Duration {
        let time = end.saturating_since(now).saturating_sub(self.left(window, now));
        most.min(self.remain(window)).min(time)
    }

    pub(super) fn committed(&self, window: u64) -> Duration {
        self.used.saturating_add(self.outstanding(window))
    }

    /// When the ledger takes an unreturned token back. It waits for work known to run, up to a bound.
    pub(super) fn release_at(&self, token: &Token, patience: Patience) -> Timestamp {
        let runs = self.spent(token).min(patience.max_debt);
        token.until.max(token.since.saturating_add(runs)).saturating_add(patience.grace)
    }

    /// When the client's SMs are free again: a recalled client first runs up to the recall's total and ends its known work, and any other
    /// client may keep its token until its `release`.
    pub(super) fn returns_at(&self, token: &Token, release: Timestamp, now: Timestamp) -> Timestamp {
        let Some(allowed) = token.recalled else { return release };
        let busy = token.base.saturating_add(now.saturating_since(token.since));
        let left = allowed.saturating_sub(self.charged.max(busy)).max(self.running(now));
        now.saturating_add(left).min(release)
    }

    /// How long a token has kept the GPU, as far as known.
    pub(super) fn lasted(&self, token: &Token) -> Duration {
        token.occupied.max(self.spent(token))
    }

    /// Takes the time occupied by the token until `now` off the client's lag.
    pub(super) fn occupy(&mut self, now: Timestamp) {
        let Some(token) = &mut self.holds else { return };
        let more = now.saturating_since(token.since).saturating_sub(token.occupied);
        token.occupied = token.occupied.saturating_add(more);
        self.lag = self.lag.saturating_sub(signed(more));
    }

    /// Whether the client goes before other eligible clients: it has a latency to keep, and has not had its request of this window. Missed
    /// time of earlier windows does not count, so all urgent clients together delay another client by their requests at most.
    fn urgent(&self, window: u64) -> bool {
        self.slo_sensitive && self.committed(window) < self.request
    }

    /// The total at which a token ends for a client in want of its SMs, if the token allows at least `least` more. A client beyond its share
    /// ends at once, and so does a best-effort client for an `urgent` client. Any other client ends with its share; until then, its GPU is
    /// taken to have been busy since the grant.
    pub(super) fn recalled_at(&self, now: Timestamp, least: Duration, urgent: bool) -> Option<Duration> {
        // A token about to end by the clock comes back by itself.
        let token = self
            .holds
            .filter(|token| token.recalled.is_none() && token.until.saturating_since(now) >= least)?;
        let held = now.saturating_since(token.since);
        let lag = self.lag.saturating_sub(signed(held.saturating_sub(token.occupied)));
        let charged = self.charged.max(token.base);
        let end = match u64::try_from(lag) {
            Ok(lag) if lag > 0 && (self.slo_sensitive || !urgent) => {
                charged.max(token.base.saturating_add(held)).saturating_add(Duration::from_nanos(lag))
            }
            _ => charged,
        };
        (token.allowed >= end.saturating_add(least)).then_some(end)
    }

    /// Ends a token: GPU time charged beyond its occupied time comes off the lag as well.
    pub(super) fn settle(&mut self, token: Token) {
        let charged = self.spent(&token);
        self.lag = self.lag.saturating_sub(signed(charged.saturating_sub(token.occupied)));
        self.idled = token.occupied.saturating_sub(charged);
    }

    /// The client's lag after full use of its token.
    pub(super) fn lag_then(&self, gpu: &Gpu) -> i64 {
        if gpu.by_slots {
            return signed(self.request).saturating_sub(signed(self.committed(gpu.window)));
        }
        let left = self.holds.map_or(Duration::ZERO, |token| {
            let most =
                if token.window == gpu.window { token.allowed.max(self.charged) } else { self.charged };
            (most.saturating_sub(token.base)).saturating_sub(token.occupied)
        });
        self.lag.saturating_sub(signed(left))
    }

    pub(super) fn wants(&self) -> bool {
        self.asked.is_some() || self.holds.is_some()
    }

    /// The most lag allowed beside carried overuse: minus the overuse, without the part still to run. The bound is negative, or absent
    /// (`i64::MAX`) where no overuse remains.
    pub(super) fn debt(&self) -> i64 {
        let running =
            self.holds.map_or(Duration::ZERO, |token| self.spent(&token).saturating_sub(token.occupied));
        match self.carried.saturating_sub(running) {
            Duration::ZERO => i64::MAX,
            debt => -signed(debt),
        }
    }

    /// Puts another share in force for the part of a window still `left`, out of its whole `length`.
    pub(super) fn reshare(&mut self, share: Share, left: Duration, length: Duration) {
        let (old, new) = (self.share.quota.request().of(left), share.quota.request().of(left));
        self.lag = self.lag.saturating_add(signed(new)).saturating_sub(signed(old));
        self.request = self.request.saturating_add(new).saturating_sub(old);
        self.share = share;
        self.limit = share.quota.limit().of(length);
        self.largest = self.largest.max(self.limit);
    }

    /// The lag to keep at the end of a window, while tokens of the GPU last up to `longest`. A client that asked for nothing, or joined in
    /// the window, has missed nothing.
    pub(super) fn carried_lag(&self, longest: Duration, length: Duration) -> i64 {
        let windows = 1 + longest.as_nanos().div_ceil(length.as_nanos());
        let most = if self.wants() && !self.fresh { signed(self.request.saturating_mul(windows)) } else { 0 };
        self.lag.min(most).min(self.debt())
    }

    /// Starts a window with `lag`, the kept part of the client's lag at the end of the `past` window.
    pub(super) fn begin_window(&mut self, past: Past, lag: i64, counts: bool, gpu: &Gpu) {
        let forgiven = self.lag.min(0).saturating_sub(lag.min(0));
        self.surplus = match counts {
            true => self.surplus.saturating_add(beyond(past.used, self.request, forgiven)),
            false => Duration::ZERO,
        };
        self.last = Last {
            unused: if counts { self.request.saturating_sub(past.used) } else { Duration::MAX },
            missed: self.request.saturating_add(past.brought).saturating_sub(past.used),
            lag: Duration::from_nanos(u64::try_from(lag).unwrap_or(0)),
            // A token from before the past window may use the unused limits of all windows since.
            left: match self.holds {
                Some(token) if token.window + 1 < gpu.window => self.last.left.saturating_add(past.left),
                _ => past.left,
            },
        };
        self.brought = self.last.missed.min(self.last.lag);
        self.request = self.share.quota.request().of(gpu.length);
        self.lag = lag.saturating_add(signed(self.request));
        self.fresh = false;
    }

    /// Lag to make up for at once while other clients wait.
    pub(super) fn miss(&self, gpu: &Gpu) -> Duration {
        Duration::from_nanos(u64::try_from(self.lag_then(gpu)).unwrap_or(0))
    }

    /// Accounts for `used` time of an earlier window's token, reported only in this window.
    pub(super) fn heard_late(&mut self, used: Duration) {
        self.surplus = self.surplus.saturating_add(used.saturating_sub(self.last.unused));
        self.last.unused = self.last.unused.saturating_sub(used);
        self.last.missed = self.last.missed.saturating_sub(used);
        self.brought = self.brought.min(self.last.missed);
        let over = used.saturating_sub(self.last.left);
        self.last.left = self.last.left.saturating_sub(used);
        self.used = self.used.saturating_add(over);
        self.carried = self.carried.saturating_add(over);
    }

    /// Closes `windows` windows, all but the first without an event, and returns the first.
    pub(super) fn end_windows(&mut self, windows: u64) -> Past {
        let most =
            self.largest.saturating_add(self.brought).saturating_add(self.limit.saturating_mul(windows - 1));
        let used = self.used;
        let past =
            Past { used, brought: core::mem::take(&mut self.brought), left: most.saturating_sub(used) };
        self.used = used.saturating_sub(most);
        self.largest = self.limit;
        self.carried = self.used;
        for _ in 0..windows.min(FORGOTTEN) {
            self.surplus -= Duration::from_nanos(self.surplus.as_nanos().div_ceil(8));
        }
        if windows > FORGOTTEN {
            self.surplus = Duration::ZERO;
        }
        past
    }

    pub(super) fn remain(&self, window: u64) -> Duration {
        self.limit.saturating_add(self.brought).saturating_sub(self.committed(window))
    }

    /// The SMs of the client's next token: an extension keeps the held SMs, and a new token takes the share's SMs.
    pub(super) fn token_sm(&self, window: u64) -> u16 {
        let extended = self.holds.filter(|token| token.window == window);
        extended.map_or(self.share.sm.get(), |token| token.sm)
    }

    /// The SMs that the client's next token takes beyond those of the replaced token.
    pub(super) fn needed_sm(&self, window: u64) -> u16 {
        self.token_sm(window).saturating_sub(self.holds.map_or(0, |token| token.sm))
    }

    /// The client's place at the GPU's present time.
    pub(super) fn file(&self, gpu: &Gpu) -> Filed {
        let &Gpu { window, window_end, length, .. } = gpu;
        let Some((asked, since)) = self.asked else { return Filed::Nowhere };
        if self.remain(window).is_zero() {
            return Filed::Throttled;
        }
        if gpu.undersubscribed {
            let resumes = gpu.start().saturating_add(paid_back(length, self.carried, self.largest));
            if gpu.now < resumes {
                return Filed::Paced(resumes);
            }
        }
        let lag = self.lag_then(gpu);
        let ineligible = lag <= 0;
        let earlier = self.holds.is_some_and(|token| token.window != window);
        let patient = !ineligible && (gpu.by_slots || earlier || !self.urgent(window));
        let key = if ineligible {
            let beyond = self.surplus.saturating_add(beyond(self.committed(window), self.request, lag));
            signed(beyond).saturating_mul(WHOLE) / signed(self.limit).max(1)
        } else if earlier {
            // A kernel under a token of an earlier window may not be charged yet.
            i64::MAX
        } else {
            let request = signed(self.request).max(1);
            let waited = signed(window_end.saturating_since(since).min(length.saturating_mul(AGED)));
            // At most an hour and five windows in ns, times 65,536, which fits.
            -(lag.saturating_mul(WHOLE) / request) - waited * (WHOLE / AGING) / signed(length)
        };
        Filed::Ready(Rank { ineligible, patient, key, asked, slot: self.id.slot() })
    }
}
