//! Rectangles in basis points, and the set of maximal free rectangles of one GPU.
//!
//! A free rectangle is *maximal* when no other free rectangle contains it. The set of all maximal rectangles describes the
//! free space completely: a demand fits the GPU exactly when it fits one of them.
//!
//! # Algorithm
//! [`FreeSet::occupy`] (after FaST-GShare, Algorithm 2): each free rectangle that meets the new placement is replaced by up
//! to four pieces beside it. A piece ends at the placement, so only a rectangle that also touches the placement can contain
//! it: a kept rectangle, or another piece on the same side. It is contained if the other rectangle covers the piece's
//! source except beyond the cut edge. One comparison of four edges decides this for all four pieces.
//!
//! [`FreeSet::vacate`]: every rectangle that becomes maximal meets the freed area. So start from the whole GPU, cut out
//! each remaining placement, and *drop every piece that does not meet the freed area at once*; the result is exactly the
//! set of new rectangles. Old rectangles inside a new rectangle go, and the rest stays. A placement along a whole side of
//! the freed area is a wall to all new rectangles. So the start is only the space between such walls, and most placements
//! lie outside.
//!
//! Worked example: a 10 x 10 GPU with a placement at x 0..4, y 0..10 and another at x 4..7, y 0..5. Free: 4..10 x 5..10 and
//! 7..10 x 0..10. When the second leaves: start from 0..10 x 0..10, cut out the first, get 4..10 x 0..10, which meets the
//! freed area; both old rectangles lie inside it, so it alone remains.
//!
//! # Cost
//! `n` placements have at most `O(n^2)` maximal rectangles; with eight placements of GPU-like sizes there are one to eight.
//! Both operations are quadratic in that small number and allocate nothing.

use crate::pack::Rectangle;
use gshare_core::{Quota, SmShare};

use super::list::List;

/// The longest side: a whole GPU.
const WHOLE: u16 = 10_000;
/// Bits of a side.
pub(crate) const SIDE_BITS: u32 = 14;
/// The top bit of each of the four fields of a [`Rect`].
const GUARD: u64 = 0x8000_8000_8000_8000;
/// One in each field.
const ONES: u64 = 0x0001_0001_0001_0001;

/// A rectangle in basis points: x and w along time, y and h along SMs. Edges are at most 10 000.
///
/// The two tests below are what packing spends its time on, so the four edges share one word, 16 bits each: left,
/// bottom, and the distances of right and top from 10 000. Each is at most 10 000, so the top bit of a field is free
/// to catch the borrow of a subtraction, and four comparisons become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Rect(u64);

#[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
impl Rect {
    pub(crate) const fn new(x: u16, y: u16, w: u16, h: u16) -> Self {
        Self::of_edges(x, y, x + w, y + h)
    }

    const fn of_edges(x: u16, y: u16, right: u16, top: u16) -> Self {
        Self(x as u64 | (y as u64) << 16 | ((WHOLE - right) as u64) << 32 | ((WHOLE - top) as u64) << 48)
    }

    pub(crate) const fn x(self) -> u16 {
        self.0 as u16
    }

    pub(crate) const fn y(self) -> u16 {
        (self.0 >> 16) as u16
    }

    pub(crate) const fn right(self) -> u16 {
        WHOLE - (self.0 >> 32) as u16
    }

    pub(crate) const fn top(self) -> u16 {
        WHOLE - (self.0 >> 48) as u16
    }

    pub(crate) const fn w(self) -> u16 {
        self.right() - self.x()
    }

    pub(crate) const fn h(self) -> u16 {
        self.top() - self.y()
    }

    /// Width and height in one word, to compare both at once.
    pub(crate) const fn size(self) -> u32 {
        const SIDES: u32 = (WHOLE as u32) << 16 | WHOLE as u32;
        SIDES - self.0 as u32 - (self.0 >> 32) as u32
    }

    /// One of 64 bits, the same for all rectangles of a size.
    pub(crate) const fn size_bit(self) -> u64 {
        // Fibonacci hashing, which spreads sizes that differ by multiples of a power of two.
        1 << (self.size().wrapping_mul(0x9E37_79B1) >> 26)
    }

