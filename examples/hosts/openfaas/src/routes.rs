//! The HTTP routes of the faas-provider contract.

use super::api::{
    ApiError, DeleteRequest, FunctionDeployment, FunctionStatus, LogLine, NAMESPACE, ScaleRequest, Secret,
    Usage, check_name, check_namespace, parse, rfc3339,
};
use super::deployment::{Plan, Wants, is_file};
use super::host::{Version, View};
use super::host_metrics::Metrics;
use super::logs::Stamped;
use super::node::Node;
use super::records::Record;
use super::{guard, later, proxy};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Path, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use gshare_core::{TenantId, Timestamp};
use gshare_runner::container::ContainerError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest body, in bytes, for `/system` and for asynchronous calls.
pub const MAX_BODY: usize = 10 << 20;
/// Time limit for a whole body that is kept.
pub const BODY: Duration = Duration::from_secs(60);

/// User and password for `/system`.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// `user:password`.
    pub pair: String,
}

impl Credentials {
    /// Compares in constant time, so that timing does not reveal how much of a guess is right.
    fn allow(&self, headers: &HeaderMap) -> bool {
        use base64::Engine as _;
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|text| text.split_once(' '));
        let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("basic")).map(|(_, rest)| rest);
        let given = given.and_then(|text| base64::engine::general_purpose::STANDARD.decode(text.trim()).ok());
        let (given, ours) = (given.unwrap_or_default(), self.pair.as_bytes());
        let differ = ours.iter().enumerate().fold(0, |sum, (n, byte)| {
            std::hint::black_box(sum | (byte ^ given.get(n).copied().unwrap_or(!byte)))
        });
        differ == 0 && given.len() == ours.len()
    }
}

/// State that the handlers share.
#[derive(Debug)]
pub struct App {
    /// Functions and their instances.
    pub node: Arc<Node>,
    /// Credentials that `/system` requires; none on a loopback address without `--credentials`.
    pub credentials: Option<Credentials>,
    /// Whether the host listens on a loopback address; then only loopback names are valid hosts.
    pub loopback: bool,
    /// Counters and gauges.
    pub metrics: Arc<Metrics>,
    /// Queue of asynchronous calls.
    pub later: later::Queue,
    /// Time limit for the head of an instance's answer.
    pub patience: Duration,
    /// Tenants by name.
    pub tenants: BTreeMap<String, TenantId>,
}

impl App {
    /// Checks a deployment and makes its plan.
    ///
    /// # Errors
    /// 400 with the name of the field.
    pub fn plan(&self, deployment: &FunctionDeployment) -> Result<Plan, ApiError> {
        if let Some(user) = &self.node.runner.user {
            // The host reads these files for programs of that user, so that user must have access too.
            for (key, path) in deployment.annotations.iter().flatten().filter(|(key, _)| is_file(key)) {
                let given = key != "gshare/profile" || !["auto", "none"].contains(&path.as_str());
                let read = if given { user.can_read(std::path::Path::new(path)) } else { Ok(()) };
                read.map_err(|error| ApiError::bad(format!("annotations: {key}: {error}")))?;
            }
        }
        #[cfg(feature = "kubernetes")]
        let tenant = crate::kubernetes::pods::tenant_of(deployment, &self.tenants)?;
        #[cfg(feature = "kubernetes")]
        if self.node.runner.pods.is_some() {
            crate::kubernetes::pods::check_files(deployment)?;
        }
        let plan = Plan::of(deployment, &self.tenants)?;
        #[cfg(feature = "kubernetes")]
        if let Some(pods) = &self.node.runner.pods {
            crate::kubernetes::pods::suits(&plan, deployment)?;
            if !pods.privileged {
                crate::kubernetes::template::unprivileged(deployment).map_err(ApiError::bad)?;
            }
            return Ok(Plan { tenant: tenant.unwrap_or(plan.tenant), ..plan });
        }
        refuse_template(deployment, "this host starts processes and no pods: leave it out")?;
        match &plan.image {
            Some(image) if self.node.runner.podman.is_none() => {
                let error = ContainerError::NoPodman { image: image.clone() };
                Err(ApiError::bad(error.to_string()))
            }
            _ => Ok(plan),
        }
    }

