//! The pool of whole devices.

mod whole_chaos;
mod whole_holes;
mod whole_model;