    /// Whether a rectangle of this [`Rect::size`] fits inside: both sides are compared at once.
    pub(crate) const fn holds(self, size: u32) -> bool {
        const GUARD: u32 = 0x8000_8000;
        (self.size() | GUARD).wrapping_sub(size) & GUARD == GUARD
    }

    pub(crate) const fn area(self) -> u32 {
        self.w() as u32 * self.h() as u32
    }

    pub(crate) fn short_side(self) -> u16 {
        self.w().min(self.h())
    }

    /// Area first, shorter side second: the order of best area fit, in one number.
    #[inline]
    pub(crate) fn extent(self) -> u64 {
        u64::from(self.area()) << SIDE_BITS | u64::from(self.short_side())
    }

    /// A w x h rectangle in the corner of a hole: the lowest, then leftmost, of the `holes` with this extent that hold it.
    #[inline]
    pub(crate) fn in_the_lowest(holes: &[Self], extent: u64, w: u16, h: u16) -> Option<Self> {
        let size = Self::new(0, 0, w, h).size();
        let short = extent as u16 % (1 << SIDE_BITS);
        let long = ((extent >> SIDE_BITS) as u32 / u32::from(short)) as u16;
        // A rectangle of this extent has one of two sizes.
        let sizes = [Self::new(0, 0, long, short), Self::new(0, 0, short, long)];
        let [lying, standing] = sizes.map(|rect| if rect.holds(size) { rect.size() } else { u32::MAX });
        // No branch here: its outcome would be as good as random.
        let least = holes.iter().fold(u32::MAX, |least, hole| {
            let other = u32::from((hole.size() != lying) & (hole.size() != standing));
            least.min(hole.0 as u32 | other.wrapping_neg())
        });
        (least != u32::MAX).then(|| Self::new(least as u16, (least >> 16) as u16, w, h))
    }

    /// Right, top and the distances of left and bottom, for the comparison in [`Rect::meets`].
    const fn opposite(self) -> u64 {
        const SIDES: u64 = WHOLE as u64 * ONES;
        SIDES - self.0.rotate_left(32)
    }

    /// Whether the two share some area (an edge is none).
    pub(crate) const fn meets(self, other: Self) -> bool {
        ((other.opposite() - ONES) | GUARD).wrapping_sub(self.0) & GUARD == GUARD
    }

    /// Whether the two share some area or some of an edge (or a corner).
    const fn touches(self, other: Self) -> bool {
        (other.opposite() | GUARD).wrapping_sub(self.0) & GUARD == GUARD
    }

    pub(crate) const fn contains(self, other: Self) -> bool {
        (other.0 | GUARD).wrapping_sub(self.0) & GUARD == GUARD
    }

    /// `self` up to `wall`, if `wall` covers one whole side of `freed`: then no free rectangle that meets `freed` reaches
    /// past it.
    #[inline]
    fn beside(self, wall: Self, freed: Self) -> Self {
        const LEFT: u64 = 0x8000;
        const BELOW: u64 = LEFT << 16;
        const RIGHT: u64 = BELOW << 16;
        const ABOVE: u64 = RIGHT << 16;
        let (mut x, mut y, mut right, mut top) = (self.x(), self.y(), self.right(), self.top());
        // The sides of `wall` that lie at least as far out as the sides of `freed`. The two share no area.
        match (freed.0 | GUARD).wrapping_sub(wall.0) & GUARD {
            sides if sides == GUARD - RIGHT => x = x.max(wall.right()),
            sides if sides == GUARD - LEFT => right = right.min(wall.x()),
            sides if sides == GUARD - ABOVE => y = y.max(wall.top()),
            sides if sides == GUARD - BELOW => top = top.min(wall.y()),
            _ => return self,
        }
        Self::of_edges(x, y, right, top)
    }

    /// The guard of the only edge of `self` beyond the same edge of `other`; 0 with no such edge, or with several.
    #[inline]
    const fn only_beyond(self, other: Self) -> u64 {
        let beyond = !(self.0 | GUARD).wrapping_sub(other.0) & GUARD;
        if beyond & beyond.wrapping_sub(1) == 0 { beyond } else { 0 }
    }

