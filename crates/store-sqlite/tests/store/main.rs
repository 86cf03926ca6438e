//! The contract's suite on SQLite, and what is SQLite's own.

mod fixture;

overnight_store::store_conformance!(crate::fixture::open);