    /// Uses the earlier measurement of the same program, if it still holds.
    ///
    /// `restored` marks a function that an earlier host accepted: if its measurement does not hold, it is measured again, not
    /// refused.
    pub fn recall(&self, plan: &mut Plan, deployment: &FunctionDeployment, restored: bool) {
        if plan.wants == Wants::Measured
            && let Some(measured) = self.node.profile(deployment)
        {
            let mut known = plan.clone();
            known.wants = Wants::Profile { table: measured.table.clone(), memory: Some(measured.memory) };
            known.measured = Some(measured);
            let version = Version { deployment: deployment.clone(), plan: known };
            if self.node.host().can_use(&version, restored) {
                *plan = version.plan;
            }
        }
    }
}

fn refuse_template(deployment: &FunctionDeployment, why: &str) -> Result<(), ApiError> {
    let key = "gshare/pod_template";
    match deployment.annotations.iter().flatten().any(|(given, _)| given == key) {
        true => Err(ApiError::bad(format!("annotations: {key}: {why}"))),
        false => Ok(()),
    }
}

type Shared = State<Arc<App>>;

/// The router of all routes.
pub fn router(app: Arc<App>) -> Router {
    let system = Router::new()
        .route("/system/functions", get(list).post(deploy).put(update).delete(remove))
        .route("/system/function/{name}", get(status))
        .route("/system/scale-function/{name}", post(scale))
        .route("/system/profile/{name}", post(measure_again))
        .route("/system/info", get(info))
        .route("/system/telemetry", get(telemetry))
        .route("/system/secrets", get(secrets).post(add_secret).put(change_secret).delete(remove_secret))
        .route("/system/logs", get(logs))
        .route("/system/state", get(state))
        .route("/system/history", get(history))
        .route("/system/namespace/{name}", any(namespace))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), authorise));
    Router::new()
        .merge(system)
        .route("/system/namespaces", get(|| async { axum_json(&[NAMESPACE]) }))
        .route("/function/{*path}", any(call))
        .route("/async-function/{*path}", post(call_later))
        .route("/", get(|| async { axum::response::Redirect::temporary("/ui") }))
        .route("/ui", get(|| async { page() }))
        .route("/healthz", get(|| async { "OK" }))
        .route("/readyz", get(|| async { "OK" }))
        .route("/metrics", get(metrics))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "path: unknown") })
        .layer(axum::extract::DefaultBodyLimit::max(MAX_BODY))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), measure))
        .with_state(app)
}

fn axum_json(value: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => ApiError::internal("json", error).into_response(),
    }
}

async fn authorise(State(app): Shared, request: Request, next: Next) -> Response {
    if let Err(error) = guard::check(request.method(), request.headers(), app.loopback) {
        return error.into_response();
    }
    match &app.credentials {
        Some(credentials) if !credentials.allow(request.headers()) => {
            ApiError::new(StatusCode::UNAUTHORIZED, "invalid credentials").into_response()
        }
        _ => {
            let (parts, body) = request.into_parts();
            match whole(body).await {
                Ok(body) => next.run(Request::from_parts(parts, Body::from(body))).await,
                Err(error) => error.into_response(),
            }
        }
    }
}

/// Reads a whole body. Gives up if the body is too long or does not arrive in time.
async fn whole(body: Body) -> Result<Bytes, ApiError> {
    let body = tokio::time::timeout(BODY, axum::body::to_bytes(body, MAX_BODY)).await;
    let body = body.map_err(|_| {
        let why = format!("body: did not come within {} s", BODY.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, why)
    })?;
    body.map_err(|error| {
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("body: {error}: need at most {MAX_BODY} bytes"))
    })
}

async fn measure(State(app): Shared, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let method = request.method().to_string();
    // Label by route: the number of different paths is unbounded.
    let known = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let routes = [
        "/system/functions",
        "/system/function/{name}",
        "/system/scale-function/{name}",
        "/system/profile/{name}",
        "/system/info",
        "/system/telemetry",
        "/system/secrets",
        "/system/logs",
        "/system/state",
        "/system/history",
        "/ui",
        "/system/namespaces",
        "/system/namespace/{name}",
        "/function/{*path}",
        "/async-function/{*path}",
        "/healthz",
        "/metrics",
    ];
    let path = routes.into_iter().find(|route| *route == known).unwrap_or("other");
    let response = next.run(request).await;
    app.metrics.served(&method, path, response.status().as_u16(), begun.elapsed());
    response
}

