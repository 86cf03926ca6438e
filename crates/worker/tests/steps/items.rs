//! Item views: pages, one item, results while a job runs, failures by code.

use std::time::Duration;

use overnight_blobs::ObjectName;
use overnight_store::{Guarded, Jobs, NewFault, Reopen, ReopenItems, Shards};
use overnight_testing::TestService;
use overnight_testing::service::{line, numbered_lines};
use overnight_types::OutcomeKind::{Completed, Failed};
use overnight_types::{ItemIndex, ItemState, JobId};
use overnight_worker::items::{
    Error, ItemQuery, ItemRef, ResultsCursor, ResultsOrder, ResultsQuery, error_groups, find, list, results,
};

use crate::support::*;

async fn page(service: &TestService, id: JobId, query: ItemQuery) -> (Vec<(u64, ItemState)>, bool) {
    let job = service.job(id).await;
    let page = list(&service.store, &service.blobs, &job, &query).await.unwrap();
    (page.items.iter().map(|item| (item.index, item.state)).collect(), page.has_more)
}

fn all() -> ItemQuery {
    ItemQuery { limit: 1_000, ..ItemQuery::default() }
}

/// Ten items in three shards: the first shard done (1 and 3 failed), the second
/// leased with 4 waiting for a retry, the third not begun.
async fn mixed() -> (TestService, JobId) {
    let service = TestService::new().await;
    let mut lines = numbered_lines(10);
    lines.insert(1, String::new());
    let id = service.submit(&lines).await;
    run_intake(&service).await.unwrap();
    let lease = claim_shard(&service).await.unwrap();
    commit(&service, &lease, &|item| Some(if item % 2 == 1 { Failed } else { Completed })).await;
    let lease = claim_shard(&service).await.unwrap();
    commit(&service, &lease, &|item| (item == 7).then_some(Completed)).await;
    let fault = NewFault {
        item: ItemIndex(4),
        attempts: 2,
        delay: Duration::from_secs(600),
        http_status: Some(503),
        code: "http_503".into(),
        message: "busy".into(),
    };
    let recorded = service.store.record_faults_if_leased(lease.key(), &[fault]).await.unwrap();
    assert_eq!(recorded, Guarded::Applied(1), "retries used");
    (service, id)
}

// Field report 7: every row is shown and has a reason.
#[tokio::test]
async fn every_item_has_its_state() {
    let (service, id) = mixed().await;
    use ItemState::{Completed, Failed, Pending, Running, Waiting};
    let wanted = [Completed, Failed, Completed, Failed, Waiting, Running, Running, Completed, Pending, Pending];
    let wanted: Vec<_> = (0..).zip(wanted).collect();
    assert_eq!(page(&service, id, all()).await, (wanted.clone(), false));
    for state in ItemState::ALL {
        let of_state: Vec<_> = wanted.iter().copied().filter(|(_, one)| one == state).collect();
        assert_eq!(page(&service, id, ItemQuery { state: Some(*state), ..all() }).await, (of_state, false), "{state}");
    }
    let with_code = |code: &str| ItemQuery { code: Some(code.to_owned()), ..all() };
    assert_eq!(page(&service, id, with_code("request_timeout")).await.0, [(1, Failed), (3, Failed)]);
    assert_eq!(page(&service, id, with_code("http_503")).await.0, [(4, Waiting)]);
    assert_eq!(page(&service, id, with_code("bad")).await.0, []);
}

// However many shards there are to look through.
#[tokio::test]
async fn page_that_shows_nothing_of_a_shard_does_not_read_its_input() {
    use ItemState::{Cancelled, Expired, Failed, Running, Waiting};
    let (service, id) = mixed().await;
    let fresh = service.submit_cut(&numbered_lines(8), 4).await;
    for job in [id, fresh] {
        let job = service.job(job).await;
        let object = service.objects_dir().join(ObjectName::file(job.input_file_id).to_string());
        std::fs::remove_file(&object).unwrap();
        // Not missing: whoever reads it fails.
        std::os::unix::fs::symlink(&object, &object).unwrap();
        assert!(list(&service.store, &service.blobs, &job, &all()).await.is_err());
    }
    let of = |state, code: Option<&str>| ItemQuery { state, code: code.map(str::to_owned), limit: 1, after: None };
    for query in [
        of(Some(Cancelled), None),
        of(Some(Expired), None),
        of(None, Some("nobody")),
        of(Some(Running), Some("http_503")),
        of(Some(Waiting), Some("bad")),
    ] {
        assert_eq!(page(&service, id, query.clone()).await, (vec![], false), "{query:?}");
    }
    for query in [of(Some(Waiting), None), of(Some(Running), None), of(Some(Failed), None), of(None, Some("bad"))] {
        assert_eq!(page(&service, fresh, query.clone()).await, (vec![], false), "{query:?}");
    }
}

