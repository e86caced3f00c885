//! Tenants' changes to the pods of functions, under the admission policy of the manifests.

use super::policy::{Judge, Request};
use serde_json::{Value, json};

const HOST_POLICY: &str = include_str!("../../kubernetes/host/policy.yaml");
const HOST: &str = "system:serviceaccount:gshare-system:gshare-up";

fn request(user: &str, operation: &'static str, old: Value, object: Value) -> Request {
    Request { operation, user: user.into(), node: None, object, old }
}

#[tokio::test]
async fn pods_of_functions_are_made_by_the_host_alone_and_keep_its_labels_and_annotations() {
    let labels = json!({ "gshare.io/function": "f", "gshare.io/version": "1", "app": "x" });
    let annotations = json!({ "gshare.io/environment": "GSHARE_QUOTA=40%:80%\n" });
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "f", "labels": labels, "annotations": annotations },
        "spec": { "containers": [{ "name": "function", "image": "x" }] } });
    let bare = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "f" }, "spec": pod["spec"].clone() });
    let example = request("tenant", "CREATE", Value::Null, pod.clone());
    for judge in Judge::all(HOST_POLICY, "gshare-function-pods", &example).await {
        let create =
            async |user, pod: &Value| judge.admit(&request(user, "CREATE", Value::Null, pod.clone())).await;
        assert_eq!((create(HOST, &pod).await, create("tenant", &bare).await), (Ok(()), Ok(())));
        assert!(create("tenant", &pod).await.unwrap_err().contains("made by the host alone"));
        let change = async |user, of: &str, key: &str, value: Value| {
            let mut changed = pod.clone();
            let all = changed["metadata"][of].as_object_mut().unwrap();
            if value.is_null() {
                drop(all.remove(key));
            } else {
                drop(all.insert(key.to_owned(), value));
            }
            judge.admit(&request(user, "UPDATE", pod.clone(), changed)).await
        };
        assert_eq!(change("tenant", "labels", "app", json!("y")).await, Ok(()));
        assert_eq!(change("tenant", "annotations", "note", json!("y")).await, Ok(()));
        for (of, key, value) in [
            ("labels", "gshare.io/function", Value::Null),
            ("labels", "gshare.io/version", json!("2")),
            ("labels", "gshare.io/other", json!("2")),
            ("annotations", "gshare.io/environment", Value::Null),
            ("annotations", "gshare.io/environment", json!("GSHARE_QUOTA=100%\n")),
        ] {
            let told = change("tenant", of, key, value.clone()).await.unwrap_err();
            assert!(told.starts_with(&format!("metadata.{of}: gshare.io/")), "{told}");
            assert_eq!(change(HOST, of, key, value).await, Ok(()));
        }
        let taken = judge.admit(&request("tenant", "UPDATE", bare.clone(), pod.clone())).await;
        assert!(taken.unwrap_err().starts_with("metadata.labels"));
    }
}
