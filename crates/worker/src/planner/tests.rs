use std::collections::BTreeSet;
use std::sync::Arc;

use overnight_engine::request::Class;
use overnight_engine::{Finish, FinishReason, SamplingParams, StopRules, TokenOutput};
use overnight_types::Endpoint;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::generate::{EngineStatus, Failure, Generate, Input, NotAccepting, OutputSender};

pub(super) const LIMITS: PlannerLimits = PlannerLimits { items_max: 8, bytes_max: 1 << 20, requests_max: 4 };

/// A request for `max_tokens` after a prompt of `len` tokens that begins as `family` tells.
pub(super) fn request(family: u32, len: u32, temperature: f32) -> Request {
    let id = RequestId::next();
    let tokens = overnight_engine::Request {
        id,
        class: Class::Job,
        prompt: (0..len).map(|at| if at < 16 { family } else { at }).collect(),
        // A seed of its own, as every item has.
        sampling: SamplingParams { temperature, seed: id.0, ..SamplingParams::default() },
        stop: StopRules { max_tokens: 4, ..StopRules::default() },
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        stream: false,
    };
    Request { id, class: Class::Job, input: Input::Tokens(Box::new(tokens)) }
}

pub(super) fn offer(bit: u32, requests: Vec<Request>) -> Offer {
    let (chain, length) = match &requests[0].input {
        Input::Tokens(tokens) => (chain_of(&tokens.prompt), length_of(tokens.prompt.len(), tokens.stop.max_tokens)),
        Input::Body { .. } => (Chain::new(), 0),
    };
    Offer { bit, merge: merge_key(&requests), chain, length, requests }
}

pub(super) fn greedy(bit: u32, family: u32, len: u32) -> Offer {
    offer(bit, vec![request(family, len, 0.0)])
}

pub(super) fn sampled(bit: u32, family: u32, len: u32) -> Offer {
    offer(bit, vec![request(family, len, 1.0)])
}

pub(super) fn sitter(priority: i32) -> Sitter {
    Sitter { job: JobId::new(), priority, first_item: 0 }
}

pub(super) fn answer(id: RequestId) -> Output {
    let finish = Finish {
        reason: FinishReason::Stop,
        stop_reason: None,
        num_prompt_tokens: 1,
        num_cached_tokens: 0,
        num_output_tokens: 1,
    };
    let text = format!("answer of {}", id.0);
    let finish = Some(finish);
    Output::Tokens(TokenOutput { id, token_ids: vec![1], text, logprobs: Vec::new(), prompt_logprobs: None, finish })
}

pub(super) fn now() -> Timestamp {
    Timestamp::now()
}

/// Who got what of these requests' last outputs: (seat, bit) and the id that it came under.
pub(super) fn deliver(
    planner: &mut Planner,
    outputs: impl IntoIterator<Item = Output>,
) -> Vec<(Ticket, u32, Delivery)> {
    let mut deliveries = Deliveries::new();
    outputs.into_iter().for_each(|output| planner.receive(output, Instant::now(), &mut deliveries));
    let mut all: Vec<_> = deliveries
        .into_iter()
        .flat_map(|(ticket, list)| list.into_iter().map(move |delivery| (ticket, delivery.bit, delivery)))
        .collect();
    all.sort_by_key(|(ticket, bit, _)| (*ticket, *bit));
    all
}

pub(super) fn whom(all: &[(Ticket, u32, Delivery)]) -> Vec<(Ticket, u32)> {
    all.iter().map(|(ticket, bit, _)| (*ticket, *bit)).collect()
}

#[test]
fn twins_of_two_seats_are_computed_once_and_answered_under_their_own_ids() {
    let mut planner = Planner::new(LIMITS);
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    let offers = [(a, greedy(0, 1, 20)), (b, greedy(5, 1, 20)), (b, greedy(6, 1, 21)), (b, sampled(7, 1, 20))];
    let ids: Vec<_> = offers.iter().map(|(_, offer)| offer.requests[0].id).collect();
    for (seat, offer) in offers {
        planner.enter(seat, offer, now()).unwrap();
    }
    let requests = planner.take(now());
    assert_eq!(requests.len(), 3, "one for the twins");
    // One that comes while its twin runs joins it there.
    let late = greedy(1, 1, 20);
    let late_id = late.requests[0].id;
    planner.enter(a, late, now()).unwrap();
    assert!(planner.take(now()).is_empty());
    let got = deliver(&mut planner, requests.iter().map(|request| answer(request.id)));
    assert_eq!(whom(&got), [(a, 0), (a, 1), (b, 5), (b, 6), (b, 7)]);
    for ((_, bit, delivery), own) in got.iter().zip([ids[0], late_id, ids[1], ids[2], ids[3]]) {
        let Event::Output(output) = &delivery.event else { panic!("{delivery:?}") };
        assert_eq!((delivery.id, output.id()), (own, own), "bit {bit}");
    }
    assert_eq!(planner.counts(), Counts::default());
}

