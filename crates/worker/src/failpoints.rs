//! The places where a crash is tried: each step of the durable path between
//! reading, object, commit and cleanup. With the cargo feature `failpoints` the
//! `fail` crate acts there as told (`FAILPOINTS=worker::segment_before_put=…`);
//! without it they are nothing.

/// Every place, for tests that try each one. A test compares this with the code.
pub const ALL: &[&str] = &[
    "worker::shard_claimed",
    "worker::input_read",
    "worker::items_prepared",
    "worker::requests_submitted",
    "worker::outputs_collected",
    "worker::segment_before_put",
    "worker::segment_after_put",
    "worker::segment_after_commit",
    "worker::faults_before_record",
    "worker::faults_after_record",
    "worker::probe_before_set",
    "worker::probe_after_set",
    "worker::shard_before_release",
    "worker::shard_after_release",
];

/// The same for the lifecycle steps: intake and finalize.
pub const STEPS: &[&str] = &[
    "intake::after_run_object",
    "intake::after_index_object",
    "intake::after_record",
    "intake::before_finish",
    "intake::after_finish",
    "finalize::after_fence",
    "finalize::after_shard",
    "finalize::before_output_object",
    "finalize::after_output_object",
    "finalize::after_error_object",
    "finalize::after_manifest_object",
    "finalize::after_finish",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn found(sources: &[&'static str]) -> Vec<&'static str> {
        let places = sources.iter().flat_map(|source| source.split("fail_point!(\"").skip(1));
        let mut found: Vec<&str> = places.map(|rest| rest.split('"').next().unwrap()).collect();
        found.sort_unstable();
        found
    }

    fn sorted(list: &[&'static str]) -> Vec<&'static str> {
        let mut sorted = list.to_vec();
        sorted.sort_unstable();
        sorted
    }

    #[test]
    fn list_names_every_place_in_the_code() {
        let run = [include_str!("shard_run.rs"), include_str!("checkpoint.rs"), include_str!("feed.rs")];
        assert_eq!(found(&run), sorted(ALL));
        let steps = [include_str!("lifecycle/intake.rs"), include_str!("lifecycle/finalize.rs")];
        assert_eq!(found(&steps), sorted(STEPS));
    }
}
