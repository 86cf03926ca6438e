//! The engine behind its handle: threads, sinks, cancel, breakdown.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use overnight_engine::bench::{BenchError, ThroughputOptions, run_throughput};
use overnight_engine::output::{Event, Sink};
use overnight_engine::request::Class;
use overnight_engine::{
    Engine, EngineHandle, EngineState, FinishReason, Request, RequestError, SamplingParams, StopReason, StopRules,
    TokenOutput,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::bed::{Bed, again, alone, prompt, request};
use crate::texts::text;
use crate::toy::{ERROR_TOKEN, PANIC_TOKEN, Toy};

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(bed: &Bed) -> EngineHandle {
    Engine::start(Box::new(Toy::new(bed.max_model_len)), Some(text()), &bed.config()).expect("it starts")
}

/// An engine whose first step waits until the sender is dropped: nothing ends before.
fn start_held() -> (EngineHandle, Sender<()>) {
    let (sender, gate) = std::sync::mpsc::channel();
    let bed = Bed { max_model_len: 3_000, ..Bed::default() };
    let toy = Toy::new(bed.max_model_len).held_by(gate);
    (Engine::start(Box::new(toy), Some(text()), &bed.config()).expect("it starts"), sender)
}

fn channel() -> (Sink, UnboundedReceiver<Vec<Event>>) {
    let (sender, receiver) = unbounded_channel();
    (Arc::new(move |events| sender.send(events).is_ok()), receiver)
}

/// All events until each of `num` requests has its last one.
async fn until_ended(receiver: &mut UnboundedReceiver<Vec<Event>>, num: usize) -> Vec<Event> {
    let (mut events, mut num_ended) = (Vec::new(), 0);
    while num_ended < num {
        let message = tokio::time::timeout(PATIENCE, receiver.recv()).await;
        for event in message.expect("an event in time").expect("the engine keeps the sink") {
            num_ended += usize::from(match &event {
                Event::Begun { .. } => false,
                Event::Output(output) => output.finish.is_some(),
                Event::Failed { .. } => true,
            });
            events.push(event);
        }
    }
    events
}

fn outputs_of<'a>(events: &'a [Event], request: &Request) -> Vec<&'a TokenOutput> {
    let outputs = events.iter().filter_map(|event| match event {
        Event::Output(output) if output.id == request.id => Some(output),
        _ => None,
    });
    outputs.collect()
}

fn failure_of<'a>(events: &'a [Event], request: &Request) -> &'a RequestError {
    let failed = events.iter().find_map(|event| match event {
        Event::Failed { id, error } if *id == request.id => Some(error),
        _ => None,
    });
    failed.expect("the request failed")
}

#[tokio::test]
async fn streamed_and_whole_answers_are_equal() {
    let handle = start(&Bed::default());
    let whole = request(prompt(1, 20), 25);
    let stream = Request { stream: true, ..again(&whole) };
    let (sink, mut receiver) = channel();
    handle.submit(vec![whole.clone(), stream.clone()], sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 2).await;
    let (whole, stream) = (outputs_of(&events, &whole), outputs_of(&events, &stream));
    assert_eq!(whole.len(), 1);
    assert!(stream.len() > 10);
    assert_eq!(whole[0].token_ids, stream.iter().flat_map(|output| output.token_ids.clone()).collect::<Vec<_>>());
    assert_eq!(whole[0].text, stream.iter().map(|output| output.text.as_str()).collect::<String>());
    assert_eq!(whole[0].text, text().decode(&whole[0].token_ids, true).expect("text"));
}

#[tokio::test]
async fn job_hears_once_that_it_begins_and_an_online_request_never() {
    let handle = start(&Bed { max_num_seqs: 2, ..Bed::default() });
    let jobs: Vec<_> = (0..6).map(|salt| request(prompt(salt, 9), 1 + salt as u32 * 3)).collect();
    let online = Request { class: Class::Online, ..request(prompt(7, 9), 5) };
    let refused = request(vec![], 5);
    let (sink, mut receiver) = channel();
    let all = [jobs.clone(), vec![online.clone(), refused.clone()]].concat();
    handle.submit(all, sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 8).await;
    let is_begun = |event: &&Event| matches!(event, Event::Begun { .. });
    for job in &jobs {
        let begins = events.iter().position(|event| *event == Event::Begun { id: job.id });
        let answered = events.iter().position(|event| matches!(event, Event::Output(output) if output.id == job.id));
        assert!(begins.is_some() && begins < answered, "{begins:?}, {answered:?}");
    }
    assert_eq!(events.iter().filter(is_begun).count(), jobs.len());
    assert_eq!(events.len(), 2 * jobs.len() + 2);
}

