//! A shard under lease: what is prepared, what is at the engine, what waits for a
//! retry, and how an output becomes an outcome. Straight-line parts; the order in
//! which they run is `shard_run`'s.
//!
//! Every undone item of the shard is in exactly one place: `queue` (not prepared),
//! `ready` (prepared), `active` (at the engine, alone or following a leader),
//! `waiting` (a retry is due later), or it has its outcome.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use overnight_blobs::ItemRecord;
use overnight_engine::request::RequestId;
use overnight_store::{NewFault, NewShard, ShardKey};
use overnight_types::{BatchRequestId, Bitmap, FailedTry, FileId, ItemIndex, OutcomeKind, Timestamp, chain};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::checkpoint::Unwritten;
use crate::generate::{Generate, Input, Output, OutputSender};
use crate::mapper::Answer;
use crate::outcome::{self, Ended, Verdict};
use crate::prepare::{self, InputLine, MergeKey, ReadyItem, Recipe, Work};
use crate::renewal::{LeaseGuard, Order};
use crate::window::{OpenShard, Turn};
use crate::worker::Shared;

/// Lines prepared in one go: the first piece is small, so that the engine starts soon.
const FIRST_PIECE_LINES: usize = 64;
const PIECE_LINES: usize = 1_024;
const PIECE_BYTES: usize = 4 << 20;

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
    pub(crate) fn trouble(doing: &str, err: &(dyn std::error::Error + 'static)) -> Self {
        Self::Trouble(format!("could not {doing}: {}", chain(err)))
    }
}

/// An item at the engine.
#[derive(Debug)]
struct Active {
    custom_id: Bytes,
    answer: Answer,
    seed: Option<u64>,
    started_at: Timestamp,
    /// Items that get this one's answer too.
    followers: Vec<u32>,
    /// Its request as compared with later ones; only of a leader that may be followed.
    merge: Option<(MergeKey, Input)>,
    /// When the engine may have taken it up, for the time limit of a local request.
    turn: Option<Turn>,
    scheduled_at: Option<Instant>,
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
    pub(crate) generate: Arc<dyn Generate>,
    pub(crate) key: ShardKey,
    pub(crate) cut: NewShard,
    pub(crate) guard: LeaseGuard,
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
    pub(crate) outputs: mpsc::UnboundedReceiver<Vec<Output>>,
    sender: OutputSender,
    retry_budget: u64,
    /// Lines of undone items by bit.
    lines: HashMap<u32, Bytes>,
    /// Tries so far, of items that failed before.
    attempts: HashMap<u32, u32>,
    /// What they failed of.
    failed_tries: HashMap<u32, Vec<FailedTry>>,
    queue: VecDeque<u32>,
    /// In reverse order: the next one is last.
    ready: Vec<ReadyItem>,
    active: HashMap<u32, Active>,
    routes: HashMap<RequestId, u32>,
    merges: HashMap<MergeKey, u32>,
    waiting: BinaryHeap<Reverse<(Instant, u32)>>,
    num_pieces: usize,
}

/// What an open lease starts from.
pub(crate) struct OpenLeaseParts {
    pub(crate) shared: Arc<Shared>,
    pub(crate) generate: Arc<dyn Generate>,
    pub(crate) guard: LeaseGuard,
    pub(crate) open: OpenShard,
    pub(crate) recipe: Arc<Recipe>,
    pub(crate) retry_budget: u64,
    pub(crate) input: FileId,
    pub(crate) crashes_max: u32,
    pub(crate) shard: overnight_store::Shard,
}

