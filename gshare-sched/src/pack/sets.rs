//! Many ordered sets of integers in one arena.
//!
//! # Problem
//! The index of the packer keeps thousands of small ordered sets (one per class of free rectangles) that change on every
//! call. A `BTreeSet` for each would allocate and free nodes all the time. Here all sets share two vectors of nodes with
//! free lists, so a packer allocates nothing once its pool has stopped growing.
//!
//! # Algorithm
//! A B+ tree per set: keys in leaves of 30, leaves linked both ways, inner nodes of 20. A node that falls under a third is
//! merged with a neighbour when both fit in three quarters of a node, so inserts and removals at a border do not thrash.
//! `keys[0]` of an inner node is never read: its first child takes everything below `keys[1]`.
//!
//! # Invariants
//! Leaves are sorted and never empty; all leaves of a set lie at the same depth; a separator is at most the first key to
//! its right and above the last key to its left.
//!
//! # Cost
//! `O(log n)` node visits per call, one to four in practice; 8 bytes a key and at most 256 bytes a set on top.

const LEAF: usize = 30;
const INNER: usize = 20;
const NONE: u32 = u32::MAX;
/// 20^7 leaves are more than a `u32` numbers, since a tree grows a level only when its root is full.
const MAX_HEIGHT: usize = 12;

/// Four cache lines, the length in the first.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
struct Leaf {
    len: u32,
    previous: u32,
    next: u32,
    keys: [u64; LEAF],
}

#[derive(Debug, Clone)]
struct Inner {
    keys: [u64; INNER],
    kids: [u32; INNER],
    len: u32,
}

/// A set: its root node and the number of inner levels above the leaves.
#[derive(Debug, Clone, Copy)]
struct Root {
    node: u32,
    height: u32,
}

/// A position in a set. Valid until the next change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor {
    leaf: u32,
    position: u32,
}

/// Ordered sets, numbered from 0.
#[derive(Debug, Clone)]
pub(crate) struct Sets {
    roots: Vec<Root>,
    leaves: Vec<Leaf>,
    inners: Vec<Inner>,
    free_leaf: u32,
    free_inner: u32,
}

/// The way from the root to a leaf: for each inner level the node and the position of the child taken.
type Path = [(u32, u32); MAX_HEIGHT];

#[expect(clippy::cast_possible_truncation, reason = "node counts and positions fit u32 by construction")]
impl Sets {
    /// `count` empty sets.
    pub(crate) fn new(count: usize) -> Self {
        Self {
            roots: vec![Root { node: NONE, height: 0 }; count],
            leaves: Vec::new(),
            inners: Vec::new(),
            free_leaf: NONE,
            free_inner: NONE,
        }
    }

    pub(crate) fn is_empty(&self, set: usize) -> bool {
        self.roots[set].node == NONE
    }

    /// The smallest key.
    pub(crate) fn first(&self, set: usize) -> Option<Cursor> {
        let root = self.roots[set];
        if root.node == NONE {
            return None;
        }
        let mut node = root.node;
        for _ in 0..root.height {
            node = self.inners[node as usize].kids[0];
        }
        Some(Cursor { leaf: node, position: 0 })
    }

    /// The smallest key that is at least `key`.
    pub(crate) fn seek(&self, set: usize, key: u64) -> Option<Cursor> {
        let root = self.roots[set];
        if root.node == NONE {
            return None;
        }
        let node = self.leaf_of(root, key);
        let leaf = &self.leaves[node as usize];
        let position = leaf.keys[..leaf.len as usize].partition_point(|k| *k < key) as u32;
        if position < leaf.len {
            Some(Cursor { leaf: node, position })
        } else if leaf.next != NONE {
            Some(Cursor { leaf: leaf.next, position: 0 })
        } else {
            None
        }
    }

    pub(crate) fn key(&self, cursor: Cursor) -> u64 {
        self.leaves[cursor.leaf as usize].keys[cursor.position as usize]
    }

    /// The next larger key.
    pub(crate) fn next(&self, cursor: Cursor) -> Option<Cursor> {
        let leaf = &self.leaves[cursor.leaf as usize];
        if cursor.position + 1 < leaf.len {
            Some(Cursor { position: cursor.position + 1, ..cursor })
        } else if leaf.next != NONE {
            Some(Cursor { leaf: leaf.next, position: 0 })
        } else {
            None
        }
    }

