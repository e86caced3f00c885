//! Horizontal and vertical scaling.

mod scale_horizontal;
mod scale_learn;
mod scale_vertical;
