//! PTX texts: kernels are declared by `.entry`, variables by `.global` and `.const`.

use super::Names;

/// The names in a text.
pub(super) fn names(text: &str) -> Names {
    let mut names = Names::default();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$' || c == '%';
    let text: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    for line in &text {
        if let Some((_, rest)) = line.split_once(".entry") {
            let name: String = rest.trim_start().chars().take_while(|c| is_name(*c)).collect();
            if !name.is_empty() {
                names.kernels.insert(name);
            }
        } else if (line.contains(".global") || line.contains(".const "))
            && let Some((name, size)) = read_global(line)
        {
            names.globals.insert(name, size);
        }
    }
    // A name may stand on the line after `.entry`.
    let mut words = text.iter().flat_map(|line| line.split_whitespace());
    while let Some(word) = words.next() {
        if word == ".entry"
            && let Some(next) = words.next()
        {
            let name: String = next.chars().take_while(|c| is_name(*c)).collect();
            if !name.is_empty() {
                names.kernels.insert(name);
            }
        }
    }
    names
}

/// `.visible .global .align 4 .b8 name[16];` -> (name, 16).
fn read_global(line: &str) -> Option<(String, u64)> {
    let declaration = line.split(['=', ';']).next()?.trim();
    let name_part = declaration.split_whitespace().last()?;
    let (name, count) = match name_part.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(1)),
        None => (name_part, 1),
    };
    let width = declaration
        .split_whitespace()
        .filter_map(|w| w.strip_prefix('.'))
        .filter_map(|w| w.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<u64>().ok())
        .find(|bits| matches!(bits, 8 | 16 | 32 | 64 | 128))?;
    (!name.starts_with('.')).then(|| (name.to_owned(), width / 8 * count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_names_and_globals_are_read() {
        let ptx = "// a comment .entry no\n.version 7.0\n.visible .entry spin_10us(\n.param .u64 p\n)\n{ret;}\n\
                   .entry\n  second ( )\n.visible .global .align 4 .b8 table[16];\n.global .u32 one;\n";
        let code = names(ptx);
        assert_eq!(code.kernels.into_iter().collect::<Vec<_>>(), ["second", "spin_10us"]);
        assert_eq!(
            code.globals.into_iter().collect::<Vec<_>>(),
            [("one".to_owned(), 4), ("table".to_owned(), 16)]
        );
    }
}