/// Field report 1, 8, 9: a refused request fails alone, at once; its neighbours finish.
#[tokio::test]
async fn refused_request_spares_its_neighbours() {
    let handle = start(&Bed::default());
    let good = [request(prompt(1, 9), 8), request(prompt(2, 9), 8)];
    let (empty, foreign) = (request(vec![], 5), request(vec![1_000], 5));
    let (sink, mut receiver) = channel();
    let all = vec![good[0].clone(), empty.clone(), foreign.clone(), good[1].clone()];
    handle.submit(all, sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 4).await;
    assert_eq!(failure_of(&events, &empty).code, "empty_prompt");
    assert_eq!(failure_of(&events, &foreign).code, "invalid_token_id");
    good.iter().for_each(|request| assert_eq!(outputs_of(&events, request)[0].token_ids, alone(request).tokens));
}

#[tokio::test]
async fn stop_text_ends_the_request_and_frees_its_place() {
    let handle = start(&Bed { max_model_len: 4_000, ..Bed::default() });
    let free = request(prompt(5, 9), 40);
    let (sink, mut receiver) = channel();
    handle.submit(vec![free.clone()], sink.clone()).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 1).await;
    let whole = &outputs_of(&events, &free)[0].text;
    let at = whole.char_indices().nth(20).expect("40 characters or so").0;
    let stop: String = whole[at..].chars().take(3).collect();
    let first = whole.find(&stop).expect("it is there");
    let stop_rules = StopRules { stop: vec![stop.clone()], max_tokens: 3_900, ..free.stop.clone() };
    let stopped = Request { stop: stop_rules, ..again(&free) };
    handle.submit(vec![stopped.clone()], sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 1).await;
    let output = outputs_of(&events, &stopped)[0];
    assert_eq!(output.text, whole[..first]);
    assert_eq!(output.token_ids.len(), whole[..first].chars().count());
    let finish = output.finish.as_ref().expect("its end");
    assert_eq!((finish.reason, &finish.stop_reason), (FinishReason::Stop, &Some(StopReason::Text(stop))));
    assert_eq!(finish.num_output_tokens as usize, output.token_ids.len() + 3);
    until_idle(&handle).await;
    assert_eq!(handle.status().kv_cache_usage, 0.0);
    assert!(handle.status().generation_tokens < 1_000, "it did not run to max_tokens");
    assert_eq!(handle.status().num_finished.stop, 1);
}

