//! Decides which prepared items the engine gets next, over all shards that this worker has open.
//!
//! Owns the window: items that are prepared and not yet answered, those at the engine
//! included. Equal greedy requests are one entry with several members: computed once,
//! answered to each. Invariants: a member gets what its request gives, whatever becomes of
//! the others; an entry without members is at the engine no more; the engine has no more
//! requests than it can take ahead; an entry is passed over a bounded number of times;
//! while one seat runs alone, nothing of another seat is handed over.
//! A pure state machine: no clock, no channel. It knows seats and bits, not shards, leases
//! or outcomes. `desk` puts it to work; `order` says what goes before what.

mod desk;
mod entry;
mod order;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use overnight_types::{JobId, Timestamp};

pub(crate) use desk::{Desk, Seat};
pub(crate) use entry::{Deliveries, Delivery, Event, MergeKey, Offer, merge_key};
pub(crate) use order::{Chain, chain_of, length_of};

use crate::generate::{Output, Request, RequestId};
use entry::{Entry, Member, is_same, renamed};
use order::Sortable;

/// Times that the window may be handed over anew before an entry that was passed over goes first.
const WINDOWS_PASSED_OVER_MAX: u64 = 2;

/// How much there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannerLimits {
    /// Entries in the window.
    pub(crate) items_max: u32,
    /// Bytes of their requests; one entry may pass it.
    pub(crate) bytes_max: u64,
    /// Requests at the engine; one entry may pass it.
    pub(crate) requests_max: u32,
}

/// Items in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    pub(crate) waiting: usize,
    /// At the engine.
    pub(crate) running: usize,
    /// Besides, those that get the answer of an equal one.
    pub(crate) merged: usize,
}

/// A shard at the desk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

/// What is known of a shard.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sitter {
    pub(crate) job: JobId,
    /// Lower goes first.
    pub(crate) priority: i32,
    pub(crate) first_item: u64,
}

#[derive(Debug)]
struct SeatState {
    sitter: Sitter,
    /// Entries of its items that have no answer yet.
    entries: HashMap<u32, EntryId>,
}

/// Rises, so that the lowest is the oldest.
type EntryId = u64;

/// Of a request at the engine.
#[derive(Debug, Clone, Copy)]
struct Route {
    entry: EntryId,
    has_begun: bool,
}

/// The window.
#[derive(Debug)]
pub(crate) struct Planner {
    limits: PlannerLimits,
    seats: HashMap<Ticket, SeatState>,
    entries: HashMap<EntryId, Entry>,
    /// Entries that may be joined.
    merges: HashMap<MergeKey, Vec<EntryId>>,
    /// Requests at the engine.
    routes: HashMap<RequestId, Route>,
    waiting: BTreeSet<EntryId>,
    /// Waiting entries in order, with others among them that wait no more.
    plan: VecDeque<EntryId>,
    is_planned: bool,
    /// Of the entry that was handed over last.
    last_chain: Chain,
    /// Entries ever handed over.
    num_taken: u64,
    num_bytes: u64,
    alone: Option<Ticket>,
    next_entry: EntryId,
    next_ticket: u64,
}

impl Planner {
    pub(crate) fn new(limits: PlannerLimits) -> Self {
        Self {
            limits,
            seats: HashMap::new(),
            entries: HashMap::new(),
            merges: HashMap::new(),
            routes: HashMap::new(),
            waiting: BTreeSet::new(),
            plan: VecDeque::new(),
            is_planned: true,
            last_chain: Chain::new(),
            num_taken: 0,
            num_bytes: 0,
            alone: None,
            next_entry: 0,
            next_ticket: 0,
        }
    }

    pub(crate) fn limits(&self) -> PlannerLimits {
        self.limits
    }

    /// An engine's own limits may change (a remote one adapts).
    pub(crate) fn set_limits(&mut self, limits: PlannerLimits) {
        self.limits = limits;
    }

    /// What is in the window.
    pub(crate) fn counts(&self) -> Counts {
        let members = self.entries.values().map(|entry| entry.members.len()).sum::<usize>();
        Counts {
            waiting: self.waiting.len(),
            running: self.entries.len() - self.waiting.len(),
            merged: members - self.entries.len(),
        }
    }

    /// Whether a seat runs alone or waits to.
    pub(crate) fn has_alone(&self) -> bool {
        self.alone.is_some()
    }

