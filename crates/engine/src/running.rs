//! The engines of this process, so that it can end them before it ends itself: a driver that is
//! unloaded in the middle of a step takes the process down with it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What can be asked to stop; it must not block.
pub(crate) trait Close: Send + Sync {
    fn close(&self);
}

#[derive(Default)]
struct Running {
    engines: Vec<Weak<dyn Close>>,
    num_threads: usize,
}

static RUNNING: Mutex<Running> = Mutex::new(Running { engines: Vec::new(), num_threads: 0 });
static ENDED: Condvar = Condvar::new();

/// Counts an engine's thread, or one that loads for it, for as long as it is kept.
pub(crate) struct Alive(());

impl Alive {
    /// Of a thread that loads a model onto a GPU: nothing can ask it to stop.
    pub(crate) fn loading() -> Self {
        lock().num_threads += 1;
        Self(())
    }

    /// Of a thread that ends some time after `engine` is closed.
    pub(crate) fn of(engine: Weak<dyn Close>) -> Self {
        let mut running = lock();
        running.engines.retain(|known| known.strong_count() > 0);
        running.engines.push(engine);
        running.num_threads += 1;
        Self(())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        lock().num_threads -= 1;
        ENDED.notify_all();
    }
}

/// Stops every engine of the process after the step it is in and waits for that, at most `limit`.
/// False when one did not end in time. Blocks: for the end of a program.
pub fn shut_down_all(limit: Duration) -> bool {
    let until = Instant::now() + limit;
    let engines = std::mem::take(&mut lock().engines);
    engines.iter().filter_map(Weak::upgrade).for_each(|engine| engine.close());
    let mut running = lock();
    while running.num_threads > 0 {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        running = ENDED.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

fn lock() -> MutexGuard<'static, Running> {
    // A count and a list, whole after every statement.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
