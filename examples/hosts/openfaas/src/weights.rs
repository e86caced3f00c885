//! Weights on the devices: one copy of a model on each device for all instances that share the device.
//!
//! # How it works
//! Weights on a device have a store of their own: a process of this program under the hook, so that the node's daemon has their memory
//! in an account, once. The store takes the memory when the first instance asks for the weights, and every instance maps them. They
//! stay while an instance of the model runs there, and are freed before the platform hears of the end of the last one.
//!
//! # Limits of the protection
//! An instance maps the weights for reading: the driver refuses its copies into them, and a kernel that writes there faults. But a
//! process chooses the access of its own map. A program that calls the driver itself can therefore change the weights of the other
//! instances of its model, and of no other model.
//!
//! # When something dies
//! - *An instance*: the others keep the weights.
//! - *The store*: the driver keeps the memory until the last instance has unmapped it, but no account has it. So the instances that use it
//!   end too, with the reason, and others start with another store.

use super::deployment::Model;
use super::host::{Launch, Version};
use super::inventory::Inventory;
use anyhow::Context as _;
use gshare_core::{Bytes, GpuId, InstanceId, QuotaRange};
use gshare_modelstore::backend::HostBackend;
use gshare_modelstore::backend::cuda::VmmBackend;
use gshare_modelstore::server::{Server, ServerConfig, listen_at};
use gshare_runner::{Hook, HookedProcess};
use gshare_sched::platform::Part;
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Be the store of a model's weights on this process's first device, at the socket that is the standard input, until killed.
///
/// # Errors
/// When the model cannot be read, or there is no driver.
pub fn serve(model: &Path) -> anyhow::Result<()> {
    let bytes = Model::of(model).map_err(anyhow::Error::msg)?.bytes;
    // The host has made the socket, and removes it.
    let mut config = ServerConfig::at(PathBuf::new()).with_models(Some(model.to_owned()));
    // A program may also ask for the model in host memory.
    (config.store.gpu, config.store.host) = (bytes, bytes);
    let loader = vec![std::env::current_exe()?.into(), "--load-weights".into()];
    let gpu = VmmBackend::new(0, loader)?;
    config.listener = Some(Arc::new(io::stdin().as_fd().try_clone_to_owned()?));
    Server::with_backends(config, Box::new(HostBackend), Some(Box::new(gpu)))?.spawn()?.join();
    Ok(())
}

/// The store of a model's weights on a device.
#[derive(Debug)]
struct Store {
    number: u64,
    gpu: GpuId,
    model: Model,
    process: HookedProcess,
    users: Vec<User>,
}

/// An instance that uses weights, and its version.
type User = (InstanceId, Arc<Version>);

/// All weights on the devices of this node.
#[derive(Debug)]
pub struct Weights {
    folder: PathBuf,
    /// The number of the last store, and the stores.
    stores: Mutex<(u64, Vec<Store>)>,
}

/// The use of weights by an instance's process. Dropping the last use of a store frees the memory, and waits for that.
#[derive(Debug)]
pub struct Use {
    of: Arc<Weights>,
    /// Number of their store.
    pub store: u64,
    instance: InstanceId,
    /// Socket of their store.
    pub socket: PathBuf,
}

/// Weights on a device, to show.
#[derive(Debug, serde::Serialize)]
pub struct Held {
    /// The model's file.
    pub model: PathBuf,
    /// The store's name at the node's daemon.
    pub client: String,
    /// Their memory in bytes, as the daemon has it in the store's account.
    #[serde(rename = "memory_bytes")]
    pub memory: Bytes,
    /// Instances that use them.
    pub instances: Vec<InstanceId>,
    /// Number of the store's process.
    pub pid: u32,
}

