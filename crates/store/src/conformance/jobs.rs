//! What the doors' moves on jobs promise.

use std::time::Duration;

use overnight_types::{Ending, FileId, JobId, JobState, ShardIndex, WorkerId};

use super::TestClock;
use super::builders::*;
use crate::{CancelMode, Error, FilePurpose, IdempotencyKey, InsertJob, JobQuery, JobsAhead, NewJob, Store};

const SECOND: Duration = Duration::from_secs(1);

/// A job keeps all it was given, and its input's size and hash.
pub async fn job_reads_back_as_given(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let new = NewJob {
        metadata: Some("{\"a\":\"\\u0000\"}".into()),
        name: Some("nightly".into()),
        priority: -3,
        output_expires_after: Some(Duration::from_secs(7200)),
        ..new_job(input)
    };
    let job = insert(store, new.clone()).await;
    assert_eq!(store.find_job(new.id).await.unwrap(), Some(job.clone()));
    assert_eq!((job.id, job.endpoint, job.input_file_id), (new.id, new.endpoint, input));
    assert_eq!((&job.metadata, &job.name, job.priority), (&new.metadata, &new.name, -3));
    assert_eq!((job.window, job.output_expires_after), (new.window, new.output_expires_after));
    assert_eq!((job.input_bytes, job.input_sha256), (1_000, [7; 32]));
    assert_eq!(job.expires_at, job.created_at.plus(new.window));
    assert_eq!(store.find_job(JobId::new()).await.unwrap(), None);
}

/// No job without a present input of purpose `batch`.
pub async fn job_needs_a_present_input(store: &dyn Store, clock: &dyn TestClock) {
    let deleted = input(store).await;
    applied(store.delete_file_if_present(deleted).await.unwrap());
    let other = new_file(FilePurpose::UserData);
    store.insert_file(other.clone()).await.unwrap();
    let expired = crate::NewFile { expires_after_s: Some(3600), ..new_file(FilePurpose::Batch) };
    store.insert_file(expired.clone()).await.unwrap();
    clock.advance(Duration::from_secs(3601)).await;
    for file in [deleted, other.id, expired.id, FileId::new()] {
        assert_eq!(store.insert_job(new_job(file), None).await.unwrap(), InsertJob::NoInput);
    }
}

/// A repeated create gives the first job as it is now; with other parameters it is
/// told; after a week the key is free.
pub async fn idempotency_key_returns_the_first_job(store: &dyn Store, clock: &dyn TestClock) {
    let input = input(store).await;
    let key = |params| Some(IdempotencyKey { key: "k".into(), params_sha256: [params; 32] });
    let InsertJob::Created(first) = store.insert_job(new_job(input), key(1)).await.unwrap() else { panic!("not new") };
    applied(store.pause_job_if_active(first.id).await.unwrap());
    let InsertJob::Existing(again) = store.insert_job(new_job(input), key(1)).await.unwrap() else { panic!("new") };
    assert_eq!((again.id, again.paused_at.is_some()), (first.id, true));
    assert_eq!(store.insert_job(new_job(input), key(2)).await.unwrap(), InsertJob::KeyReused);
    assert_eq!(store.list_jobs(JobQuery { limit: 9, ..JobQuery::default() }).await.unwrap().rows.len(), 1);
    clock.advance(Duration::from_secs(6 * 86_400)).await;
    assert!(matches!(store.insert_job(new_job(input), key(1)).await.unwrap(), InsertJob::Existing(_)));
    clock.advance(Duration::from_secs(86_401)).await;
    assert!(matches!(store.insert_job(new_job(input), key(2)).await.unwrap(), InsertJob::Created(_)));
}

/// Two creates with one key at once make one job.
pub async fn two_creates_with_one_key_make_one_job(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let key = || Some(IdempotencyKey { key: "k".into(), params_sha256: [1; 32] });
    let (one, two) = tokio::join!(store.insert_job(new_job(input), key()), store.insert_job(new_job(input), key()));
    let created = [one.unwrap(), two.unwrap()].iter().filter(|answer| matches!(answer, InsertJob::Created(_))).count();
    assert_eq!(created, 1);
}

/// The key of a deleted job is free, so that it can be asked for anew.
pub async fn key_of_a_deleted_job_is_free(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let key = || Some(IdempotencyKey { key: "k".into(), params_sha256: [1; 32] });
    let InsertJob::Created(first) = store.insert_job(new_job(input), key()).await.unwrap() else { panic!("not new") };
    cancelled_job(store, first.id).await;
    applied(store.delete_job_if_terminal(first.id).await.unwrap());
    assert!(matches!(store.insert_job(new_job(input), key()).await.unwrap(), InsertJob::Created(_)));
}