    /// The largest rectangles of `self` left of, right of, below and above `hole`, which must meet `self`. The flag of each
    /// is false if there is no such rectangle, or `but` has the guard of its cut edge.
    #[inline]
    const fn cut(self, hole: Self, but: u64) -> [(Self, bool); 4] {
        // The edges of `hole` that lie farther in than the edges of `self`: the piece beside such an edge is cut at the
        // opposite edge.
        let within = (hole.0 | GUARD).wrapping_sub(ONES).wrapping_sub(self.0) & GUARD & !but.rotate_left(32);
        let beyond = hole.opposite();
        [
            self.up_to(beyond, 2, within, 0),
            self.up_to(beyond, 0, within, 2),
            self.up_to(beyond, 3, within, 1),
            self.up_to(beyond, 1, within, 3),
        ]
    }

    /// `self` with one edge, a field of the word, as in `edges`, and whether the guard of another field is set.
    const fn up_to(self, edges: u64, edge: u32, guards: u64, guard: u32) -> (Self, bool) {
        let field = 0xFFFF << (edge * 16);
        (Self(self.0 & !field | edges & field), guards >> (guard * 16 + 15) & 1 == 1)
    }
}

impl Rect {
    /// The public form. Sides of a rectangle inside a GPU are at most the whole.
    pub(crate) fn public(self) -> Rectangle {
        let quota = |points| Quota::new(points).unwrap_or(Quota::WHOLE);
        let sm = |points| SmShare::new(points).unwrap_or(SmShare::WHOLE);
        Rectangle {
            time_offset: quota(self.x()),
            sm_offset: sm(self.y()),
            quota: quota(self.w()),
            sm: sm(self.h()),
        }
    }

    /// `None` when it reaches beyond a whole GPU.
    pub(crate) fn from_public(rectangle: Rectangle) -> Option<Self> {
        let (x, y) = (rectangle.time_offset.get(), rectangle.sm_offset.get());
        let (right, top) = (x + rectangle.quota.get(), y + rectangle.sm.get());
        (right <= WHOLE && top <= WHOLE).then(|| Self::of_edges(x, y, right, top))
    }
}

/// The corner of `hole` in which a w x h rectangle touches most of the outlines of `bin` and of `used`; ties go to the
/// lowest, then leftmost. Answers with the length touched.
///
/// A rectangle in the hole can only touch others across the hole's own sides, so lengths are summed per side: for the left
/// and right sides along the lower and the upper h, for the lower and upper sides along the left and the right w.
pub(crate) fn best_corner(
    bin: Rect,
    used: impl Iterator<Item = Rect>,
    hole: Rect,
    w: u16,
    h: u16,
) -> (u32, Rect) {
    let (x, y, right, top) = (hole.x(), hole.y(), hole.right(), hole.top());
    let yes = |condition: bool, length: u16| u32::from(condition) * u32::from(length);
    // Along the lower h or left w, and along the upper h or right w.
    let mut sides = [
        [yes(x == bin.x(), h); 2],
        [yes(right == bin.right(), h); 2],
        [yes(y == bin.y(), w); 2],
        [yes(top == bin.top(), w); 2],
    ];
    // Only a placement that touches the hole can touch a rectangle in it.
    for other in used.filter(|other| other.touches(hole)) {
        let overlap = |low: u16, high: u16, from: u16, to: u16| high.min(to).saturating_sub(low.max(from));
        let (low, high) = (other.y(), other.top());
        let along_y = [overlap(low, high, y, y + h), overlap(low, high, top - h, top)];
        let (low, high) = (other.x(), other.right());
        let along_x = [overlap(low, high, x, x + w), overlap(low, high, right - w, right)];
        let at = [other.right() == x, other.x() == right, other.top() == y, other.y() == top];
        for (side, at) in at.into_iter().enumerate() {
            let along = if side < 2 { along_y } else { along_x };
            sides[side][0] += yes(at, along[0]);
            sides[side][1] += yes(at, along[1]);
        }
    }
    let [left_of, right_of, below, above] = sides;
    // A rectangle as wide or high as the hole touches the opposite side too.
    let (wide, high) = (u32::from(right - x == w), u32::from(top - y == h));
    let touched = [
        left_of[0] + below[0] + wide * right_of[0] + high * above[0],
        right_of[0] + below[1] + wide * left_of[0] + high * above[1],
        left_of[1] + above[0] + wide * right_of[1] + high * below[0],
        right_of[1] + above[1] + wide * left_of[1] + high * below[1],
    ];
    let mut best = 0;
    for corner in 1..4 {
        // The corners come lowest first, then leftmost.
        if touched[corner] > touched[best] {
            best = corner;
        }
    }
    let corner_x = if best % 2 == 0 { x } else { right - w };
    let corner_y = if best < 2 { y } else { top - h };
    (touched[best], Rect::new(corner_x, corner_y, w, h))
}

