//! The contract's suite on Postgres, and what is Postgres's own.

mod fixture;
mod forgotten;
mod given_up;
mod schema;
mod server;

overnight_store::store_conformance!(crate::fixture::open);
