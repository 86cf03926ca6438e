//! What is in the window: one request, or the requests of one item, and whom they answer.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::time::Instant;

use overnight_types::{JobId, Timestamp};

use super::Ticket;
use super::order::Chain;
use crate::generate::{Input, Output, Request, RequestId, TokenOutput};

/// Requests with equal keys may be equal; see [`is_same`].
pub(crate) type MergeKey = u64;

/// Bytes of an entry beside its input.
const ENTRY_BYTES: u64 = 512;

/// A prepared item.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) bit: u32,
    /// At least one.
    pub(crate) requests: Vec<Request>,
    pub(crate) merge: Option<MergeKey>,
    pub(crate) chain: Chain,
    pub(crate) length: u32,
}

impl Offer {
    /// What it takes in memory, about.
    pub(crate) fn num_bytes(&self) -> u64 {
        let input = |request: &Request| match &request.input {
            Input::Tokens(tokens) => 4 * tokens.prompt.len() as u64,
            Input::Body { json, .. } => json.len() as u64,
        };
        ENTRY_BYTES + 8 * self.chain.len() as u64 + self.requests.iter().map(input).sum::<u64>()
    }
}

/// Something for a seat.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) bit: u32,
    /// A request of the item, to tell one try from the next.
    pub(crate) id: RequestId,
    /// When the engine took the request up, as far as it said so; else when it got it. Not before
    /// the item joined it there.
    pub(crate) started_at: Timestamp,
    pub(crate) event: Event,
}

/// What happened to an item.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// An output, under the item's own request id.
    Output(Output),
    /// It ran past the time limit and was cancelled.
    Overdue,
    /// The engine panicked while it took the request.
    Broken,
}

/// Deliveries by seat, in order.
pub(crate) type Deliveries = HashMap<Ticket, Vec<Delivery>>;

/// An item that gets an entry's answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub(super) seat: Ticket,
    pub(super) bit: u32,
    /// Its own (first) request, whose id its answer is made for.
    pub(super) id: RequestId,
    pub(super) joined_at: Timestamp,
}

/// Where an entry stands.
#[derive(Debug)]
pub(super) enum Stage {
    /// For its turn.
    Waiting,
    /// At the engine.
    Running {
        handed_over_at: Timestamp,
        /// When the first of its requests began.
        started_at: Option<Timestamp>,
        /// Requests that the engine has begun and not ended.
        num_begun: usize,
        /// When it began the last one of them.
        begun_at: Option<Instant>,
    },
}

#[derive(Debug)]
pub(super) struct Entry {
    /// One, or several items with the same request.
    pub(super) members: Vec<Member>,
    /// While it waits; at the engine only of one that may be joined.
    pub(super) requests: Vec<Request>,
    /// Ids of requests that were given away.
    handed_over: Vec<RequestId>,
    pub(super) num_requests: usize,
    /// Requests that have not ended.
    pub(super) num_open: usize,
    pub(super) merge: Option<MergeKey>,
    pub(super) priority: i32,
    /// Decides among equals.
    pub(super) item: (JobId, u64),
    pub(super) chain: Chain,
    pub(super) length: u32,
    pub(super) num_bytes: u64,
    /// A remote engine's client keeps the time of its requests itself.
    is_local: bool,
    /// Entries handed over before it came.
    pub(super) num_taken_before: u64,
    pub(super) stage: Stage,
}

impl Entry {
    pub(super) fn new(
        offer: Offer,
        member: Member,
        merge: Option<MergeKey>,
        priority: i32,
        item: (JobId, u64),
        num_taken_before: u64,
    ) -> Self {
        let num_requests = offer.requests.len();
        assert!(num_requests > 0, "an item without requests has nothing to wait for");
        Self {
            members: vec![member],
            handed_over: Vec::new(),
            num_requests,
            num_open: num_requests,
            merge,
            priority,
            item,
            num_bytes: offer.num_bytes(),
            is_local: matches!(offer.requests[0].input, Input::Tokens(_)),
            chain: offer.chain,
            length: offer.length,
            requests: offer.requests,
            num_taken_before,
            stage: Stage::Waiting,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Waiting)
    }

