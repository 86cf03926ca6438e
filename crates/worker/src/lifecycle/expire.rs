//! Ends the window of jobs that are past it, and takes back leases that ran out.

use overnight_store::Store;

use crate::Error;

/// Rows per transaction.
const PIECE: u32 = 200;
/// Pieces in one run; the rest waits for the next.
const PIECES_MAX: u32 = 50;

/// Moves jobs past their window to finalizing, and frees shards whose lease ran
/// out while nobody claims. Bounded; what is left is due again at once.
pub async fn expire(store: &dyn Store) -> Result<(), Error> {
    for _ in 0..PIECES_MAX {
        let expired = store.expire_due_jobs(PIECE).await.map_err(Error::store("expire jobs"))?;
        for job in &expired {
            tracing::info!(job.id = %job, "the job's window closed");
        }
        if expired.len() < PIECE as usize {
            break;
        }
    }
    for _ in 0..PIECES_MAX {
        let released = store.release_expired_leases(PIECE).await.map_err(Error::store("release expired leases"))?;
        if released < PIECE {
            break;
        }
    }
    Ok(())
}
