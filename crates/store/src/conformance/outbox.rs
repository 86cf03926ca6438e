//! What the outbox promises: every end of a job is told, and one try at a time.

use std::time::Duration;

use overnight_types::JobState;

use super::TestClock;
use super::builders::*;
use crate::{OutboxEvent, OutboxState, Reopen, ReopenItems, Store};

const HOLD: Duration = Duration::from_secs(15);
const SECOND: Duration = Duration::from_secs(1);

async fn claim_event(store: &dyn Store) -> OutboxEvent {
    store.claim_event(HOLD).await.unwrap().expect("an event is due")
}

/// Each end of a job puts one event into the outbox, with the moment of the end; a new
/// round that ends puts in another one.
pub async fn every_end_of_a_job_is_told_once(store: &dyn Store, clock: &dyn TestClock) {
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None, "nothing has ended");
    let job = completed_job(store, &[2], &[1]).await;
    clock.advance(3 * SECOND).await;
    let event = claim_event(store).await;
    assert_eq!((event.job, event.kind.as_str(), event.attempts), (job.id, "batch.completed", 1));
    assert_eq!(Some(event.created_at), job.completed_at);
    assert!(event.age >= 3 * SECOND, "{:?}", event.age);
    applied(store.deliver_event_if_undelivered(event.id).await.unwrap());
    let reopen = Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() };
    applied(store.reopen_job_if_ended(job.id, reopen).await.unwrap());
    run_all(store).await;
    assert_eq!(finalize(store, job.id).await.state, JobState::Completed);
    let again = claim_event(store).await;
    assert_eq!((again.job, again.id == event.id), (job.id, false));
    let other = validating_job(store).await;
    let lease = claim_step_of(store, other.id).await;
    let errors = r#"{"object":"list","data":[]}"#.to_owned();
    applied(store.finish_intake_if_leased(&lease, crate::IntakeEnd::Invalid { errors }).await.unwrap());
    assert_eq!(claim_event(store).await.kind, "batch.failed");
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None);
}

/// An event is tried by one at a time; one that was left in the middle of a try is due
/// again, under the same id.
pub async fn event_is_tried_by_one_at_a_time(store: &dyn Store, clock: &dyn TestClock) {
    completed_job(store, &[1], &[]).await;
    let first = claim_event(store).await;
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None);
    clock.advance(HOLD + SECOND).await;
    let second = claim_event(store).await;
    assert_eq!((second.id, second.attempts), (first.id, 2));
    // The first try is over for whoever holds the second one.
    let late = store.retry_event_if_claimed(&first, SECOND).await.unwrap();
    assert_eq!(lost(late), Some(OutboxState::Open));
    let late = store.give_up_event_if_claimed(&first, "late").await.unwrap();
    assert_eq!(lost(late), Some(OutboxState::Open));
    // An acknowledgement counts, whenever it comes.
    applied(store.deliver_event_if_undelivered(first.id).await.unwrap());
    let late = store.retry_event_if_claimed(&second, SECOND).await.unwrap();
    assert_eq!(lost(late), Some(OutboxState::Delivered));
    assert_eq!(lost(store.deliver_event_if_undelivered(first.id).await.unwrap()), Some(OutboxState::Delivered));
    clock.advance(10 * HOLD).await;
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None);
}

/// A failed try is made again after its delay, until it is given up; the job's events say why.
pub async fn event_is_tried_again_until_given_up(store: &dyn Store, clock: &dyn TestClock) {
    let job = completed_job(store, &[1], &[]).await;
    let event = claim_event(store).await;
    applied(store.retry_event_if_claimed(&event, 60 * SECOND).await.unwrap());
    clock.advance(59 * SECOND).await;
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None);
    clock.advance(2 * SECOND).await;
    let event = claim_event(store).await;
    assert_eq!(event.attempts, 2);
    applied(store.give_up_event_if_claimed(&event, "answered 500").await.unwrap());
    clock.advance(3_600 * SECOND).await;
    assert_eq!(store.claim_event(HOLD).await.unwrap(), None);
    let told = store.list_events(job.id, 0, 100).await.unwrap();
    let last = told.last().unwrap();
    assert_eq!((last.what.as_str(), last.note.as_str()), ("webhook_given_up", "answered 500"));
    assert_eq!(lost(store.retry_event_if_claimed(&event, SECOND).await.unwrap()), Some(OutboxState::GivenUp));
    let nobody = OutboxEvent { id: overnight_types::EventId::new(), ..event };
    assert_eq!(lost(store.give_up_event_if_claimed(&nobody, "").await.unwrap()), None);
}

/// The event that has been due for longest comes first, so that none is starved by one
/// that fails for ever.
pub async fn event_due_for_longest_comes_first(store: &dyn Store, clock: &dyn TestClock) {
    let older = completed_job(store, &[1], &[]).await;
    clock.advance(SECOND).await;
    let newer = completed_job(store, &[1], &[]).await;
    let first = claim_event(store).await;
    assert_eq!(first.job, older.id);
    applied(store.retry_event_if_claimed(&first, Duration::ZERO).await.unwrap());
    assert_eq!(claim_event(store).await.job, newer.id);
}