/// Polls until nothing runs or waits.
async fn until_idle(handle: &EngineHandle) {
    let idle = async {
        loop {
            let status = handle.status();
            if status.num_running == 0 && status.num_waiting == 0 {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, idle).await.expect("the engine comes to rest");
}

#[tokio::test]
async fn cancelled_request_ends_as_aborted_and_others_go_on() {
    let handle = start(&Bed { max_model_len: 3_000, ..Bed::default() });
    let endless = Request { stream: true, ..request(prompt(1, 9), 2_900) };
    let other = request(prompt(2, 9), 30);
    let (sink, mut receiver) = channel();
    handle.submit(vec![endless.clone(), other.clone()], sink).await.expect("it takes requests");
    let first = receiver.recv().await.expect("the stream begins");
    handle.cancel(&[endless.id, endless.id, request(vec![1], 1).id]);
    let mut events = first;
    events.extend(until_ended(&mut receiver, 2).await);
    let last = *outputs_of(&events, &endless).last().expect("its end");
    assert_eq!(last.finish.as_ref().expect("its end").reason, FinishReason::Abort);
    assert_eq!(outputs_of(&events, &other)[0].token_ids, alone(&other).tokens);
    handle.cancel(&[endless.id, other.id]);
    until_idle(&handle).await;
    assert_eq!(handle.status().num_finished.abort, 1);
}

/// The engine is full; a cancel of requests whose submission still waits for room ends
/// them at once, each with one last event, and takes no place away.
#[tokio::test]
async fn cancel_of_a_request_that_waits_for_room_is_not_lost() {
    let (handle, gate) = start_held();
    let full: Vec<_> = (0..u64::from(handle.capacity())).map(|salt| request(prompt(salt, 9), 2_900)).collect();
    let ids: Vec<_> = full.iter().map(|request| request.id).collect();
    let (full_sink, mut full_receiver) = channel();
    handle.submit(full, full_sink).await.expect("it takes requests");
    let late: Vec<_> = (0..3).map(|salt| request(prompt(700 + salt, 9), 5)).collect();
    let (sink, mut receiver) = channel();
    let (submitting, requests) = (handle.clone(), late.clone());
    let submission = tokio::spawn(async move { submitting.submit(requests, sink).await });
    // Once its id is known, a second submission of it is refused: a bounded wait for that.
    let (probe_sink, mut probe) = channel();
    tokio::task::yield_now().await;
    let twin = handle.clone();
    let again = late[1].clone();
    tokio::spawn(async move { twin.submit(vec![again], probe_sink).await });
    let refused = until_ended(&mut probe, 1).await;
    assert_eq!(failure_of(&refused, &late[1]).code, "duplicate_request_id");
    handle.cancel(&[late[0].id, late[2].id, late[0].id]);
    let events = until_ended(&mut receiver, 2).await;
    for request in [&late[0], &late[2]] {
        let outputs = outputs_of(&events, request);
        assert_eq!(outputs.len(), 1, "one last event");
        let finish = outputs[0].finish.as_ref().expect("its end");
        assert_eq!((finish.reason, finish.num_prompt_tokens, finish.num_output_tokens), (FinishReason::Abort, 9, 0));
    }
    assert!(!submission.is_finished(), "the third one waits still");
    drop(gate);
    handle.cancel(&ids);
    until_ended(&mut full_receiver, ids.len()).await;
    submission.await.expect("it ends").expect("it takes requests");
    let events = until_ended(&mut receiver, 1).await;
    assert_eq!(outputs_of(&events, &late[1])[0].token_ids, alone(&late[1]).tokens);
    // Every place is free again: as many as fit go in without a wait for one to end.
    until_idle(&handle).await;
    assert_eq!(handle.status().num_finished.abort, u64::from(handle.capacity()) + 2);
    let full: Vec<_> = (0..u64::from(handle.capacity())).map(|salt| request(prompt(salt, 9), 2_900)).collect();
    let (sink, _receiver) = channel();
    tokio::time::timeout(PATIENCE, handle.submit(full, sink)).await.expect("all fit at once").expect("they are taken");
}

/// A submission that its caller gave up leaves no trace: its ids are free, its places too.
#[tokio::test]
async fn submission_given_up_while_it_waits_is_forgotten() {
    let (handle, gate) = start_held();
    let full: Vec<_> = (0..u64::from(handle.capacity())).map(|salt| request(prompt(salt, 9), 2_900)).collect();
    let ids: Vec<_> = full.iter().map(|request| request.id).collect();
    let (sink, mut receiver) = channel();
    handle.submit(full, sink).await.expect("it takes requests");
    let late = request(prompt(700, 9), 5);
    let (late_sink, mut late_receiver) = channel();
    {
        let given_up = std::pin::pin!(handle.submit(vec![late.clone()], late_sink));
        assert!(futures_poll_once(given_up).await.is_none(), "it waits for room");
    }
    assert_eq!(late_receiver.recv().await, None, "nothing holds the sink any more");
    drop(gate);
    handle.cancel(&ids);
    until_ended(&mut receiver, ids.len()).await;
    let (sink, mut receiver) = channel();
    handle.submit(vec![late.clone()], sink).await.expect("its id is free");
    let events = until_ended(&mut receiver, 1).await;
    assert_eq!(outputs_of(&events, &late)[0].token_ids, alone(&late).tokens);
}

/// The future's result if it is ready at its first poll.
async fn futures_poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|task| match future.as_mut().poll(task) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

/// Field report 66: pegainfer docs.
#[tokio::test]
async fn panic_of_a_step_fails_all_requests_as_transient_and_shows() {
    breakdown(PANIC_TOKEN, "a step panicked: the toy panics as asked").await;
}

#[tokio::test]
async fn device_error_fails_all_requests_as_transient_and_shows() {
    breakdown(ERROR_TOKEN, "the toy's device failed as asked").await;
}

async fn breakdown(trigger: u32, why: &str) {
    let handle = start(&Bed { max_num_seqs: 2, max_model_len: 3_000, ..Bed::default() });
    let running = Request { stream: true, ..request(prompt(1, 9), 2_900) };
    let (sink, mut receiver) = channel();
    handle.submit(vec![running.clone()], sink.clone()).await.expect("it takes requests");
    receiver.recv().await.expect("the stream begins");
    let waiting: Vec<_> = (2..8).map(|salt| request(prompt(salt, 9), 2_900)).collect();
    let all = [vec![request(vec![trigger], 5)], waiting].concat();
    handle.submit(all.clone(), sink.clone()).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 8).await;
    for request in all.iter().chain([&running]) {
        let error = failure_of(&events, request);
        assert_eq!((error.transient, error.code), (true, "engine_stopped"));
        assert!(error.message.contains(why), "{}", error.message);
    }
    let state = handle.status().state;
    assert!(matches!(&state, EngineState::Poisoned(reason) if reason.contains(why)), "{state:?}");
    let error = handle.submit(vec![request(vec![1], 1)], sink).await.expect_err("it takes no more");
    assert!(error.to_string().contains(why), "{error}");
}

#[tokio::test]
async fn shutdown_fails_what_is_inside_as_transient() {
    let handle = start(&Bed { max_model_len: 3_000, ..Bed::default() });
    let requests: Vec<_> = (0..20).map(|salt| request(prompt(salt, 9), 2_900)).collect();
    let (sink, mut receiver) = channel();
    handle.submit(requests.clone(), sink).await.expect("it takes requests");
    let stopping = handle.clone();
    tokio::task::spawn_blocking(move || stopping.shutdown()).await.expect("it stops");
    let events = until_ended(&mut receiver, 20).await;
    requests.iter().for_each(|request| assert!(failure_of(&events, request).transient));
    assert_eq!(handle.status().state, EngineState::Stopped);
    assert_eq!(receiver.recv().await, None, "nothing holds the sink any more");
}

#[tokio::test]
async fn more_requests_than_fit_inside_all_finish_in_turn() {
    let handle = start(&Bed::default());
    let requests: Vec<_> = (0..handle.capacity() as u64 * 2).map(|salt| request(prompt(salt, 5), 3)).collect();
    let (sink, mut receiver) = channel();
    handle.submit(requests.clone(), sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, requests.len()).await;
    for request in requests.iter().step_by(50) {
        assert_eq!(outputs_of(&events, request)[0].token_ids, alone(request).tokens);
    }
    until_idle(&handle).await;
    let status = handle.status();
    assert_eq!(status.num_finished.length, requests.len() as u64);
    assert_eq!(status.generation_tokens, requests.len() as u64 * 3);
}

#[tokio::test]
async fn engine_without_text_gives_token_ids() {
    let bed = Bed::default();
    let handle = Engine::start(Box::new(Toy::new(512)), None, &bed.config()).expect("it starts");
    let request = request(prompt(1, 20), 10);
    let (sink, mut receiver) = channel();
    handle.submit(vec![request.clone()], sink).await.expect("it takes requests");
    let events = until_ended(&mut receiver, 1).await;
    assert_eq!(outputs_of(&events, &request)[0].token_ids, alone(&request).tokens);
    assert_eq!(outputs_of(&events, &request)[0].text, "");
}

#[tokio::test]
async fn throughput_run_counts_every_token_and_hits_the_shared_prefix() {
    let handle = start(&Bed::default());
    let options = ThroughputOptions {
        input_len: 50,
        output_len: 7,
        num_prompts: 40,
        shared_prefix_len: 24,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        seed: 3,
    };
    let report = run_throughput(&handle, &options).await.expect("it runs");
    assert_eq!((report.num_requests, report.output_num_tokens), (40, 280));
    assert_eq!(report.total_num_tokens, 40 * 57);
    assert!(report.cached_num_tokens >= 24 * 30, "{report:?}");
    assert!(report.num_steps > 0 && report.elapsed_time > 0.0 && report.decode_time > 0.0);
    let error = run_throughput(&handle, &ThroughputOptions { input_len: 600, ..options }).await;
    assert!(matches!(error, Err(BenchError::Request(error)) if error.code == "context_length_exceeded"));
}

/// For the whole process: tests run in one of their own.
#[tokio::test]
async fn engines_that_somebody_still_holds_end_before_the_process() {
    let handle = start(&Bed { max_model_len: 3_000, ..Bed::default() });
    let (sink, mut receiver) = channel();
    handle.submit(vec![request(prompt(1, 20), 2_000)], sink).await.expect("it takes requests");
    assert!(overnight_engine::shut_down_all(PATIENCE), "the step under way ends");
    assert_eq!(handle.status().state, EngineState::Stopped);
    let events = until_ended(&mut receiver, 1).await;
    assert!(matches!(events.last(), Some(Event::Failed { error, .. }) if error.transient));
}
