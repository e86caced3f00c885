//! Horizontal and vertical scaling.

mod scale_horizontal;
mod scale_vertical;
