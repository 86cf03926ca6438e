//! Care of the file: check, size, backup, folding the log in.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overnight_store::Error;
use sqlx::{ConnectOptions, Connection, Row};

use crate::error::failed;
use crate::{SqliteStore, audit, migrate};

impl SqliteStore {
    /// Copies a consistent state into a new file while others go on. An existing
    /// file is refused.
    pub async fn backup(&self, to: &Path) -> Result<(), Error> {
        let doing = "back up the database";
        // `vacuum into` reads one snapshot; on a connection for reading it is
        // refused, so it runs on the writer, which it holds for its time.
        sqlx::query("vacuum into ?1")
            .bind(to.display().to_string())
            .execute(&self.writer)
            .await
            .map_err(failed(doing))?;
        Ok(())
    }

    /// Writes the file anew without the room that deleted rows left. Others wait for it;
    /// it needs room for a second copy while it works.
    pub async fn vacuum(&self) -> Result<(), Error> {
        sqlx::query("vacuum").execute(&self.writer).await.map_err(failed("shrink the database"))?;
        self.fold_log().await;
        Ok(())
    }

    /// Folds the log into the file and cuts it to nothing, if nobody is in the
    /// way; waits for nobody. Called when a job ends, so that an idle database is small.
    pub(crate) async fn fold_log(&self) {
        // On its own connection: with the writer's busy timeout the checkpoint
        // would wait for readers with the write lock in its hand.
        let folded = async {
            let mut connection = self.connect.clone().busy_timeout(Duration::ZERO).connect().await?;
            let folded = sqlx::query("pragma wal_checkpoint(truncate)").execute(&mut connection).await.map(drop);
            connection.close().await?;
            folded
        };
        if let Err(err) = folded.await {
            tracing::debug!(error = %overnight_types::chain(&err), "the log stays until the next checkpoint");
        }
    }

    pub(crate) async fn find_faults_of_structure(&self) -> Result<Vec<String>, Error> {
        let doing = "check the database";
        let mut connection = self.readers.acquire().await.map_err(failed(doing))?;
        let rows = sqlx::query("pragma quick_check(20)").fetch_all(&mut *connection).await.map_err(failed(doing))?;
        let mut findings = Vec::new();
        for row in rows {
            let finding: String = row.try_get(0).map_err(failed(doing))?;
            if finding != "ok" {
                findings.push(finding);
            }
        }
        let strays =
            sqlx::query("pragma foreign_key_check").fetch_all(&mut *connection).await.map_err(failed(doing))?;
        for row in strays.iter().take(audit::FINDINGS_MAX) {
            let table: String = row.try_get(0).map_err(failed(doing))?;
            let parent: String = row.try_get(2).map_err(failed(doing))?;
            findings.push(format!("a row of {table} names a row of {parent} that is not there"));
        }
        let found = migrate::found(&mut connection).await?;
        let needed = migrate::needed();
        if found == needed {
            findings.extend(audit::find_open_accounting(&mut connection).await?);
        } else {
            findings.push(format!("schema is at version {found}, this binary needs {needed}"));
        }
        Ok(findings)
    }

    pub(crate) fn bytes_on_disk(&self) -> Result<u64, Error> {
        let doing = "measure the database";
        let beside = |suffix: &str| {
            let mut name = self.path.clone().into_os_string();
            name.push(suffix);
            PathBuf::from(name)
        };
        let mut bytes = 0;
        for path in [self.path.clone(), beside("-wal")] {
            match std::fs::metadata(&path) {
                Ok(metadata) => bytes += metadata.len(),
                Err(err) if err.kind() == std::io::ErrorKind::NotFound => {}
                Err(err) => return Err(Error::Unavailable { doing, source: err.into() }),
            }
        }
        Ok(bytes)
    }
}