    /// Adds a key; false when it was there.
    pub(crate) fn insert(&mut self, set: usize, key: u64) -> bool {
        let root = self.roots[set];
        if root.node == NONE {
            let node = self.new_leaf();
            let leaf = &mut self.leaves[node as usize];
            leaf.keys[0] = key;
            leaf.len = 1;
            self.roots[set] = Root { node, height: 0 };
            return true;
        }
        let node = self.leaf_of(root, key);
        let leaf = &mut self.leaves[node as usize];
        let len = leaf.len as usize;
        let position = position_in(&leaf.keys[..len], key);
        if position < len && leaf.keys[position] == key {
            return false;
        }
        if len == LEAF {
            self.split(set, node, key);
            return self.insert(set, key);
        }
        leaf.keys.copy_within(position..len, position + 1);
        leaf.keys[position] = key;
        leaf.len += 1;
        true
    }

    /// Parts the full leaf that would hold the key in two.
    #[inline(never)]
    fn split(&mut self, set: usize, node: u32, key: u64) {
        let path = self.path_to(self.roots[set], key);
        let right = self.split_leaf(node);
        let separator = self.leaves[right as usize].keys[0];
        self.insert_child(set, &path, separator, right);
    }

    /// Removes a key; false when it was not there.
    pub(crate) fn remove(&mut self, set: usize, key: u64) -> bool {
        let root = self.roots[set];
        if root.node == NONE {
            return false;
        }
        let node = self.leaf_of(root, key);
        let leaf = &mut self.leaves[node as usize];
        let len = leaf.len as usize;
        let position = position_in(&leaf.keys[..len], key);
        if position == len || leaf.keys[position] != key {
            return false;
        }
        leaf.keys.copy_within(position + 1..len, position);
        leaf.len -= 1;
        if len == 1 || len <= LEAF / 3 && root.height > 0 {
            self.mend(set, node, key);
        }
        true
    }

    /// Mends the leaf for the key: removes it if it is empty, or joins it with a neighbour if it is short.
    #[inline(never)]
    fn mend(&mut self, set: usize, node: u32, key: u64) {
        let root = self.roots[set];
        if root.height == 0 {
            self.drop_leaf(node);
            self.roots[set].node = NONE;
            return;
        }
        let path = self.path_to(root, key);
        let (parent, index) = path[root.height as usize - 1];
        if self.leaves[node as usize].len == 0 {
            self.drop_leaf(node);
            self.remove_child(set, &path, root.height as usize - 1, index as usize);
            return;
        }
        let parent = &self.inners[parent as usize];
        let left_index = if (index + 1) < parent.len { index } else { index.wrapping_sub(1) };
        if left_index == u32::MAX {
            return;
        }
        let (left, right) = (parent.kids[left_index as usize], parent.kids[left_index as usize + 1]);
        let (left_len, right_len) = (self.leaves[left as usize].len, self.leaves[right as usize].len);
        if (left_len + right_len) as usize <= LEAF * 3 / 4 {
            let moved = self.leaves[right as usize].keys;
            let into = &mut self.leaves[left as usize];
            let (a, b) = (left_len as usize, right_len as usize);
            into.keys[a..a + b].copy_from_slice(&moved[..b]);
            into.len += right_len;
            self.drop_leaf(right);
            self.remove_child(set, &path, root.height as usize - 1, left_index as usize + 1);
        }
    }

    /// The leaf that holds the key or would.
    #[inline]
    fn leaf_of(&self, root: Root, key: u64) -> u32 {
        let mut node = root.node;
        for _ in 0..root.height {
            let inner = &self.inners[node as usize];
            node = inner.kids[child_of(inner, key)];
        }
        node
    }

    /// The way to that leaf: needed only when nodes split or join.
    fn path_to(&self, root: Root, key: u64) -> Path {
        let mut path: Path = [(0, 0); MAX_HEIGHT];
        let mut node = root.node;
        for step in path.iter_mut().take(root.height as usize) {
            let inner = &self.inners[node as usize];
            let child = child_of(inner, key);
            *step = (node, child as u32);
            node = inner.kids[child];
        }
        path
    }