#[derive(Debug, Deserialize)]
struct Which {
    namespace: Option<String>,
    usage: Option<String>,
}

fn render(view: &View, with_usage: bool) -> Result<FunctionStatus, ApiError> {
    let mut deployment =
        serde_json::to_value(&view.version.deployment).map_err(|error| ApiError::internal("json", error))?;
    if let Some(object) = deployment.as_object_mut() {
        object.remove("service");
        object.insert("namespace".into(), NAMESPACE.into());
    }
    Ok(FunctionStatus {
        name: view.version.deployment.service.clone(),
        deployment,
        invocation_count: view.invocations as f64,
        replicas: view.replicas(),
        available_replicas: view.available(),
        created_at: rfc3339(UNIX_EPOCH + Duration::from_millis(view.created_ms)),
        usage: with_usage.then(|| usage(view.instances.iter().flat_map(|instance| &instance.pids))),
        status: view.clone(),
    })
}

/// Sums CPU time and memory from `/proc`; a process that has just ended adds nothing.
fn usage<'a>(pids: impl Iterator<Item = &'a u32>) -> Usage {
    let mut sum = Usage::default();
    let seconds = |ticks: f64| ticks / rustix::param::clock_ticks_per_second() as f64;
    let up = std::fs::read_to_string("/proc/uptime").ok();
    let up: f64 = up.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
    for pid in pids {
        let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        // The name in field 2 may hold spaces. After it comes field 3, the state.
        let Some((_, rest)) = text.rsplit_once(") ") else { continue };
        let field =
            |n: usize| rest.split(' ').nth(n - 3).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        let age = up - seconds(field(22));
        if age > 0.0 {
            sum.cpu += 1000.0 * seconds(field(14) + field(15)) / age;
        }
        sum.total_memory_bytes += field(24) * rustix::param::page_size() as f64;
    }
    sum
}

async fn list(State(app): Shared, Query(which): Query<Which>) -> Result<Response, ApiError> {
    check_namespace(which.namespace.as_deref())?;
    let views = app.node.host().views();
    let all: Vec<_> = views.iter().map(|view| render(view, false)).collect::<Result<_, _>>()?;
    Ok(axum_json(&all))
}

async fn status(
    State(app): Shared,
    Path(name): Path<String>,
    Query(which): Query<Which>,
) -> Result<Response, ApiError> {
    check_namespace(which.namespace.as_deref())?;
    let view = app.node.view(&name).ok_or_else(|| ApiError::unknown_function(&name))?;
    Ok(axum_json(&render(&view, which.usage.is_some_and(|text| text == "1" || text == "true"))?))
}

async fn deploy(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    put(&app, &body, false).await
}

async fn update(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    put(&app, &body, true).await
}

