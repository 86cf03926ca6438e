//! Running a statement: on the readers, or inside a write transaction; with the
//! store's errors.

use overnight_store::Error;
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Sqlite, SqlitePool};

use crate::error::failed;
use crate::transaction::Write;

/// What a bound statement is run for. `doing` is words after "to", for errors; inside a
/// transaction they are the transaction's own. A trait with one implementation, because
/// only so does the end of a statement stand where its binds do: `.bind(a).rows(&mut write)`.
pub(crate) trait Statement: Sized {
    /// Every row, each by `read`.
    async fn list<T>(
        self,
        readers: &SqlitePool,
        doing: &'static str,
        read: impl Fn(&SqliteRow) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        self.rows_of(readers, doing).await?.iter().map(read).collect()
    }

    /// Every row.
    async fn rows_of(self, readers: &SqlitePool, doing: &'static str) -> Result<Vec<SqliteRow>, Error>;

    /// The row, if there is one, by `read`.
    async fn find<T>(
        self,
        readers: &SqlitePool,
        doing: &'static str,
        read: impl Fn(&SqliteRow) -> Result<T, Error>,
    ) -> Result<Option<T>, Error>;

    /// Changes rows and says how many.
    async fn change(self, write: &mut Write) -> Result<u64, Error>;

    /// Every row, inside a transaction.
    async fn rows(self, write: &mut Write) -> Result<Vec<SqliteRow>, Error>;

    /// The one row, inside a transaction.
    async fn row(self, write: &mut Write) -> Result<SqliteRow, Error>;

    /// The row, if there is one, inside a transaction.
    async fn row_if_any(self, write: &mut Write) -> Result<Option<SqliteRow>, Error>;
}

impl Statement for Query<'_, Sqlite, SqliteArguments> {
    async fn rows_of(self, readers: &SqlitePool, doing: &'static str) -> Result<Vec<SqliteRow>, Error> {
        self.fetch_all(readers).await.map_err(failed(doing))
    }

    async fn find<T>(
        self,
        readers: &SqlitePool,
        doing: &'static str,
        read: impl Fn(&SqliteRow) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        self.fetch_optional(readers).await.map_err(failed(doing))?.as_ref().map(read).transpose()
    }

    async fn change(self, write: &mut Write) -> Result<u64, Error> {
        let doing = write.doing();
        Ok(self.execute(&mut **write).await.map_err(failed(doing))?.rows_affected())
    }

    async fn rows(self, write: &mut Write) -> Result<Vec<SqliteRow>, Error> {
        let doing = write.doing();
        self.fetch_all(&mut **write).await.map_err(failed(doing))
    }

    async fn row(self, write: &mut Write) -> Result<SqliteRow, Error> {
        let doing = write.doing();
        self.fetch_one(&mut **write).await.map_err(failed(doing))
    }

    async fn row_if_any(self, write: &mut Write) -> Result<Option<SqliteRow>, Error> {
        let doing = write.doing();
        self.fetch_optional(&mut **write).await.map_err(failed(doing))
    }
}