    /// A new seat.
    pub(crate) fn join(&mut self, sitter: Sitter) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.seats.insert(ticket, SeatState { sitter, entries: HashMap::new() });
        ticket
    }

    /// Takes a prepared item in, or gives it back while the window is full. An item that is
    /// the same as one in the window joins it, and takes no room.
    pub(crate) fn enter(&mut self, ticket: Ticket, offer: Offer, now: Timestamp) -> Result<(), Offer> {
        let sitter = self.seats[&ticket].sitter;
        let member = Member { seat: ticket, bit: offer.bit, id: offer.requests[0].id, joined_at: now };
        // What runs alone must be all that runs, and must run itself.
        let merge = offer.merge.filter(|_| self.alone.is_none());
        if let Some(twin) = merge.and_then(|merge| self.twin_of(merge, &offer)) {
            let entry = self.entries.get_mut(&twin).expect("a twin is in the window");
            entry.members.push(member);
            if sitter.priority < entry.priority {
                entry.priority = sitter.priority;
                self.is_planned &= !entry.is_waiting();
            }
            self.seat(ticket).entries.insert(offer.bit, twin);
            return Ok(());
        }
        let num_bytes = offer.num_bytes();
        let is_full = self.entries.len() >= self.limits.items_max as usize
            || self.num_bytes.saturating_add(num_bytes) > self.limits.bytes_max;
        if is_full && !self.entries.is_empty() {
            return Err(offer);
        }
        let id = self.next_entry;
        self.next_entry += 1;
        if let Some(merge) = merge {
            self.merges.entry(merge).or_default().push(id);
        }
        self.seat(ticket).entries.insert(offer.bit, id);
        let item = (sitter.job, sitter.first_item + u64::from(offer.bit));
        let entry = Entry::new(offer, member, merge, sitter.priority, item, self.num_taken);
        self.num_bytes += num_bytes;
        self.entries.insert(id, entry);
        self.waiting.insert(id);
        self.is_planned = false;
        Ok(())
    }

    fn twin_of(&self, merge: MergeKey, offer: &Offer) -> Option<EntryId> {
        let input = &offer.requests[0].input;
        let is_twin = |id: &&EntryId| is_same(&self.entries[*id].requests[0].input, input);
        self.merges.get(&merge)?.iter().find(is_twin).copied()
    }

    fn seat(&mut self, ticket: Ticket) -> &mut SeatState {
        self.seats.get_mut(&ticket).expect("a seat is kept until its shard leaves")
    }

    /// What the engine can be given now, in order.
    pub(crate) fn take(&mut self, now: Timestamp) -> Vec<Request> {
        let mut requests = Vec::new();
        while let Some(id) = self.next() {
            let entry = self.entries.get_mut(&id).expect("a waiting entry is in the window");
            let num = entry.requests.len();
            if !self.routes.is_empty() && self.routes.len() + num > self.limits.requests_max as usize {
                break;
            }
            let route = Route { entry: id, has_begun: false };
            self.routes.extend(entry.requests.iter().map(|request| (request.id, route)));
            self.last_chain.clone_from(&entry.chain);
            requests.extend(entry.hand_over(now));
            self.waiting.remove(&id);
            self.num_taken += 1;
        }
        requests
    }

    /// The entry that goes next.
    fn next(&mut self) -> Option<EntryId> {
        if let Some(alone) = self.alone {
            let is_alone = |id: &&EntryId| self.entries[*id].members.iter().all(|member| member.seat == alone);
            return self.waiting.iter().find(is_alone).copied();
        }
        let oldest = *self.waiting.first()?;
        let passed_over_max = WINDOWS_PASSED_OVER_MAX * u64::from(self.limits.items_max);
        if self.num_taken - self.entries[&oldest].num_taken_before >= passed_over_max {
            return Some(oldest);
        }
        if !self.is_planned {
            self.arrange();
        }
        while self.plan.front().is_some_and(|first| !self.waiting.contains(first)) {
            self.plan.pop_front();
        }
        self.plan.front().copied()
    }

    fn arrange(&mut self) {
        let entries = self.waiting.iter().map(|id| (id, &self.entries[id]));
        let items = entries.map(|(&id, entry)| Sortable {
            priority: entry.priority,
            chain: &entry.chain,
            length: entry.length,
            item: (entry.item, id),
        });
        let order = order::arrange(items.collect(), &self.last_chain);
        self.plan = order.into_iter().map(|(_, id)| id).collect();
        self.is_planned = true;
    }

    /// Takes an output of the engine, which came at `now`, and says who gets what.
    pub(crate) fn receive(&mut self, output: Output, now: Instant, deliveries: &mut Deliveries) {
        let request = output.id();
        let Some(route) = self.routes.get_mut(&request) else { return };
        let id = route.entry;
        let entry = self.entries.get_mut(&id).expect("a routed entry is in the window");
        if matches!(output, Output::Begun { .. }) {
            if !std::mem::replace(&mut route.has_begun, true) {
                entry.begin(now);
            }
            return;
        }
        let had_begun = route.has_begun;
        let started_at = entry.started_at();
        let mut deliver = |member: &Member, event| {
            let started_at = started_at.max(member.joined_at);
            let delivery = Delivery { bit: member.bit, id: member.id, started_at, event };
            deliveries.entry(member.seat).or_default().push(delivery);
        };
        let is_last = output.is_last();
        if let [only] = entry.members.as_slice()
            && (only.id == request || entry.num_requests > 1)
        {
            deliver(only, Event::Output(output));
        } else {
            for member in &entry.members {
                deliver(member, Event::Output(renamed(&output, member.id)));
            }
        }
        if is_last {
            entry.end_one(had_begun);
            let is_over = entry.num_open == 0;
            self.routes.remove(&request);
            if is_over {
                self.forget(id);
            }
        }
    }

    /// Ends what the engine began more than `limit` ago: says who hears of it, and returns what
    /// must be cancelled. An item of several requests is given the limit anew with each that
    /// begins, and none while those left wait at the engine.
    pub(crate) fn end_overdue(&mut self, now: Instant, limit: Duration, deliveries: &mut Deliveries) -> Vec<RequestId> {
        let is_overdue = |entry: &Entry| entry.begun_at().is_some_and(|at| now.duration_since(at) > limit);
        let overdue: Vec<EntryId> =
            self.entries.iter().filter(|(_, entry)| is_overdue(entry)).map(|(&id, _)| id).collect();
        overdue.into_iter().flat_map(|id| self.end(id, &Event::Overdue, deliveries)).collect()
    }

    /// Ends the entries of these requests, for an engine that panicked over them.
    pub(crate) fn break_off(&mut self, requests: &[RequestId], deliveries: &mut Deliveries) -> Vec<RequestId> {
        let routes = requests.iter().filter_map(|id| self.routes.get(id));
        let mut entries: Vec<EntryId> = routes.map(|route| route.entry).collect();
        entries.dedup();
        entries.into_iter().flat_map(|id| self.end(id, &Event::Broken, deliveries)).collect()
    }

    fn end(&mut self, id: EntryId, event: &Event, deliveries: &mut Deliveries) -> Vec<RequestId> {
        let entry = &self.entries[&id];
        for member in &entry.members {
            let started_at = entry.started_at().max(member.joined_at);
            let delivery = Delivery { bit: member.bit, id: member.id, started_at, event: event.clone() };
            deliveries.entry(member.seat).or_default().push(delivery);
        }
        self.forget(id)
    }

    /// Takes an entry out; returns its requests that are still at the engine.
    fn forget(&mut self, id: EntryId) -> Vec<RequestId> {
        let entry = self.entries.remove(&id).expect("an entry is forgotten once");
        self.waiting.remove(&id);
        self.num_bytes -= entry.num_bytes;
        for member in &entry.members {
            self.seat(member.seat).entries.remove(&member.bit);
        }
        if let Some(merge) = entry.merge
            && let Some(twins) = self.merges.get_mut(&merge)
        {
            twins.retain(|&twin| twin != id);
            if twins.is_empty() {
                self.merges.remove(&merge);
            }
        }
        match entry.num_open {
            0 => Vec::new(),
            _ => entry.ids().filter(|request| self.routes.remove(request).is_some()).collect(),
        }
    }

    /// An item needs no more answers. Returns what must be cancelled.
    pub(crate) fn settle(&mut self, ticket: Ticket, bit: u32) -> Vec<RequestId> {
        let Some(id) = self.seats.get_mut(&ticket).and_then(|seat| seat.entries.remove(&bit)) else {
            return Vec::new();
        };
        let entry = self.entries.get_mut(&id).expect("a seat's entry is in the window");
        entry.members.retain(|member| (member.seat, member.bit) != (ticket, bit));
        if entry.members.is_empty() { self.forget(id) } else { Vec::new() }
    }

    /// Takes back what of a seat's items has not begun. Returns their bits, and what must be
    /// cancelled at the engine, where the requests that are next wait too.
    pub(crate) fn withdraw(&mut self, ticket: Ticket) -> (Vec<u32>, Vec<RequestId>) {
        let Some(seat) = self.seats.get(&ticket) else { return (Vec::new(), Vec::new()) };
        let is_unbegun = |id: &EntryId| self.entries[id].is_unbegun();
        let bits: Vec<u32> = seat.entries.iter().filter(|(_, id)| is_unbegun(id)).map(|(&bit, _)| bit).collect();
        let cancelled = bits.iter().flat_map(|&bit| self.settle(ticket, bit)).collect();
        (bits, cancelled)
    }

    /// A shard goes, with all its items. Returns what must be cancelled.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Vec<RequestId> {
        let bits: Vec<u32> =
            self.seats.get(&ticket).map_or_else(Vec::new, |seat| seat.entries.keys().copied().collect());
        let cancelled = bits.into_iter().flat_map(|bit| self.settle(ticket, bit)).collect();
        self.seats.remove(&ticket);
        if self.alone == Some(ticket) {
            self.alone = None;
        }
        cancelled
    }

    /// Begins anew without seats; tickets given out before are nobody's.
    pub(crate) fn restart(&mut self) -> Vec<RequestId> {
        let at_engine = self.routes.keys().copied().collect();
        *self = Self { next_ticket: self.next_ticket, next_entry: self.next_entry, ..Self::new(self.limits) };
        at_engine
    }

    /// Asks for the engine alone; `true` once no other seat's item is there. Call again after
    /// a change until then. Ends with the seat.
    pub(crate) fn try_alone(&mut self, ticket: Ticket) -> bool {
        assert!(self.seats.contains_key(&ticket), "only a seat can be alone");
        let is_mine = *self.alone.get_or_insert(ticket) == ticket;
        let mut running = self.entries.values().filter(|entry| !entry.is_waiting());
        is_mine && running.all(|entry| entry.members.iter().all(|member| member.seat == ticket))
    }
}