async fn put(app: &App, body: &[u8], must_exist: bool) -> Result<StatusCode, ApiError> {
    let deployment: FunctionDeployment = parse(body)?;
    check_name("service", &deployment.service)?;
    let deployment = app.node.as_kept(deployment);
    let mut plan = app.plan(&deployment)?;
    // The cluster checks the rights to make pods, and none of a client of REST.
    refuse_template(&deployment, "write a GpuFunction with `spec.template`, or leave it out")?;
    let name = &deployment.service;
    let _alone = app.node.changes.lock().await;
    let path = deployment.env_vars.as_ref().and_then(|variables| variables.get("PATH")).map(String::as_str);
    if let Some(why) = plan.missing_program(path).or_else(|| app.node.host().unsuitable(&plan)) {
        return Err(ApiError::bad(why));
    }
    let known = app.node.view(name);
    if must_exist && known.is_none() {
        return Err(ApiError::unknown_function(name));
    }
    for secret in deployment.secrets.iter().flatten() {
        check_name("secrets", secret)?;
        if !app.node.has_secret(secret).await? {
            return Err(ApiError::bad(format!("secrets: unknown secret `{secret}`")));
        }
    }
    let created_ms = known.map_or_else(now_ms, |view| view.created_ms);
    if let Some(model) = plan.model.clone().filter(|_| !app.node.host().shares_weights(&plan)) {
        let node = Arc::clone(&app.node);
        let put = tokio::task::spawn_blocking(move || node.runner.models.put(&model)).await;
        put.map_err(|error| ApiError::internal("the model store", error))??;
    }
    let record = Record { deployment: deployment.clone(), created_ms, replicas: None };
    // Write the record first, and undo the write if the platform refuses: a deployed function always survives a restart.
    let kept = app.node.kept(name);
    app.node.keep(&record).await?;
    app.recall(&mut plan, &deployment, false);
    let version = Version { deployment: deployment.clone(), plan };
    app.node.logs.open(name);
    let deployed = app.node.host().deploy(app.node.now(), version, created_ms, None);
    if let Err(error) = deployed {
        match kept {
            Some(record) => app.node.keep(&record).await?,
            None => {
                app.node.logs.forget(name);
                app.node.forget(name).await?;
            }
        }
        return Err(error);
    }
    Ok(StatusCode::ACCEPTED)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

async fn remove(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    let request: DeleteRequest = parse(&body)?;
    check_namespace(request.namespace.as_deref())?;
    let name = &request.function_name;
    check_name("functionName", name)?;
    let _alone = app.node.changes.lock().await;
    app.node.view(name).ok_or_else(|| ApiError::unknown_function(name))?;
    app.node.forget(name).await?;
    app.node.host().remove(app.node.now(), name);
    app.node.logs.forget(name);
    // To delete a function and deploy it again is a way to ask for a new measurement.
    app.node.forget_profile(name)?;
    Ok(StatusCode::ACCEPTED)
}

/// Measures a function again from scratch. The current version keeps serving meanwhile.
async fn measure_again(State(app): Shared, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    let _alone = app.node.changes.lock().await;
    let record = app.node.kept(&name).ok_or_else(|| ApiError::unknown_function(&name))?;
    let plan = app.plan(&record.deployment)?;
    if plan.wants != Wants::Measured {
        let why = format!("function `{name}` is not measured: its share or its profile was given");
        return Err(ApiError::bad(why));
    }
    app.node.forget_profile(&name)?;
    let version = Version { deployment: record.deployment, plan };
    app.node.host().deploy(app.node.now(), version, record.created_ms, record.replicas)?;
    Ok(StatusCode::ACCEPTED)
}

async fn scale(State(app): Shared, Path(name): Path<String>, body: Bytes) -> Result<StatusCode, ApiError> {
    let request: ScaleRequest = parse(&body)?;
    check_namespace(request.namespace.as_deref())?;
    check_name("function", &name)?;
    if request.service_name.as_ref().is_some_and(|other| *other != name && !other.is_empty()) {
        return Err(ApiError::bad(format!("serviceName: is not `{name}`, as the path says")));
    }
    let _alone = app.node.changes.lock().await;
    let view = app.node.view(&name).ok_or_else(|| ApiError::unknown_function(&name))?;
    app.node.host().may_have(&name, request.replicas)?;
    let replicas = Some(request.replicas);
    let record =
        Record { deployment: view.version.deployment.clone(), created_ms: view.created_ms, replicas };
    app.node.keep(&record).await?;
    app.node.host().set_replicas(app.node.now(), &name, request.replicas)?;
    Ok(StatusCode::ACCEPTED)
}

/// The page itself; its script fetches everything else.
fn page() -> Response {
    static PAGE: LazyLock<String> = LazyLock::new(|| {
        gshared::page::of(&gshared::page::About {
            title: "gshare",
            state: "/system/state",
            history: Some("/system/history"),
            logs: Some("/system/logs"),
        })
    });
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, gshared::page::POLICY),
    ];
    (headers, PAGE.as_str()).into_response()
}

async fn state(State(app): Shared) -> Result<Response, ApiError> {
    let node = Arc::clone(&app.node);
    let state = tokio::task::spawn_blocking(move || super::state::now(&node)).await;
    Ok(axum_json(&state.map_err(|error| ApiError::internal("state", error))?))
}