/// The work space for changes of one GPU's free set, with the result of the last change.
#[derive(Debug, Clone, Default)]
pub(crate) struct FreeSet {
    /// Free rectangles after the change: kept rectangles first, then new ones.
    pub(crate) after: List,
    /// Number of kept rectangles.
    pub(crate) stay: usize,
    /// Free rectangles that the change removed.
    pub(crate) gone: List,
    near: List,
    grown: List,
    spare: List,
}

impl FreeSet {
    /// Free rectangles that the change added.
    pub(crate) fn new_ones(&self) -> &[Rect] {
        &self.after[self.stay..]
    }

    /// Takes `taken` out of `free`.
    pub(crate) fn occupy(&mut self, free: &[Rect], taken: Rect) {
        self.stay = cut_away(free, taken, &mut self.after, &mut self.gone, &mut self.near, |_| true);
    }

    /// Gives `freed` back to `free`, on a GPU `bin` with the remaining placements `used`.
    pub(crate) fn vacate(
        &mut self,
        bin: Rect,
        free: &[Rect],
        used: impl Iterator<Item = Rect> + Clone,
        freed: Rect,
    ) {
        let Self { after, stay, gone, near, grown, spare } = self;
        grown.start(1).push_if(used.clone().fold(bin, |room, placed| room.beside(placed, freed)), true);
        for placed in used {
            if grown.iter().fold(false, |met, rect| met | rect.meets(placed)) {
                cut_away(grown, placed, spare, gone, near, |piece| piece.meets(freed));
                core::mem::swap(grown, spare);
            }
        }
        part(free, after, gone, |rect| {
            grown.iter().fold(false, |inside, larger| inside | larger.contains(rect))
        });
        *stay = after.len();
        after.extend(grown);
    }
}

#[inline]
fn part(rects: &[Rect], stay: &mut List, gone: &mut List, goes: impl Fn(Rect) -> bool) {
    let (mut stay, mut gone) = (stay.start(rects.len()), gone.start(rects.len()));
    for rect in rects {
        let goes = goes(*rect);
        stay.push_if(*rect, !goes);
        gone.push_if(*rect, goes);
    }
}

/// Cuts `hole` out of `rects`, none of which contains another. Fills `out` with the rectangles that do not meet `hole`, and
/// returns their number. Moves the others to `gone`, and appends each piece of them that is wanted and that no other
/// rectangle of `out` contains.
#[inline]
fn cut_away(
    rects: &[Rect],
    hole: Rect,
    out: &mut List,
    gone: &mut List,
    near: &mut List,
    wanted: impl Fn(Rect) -> bool,
) -> usize {
    let (mut stay, mut met, mut close) =
        (out.start(rects.len()), gone.start(rects.len()), near.start(rects.len()));
    for rect in rects {
        let meets = rect.meets(hole);
        stay.push_if(*rect, !meets);
        met.push_if(*rect, meets);
        close.push_if(*rect, rect.touches(hole));
    }
    drop((stay, met, close));
    let stay = out.len();
    let mut out = out.more(4 * gone.len());
    for rect in gone.iter() {
        let covered = near.iter().fold(0, |covered, other| covered | rect.only_beyond(*other));
        for (piece, is_one) in rect.cut(hole, covered) {
            out.push_if(piece, is_one & wanted(piece));
        }
    }
    stay
}

