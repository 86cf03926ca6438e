//! The places where a crash is tried: each step between reading, object, commit,
//! publish and cleanup. With the cargo feature `failpoints` the `fail` crate acts
//! there as told; without it they are nothing.

/// On the durable path of a shard, in the order of a life.
pub const SHARD: &[&str] = &[
    "worker::shard_claimed",
    "worker::input_read",
    "worker::probe_before_set",
    "worker::probe_after_set",
    "worker::items_prepared",
    "worker::requests_submitted",
    "worker::outputs_collected",
    "worker::faults_before_record",
    "worker::faults_after_record",
    "worker::segment_before_put",
    "worker::segment_after_put",
    "worker::segment_before_commit",
    "worker::segment_after_commit",
    "worker::shard_before_release",
    "worker::shard_after_release",
];

/// In intake.
pub const INTAKE: &[&str] = &[
    "intake::after_run_object",
    "intake::after_record",
    "intake::after_index_object",
    "intake::before_finish",
    "intake::after_finish",
];

/// In finalize.
pub const FINALIZE: &[&str] = &[
    "finalize::after_fence",
    "finalize::before_output_object",
    "finalize::after_shard",
    "finalize::after_output_object",
    "finalize::after_error_object",
    "finalize::after_manifest_object",
    "finalize::after_finish",
];

/// In webhooks.
pub const WEBHOOK: &[&str] = &["webhook::after_send"];

/// In the sweep.
pub const SWEEP: &[&str] = &[
    "sweep::after_hidden_jobs",
    "sweep::after_file_object",
    "sweep::after_job_rows",
    "sweep::after_unclaimed_object",
    "sweep::after_orphan_object",
];

/// Every place, for tests that try each one. A test compares it with the code.
pub fn all() -> impl Iterator<Item = &'static str> {
    [SHARD, INTAKE, FINALIZE, WEBHOOK, SWEEP].into_iter().flatten().copied()
}

/// Does `act` at the `nth` pass of a place: ends the process as `kill -9` would, or
/// stops it for a while. Errors in words on a place that is not listed.
#[cfg(feature = "failpoints")]
pub fn act_at(place: &str, nth: u32, act: impl Fn() + Send + Sync + 'static) -> Result<(), String> {
    use std::sync::atomic::{AtomicU32, Ordering};
    if !all().any(|known| known == place) {
        return Err(format!("no such place: {place}"));
    }
    let passes = AtomicU32::new(0);
    fail::cfg_callback(place, move || {
        if passes.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            act();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_names_every_place_in_the_code() {
        let sources = [
            include_str!("shard_run.rs"),
            include_str!("checkpoint.rs"),
            include_str!("feed.rs"),
            include_str!("planner/desk.rs"),
            include_str!("lifecycle/intake.rs"),
            include_str!("lifecycle/finalize.rs"),
            include_str!("lifecycle/webhook.rs"),
            include_str!("lifecycle/sweep.rs"),
        ];
        let mut found: Vec<&str> = sources
            .iter()
            .flat_map(|source| source.split("fail_point!(\"").skip(1))
            .map(|rest| rest.split('"').next().unwrap())
            .collect();
        let mut listed: Vec<&str> = all().collect();
        found.sort_unstable();
        found.dedup();
        listed.sort_unstable();
        assert_eq!(found, listed);
    }
}
