//! From tokens to events: text, stop texts, streams, cuts.

use std::sync::{Arc, Mutex};

use overnight_engine::output::{EndedHere, Event, Outputs, Registration, Sink};
use overnight_engine::step::SequenceOutput;
use overnight_engine::{
    Finish, FinishReason, Request, StopReason, StopRules, TokenLogprob, TokenLogprobs, TokenOutput,
};

use crate::bed::request;
use crate::texts::{id, text};
use crate::toy::EOS;

/// A byte that no character ends with.
const FIRST_OF_TWO_BYTES: u32 = 95;

type Messages = Arc<Mutex<Vec<Vec<Event>>>>;

fn sink() -> (Sink, Messages) {
    let messages = Messages::default();
    let kept = messages.clone();
    let sink: Sink = Arc::new(move |events| {
        kept.lock().expect("whole").push(events);
        true
    });
    (sink, messages)
}

fn with_stop(stop: &[&str], stream: bool) -> Request {
    let stop =
        StopRules { stop: stop.iter().map(|&stop| stop.to_owned()).collect(), max_tokens: 100, ..Default::default() };
    Request { stop, stream, ..request(vec![id('a')], 100) }
}

fn token(request: &Request, token: u32, end: Option<FinishReason>, num_output_tokens: u32) -> SequenceOutput {
    let finish =
        |reason| Finish { reason, stop_reason: None, num_prompt_tokens: 1, num_cached_tokens: 0, num_output_tokens };
    let scored = TokenLogprob { token, logprob: -1.0, rank: 1 };
    SequenceOutput {
        id: request.id,
        token: Some(token),
        logprobs: Some(TokenLogprobs { chosen: scored, top: vec![] }),
        prompt_logprobs: None,
        num_prompt_tokens: 1,
        num_cached_tokens: 0,
        end: end.map(|reason| Ok(finish(reason))),
        is_watched: true,
    }
}

/// Feeds the characters one token and step at a time, the last one with `end`.
fn feed(request: &Request, characters: &str, end: Option<FinishReason>) -> (Vec<TokenOutput>, Vec<EndedHere>) {
    feed_ids(request, &characters.chars().map(id).collect::<Vec<_>>(), end)
}

fn feed_ids(request: &Request, ids: &[u32], end: Option<FinishReason>) -> (Vec<TokenOutput>, Vec<EndedHere>) {
    let mut outputs = Outputs::new(Some(text()));
    let (sink, messages) = sink();
    outputs.register(Registration::new(request, sink));
    let mut ended = Vec::new();
    for (index, &id) in ids.iter().enumerate() {
        let is_last = index + 1 == ids.len();
        outputs.take(token(request, id, end.filter(|_| is_last), index as u32 + 1));
        ended.extend(outputs.deliver());
    }
    let messages = messages.lock().expect("whole").clone();
    let outputs = messages.into_iter().flatten().map(|event| match event {
        Event::Output(output) => output,
        other => panic!("{other:?}"),
    });
    (outputs.collect(), ended)
}

#[track_caller]
fn assert_whole(outputs: &[TokenOutput], want: &str, num_tokens: u32, stop_reason: Option<&str>) {
    let text: String = outputs.iter().map(|output| output.text.as_str()).collect();
    let ids: Vec<u32> = outputs.iter().flat_map(|output| output.token_ids.clone()).collect();
    let scored: Vec<u32> = outputs.iter().flat_map(|o| o.logprobs.iter().map(|scored| scored.chosen.token)).collect();
    assert_eq!(text, want);
    assert_eq!(ids, want.chars().map(id).collect::<Vec<_>>(), "ids are cut where the text is");
    assert_eq!(scored, ids, "and logprobs too");
    let (last, before) = outputs.split_last().expect("an output");
    assert!(before.iter().all(|output| output.finish.is_none()));
    let finish = last.finish.as_ref().expect("the last one says how it ended");
    assert_eq!(finish.num_output_tokens, num_tokens);
    assert_eq!(finish.stop_reason, stop_reason.map(|text| StopReason::Text(text.to_owned())));
}

/// Field report 12, 13: vllm#3574, #2577, #11089; #57052. Streamed or not, the same text and ids.
#[test]
fn stop_text_over_several_tokens_cuts_text_and_ids_at_one_place() {
    for stream in [false, true] {
        let request = with_stop(&["stop here"], stream);
        let (outputs, ended) = feed(&request, "one st two stop here and more", None);
        assert_whole(&outputs, "one st two ", 20, Some("stop here"));
        assert_eq!(ended, [EndedHere { id: request.id, reason: Some(FinishReason::Stop) }]);
        assert_eq!(outputs.len() > 1, stream);
        let include = StopRules { include_stop_str_in_output: true, ..request.stop.clone() };
        let (outputs, _) = feed(&Request { stop: include, ..request }, "one stop here!", None);
        assert_whole(&outputs, "one stop here", 13, Some("stop here"));
    }
}

