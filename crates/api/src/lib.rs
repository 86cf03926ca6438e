//! REST: routes, wire types, error forms, OpenAPI.
//!
//! Owns the wire: the words `batch`, `request` and `status` of the OpenAI routes are
//! translated here and appear nowhere deeper. Invariant: every answer carries
//! `X-Request-Id`, and every refusal under `/v1` has the four-key error body.
//! Does not know the engine's inside, kernels, or which database is behind the store.
//! Start with [`router()`]; [`probes_router`] is the door of a process without an API.

mod auth;
mod batches;
mod body;
pub mod config;
pub mod error;
mod files;
mod health;
mod list_object;
mod metrics;
mod online;
mod openapi;
mod request_id;
mod router;
mod serve;
mod state;

pub use batches::window::check_window;
pub use config::{ApiConfig, Secret};
pub use error::Error;
pub use metrics::{Measure, MetricsPage};
pub use router::{probes_router, router};
pub use serve::serve;
pub use state::{ApiState, FreeDisk};
