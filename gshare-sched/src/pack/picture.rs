//! How full a GPU is, in figures and as a picture.
//!
//! For any packer with rectangles at fixed places (in Dilu's packer all placements share offset 0).
//!
//! - *occupancy*: the area that placements hold, of the GPU's;
//! - *largest hole*: the largest free rectangle by area, ties by short side, then the lowest, then the leftmost;
//! - *fragmentation*: the part of the free area outside the largest hole: 0 while all that is free is one rectangle.
//!
//! Worked example: a GPU with 40 % x 12 % in a corner has an occupancy of 4.8 %. Its holes are 60 x 100 and 100 x 88; the
//! second is the largest hole, and the fragmentation is 1 - 8800 / 9520, 7.56 %.

use core::fmt::Write as _;

use crate::pack::{GpuSpec, Placement, Rectangle};
use gshare_core::BasisPoints;

use super::geometry::{FreeSet, Rect};

/// How full a GPU is. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Diagnosis {
    /// Part of the area that is held.
    #[cfg_attr(feature = "serde", serde(rename = "occupancy_bp"))]
    pub occupancy: BasisPoints,
    /// Part of the free area outside the largest hole.
    #[cfg_attr(feature = "serde", serde(rename = "fragmentation_bp"))]
    pub fragmentation: BasisPoints,
    /// The largest free rectangle; none on a full GPU.
    pub largest_hole: Option<Rectangle>,
    /// Number of maximal free rectangles.
    pub holes: usize,
}

/// How full a GPU with these placements is.
pub fn diagnose(spec: GpuSpec, placements: &[Placement]) -> Diagnosis {
    let bin = Rect::new(0, 0, spec.quota.get(), spec.sm.get());
    let holes = holes(bin, placements);
    let used: u64 = rects(placements).map(|rect| u64::from(rect.area())).sum();
    let whole = u64::from(bin.area());
    let free = whole.saturating_sub(used);
    let key = |hole: &Rect| (hole.area(), hole.short_side(), core::cmp::Reverse((hole.y(), hole.x())));
    let largest = holes.iter().copied().max_by_key(key);
    let scattered = free.saturating_sub(largest.map_or(0, |hole| u64::from(hole.area())));
    Diagnosis {
        occupancy: part(used, whole),
        fragmentation: part(scattered, free),
        largest_hole: largest.map(Rect::public),
        holes: holes.len(),
    }
}

/// The GPU in `columns` x `rows` characters, SMs upwards: each placement a letter in the order given, `.` free. A
/// character shows what lies at its middle.
pub fn text(spec: GpuSpec, placements: &[Placement], columns: u16, rows: u16) -> String {
    let rects: Vec<Rect> = rects(placements).collect();
    let mut picture = String::new();
    for row in (0..rows).rev() {
        picture.push('|');
        for column in 0..columns {
            let x = middle(column, columns, spec.quota.get());
            let y = middle(row, rows, spec.sm.get());
            let at = |rect: &Rect| rect.x() <= x && x < rect.right() && rect.y() <= y && y < rect.top();
            picture.push(rects.iter().position(at).map_or('.', letter));
        }
        picture.push_str("|\n");
    }
    picture
}

/// The letter of the `index`-th placement in [`text`]: A to Z, a to z, 0 to 9, then `#` for all the others.
pub fn letter(index: usize) -> char {
    (('A'..='Z').chain('a'..='z').chain('0'..='9')).nth(index).unwrap_or('#')
}

/// GPUs below each other as one SVG image: time to the right, SMs upwards, a rectangle per placement with a letter, and a legend of the
/// letters with the text that `label` gives each; holes are white.
pub fn svg<'a>(
    gpus: impl IntoIterator<Item = (&'a str, GpuSpec, &'a [Placement])>,
    label: impl Fn(&Placement) -> String,
) -> String {
    const SIDE: u32 = 400;
    const HEAD: u32 = 24;
    const LEFT: f64 = 18.0;
    const LINE: u32 = 13;
    /// Width of a character of the legend, at most.
    const LETTER: usize = 8;
    let scale = |points: u16| f64::from(points) * f64::from(SIDE) / 1e4;
    let mut body = String::new();
    let (mut top, mut longest) = (0, 0);
    for (title, spec, placements) in gpus {
        let (width, height) = (scale(spec.quota.get()), scale(spec.sm.get()));
        let below = f64::from(top + HEAD);
        // Writing into a text cannot fail.
        let _ = writeln!(
            body,
            r##"<text x="4" y="{}" font-size="13">{}</text>
<rect x="{LEFT}" y="{below}" width="{width}" height="{height}" fill="#fff" stroke="#000"/>
<text x="{LEFT}" y="{}" font-size="10">GPU time</text>
<text transform="translate(13,{}) rotate(-90)" font-size="10">SMs</text>"##,
            top + 16,
            escape(title),
            below + height + 11.0,
            below + height,
        );
        longest = longest.max(title.chars().count().saturating_sub(SIDE as usize / LETTER));
        for ((index, placement), line) in placements.iter().enumerate().zip(1u32..) {
            let rect = placement.rectangle;
            let (x, w, h) = (scale(rect.time_offset.get()), scale(rect.quota.get()), scale(rect.sm.get()));
            let y = below + height - scale(rect.sm_offset.get()) - h;
            let hue = index * 137 % 360;
            let text = label(placement);
            longest = longest.max(text.chars().count() + 2);
            let (text, letter) = (escape(&text), letter(index));
            let _ = writeln!(
                body,
                r##"<g><title>{text}</title><rect x="{}" y="{y}" width="{w}" height="{h}" fill="hsl({hue},60%,80%)" stroke="#333"/><text x="{}" y="{}" font-size="10">{letter}</text></g>
<text x="{}" y="{}" font-size="11">{letter} {text}</text>"##,
                x + LEFT,
                x + LEFT + 3.0,
                y + h.min(13.0) - 2.0,
                f64::from(SIDE) + LEFT + 8.0,
                top + HEAD + line * LINE,
            );
        }
        let lines = u32::try_from(placements.len()).unwrap_or(u32::MAX);
        top += HEAD + SIDE.max(lines.saturating_mul(LINE)) + 16;
    }
    let width = f64::from(SIDE) + LEFT + 16.0 + (longest * LETTER) as f64;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{top}\" font-family=\"sans-serif\">\n{body}</svg>\n"
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn rects(placements: &[Placement]) -> impl Iterator<Item = Rect> + '_ {
    placements.iter().filter_map(|placement| Rect::from_public(placement.rectangle))
}