proptest::proptest! {
    /// Special tokens have no text, a cut character's bytes share theirs: streamed or not,
    /// wherever the stop text falls, the same text and ids come, and never a failure.
    #[test]
    fn stop_text_among_tokens_without_text_cuts_streams_and_wholes_alike(
        ids in proptest::collection::vec(proptest::sample::select(vec![id('a'), id('b'), EOS, FIRST_OF_TWO_BYTES]), 1..12),
        stop in proptest::sample::select(vec!["a", "ab", "bb"]),
        include in proptest::bool::ANY,
    ) {
        let run = |stream| {
            let request = with_stop(&[stop], stream);
            let rules = StopRules { include_stop_str_in_output: include, ..request.stop.clone() };
            let (outputs, _) = feed_ids(&Request { stop: rules, ..request }, &ids, Some(FinishReason::Length));
            let text: String = outputs.iter().map(|output| output.text.as_str()).collect();
            let given: Vec<u32> = outputs.iter().flat_map(|output| output.token_ids.clone()).collect();
            let scored = outputs.iter().map(|output| output.logprobs.len()).sum::<usize>();
            let finish = outputs.last().and_then(|output| output.finish.clone()).expect("the last one says how it ended");
            (text, given, scored, finish.reason)
        };
        let (whole, streamed) = (run(false), run(true));
        proptest::prop_assert_eq!(&whole, &streamed);
        let (text, given, scored, _) = whole;
        proptest::prop_assert_eq!(given.len(), scored);
        proptest::prop_assert!(ids.starts_with(&given));
        proptest::prop_assert!(include || !text.contains(stop), "{}", text);
    }
}

#[test]
fn text_held_back_for_a_stop_text_comes_when_it_is_none() {
    let (outputs, _) = feed(&with_stop(&["</end>"], true), "a</endless> b</en", Some(FinishReason::Length));
    assert_whole(&outputs, "a</endless> b</en", 17, None);
    assert!(outputs.iter().any(|output| output.text == "</endl"), "what was held back comes at once: {outputs:?}");
}

/// Field report 38: vllm-gaudi PR 1794. What the engine computes before it hears of a stop text is dropped.
#[test]
fn tokens_after_a_stop_text_are_dropped() {
    let (outputs, ended) = feed(&with_stop(&["x"], true), "abxyz", Some(FinishReason::Length));
    assert_whole(&outputs, "ab", 3, Some("x"));
    assert_eq!(ended.len(), 1);
}

#[test]
fn stop_text_is_not_looked_for_before_min_tokens() {
    let mut request = with_stop(&["b"], false);
    request.stop.min_tokens = 4;
    assert_whole(&feed(&request, "abababab", None).0, "ababa", 6, Some("b"));
}

#[test]
fn end_token_is_counted_but_no_part_of_the_answer() {
    let request = with_stop(&[], true);
    let mut outputs = Outputs::new(Some(text()));
    let (sink, messages) = sink();
    outputs.register(Registration::new(&request, sink));
    outputs.take(token(&request, id('h'), None, 1));
    outputs.take(token(&request, EOS, Some(FinishReason::Stop), 2));
    assert!(outputs.deliver().is_empty(), "the engine ended it itself");
    let messages = messages.lock().expect("whole").clone();
    assert_eq!(messages.len(), 1, "one message per round and sink");
    let [Event::Output(first), Event::Output(last)] = messages[0].as_slice() else { panic!("{messages:?}") };
    assert_whole(&[first.clone(), last.clone()], "h", 2, None);
}

#[test]
fn without_streaming_everything_comes_in_one_output() {
    let (outputs, _) = feed(&with_stop(&[], false), "hello", Some(FinishReason::Length));
    assert_eq!(outputs.len(), 1);
    assert_whole(&outputs, "hello", 5, None);
}

/// Field report 18: vllm PR 15137, PR 18840.
#[test]
fn token_that_has_no_text_fails_its_request_alone() {
    let (bad, good) = (with_stop(&[], false), with_stop(&[], false));
    let mut outputs = Outputs::new(Some(text()));
    let (sink, messages) = sink();
    outputs.register(Registration::new(&bad, sink.clone()));
    outputs.register(Registration::new(&good, sink));
    outputs.take(token(&bad, 5_000, None, 1));
    outputs.take(token(&good, id('k'), Some(FinishReason::Length), 1));
    assert_eq!(outputs.deliver(), [EndedHere { id: bad.id, reason: None }]);
    let events = messages.lock().expect("whole").concat();
    assert!(matches!(&events[0], Event::Failed { id, error } if *id == bad.id && error.is_breakdown()));
    assert!(matches!(&events[1], Event::Output(output) if output.id == good.id && output.text == "k"));
}

#[test]
fn request_that_nobody_listens_to_is_ended() {
    let request = with_stop(&[], true);
    let mut outputs = Outputs::new(Some(text()));
    outputs.register(Registration::new(&request, Arc::new(|_| false)));
    outputs.take(token(&request, id('a'), None, 1));
    assert_eq!(outputs.deliver(), [EndedHere { id: request.id, reason: Some(FinishReason::Abort) }]);
}

#[test]
fn request_that_nobody_hears_begin_is_ended_and_one_that_ended_does_not_begin() {
    let mut outputs = Outputs::new(Some(text()));
    let (unheard, ended) = (with_stop(&[], false), with_stop(&[], false));
    outputs.register(Registration::new(&unheard, Arc::new(|_| false)));
    outputs.begin(unheard.id);
    assert_eq!(outputs.deliver(), [EndedHere { id: unheard.id, reason: Some(FinishReason::Abort) }]);
    let (sink, messages) = sink();
    outputs.register(Registration::new(&ended, sink));
    outputs.begin(ended.id);
    outputs.take(token(&ended, id('a'), Some(FinishReason::Length), 1));
    outputs.begin(ended.id);
    assert!(outputs.deliver().is_empty());
    let messages = messages.lock().expect("whole").clone();
    let [Event::Begun { id }, Event::Output(_)] = messages[0].as_slice() else { panic!("{messages:?}") };
    assert_eq!((*id, messages.len()), (ended.id, 1), "both in one message");
}
