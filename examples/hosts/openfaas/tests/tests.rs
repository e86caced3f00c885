//! All tests of the host as one program: their dependencies are linked once, and their waits overlap.

mod common;

mod batches;
mod browser;
mod chaos;
mod confined;
mod images;
mod openfaas;
mod settings_page;
mod spans;
mod story;
mod weights;
