//! A shard under lease: what is prepared, what is at the engine, what waits for a
//! retry, and how an output becomes an outcome. Straight-line parts; the order in
//! which they run is `shard_run`'s.
//!
//! Every undone item of the shard is in exactly one place: `queue` (not prepared),
//! `active` (prepared: in `ready` until the window takes it, then in the window or at the
//! engine), `waiting` (a retry is due later), or it has its outcome.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use overnight_blobs::ItemRecord;
use overnight_store::{NewFault, NewShard, ShardKey};
use overnight_types::{BatchRequestId, Bitmap, FailedTry, FileId, ItemIndex, OutcomeKind, Timestamp, chain};
use uuid::Uuid;

use crate::checkpoint::Unwritten;
use crate::generate::Output;
use crate::mapper::Answer;
use crate::outcome::{self, Ended, Verdict};
use crate::planner::{Delivery, Event, Offer, Seat};
use crate::prepare::{InputLine, Piece, Recipe, Run, Work};
use crate::renewal::{LeaseGuard, Order};
use crate::window::OpenShard;
use crate::worker::Shared;

/// Lines prepared in one go: the first piece is small, so that the engine starts soon. The
/// next one is prepared when no more than this wait to enter the window.
const FIRST_PIECE_LINES: usize = 64;
const PIECE_LINES: usize = 1_024;
const PIECE_BYTES: usize = 4 << 20;
/// Of prepared items: a piece ends there, and no other one is begun while as much waits.
pub(crate) const PREPARED_BYTES_MAX: u64 = 8 << 20;

/// Why work on a shard ends before its items do.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The lease is gone: write nothing.
    Lost,
    /// Told to hand back.
    HandBack,
    /// Trouble that is not the items': the shard goes back, nothing is counted.
    Trouble(String),
}

impl Stop {
    /// What an order means for work that runs nothing at the moment.
    pub(crate) fn of(order: Order) -> Option<Self> {
        match order {
            Order::Run => None,
            Order::Drain | Order::HandBack => Some(Self::HandBack),
            Order::Stalled => Some(Self::stalled()),
            Order::Lost => Some(Self::Lost),
        }
    }

    /// The engine has work and ends no step.
    pub(crate) fn stalled() -> Self {
        Self::Trouble("the engine makes no progress".to_owned())
    }

