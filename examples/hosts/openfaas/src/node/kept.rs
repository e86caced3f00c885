//! Records of functions, measurements and secrets: in files of the host's folder, or in objects of the cluster.

use super::Node;
use crate::api::{ApiError, FunctionDeployment};
use crate::records::Record;
use crate::trials::Measured;

/// On Kubernetes the answer of the objects; else goes on.
macro_rules! in_objects {
    ($node:ident, $objects:ident => $answer:expr) => {
        #[cfg(feature = "kubernetes")]
        if let Some(pods) = &$node.runner.pods {
            let $objects = &pods.objects;
            return $answer;
        }
    };
}

impl Node {
    /// A deployment in the form in which it is kept.
    pub fn as_kept(&self, deployment: FunctionDeployment) -> FunctionDeployment {
        #[cfg(feature = "kubernetes")]
        if self.runner.pods.is_some() {
            return crate::kubernetes::function::GpuFunction::of(&deployment, None).deployment();
        }
        deployment
    }

    /// Whether functions of other namespaces are the host's too.
    pub fn has_all_namespaces(&self) -> bool {
        in_objects!(self, objects => objects.scope.everywhere);
        false
    }

    /// The record of a function.
    pub fn kept(&self, name: &str) -> Option<Record> {
        in_objects!(self, objects => objects.record(name));
        self.store.function(name)
    }

    /// Keeps a function.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn keep(&self, record: &Record) -> Result<(), ApiError> {
        in_objects!(self, objects => objects.put(record).await);
        self.store.put_function(record).map_err(|error| ApiError::internal("keeping the function", error))
    }

    /// Forgets a function.
    ///
    /// # Errors
    /// If its record cannot be removed.
    pub async fn forget(&self, name: &str) -> Result<(), ApiError> {
        in_objects!(self, objects => objects.delete(name).await);
        self.store.remove_function(name).map_err(|error| ApiError::internal("forgetting the function", error))
    }

    /// Keeps a measurement.
    pub fn keep_profile(&self, deployment: &FunctionDeployment, measured: &Measured) {
        in_objects!(self, objects => objects.keep_profile(deployment, measured));
        if let Err(error) = self.store.put_profile(deployment, measured) {
            eprintln!("openfaas: keeping a profile: {error}");
        }
    }

    /// The measurement of a function, if its program is still the same.
    pub fn profile(&self, deployment: &FunctionDeployment) -> Option<Measured> {
        in_objects!(self, objects => objects.profile(deployment));
        self.store.profile(deployment)
    }

    /// Forgets the measurement of a function, if there is one.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn forget_profile(&self, name: &str) -> Result<(), ApiError> {
        in_objects!(self, objects => {
            objects.forget_profile(name);
            Ok(())
        });
        self.store.forget_profile(name).map_err(|error| ApiError::internal("forgetting the profile", error))
    }

    /// Names of the secrets.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn secrets(&self) -> Result<Vec<String>, ApiError> {
        in_objects!(self, objects => objects.secrets().await);
        self.store.secrets().map_err(|error| ApiError::internal("reading secrets", error))
    }

    /// Whether there is a secret of this name, which must have passed `check_name`.
    ///
    /// # Errors
    /// If that cannot be read.
    pub async fn has_secret(&self, name: &str) -> Result<bool, ApiError> {
        in_objects!(self, objects => objects.has_secret(name).await);
        Ok(self.store.has_secret(name))
    }

    /// Keeps a secret.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn put_secret(&self, name: &str, value: &[u8]) -> Result<(), ApiError> {
        in_objects!(self, objects => objects.put_secret(name, value).await);
        self.store.put_secret(name, value).map_err(|error| ApiError::internal("keeping the secret", error))
    }

    /// Removes a secret.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub async fn remove_secret(&self, name: &str) -> Result<(), ApiError> {
        in_objects!(self, objects => objects.remove_secret(name).await);
        self.store.remove_secret(name).map_err(|error| ApiError::internal("forgetting the secret", error))
    }
}
