//! Test databases, builders, a scripted `Generate`, fault wrappers, bounded waits; for tests of
//! whole systems also servers of their own, proxies with faults, and processes under
//! supervision. Never a normal dependency.

pub mod faults;
pub mod http_proxy;
pub mod objects;
pub mod postgres;
pub mod process;
pub mod s3_server;
pub mod scripted;
pub mod service;
pub mod tcp_proxy;
pub mod tiny_model;
pub mod wait;

pub use faults::{Failing, FaultyStore, Pause};
pub use http_proxy::HttpProxy;
pub use process::Process;
pub use s3_server::S3Server;
pub use scripted::{Ask, Reply, ScriptedGenerate};
pub use service::TestService;
pub use tcp_proxy::TcpProxy;

/// A variable that steers the tests; `None` when unset or empty.
#[expect(clippy::disallowed_methods, reason = "tests are steered by the environment, here alone")]
pub fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
