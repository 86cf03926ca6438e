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
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Turns of the waiting loop before a thread sleeps or gives way: some tens of microseconds.
const SPINS: u32 = 20_000;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// The threads. The caller of [`Pool::run`] works along, so `threads - 1` are started.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Counts the runs; a change is the start signal.
    epoch: AtomicU32,
    /// The closure of the current run; written by the leader only while `busy` is 0.
    task: UnsafeCell<Option<*const Task<'static>>>,
    num_tasks: AtomicUsize,
    next: AtomicUsize,
    /// Workers that have not finished the current run.
    busy: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `task` is the only part that is not Sync by itself. The leader writes it while `busy`
// is 0, before the Release increment of `epoch`; workers read it after an Acquire load that saw
// the increment and before their Release decrement of `busy`, which the leader awaits.
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
            epoch: AtomicU32::new(0),
            task: UnsafeCell::new(None),
            num_tasks: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new().name(format!("cpu-{index}")).spawn(move || shared.work())?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that work in a run.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` … `task(num_tasks - 1)`, each once, on all threads.
    /// Panics when a task panicked.
    pub(crate) fn run(&mut self, num_tasks: usize, task: &Task<'_>) {
        if num_tasks <= 1 || self.workers.is_empty() {
            (0..num_tasks).for_each(task);
            return;
        }
        let shared = &*self.shared;
        let task: *const Task<'_> = task;
        // SAFETY: only the lifetime of the closure changes. `self` is borrowed mutably, so there
        // is no other run, and `busy` is 0: no worker reads `task`. It is not called after this
        // function ends, because the loop below waits for `busy` to be 0 also after a panic.
        unsafe { *shared.task.get() = Some(std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task)) };
        shared.num_tasks.store(num_tasks, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::Release);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        // SAFETY: the closure lives until this function returns.
        let own = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(unsafe { &*task })));
        let mut turns = 0u32;
        while shared.busy.load(Ordering::Acquire) != 0 {
            turns = turns.saturating_add(1);
            if turns < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!panicked, "a task of the CPU back end panicked");
    }

    /// Runs `task(index, chunk)` for every chunk of `chunk` elements of `out`, the last maybe shorter.
    pub(crate) fn chunks<T: Send>(&mut self, out: &mut [T], chunk: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        let len = out.len();
        let parts = Parts::new(out);
        self.run(len.div_ceil(chunk), &|index| {
            let start = index * chunk;
            // SAFETY: chunks of different indices do not meet, and each index runs once.
            task(index, unsafe { parts.slice(start..(start + chunk).min(len)) });
        });
    }

    /// Like [`Pool::chunks`] for two slices that have equally many chunks.
    pub(crate) fn chunks2<A: Send, B: Send>(
        &mut self,
        (a, chunk_a): (&mut [A], usize),
        (b, chunk_b): (&mut [B], usize),
        task: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        let num = a.len().div_ceil(chunk_a);
        assert_eq!(num, b.len().div_ceil(chunk_b), "both slices have as many chunks");
        let (len_a, len_b) = (a.len(), b.len());
        let (a, b) = (Parts::new(a), Parts::new(b));
        self.run(num, &|index| {
            let (start_a, start_b) = (index * chunk_a, index * chunk_b);
            // SAFETY: chunks of different indices do not meet, and each index runs once.
            let (a, b) = unsafe {
                (a.slice(start_a..(start_a + chunk_a).min(len_a)), b.slice(start_b..(start_b + chunk_b).min(len_b)))
            };
            task(index, a, b);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches panics of its tasks; there is nothing left to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        loop {
            let mut turns = 0;
            while self.epoch.load(Ordering::Acquire) == seen {
                turns += 1;
                if turns < SPINS {
                    std::hint::spin_loop();
                } else {
                    std::thread::park();
                }
            }
            seen = seen.wrapping_add(1);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the Acquire load above saw the leader's increment, so `task` is the closure
            // of this run, which lives until `busy` is 0, that is after the decrement below.
            let task = unsafe { (*self.task.get()).map(|task| &*task) };
            if let Some(task) = task
                && catch_unwind(AssertUnwindSafe(|| self.take_tasks(task))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn take_tasks(&self, task: &Task<'_>) {
        let num_tasks = self.num_tasks.load(Ordering::Relaxed);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= num_tasks {
                return;
            }
            task(index);
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
    #[expect(clippy::mut_from_ref, reason = "handing out disjoint parts is what this type is for")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: within the slice by the assertion, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_every_run() {
        let mut pool = Pool::new(3).expect("threads");
        let mut counts = vec![0u32; 1000];
        for run in 1..=50 {
            pool.chunks(&mut counts, 7, |_, chunk| chunk.iter_mut().for_each(|c| *c += 1));
            assert!(counts.iter().all(|&c| c == run));
        }
    }

    #[test]
    fn panic_of_a_task_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::new(2).expect("threads");
        for bad in [0, 63] {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|i| assert_ne!(i, bad))));
            assert!(caught.is_err());
        }
        let mut ok = vec![false; 64];
        pool.chunks(&mut ok, 1, |_, x| x[0] = true);
        assert!(ok.iter().all(|&x| x));
    }
}
