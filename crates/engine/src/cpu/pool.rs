//! A small pool of threads for the CPU back end: runs numbered tasks on all threads and
//! returns when they are done.
//!
//! Invariant: [`Pool::run`] returns, or unwinds, only after no thread touches its closure any
//! more; a task runs exactly once. Which thread runs a task is left to chance, so a task's
//! result must not depend on it.
//! Waiting threads spin for some microseconds, since the next operation of a step follows at
//! once, and sleep when nothing comes. The only unsafe code outside the SIMD files of `cpu`.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Turns of the waiting loop before a thread sleeps or gives way: some tens of microseconds.
const SPINS: u32 = 20_000;

/// Called with the task's index and the thread's, which is below [`Pool::threads`].
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The threads. The caller of [`Pool::run`] works along, so `threads - 1` are started.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The number of the run (upper half), whether it is open, and how many workers are in it.
    state: AtomicU64,
    /// The closure of the open run; written by the leader only while no worker is in a run.
    task: UnsafeCell<Option<*const Task<'static>>>,
    num_tasks: AtomicUsize,
    next: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// Workers may enter the run.
const OPEN: u64 = 1 << 31;

fn run_of(state: u64) -> u32 {
    (state >> 32) as u32
}

fn workers_in(state: u64) -> u64 {
    state & (OPEN - 1)
}

// SAFETY: `task` is the only part that is not Sync by itself. The leader writes it while no run
// is open and no worker is in one, before the Release store that opens the run. A worker reads
// it only after it has entered an open run by an Acquire exchange, and leaves by a Release
// decrement, which the leader awaits after closing the run.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is to a `Sync` closure that outlives the run.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// Starts `threads - 1` workers. Errors when the system gives no thread.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            task: UnsafeCell::new(None),
            num_tasks: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new().name(format!("cpu-{index}")).spawn(move || shared.work(index))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that work in a run.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0, thread)` … `task(num_tasks - 1, thread)`, each once, on all threads.
    /// Panics when a task panicked.
    pub(crate) fn run(&mut self, num_tasks: usize, task: &Task<'_>) {
        if num_tasks <= 1 || self.workers.is_empty() {
            (0..num_tasks).for_each(|index| task(index, 0));
            return;
        }
        let shared = &*self.shared;
        let task: *const Task<'_> = task;
        // SAFETY: only the lifetime of the closure changes. `self` is borrowed mutably, so no run
        // is open and no worker is in one. It is not called after this function ends, because
        // the run is closed below and its workers are awaited, also after a panic.
        unsafe { *shared.task.get() = Some(std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task)) };
        shared.num_tasks.store(num_tasks, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        let run = run_of(shared.state.load(Ordering::Relaxed)).wrapping_add(1);
        shared.state.store(u64::from(run) << 32 | OPEN, Ordering::Release);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        // SAFETY: the closure lives until this function returns.
        let own = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(unsafe { &*task }, 0)));
        // A worker that has not come by now is not waited for: on a busy machine it may sleep long.
        let mut state = shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turns = 0u32;
        while workers_in(state) != 0 {
            turns = turns.saturating_add(1);
            if turns < SPINS {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            state = shared.state.load(Ordering::Acquire);
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!panicked, "a task of the CPU back end panicked");
    }

    /// Runs `task(index, parts, thread)` for `num` indices, each with its own part of the slices.
    /// Panics when a slice has fewer than `num` parts.
    pub(crate) fn each<S: Split>(&mut self, num: usize, slices: S, task: impl Fn(usize, S::Part, usize) + Sync) {
        assert!(num <= slices.parts(), "{num} tasks for {} parts", slices.parts());
        // SAFETY: each index runs once, and parts of different indices do not meet.
        self.run(num, &|index, thread| task(index, unsafe { slices.part(index) }, thread));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches panics of its tasks; there is nothing left to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, thread: usize) {
        let (mut seen, mut turns) = (0, 0u32);
        loop {
            let state = self.state.load(Ordering::Acquire);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if run_of(state) == seen || state & OPEN == 0 {
                turns += 1;
                if turns < SPINS {
                    std::hint::spin_loop();
                } else {
                    std::thread::park();
                    turns = 0;
                }
                continue;
            }
            if self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            (seen, turns) = (run_of(state), 0);
            // SAFETY: this thread is in the run, so `task` is its closure, which lives until the
            // decrement below.
            let task = unsafe { (*self.task.get()).map(|task| &*task) };
            if let Some(task) = task
                && catch_unwind(AssertUnwindSafe(|| self.take_tasks(task, thread))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    fn take_tasks(&self, task: &Task<'_>, thread: usize) {
        let num_tasks = self.num_tasks.load(Ordering::Relaxed);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= num_tasks {
                return;
            }
            task(index, thread);
        }
    }
}

/// A slice that several tasks write at once, each its own part.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts through `slice`, whose caller promises that they do not meet.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: std::marker::PhantomData }
    }

    /// # Safety
    /// No two ranges that are in use at the same time may meet.
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: within the slice by the assertion, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

/// Slices that are cut into parts, one for each task.
pub(crate) trait Split: Sync {
    type Part;

    /// How many parts there are.
    fn parts(&self) -> usize;

    /// # Safety
    /// No part may be in use twice at the same time.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// A slice cut into rows of equal length.
pub(crate) struct Rows<'a, T> {
    all: Parts<'a, T>,
    row: usize,
}

impl<'a, T> Rows<'a, T> {
    pub(crate) fn new(slice: &'a mut [T], row: usize) -> Self {
        Self { all: Parts::new(slice), row }
    }
}

impl<'a, T: Send> Split for Rows<'a, T> {
    type Part = &'a mut [T];

    fn parts(&self) -> usize {
        self.all.len / self.row
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        // SAFETY: rows of different indices do not meet; the rest is the caller's promise.
        unsafe { self.all.slice(index * self.row..(index + 1) * self.row) }
    }
}

macro_rules! split_tuple {
    ($($name:ident $at:tt),*) => {
        impl<$($name: Split),*> Split for ($($name,)*) {
            type Part = ($($name::Part,)*);

            fn parts(&self) -> usize {
                [$(self.$at.parts()),*].into_iter().min().unwrap_or(0)
            }

            unsafe fn part(&self, index: usize) -> Self::Part {
                // SAFETY: the caller's promise, passed on.
                unsafe { ($(self.$at.part(index),)*) }
            }
        }
    };
}
split_tuple!(A 0, B 1);
split_tuple!(A 0, B 1, C 2);
split_tuple!(A 0, B 1, C 2, D 3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_every_run() {
        let mut pool = Pool::new(3).expect("threads");
        let mut counts = vec![0u32; 1000];
        for run in 1..=50 {
            pool.each(100, Rows::new(&mut counts, 10), |_, row, _| row.iter_mut().for_each(|c| *c += 1));
            assert!(counts.iter().all(|&c| c == run));
        }
    }

    #[test]
    fn panic_of_a_task_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::new(2).expect("threads");
        for bad in [0, 63] {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|i, _| assert_ne!(i, bad))));
            assert!(caught.is_err());
        }
        let mut ok = vec![false; 64];
        pool.each(64, Rows::new(&mut ok, 1), |_, x, _| x[0] = true);
        assert!(ok.iter().all(|&x| x));
    }
}
