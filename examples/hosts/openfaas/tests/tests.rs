//! All tests of the host as one program: what they use is linked once, and those that wait do so side by side.

mod common;

mod browser;
mod chaos;
mod confined;
mod images;
mod openfaas;
mod spans;
mod story;