#[derive(Debug, Deserialize)]
struct HistoryQuery {
    #[serde(default, rename = "after_ns")]
    after: Timestamp,
}

/// Samples of the last five minutes, or those after a time that the page has.
async fn history(State(app): Shared, Query(query): Query<HistoryQuery>) -> Response {
    let samples = app.node.history.lock().after(query.after);
    axum_json(&samples)
}

async fn info() -> Response {
    let release = env!("CARGO_PKG_VERSION");
    axum_json(&serde_json::json!({
        "provider": "gshare",
        "version": {"release": release, "sha": ""},
        "orchestration": "processes",
    }))
}

/// The contract leaves the content to the provider: here, the sums over all functions.
async fn telemetry(State(app): Shared) -> Response {
    let views = app.node.host().views();
    let sum = |of: fn(&View) -> u64| views.iter().map(of).sum::<u64>();
    axum_json(&serde_json::json!({
        "provider": "gshare",
        "functions": views.len(),
        "replicas": sum(View::replicas),
        "available_replicas": sum(View::available),
        "invocations": sum(|view| view.invocations),
        "waiting": sum(|view| view.waiting),
    }))
}

async fn namespace(Path(name): Path<String>, request: Request) -> Result<Response, ApiError> {
    if *request.method() != Method::GET {
        let why = format!("there is one namespace, `{NAMESPACE}`");
        return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, why));
    }
    if name != NAMESPACE {
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("namespace: unknown `{name}`")));
    }
    Ok(axum_json(&serde_json::json!({"name": NAMESPACE, "annotations": {}, "labels": {}})))
}

async fn secrets(State(app): Shared, Query(which): Query<Which>) -> Result<Response, ApiError> {
    check_namespace(which.namespace.as_deref())?;
    let names = app.node.secrets().await?;
    let all = names.iter().map(|name| serde_json::json!({"name": name, "namespace": NAMESPACE}));
    Ok(axum_json(&all.collect::<Vec<_>>()))
}

fn secret(body: &[u8]) -> Result<Secret, ApiError> {
    let secret: Secret = parse(body)?;
    check_name("name", &secret.name)?;
    check_namespace(secret.namespace.as_deref())?;
    Ok(secret)
}

async fn add_secret(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    put_secret(&app, &body, false).await
}

async fn change_secret(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    put_secret(&app, &body, true).await
}

async fn put_secret(app: &App, body: &[u8], exists: bool) -> Result<StatusCode, ApiError> {
    let secret = secret(body)?;
    let bytes = secret.bytes()?;
    let _alone = app.node.changes.lock().await;
    match (exists, app.node.has_secret(&secret.name).await?) {
        (true, false) => {
            return Err(ApiError::new(
                StatusCode::NOT_FOUND,
                format!("name: unknown secret `{}`", secret.name),
            ));
        }
        (false, true) => {
            return Err(ApiError::new(
                StatusCode::CONFLICT,
                format!("name: `{}` is there already", secret.name),
            ));
        }
        _ => {}
    }
    app.node.put_secret(&secret.name, &bytes).await?;
    Ok(StatusCode::ACCEPTED)
}

async fn remove_secret(State(app): Shared, body: Bytes) -> Result<StatusCode, ApiError> {
    let secret = secret(&body)?;
    let _alone = app.node.changes.lock().await;
    if !app.node.has_secret(&secret.name).await? {
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("name: unknown secret `{}`", secret.name)));
    }
    let views = app.node.host().views();
    let uses = views.iter().map(|view| &view.version.deployment);
    let user = uses.clone().find(|of| of.secrets.iter().flatten().any(|name| *name == secret.name));
    if let Some(user) = user {
        let why = format!("name: `{}` is used by function `{}`", secret.name, user.service);
        return Err(ApiError::new(StatusCode::CONFLICT, why));
    }
    app.node.remove_secret(&secret.name).await?;
    Ok(StatusCode::ACCEPTED)
}

#[derive(Debug, Deserialize)]
struct LogQuery {
    name: Option<String>,
    namespace: Option<String>,
    instance: Option<String>,
    tail: Option<i64>,
    follow: Option<String>,
    since: Option<String>,
}

