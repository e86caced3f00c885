//! Tenants' changes to the pods of FaSTPods, under the admission policy of the manifests.

use super::decisions::{at, fastpod, node};
use super::policy::{Judge, Request};
use gshare_examples::kubernetes::fastpod::fastpod_writes::{Observed, Settings, Write, reconcile};
use serde_json::{Value, json};

const POLICY: &str = include_str!("../../kubernetes/fastpod/policy.yaml");
const CONTROLLER: &str = "system:serviceaccount:gshare-system:fastpod";

/// A pod as the controller makes it.
fn made() -> Value {
    let (nodes, fastpods) = (vec![node("a", 1, 16384)], vec![fastpod("f", 1, [12, 30, 1024])]);
    let observed = Observed { nodes, fastpods, ..Observed::default() };
    let Some(Write::Create(pod)) = reconcile(&at(1), &observed, &Settings::default()).writes.pop() else {
        panic!()
    };
    json!(pod)
}

fn request(user: &str, operation: &'static str, old: Value, object: Value) -> Request {
    Request { operation, user: user.into(), node: None, object, old }
}

/// The judges of the policy of pods.
async fn judges() -> Vec<Judge> {
    Judge::all(POLICY, "gshare-fastpod-pods", &request("tenant", "CREATE", Value::Null, made())).await
}

#[tokio::test]
async fn pods_of_fastpods_are_made_by_the_controller_alone() {
    let without = |keys: &[&str]| {
        let mut pod = made();
        keys.iter().for_each(|key| drop(pod["metadata"].as_object_mut().unwrap().remove(*key)));
        pod
    };
    // Pods of other users do not concern the policy.
    let another_group = json!([{"kind": "FaSTPod", "apiVersion": "example.com/v1", "name": "f", "uid": "u"}]);
    let (mut labelled, mut owned) =
        (without(&["labels", "ownerReferences"]), without(&["labels", "ownerReferences"]));
    labelled["metadata"]["labels"] = json!({"app": "x"});
    owned["metadata"]["ownerReferences"] = another_group;
    for judge in judges().await {
        let create =
            async |user: &str, pod: Value| judge.admit(&request(user, "CREATE", Value::Null, pod)).await;
        assert_eq!(create(CONTROLLER, made()).await, Ok(()));
        for pod in [made(), without(&["labels"]), without(&["ownerReferences"]), without(&["annotations"])] {
            // A name alike in another namespace is another account.
            for user in [
                "tenant",
                "system:serviceaccount:tenant:fastpod",
                "system:serviceaccount:gshare-system:default",
            ] {
                let told = create(user, pod.clone()).await.unwrap_err();
                assert!(told.contains("made by the controller of FaSTPods alone"), "{told}");
            }
        }
        for pod in [without(&["labels", "ownerReferences"]), labelled.clone(), owned.clone()] {
            assert_eq!(create("tenant", pod).await, Ok(()));
        }
    }
}

#[tokio::test]
async fn tenants_change_what_is_theirs_and_neither_owner_nor_share() {
    type Edit<'a> = &'a dyn Fn(&mut Value);
    let fine: [Edit<'_>; 5] = [
        &|_| {},
        &|pod| pod["metadata"]["labels"]["app"] = json!("other"),
        &|pod| pod["metadata"]["annotations"]["example.com/note"] = json!("x"),
        &|pod| pod["spec"]["containers"][0]["image"] = json!("y"),
        // Kubernetes' collector makes this change.
        &|pod| pod["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] = json!(false),
    ];
    let remove = |pod: &mut Value, key: &str| drop(pod["metadata"].as_object_mut().unwrap().remove(key));
    let bad: [(&str, Edit<'_>); 12] = [
        ("metadata.labels", &|pod| remove(pod, "labels")),
        ("metadata.labels", &|pod| pod["metadata"]["labels"]["gshare.io/fastpod-uid"] = json!("other")),
        ("metadata.ownerReferences", &|pod| remove(pod, "ownerReferences")),
        ("metadata.ownerReferences", &|pod| pod["metadata"]["ownerReferences"] = json!([])),
        ("metadata.ownerReferences", &|pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("other")),
        ("metadata.ownerReferences", &|pod| {
            pod["metadata"]["ownerReferences"][0]["controller"] = json!(false);
        }),
        ("metadata.ownerReferences", &|pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job")),
        ("metadata.annotations", &|pod| remove(pod, "annotations")),
        ("metadata.annotations", &|pod| {
            pod["metadata"]["annotations"]["gshare.io/rectangle"] = json!("nonsense");
        }),
        ("metadata.annotations", &|pod| {
            pod["metadata"]["annotations"]["gshare.io/environment"] = json!("GSHARE_QUOTA=100%");
        }),
        ("metadata.annotations", &|pod| {
            pod["metadata"]["annotations"]["faasshare/sm_partition"] = json!("1");
        }),
        ("metadata.annotations", &|pod| {
            drop(pod["metadata"]["annotations"].as_object_mut().unwrap().remove("gshare.io/gpu"));
        }),
    ];
    // A pod of their own does not become one of a FaSTPod.
    let mut own = made();
    remove(&mut own, "labels");
    remove(&mut own, "ownerReferences");
    for judge in judges().await {
        let change = async |user: &str, change: Edit<'_>| {
            let mut pod = made();
            change(&mut pod);
            judge.admit(&request(user, "UPDATE", made(), pod)).await
        };
        for edit in fine {
            assert_eq!(change("tenant", edit).await, Ok(()));
        }
        for (field, edit) in bad {
            let told = change("tenant", edit).await.unwrap_err();
            assert!(told.starts_with(field) && told.contains("may not be changed"), "{field}: {told}");
            assert_eq!(change(CONTROLLER, edit).await, Ok(()));
        }
        let taken = judge.admit(&request("tenant", "UPDATE", own.clone(), made())).await;
        assert!(taken.unwrap_err().starts_with("metadata.labels"));
    }
}

const HOST_POLICY: &str = include_str!("../../kubernetes/host/policy.yaml");
const HOST: &str = "system:serviceaccount:gshare-system:gshare-up";

#[tokio::test]
async fn pods_of_functions_are_made_by_the_host_alone_and_keep_its_labels_and_annotations() {
    let labels = json!({ "gshare.io/function": "f", "gshare.io/version": "1", "app": "x" });
    let annotations = json!({ "gshare.io/environment": "GSHARE_QUOTA=40%:80%\n" });
    let pod = json!({ "metadata": { "name": "f", "labels": labels, "annotations": annotations },
        "spec": { "containers": [{ "name": "function", "image": "x" }] } });
    let bare = json!({ "metadata": { "name": "f" }, "spec": pod["spec"].clone() });
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
