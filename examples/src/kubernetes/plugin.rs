//! A plugin of the kubelet: the socket for its discovery and registration, and the socket of its service. The kubelet looks
//! for plugins of both kinds, drivers of devices and device plugins, in one directory, and finds them again after its own
//! restart.

use super::controller_metrics::Metrics;
use super::dra::authority::Tolerant;
use super::dra::kubelet::registration_server::{Registration, RegistrationServer};
use super::dra::kubelet::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};

struct Registrar {
    info: PluginInfo,
    metrics: Metrics,
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
            println!("{}: registered with the kubelet", self.info.name);
            self.metrics.ready();
        }
        self.status.send_replace(Some(status));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Time for calls that are under way when the plugin is asked to end.
const GRACE: Duration = Duration::from_secs(2);

/// A plugin as it is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// `DRAPlugin` or `DevicePlugin`.
    pub kind: &'static str,
    /// Name of the driver, or of the extended resource.
    pub name: String,
    /// Versions of its service, as the kubelet names them.
    pub versions: Vec<String>,
}

/// Paths by which the kubelet finds a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// Directory that the kubelet watches for new plugins: `/var/lib/kubelet/plugins_registry`.
    pub registry: PathBuf,
    /// Directory of the plugins' own sockets: `/var/lib/kubelet/plugins`.
    pub plugins: PathBuf,
    /// Name of the plugin in the paths of both sockets.
    pub name: &'static str,
}

impl Sockets {
    /// The sockets of a plugin below the kubelet's directory.
    pub fn below(kubelet: &Path, name: &'static str) -> Self {
        Self { registry: kubelet.join("plugins_registry"), plugins: kubelet.join("plugins"), name }
    }

    /// The socket that serves the plugin.
    pub fn plugin(&self) -> PathBuf {
        self.plugins.join(self.name).join("plugin.sock")
    }

    /// The socket that serves `Registration`.
    pub fn registration(&self) -> PathBuf {
        self.registry.join(format!("{}-reg.sock", self.name))
    }
}

/// Why a plugin ended.
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
    #[error("the kubelet refuses the plugin: {0}")]
    Refused(String),
}

/// Serves until `end` is ready, or the kubelet refuses the plugin. Without the registration socket, which is removed at the
/// end, the kubelet asks no more.
///
/// # Errors
/// When a socket cannot be made or served, or the kubelet refuses.
pub async fn serve(
    router: Router,
    plugin: Plugin,
    sockets: &Sockets,
    metrics: Metrics,
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (socket, registration) = (sockets.plugin(), sockets.registration());
    // First the socket that the registration names.
    let plugin_listener = listen(&socket)?;
    let registration_listener = listen(&registration)?;
    let (status, mut refused) = watch::channel(None);
    let info = PluginInfo {
        r#type: plugin.kind.into(),
        name: plugin.name,
        endpoint: socket.display().to_string(),
        supported_versions: plugin.versions,
    };
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let plugin_server =
        router.serve_with_incoming_shutdown(accepted(plugin_listener), until(stopped.clone()));
    let registrar = tonic::transport::Server::builder()
        .add_service(RegistrationServer::new(Registrar { info, metrics, status }))
        .serve_with_incoming_shutdown(accepted(registration_listener), until(stopped.clone()));
    // One that ends by itself ends the other.
    let plugin_server = async {
        let grace = async {
            until(stopped.clone()).await;
            tokio::time::sleep(GRACE).await;
        };
        let served = tokio::select! {
            served = plugin_server => served,
            // Streams that tell the kubelet of health have no end.
            () = grace => Ok(()),
        };
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
    let _ = std::fs::remove_file(&socket);
    served?;
    registered?;
    ended
}

/// Connections of a kubelet.
fn accepted(listener: UnixListener) -> impl tokio_stream::Stream<Item = io::Result<Tolerant>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(Tolerant::from))
}

/// A socket that replaces an earlier driver's socket.
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
