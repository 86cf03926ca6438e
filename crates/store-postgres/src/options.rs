//! How the server is reached, and the limits that each of its sessions gets.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use overnight_store::Error;
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;

use crate::error::refused;

/// Where the database is. Shows itself without password and parameters.
#[derive(Clone, PartialEq, Eq)]
pub struct Url(String);

impl Url {
    /// Takes `postgres://` or `postgresql://`; refuses what cannot be read, without
    /// repeating it.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let doing = "read the database's URL";
        if !Self::is_postgres(text) {
            return Err(refused(doing, "it does not start with postgres://"));
        }
        // The driver's own words may hold the URL, and with it the password.
        PgConnectOptions::from_str(text).map_err(|_| refused(doing, "it is no postgres://USER@HOST:PORT/DATABASE"))?;
        Ok(Self(text.to_owned()))
    }

    /// Whether the text names a Postgres server.
    pub fn is_postgres(text: &str) -> bool {
        text.starts_with("postgres://") || text.starts_with("postgresql://")
    }

    /// The whole URL with its password, for tools that connect by it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The URL without its password, and the password, for programs whose arguments every
    /// user of the machine can read.
    pub fn without_password(&self) -> (String, Option<String>) {
        let (scheme, rest) = self.0.split_once("://").unwrap_or(("postgres", &self.0));
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(end);
        let mut password = None;
        let authority =
            match authority.rsplit_once('@').and_then(|(account, place)| Some((account.split_once(':')?, place))) {
                Some(((user, secret), place)) => {
                    password = Some(decoded(secret));
                    format!("{user}@{place}")
                }
                None => authority.to_owned(),
            };
        // It may stand among the parameters too, where it counts instead.
        let (path, parameters) = tail.split_once('?').unwrap_or((tail, ""));
        let mut kept = Vec::new();
        for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((key, secret)) if decoded(key) == "password" => {
                    password = Some(decoded(&secret.replace('+', " ")))
                }
                _ => kept.push(pair),
            }
        }
        let parameters = if kept.is_empty() { String::new() } else { format!("?{}", kept.join("&")) };
        (format!("{scheme}://{authority}{path}{parameters}"), password)
    }

    pub(crate) fn connect(&self) -> PgConnectOptions {
        PgConnectOptions::from_str(&self.0).expect("the URL was read when it was made")
    }
}

/// Undoes `%XX`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let pair = tail.get(..2).and_then(|pair| std::str::from_utf8(pair).ok());
        match pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()) {
            Some(byte) if first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.connect();
        let host =
            options.get_socket().map_or_else(|| options.get_host().to_owned(), |path| path.display().to_string());
        let database = options.get_database().unwrap_or(options.get_username());
        write!(f, "postgres://{}@{host}:{}/{database}", options.get_username(), options.get_port())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Url({self})")
    }
}

/// How [`crate::PostgresStore::open`] opens the database.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections at most; one more listens for wake-ups.
    pub connections: u32,
    /// How long a call waits for a connection, new or free, before it is an error.
    pub acquire_timeout: Duration,
    /// The server ends a statement that takes longer.
    pub statement_timeout: Duration,
    /// The server ends a statement that waits longer for a lock.
    pub lock_timeout: Duration,
    /// The server ends a session that leaves a transaction lying for longer: its process
    /// stands still or cannot be reached, and others wait for its locks.
    pub idle_in_transaction_timeout: Duration,
    /// Bring an older schema up to date; otherwise it is refused.
    pub migrate: bool,
    /// Listen for wake-ups of other processes. Without it they are noticed by polling.
    pub listen: bool,
    /// Moves the database's clock. For tests; zero elsewhere.
    pub clock_offset: ClockOffset,
    /// Takes the lease out of commits, so that a stale worker's write is taken.
    /// A negative control for tests that must be seen to fail without the guard;
    /// no configuration reaches it.
    pub unsafe_without_epoch_guard: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connections: 16,
            acquire_timeout: Duration::from_secs(10),
            statement_timeout: Duration::from_secs(30),
            lock_timeout: Duration::from_secs(5),
            idle_in_transaction_timeout: Duration::from_secs(10),
            migrate: true,
            listen: true,
            clock_offset: ClockOffset::default(),
            unsafe_without_epoch_guard: false,
        }
    }
}

impl Options {
    /// With the limits of every session in its start, so that no statement runs before them.
    pub(crate) fn connect(&self, url: &Url) -> PgConnectOptions {
        let ms = |limit: Duration| limit.as_millis().to_string();
        url.connect()
            .application_name("overnight")
            .options([
                ("statement_timeout", ms(self.statement_timeout)),
                ("lock_timeout", ms(self.lock_timeout)),
                ("idle_in_transaction_session_timeout", ms(self.idle_in_transaction_timeout)),
                // A client whose machine is gone is noticed within half a minute.
                ("tcp_keepalives_idle", "10".to_owned()),
                ("tcp_keepalives_interval", "5".to_owned()),
                ("tcp_keepalives_count", "4".to_owned()),
                ("client_connection_check_interval", "5000".to_owned()),
                // One plan for all values: they are found by the same indexes whatever the values
                // are, and planning would cost more than most of them.
                ("plan_cache_mode", "force_generic_plan".to_owned()),
                // What a role or a database may have set otherwise.
                ("default_transaction_isolation", "read committed".to_owned()),
                ("synchronous_commit", "on".to_owned()),
                ("timezone", "UTC".to_owned()),
            ])
            .statement_cache_capacity(256)
            // Statements are no news; slow ones are told by the server.
            .disable_statement_logging()
    }

    /// Longest time that a call may take, its server gone or not.
    pub(crate) fn call_max(&self) -> Duration {
        self.statement_timeout + Duration::from_secs(5)
    }
}

/// How far the database's clock is moved, in tests. Clones move together.
#[derive(Debug, Clone, Default)]
pub struct ClockOffset(Arc<AtomicI64>);

impl ClockOffset {
    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX / 2), Ordering::SeqCst);
    }

    /// Microseconds that are added to the clock.
    pub(crate) fn micros(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::Url;

    #[test]
    fn url_shows_neither_password_nor_parameters() {
        let url = Url::parse("postgres://me:hush%21@db.example:5433/jobs?sslmode=require").unwrap();
        assert_eq!(url.to_string(), "postgres://me@db.example:5433/jobs");
        assert!(!format!("{url:?}").contains("hush"));
        let (bare, password) = url.without_password();
        assert_eq!(bare, "postgres://me@db.example:5433/jobs?sslmode=require");
        assert_eq!(password.as_deref(), Some("hush!"));
        // Among the parameters it is the one that the driver takes.
        let url = Url::parse("postgres://me:old@db/jobs?sslmode=require&password=hush%21+2&x=1").unwrap();
        let (bare, password) = url.without_password();
        assert_eq!(bare, "postgres://me@db/jobs?sslmode=require&x=1");
        assert_eq!(password.as_deref(), Some("hush! 2"));
        let url = Url::parse("postgres://db/jobs?user=me&password=hush").unwrap();
        assert_eq!(url.without_password(), ("postgres://db/jobs?user=me".to_owned(), Some("hush".to_owned())));
        let refused = Url::parse("postgres://me:hush@db:notaport/jobs").expect_err("the port is no number");
        let told = overnight_types::chain(&refused);
        assert!(!told.contains("hush"), "{told}");
        assert!(Url::parse("mysql://me@db/jobs").is_err());
    }
}