#[tokio::test]
async fn pages_meet_without_gap_or_overlap() {
    let (service, id) = mixed().await;
    for limit in [1, 2, 3, 9, 10] {
        for state in [None, Some(ItemState::Failed)] {
            let whole = page(&service, id, ItemQuery { state, ..all() }).await.0;
            let (mut seen, mut after) = (Vec::new(), None);
            loop {
                let (items, has_more) = page(&service, id, ItemQuery { state, after, limit, code: None }).await;
                assert!(items.len() <= limit as usize);
                after = items.last().map(|(index, _)| ItemIndex(*index)).or(after);
                seen.extend(items);
                if !has_more {
                    break;
                }
            }
            assert_eq!(seen, whole, "{limit} {state:?}");
        }
    }
}

#[tokio::test]
async fn one_item_is_found_by_index_and_custom_id_with_both_lines() {
    let (service, id) = mixed().await;
    let job = service.job(id).await;
    let find = async |item: ItemRef| find(&service.store, &service.blobs, &job, &item).await.unwrap();
    let by_index = find(ItemRef::Index(ItemIndex(3))).await.unwrap();
    assert_eq!((by_index.view.line, by_index.view.state), (Some(5), ItemState::Failed));
    assert_eq!(by_index.view.custom_id.as_ref().unwrap().get(), "\"item-3\"");
    assert_eq!(by_index.input.as_deref(), Some(line("item-3").as_bytes()));
    assert_eq!(by_index.output, Some(record(&job, 3, Failed).line));
    assert_eq!(by_index.attempts.len(), 1);
    let by_id = find(ItemRef::CustomId("item-3".into())).await.unwrap();
    assert_eq!((by_id.view.index, by_id.output), (3, by_index.output));
    let waiting = find(ItemRef::CustomId("item-4".into())).await.unwrap();
    assert_eq!((waiting.view.attempts, waiting.view.http_status, waiting.output), (2, Some(503), None));
    assert_eq!(waiting.fault.unwrap().message, "busy");
    assert!(find(ItemRef::CustomId("item-10".into())).await.is_none());
    assert!(find(ItemRef::Index(ItemIndex(10))).await.is_none());
    assert!(find(ItemRef::Index(ItemIndex(u64::MAX))).await.is_none());
}

#[tokio::test]
async fn items_can_be_seen_after_the_input_is_deleted() {
    let (service, id) = mixed().await;
    let job = service.job(id).await;
    service.blobs.delete(&ObjectName::file(job.input_file_id)).await.unwrap();
    let page = list(&service.store, &service.blobs, &job, &all()).await.unwrap();
    assert_eq!(page.items.len(), 10);
    assert_eq!(page.items[3].custom_id.as_ref().unwrap().get(), "\"item-3\"", "from its output line");
    assert!(page.items[5].custom_id.is_none() && page.items[5].line.is_none());
}

async fn read_all(service: &TestService, id: JobId, order: ResultsOrder, limit: u32) -> (Vec<String>, bool) {
    let (mut lines, mut after) = (Vec::new(), None);
    loop {
        let job = service.job(id).await;
        let page = results(&service.store, &service.blobs, &job, &ResultsQuery { after, limit, order }).await.unwrap();
        // As a client would: the text and back.
        after = Some(page.next.to_string().parse::<ResultsCursor>().unwrap());
        let done = page.lines.is_empty();
        lines.extend(page.lines.iter().map(|line| String::from_utf8(line.to_vec()).unwrap()));
        if done || !page.incomplete {
            return (lines, page.incomplete);
        }
    }
}

fn items_of(lines: &[String]) -> Vec<u64> {
    lines.iter().map(|line| item_of(line)).collect()
}

// Field report 35: killed at half, the finished half can be read at once.
#[tokio::test]
async fn results_while_running_neither_repeat_nor_skip() {
    let (service, id) = mixed().await;
    for limit in [1, 2, 3, 100] {
        let (lines, incomplete) = read_all(&service, id, ResultsOrder::Completion, limit).await;
        assert_eq!((items_of(&lines), incomplete), (vec![3, 2, 1, 0, 7], true), "{limit}");
        let (lines, incomplete) = read_all(&service, id, ResultsOrder::Input, limit).await;
        assert_eq!((items_of(&lines), incomplete), (vec![0, 1, 2, 3], true), "up to the first item without an outcome");
    }
}

#[tokio::test]
async fn reader_that_goes_on_sees_each_later_line_once() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(10)).await;
    run_intake(&service).await.unwrap();
    let mut after = None;
    let mut seen = Vec::new();
    for round in 0..5u64 {
        if let Some(lease) = claim_shard(&service).await {
            commit(&service, &lease, &|item| (item % 5 <= round).then_some(Completed)).await;
            if service.job(id).await.state == overnight_types::JobState::InProgress {
                let why = overnight_store::AttemptEnd::Released;
                let _ = service.store.release_shard_if_leased(lease.key(), Duration::ZERO, why).await.unwrap();
            }
        }
        let job = service.job(id).await;
        let query = ResultsQuery { after, limit: 2, order: ResultsOrder::Completion };
        let page = results(&service.store, &service.blobs, &job, &query).await.unwrap();
        after = Some(page.next);
        seen.extend(page.lines);
    }
    loop {
        let job = service.job(id).await;
        let query = ResultsQuery { after, limit: 2, order: ResultsOrder::Completion };
        let page = results(&service.store, &service.blobs, &job, &query).await.unwrap();
        after = Some(page.next);
        if page.lines.is_empty() {
            break;
        }
        seen.extend(page.lines);
    }
    let mut items: Vec<u64> = seen.iter().map(|line| item_of(std::str::from_utf8(line).unwrap())).collect();
    items.sort_unstable();
    let committed: Vec<u64> = service.outcomes(id).await.into_keys().collect();
    assert_eq!(items, committed);
}

