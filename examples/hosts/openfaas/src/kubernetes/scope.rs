//! The namespaces of a host's functions.
//!
//! The host knows a function of its own namespace by its name, and a function of another namespace as `NAME.NAMESPACE`.

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Client, Resource};

/// The namespaces with functions of the host.
#[derive(Clone)]
pub struct Scope {
    /// The cluster.
    pub client: Client,
    /// The host's own: of deployments by REST, and of their secrets.
    pub home: String,
    /// Whether functions may be in any other namespace too.
    pub everywhere: bool,
}

gshare_core::debug_fields!(Scope { home, everywhere });

impl Scope {
    /// The objects of all its namespaces.
    pub fn api<K: Resource<Scope = NamespaceResourceScope, DynamicType: Default>>(&self) -> Api<K> {
        match self.everywhere {
            true => Api::all(self.client.clone()),
            false => Api::namespaced(self.client.clone(), &self.home),
        }
    }

    /// The objects beside a function, in its namespace.
    pub fn beside<K: Resource<Scope = NamespaceResourceScope, DynamicType: Default>>(
        &self,
        service: &str,
    ) -> Api<K> {
        Api::namespaced(self.client.clone(), self.namespace_of(service))
    }

    /// The function of an object. A name with a dot is no function's; it is known with its namespace, so that it equals no other.
    pub fn service(&self, name: &str, namespace: Option<&str>) -> String {
        let namespace = namespace.unwrap_or(&self.home);
        if namespace == self.home && !name.contains('.') {
            return name.to_owned();
        }
        format!("{name}.{namespace}")
    }

    /// The namespace of a function.
    pub fn namespace_of<'a>(&'a self, service: &'a str) -> &'a str {
        service.rsplit_once('.').map_or(&self.home, |(_, namespace)| namespace)
    }
}
