//! Watches of the API server.
//!
//! A watch without an answer is begun again after a pause. A server that comes back often knows no version from before, so that a change
//! is seen after two pauses.

use backon::ExponentialBuilder;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use kube::runtime::watcher::ExponentialBackoff;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// First and longest pause. Only the leader watches, so many replicas never come at once.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// The changes of the objects with these labels, or of all, without an end.
pub fn watch<K>(objects: Api<K>, labels: &str) -> BoxStream<'static, watcher::Result<watcher::Event<K>>>
where
    K: Resource + Clone + DeserializeOwned + core::fmt::Debug + Send + 'static,
{
    let config = watcher::Config::default().labels(labels);
    let pauses = ExponentialBuilder::new().with_min_delay(PAUSES.0).with_max_delay(PAUSES.1).with_factor(2.0);
    watcher(objects, config).backoff(ExponentialBackoff::from(pauses.without_max_times())).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::{Request, Response};
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;
    use tokio::time::Instant;

    /// Found on a real server: after an absence of a minute the host heard of a change a minute later.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_was_away_for_a_minute_is_listed_again_within_ten_seconds() {
        type Asked = Request<kube::client::Body>;
        let (mock, mut asked) = tower_test::mock::pair::<Asked, Response<Body>>();
        let pods = Api::<Pod>::namespaced(kube::Client::new(mock, "team"), "team");
        tokio::spawn(watch(pods, "").for_each(async |_| ()));
        let (begin, mut is_away) = (Instant::now(), false);
        let list = json!({ "apiVersion": "v1", "kind": "PodList", "metadata": { "resourceVersion": "1" }, "items": [] }).to_string();
        let status = json!({ "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410 });
        let gone = json!({ "type": "ERROR", "object": status }).to_string();
        loop {
            let next = tokio::time::timeout(Duration::from_mins(1), asked.next_request());
            let (request, answer) = next.await.unwrap().unwrap();
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let at = begin.elapsed();
            assert!(at < Duration::from_secs(70), "{at:?}");
            match is_watch {
                _ if is_away && at < Duration::from_mins(1) => answer.send_error("connection refused"),
                false if is_away => return,
                false => answer.send_response(Response::new(Body::from(list.clone()))),
                true if is_away => answer.send_response(Response::new(Body::from(gone.clone()))),
                true => {
                    is_away = true;
                    answer.send_error("connection refused");
                }
            }
        }
    }
}
