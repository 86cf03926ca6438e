//! A caller that gives up in the middle of a call leaves nothing behind that others meet.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use overnight_store::conformance::builders::{input, insert, new_file, new_job};
use overnight_store::{FilePurpose, Files, JobQuery, Jobs};
use overnight_store_postgres::{Options, PostgresStore};
use overnight_testing::postgres::Database;

/// Drops the call after so many looks at it, each as soon as the runtime comes by.
async fn give_up_after(num_polls: u32, call: impl Future) {
    let mut call = pin!(call);
    for _ in 0..num_polls {
        if poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Calls of several statements are dropped at every moment of their way, on one connection, and
/// what is written afterwards over it is there for others at once.
#[tokio::test]
async fn transaction_whose_begin_was_dropped_takes_no_later_write_with_it() {
    let Some(database) = Database::create() else { return };
    let url = database.store_url();
    let one = PostgresStore::open(&url, Options { connections: 1, listen: false, ..Options::default() }).await.unwrap();
    let other =
        PostgresStore::open(&url, Options { connections: 1, listen: false, ..Options::default() }).await.unwrap();
    let input = input(&one).await;
    let job = insert(&one, new_job(input)).await;
    for num_polls in 0..60 {
        give_up_after(num_polls, one.delete_job_if_terminal(job.id)).await;
        let file = new_file(FilePurpose::UserData);
        other.insert_file(file.clone()).await.unwrap();
        // One statement, and no transaction of its own that would end the one left open.
        assert!(one.delete_file_if_present(file.id).await.unwrap().is_applied());
        assert_eq!(
            other.find_file(file.id).await.unwrap(),
            None,
            "given up after {num_polls} polls: it is not written"
        );
    }
    assert_eq!(other.list_jobs(JobQuery { limit: 9, ..JobQuery::default() }).await.unwrap().rows.len(), 1);
    one.close().await;
    other.close().await;
}