#[test]
fn failure_reaches_every_twin() {
    let mut planner = Planner::new(LIMITS);
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(a, greedy(0, 1, 20), now()).unwrap();
    planner.enter(b, greedy(0, 1, 20), now()).unwrap();
    let [request] = planner.take(now()).try_into().unwrap();
    let failure = Failure::Transient { code: "lost".to_owned(), message: "lost".to_owned() };
    let got = deliver(&mut planner, [Output::Failed { id: request.id, failure }]);
    assert_eq!(whom(&got), [(a, 0), (b, 0)]);
    assert!(
        got.iter().all(|(.., got)| matches!(&got.event, Event::Output(Output::Failed { id, .. }) if *id == got.id))
    );
}

#[test]
fn seat_that_leaves_takes_no_answer_from_its_twins() {
    for is_running in [false, true] {
        let mut planner = Planner::new(LIMITS);
        let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
        planner.enter(a, greedy(0, 1, 20), now()).unwrap();
        planner.enter(b, greedy(0, 1, 20), now()).unwrap();
        let mut requests = if is_running { planner.take(now()) } else { Vec::new() };
        assert!(planner.leave(a).is_empty(), "the other one still wants it");
        requests.extend(planner.take(now()));
        assert_eq!(requests.len(), 1);
        let got = deliver(&mut planner, [answer(requests[0].id)]);
        assert_eq!(whom(&got), [(b, 0)]);
    }
}

#[test]
fn last_one_to_leave_cancels_at_the_engine() {
    let mut planner = Planner::new(LIMITS);
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(a, greedy(0, 1, 20), now()).unwrap();
    planner.enter(b, greedy(0, 1, 20), now()).unwrap();
    let [request] = planner.take(now()).try_into().unwrap();
    assert!(planner.leave(a).is_empty());
    assert_eq!(planner.leave(b), [request.id]);
    assert_eq!(planner.counts(), Counts::default());
    assert!(deliver(&mut planner, [answer(request.id)]).is_empty(), "nobody waits for it");
}

#[test]
fn withdrawn_items_are_those_that_have_not_begun() {
    let mut planner = Planner::new(PlannerLimits { requests_max: 2, ..LIMITS });
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(a, greedy(0, 1, 60), now()).unwrap();
    planner.enter(a, sampled(1, 2, 40), now()).unwrap();
    planner.enter(a, greedy(2, 3, 20), now()).unwrap();
    planner.enter(b, greedy(0, 3, 20), now()).unwrap();
    let [running, next] = planner.take(now()).try_into().unwrap();
    assert!(deliver(&mut planner, [Output::Begun { id: running.id }]).is_empty());
    let (mut bits, cancelled) = planner.withdraw(a);
    bits.sort_unstable();
    assert_eq!((bits, cancelled), (vec![1, 2], vec![next.id]), "the one waits here, the other at the engine");
    assert_eq!(whom(&deliver(&mut planner, [answer(running.id)])), [(a, 0)]);
    let [twin] = planner.take(now()).try_into().unwrap();
    assert_eq!(whom(&deliver(&mut planner, [answer(twin.id)])), [(b, 0)], "its twin's job goes on");
}

// What was sent costs money and is waited for; its client keeps its time.
#[test]
fn body_that_was_sent_is_left_to_its_server() {
    let mut planner = Planner::new(PlannerLimits { requests_max: 2, ..LIMITS });
    let a = planner.join(sitter(0));
    for bit in 0..3 {
        let input = Input::Body { endpoint: Endpoint::Completions, json: bytes::Bytes::from_static(b"{}") };
        let body = Request { id: RequestId::next(), class: Class::Job, input };
        planner.enter(a, offer(bit, vec![body]), now()).unwrap();
    }
    let [sent, queued] = planner.take(now()).try_into().unwrap();
    deliver(&mut planner, [Output::Begun { id: sent.id }]);
    let later = Instant::now() + Duration::from_secs(86_400);
    assert_eq!(planner.end_overdue(later, Duration::from_secs(1), &mut Deliveries::new()), []);
    let (mut bits, cancelled) = planner.withdraw(a);
    bits.sort_unstable();
    assert_eq!((bits, cancelled), (vec![1, 2], vec![queued.id]));
    assert_eq!(whom(&deliver(&mut planner, [answer(sent.id)])), [(a, 0)]);
}