impl Weights {
    /// None yet; their sockets will be in this folder.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn new(folder: PathBuf) -> io::Result<Arc<Self>> {
        // Sockets of an earlier host.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        Ok(Arc::new(Self { folder, stores: Mutex::default() }))
    }

    /// Has a model's weights for a process of an instance on the part's device. A store that did not run yet is begun by the calling
    /// thread, with which it ends; then there is a descriptor too, readable at the end of the store, for [`lost`](Self::lost).
    ///
    /// # Errors
    /// When the file has changed since the deployment, or the store cannot be started.
    pub fn take(
        self: &Arc<Self>,
        model: &Model,
        launch: &Launch,
        part: &Part,
        devices: &Inventory,
        hook: &Hook,
    ) -> io::Result<(Use, Option<OwnedFd>)> {
        let (last, stores) = &mut *self.stores.lock();
        let mut ended = None;
        let there = stores.iter().position(|store| store.gpu == part.gpu && store.model == *model);
        let at = match there {
            Some(at) => at,
            None if Model::of(&model.path).as_ref() != Ok(model) => {
                return Err(io::Error::other(
                    "the file has changed since gshare/model named it: deploy it again",
                ));
            }
            None => {
                *last += 1;
                let process = self.begin(*last, model, part, devices, hook)?;
                ended = Some(process.pidfd().try_clone_to_owned()?);
                let (number, gpu, model) = (*last, part.gpu, model.clone());
                stores.push(Store { number, gpu, model, process, users: Vec::new() });
                stores.len() - 1
            }
        };
        let store = &mut stores[at];
        store.users.push((launch.instance, Arc::clone(&launch.version)));
        let (number, socket) = (store.number, self.socket(store.number));
        Ok((Use { of: Arc::clone(self), store: number, instance: launch.instance, socket }, ended))
    }

    fn socket(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number}.sock"))
    }

    fn begin(
        &self,
        number: u64,
        model: &Model,
        part: &Part,
        devices: &Inventory,
        hook: &Hook,
    ) -> io::Result<HookedProcess> {
        // Clients may connect before the process is that far.
        let listener = listen_at(&self.socket(number), 0o666).map_err(io::Error::other)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--weights").arg(&model.path).stdin(Stdio::from(listener)).stdout(Stdio::null());
        command.envs(devices.variables(std::slice::from_ref(part))?);
        command.env("GSHARE_QUOTA", QuotaRange::BEST_EFFORT.to_string()).env_remove("GSHARE_MEM");
        let name = client(number, part.gpu, model);
        HookedProcess::start(command, &name, gshare_runner::new_run()?, Some(hook))
    }

    /// The instances that have lost their weights with a store that this host has not ended, and why.
    pub fn lost(&self, number: u64) -> Option<(Vec<User>, String)> {
        let stores = &mut self.stores.lock().1;
        let at = stores.iter().position(|store| store.number == number)?;
        let Store { gpu, model, mut process, users, .. } = stores.swap_remove(at);
        process.has_ended();
        let how = process.status().map_or_else(|| "ended".to_owned(), |status| status.to_string());
        let path = model.path.display();
        Some((users, format!("the store of the weights of {path} on {gpu} has ended ({how})")))
    }

    /// The weights on a device; the daemon's account of a store is asked by its name.
    pub fn held(&self, on: GpuId, account: &dyn Fn(&str) -> Bytes) -> Vec<Held> {
        let held = |store: &Store| {
            let client = client(store.number, store.gpu, &store.model);
            let instances = store.users.iter().map(|(instance, _)| *instance).collect();
            let (model, pid) = (store.model.path.clone(), store.process.pid());
            Held { model, memory: account(&client), client, instances, pid }
        };
        self.stores.lock().1.iter().filter(|store| store.gpu == on).map(held).collect()
    }
}

/// Name of a store at the node's daemon. It ends like no instance's name, and another store never takes it.
fn client(number: u64, gpu: GpuId, model: &Model) -> String {
    let stem = model.path.file_stem().unwrap_or_default().to_string_lossy();
    format!("weights/{gpu}/{number}/{}", stem.replace('-', "_"))
}

impl Drop for Use {
    fn drop(&mut self) {
        let stores = &mut self.of.stores.lock().1;
        let Some(at) = stores.iter().position(|store| store.number == self.store) else { return };
        let users = &mut stores[at].users;
        if let Some(at) = users.iter().position(|(user, _)| *user == self.instance) {
            users.swap_remove(at);
        }
        if users.is_empty() {
            // Killed and waited for under the lock: the next store needs the memory.
            stores.swap_remove(at);
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

/// Library and Python package of the stores' client, for instances of functions that name a model.
#[derive(Debug)]
pub struct StoreClient {
    /// `libgshare_store.so`.
    pub shared_object: PathBuf,
    /// Goes first into `PYTHONPATH`: PyTorch's programs take their weights from the store then.
    pub python: PathBuf,
}

impl StoreClient {
    /// Writes the package to a folder.
    ///
    /// # Errors
    /// When there is no library, or the folder cannot be written.
    pub fn write(python: PathBuf) -> anyhow::Result<Self> {
        let shared_object = gshare_runner::libraries::STORE.find()?;
        gshare_modelstore::python::write_shim(&python).with_context(|| python.display().to_string())?;
        Ok(Self { shared_object, python })
    }

    /// Gives a command the client, before the function's own `PYTHONPATH` or the host's.
    pub fn hand_to(&self, command: &mut Command, own: Option<&str>) {
        let mut path = self.python.clone().into_os_string();
        let before = own.map(Into::into).or_else(|| std::env::var_os("PYTHONPATH"));
        if let Some(before) = before.filter(|before| !before.is_empty()) {
            path.push(":");
            path.push(before);
        }
        command.env("PYTHONPATH", path).env("GSHARE_STORE_LIBRARY", &self.shared_object);
    }
}
