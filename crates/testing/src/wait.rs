//! Bounded waits. A test that waits for a condition says what it saw last.

use std::future::Future;
use std::time::{Duration, Instant};

/// Longest wait of [`until`].
pub const WAIT_MAX: Duration = Duration::from_secs(30);

/// Polls `look` until it answers `Ok`, for at most [`WAIT_MAX`]; panics with the
/// last `Err`, which says what was seen instead.
#[track_caller]
pub fn until<T, F, Fut>(what: &str, look: F) -> impl Future<Output = T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let caller = std::panic::Location::caller();
    let what = what.to_owned();
    poll(caller, what, look)
}

async fn poll<T, F, Fut>(caller: &'static std::panic::Location<'static>, what: String, mut look: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, String>>,
{
    let end = Instant::now() + WAIT_MAX;
    let mut pause = Duration::from_millis(2);
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if Instant::now() >= end => panic!("{caller}: waited for {what}, last saw {seen}"),
            Err(_) => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(Duration::from_millis(25));
    }
}
