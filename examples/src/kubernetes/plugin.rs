//! A plugin of the kubelet: the socket for its discovery and registration, and the socket of its service. The kubelet looks
//! for plugins of both kinds, drivers of devices and device plugins, in one directory, and finds them again after its own
//! restart.

use super::controller_metrics::Metrics;
use super::dra::authority::tolerant;
use super::kubelet::registration_server::{Registration, RegistrationServer};
use super::kubelet::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use anyhow::{Context as _, anyhow};
use futures::FutureExt as _;
use gshare_openfaas::records::remove;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status};

struct Registrar {
    info: PluginInfo,
    metrics: Metrics,
    refuses: watch::Sender<Option<String>>,
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
        } else {
            self.refuses.send_replace(Some(status.error));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Time for calls that are under way when the plugin is asked to end.
const GRACE: Duration = Duration::from_secs(2);

/// Paths by which the kubelet finds a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// The kubelet's directory: `/var/lib/kubelet`.
    pub kubelet: PathBuf,
    /// Name of the plugin in the paths of both sockets.
    pub name: &'static str,
}

impl Sockets {
    /// The sockets of a plugin below the kubelet's directory.
    pub fn below(kubelet: &Path, name: &'static str) -> Self {
        Self { kubelet: kubelet.to_owned(), name }
    }

    /// The socket that serves the plugin.
    pub fn plugin(&self) -> PathBuf {
        self.kubelet.join("plugins").join(self.name).join("plugin.sock")
    }

    /// The socket that serves `Registration`, in the directory that the kubelet watches for new plugins.
    pub fn registration(&self) -> PathBuf {
        self.kubelet.join("plugins_registry").join(format!("{}-reg.sock", self.name))
    }
}

/// Serves a plugin until `end` is ready, or the kubelet refuses it. The kubelet registers a plugin of this kind and name, with these
/// versions of its services. Without the registration socket, which is removed at the end, the kubelet asks no more.
///
/// # Errors
/// When a socket cannot be made or served, or the kubelet refuses.
pub async fn serve(
    router: Router,
    (kind, name, versions): (&str, &str, &[&str]),
    sockets: &Sockets,
    metrics: Metrics,
    end: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let (socket, registration) = (sockets.plugin(), sockets.registration());
    // Both answer for both services, and the kubelet asks each for its own. First the socket that the registration names.
    let connections = accepted(listen(&socket)?).merge(accepted(listen(&registration)?));
    let (refuses, mut refused) = watch::channel(None);
    let info = PluginInfo {
        r#type: kind.to_owned(),
        name: name.to_owned(),
        endpoint: socket.display().to_string(),
        supported_versions: versions.iter().copied().map(str::to_owned).collect(),
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let router = router.add_service(RegistrationServer::new(Registrar { info, metrics, refuses }));
    let mut server = pin!(router.serve_with_incoming_shutdown(connections, stopped.map(drop)).fuse());
    let ended = tokio::select! {
        early = &mut server => early.map_err(Into::into),
        () = end => Ok(()),
        Ok(why) = refused.wait_for(Option::is_some) => {
            Err(anyhow!("the kubelet refuses the plugin: {}", why.as_deref().unwrap_or_default()))
        }
    };
    let _ = std::fs::remove_file(&registration);
    let _ = stop.send(());
    // Streams that tell the kubelet of health have no end.
    let served = tokio::time::timeout(GRACE, server).await.unwrap_or(Ok(()));
    let _ = std::fs::remove_file(&socket);
    served?;
    ended
}

/// Connections of a kubelet.
fn accepted(listener: UnixListener) -> impl tokio_stream::Stream<Item = io::Result<DuplexStream>> {
    UnixListenerStream::new(listener).map(|stream| stream.map(tolerant))
}

/// A socket that replaces an earlier driver's socket.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let made = || {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        remove(path)?;
        UnixListener::bind(path)
    };
    made().with_context(|| path.display().to_string())
}
