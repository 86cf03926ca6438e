//! How much is open over all shards that this worker holds.
//!
//! Invariant: a new shard is opened only while the items of the open ones do not fill
//! the window, whose items the planner keeps.
//! Counts only: it never sees an item.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::planner::Counts;

/// What a status page shows of the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowStatus {
    /// Most items prepared or at the engine at once.
    pub items_max: u32,
    /// Items prepared that wait for the engine.
    pub items_waiting: u32,
    /// Items at the engine.
    pub items_in_flight: u32,
    /// Items that get the answer of an equal one, which is counted above.
    pub items_merged: u32,
    /// Shards open.
    pub open_shards: u32,
    /// Items of open shards that have no outcome yet.
    pub open_items: u64,
    /// Input bytes of open shards.
    pub open_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    items_max: u32,
    open_shards: u32,
    open_items: u64,
    open_bytes: u64,
}

/// Counts of the window. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    bytes_max: u64,
    shards_max: u32,
}

impl Window {
    pub(crate) fn new(items_max: u32, bytes_max: u64, shards_max: u32) -> Self {
        let state = State { items_max, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), changed: Arc::default(), bytes_max, shards_max }
    }

    /// The engine's own limit may change (a remote one adapts).
    pub(crate) fn set_items_max(&self, items_max: u32) {
        let mut state = self.lock();
        let grew = items_max > state.items_max;
        state.items_max = items_max.max(1);
        drop(state);
        if grew {
            self.changed.notify_waiters();
        }
    }

    /// Whether another shard may be opened.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.lock();
        state.open_shards < self.shards_max
            && state.open_items < u64::from(state.items_max)
            && state.open_bytes < self.bytes_max
    }

    /// Resolves at the next change; create it before looking.
    pub(crate) fn changed(&self) -> tokio::sync::futures::OwnedNotified {
        self.changed.clone().notified_owned()
    }

    /// Accounts for a shard that has just been leased.
    pub(crate) fn open(&self, items: u32, bytes: u64) -> OpenShard {
        let mut state = self.lock();
        state.open_shards += 1;
        state.open_items += u64::from(items);
        state.open_bytes += bytes;
        OpenShard { window: self.clone(), items, bytes }
    }

    /// With the counts of the items in it.
    pub(crate) fn status(&self, counts: Counts) -> WindowStatus {
        let count = |items| u32::try_from(items).unwrap_or(u32::MAX);
        let state = self.lock();
        WindowStatus {
            items_max: state.items_max,
            items_waiting: count(counts.waiting),
            items_in_flight: count(counts.running),
            items_merged: count(counts.merged),
            open_shards: state.open_shards,
            open_items: state.open_items,
            open_bytes: state.open_bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counts stay consistent across a panic: each change is one short critical section.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One open shard's share of the window; gives everything back when dropped.
#[derive(Debug)]
pub(crate) struct OpenShard {
    window: Window,
    items: u32,
    bytes: u64,
}

impl OpenShard {
    /// Items that need no room any more in this lease: they have their outcome or wait for a retry.
    pub(crate) fn settled(&mut self, count: u32) {
        let count = count.min(self.items);
        self.items -= count;
        let mut state = self.window.lock();
        state.open_items -= u64::from(count);
        drop(state);
        self.window.changed.notify_waiters();
    }

    /// No item but these many needs room any more in this lease.
    pub(crate) fn leave_only(&mut self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if self.items > count {
            self.settled(self.items - count);
        }
    }

    /// Items that need room again after all.
    pub(crate) fn unsettled(&mut self, count: u32) {
        self.items += count;
        self.window.lock().open_items += u64::from(count);
    }
}

impl Drop for OpenShard {
    fn drop(&mut self) {
        let mut state = self.window.lock();
        state.open_shards -= 1;
        state.open_items -= u64::from(self.items);
        state.open_bytes -= self.bytes;
        drop(state);
        self.window.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_shard_opens_before_the_tail_of_the_first() {
        let window = Window::new(10, 1 << 20, 8);
        let mut a = window.open(64, 100);
        assert!(!window.has_room());
        a.settled(55);
        assert!(window.has_room(), "9 items left do not fill a window of 10");
    }

    #[test]
    fn what_a_draining_shard_does_not_run_needs_no_room() {
        let window = Window::new(10, 1 << 20, 8);
        let mut a = window.open(64, 100);
        a.leave_only(3);
        assert!(window.has_room());
        a.leave_only(3);
        a.settled(2);
        assert_eq!(window.status(Counts::default()).open_items, 1);
        drop(a);
        assert_eq!(window.status(Counts::default()).open_items, 0);
    }

    #[test]
    fn open_bytes_bound_the_window_too() {
        let window = Window::new(1_000, 1_000, 8);
        let a = window.open(1, 1_000);
        assert!(!window.has_room());
        drop(a);
        assert!(window.has_room());
    }
}