    pub(crate) fn trouble(doing: &str, err: &(dyn std::error::Error + 'static)) -> Self {
        Self::Trouble(format!("could not {doing}: {}", chain(err)))
    }
}

/// A prepared item.
#[derive(Debug)]
struct Active {
    custom_id: Bytes,
    answer: Answer,
    seed: Option<u64>,
}

/// An item of the shard that failed before.
#[derive(Debug)]
pub(crate) struct KnownFault {
    pub(crate) bit: u32,
    /// From now.
    pub(crate) wait: Duration,
    /// Tries so far.
    pub(crate) attempts: u32,
    /// Those that are known with their errors, oldest first.
    pub(crate) tries: Vec<FailedTry>,
}

/// A shard under lease.
#[derive(Debug)]
pub(crate) struct OpenLease {
    pub(crate) shared: Arc<Shared>,
    pub(crate) key: ShardKey,
    pub(crate) cut: NewShard,
    pub(crate) guard: LeaseGuard,
    /// Given up before `open`, whose end lets others look whether the engine is free.
    pub(crate) seat: Seat,
    pub(crate) open: OpenShard,
    pub(crate) recipe: Arc<Recipe>,
    pub(crate) input: FileId,
    /// How often the engine had broken down when the shard was opened.
    breakdowns_before: u32,
    /// Whether its items run one at a time, and the item that ran alone before: (bit, deaths).
    pub(crate) suspicion: (bool, Option<(u32, u32)>),
    pub(crate) next_seq: u32,
    /// Items whose outcome is committed.
    pub(crate) done: Bitmap,
    pub(crate) unwritten: Unwritten,
    retry_budget: u64,
    /// Lines of undone items by bit.
    lines: HashMap<u32, Bytes>,
    /// Tries so far, of items that failed before.
    attempts: HashMap<u32, u32>,
    /// What they failed of.
    failed_tries: HashMap<u32, Vec<FailedTry>>,
    queue: VecDeque<u32>,
    /// What the window has not taken yet; in reverse order: the next one is last.
    ready: Vec<Offer>,
    active: HashMap<u32, Active>,
    waiting: BinaryHeap<Reverse<(Instant, u32)>>,
    num_pieces: usize,
}

/// What an open lease starts from.
pub(crate) struct OpenLeaseParts {
    pub(crate) shared: Arc<Shared>,
    pub(crate) guard: LeaseGuard,
    pub(crate) seat: Seat,
    pub(crate) open: OpenShard,
    pub(crate) recipe: Arc<Recipe>,
    pub(crate) retry_budget: u64,
    pub(crate) input: FileId,
    pub(crate) crashes_max: u32,
    pub(crate) shard: overnight_store::Shard,
}

impl OpenLease {
    pub(crate) fn new(parts: OpenLeaseParts) -> Self {
        let breakdowns_before = parts.shared.num_breakdowns();
        let shard = parts.shard;
        let probe = shard.probe_item.and_then(|item| u32::try_from(item.0.checked_sub(shard.cut.first_item.0)?).ok());
        let is_suspect = probe.is_some() || shard.crashes >= parts.crashes_max;
        Self {
            shared: parts.shared,
            key: ShardKey { job: shard.job, shard: shard.cut.shard, epoch: shard.epoch },
            cut: shard.cut,
            guard: parts.guard,
            seat: parts.seat,
            open: parts.open,
            recipe: parts.recipe,
            input: parts.input,
            breakdowns_before,
            suspicion: (is_suspect, probe.map(|bit| (bit, shard.probe_deaths))),
            next_seq: shard.next_seq,
            done: shard.done,
            unwritten: Unwritten::new(),
            retry_budget: parts.retry_budget,
            lines: HashMap::new(),
            attempts: HashMap::new(),
            failed_tries: HashMap::new(),
            queue: VecDeque::new(),
            ready: Vec::new(),
            active: HashMap::new(),
            waiting: BinaryHeap::new(),
            num_pieces: 0,
        }
    }

    /// Whether the engine broke down while this lease was held.
    pub(crate) fn has_engine_broken(&self) -> bool {
        self.shared.num_breakdowns() > self.breakdowns_before
    }

    /// Takes the lines of undone items, and what is known of their failed tries.
    pub(crate) fn load(&mut self, lines: Vec<InputLine>, faults: Vec<KnownFault>) {
        let now = Instant::now();
        for KnownFault { bit, wait, attempts, tries } in faults {
            self.attempts.insert(bit, attempts);
            self.failed_tries.insert(bit, tries);
            if !wait.is_zero() {
                self.waiting.push(Reverse((now + wait, bit)));
            }
        }
        self.lines = lines.into_iter().map(|line| (line.bit, line.content)).collect();
        self.open.settled(u32::try_from(self.waiting.len()).unwrap_or(u32::MAX));
    }

    /// Bits of undone items, lowest first, that wait for nothing.
    pub(crate) fn runnable(&self) -> Vec<u32> {
        let waiting: std::collections::HashSet<u32> = self.waiting.iter().map(|Reverse((_, bit))| *bit).collect();
        let mut bits: Vec<u32> = self.lines.keys().copied().filter(|bit| !waiting.contains(bit)).collect();
        bits.sort_unstable();
        bits
    }

    /// Puts items up to be run.
    pub(crate) fn enqueue(&mut self, bits: impl IntoIterator<Item = u32>) {
        self.queue.extend(bits);
    }

    /// Whether nothing is queued or prepared.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.is_empty() && self.active.is_empty()
    }

    /// Whether something waits to enter the window.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes back everything that has not begun; `true` once nothing runs either.
    pub(crate) fn drain(&mut self) -> bool {
        let unentered = std::mem::take(&mut self.ready).into_iter().map(|offer| offer.bit);
        for bit in unentered.chain(self.seat.withdraw()) {
            self.active.remove(&bit);
        }
        // Other jobs' items take the room of what does not start.
        self.open.leave_only(self.active.len());
        self.active.is_empty()
    }

