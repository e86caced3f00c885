//! The request scheduler.

mod request_chaos;
mod request_holes;
mod request_model;
