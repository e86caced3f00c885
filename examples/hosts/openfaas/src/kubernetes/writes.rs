//! Writes to the API server, and the turn of each.

use super::lease::Fence;
use gshare_core::TenantId;
use kube::api::PostParams;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use tokio::sync::oneshot;

/// A creation or a replacement under the name of this program.
pub fn post(manager: &str) -> PostParams {
    PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() }
}

/// Whose write it is: the namespace of a function, and the tenant that the function names.
pub type Tenant = (String, TenantId);

/// The tenant of a function with this name, which may have its namespace.
pub fn payer(function: &str, tenant: TenantId) -> Tenant {
    (function.rsplit_once('.').map_or("", |(_, namespace)| namespace).to_owned(), tenant)
}

/// The tenant of writes that no function waits for.
pub fn nobody() -> Tenant {
    payer("", TenantId::new(0))
}

/// What waits, by tenant. Tenants take turns, so that the many of one hold up no other's few.
#[derive(Debug)]
pub struct Fair<T> {
    /// Of each tenant what comes first, and what comes after that.
    waiting: BTreeMap<Tenant, [VecDeque<T>; 2]>,
    /// The tenant of the last turn.
    last: Option<Tenant>,
}

impl<T> Default for Fair<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), last: None }
    }
}

impl<T> Fair<T> {
    /// Adds one at the end of its tenant's line. `after`: the tenant's others go before it.
    pub fn push(&mut self, tenant: Tenant, after: bool, one: T) {
        self.waiting.entry(tenant).or_default()[usize::from(after)].push_back(one);
    }

    /// Takes the first one of the next tenant.
    pub fn pop(&mut self) -> Option<T> {
        let after = self.last.take().map_or(Bound::Unbounded, Bound::Excluded);
        let next =
            self.waiting.range((after, Bound::Unbounded)).next().or_else(|| self.waiting.iter().next());
        let tenant = next?.0.clone();
        let own = self.waiting.get_mut(&tenant)?;
        let one = own.iter_mut().find_map(VecDeque::pop_front);
        if own.iter().all(VecDeque::is_empty) {
            self.waiting.remove(&tenant);
        }
        self.last = Some(tenant);
        one
    }
}

/// The concurrent writes of a host, within a bound and behind its fence.
#[derive(Debug)]
pub struct Turns {
    /// All writes of the host are behind it.
    pub fence: Fence,
    line: Mutex<Line>,
}

#[derive(Debug)]
struct Line {
    free: usize,
    waiting: Fair<oneshot::Sender<Turn>>,
}

/// A write may be sent; the next may be sent once this is dropped.
#[derive(Debug)]
pub struct Turn(Option<Arc<Turns>>);

impl Turns {
    /// Turns of so many writes at once.
    pub fn new(fence: Fence, at_once: usize) -> Arc<Self> {
        Arc::new(Self { fence, line: Mutex::new(Line { free: at_once, waiting: Fair::default() }) })
    }

    /// Waits until a write of a tenant may be sent. `after`: the tenant's other writes go before it. None: no write may be sent any more.
    pub async fn take(self: &Arc<Self>, tenant: &Tenant, after: bool) -> Option<Turn> {
        while self.fence.opens().await {
            let came = {
                let mut line = self.line.lock();
                if let Some(free) = line.free.checked_sub(1) {
                    line.free = free;
                    return Some(Turn(Some(Arc::clone(self))));
                }
                let (sender, came) = oneshot::channel();
                line.waiting.push(tenant.clone(), after, sender);
                came
            };
            // The wait may have been longer than the lease.
            if let Ok(turn) = came.await
                && self.fence.is_open()
            {
                return Some(turn);
            }
        }
        None
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(turns) = self.0.take() else { return };
        loop {
            let next = {
                let mut line = turns.line.lock();
                let next = line.waiting.pop();
                line.free += usize::from(next.is_none());
                next
            };
            let Some(next) = next else { return };
            match next.send(Self(Some(Arc::clone(&turns)))) {
                Ok(()) => return,
                // It waits no longer.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

/// Longest wait for the answer to a write.
pub(super) const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);

/// The answer to a write, or an error after some seconds without one: the server may be cut off.
///
/// # Errors
/// The API server's, or that it does not answer.
pub async fn answered<T>(write: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let late = || kube::Error::Service(format!("no answer within {} s", ANSWER.as_secs()).into());
    tokio::time::timeout(ANSWER, write).await.unwrap_or_else(|_| Err(late()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn tenant(number: u32) -> Tenant {
        (String::new(), TenantId::new(number))
    }

    #[tokio::test(start_paused = true)]
    async fn the_thousand_writes_of_one_tenant_hold_up_no_others_few() {
        let turns = Turns::new(Fence::new(false), 2);
        let sent = Arc::new(Mutex::new(Vec::new()));
        let mut all = Vec::new();
        let mut add = |of: u32, after: bool| {
            let (turns, sent) = (Arc::clone(&turns), Arc::clone(&sent));
            all.push(tokio::spawn(async move {
                let _turn = turns.take(&tenant(of), after).await.unwrap();
                sent.lock().push((of, after));
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }));
        };
        // A status, then pods, of the many; then one write of each other tenant.
        (0..1_000).for_each(|at| add(0, at % 2 == 0));
        (1..=100).for_each(|of| add(of, true));
        for one in all {
            one.await.unwrap();
        }
        let sent = sent.lock();
        let last = sent.iter().rposition(|(of, _)| *of > 0).unwrap();
        assert!(last < 110, "the last write of others was number {last}");
        let status = sent.iter().skip(2).position(|sent| *sent == (0, true)).unwrap();
        assert!(status > 500, "a pod of its own goes before a status");
        assert_eq!((sent.len(), turns.line.lock().free), (1_100, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_sent_behind_a_closed_fence_and_a_turn_that_nobody_waits_for_goes_on() {
        let now = Arc::new(AtomicU64::new(5));
        let clock = Arc::clone(&now);
        let time =
            move || (gshare_core::Timestamp::from_nanos(clock.load(Ordering::SeqCst)), Default::default());
        let fence = Fence::by(true, Box::new(time));
        let turns = Turns::new(fence.clone(), 1);
        let take = || {
            let turns = Arc::clone(&turns);
            tokio::spawn(async move { turns.take(&tenant(0), false).await })
        };
        let waits = take();
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert!(!waits.is_finished(), "it does not lead yet");
        fence.open_until(gshare_core::Timestamp::from_nanos(10));
        let first = waits.await.unwrap().unwrap();
        let (left, second) = (take(), take());
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        left.abort();
        // The program was stopped, and wakes after the end of its lease.
        now.store(10, Ordering::SeqCst);
        drop(first);
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert!(!second.is_finished());
        fence.open_until(gshare_core::Timestamp::from_nanos(20));
        let second = second.await.unwrap().unwrap();
        let third = take();
        fence.close();
        drop(second);
        assert!(third.await.unwrap().is_none(), "another replica leads");
    }
}