/// Jobs are listed newest first; pages by keyset neither repeat nor skip while new
/// jobs come, and filters hold.
pub async fn jobs_are_listed_by_keyset(store: &dyn Store, _clock: &dyn TestClock) {
    let input = input(store).await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(insert(store, new_job(input)).await.id);
    }
    ids.reverse();
    let query = |after, limit| JobQuery { after, limit, ..JobQuery::default() };
    let first = store.list_jobs(query(None, 2)).await.unwrap();
    insert(store, new_job(input)).await;
    let second = store.list_jobs(query(Some(first.rows[1].id), 2)).await.unwrap();
    let third = store.list_jobs(query(Some(second.rows[1].id), 2)).await.unwrap();
    assert_eq!((first.has_more, second.has_more, third.has_more), (true, true, false));
    let seen: Vec<_> = [first, second, third].iter().flat_map(|page| &page.rows).map(|job| job.id).collect();
    assert_eq!(seen, ids);
    let unknown = store.list_jobs(query(Some(JobId::new()), 2)).await;
    assert!(matches!(unknown, Err(Error::Missing { .. })), "{unknown:?}");
    cancelled_job(store, ids[2]).await;
    let cancelled = JobQuery { states: vec![JobState::Cancelled], ..query(None, 9) };
    let found = store.list_jobs(cancelled).await.unwrap().rows;
    assert_eq!(found.iter().map(|job| job.id).collect::<Vec<_>>(), [ids[2]]);
    let model = JobQuery { model: Some(MODEL.into()), ..query(None, 9) };
    assert!(store.list_jobs(model).await.unwrap().rows.is_empty(), "no intake has ended");
    let since = JobQuery { since: Some(store.now().await.unwrap().plus(SECOND)), ..query(None, 9) };
    assert!(store.list_jobs(since).await.unwrap().rows.is_empty());
}

/// Pausing twice keeps the first moment; ended jobs are not paused.
pub async fn pause_is_idempotent_and_refused_after_the_end(store: &dyn Store, clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let first = applied(store.pause_job_if_active(job.id).await.unwrap());
    clock.advance(SECOND).await;
    let again = applied(store.pause_job_if_active(job.id).await.unwrap());
    assert_eq!(again.paused_at, first.paused_at);
    let ended = cancelled_job(store, job.id).await;
    assert_eq!(ended.paused_at, None);
    assert_eq!(lost(store.pause_job_if_active(job.id).await.unwrap()), Some(JobState::Cancelled));
    assert_eq!(lost(store.unpause_job_if_active(job.id).await.unwrap()), Some(JobState::Cancelled));
    assert_eq!(lost(store.pause_job_if_active(JobId::new()).await.unwrap()), None);
    assert_eq!(lost(store.unpause_job_if_active(JobId::new()).await.unwrap()), None);
}

/// What runs of a paused job may finish, and its last commit moves it on.
pub async fn paused_job_finishes_what_runs(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[2]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(store.pause_job_if_active(job.id).await.unwrap());
    assert_eq!(commit_rest(store, &mut held).await.job_state, JobState::Finalizing);
    assert_eq!(finalize(store, job.id).await.state, JobState::Completed);
}

/// A worker learns in one query what became of its jobs.
pub async fn signals_tell_state_pause_cancel_and_round(store: &dyn Store, _clock: &dyn TestClock) {
    let (paused, cancelled) = (running_job(store, &[1]).await, running_job(store, &[1]).await);
    let worker = WorkerId::new();
    let _held = (lease(store, worker).await, lease(store, worker).await);
    applied(store.pause_job_if_active(paused.id).await.unwrap());
    applied(store.cancel_job_if_active(cancelled.id, CancelMode::Drain, TTL).await.unwrap());
    let mut signals = store.find_job_signals(&[paused.id, cancelled.id, JobId::new()]).await.unwrap();
    signals.sort_by_key(|signal| !signal.paused);
    assert_eq!(signals.len(), 2);
    assert_eq!((signals[0].job, signals[0].state, signals[0].round), (paused.id, JobState::InProgress, 1));
    assert_eq!((signals[1].job, signals[1].state), (cancelled.id, JobState::Cancelling));
    assert_eq!((signals[1].paused, signals[1].cancel_mode), (false, CancelMode::Drain));
    applied(store.cancel_job_if_active(cancelled.id, CancelMode::Now, TTL).await.unwrap());
    assert_eq!(store.find_job_signals(&[cancelled.id]).await.unwrap()[0].cancel_mode, CancelMode::Now);
}

