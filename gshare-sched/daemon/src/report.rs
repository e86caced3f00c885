//! How a program of gshare ends: its error on standard error, with each cause once, and no backtrace.

use std::error::Error;
use std::process::ExitCode;

/// The exit code of a program; an error is printed.
pub fn exit<E: AsRef<dyn Error>>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", told(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, each once. Many errors of libraries repeat their cause in their own text.
pub fn told(error: &dyn Error) -> String {
    let (mut text, mut next) = (String::new(), Some(error));
    while let Some(error) = next {
        let cause = error.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
        next = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        source: Option<Box<Failure>>,
    }

    #[test]
    fn a_cause_is_told_once() {
        let of = |texts: &[&'static str]| {
            let chain =
                texts.iter().rev().fold(None, |source, text| Some(Box::new(Failure { text, source })));
            super::told(&*chain.unwrap())
        };
        assert_eq!(of(&["config.toml", "no such file"]), "config.toml: no such file");
        assert_eq!(of(&["cannot read x: no such file", "no such file"]), "cannot read x: no such file");
        assert_eq!(of(&["--store x", "x: no such file", "no such file"]), "--store x: x: no such file");
    }
}
