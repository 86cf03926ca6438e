//! `batch bench throughput`: the engine alone, requests of equal length all at once,
//! with the words and JSON keys of `vllm bench throughput`.

use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use overnight_engine::request::Class;
use overnight_engine::{EngineHandle, Event, Request, RequestId, SamplingParams, Sink, StopRules};
use serde_json::json;
use tokio::sync::mpsc;

use crate::App;
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::service::engine;
use crate::service::flags::EngineFlags;

/// Arguments of `batch bench throughput`.
#[derive(Debug, Args)]
pub(crate) struct ThroughputArgs {
    /// Prompt tokens of each request
    #[arg(long, default_value = "128", value_parser = human::parse_count)]
    input_len: u64,
    /// Tokens that each request generates
    #[arg(long, default_value = "64", value_parser = human::parse_count)]
    output_len: u64,
    /// Requests
    #[arg(long, default_value = "32", value_parser = human::parse_count)]
    num_prompts: u64,
    /// Runs before the one that counts
    #[arg(long, default_value = "1", value_parser = human::parse_count)]
    num_warmups: u64,
    /// Write the figures there as JSON
    #[arg(long, value_name = "PATH")]
    output_json: Option<std::path::PathBuf>,
    #[command(flatten)]
    engine: EngineFlags,
}

pub(crate) async fn run(args: ThroughputArgs, app: &App) -> Result {
    let config = Loaded::read(&app.globals, args.engine.settings())?.config;
    engine::check(&config)?;
    let (to_load, ui) = (config.clone(), app.ui.clone());
    let started = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| ui.say(text)))
        .await
        .unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)))?;
    let Some(handle) = started.handle else {
        return Err(Failure::usage("this measures the local engine; engine.kind is another one"));
    };
    let limits = handle.limits();
    let room = u64::from(limits.max_model_len);
    if args.input_len == 0 || args.output_len == 0 || args.num_prompts == 0 || args.input_len + args.output_len > room {
        return Err(Failure::usage(format!(
            "--input-len, --output-len and --num-prompts must be at least 1, the lengths together at most {room}"
        )));
    }
    let mut elapsed = 0.0;
    for round in 0..=args.num_warmups {
        elapsed = one_round(&handle, &args, round).await?;
    }
    let stop = handle.clone();
    let _ = tokio::task::spawn_blocking(move || stop.shutdown()).await;
    let (input, output) = (args.num_prompts * args.input_len, args.num_prompts * args.output_len);
    let per_second = |count: u64| count as f64 / elapsed;
    let record = json!({"elapsed_time": elapsed, "num_requests": args.num_prompts, "total_num_tokens": input + output,
        "requests_per_second": per_second(args.num_prompts), "tokens_per_second": per_second(input + output),
        "output_tokens_per_second": per_second(output)});
    if let Some(path) = &args.output_json {
        std::fs::write(path, format!("{record}\n"))?;
    }
    if app.ui.is_json() {
        return app.ui.data(&format!("{record}\n"));
    }
    app.ui.data(&format!(
        "Throughput: {:.2} requests/s, {:.2} total tokens/s, {:.2} output tokens/s\n\
         Total num prompt tokens: {input}\nTotal num output tokens: {output}\n",
        per_second(args.num_prompts),
        per_second(input + output),
        per_second(output)
    ))
}

/// Seconds from the first submission to the last token.
async fn one_round(handle: &EngineHandle, args: &ThroughputArgs, round: u64) -> Result<f64> {
    let vocab_size = handle.limits().vocab_size;
    let output_len = u32::try_from(args.output_len).map_err(|_| Failure::usage("--output-len is too large"))?;
    // Prompts that share no prefix with each other or with an earlier round.
    let requests: Vec<Request> = (0..args.num_prompts)
        .map(|index| {
            let mut state = (round << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let prompt = (0..args.input_len).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                u32::try_from(state % u64::from(vocab_size.max(2) - 1)).expect("below a u32") + 1
            });
            Request {
                id: RequestId::next(),
                class: Class::Job,
                prompt: prompt.collect(),
                sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
                stop: StopRules { max_tokens: output_len, ignore_eos: true, ..StopRules::default() },
                logprobs: None,
                prompt_logprobs: None,
                skip_special_tokens: true,
                stream: false,
            }
        })
        .collect();
    let (send, mut events) = mpsc::unbounded_channel::<Vec<Event>>();
    let sink: Sink = Arc::new(move |batch| send.send(batch).is_ok());
    let start = Instant::now();
    let submitting = handle.submit(requests, sink);
    let counting = async {
        let mut open = args.num_prompts;
        while open > 0 {
            let Some(events) = events.recv().await else {
                return Err(Failure::new(Exit::Failure, "the engine stopped before the last token"));
            };
            for event in events {
                match event {
                    Event::Failed { error, .. } => {
                        return Err(Failure::new(Exit::Failure, format!("a request failed: {error}")));
                    }
                    Event::Output(output) if output.finish.is_some() => open -= 1,
                    Event::Output(_) => {}
                }
            }
        }
        Ok(())
    };
    let (submitted, counted) = tokio::join!(submitting, counting);
    submitted.map_err(|err| Failure::from_error("submit the requests", &err))?;
    counted?;
    Ok(start.elapsed().as_secs_f64())
}