#[test]
fn engine_gets_no_more_than_it_takes_ahead_and_large_items_go_too() {
    let mut planner = Planner::new(LIMITS);
    let a = planner.join(sitter(0));
    let many = offer(0, (0..9).map(|_| request(1, 90, 1.0)).collect());
    planner.enter(a, many, now()).unwrap();
    (1..8).for_each(|bit| planner.enter(a, sampled(bit, bit, 20), now()).unwrap());
    let full = planner.enter(a, sampled(8, 8, 20), now());
    assert_eq!(full.unwrap_err().bit, 8, "the window is full");
    let requests = planner.take(now());
    assert_eq!(requests.len(), 9, "more than the engine takes ahead, but alone");
    assert!(planner.take(now()).is_empty());
    // One of its requests fails: its item needs the others no more.
    let failure = Failure::Transient { code: "lost".to_owned(), message: "lost".to_owned() };
    assert_eq!(deliver(&mut planner, [Output::Failed { id: requests[0].id, failure }]).len(), 1);
    assert_eq!(planner.settle(a, 0).len(), 8, "they are cancelled");
    assert_eq!(planner.take(now()).len(), 4);
}

#[test]
fn bytes_bound_the_window_and_one_large_item_passes() {
    let mut planner = Planner::new(PlannerLimits { bytes_max: 5_000, ..LIMITS });
    let a = planner.join(sitter(0));
    planner.enter(a, sampled(0, 1, 100_000), now()).unwrap();
    assert!(planner.enter(a, sampled(1, 1, 20), now()).is_err());
    let [large] = planner.take(now()).try_into().unwrap();
    deliver(&mut planner, [answer(large.id)]);
    planner.enter(a, sampled(1, 1, 20), now()).unwrap();
}

#[test]
fn seat_alone_waits_for_the_others_and_shares_nothing() {
    let mut planner = Planner::new(PlannerLimits { requests_max: 1, ..LIMITS });
    let (suspect, other) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(other, greedy(0, 1, 30), now()).unwrap();
    planner.enter(other, greedy(1, 1, 20), now()).unwrap();
    let [running] = planner.take(now()).try_into().unwrap();
    assert!(!planner.try_alone(suspect) && planner.has_alone());
    deliver(&mut planner, [answer(running.id)]);
    assert!(planner.take(now()).is_empty(), "nothing new while a seat waits to be alone");
    assert!(planner.try_alone(suspect));
    // The same as one that waits, and yet it runs itself.
    planner.enter(suspect, greedy(0, 1, 20), now()).unwrap();
    let [own] = planner.take(now()).try_into().unwrap();
    assert_eq!(whom(&deliver(&mut planner, [answer(own.id)])), [(suspect, 0)]);
    planner.leave(suspect);
    assert_eq!(planner.take(now()).len(), 1);
}

/// The engine begins this request at `now`.
fn begin(planner: &mut Planner, id: RequestId, now: Instant) {
    let mut deliveries = Deliveries::new();
    planner.receive(Output::Begun { id }, now, &mut deliveries);
    assert!(deliveries.is_empty(), "no shard needs to hear of it");
}

#[test]
fn time_limit_counts_from_when_the_engine_began() {
    let mut planner = Planner::new(LIMITS);
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(a, sampled(0, 1, 40), now()).unwrap();
    planner.enter(a, greedy(1, 1, 20), now()).unwrap();
    planner.enter(b, greedy(0, 1, 20), now()).unwrap();
    let requests = planner.take(now());
    let (limit, start) = (Duration::from_secs(10), Instant::now());
    let mut deliveries = Deliveries::new();
    begin(&mut planner, requests[0].id, start);
    begin(&mut planner, requests[0].id, start + limit);
    assert!(planner.end_overdue(start + limit, limit, &mut deliveries).is_empty());
    let cancelled = planner.end_overdue(start + limit * 2, limit, &mut deliveries);
    assert_eq!(cancelled, [requests[0].id], "the first time counts, and the second request waits in the engine");
    begin(&mut planner, requests[1].id, start + limit * 8);
    assert!(planner.end_overdue(start + limit * 9, limit, &mut deliveries).is_empty());
    let cancelled = planner.end_overdue(start + limit * 10, limit, &mut deliveries);
    assert_eq!(cancelled, [requests[1].id]);
    assert!(deliveries.values().flatten().all(|delivery| matches!(delivery.event, Event::Overdue)));
    assert_eq!((deliveries[&a].len(), deliveries[&b].len()), (2, 1));
    begin(&mut planner, requests[1].id, start + limit * 10);
    assert_eq!(planner.counts(), Counts::default(), "told too late, it changes nothing");
}

