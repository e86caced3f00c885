//! Readers of recorded load: counts per function and minute, and one rate per line.

use std::io::{BufRead, Read};

/// A trace was refused. Each variant names the line (from 1) and the field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file is not readable.
    #[error("line {line}: {cause}")]
    Read {
        /// The number of the line.
        line: u64,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The text is not CSV, or a row and the header differ in the number of fields.
    #[error("line {line}: {cause}")]
    Csv {
        /// The number of the line.
        line: u64,
        /// The fault in the line.
        cause: csv::Error,
    },
    /// A required column is missing.
    #[error("line 1: no column {field}")]
    NoColumn {
        /// The name of the column.
        field: &'static str,
    },
    /// A field is not a number of the expected kind.
    #[error("line {line}, field {field}: `{text}` is not {expected}")]
    Number {
        /// The number of the line.
        line: u64,
        /// The name of the column.
        field: String,
        /// The text in the file.
        text: String,
        /// The expected kind of text.
        expected: &'static str,
    },
}

/// Calls of one function, minute by minute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionCounts {
    /// The function's name in the trace (a hash).
    pub function: String,
    /// The calls in each minute.
    pub counts: Vec<u32>,
}

/// Reads a trace shaped like Azure Functions 2019: a CSV with a header, the column `HashFunction`, and one column of counts per
/// minute, called `1`, `2`, … or `minute_1`, `minute_2`, …. Other columns are ignored.
pub fn read_azure_counts(input: impl Read) -> Result<Vec<FunctionCounts>, TraceError> {
    let mut reader = csv::Reader::from_reader(input);
    let at_line = |source: csv::Error| TraceError::Csv {
        line: source.position().map_or(1, csv::Position::line),
        cause: source,
    };
    let header = reader.headers().map_err(at_line)?.clone();
    let name = header
        .iter()
        .position(|column| column == "HashFunction")
        .ok_or(TraceError::NoColumn { field: "HashFunction" })?;
    let is_minute = |column: &str| {
        let number = column.strip_prefix("minute_").unwrap_or(column);
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let minutes: Vec<usize> =
        header.iter().enumerate().filter(|(_, column)| is_minute(column)).map(|(index, _)| index).collect();
    if minutes.is_empty() {
        return Err(TraceError::NoColumn { field: "1 or minute_1" });
    }
    let mut functions = Vec::new();
    for record in reader.records() {
        let record = record.map_err(at_line)?;
        let field = |index: usize| record.get(index).unwrap_or_default();
        let count = |&index: &usize| {
            field(index).trim().parse::<u32>().map_err(|_| TraceError::Number {
                line: record.position().map_or(0, csv::Position::line),
                field: header.get(index).unwrap_or_default().to_owned(),
                text: field(index).to_owned(),
                expected: "a count of calls (0 to 4294967295)",
            })
        };
        let counts = minutes.iter().map(count).collect::<Result<_, _>>()?;
        functions.push(FunctionCounts { function: field(name).to_owned(), counts });
    }
    Ok(functions)
}

/// Reads one rate per line (requests per second, or relative to one another), and skips empty lines.
pub fn read_rates(input: impl BufRead) -> Result<Vec<f64>, TraceError> {
    let mut rates = Vec::new();
    for (line, text) in (1..).zip(input.lines()) {
        let text = text.map_err(|cause| TraceError::Read { line, cause })?;
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        match text.parse::<f64>() {
            Ok(rate) if rate.is_finite() && rate >= 0.0 => rates.push(rate),
            _ => {
                return Err(TraceError::Number {
                    line,
                    field: "rate".to_owned(),
                    text: text.to_owned(),
                    expected: "a finite number of at least 0",
                });
            }
        }
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_the_minutes_are_read_and_other_columns_are_not() {
        let named = "HashFunction,HashOwner,HashApp,minute_1,minute_2\nf,o,a,1,0\ng,o,a,0,7\n";
        let numbered = "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,1,0\no,a,g,timer,0,7\n";
        let functions = read_azure_counts(named.as_bytes()).unwrap();
        assert_eq!(functions, read_azure_counts(numbered.as_bytes()).unwrap());
        assert_eq!(functions[1], FunctionCounts { function: "g".to_owned(), counts: vec![0, 7] });
    }

    #[test]
    fn errors_name_line_and_field() {
        let text = |csv: &str| read_azure_counts(csv.as_bytes()).unwrap_err().to_string();
        assert_eq!(
            text("HashFunction,1,2\nf,1,2\ng,3,x\n"),
            "line 3, field 2: `x` is not a count of calls (0 to 4294967295)"
        );
        assert_eq!(text("HashOwner,1\no,1\n"), "line 1: no column HashFunction");
        assert_eq!(text("HashFunction\nf\n"), "line 1: no column 1 or minute_1");
        assert!(text("HashFunction,1\nf\n").starts_with("line 2: "));
        let rates = |text: &str| read_rates(text.as_bytes()).map_err(|error| error.to_string());
        assert_eq!(rates("0.5\n\n2\n"), Ok(vec![0.5, 2.0]));
        let expected = "line 2, field rate: `-1` is not a finite number of at least 0";
        assert_eq!(rates("1\n-1\n"), Err(expected.to_owned()));
        assert!(rates("NaN\n").is_err() && rates("many\n").is_err());
    }
}
