//! The driver as the kubelet sees it: two sockets, and what is asked on them.

use super::authority::Tolerant;
use super::cdi::Directory;
use super::claim::{ClaimError, answer, check_uid, prepare};
use super::kubelet::registration_server::{Registration, RegistrationServer};
use super::kubelet::*;
use super::{DRIVER, Node};
use crate::kubernetes::said;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// Why a claim is not prepared, or not undone.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// What the claim says.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// No such claim.
    #[error("no ResourceClaim {namespace}/{name}")]
    Unknown {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The API server.
    #[error("{}", said(.0))]
    Api(#[from] kube::Error),
    /// Its CDI spec.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Prepares the claims of one node. It remembers nothing: what is prepared is what has a CDI spec.
#[derive(Clone)]
pub struct Driver {
    node: Arc<Node>,
    client: Client,
    cdi: Directory,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("node", &self.node).field("cdi", &self.cdi).finish_non_exhaustive()
    }
}

impl Driver {
    /// A driver that writes CDI specs to `cdi`.
    pub fn new(node: Arc<Node>, client: Client, cdi: Directory) -> Self {
        Self { node, client, cdi }
    }

    async fn prepare(&self, claim: &Claim) -> Result<Device, PrepareError> {
        let Claim { namespace, name, uid } = claim;
        check_uid(uid)?;
        let file = |source| PrepareError::File { path: self.cdi.file(uid), source };
        // An allocation never changes while it is in use, so what was answered once is answered again.
        if let Some(spec) = self.cdi.read(uid).map_err(file)?
            && let Some(device) = answer(uid, &spec)
        {
            // With the file of its share, which may be missing.
            self.cdi.write(uid, &spec).map_err(file)?;
            return Ok(device);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = claims
            .get_opt(name)
            .await?
            .ok_or_else(|| PrepareError::Unknown { namespace: namespace.clone(), name: name.clone() })?;
        let spec = prepare(&self.node, uid, &found)?;
        self.cdi.write(uid, &spec).map_err(file)?;
        // Made from the claim just now, so it is one of ours.
        answer(uid, &spec).ok_or_else(|| file(io::ErrorKind::InvalidData.into()))
    }

    /// Removes the files of claims that are over, whose unprepare was missed: those that the API server no longer has, or has
    /// under another UID or without an allocation. Gives the UIDs. A claim that is in use stays in the API server until its
    /// pods are gone.
    ///
    /// # Errors
    /// When the API server or a file cannot be asked. What was removed before that stays so.
    pub async fn sweep(&self) -> Result<Vec<String>, PrepareError> {
        let mut swept = Vec::new();
        let all =
            self.cdi.uids().map_err(|source| PrepareError::File { path: self.cdi.file("*"), source })?;
        for uid in all.into_iter().filter(|uid| check_uid(uid).is_ok()) {
            let file = |source| PrepareError::File { path: self.cdi.file(&uid), source };
            let Some(spec) = self.cdi.read(&uid).map_err(file)? else { continue };
            let Some((namespace, name)) = spec.note("claim").and_then(|name| name.split_once('/')) else {
                continue;
            };
            let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
            let found = claims.get_opt(name).await?.filter(|found| found.metadata.uid.as_ref() == Some(&uid));
            if found.and_then(|found| found.status?.allocation).is_none() {
                self.unprepare(&uid)?;
                swept.push(uid);
            }
        }
        Ok(swept)
    }

    fn unprepare(&self, uid: &str) -> Result<(), PrepareError> {
        check_uid(uid)?;
        self.cdi.remove(uid).map_err(|source| PrepareError::File { path: self.cdi.file(uid), source })
    }
}

#[tonic::async_trait]
impl plugin_server::DRAPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut response = NodePrepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let entry = match self.prepare(&claim).await {
                Ok(device) => NodePrepareResourceResponse { devices: vec![device], error: String::new() },
                Err(error) => NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error: format!("claim {}/{}: {error}", claim.namespace, claim.name),
                },
            };
            response.claims.insert(claim.uid, entry);
        }
        Ok(Response::new(response))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut response = NodeUnprepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let error = self.unprepare(&claim.uid).err().map(|error| error.to_string()).unwrap_or_default();
            response.claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(response))
    }
}