/// The maximal free rectangles of `bin` beside `used`, by definition: every free rectangle with sides on edges of the bin
/// or of placements that no other free rectangle contains. Slow; the oracle of the tests.
#[cfg(test)]
pub(crate) fn maximal_by_definition(bin: Rect, used: &[Rect]) -> Vec<Rect> {
    let edges = |of: fn(Rect) -> [u16; 2]| {
        let mut edges: Vec<u16> = used.iter().copied().chain([bin]).flat_map(of).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    };
    let xs = edges(|rect| [rect.x(), rect.right()]);
    let ys = edges(|rect| [rect.y(), rect.top()]);
    let mut free = Vec::new();
    for (i, x) in xs.iter().enumerate() {
        for right in &xs[i + 1..] {
            for (j, y) in ys.iter().enumerate() {
                for top in &ys[j + 1..] {
                    let rect = Rect::new(*x, *y, right - x, top - y);
                    if !used.iter().any(|placed| placed.meets(rect)) {
                        free.push(rect);
                    }
                }
            }
        }
    }
    let mut maximal: Vec<Rect> = free
        .iter()
        .copied()
        .filter(|rect| !free.iter().any(|other| other != rect && other.contains(*rect)))
        .collect();
    maximal.sort_unstable();
    maximal
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_worked_example_of_the_module() {
        let mut set = FreeSet::default();
        let bin = Rect::new(0, 0, 10, 10);
        let (first, second) = (Rect::new(0, 0, 4, 10), Rect::new(4, 0, 3, 5));
        set.occupy(&[bin], first);
        assert_eq!(*set.after, [Rect::new(4, 0, 6, 10)]);
        let free = set.after.to_vec();
        set.occupy(&free, second);
        let free = set.after.to_vec();
        assert_eq!(free, [Rect::new(7, 0, 3, 10), Rect::new(4, 5, 6, 5)]);
        set.vacate(bin, &free, [first].into_iter(), second);
        assert_eq!((set.stay, set.new_ones()), (0, &[Rect::new(4, 0, 6, 10)][..]));
    }

    fn rect() -> impl Strategy<Value = Rect> {
        // Coarse and fine, so that edges coincide often and the whole range is used.
        let edge = prop_oneof![(0u16..=10).prop_map(|tenth| tenth * 1_000), 0u16..=10_000];
        (edge.clone(), edge.clone(), edge.clone(), edge)
            .prop_filter("has area", |(a, b, c, d)| a != c && b != d)
            .prop_map(|(a, b, c, d)| Rect::of_edges(a.min(c), b.min(d), a.max(c), b.max(d)))
    }

    proptest! {
        /// One subtraction says what four comparisons say.
        #[test]
        fn packed_tests_equal_the_comparisons(a in rect(), b in rect()) {
            let meets = a.x() < b.right() && b.x() < a.right() && a.y() < b.top() && b.y() < a.top();
            let touches = a.x() <= b.right() && b.x() <= a.right() && a.y() <= b.top() && b.y() <= a.top();
            let contains =
                a.x() <= b.x() && a.y() <= b.y() && b.right() <= a.right() && b.top() <= a.top();
            prop_assert_eq!((a.meets(b), a.touches(b), a.contains(b)), (meets, touches, contains));
            prop_assert_eq!(a.size() == b.size(), (a.w(), a.h()) == (b.w(), b.h()));
        }

        /// The free set equals the definition after any sequence of places and releases, and kept and removed rectangles
        /// account for every old rectangle.
        #[test]
        fn free_set_is_the_set_of_maximal_rectangles(
            steps in prop::collection::vec((any::<bool>(), any::<u16>(), 1u16..9, 1u16..9, any::<u16>()), 1..40),
            w in 4u16..16, h in 4u16..16,
        ) {
            let bin = Rect::new(0, 0, w, h);
            let (mut used, mut free) = (Vec::<Rect>::new(), vec![bin]);
            let mut set = FreeSet::default();
            for (place, pick, pw, ph, corner) in steps {
                if place {
                    let fits: Vec<Rect> = free.iter().copied().filter(|r| r.w() >= pw && r.h() >= ph).collect();
                    let Some(hole) = fits.get(usize::from(pick) % fits.len().max(1)) else { continue };
                    let x = hole.x() + corner % (hole.w() - pw + 1);
                    let y = hole.y() + (corner >> 8) % (hole.h() - ph + 1);
                    let taken = Rect::new(x, y, pw, ph);
                    set.occupy(&free, taken);
                    used.push(taken);
                } else if !used.is_empty() {
                    let freed = used.swap_remove(usize::from(pick) % used.len());
                    set.vacate(bin, &free, used.iter().copied(), freed);
                } else {
                    continue;
                }
                prop_assert_eq!(set.stay + set.gone.len(), free.len());
                free = set.after.to_vec();
                let mut sorted = free.clone();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, maximal_by_definition(bin, &used));
            }
        }
    }
}
