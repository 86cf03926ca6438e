//! The engine over a toy model: scheduling, KV blocks, sampling, door, handle.

mod ahead;
mod bed;
mod door;
mod handle;
mod outputs;
mod prefixes;
mod real;
mod sampling;
mod scheduling;
mod texts;
mod toy;
