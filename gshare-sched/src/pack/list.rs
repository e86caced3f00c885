//! A list for work space that is filled without branches.
//!
//! Whether a placement meets a rectangle is as good as random, and so is a branch on it: a misprediction costs more than
//! the test and the write. So each rectangle is written, and counted only if it belongs; the next write replaces a
//! rectangle that does not.

use core::ops::Deref;

use super::geometry::Rect;

/// A list of rectangles.
#[derive(Debug, Clone, Default)]
pub(crate) struct List {
    /// The list, followed by at least one spare element.
    items: Vec<Rect>,
    len: usize,
}

/// A list that is being filled. Its length stays in a register: the list's own is written and read again with each
/// rectangle, for all that a compiler knows of where they go.
#[derive(Debug)]
pub(crate) struct Filling<'a> {
    items: &'a mut [Rect],
    len: usize,
    kept: &'a mut usize,
}

impl Filling<'_> {
    /// Appends a rectangle if it is wanted. There must be room for it either way.
    #[inline]
    pub(crate) fn push_if(&mut self, rect: Rect, wanted: bool) {
        self.items[self.len] = rect;
        self.len += usize::from(wanted);
    }
}

impl Drop for Filling<'_> {
    #[inline]
    fn drop(&mut self) {
        *self.kept = self.len;
    }
}

impl List {
    /// The least room, so that a list that is short can be copied as a whole.
    const LEAST: usize = 16;

    /// Empties it and fills it with at most this many.
    #[inline]
    pub(crate) fn start(&mut self, most: usize) -> Filling<'_> {
        self.len = 0;
        self.more(most)
    }

    /// Fills it with at most this many more.
    #[inline]
    pub(crate) fn more(&mut self, most: usize) -> Filling<'_> {
        let room = self.len + most + 1;
        if self.items.len() < room {
            self.grow(room);
        }
        Filling { items: &mut self.items, len: self.len, kept: &mut self.len }
    }

    #[cold]
    fn grow(&mut self, room: usize) {
        self.items.resize(room.next_power_of_two().max(Self::LEAST), Rect::default());
    }

    pub(crate) fn extend(&mut self, rects: &[Rect]) {
        let mut more = self.more(rects.len());
        for rect in rects {
            more.push_if(*rect, true);
        }
    }

    /// The list with the rectangles that are stored behind it, and the length of the list.
    pub(crate) fn and_beyond(&self) -> (&[Rect], usize) {
        (&self.items, self.len)
    }
}

impl Deref for List {
    type Target = [Rect];

    #[inline]
    fn deref(&self) -> &[Rect] {
        &self.items[..self.len]
    }
}
