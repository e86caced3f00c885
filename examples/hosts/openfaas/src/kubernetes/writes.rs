//! Writes to the API server.

use kube::api::PostParams;

/// A creation or a replacement under the name of this program.
pub fn post(manager: &str) -> PostParams {
    PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() }
}

/// Longest wait for the answer to a write.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);

/// The answer to a write, or an error after some seconds without one: the server may be cut off.
///
/// # Errors
/// The API server's, or that it does not answer.
pub async fn answered<T>(write: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let late = || kube::Error::Service(format!("no answer within {} s", ANSWER.as_secs()).into());
    tokio::time::timeout(ANSWER, write).await.unwrap_or_else(|_| Err(late()))
}
