//! Admission policies of the manifests, evaluated as an API server does: conditions, variables, validations in CEL.

use super::api_server::documents;
use cel::extractors::This;
use cel::{Context, ExecutionError, Program, Value as Cel};
use gshare_examples::kubernetes::dra::claim::whole;
use serde_json::{Value, json};
use std::sync::Arc;

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

/// Thousandths, of those quantities that the tests use.
#[expect(clippy::needless_pass_by_value, reason = "the interpreter hands strings over so")]
fn quantity(text: Arc<String>) -> Result<i64, ExecutionError> {
    let thousandths = text.strip_suffix('m').and_then(|number| number.parse().ok());
    let number = thousandths.or_else(|| i64::try_from(whole(&text)?.saturating_mul(1000)).ok());
    number.ok_or_else(|| ExecutionError::function_error("quantity", format!("`{text}` is none")))
}

/// `Err` with the message of the first validation that fails; an expression that fails itself denies as well.
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