/// Finalize of a cancelled job waits for what is leased, up to the drain limit.
pub async fn cancel_drains_what_is_leased(store: &dyn Store, clock: &dyn TestClock) {
    let drain = Duration::from_secs(600);
    // Nothing leased: due at once.
    let idle = running_job(store, &[1]).await;
    applied(store.cancel_job_if_active(idle.id, CancelMode::Drain, drain).await.unwrap());
    finalize(store, idle.id).await;
    // Leased: due when the last lease ends by itself.
    let ended_by_commit = running_job(store, &[1, 1]).await;
    let mut held = lease(store, WorkerId::new()).await;
    applied(store.cancel_job_if_active(ended_by_commit.id, CancelMode::Drain, drain).await.unwrap());
    assert_eq!(store.claim_step(WorkerId::new(), TTL).await.unwrap(), None);
    commit_rest(store, &mut held).await;
    let ended = finalize(store, ended_by_commit.id).await;
    let counts = ended.final_counts.unwrap();
    assert_eq!((counts.completed, counts.cancelled), (1, 1), "what finished while draining is kept");
    // By release, by expiry, or by the limit.
    for way in ["release", "expiry", "limit", "now"] {
        let job = running_job(store, &[1]).await;
        let held = lease(store, WorkerId::new()).await;
        applied(store.cancel_job_if_active(job.id, CancelMode::Drain, drain).await.unwrap());
        match way {
            "release" => release(store, &held).await,
            "expiry" => {
                clock.advance(TTL + SECOND).await;
                assert_eq!(store.release_expired_leases(9).await.unwrap(), 1);
            }
            "limit" => clock.advance(drain + SECOND).await,
            _ => {
                applied(store.cancel_job_if_active(job.id, CancelMode::Now, drain).await.unwrap());
            }
        }
        let ended = finalize(store, job.id).await;
        assert_eq!((ended.state, ended.final_counts.unwrap().cancelled), (JobState::Cancelled, 1), "{way}");
    }
}

/// A cancel repeated changes nothing and is no error; it never softens, and after
/// another end it is lost.
pub async fn cancel_is_idempotent(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    let first = applied(store.cancel_job_if_active(job.id, CancelMode::Now, TTL).await.unwrap());
    assert_eq!(
        (first.state, first.ending, first.cancel_mode),
        (JobState::Cancelling, Some(Ending::Cancelled), CancelMode::Now)
    );
    let again = applied(store.cancel_job_if_active(job.id, CancelMode::Drain, TTL).await.unwrap());
    assert_eq!(again, first);
    let ended = finalize(store, job.id).await;
    assert_eq!(applied(store.cancel_job_if_active(job.id, CancelMode::Now, TTL).await.unwrap()), ended);
    let completed = completed_job(store, &[1], &[]).await;
    let answer = store.cancel_job_if_active(completed.id, CancelMode::Now, TTL).await.unwrap();
    assert_eq!(lost(answer), Some(JobState::Completed));
    assert_eq!(lost(store.cancel_job_if_active(JobId::new(), CancelMode::Now, TTL).await.unwrap()), None);
}

/// The window's end takes running jobs to finalizing in bounded pieces, paused ones
/// too, and fences what is leased.
pub async fn window_end_expires_running_jobs(store: &dyn Store, clock: &dyn TestClock) {
    let (first, second) = (running_job(store, &[2]).await, running_job(store, &[1]).await);
    let mut held = lease(store, WorkerId::new()).await;
    applied(commit(store, &mut held, &[0], &[]).await);
    applied(store.pause_job_if_active(second.id).await.unwrap());
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), []);
    clock.advance(WINDOW + SECOND).await;
    assert_eq!(store.expire_due_jobs(1).await.unwrap(), [first.id]);
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), [second.id]);
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), []);
    assert!(lost(commit(store, &mut held, &[1], &[]).await).is_some());
    let ended = finalize(store, first.id).await;
    let counts = ended.final_counts.unwrap();
    assert_eq!((ended.state, counts.completed, counts.expired), (JobState::Expired, 1, 1));
    assert!(ended.expired_at.is_some() && ended.finalizing_at.is_some());
    assert_eq!(finalize(store, second.id).await.state, JobState::Expired);
}

