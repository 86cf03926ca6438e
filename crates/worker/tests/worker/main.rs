//! The worker as a whole, in one process: SQLite in a temporary folder, a local
//! object folder, a scripted engine. Report numbers are rows of the field reports
//! listed in docs/field-reports.md.

mod crash_points;
mod isolation;
mod leases;
mod local;
mod merging;
mod orders;
mod outcomes;
mod remote;
mod retries;
mod stores;
mod sweep;
mod webhooks;
mod whole;
