//! The contract's suite on SQLite, and what is SQLite's own.

mod audit;
mod fixture;
mod schema;
mod single_file;

overnight_store::store_conformance!(crate::fixture::open);