/// A job that had all outcomes before the window closed completes, whatever the
/// clock says while it is published; a cancelling one is not expired.
pub async fn window_end_changes_no_drawn_ending(store: &dyn Store, clock: &dyn TestClock) {
    let done = running_job(store, &[1]).await;
    run_all(store).await;
    let cancelling = running_job(store, &[1]).await;
    applied(store.cancel_job_if_active(cancelling.id, CancelMode::Now, TTL).await.unwrap());
    clock.advance(WINDOW + SECOND).await;
    assert_eq!(store.expire_due_jobs(9).await.unwrap(), []);
    assert_eq!(finalize(store, done.id).await.state, JobState::Completed);
    assert_eq!(finalize(store, cancelling.id).await.state, JobState::Cancelled);
}

/// A deleted job is known for as long as a row of it is there, so that its objects
/// are not taken for nobody's; one that never was is not.
pub async fn hidden_job_is_known_until_its_last_row_is_gone(store: &dyn Store, _clock: &dyn TestClock) {
    let job = completed_job(store, &[1], &[]).await;
    let asked = [job.id, JobId::new()];
    assert_eq!(store.known_jobs(&asked).await.unwrap(), [job.id]);
    applied(store.delete_job_if_terminal(job.id).await.unwrap());
    assert_eq!(store.known_jobs(&asked).await.unwrap(), [job.id]);
    while store.purge_deleted_jobs(1).await.unwrap().has_more {}
    assert_eq!(store.known_jobs(&asked).await.unwrap(), []);
}

/// Only an ended job is deleted; it is hidden at once, and its rows go in bounded
/// pieces, its own last.
pub async fn deleted_job_is_hidden_and_purged_piece_by_piece(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1; 20]).await;
    assert_eq!(lost(store.delete_job_if_terminal(job.id).await.unwrap()), Some(JobState::InProgress));
    run_all(store).await;
    finalize(store, job.id).await;
    let other = completed_job(store, &[2, 2], &[]).await;
    applied(store.delete_job_if_terminal(job.id).await.unwrap());
    assert_eq!(store.find_job(job.id).await.unwrap(), None);
    assert!(store.list_jobs(JobQuery { limit: 9, ..JobQuery::default() }).await.unwrap().rows.len() == 1);
    assert!(matches!(store.find_progress(job.id).await, Err(Error::Missing { .. })));
    assert_eq!(lost(store.delete_job_if_terminal(job.id).await.unwrap()), None);
    let mut calls = 0;
    loop {
        calls += 1;
        assert!(calls < 50, "the purge comes to its end");
        let purged = store.purge_deleted_jobs(10).await.unwrap();
        if !purged.has_more {
            assert_eq!(purged.jobs, [job.id]);
            break;
        }
        assert_eq!(purged.jobs, []);
    }
    assert!(calls > 5, "in pieces: 20 shards, 20 segments, 20 attempts, events");
    assert_eq!(store.list_shards(job.id, ShardIndex(0), 99).await.unwrap(), []);
    assert_eq!(store.list_events(job.id, 0, 99).await.unwrap(), []);
    assert_eq!(store.purge_deleted_jobs(10).await.unwrap(), crate::Purged::default());
    assert_closed(store, &other).await;
    assert_eq!(store.list_segments(other.id, ShardIndex(0), 99).await.unwrap().len(), 2);
    assert_eq!(store.check().await.unwrap(), Vec::<String>::new());
}

/// Every move leaves its event, in order, once.
pub async fn events_tell_every_move_in_order(store: &dyn Store, _clock: &dyn TestClock) {
    let job = running_job(store, &[1]).await;
    applied(store.pause_job_if_active(job.id).await.unwrap());
    applied(store.pause_job_if_active(job.id).await.unwrap());
    applied(store.unpause_job_if_active(job.id).await.unwrap());
    cancelled_job(store, job.id).await;
    let all = store.list_events(job.id, 0, 99).await.unwrap();
    let words: Vec<_> = all.iter().map(|event| event.what.as_str()).collect();
    assert_eq!(words, ["created", "in_progress", "paused", "unpaused", "cancelling", "cancelled"]);
    assert!(all.is_sorted_by_key(|event| event.seq));
    let rest = store.list_events(job.id, all[3].seq, 1).await.unwrap();
    assert_eq!(rest, [all[4].clone()]);
}

/// Progress of many jobs in one call is that of each.
pub async fn progress_of_many_jobs_is_that_of_each(store: &dyn Store, _clock: &dyn TestClock) {
    let two = completed_job(store, &[2], &[0]).await;
    let one = running_job(store, &[3]).await;
    let many = store.find_progress_of(&[one.id, two.id, JobId::new()], JobsAhead::Count).await.unwrap();
    assert_eq!(many.len(), 2);
    for (id, progress) in many {
        assert_eq!(progress, store.find_progress(id).await.unwrap());
    }
    assert!(matches!(store.find_progress(JobId::new()).await, Err(Error::Missing { .. })));
}
