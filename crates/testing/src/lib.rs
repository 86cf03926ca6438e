//! Test databases, builders, a scripted `Generate`, fault wrappers, bounded waits. Never a normal dependency.

pub mod tiny_model;
