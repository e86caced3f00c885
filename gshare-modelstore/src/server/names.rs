//! The model that a name means, and its owner.
//!
//! Each uid has its own names: the same name of two uids means two models. So no uid can take a name from another, or
//! replace the model behind it. A name in a request is resolved in this order:
//! 1. the client's own model of that name;
//! 2. for `UID:NAME`, only the model of that name of that uid;
//! 3. the operator's model of that name, if the client may read it;
//! 4. the first of the models of that name that other uids share with the client;
//! 5. any model of that name; the client may not read it, so the request is refused.
//!
//! A client that does not trust all other uids should ask for `UID:NAME`, or by content.

use gshare_core::ModelId;
use std::collections::BTreeMap;

/// Models by name and owner.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<String, BTreeMap<u32, ModelId>>);

impl Names {
    /// Whether the uid has a model of that name.
    pub(super) fn has(&self, uid: u32, name: &str) -> bool {
        self.of(uid, name).is_some()
    }

    fn of(&self, uid: u32, name: &str) -> Option<ModelId> {
        self.0.get(name)?.get(&uid).copied()
    }

    pub(super) fn insert(&mut self, uid: u32, name: &str, model: ModelId) {
        self.0.entry(name.to_owned()).or_default().insert(uid, model);
    }

    pub(super) fn remove(&mut self, uid: u32, name: &str) {
        if let Some(owners) = self.0.get_mut(name) {
            owners.remove(&uid);
            if owners.is_empty() {
                self.0.remove(name);
            }
        }
    }

    /// The model that a client of a uid means: see the [module](self). `may_read` tells the client's access.
    pub(super) fn resolve(
        &self,
        uid: u32,
        text: &str,
        is_operator: impl Fn(u32) -> bool,
        may_read: impl Fn(ModelId) -> bool,
    ) -> Option<ModelId> {
        if let Some(own) = self.of(uid, text) {
            return Some(own);
        }
        if let Some((owner, name)) = text.split_once(':')
            && let Ok(owner) = owner.parse::<u32>()
        {
            return self.of(owner, name);
        }
        let owners = self.0.get(text)?.iter();
        owners
            .map(|(&owner, &model)| (!may_read(model), !is_operator(owner), model))
            .min()
            .map(|found| found.2)
    }

    /// Names, owners and models, in the order of the names.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, u32, ModelId)> {
        self.0.iter().flat_map(|(name, owners)| {
            owners.iter().map(move |(&owner, &model)| (name.as_str(), owner, model))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATOR: u32 = 0;

    fn names(named: &[(u32, &str)]) -> Names {
        let mut names = Names::default();
        for (at, (uid, name)) in (0..).zip(named) {
            names.insert(*uid, name, ModelId::new(at));
        }
        names
    }

    #[test]
    fn a_name_means_ones_own_then_the_operators_then_the_first_that_is_shared() {
        let names = names(&[(7, "m"), (8, "m"), (OPERATOR, "m"), (9, "n"), (7, "n"), (8, "n"), (9, "7:n")]);
        let private = [ModelId::new(3)];
        let means = |uid, text| {
            names
                .resolve(uid, text, |uid| uid == OPERATOR, |model| !private.contains(&model))
                .map(|model| model.number())
        };
        assert_eq!([means(7, "m"), means(8, "m")], [Some(0), Some(1)], "one's own, not the first");
        assert_eq!(means(9, "m"), Some(2), "the operator's, although it came last");
        assert_eq!(means(10, "n"), Some(4), "the first was not shared");
        assert_eq!([means(9, "7:m"), means(9, "8:n"), means(OPERATOR, "9:n")], [Some(0), Some(5), Some(3)]);
        assert_eq!(means(9, "7:n"), Some(6), "one's own, as it is");
        assert_eq!(means(10, "7:n"), Some(4), "never a name that looks like it");
        assert_eq!(means(10, "9:7:n"), Some(6));
        assert_eq!([means(10, "x"), means(10, "6:m"), means(10, "")], [None; 3]);
    }

    #[test]
    fn nothing_that_other_uids_name_or_forget_changes_what_a_uids_own_name_means() {
        let mut names = names(&[(7, "m")]);
        for uid in [OPERATOR, 6, 8] {
            names.insert(uid, "m", ModelId::new(100 + uid));
            assert_eq!(names.resolve(7, "m", |uid| uid == OPERATOR, |_| true), Some(ModelId::new(0)));
            names.remove(uid, "m");
            assert!(names.has(7, "m"));
        }
        names.remove(7, "m");
        assert_eq!(names.iter().count(), 0);
    }
}
