//! Whole-system tests through public doors; one binary.
//!
//! `boundaries` keeps the arrows between crates; the rest start the real `batch`.

mod backend;
mod boundaries;
mod breakdown;
mod chaos;
mod clients;
mod crash_points;
mod deploy;
mod device;
mod full_disk;
mod harness;
mod kill;
mod late_commit;
mod memory;
mod metrics;
mod peer;
mod remote_store;
mod restore;
mod roles;
mod run;
mod states;
mod stops;
mod sync_order;
mod templates;