fn holes(bin: Rect, placements: &[Placement]) -> Vec<Rect> {
    let mut set = FreeSet::default();
    let mut free = vec![bin];
    for rect in rects(placements) {
        set.occupy(&free, rect);
        free.clear();
        free.extend_from_slice(&set.after);
    }
    free
}

fn part(part: u64, whole: u64) -> BasisPoints {
    let points = (part * 10_000).checked_div(whole).unwrap_or(0).min(10_000);
    u16::try_from(points).ok().and_then(BasisPoints::new).unwrap_or(BasisPoints::WHOLE)
}

/// The middle of the `index`-th of `count` equal parts of `length`.
fn middle(index: u16, count: u16, length: u16) -> u16 {
    let middle = (2 * u32::from(index) + 1) * u32::from(length) / (2 * u32::from(count.max(1)));
    u16::try_from(middle).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::Demand;
    use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};

    fn placement(x: u16, y: u16, w: u16, h: u16) -> Placement {
        let quota = |percent| Quota::from_percent(percent).unwrap();
        let sm = |percent| SmShare::from_percent(percent).unwrap();
        let rectangle = Rectangle { time_offset: quota(x), sm_offset: sm(y), quota: quota(w), sm: sm(h) };
        let id = PlacementId::new(u32::from(x) * 100 + u32::from(y), 0);
        Placement::new(id, GpuId::new(0), rectangle, Demand::new(quota(w), sm(h)))
    }

    const WHOLE: GpuSpec = GpuSpec::new(Bytes::ZERO);

    #[test]
    fn the_worked_example_of_the_module() {
        let diagnosis = diagnose(WHOLE, &[placement(0, 0, 40, 12)]);
        assert_eq!(
            (diagnosis.occupancy.get(), diagnosis.fragmentation.get(), diagnosis.holes),
            (480, 756, 2)
        );
        assert_eq!(diagnosis.largest_hole, Some(placement(0, 12, 100, 88).rectangle));
    }

    #[test]
    fn an_empty_and_a_full_gpu() {
        let empty = diagnose(WHOLE, &[]);
        assert_eq!((empty.occupancy.get(), empty.fragmentation.get(), empty.holes), (0, 0, 1));
        let full = diagnose(WHOLE, &[placement(0, 0, 100, 50), placement(0, 50, 100, 50)]);
        assert_eq!((full.occupancy.get(), full.fragmentation.get(), full.largest_hole), (10_000, 0, None));
    }

    #[test]
    fn the_picture_shows_sms_upwards() {
        let picture = text(WHOLE, &[placement(0, 0, 50, 50), placement(50, 0, 50, 25)], 8, 4);
        assert_eq!(picture, "|........|\n|........|\n|AAAA....|\n|AAAABBBB|\n");
    }

    #[test]
    fn svg_is_well_formed_whatever_the_names() {
        let placements = [placement(0, 0, 50, 50)];
        let image = svg([("a <gpu>", WHOLE, &placements[..])], |_| "x & \"y\"".to_owned());
        assert!(image.starts_with("<svg ") && image.ends_with("</svg>\n"));
        assert!(image.contains("a &lt;gpu&gt;") && image.contains("x &amp; &quot;y&quot;"));
        assert_eq!(image.matches("<rect").count(), 2);
        assert!(
            image.contains(">A x &amp;") && image.contains(">GPU time<") && image.contains(">SMs<"),
            "{image}"
        );
    }

    #[test]
    fn an_svg_is_as_wide_as_its_longest_text() {
        let width = |title: &str| -> f64 {
            let image = svg([(title, WHOLE, &[][..])], |_| String::new());
            image.split('"').nth(3).unwrap().parse().unwrap()
        };
        assert!(width(&"x".repeat(100)) >= width("x") + 300.0);
    }
}
