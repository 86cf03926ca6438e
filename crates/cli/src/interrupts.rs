//! Ctrl-C for commands that wait or download.
//!
//! Until [`Interrupts::listen`] the system's own action holds and ends the process at
//! once. From then on the signal is ours for the rest of the process, so everything
//! that runs later is raced against [`Interrupts::wait`]; a second Ctrl-C ends the
//! process without any clean-up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::error::{Exit, Result};

/// One per process; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupts {
    listening: Arc<AtomicBool>,
    met: CancellationToken,
}

impl Interrupts {
    /// Takes the signal over, once per process.
    pub(crate) fn listen(&self) -> Result {
        if self.listening.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut interrupt = signal(SignalKind::interrupt())?;
        let met = self.met.clone();
        tokio::spawn(async move {
            interrupt.recv().await;
            met.cancel();
            interrupt.recv().await;
            // Not by the handlers of libraries: a GPU that hangs would keep them.
            overnight_engine::exit_at_once(Exit::Interrupted as u8);
        });
        Ok(())
    }

    /// Resolves at the first Ctrl-C after [`Interrupts::listen`], and at once after it.
    pub(crate) async fn wait(&self) {
        self.met.cancelled().await;
    }
}
