//! Wake-ups between processes: NOTIFY when work became due, and a connection of its own
//! that listens.
//!
//! Invariant: nobody waits for either. A NOTIFY is sent after the change is durable,
//! outside of its transaction (inside, commits would queue behind one lock of the whole
//! server), many changes at once by one; a lost one costs a poll interval.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use overnight_store::Woken;
use overnight_types::chain;
use sqlx::PgPool;
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::{Options, Url};

/// What we listen to.
const CHANNEL: &str = "overnight";

/// Waits between tries to listen again.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(15);

/// A silent listener is asked this often whether its server is there.
const ASK_EVERY: Duration = Duration::from_secs(20);

/// Time for each of its answers.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Who waits here, and who tells the others.
#[derive(Debug)]
pub(crate) struct Wakes {
    waiting: Arc<Notify>,
    to_tell: Arc<Notify>,
    listening: Arc<AtomicBool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Wakes {
    /// Starts to listen, if the options say so, and to tell.
    pub(crate) fn start(url: &Url, options: &Options, pool: PgPool) -> Arc<Self> {
        let (waiting, to_tell) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let listening = Arc::new(AtomicBool::new(false));
        // Our own notifications are no news: who waits here was woken directly.
        let me = uuid::Uuid::now_v7().simple().to_string();
        let mut tasks = vec![tokio::spawn(tell(pool, to_tell.clone(), me.clone()))];
        if options.listen {
            let own = PgPoolOptions::new()
                .max_connections(1)
                .acquire_timeout(options.acquire_timeout)
                .max_lifetime(None)
                .idle_timeout(None)
                .connect_lazy_with(options.connect(url));
            tasks.push(tokio::spawn(listen(own, waiting.clone(), listening.clone(), me)));
        }
        Arc::new(Self { waiting, to_tell, listening, tasks: Mutex::new(tasks) })
    }

    /// Registered from here on, not from its first poll.
    pub(crate) fn woken(&self) -> Woken {
        Box::pin(self.waiting.clone().notified_owned())
    }

    /// Wakes who waits in this process now and the other processes in a moment.
    pub(crate) fn wake_all(&self) {
        self.waiting.notify_waiters();
        self.to_tell.notify_one();
    }

    pub(crate) fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        let tasks = self.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tasks.iter().for_each(JoinHandle::abort);
        self.listening.store(false, Ordering::Relaxed);
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn tell(pool: PgPool, to_tell: Arc<Notify>, me: String) {
    loop {
        to_tell.notified().await;
        let told = sqlx::query("select pg_notify($1, $2)").bind(CHANNEL).bind(&me).execute(&pool);
        match tokio::time::timeout(ANSWER_MAX, told).await {
            Ok(Ok(_)) => {}
            Ok(Err(err)) => {
                tracing::debug!(error = %chain(&err), "other workers were not woken; they find it by polling")
            }
            Err(_) => tracing::debug!("other workers were not woken in time; they find it by polling"),
        }
    }
}

async fn listen(own: PgPool, waiting: Arc<Notify>, listening: Arc<AtomicBool>, me: String) {
    let (mut wait, mut is_back) = (BACKOFF_MIN, false);
    loop {
        if let Some(mut listener) = connect(&own).await {
            listening.store(true, Ordering::Relaxed);
            if is_back {
                // Whatever was told in between was missed.
                waiting.notify_waiters();
            }
            (wait, is_back) = (BACKOFF_MIN, true);
            hear(&mut listener, &waiting, &me).await;
            listening.store(false, Ordering::Relaxed);
            tracing::warn!(
                "the connection that listens for new work is gone; work is found by polling until it is back"
            );
        }
        // Jitter, so that a hundred workers do not come back at once.
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
        wait = (wait * 2).min(BACKOFF_MAX);
    }
}

async fn connect(own: &PgPool) -> Option<PgListener> {
    let connected = async {
        let mut listener = PgListener::connect_with(own).await?;
        listener.ignore_pool_close_event(true);
        listener.listen(CHANNEL).await?;
        Ok::<_, sqlx::Error>(listener)
    };
    match tokio::time::timeout(ANSWER_MAX * 3, connected).await {
        Ok(Ok(listener)) => Some(listener),
        Ok(Err(err)) => {
            tracing::debug!(error = %chain(&err), "cannot listen for new work yet");
            None
        }
        Err(_) => None,
    }
}

/// Until the connection is gone.
async fn hear(listener: &mut PgListener, waiting: &Notify, me: &str) {
    loop {
        match tokio::time::timeout(ASK_EVERY, listener.try_recv()).await {
            Ok(Ok(Some(news))) => {
                if news.payload() != me {
                    waiting.notify_waiters();
                }
            }
            Ok(Ok(None) | Err(_)) => return,
            Err(_) => {
                let asked = sqlx::query("select 1").execute(&mut *listener);
                if !matches!(tokio::time::timeout(ANSWER_MAX, asked).await, Ok(Ok(_))) {
                    return;
                }
            }
        }
    }
}
