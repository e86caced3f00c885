//! The hook in `LD_PRELOAD`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// The loader would not find the library: it takes these characters for the end of a name, at most says so on standard error,
/// and starts the program without the library.
#[derive(Debug, thiserror::Error)]
#[error("LD_PRELOAD cannot name {path}: its path has a space or a colon in it; put the library elsewhere")]
pub struct PreloadError {
    /// The library.
    pub path: PathBuf,
}

/// The value of `LD_PRELOAD` for a library before all libraries preloaded already.
///
/// # Errors
/// When the path has a space or a colon in it.
pub fn preload(library: &Path) -> Result<OsString, PreloadError> {
    let ends_a_name = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    if library.as_os_str().as_bytes().iter().any(ends_a_name) {
        return Err(PreloadError { path: library.to_owned() });
    }
    let mut value = library.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_PRELOAD").filter(|text| !text.is_empty()) {
        value.push(":");
        value.push(rest);
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        for path in ["/opt/g share/libgshare_hook.so", "/a:b/libgshare_hook.so", "/a\tb.so"] {
            let text = preload(Path::new(path)).unwrap_err().to_string();
            assert!(text.contains(path) && text.contains("a space or a colon"), "{text}");
        }
        let value = preload(Path::new("/opt/libgshare_hook.so")).unwrap();
        assert!(value.as_bytes().starts_with(b"/opt/libgshare_hook.so"));
    }
}
