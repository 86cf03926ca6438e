//! The bounded window: how many items are at the engine, and how much input is
//! open, over all shards that this worker holds.
//!
//! Invariants: at most `items_max` items are at the engine at once; a new shard is
//! opened only while the items of the open ones do not fill the window; while one
//! shard runs alone, no other shard's items are at the engine.
//! Counts only: it never sees an item.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// What a status page shows of the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowStatus {
    /// Most items at the engine at once.
    pub items_max: u32,
    /// Items at the engine.
    pub items_in_flight: u32,
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
    in_flight: u32,
    /// Items that ever left the engine; rises only.
    finished: u64,
    open_shards: u32,
    open_items: u64,
    open_bytes: u64,
    /// A shard that runs alone or waits to.
    alone: Option<u64>,
    next_ticket: u64,
}

/// Counts of the window. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    bytes_max: u64,
    shards_max: u32,
}

/// When an item may be taken for scheduled: once this many items have left the engine.
pub(crate) type Turn = u64;

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
        state.alone.is_none()
            && state.open_shards < self.shards_max
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
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        OpenShard { window: self.clone(), items, bytes, in_flight: 0, ticket }
    }

    pub(crate) fn status(&self) -> WindowStatus {
        let state = self.lock();
        WindowStatus {
            items_max: state.items_max,
            items_in_flight: state.in_flight,
            open_shards: state.open_shards,
            open_items: state.open_items,
            open_bytes: state.open_bytes,
        }
    }

    /// Items that ever left the engine, to compare with a [`Turn`].
    pub(crate) fn finished(&self) -> u64 {
        self.lock().finished
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
    in_flight: u32,
    ticket: u64,
}

impl OpenShard {
    /// Takes up to `want` places at the engine; 0 when there is none now.
    pub(crate) fn try_take(&mut self, want: u32) -> u32 {
        let mut state = self.window.lock();
        if state.alone.is_some_and(|ticket| ticket != self.ticket) {
            return 0;
        }
        let taken = want.min(state.items_max.saturating_sub(state.in_flight));
        state.in_flight += taken;
        self.in_flight += taken;
        taken
    }

    /// The turn of an item submitted now as the last of those in flight, when the
    /// engine runs `running_max` at once and takes them in order.
    pub(crate) fn turn(&self, running_max: u32) -> Turn {
        let state = self.window.lock();
        state.finished + u64::from(state.in_flight.saturating_sub(running_max))
    }

    /// Gives places back whose items left the engine.
    pub(crate) fn left_engine(&mut self, count: u32) {
        assert!(count <= self.in_flight, "{count} places given back of {}", self.in_flight);
        if count == 0 {
            return;
        }
        self.in_flight -= count;
        let mut state = self.window.lock();
        state.in_flight -= count;
        state.finished += u64::from(count);
        drop(state);
        self.window.changed.notify_waiters();
    }

    /// Gives places back that were taken and not used.
    pub(crate) fn left_engine_unused(&mut self, count: u32) {
        assert!(count <= self.in_flight, "{count} places given back of {}", self.in_flight);
        self.in_flight -= count;
        self.window.lock().in_flight -= count;
        if count > 0 {
            self.window.changed.notify_waiters();
        }
    }

    /// Items that need no place any more in this lease: they have their outcome or wait for a retry.
    pub(crate) fn settled(&mut self, count: u32) {
        let count = count.min(self.items);
        self.items -= count;
        let mut state = self.window.lock();
        state.open_items -= u64::from(count);
        drop(state);
        self.window.changed.notify_waiters();
    }

    /// Items that need a place again after all.
    pub(crate) fn unsettled(&mut self, count: u32) {
        self.items += count;
        self.window.lock().open_items += u64::from(count);
    }

    /// Asks for the engine alone; `true` once no other shard's item is there. Call
    /// again after [`Window::changed`] until then. Ends with the shard.
    pub(crate) fn try_alone(&mut self) -> bool {
        let mut state = self.window.lock();
        let mine = *state.alone.get_or_insert(self.ticket) == self.ticket;
        mine && state.in_flight == self.in_flight
    }

    /// The window that this shard is part of.
    pub(crate) fn window(&self) -> &Window {
        &self.window
    }
}

impl Drop for OpenShard {
    fn drop(&mut self) {
        let mut state = self.window.lock();
        state.open_shards -= 1;
        state.open_items -= u64::from(self.items);
        state.open_bytes -= self.bytes;
        state.in_flight -= self.in_flight;
        state.finished += u64::from(self.in_flight);
        if state.alone == Some(self.ticket) {
            state.alone = None;
        }
        drop(state);
        self.window.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_never_holds_more_than_its_items() {
        let window = Window::new(10, 1 << 20, 8);
        let (mut a, mut b) = (window.open(64, 100), window.open(64, 100));
        assert_eq!((a.try_take(7), b.try_take(7), a.try_take(1)), (7, 3, 0));
        a.left_engine(2);
        assert_eq!(b.try_take(9), 2);
        assert_eq!(window.status().items_in_flight, 10);
        drop(b);
        assert_eq!(window.status().items_in_flight, 5);
    }

    #[test]
    fn second_shard_opens_before_the_tail_of_the_first() {
        let window = Window::new(10, 1 << 20, 8);
        let mut a = window.open(64, 100);
        assert!(!window.has_room());
        a.settled(55);
        assert!(window.has_room(), "9 items left do not fill a window of 10");
    }

    #[test]
    fn open_bytes_bound_the_window_too() {
        let window = Window::new(1_000, 1_000, 8);
        let a = window.open(1, 1_000);
        assert!(!window.has_room());
        drop(a);
        assert!(window.has_room());
    }

    #[test]
    fn shard_runs_alone_only_once_the_others_left_the_engine() {
        let window = Window::new(10, 1 << 20, 8);
        let (mut suspect, mut other) = (window.open(4, 1), window.open(4, 1));
        assert_eq!(other.try_take(2), 2);
        assert!(!suspect.try_alone());
        assert_eq!(other.try_take(1), 0, "nothing new while a shard waits to run alone");
        assert!(!window.has_room());
        other.left_engine(2);
        assert!(suspect.try_alone());
        assert_eq!(suspect.try_take(1), 1);
        drop(suspect);
        assert_eq!(other.try_take(1), 1);
    }

    #[test]
    fn turn_comes_when_enough_items_ahead_have_left() {
        let window = Window::new(100, 1 << 20, 8);
        let mut shard = window.open(50, 1);
        assert_eq!(shard.try_take(40), 40);
        assert_eq!(shard.turn(32), 8);
        shard.left_engine(8);
        assert_eq!(window.finished(), 8);
        assert_eq!(shard.turn(32), 8);
    }
}