struct Registrar {
    info: PluginInfo,
    status: watch::Sender<Option<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            println!("gshare-dra: registered with the kubelet");
        }
        self.status.send_replace(Some(status));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Where the kubelet finds a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// What it watches for new plugins: `/var/lib/kubelet/plugins_registry`.
    pub registry: PathBuf,
    /// Where plugins keep their sockets: `/var/lib/kubelet/plugins`.
    pub plugins: PathBuf,
}

impl Sockets {
    /// The socket that serves `DRAPlugin`.
    pub fn plugin(&self) -> PathBuf {
        self.plugins.join(DRIVER).join("dra.sock")
    }

    /// The socket that serves `Registration`.
    pub fn registration(&self) -> PathBuf {
        self.registry.join(format!("{DRIVER}-reg.sock"))
    }
}

/// Why the driver ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A socket.
    #[error("{path}: {source}")]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// While it served.
    #[error("{0}")]
    Transport(#[from] tonic::transport::Error),
    /// The kubelet does not want it.
    #[error("the kubelet refuses the driver: {0}")]
    Refused(String),
}

/// Serves until `end` is ready, or the kubelet refuses the driver. Without the registration socket, which is removed at the
/// end, the kubelet asks no more.
///
/// # Errors
/// When a socket cannot be made or served, or the kubelet refuses.
pub async fn serve(
    driver: Driver,
    sockets: &Sockets,
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (plugin, registration) = (sockets.plugin(), sockets.registration());
    // First the one that registration names.
    let plugin_listener = listen(&plugin)?;
    let registration_listener = listen(&registration)?;
    let (status, mut refused) = watch::channel(None);
    let info = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: DRIVER.into(),
        endpoint: plugin.display().to_string(),
        supported_versions: vec![DRA_V1.into()],
    };
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let plugin_server = tonic::transport::Server::builder()
        .add_service(plugin_server::DRAPluginServer::new(driver))
        .serve_with_incoming_shutdown(accepted(plugin_listener), until(stopped.clone()));
    let registrar = tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(Registrar { info, status }))
        .serve_with_incoming_shutdown(accepted(registration_listener), until(stopped.clone()));
    // One that ends by itself ends the other.
    let plugin_server = async {
        let served = plugin_server.await;
        stop.send_replace(true);
        served
    };
    let registrar = async {
        let served = registrar.await;
        stop.send_replace(true);
        served
    };
    let refusal = async {
        let is_refusal = |status: &Option<RegistrationStatus>| {
            status.as_ref().is_some_and(|status| !status.plugin_registered)
        };
        let why = refused.wait_for(is_refusal).await.ok().and_then(|status| status.clone());
        match why {
            Some(status) => status.error,
            None => std::future::pending().await,
        }
    };
    let ended = async {
        let ended = tokio::select! {
            () = end => Ok(()),
            () = until(stopped.clone()) => Ok(()),
            why = refusal => Err(ServeError::Refused(why)),
        };
        let _ = std::fs::remove_file(&registration);
        stop.send_replace(true);
        ended
    };
    let (served, registered, ended) = tokio::join!(plugin_server, registrar, ended);
    let _ = std::fs::remove_file(&plugin);
    served?;
    registered?;
    ended
}

/// Connections of a kubelet.
fn accepted(listener: UnixListener) -> impl tokio_stream::Stream<Item = io::Result<Tolerant>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(Tolerant::from))
}

/// A socket in the place of one that an earlier driver has left.
fn listen(path: &Path) -> Result<UnixListener, ServeError> {
    let made = || {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path)
    };
    made().map_err(|source| ServeError::Socket { path: path.to_owned(), source })
}
