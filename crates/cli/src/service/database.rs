//! The database by its URL: SQLite's file, or a Postgres server.
//!
//! Invariant: no word printed or logged here holds a password.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_store::{Error, Store};
use overnight_store_postgres::{PostgresStore, Url};
use overnight_store_sqlite::SqliteStore;

use crate::config::Config;
use crate::error::{Exit, Failure, Result};

/// How long a service waits at its start for a server that does not answer yet.
const START_WAIT: Duration = Duration::from_secs(60);

/// Pause between two tries.
const TRY_EVERY: Duration = Duration::from_secs(2);

/// Where the database is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Database {
    /// A file of this machine.
    Sqlite(PathBuf),
    /// A server.
    Postgres(Url),
}

/// Where a schema stands, whichever database it is of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schema {
    pub(crate) found: i64,
    pub(crate) needed: i64,
}

impl Schema {
    pub(crate) fn is_current(self) -> bool {
        self.found == self.needed
    }
}

/// How the open goes about a database that is not as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opening {
    /// For a service: brings the schema up to date, waits a while for a server that is down.
    Serve,
    /// For a command: as it is, now.
    Look,
}

impl Database {
    pub(crate) fn of(config: &Config) -> Result<Self> {
        match &config.database.url {
            Some(url) if url.is_postgres() => {
                let url = Url::parse(url.expose()).map_err(|err| Failure::from_error("use database.url", &err))?;
                Ok(Self::Postgres(url))
            }
            _ => Ok(Self::Sqlite(config.database_path())),
        }
    }

    /// Makes the folder of a file that is not there yet.
    fn make_folder(&self) -> Result {
        let Self::Sqlite(path) = self else { return Ok(()) };
        let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return Ok(()) };
        std::fs::create_dir_all(folder)
            .map_err(|err| Failure::new(Exit::Failure, format!("could not make {}: {err}", folder.display())))
    }

    /// Opens it for everybody's use.
    pub(crate) async fn open(&self, opening: Opening) -> Result<Arc<dyn Store>> {
        let opened: Arc<dyn Store> = match self {
            Self::Sqlite(_) => Arc::new(self.open_sqlite(opening).await.map_err(|err| self.failure(&err))?),
            Self::Postgres(url) => Arc::new(self.open_postgres(url, opening).await?),
        };
        Ok(opened)
    }

    async fn open_sqlite(&self, opening: Opening) -> Result<SqliteStore, Error> {
        use overnight_store_sqlite::Options;
        let Self::Sqlite(path) = self else { unreachable!("only a file is opened as a file") };
        if self.make_folder().is_err() {
            tracing::debug!("the database's folder could not be made; opening says why");
        }
        let options = Options { migrate: opening == Opening::Serve, ..Options::default() };
        #[cfg(feature = "failpoints")]
        let options = Options { unsafe_without_epoch_guard: super::crash::is_epoch_guard_out(), ..options };
        SqliteStore::open(path, options).await
    }

    async fn open_postgres(&self, url: &Url, opening: Opening) -> Result<PostgresStore> {
        use overnight_store_postgres::Options;
        let options = Options { migrate: opening == Opening::Serve, ..Options::default() };
        #[cfg(feature = "failpoints")]
        let options = Options { unsafe_without_epoch_guard: super::crash::is_epoch_guard_out(), ..options };
        let started = Instant::now();
        loop {
            match PostgresStore::open(url, options.clone()).await {
                Ok(store) => return Ok(store),
                Err(err @ Error::Unavailable { .. })
                    if opening == Opening::Serve && started.elapsed() + TRY_EVERY < START_WAIT =>
                {
                    let left = START_WAIT.saturating_sub(started.elapsed()).as_secs();
                    let error = overnight_types::chain(&err);
                    tracing::warn!(error, "the database {self} does not answer; trying again for {left} s");
                    tokio::time::sleep(TRY_EVERY).await;
                }
                Err(err) => return Err(self.failure(&err)),
            }
        }
    }

    /// Why it could not be opened, and what to look at.
    pub(crate) fn failure(&self, err: &Error) -> Failure {
        let failure = Failure::from_error(&format!("open the database {self}"), err);
        match (self, err) {
            (_, Error::Schema { .. } | Error::NewerSchema { .. }) => failure,
            (Self::Sqlite(_), _) => failure.hint("`batch db check` looks into it; nothing was changed"),
            (Self::Postgres(_), Error::Unavailable { .. }) => {
                failure.hint("is the server running, and does it take connections from here? nothing was changed")
            }
            (Self::Postgres(_), _) => {
                failure.hint("check user, password and database in database.url; nothing was changed")
            }
        }
    }

    /// Creates or migrates it; says where its schema stood before.
    pub(crate) async fn migrate(&self) -> Result<Schema, Error> {
        match self {
            Self::Sqlite(path) => overnight_store_sqlite::migrate(path)
                .await
                .map(|state| Schema { found: state.found, needed: state.needed }),
            Self::Postgres(url) => overnight_store_postgres::migrate(url)
                .await
                .map(|state| Schema { found: state.found, needed: state.needed }),
        }
    }

    /// Where its schema stands; changes nothing.
    pub(crate) async fn schema(&self) -> Result<Schema, Error> {
        match self {
            Self::Sqlite(path) => overnight_store_sqlite::schema_state(path)
                .await
                .map(|state| Schema { found: state.found, needed: state.needed }),
            Self::Postgres(url) => overnight_store_postgres::schema_state(url)
                .await
                .map(|state| Schema { found: state.found, needed: state.needed }),
        }
    }

    /// A command that needs one refuses without; a server is asked when it is opened.
    pub(crate) fn is_there(&self) -> Result {
        match self {
            Self::Sqlite(path) if !path.is_file() => {
                Err(Failure::new(Exit::NotFound, format!("no database at {}", path.display()))
                    .hint("`batch serve` and `batch db migrate` make one; --data-dir says where"))
            }
            _ => Ok(()),
        }
    }

    /// Makes the folder and migrates.
    pub(crate) async fn make(&self) -> Result<Schema> {
        self.make_folder()?;
        self.migrate().await.map_err(|err| Failure::from_error(&format!("migrate {self}"), &err))
    }

    /// Gives the room of deleted rows back.
    pub(crate) async fn vacuum(&self) -> Result<(), Error> {
        match self {
            Self::Sqlite(path) => {
                let options = overnight_store_sqlite::Options { migrate: false, ..Default::default() };
                let store = SqliteStore::open(path, options).await?;
                let done = store.vacuum().await;
                store.close().await;
                done
            }
            Self::Postgres(url) => {
                let options = overnight_store_postgres::Options {
                    migrate: false,
                    listen: false,
                    connections: 2,
                    ..Default::default()
                };
                let store = PostgresStore::open(url, options).await?;
                let done = store.vacuum().await;
                store.close().await;
                done
            }
        }
    }
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "{}", path.display()),
            Self::Postgres(url) => write!(f, "{url}"),
        }
    }
}
