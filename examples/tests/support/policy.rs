//! Admission policies of the manifests, evaluated as an API server does (conditions, variables, validations in CEL), and by a real server
//! if there is one.

use super::support::api_server::documents;
use super::support::cluster::{Real, collection_of};
use super::support::control_plane::User;
use cel::extractors::This;
use cel::{Context, ExecutionError, Program, Value as Cel};
use gshare_examples::kubernetes::dra::claim::whole;
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request, as a policy sees it.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) operation: &'static str,
    /// `system:serviceaccount:NAMESPACE:NAME`.
    pub(crate) user: String,
    /// The node of the user's pod, which is in its token.
    pub(crate) node: Option<&'static str>,
    pub(crate) object: Value,
    pub(crate) old: Value,
}

/// The policy of this name in a manifest, which must be bound and deny.
pub(crate) fn policy(manifest: &str, name: &str) -> Value {
    let all = documents(manifest);
    let named = |kind: &str| {
        let mut found = all.iter().filter(|o| o["kind"] == kind && o["metadata"]["name"] == name);
        found.next().unwrap_or_else(|| panic!("no {kind} {name}")).clone()
    };
    let bound = named("ValidatingAdmissionPolicyBinding");
    assert_eq!(bound["spec"], json!({"policyName": name, "validationActions": ["Deny"]}));
    named("ValidatingAdmissionPolicy")
}

/// Thousandths, for the quantities in the tests.
#[expect(clippy::needless_pass_by_value, reason = "the interpreter hands strings over so")]
fn quantity(text: Arc<String>) -> Result<i64, ExecutionError> {
    let thousandths = text.strip_suffix('m').and_then(|number| number.parse().ok());
    let number = thousandths.or_else(|| i64::try_from(whole(&text)?.saturating_mul(1000)).ok());
    number.ok_or_else(|| ExecutionError::function_error("quantity", format!("`{text}` is none")))
}

/// `Err` with the message of the first failed validation; a failing expression denies as well.
pub(crate) fn admit(policy: &Value, request: &Request) -> Result<(), String> {
    let mut context = Context::default();
    context.add_function("quantity", quantity).unwrap();
    context.add_function("isGreaterThan", |This(this): This<i64>, other: i64| this > other).unwrap();
    let extra = match request.node {
        Some(node) => json!({ "authentication.kubernetes.io/node-name": [node] }),
        None => json!({}),
    };
    let told =
        json!({ "operation": request.operation, "userInfo": { "username": request.user, "extra": extra } });
    for (name, value) in [("request", &told), ("object", &request.object), ("oldObject", &request.old)] {
        context.add_variable(name, value).unwrap();
    }
    let evaluate = |context: &Context<'_, '_>, value: &Value| -> Result<Cel, String> {
        let text = value["expression"].as_str().unwrap();
        let program = Program::compile(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        program.execute(context).map_err(|error| format!("{text}: {error}"))
    };
    let parts = |key: &str| policy["spec"][key].as_array().cloned().unwrap_or_default();
    for condition in parts("matchConditions") {
        if evaluate(&context, &condition)? != Cel::Bool(true) {
            return Ok(());
        }
    }
    let mut variables = std::collections::HashMap::<String, Cel>::new();
    for variable in parts("variables") {
        let value = evaluate(&context, &variable)?;
        variables.insert(variable["name"].as_str().unwrap().to_owned(), value);
        context.add_variable_from_value("variables", variables.clone());
    }
    for validation in parts("validations") {
        if evaluate(&context, &validation)? != Cel::Bool(true) {
            return Err(validation["message"].as_str().unwrap().to_owned());
        }
    }
    Ok(())
}

/// The first words of a server's refusal of an object which is invalid even without the policy.
pub(crate) const INVALID: &str = "invalid: ";

/// A judge of requests by a policy.
pub(crate) enum Judge {
    /// The interpreter of this file.
    Read(Value),
    /// A server with the manifest's policies, of which this policy is asked.
    Server(Box<Real>, String),
}

impl Judge {
    /// The interpreter and, if present, a server. A policy takes force some time after a server has taken it: this request is repeated
    /// until the policy denies it.
    pub(crate) async fn all(manifest: &str, name: &str, denied: &Request) -> Vec<Self> {
        let mut all = vec![Self::Read(policy(manifest, name))];
        if let Some(real) = Real::here().await {
            real.apply(&documents(manifest)).await;
            let server = Self::Server(Box::new(real), name.to_owned());
            let began = Instant::now();
            loop {
                let said = server.admit(denied).await;
                if said.as_ref().is_err_and(|why| !why.starts_with(INVALID)) {
                    break;
                }
                assert!(began.elapsed() < Duration::from_secs(30), "{name}: not in force: {said:?}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            all.push(server);
        }
        all
    }

    /// `Err` with the reason why the policy denies the request, or the server without it.
    pub(crate) async fn admit(&self, request: &Request) -> Result<(), String> {
        let (real, name) = match self {
            Self::Read(policy) => return admit(policy, request),
            Self::Server(real, name) => (real, name),
        };
        let user = User::Entitled(&request.user, request.node);
        let (object, old) = (fit(&request.object), fit(&request.old));
        let named = if object.is_null() { &old } else { &object };
        let collection = collection_of(named);
        let path = format!("{collection}/{}", named["metadata"]["name"].as_str().unwrap());
        if request.operation == "CREATE" {
            return told(name, real.ask_as(user, &format!("POST {collection}?dryRun=All"), &object).await);
        }
        // A node's driver and the controller make the objects for the others' changes.
        let maker = match old["kind"].as_str().unwrap() {
            "Pod" => User::Entitled("system:serviceaccount:gshare-system:gshare-up", None),
            _ => User::Admin,
        };
        let (status, made) = real.ask_as(maker, &format!("POST {collection}"), &old).await;
        assert_eq!(status, 201, "{made}");
        let answer = if object.is_null() {
            real.ask_as(user, &format!("DELETE {path}?dryRun=All"), &Value::Null).await
        } else {
            let mut object = object;
            for key in ["uid", "resourceVersion"] {
                object["metadata"][key] = made["metadata"][key].clone();
            }
            real.ask_as(user, &format!("PUT {path}?dryRun=All"), &object).await
        };
        let (status, gone) =
            real.ask_as(maker, &format!("DELETE {path}?gracePeriodSeconds=0"), &Value::Null).await;
        assert!(status.is_success(), "{gone}");
        told(name, answer)
    }
}

/// The object as a server takes it: of its kind, with a name, and in the namespace of its kind.
fn fit(object: &Value) -> Value {
    let mut object = object.clone();
    let Some(kind) = object["kind"].as_str().map(str::to_owned) else { return object };
    if object["metadata"]["name"].is_null() {
        object["metadata"]["name"] = json!("unnamed");
    }
    if ["Pod", "ResourceClaim", "ResourceClaimTemplate"].contains(&kind.as_str()) {
        object["metadata"]["namespace"] = json!("team");
    }
    for key in ["uid", "resourceVersion"] {
        object["metadata"].as_object_mut().unwrap().remove(key);
    }
    object
}

/// The reason why this policy denies, if it does. A refusal for another reason begins with [`INVALID`].
fn told(policy: &str, (status, answer): (StatusCode, Value)) -> Result<(), String> {
    let message = answer["message"].as_str().unwrap_or_default();
    match message.split_once(" denied request: ") {
        Some((who, why)) if who.contains(policy) => Err(why.to_owned()),
        _ if status.is_success() => Ok(()),
        _ => Err(format!("{INVALID}{message}")),
    }
}
