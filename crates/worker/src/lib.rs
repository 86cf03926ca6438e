//! Leases shards, runs their items through [`generate::Generate`], writes segments,
//! commits outcomes; runs the lifecycle steps.

pub mod generate;