    /// Whether nothing of it has been begun: it waits here or, as far as one hears, at the engine.
    pub(super) fn is_unbegun(&self) -> bool {
        match self.stage {
            Stage::Waiting => true,
            Stage::Running { num_begun, .. } => num_begun == 0 && self.num_open == self.num_requests,
        }
    }

    /// Gives its requests away; keeps a copy for others to be compared with.
    pub(super) fn hand_over(&mut self, now: Timestamp) -> Vec<Request> {
        self.stage = Stage::Running { handed_over_at: now, started_at: None, num_begun: 0, begun_at: None };
        self.handed_over = self.requests.iter().map(|request| request.id).collect();
        match self.merge {
            Some(_) => self.requests.clone(),
            None => std::mem::take(&mut self.requests),
        }
    }

    /// The engine begins one of its requests.
    pub(super) fn begin(&mut self, now: Instant) {
        let Stage::Running { num_begun, begun_at, started_at, .. } = &mut self.stage else { return };
        *num_begun += 1;
        *begun_at = Some(now);
        started_at.get_or_insert_with(Timestamp::now);
    }

    /// A request has ended, that had begun or not.
    pub(super) fn end_one(&mut self, had_begun: bool) {
        self.num_open -= 1;
        let Stage::Running { num_begun, begun_at, .. } = &mut self.stage else { return };
        *num_begun -= usize::from(had_begun);
        if *num_begun == 0 {
            *begun_at = None;
        }
    }

    /// When the engine began what it computes of it now: the last one of its requests that run.
    pub(super) fn begun_at(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running { begun_at, .. } => begun_at.filter(|_| self.is_local),
            Stage::Waiting => None,
        }
    }

    /// Requests that the engine got.
    pub(super) fn ids(&self) -> impl Iterator<Item = RequestId> {
        self.handed_over.iter().copied()
    }

    pub(super) fn started_at(&self) -> Timestamp {
        match self.stage {
            Stage::Running { handed_over_at, started_at, .. } => started_at.unwrap_or(handed_over_at),
            Stage::Waiting => self.members[0].joined_at,
        }
    }
}

/// A key for single greedy token requests, whose answers depend on nothing else. A body for a
/// remote engine has none: what another server makes of temperature 0 is its own affair.
pub(crate) fn merge_key(requests: &[Request]) -> Option<MergeKey> {
    let [request] = requests else { return None };
    let Input::Tokens(request) = &request.input else { return None };
    if !request.sampling.is_greedy() || request.stream {
        return None;
    }
    let mut hasher = std::hash::DefaultHasher::new();
    request.prompt.hash(&mut hasher);
    request.stop.max_tokens.hash(&mut hasher);
    Some(hasher.finish())
}

/// Whether two requests that may be merged differ in nothing but id and seed.
pub(super) fn is_same(a: &Input, b: &Input) -> bool {
    let (Input::Tokens(a), Input::Tokens(b)) = (a, b) else { return false };
    // All fields are named, so that a new one is thought of.
    let overnight_engine::Request {
        id: _,
        class,
        prompt,
        sampling,
        stop,
        logprobs,
        prompt_logprobs,
        skip_special_tokens,
        stream,
    } = &**a;
    let mut sampling = sampling.clone();
    sampling.seed = b.sampling.seed;
    *prompt == b.prompt
        && sampling == b.sampling
        && *stop == b.stop
        && (class, logprobs, prompt_logprobs) == (&b.class, &b.logprobs, &b.prompt_logprobs)
        && (skip_special_tokens, stream) == (&b.skip_special_tokens, &b.stream)
}

/// The same output for another request.
pub(super) fn renamed(output: &Output, id: RequestId) -> Output {
    match output.clone() {
        Output::Begun { .. } => Output::Begun { id },
        Output::Tokens(tokens) => Output::Tokens(TokenOutput { id, ..tokens }),
        Output::Response { status, body, retry_after, .. } => Output::Response { id, status, body, retry_after },
        Output::Failed { failure, .. } => Output::Failed { id, failure },
    }
}
