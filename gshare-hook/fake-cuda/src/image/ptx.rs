//! PTX texts: kernels are declared by `.entry`, variables by `.global` and `.const`.

use super::Names;

/// The names in a text.
pub(super) fn names(text: &str) -> Names {
    let mut names = Names::default();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$' || c == '%';
    // The kernel declared last, and whether `.entry` ended a line: the kernel's name may follow on the next.
    let (mut kernel, mut declares) = (None, false);
    for line in text.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        let declared = line.split_once(".entry").map(|(_, rest)| rest).or(declares.then_some(line));
        if let Some(rest) = declared {
            let name: String = rest.trim_start().chars().take_while(|c| is_name(*c)).collect();
            declares = name.is_empty();
            if !declares {
                names.kernels.entry(name.clone()).or_default();
                kernel = Some(name);
            }
        }
        if line.contains(".func") {
            kernel = None;
        }
        let shape = kernel.as_ref().and_then(|name| names.kernels.get_mut(name));
        if let (Some(shape), Some((_, most))) = (shape, line.split_once(".maxntid")) {
            let numbers = most.split([',', ' ', '\t', '{', ';']).filter(|word| !word.is_empty());
            shape.limit(numbers.map_while(|word| word.parse().ok()).take(3));
        } else if (line.contains(".global") || line.contains(".const "))
            && let Some((name, size)) = read_global(line)
        {
            names.globals.insert(name, size);
        } else if line.trim_start().starts_with(".shared")
            && let Some(shape) = kernel.as_ref().and_then(|name| names.kernels.get_mut(name))
            && let Some((_, size)) = read_global(line)
        {
            shape.shared = shape.shared.saturating_add(u32::try_from(size).unwrap_or(u32::MAX));
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
    use super::super::Shape;
    use super::*;

    #[test]
    fn ptx_names_and_globals_are_read() {
        let ptx = "// a comment .entry no\n.version 7.0\n.visible .entry spin_10us(\n.param .u64 p\n)\n{ret;}\n\
                   .entry\n  second ( )\n.visible .global .align 4 .b8 table[16];\n.global .u32 one;\n";
        let code = names(ptx);
        let kernels: Vec<&str> = code.kernels.keys().map(String::as_str).collect();
        assert_eq!(kernels, ["second", "spin_10us"]);
        assert_eq!(
            code.globals.into_iter().collect::<Vec<_>>(),
            [("one".to_owned(), 4), ("table".to_owned(), 16)]
        );
    }

    #[test]
    fn what_a_kernel_says_of_its_launches_is_read() {
        let ptx = ".visible .entry first(.param .u64 a) .maxntid 256, 2, 1\n{\n.shared .align 4 .b8 tile[512];\nret;}\n\
                   .visible .entry second()\n{\nst.shared.u32 [tile], 1;\nret;}\n";
        let code = names(ptx);
        assert_eq!(code.kernels["first"], Shape { threads: 512, shared: 512 });
        assert_eq!(code.kernels["second"], Shape::default());
    }
}
