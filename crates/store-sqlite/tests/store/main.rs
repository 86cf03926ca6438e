//! The contract's suite on SQLite, and what is SQLite's own.

mod audit;
mod fixture;
mod schema;
mod search;
mod single_file;
mod transitions;

overnight_store::store_conformance!(crate::fixture::open);
