//! What a claim promises.

use overnight_types::JobState;

use super::TestClock;
use super::builders::*;
use crate::Store;

/// The whole life, with one failed item.
pub async fn a_job_runs_from_create_to_completed(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[3, 4], &[1]).await;
    assert_eq!(job.state, JobState::Completed);
    let counts = job.final_counts.unwrap();
    assert_eq!((counts.completed, counts.failed), (6, 1));
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
}
