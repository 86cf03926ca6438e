//! Test databases, builders, a scripted `Generate`, fault wrappers, bounded waits. Never a normal dependency.

pub mod faults;
pub mod objects;
pub mod postgres;
pub mod scripted;
pub mod service;
pub mod tiny_model;
pub mod wait;

pub use faults::{Failing, FaultyStore, Pause};
pub use scripted::{Ask, Reply, ScriptedGenerate};
pub use service::TestService;