#[test]
fn item_of_several_requests_has_the_limit_anew_with_each_and_none_while_it_waits() {
    let mut planner = Planner::new(LIMITS);
    let a = planner.join(sitter(0));
    planner.enter(a, offer(0, (0..3).map(|_| request(1, 20, 1.0)).collect()), now()).unwrap();
    let ids: Vec<_> = planner.take(now()).iter().map(|request| request.id).collect();
    let (limit, start) = (Duration::from_secs(10), Instant::now());
    let mut deliveries = Deliveries::new();
    begin(&mut planner, ids[0], start);
    begin(&mut planner, ids[1], start + limit);
    assert!(planner.end_overdue(start + limit * 2, limit, &mut deliveries).is_empty(), "the second one began later");
    deliver(&mut planner, [answer(ids[0]), answer(ids[1])]);
    assert!(planner.end_overdue(start + limit * 9, limit, &mut deliveries).is_empty(), "the third one waits");
    begin(&mut planner, ids[2], start + limit * 9);
    assert!(planner.end_overdue(start + limit * 10, limit, &mut deliveries).is_empty());
    assert_eq!(planner.end_overdue(start + limit * 11, limit, &mut deliveries), [ids[2]]);
    assert_eq!(deliveries[&a].len(), 1);
}

#[test]
fn panic_of_the_engine_reaches_just_the_seats_concerned() {
    let mut planner = Planner::new(LIMITS);
    let (a, b) = (planner.join(sitter(0)), planner.join(sitter(0)));
    planner.enter(a, sampled(0, 1, 20), now()).unwrap();
    let first = planner.take(now());
    planner.enter(b, sampled(0, 1, 20), now()).unwrap();
    let second: Vec<_> = planner.take(now()).iter().map(|request| request.id).collect();
    let mut deliveries = Deliveries::new();
    assert_eq!(planner.break_off(&second, &mut deliveries), second);
    assert!(matches!(deliveries[&b][0].event, Event::Broken) && !deliveries.contains_key(&a));
    assert_eq!(whom(&deliver(&mut planner, [answer(first[0].id)])), [(a, 0)]);
}

