//! Intake, finalize and item views on a real database and object folder, driven by
//! hand: no worker runs unless a test says so.

mod finalize;
mod intake;
mod items;
mod support;