    fn new_leaf(&mut self) -> u32 {
        if self.free_leaf != NONE {
            let node = self.free_leaf;
            let leaf = &mut self.leaves[node as usize];
            self.free_leaf = leaf.next;
            (leaf.len, leaf.previous, leaf.next) = (0, NONE, NONE);
            return node;
        }
        self.leaves.push(Leaf { keys: [0; LEAF], len: 0, previous: NONE, next: NONE });
        self.leaves.len() as u32 - 1
    }

    fn new_inner(&mut self) -> u32 {
        if self.free_inner != NONE {
            let node = self.free_inner;
            self.free_inner = self.inners[node as usize].kids[0];
            self.inners[node as usize].len = 0;
            return node;
        }
        self.inners.push(Inner { keys: [0; INNER], kids: [NONE; INNER], len: 0 });
        self.inners.len() as u32 - 1
    }

    fn drop_leaf(&mut self, node: u32) {
        let (previous, next) = (self.leaves[node as usize].previous, self.leaves[node as usize].next);
        if previous != NONE {
            self.leaves[previous as usize].next = next;
        }
        if next != NONE {
            self.leaves[next as usize].previous = previous;
        }
        let leaf = &mut self.leaves[node as usize];
        (leaf.len, leaf.next) = (0, self.free_leaf);
        self.free_leaf = node;
    }

    fn drop_inner(&mut self, node: u32) {
        let inner = &mut self.inners[node as usize];
        (inner.len, inner.kids[0]) = (0, self.free_inner);
        self.free_inner = node;
    }

    /// Moves the upper half of a full leaf into a new leaf behind it.
    fn split_leaf(&mut self, node: u32) -> u32 {
        let right = self.new_leaf();
        let old = &mut self.leaves[node as usize];
        let half = LEAF / 2;
        let mut keys = [0; LEAF];
        keys[..LEAF - half].copy_from_slice(&old.keys[half..]);
        old.len = half as u32;
        let next = old.next;
        old.next = right;
        self.leaves[right as usize] = Leaf { keys, len: (LEAF - half) as u32, previous: node, next };
        if next != NONE {
            self.leaves[next as usize].previous = right;
        }
        right
    }

    /// Adds `node` to its parent, behind the children that `path` names. Its keys are at least `separator`.
    fn insert_child(&mut self, set: usize, path: &Path, mut separator: u64, mut node: u32) {
        let root = self.roots[set];
        for level in (0..root.height as usize).rev() {
            let (parent, index) = path[level];
            let inner = &mut self.inners[parent as usize];
            let (len, position) = (inner.len as usize, index as usize + 1);
            if len < INNER {
                insert_at(inner, position, separator, node);
                return;
            }
            let half = INNER / 2;
            let (mut keys, mut kids) = ([0; INNER], [NONE; INNER]);
            keys[..INNER - half].copy_from_slice(&inner.keys[half..]);
            kids[..INNER - half].copy_from_slice(&inner.kids[half..]);
            inner.len = half as u32;
            let right = self.new_inner();
            self.inners[right as usize] = Inner { keys, kids, len: (INNER - half) as u32 };
            if position <= half {
                insert_at(&mut self.inners[parent as usize], position, separator, node);
            } else {
                insert_at(&mut self.inners[right as usize], position - half, separator, node);
            }
            (separator, node) = (self.inners[right as usize].keys[0], right);
        }
        let top = self.new_inner();
        let inner = &mut self.inners[top as usize];
        (inner.kids[0], inner.kids[1], inner.keys[1], inner.len) = (root.node, node, separator, 2);
        self.roots[set] = Root { node: top, height: root.height + 1 };
    }