#[tokio::test]
async fn results_of_an_ended_job_are_complete_in_both_orders() {
    let (service, clock) = service_with_clock().await;
    let id = service.submit(&numbered_lines(10)).await;
    run_intake(&service).await.unwrap();
    run_items(&service, id, |item| (item % 3 != 0).then_some(Completed)).await;
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let (lines, incomplete) = read_all(&service, id, ResultsOrder::Input, 3).await;
    assert_eq!((items_of(&lines), incomplete), ((0..10).collect::<Vec<_>>(), false));
    assert_eq!(lines.iter().filter(|line| line.contains("batch_expired")).count(), 4);
    let (lines, incomplete) = read_all(&service, id, ResultsOrder::Completion, 3).await;
    assert_eq!((lines.len(), incomplete), (6, false), "committed outcomes");
}

#[tokio::test]
async fn new_round_shows_each_item_once_and_refuses_the_old_cursor() {
    let service = TestService::new().await;
    let id = service.submit(&numbered_lines(10)).await;
    run_intake(&service).await.unwrap();
    run_items(&service, id, |item| Some(if item % 2 == 0 { Completed } else { Failed })).await;
    run_finalize(&service).await.unwrap();
    let job = service.job(id).await;
    let old = results(&service.store, &service.blobs, &job, &ResultsQuery { limit: 5, ..Default::default() })
        .await
        .unwrap()
        .next;
    let job =
        reopen(&service, id, Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() })
            .await;
    let query = ResultsQuery { after: Some(old), limit: 5, order: ResultsOrder::Completion };
    let err = results(&service.store, &service.blobs, &job, &query).await.unwrap_err();
    assert!(matches!(err, Error::EarlierRound { cursor: 1, now: 2 }), "{err}");
    let (lines, _) = read_all(&service, id, ResultsOrder::Completion, 4).await;
    let mut items = items_of(&lines);
    items.sort_unstable();
    assert_eq!(items, [0, 2, 4, 6, 8], "a failure that runs again is not shown");
    run_items(&service, id, |_| Some(Completed)).await;
    let (lines, _) = read_all(&service, id, ResultsOrder::Completion, 4).await;
    let mut items = items_of(&lines);
    items.sort_unstable();
    assert_eq!(items, (0..10).collect::<Vec<_>>());
}

#[test]
fn foreign_cursors_are_refused() {
    for text in ["", "c", "c.1.2.3", "c.1.2.3.4.5", "i.1", "i.1.-2", "x.1.2", "c.1.2.3.4 ", "i.99999999999999.1"] {
        assert!(text.parse::<ResultsCursor>().is_err(), "{text}");
    }
}

// Field reports 47 and 57: the groups add up to what did not complete.
#[tokio::test]
async fn failures_are_grouped_by_code_and_add_up() {
    let (service, clock) = service_with_clock().await;
    let id = service.submit(&numbered_lines(10)).await;
    run_intake(&service).await.unwrap();
    run_items(&service, id, |item| (item < 8).then_some(if item < 5 { Failed } else { Completed })).await;
    let groups = async || {
        let job = service.job(id).await;
        let groups = error_groups(&service.store, &service.blobs, &job).await.unwrap();
        groups.into_iter().map(|group| (group.code, group.count, group.example)).collect::<Vec<_>>()
    };
    let counts = |groups: &[(String, u64, Option<overnight_worker::items::ErrorExample>)]| {
        groups.iter().map(|(code, count, _)| (code.clone(), *count)).collect::<Vec<_>>()
    };
    let running = groups().await;
    assert_eq!(counts(&running), [("bad".to_owned(), 3), ("request_timeout".to_owned(), 2)]);
    let example = running[0].2.as_ref().unwrap();
    assert_eq!((example.item.index, example.message.as_deref()), (0, Some("no good")));
    assert_eq!(running[1].2.as_ref().unwrap().message.as_deref(), Some("too long"));
    clock.advance(Duration::from_secs(3_700));
    service.store.expire_due_jobs(10).await.unwrap();
    run_finalize(&service).await.unwrap();
    let ended = groups().await;
    assert_eq!(
        counts(&ended),
        [("bad".to_owned(), 3), ("batch_expired".to_owned(), 2), ("request_timeout".to_owned(), 2)]
    );
    assert_eq!(ended[1].2.as_ref().unwrap().item.index, 8);
    // After a second round only what stands is counted.
    reopen(&service, id, Reopen { items: ReopenItems::NotCompleted, window: None, leftover_segments: Vec::new() })
        .await;
    run_items(&service, id, |item| Some(if item == 1 { Failed } else { Completed })).await;
    assert_eq!(counts(&groups().await), [("request_timeout".to_owned(), 1)]);
}