async fn logs(State(app): Shared, Query(query): Query<LogQuery>) -> Result<Response, ApiError> {
    check_namespace(query.namespace.as_deref())?;
    let name = query.name.as_deref().ok_or_else(|| ApiError::bad("name: missing"))?;
    app.node.view(name).ok_or_else(|| ApiError::unknown_function(name))?;
    let since = match query.since.as_deref().filter(|text| !text.is_empty()) {
        None => UNIX_EPOCH,
        Some(text) => humantime::parse_rfc3339_weak(text)
            .map_err(|error| ApiError::bad(format!("since: `{text}`: {error}; need RFC 3339, UTC")))?,
    };
    let follow = query.follow.as_deref().is_some_and(|text| text == "1" || text == "true");
    let wanted = move |line: &Stamped| {
        line.0 >= since && query.instance.as_ref().is_none_or(|i| i.is_empty() || *i == line.1.instance)
    };
    let tail = query.tail.and_then(|tail| usize::try_from(tail).ok()).filter(|tail| *tail > 0);
    let (node, name) = (Arc::clone(&app.node), name.to_owned());
    let (mut number, mut live) = node.logs.begin(&name, tail, &wanted);
    let end = *live.borrow_and_update();
    let (sender, body) = later::channel();
    tokio::spawn(async move {
        let encode = |line: &LogLine| {
            let mut bytes = serde_json::to_vec(line).unwrap_or_default();
            bytes.push(b'\n');
            Bytes::from(bytes)
        };
        while follow || number < end {
            let (lines, next) = node.logs.after(&name, number);
            number = next;
            if lines.is_empty() {
                tokio::select! {
                    // Returns when the function is removed or a line arrives.
                    changed = live.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
            }
            for line in lines.into_iter().filter(&wanted) {
                if sender.send(encode(&line.1)).await.is_err() {
                    return;
                }
            }
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

async fn metrics(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    // Metrics need no credentials, but pages of other sites must not read them.
    guard::check(request.method(), request.headers(), app.loopback)?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], app.metrics.encode(&app.node)).into_response())
}

async fn call(State(app): Shared, request: Request) -> Response {
    let begun = Instant::now();
    // The path stays percent-encoded, because the instance gets it unchanged.
    let raw = request.uri().path().strip_prefix("/function/").unwrap_or_default().to_owned();
    let (name, answer) = match proxy::target(&raw, app.node.has_all_namespaces()) {
        Ok((name, rest)) => {
            let answer = proxy::forward(&app.node, name, rest, request, app.patience).await;
            (app.node.view(name).map(|_| name), answer)
        }
        Err(error) => (None, Err(error)),
    };
    let mut response = answer.unwrap_or_else(|error| {
        let mut response = error.into_response();
        let ours = header::HeaderValue::from_static("proxy");
        response.headers_mut().insert("x-openfaas-internal", ours);
        response
    });
    if let Some(name) = name {
        let (status, took) = (response.status(), begun.elapsed());
        app.metrics.called(name, status.as_u16(), took);
        app.node.history.lock().called(name, status.is_server_error(), took);
        let seconds = took.as_secs_f64().to_string();
        if let Ok(value) = header::HeaderValue::from_str(&seconds) {
            response.headers_mut().insert("x-duration-seconds", value);
        }
    }
    response
}

async fn call_later(State(app): Shared, request: Request) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let raw = parts.uri.path().strip_prefix("/async-function/").unwrap_or_default().to_owned();
    let (name, rest) = proxy::target(&raw, app.node.has_all_namespaces())?;
    app.node.view(name).ok_or_else(|| ApiError::unknown_function(name))?;
    let callback = app.later.callback(&parts.headers)?;
    let (body, room) = app.later.body(body).await?;
    let id = app.later.name(&mut parts.headers);
    let (name, path) = (name.to_owned(), rest.to_owned());
    let request = Request::from_parts(parts, Body::from(body));
    app.later.push(later::Call { id: id.clone(), name, path, callback, request, room })?;
    Ok((StatusCode::ACCEPTED, [("x-call-id", id)]).into_response())
}