    /// Until the first waiting item is due; `None` when none waits.
    pub(crate) fn next_retry_at(&self) -> Option<Instant> {
        self.waiting.peek().map(|Reverse((at, _))| *at)
    }

    /// Puts waiting items whose time has come up to be run.
    pub(crate) fn requeue_due(&mut self) {
        let now = Instant::now();
        while self.waiting.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            let Some(Reverse((_, bit))) = self.waiting.pop() else { break };
            self.open.unsettled(1);
            self.queue.push_back(bit);
        }
    }

    /// The next lines to prepare; empty when there are none, or enough are prepared.
    pub(crate) fn next_piece(&mut self) -> Vec<InputLine> {
        let has_enough = self.ready.len() > FIRST_PIECE_LINES
            || self.ready.iter().map(Offer::num_bytes).sum::<u64>() >= PREPARED_BYTES_MAX;
        if has_enough {
            return Vec::new();
        }
        let most = if self.num_pieces == 0 { FIRST_PIECE_LINES } else { PIECE_LINES };
        let mut piece = Vec::new();
        let mut bytes = 0;
        while piece.len() < most && bytes < PIECE_BYTES {
            let Some(bit) = self.queue.pop_front() else { break };
            let content = self.lines.get(&bit).expect("an undone item keeps its line until its outcome").clone();
            bytes += content.len();
            piece.push(InputLine { bit, content });
        }
        self.num_pieces += usize::from(!piece.is_empty());
        piece
    }

    /// Takes prepared items: refusals end at once, the others are ordered by prefix, so that
    /// the window meets them together.
    pub(crate) fn take_prepared(&mut self, piece: Piece) {
        let now = Timestamp::now();
        piece.left.into_iter().rev().for_each(|bit| self.queue.push_front(bit));
        for item in piece.items {
            let ended = match item.work {
                Work::Run(run) => {
                    let Run { offer, answer, seed } = *run;
                    self.ready.push(offer);
                    self.active.insert(item.bit, Active { custom_id: item.custom_id, answer, seed });
                    continue;
                }
                Work::Refused(refusal) => Ended::error(refusal.status, &refusal.error),
                Work::Changed(why) => Ended::input_unavailable(&why),
            };
            let (custom_id, tries) = (item.custom_id, self.tries(item.bit) + 1);
            self.end_item(item.bit, &custom_id, None, tries, (now, now), &ended);
        }
        self.ready.sort_unstable_by(|a, b| (&b.chain, b.bit).cmp(&(&a.chain, a.bit)));
    }

    /// Enters ready items as far as the window has room.
    pub(crate) fn feed(&mut self) {
        self.seat.enter(&mut self.ready);
    }

    /// Takes what has come for items in the window.
    pub(crate) fn collect(&mut self, deliveries: Vec<Delivery>) -> Result<(), Stop> {
        fail::fail_point!("worker::outputs_collected");
        let finished_at = Timestamp::now();
        let mut trouble = None;
        for Delivery { bit, id, started_at, event } in deliveries {
            // What still comes for a try that has ended is nobody's.
            let active = self.active.get_mut(&bit).filter(|active| active.answer.request_ids().contains(&id));
            let Some(active) = active else { continue };
            let (verdict, retry_after) = match event {
                Event::Output(output) => {
                    let retry_after = match &output {
                        Output::Response { retry_after, .. } => *retry_after,
                        _ => None,
                    };
                    (outcome::judge(active.answer.push(output)), retry_after)
                }
                Event::Overdue => (Verdict::Ended(Ended::request_timeout()), None),
                Event::Broken => panic!("the engine panicked while it took the requests of this shard"),
            };
            match verdict {
                Verdict::Pending => {}
                Verdict::Trouble(message) => trouble = Some(message),
                verdict => self.settle(bit, verdict, retry_after, (started_at, finished_at)),
            }
        }
        trouble.map_or(Ok(()), |message| Err(Stop::Trouble(message)))
    }

    /// Ends an item's try.
    fn settle(&mut self, bit: u32, verdict: Verdict, retry_after: Option<Duration>, times: (Timestamp, Timestamp)) {
        let active = self.active.remove(&bit).expect("a settled item was at the engine");
        if active.answer.request_ids().len() > 1 {
            // Those of its requests that still run are needed no more.
            self.seat.settle(bit);
        }
        let tries = self.tries(bit) + 1;
        let ended = match verdict {
            Verdict::Ended(ended) => ended,
            Verdict::Retry { last, message } => {
                if self.may_retry(tries) {
                    return self.retry(bit, tries, last, message, retry_after);
                }
                last
            }
            // Cancelled, but not by this shard: it runs again.
            Verdict::Dropped | Verdict::Pending | Verdict::Trouble(_) => return self.queue.push_back(bit),
        };
        self.end_item(bit, &active.custom_id, active.seed, tries, times, &ended);
    }

    fn tries(&self, bit: u32) -> u32 {
        self.attempts.get(&bit).copied().unwrap_or(0)
    }

    fn may_retry(&self, tries: u32) -> bool {
        tries < self.shared.config.attempts_max && self.shared.retries.try_take(self.key.job, self.retry_budget)
    }

    fn retry(&mut self, bit: u32, tries: u32, last: Ended, message: String, retry_after: Option<Duration>) {
        let delay = outcome::backoff(&self.shared.config, tries, retry_after);
        self.attempts.insert(bit, tries);
        let code = last.error_code.unwrap_or_else(|| "unknown".to_owned());
        let failed =
            FailedTry { number: tries, http_status: last.http_status, code: code.clone(), message: message.clone() };
        self.failed_tries.entry(bit).or_default().push(failed);
        self.waiting.push(Reverse((Instant::now() + delay, bit)));
        self.open.settled(1);
        self.unwritten.push_fault(NewFault {
            item: self.item(bit),
            attempts: tries,
            delay,
            http_status: last.http_status,
            code,
            message,
        });
    }

    /// Puts an item's outcome into the segment under way.
    fn end_item(
        &mut self,
        bit: u32,
        custom_id: &[u8],
        seed: Option<u64>,
        attempts: u32,
        (started_at, finished_at): (Timestamp, Timestamp),
        ended: &Ended,
    ) {
        let item = self.item(bit);
        let request_id = request_id(self.recipe.lease, bit);
        let record = ItemRecord {
            item,
            outcome: ended.outcome,
            http_status: ended.http_status,
            error_code: ended.error_code.clone(),
            attempts,
            failed_tries: self.failed_tries.remove(&bit).unwrap_or_default(),
            seed: seed.filter(|_| ended.outcome == OutcomeKind::Completed),
            usage: ended.usage,
            started_at,
            finished_at,
            finish_reason: ended.finish_reason.clone(),
            line: ended.line(BatchRequestId { job: self.key.job, item }, custom_id, &request_id),
        };
        self.push_record(&record);
        self.lines.remove(&bit);
        self.open.settled(1);
    }

    /// Ends an item without running it.
    pub(crate) fn end_unrun(&mut self, bit: u32, ended: &Ended) {
        let now = Timestamp::now();
        let custom_id = self.lines.get(&bit).and_then(custom_id_of).unwrap_or(Bytes::from_static(b"null"));
        let tries = self.tries(bit);
        self.end_item(bit, &custom_id, None, tries, (now, now), ended);
    }

    pub(crate) fn item(&self, bit: u32) -> ItemIndex {
        ItemIndex(self.cut.first_item.0 + u64::from(bit))
    }
}

fn custom_id_of(line: &Bytes) -> Option<Bytes> {
    let envelope = overnight_blobs::envelope::Envelope::parse(line).ok()?;
    Some(line.slice_ref(envelope.custom_id?.token))
}

/// The `request_id` of an answer: unique to the lease and the item.
fn request_id(lease: Uuid, bit: u32) -> String {
    format!("req_{}{bit:06x}", lease.simple())
}
