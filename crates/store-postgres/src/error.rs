//! Folds sqlx's errors into the store's, by SQLSTATE.

use overnight_store::Error;

/// For `map_err`: `doing` is words after "to".
pub(crate) fn failed(doing: &'static str) -> impl Fn(sqlx::Error) -> Error {
    move |source| {
        if is_unavailable(&source) {
            Error::Unavailable { doing, source: source.into() }
        } else {
            Error::Refused { doing, source: source.into() }
        }
    }
}

/// A refusal of ours: the caller asks for what would break an invariant.
pub(crate) fn refused(doing: &'static str, why: impl Into<String>) -> Error {
    Error::Refused { doing, source: why.into().into() }
}

/// The server did not answer in time.
pub(crate) fn timed_out(doing: &'static str) -> Error {
    Error::Unavailable { doing, source: "the server did not answer in time".into() }
}

/// A stored value that we do not write.
pub(crate) fn damaged(what: &'static str, value: impl std::fmt::Debug) -> Error {
    Error::Damaged { what, value: format!("{value:?}").chars().take(80).collect() }
}

/// Whether another try at once may do: two transactions got in each other's way and
/// the server rolled this one back.
pub(crate) fn is_conflict(err: &Error) -> bool {
    let Error::Unavailable { source, .. } = err else { return false };
    let code = source.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    // serialization_failure, deadlock_detected
    code.and_then(|err| err.code()).is_some_and(|code| matches!(&*code, "40001" | "40P01"))
}

/// Whether trying again later may help: no connection, a server that starts, stops or
/// follows another one, a conflict, a time limit, no room.
fn is_unavailable(err: &sqlx::Error) -> bool {
    match err {
        sqlx::Error::Database(err) => {
            let code = err.code();
            let code = code.as_deref().unwrap_or("");
            matches!(
                code,
                // A lock or a statement took too long; a server that only reads (a standby
                // before its promotion); a plan of before a migration.
                "55P03" | "57014" | "25006" | "25P03" | "0A000"
            ) || ["08", "40", "53", "57P", "58"].iter().any(|class| code.starts_with(class))
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => true,
        _ => false,
    }
}

/// Makes a call again, a few times, when only a conflict stood in its way. The one
/// layer of retry in this crate; whoever calls the store has its own for the rest.
macro_rules! settling_conflicts {
    ($call:expr) => {{
        let mut tries = 0u32;
        loop {
            match $call.await {
                Err(err) if tries < $crate::error::CONFLICTS_MAX && $crate::error::is_conflict(&err) => {
                    tries += 1;
                    $crate::error::stand_back(tries).await;
                }
                answer => break answer,
            }
        }
    }};
}
pub(crate) use settling_conflicts;

/// Conflicts after which a call gives up.
pub(crate) const CONFLICTS_MAX: u32 = 4;

/// A wait that grows, with jitter, so that the two do not meet again.
pub(crate) async fn stand_back(tries: u32) {
    let most = 5u64 << tries.min(6);
    tokio::time::sleep(std::time::Duration::from_millis(rand::random_range(1..=most))).await;
}