#[test]
fn bodies_keep_their_order_and_are_never_merged() {
    let mut planner = Planner::new(PlannerLimits { items_max: 32, requests_max: 32, ..LIMITS });
    let a = planner.join(sitter(0));
    let json = bytes::Bytes::from_static(br#"{"temperature":0}"#);
    let ids: Vec<_> = (0..20)
        .map(|bit| {
            let input = Input::Body { endpoint: Endpoint::Completions, json: json.clone() };
            let request = Request { id: RequestId::next(), class: Class::Job, input };
            let id = request.id;
            planner.enter(a, offer(bit, vec![request]), now()).unwrap();
            id
        })
        .collect();
    assert_eq!(planner.take(now()).iter().map(|request| request.id).collect::<Vec<_>>(), ids);
}

/// Answers at once; its status panics once when told to.
#[derive(Debug, Default)]
struct Fragile {
    engine: crate::instant::InstantGenerate,
    panics: std::sync::atomic::AtomicBool,
}

#[async_trait::async_trait]
impl Generate for Fragile {
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting> {
        self.engine.submit(requests, outputs).await
    }

    fn cancel(&self, ids: &[RequestId]) {
        self.engine.cancel(ids);
    }

    fn status(&self) -> EngineStatus {
        let panics = self.panics.swap(false, std::sync::atomic::Ordering::SeqCst);
        assert!(!panics, "scripted death of the planner's task");
        self.engine.status()
    }
}

fn body_offer(bit: u32) -> Offer {
    let input = Input::Body { endpoint: Endpoint::Completions, json: bytes::Bytes::from_static(b"{}") };
    offer(bit, vec![Request { id: RequestId::next(), class: Class::Job, input }])
}

/// How much the next message has; `None` when none will come.
async fn next_len(seat: &mut Seat) -> Option<usize> {
    let next = tokio::time::timeout(Duration::from_secs(30), seat.deliveries.recv()).await;
    next.expect("a message or the end of messages").map(|got| got.len())
}

#[tokio::test]
async fn planner_that_broke_down_lets_its_seats_go_and_serves_new_ones() {
    let engine = Arc::new(Fragile::default());
    let desk = Desk::new(engine.clone(), &crate::WorkerConfig::default());
    let stop = CancellationToken::new();
    let task = tokio::spawn(desk.clone().run(stop.clone()));
    let mut seat = desk.seat(sitter(0));
    seat.enter(&mut vec![body_offer(0)]);
    assert_eq!(next_len(&mut seat).await, Some(1));
    engine.panics.store(true, std::sync::atomic::Ordering::SeqCst);
    seat.enter(&mut vec![body_offer(1)]);
    assert_eq!(next_len(&mut seat).await, None, "its shard hears of it");
    let mut next = desk.seat(sitter(0));
    drop(seat);
    next.enter(&mut vec![body_offer(0)]);
    assert_eq!(next_len(&mut next).await, Some(1));
    stop.cancel();
    task.await.unwrap();
}

/// Takes requests only when let, and remembers what it was asked to cancel.
#[derive(Debug)]
struct Slow {
    may_take: tokio::sync::Semaphore,
    cancelled: std::sync::Mutex<Vec<(bool, RequestId)>>,
    has_taken: std::sync::atomic::AtomicBool,
}

#[async_trait::async_trait]
impl Generate for Slow {
    async fn submit(&self, _: Vec<Request>, _: OutputSender) -> Result<(), NotAccepting> {
        self.may_take.acquire().await.expect("open").forget();
        self.has_taken.store(true, std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    fn cancel(&self, ids: &[RequestId]) {
        let has_taken = self.has_taken.load(std::sync::atomic::Ordering::SeqCst);
        self.cancelled.lock().unwrap().extend(ids.iter().map(|&id| (has_taken, id)));
    }

    fn status(&self) -> EngineStatus {
        Fragile::default().status()
    }
}

// An engine does nothing about a cancel of what it does not know yet, and would then run it.
#[tokio::test]
async fn cancel_in_the_middle_of_a_submission_is_told_again_after_it() {
    let engine = Arc::new(Slow {
        may_take: tokio::sync::Semaphore::new(0),
        cancelled: std::sync::Mutex::default(),
        has_taken: std::sync::atomic::AtomicBool::new(false),
    });
    let desk = Desk::new(engine.clone(), &crate::WorkerConfig::default());
    let stop = CancellationToken::new();
    let task = tokio::spawn(desk.clone().run(stop.clone()));
    let seat = desk.seat(sitter(0));
    let offer = body_offer(0);
    let id = offer.requests[0].id;
    seat.enter(&mut vec![offer]);
    while desk.counts().running == 0 {
        tokio::task::yield_now().await;
    }
    drop(seat);
    assert_eq!(engine.cancelled.lock().unwrap().as_slice(), [(false, id)], "told at once");
    let next = desk.seat(sitter(0));
    assert!(!next.try_alone(), "the engine may still get it");
    engine.may_take.add_permits(1);
    while engine.cancelled.lock().unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(engine.cancelled.lock().unwrap()[1], (true, id));
    assert!(next.try_alone());
    stop.cancel();
    task.await.unwrap();
}

#[test]
fn work_of_a_job_with_priority_goes_first_and_a_twin_brings_its_own() {
    let mut planner = Planner::new(PlannerLimits { requests_max: 1, ..LIMITS });
    let (late, early) = (planner.join(sitter(1)), planner.join(sitter(0)));
    planner.enter(late, greedy(0, 1, 90), now()).unwrap();
    planner.enter(late, greedy(1, 2, 90), now()).unwrap();
    planner.enter(early, greedy(0, 3, 20), now()).unwrap();
    planner.enter(early, greedy(1, 2, 90), now()).unwrap();
    let mut ran = Vec::new();
    while let [request] = planner.take(now()).as_slice() {
        ran.push(whom(&deliver(&mut planner, [answer(request.id)])).into_iter().collect::<BTreeSet<_>>());
    }
    let wanted = [vec![(late, 1), (early, 1)], vec![(early, 0)], vec![(late, 0)]];
    assert_eq!(ran, wanted.map(|of| of.into_iter().collect::<BTreeSet<_>>()));
}