    /// Takes child `index` out of the inner node at `level` of the path, then mends the levels above.
    fn remove_child(&mut self, set: usize, path: &Path, mut level: usize, mut index: usize) {
        loop {
            let (node, _) = path[level];
            let inner = &mut self.inners[node as usize];
            let len = inner.len as usize;
            inner.keys.copy_within(index + 1..len, index);
            inner.kids.copy_within(index + 1..len, index);
            inner.len -= 1;
            let len = len - 1;
            if level == 0 {
                // A root with one child hands over to it; with none, the set is empty.
                if len == 0 {
                    self.drop_inner(node);
                    self.roots[set] = Root { node: NONE, height: 0 };
                } else if len == 1 {
                    let mut root = self.roots[set];
                    while root.height > 0 && self.inners[root.node as usize].len == 1 {
                        let child = self.inners[root.node as usize].kids[0];
                        self.drop_inner(root.node);
                        root = Root { node: child, height: root.height - 1 };
                    }
                    self.roots[set] = root;
                }
                return;
            }
            let (parent, position) = path[level - 1];
            if len == 0 {
                self.drop_inner(node);
                (level, index) = (level - 1, position as usize);
                continue;
            }
            if len > INNER / 3 {
                return;
            }
            let upper = &self.inners[parent as usize];
            let left_index = if position + 1 < upper.len { position } else { position.wrapping_sub(1) };
            if left_index == u32::MAX {
                return;
            }
            let left_index = left_index as usize;
            let (left, right) = (upper.kids[left_index], upper.kids[left_index + 1]);
            let separator = upper.keys[left_index + 1];
            let (a, b) = (self.inners[left as usize].len as usize, self.inners[right as usize].len as usize);
            if a + b > INNER * 3 / 4 {
                return;
            }
            let (mut keys, kids) = (self.inners[right as usize].keys, self.inners[right as usize].kids);
            keys[0] = separator;
            let into = &mut self.inners[left as usize];
            into.keys[a..a + b].copy_from_slice(&keys[..b]);
            into.kids[a..a + b].copy_from_slice(&kids[..b]);
            into.len += b as u32;
            self.drop_inner(right);
            (level, index) = (level - 1, left_index + 1);
        }
    }
}

/// The position of the key, or the position for its insertion. A linear search: the key is often the first, and the
/// processor predicts the end of the loop, unlike the halves of a binary search.
fn position_in(keys: &[u64], key: u64) -> usize {
    keys.iter().take_while(|other| **other < key).count()
}

fn child_of(inner: &Inner, key: u64) -> usize {
    inner.keys[1..inner.len as usize].iter().take_while(|first| **first <= key).count()
}

fn insert_at(inner: &mut Inner, position: usize, separator: u64, node: u32) {
    let len = inner.len as usize;
    inner.keys.copy_within(position..len, position + 1);
    inner.kids.copy_within(position..len, position + 1);
    inner.keys[position] = separator;
    inner.kids[position] = node;
    inner.len += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn check(sets: &Sets, set: usize, model: &BTreeSet<u64>) {
        let mut forward = Vec::new();
        let mut cursor = sets.first(set);
        while let Some(at) = cursor {
            forward.push(sets.key(at));
            cursor = sets.next(at);
        }
        assert!(forward.iter().eq(model.iter()));
        for (node, leaf) in (0..).zip(&sets.leaves).filter(|(_, leaf)| leaf.len > 0 && leaf.next != NONE) {
            assert_eq!(sets.leaves[leaf.next as usize].previous, node);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Two sets in one arena behave as two `BTreeSet`s, through growth to three levels and back to nothing.
        #[test]
        fn sets_equal_btree_sets(seed in any::<u64>(), range in 1u64..5_000) {
            let mut state = seed;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                state >> 33
            };
            let mut sets = Sets::new(2);
            let mut models = [BTreeSet::new(), BTreeSet::new()];
            for step in 0..6_000u64 {
                let (set, key) = ((random() & 1) as usize, random() % range);
                // Grow for the first half, shrink in the second.
                let grow = random() % 10 < if step < 3_000 { 8 } else { 2 };
                if grow {
                    prop_assert_eq!(sets.insert(set, key), models[set].insert(key));
                } else {
                    prop_assert_eq!(sets.remove(set, key), models[set].remove(&key));
                }
                let probe = random() % range;
                prop_assert_eq!(
                    sets.seek(set, probe).map(|at| sets.key(at)),
                    models[set].range(probe..).next().copied()
                );
                if step % 500 == 0 {
                    check(&sets, set, &models[set]);
                }
            }
            for (set, model) in models.iter().enumerate() {
                for key in model.iter().copied() {
                    prop_assert!(sets.remove(set, key));
                }
                prop_assert!(sets.is_empty(set));
            }
        }
    }
}