impl OpenLease {
    pub(crate) fn new(parts: OpenLeaseParts) -> Self {
        let (sender, outputs) = mpsc::unbounded_channel();
        let breakdowns_before = parts.shared.num_breakdowns();
        let shard = parts.shard;
        let probe = shard.probe_item.and_then(|item| u32::try_from(item.0.checked_sub(shard.cut.first_item.0)?).ok());
        let is_suspect = probe.is_some() || shard.crashes >= parts.crashes_max;
        Self {
            shared: parts.shared,
            generate: parts.generate,
            key: ShardKey { job: shard.job, shard: shard.cut.shard, epoch: shard.epoch },
            cut: shard.cut,
            guard: parts.guard,
            open: parts.open,
            recipe: parts.recipe,
            input: parts.input,
            breakdowns_before,
            suspicion: (is_suspect, probe.map(|bit| (bit, shard.probe_deaths))),
            next_seq: shard.next_seq,
            done: shard.done,
            unwritten: Unwritten::new(),
            outputs,
            sender,
            retry_budget: parts.retry_budget,
            lines: HashMap::new(),
            attempts: HashMap::new(),
            failed_tries: HashMap::new(),
            queue: VecDeque::new(),
            ready: Vec::new(),
            active: HashMap::new(),
            routes: HashMap::new(),
            merges: HashMap::new(),
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

    /// Whether nothing is queued, prepared or at the engine.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.is_empty() && self.ready.is_empty() && self.active.is_empty()
    }

    /// Whether nothing is at the engine.
    pub(crate) fn is_engine_free(&self) -> bool {
        self.active.is_empty()
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
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

    /// The next lines to prepare; empty when there are none.
    pub(crate) fn next_piece(&mut self) -> Vec<InputLine> {
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

    /// Takes prepared items: refusals end at once, the others are ordered by prefix.
    pub(crate) fn take_prepared(&mut self, items: Vec<ReadyItem>) {
        let now = Timestamp::now();
        for item in items {
            let ended = match item.work {
                Work::Run(..) => {
                    self.ready.push(item);
                    continue;
                }
                Work::Refused(refusal) => Ended::error(refusal.status, &refusal.error),
                Work::Changed(why) => Ended::input_unavailable(&why),
            };
            let (custom_id, tries) = (item.custom_id, self.tries(item.bit) + 1);
            self.end_item(item.bit, &custom_id, None, tries, (now, now), &ended);
        }
        self.ready.sort_unstable_by(|a, b| order_key(b).cmp(&order_key(a)));
    }

    /// Submits ready items as far as the window has room.
    pub(crate) async fn feed(&mut self) -> Result<(), Stop> {
        let places = self.open.try_take(u32::try_from(self.ready.len()).unwrap_or(u32::MAX));
        if places == 0 {
            return Ok(());
        }
        let running_max = self.generate.status().max_num_seqs;
        let turn = self.open.turn(running_max);
        let started_at = Timestamp::now();
        let mut requests = Vec::with_capacity(places as usize);
        let mut free = places;
        while let Some(item) = self.ready.pop_if(|_| free > 0) {
            let Work::Run(prepared, merge) = item.work else { unreachable!("only runnable items are kept") };
            let prepared = *prepared;
            let leader = merge.and_then(|merge| self.leader_of(merge, &prepared.requests[0].input));
            let is_local = matches!(prepared.requests[0].input, Input::Tokens(_));
            let mut active = Active {
                custom_id: item.custom_id,
                answer: prepared.answer,
                seed: prepared.seed_used,
                started_at,
                followers: Vec::new(),
                merge: None,
                turn: (is_local && leader.is_none()).then_some(turn),
                scheduled_at: None,
            };
            if let Some(leader) = leader.and_then(|leader| self.active.get_mut(&leader)) {
                leader.followers.push(item.bit);
            } else {
                free -= 1;
                if let Some(merge) = merge {
                    self.merges.insert(merge, item.bit);
                    active.merge = Some((merge, prepared.requests[0].input.clone()));
                }
                self.routes.extend(prepared.requests.iter().map(|request| (request.id, item.bit)));
                requests.extend(prepared.requests);
            }
            self.active.insert(item.bit, active);
        }
        self.open.left_engine_unused(free);
        let submitted = self.generate.submit(requests, self.sender.clone());
        let mut order = self.guard.order.clone();
        let told = order.wait_for(|order| *order >= Order::HandBack);
        // An engine that hangs must not hold an order up.
        let submitted = tokio::select! { submitted = submitted => submitted, _ = told => return Ok(()) };
        submitted.map_err(|err| Stop::Trouble(err.to_string()))?;
        fail::fail_point!("worker::requests_submitted");
        Ok(())
    }

    fn leader_of(&self, merge: MergeKey, input: &Input) -> Option<u32> {
        let leader = *self.merges.get(&merge)?;
        let (_, theirs) = self.active.get(&leader)?.merge.as_ref()?;
        prepare::is_same(theirs, input).then_some(leader)
    }

    /// Takes outputs of one engine step.
    pub(crate) fn collect(&mut self, outputs: Vec<Output>) -> Result<(), Stop> {
        fail::fail_point!("worker::outputs_collected");
        let finished_at = Timestamp::now();
        let mut left = 0;
        let mut trouble = None;
        for output in outputs {
            let id = output.id();
            let Some(&bit) = self.routes.get(&id) else { continue };
            if output.is_last() {
                self.routes.remove(&id);
            }
            let retry_after = match &output {
                Output::Response { retry_after, .. } => *retry_after,
                _ => None,
            };
            let active = self.active.get_mut(&bit).expect("a routed item is at the engine");
            let followers = std::mem::take(&mut active.followers);
            let shared = (!followers.is_empty()).then(|| output.clone());
            match outcome::judge(active.answer.push(output)) {
                Verdict::Pending => active.followers = followers,
                Verdict::Trouble(message) => {
                    active.followers = followers;
                    trouble = Some(message);
                }
                verdict => {
                    left += 1;
                    self.settle(bit, verdict, retry_after, finished_at);
                    for follower in followers {
                        let verdict = self.follow(follower, shared.as_ref());
                        self.settle(follower, verdict, retry_after, finished_at);
                    }
                }
            }
        }
        self.open.left_engine(left);
        trouble.map_or(Ok(()), |message| Err(Stop::Trouble(message)))
    }

    /// Gives a leader's output to a follower under the follower's own id.
    fn follow(&mut self, follower: u32, output: Option<&Output>) -> Verdict {
        let Some(active) = self.active.get_mut(&follower) else { return Verdict::Dropped };
        let (Some(output), Some(&id)) = (output, active.answer.request_ids().first()) else { return Verdict::Dropped };
        let output = match output.clone() {
            Output::Tokens(tokens) => Output::Tokens(overnight_engine::TokenOutput { id, ..tokens }),
            Output::Response { status, body, retry_after, .. } => Output::Response { id, status, body, retry_after },
            Output::Failed { failure, .. } => Output::Failed { id, failure },
        };
        outcome::judge(active.answer.push(output))
    }

    /// Ends an item's try.
    fn settle(&mut self, bit: u32, verdict: Verdict, retry_after: Option<Duration>, finished_at: Timestamp) {
        let active = self.active.remove(&bit).expect("a settled item was at the engine");
        self.unroute(bit, &active);
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
        let times = (active.started_at, finished_at);
        self.end_item(bit, &active.custom_id, active.seed, tries, times, &ended);
    }

    /// Forgets an item's requests; those that still run are cancelled.
    fn unroute(&mut self, bit: u32, active: &Active) {
        let ids = active.answer.request_ids();
        if ids.len() > 1 && ids.iter().any(|id| self.routes.contains_key(id)) {
            self.generate.cancel(ids);
        }
        for id in ids {
            self.routes.remove(id);
        }
        if let Some((merge, _)) = &active.merge
            && self.merges.get(merge) == Some(&bit)
        {
            self.merges.remove(merge);
        }
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

    /// Ends local requests that ran past the time limit.
    pub(crate) fn end_overdue(&mut self) {
        let (now, finished) = (Instant::now(), self.open.window().finished());
        let limit = self.shared.config.request_timeout;
        let mut overdue = Vec::new();
        for (bit, active) in &mut self.active {
            if active.scheduled_at.is_none() && active.turn.is_some_and(|turn| turn <= finished) {
                active.scheduled_at = Some(now);
            }
            if active.scheduled_at.is_some_and(|at| now.duration_since(at) > limit) {
                overdue.push(*bit);
            }
        }
        for bit in overdue {
            let Some(active) = self.active.get_mut(&bit) else { continue };
            let mut bits = std::mem::take(&mut active.followers);
            self.generate.cancel(active.answer.request_ids());
            bits.insert(0, bit);
            for bit in bits {
                self.settle(bit, Verdict::Ended(Ended::request_timeout()), None, Timestamp::now());
            }
            self.open.left_engine(1);
        }
    }

    /// Cancels everything at the engine; the outputs are not awaited.
    pub(crate) fn cancel_all(&mut self) {
        let ids: Vec<RequestId> = self.routes.keys().copied().collect();
        if !ids.is_empty() {
            self.generate.cancel(&ids);
        }
        self.routes.clear();
    }

    pub(crate) fn item(&self, bit: u32) -> ItemIndex {
        ItemIndex(self.cut.first_item.0 + u64::from(bit))
    }
}

fn order_key(item: &ReadyItem) -> (&[u32], u32) {
    match &item.work {
        Work::Run(prepared, _) => (prepared.order_key(), item.bit),
        Work::Refused(_) | Work::Changed(_) => (&[], item.bit),
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
