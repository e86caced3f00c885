//! A control plane, if there is one: `kube-apiserver` and `etcd` of the folder in `KUBEBUILDER_ASSETS`, started as envtest does. Without
//! this variable the scenarios run on the mock alone.
//!
//! All tests of a program share one control plane, one after the other. A shell starts both processes and ends them when this program is
//! gone.

use http::{Request, StatusCode};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// The token of a client with all rights. The mock knows the tests' own requests by it.
pub(crate) const ADMIN: &str = "admin-of-the-tests";

pub(crate) struct ControlPlane {
    folder: PathBuf,
    /// The address of the server.
    pub(crate) url: String,
    pub(crate) kubectl: Option<PathBuf>,
    /// One test at a time holds the control plane.
    pub(crate) turn: Mutex<()>,
    /// The shell waits for its end.
    _until: ChildStdin,
}

/// The name, groups and node by which a request is made.
#[derive(Clone, Copy)]
pub(crate) enum User<'a> {
    Admin,
    /// A name with all rights, on a node or not: only admission can refuse it.
    Entitled(&'a str, Option<&'a str>),
    /// A service account, `NAMESPACE:NAME`, with the rights of the manifests.
    Account(&'a str, Option<&'a str>),
}

static ONE: OnceLock<Option<ControlPlane>> = OnceLock::new();

impl ControlPlane {
    pub(crate) fn here() -> Option<&'static Self> {
        let start = || {
            let assets = std::env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty());
            if assets.is_none() {
                eprintln!("no control plane here (KUBEBUILDER_ASSETS is not set): on the mock alone");
            }
            assets.map(|assets| Self::start(assets.as_ref()))
        };
        ONE.get_or_init(start).as_ref()
    }

    fn start(assets: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap().keep();
        let ports: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let [api, etcd, peers] = [0, 1, 2].map(|index: usize| ports[index].local_addr().unwrap().port());
        drop(ports);
        std::fs::write(folder.join("tokens.csv"), format!("{ADMIN},admin,admin,system:masters\n")).unwrap();
        let script = format!(
            "cd '{folder}'
            set -e
            openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out accounts.key
            openssl pkey -in accounts.key -pubout -out accounts.pub
            '{assets}/etcd' --data-dir etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:{etcd} \
              --advertise-client-urls http://127.0.0.1:{etcd} --listen-peer-urls http://127.0.0.1:{peers} \
              --initial-advertise-peer-urls http://127.0.0.1:{peers} \
              --initial-cluster default=http://127.0.0.1:{peers} >etcd.log 2>&1 & etcd=$!
            '{assets}/kube-apiserver' --etcd-servers=http://127.0.0.1:{etcd} --bind-address=127.0.0.1 --secure-port={api} \
              --cert-dir=certificates --authorization-mode=RBAC --token-auth-file=tokens.csv --allow-privileged=true \
              --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=accounts.pub \
              --service-account-signing-key-file=accounts.key --service-cluster-ip-range=10.0.0.0/24 \
              --endpoint-reconciler-type=none --disable-admission-plugins=ServiceAccount,TaintNodesByCondition >api.log 2>&1 & api=$!
            cat >/dev/null
            kill -KILL $api $etcd || true; wait; cd /; rm -rf '{folder}'",
            folder = folder.display(),
            assets = assets.display(),
        );
        let (mut shell, errors) =
            (Command::new("sh"), std::fs::File::create(folder.join("shell.log")).unwrap());
        let shell = shell.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(errors);
        let until = shell.spawn().unwrap().stdin.take().unwrap();
        let (url, kubectl) = (format!("https://127.0.0.1:{api}"), assets.join("kubectl"));
        Self {
            folder,
            url,
            kubectl: kubectl.exists().then_some(kubectl),
            turn: Mutex::new(()),
            _until: until,
        }
    }

    /// Returns once the server is ready.
    pub(crate) async fn ready(&self) {
        let (client, began) = (self.client(User::Admin), Instant::now());
        while !matches!(send(&client, "GET /readyz", &Value::Null).await, Ok((StatusCode::OK, _))) {
            assert!(began.elapsed() < Duration::from_mins(1), "{}", self.log());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn log(&self) -> String {
        let read = |name| std::fs::read_to_string(self.folder.join(name)).unwrap_or_default();
        ["shell.log", "etcd.log", "api.log"].map(read).concat()
    }

    pub(crate) fn client(&self, user: User<'_>) -> Client {
        let mut config = admin_of(&self.url);
        let (name, group, node) = match user {
            User::Admin => return Client::try_from(config).unwrap(),
            User::Entitled(name, node) => (name.to_owned(), "system:masters".to_owned(), node),
            User::Account(name, node) => {
                let namespace = name.split(':').next().unwrap();
                let group = format!("system:serviceaccounts:{namespace}");
                (format!("system:serviceaccount:{name}"), group, node)
            }
        };
        let auth = &mut config.auth_info;
        let all = ["system:authenticated".to_owned(), "system:serviceaccounts".to_owned(), group];
        (auth.impersonate, auth.impersonate_groups) = (Some(name), Some(all.into()));
        auth.impersonate_user_extra = node.map(|node| {
            [("authentication.kubernetes.io/node-name".to_owned(), vec![node.to_owned()])].into()
        });
        Client::try_from(config).unwrap()
    }
}

/// A client with all rights at this address.
pub(crate) fn admin_of(url: &str) -> Config {
    let mut config = Config::new(url.parse().unwrap());
    config.accept_invalid_certs = true;
    config.auth_info.token = Some(ADMIN.to_owned().into());
    config
}

/// `METHOD PATH` with a body, which is a patch to apply where the method is `APPLY`.
pub(crate) async fn send(
    client: &Client,
    line: &str,
    body: &Value,
) -> Result<(StatusCode, Value), kube::Error> {
    let (method, path) = line.split_once(' ').unwrap();
    let (method, content) = match method {
        "APPLY" => ("PATCH", "application/apply-patch+yaml"),
        "PATCH" => ("PATCH", "application/merge-patch+json"),
        other => (other, "application/json"),
    };
    let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = Request::builder().method(method).uri(path).header("content-type", content);
    let answer = client.send(request.body(kube::client::Body::from(bytes)).unwrap()).await?;
    let status = answer.status();
    let bytes = answer.into_body().collect_bytes().await?;
    let text = String::from_utf8_lossy(&bytes);
    Ok((status, serde_json::from_str(&text).unwrap_or_else(|_| json!(text))))
}
