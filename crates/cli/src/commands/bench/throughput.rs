//! `batch bench throughput`: the engine alone, requests of equal length all at once,
//! with the words and JSON keys of `vllm bench throughput`.

use std::time::Instant;

use clap::Args;
use overnight_engine::SamplingParams;
use overnight_engine::bench::{ThroughputOptions, ThroughputReport, run_throughput};

use crate::App;
use crate::config::{EngineKind, Loaded};
use crate::error::{Failure, Result};
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
    /// Of each prompt, tokens that all have in common
    #[arg(long, default_value = "0", value_parser = human::parse_count)]
    shared_prefix_len: u64,
    /// How tokens are chosen; 0 takes the likeliest
    #[arg(long, default_value = "0")]
    temperature: f32,
    /// Keep the likeliest tokens whose probabilities sum to this
    #[arg(long, default_value = "1")]
    top_p: f32,
    /// Runs before the ones that count
    #[arg(long, default_value = "1", value_parser = human::parse_count)]
    num_warmups: u64,
    /// Runs that count; the figures are those of the median one
    #[arg(long, default_value = "1", value_parser = human::parse_count)]
    num_runs: u64,
    /// Write the figures there as JSON
    #[arg(long, value_name = "PATH")]
    output_json: Option<std::path::PathBuf>,
    #[command(flatten)]
    engine: EngineFlags,
}

pub(crate) async fn run(args: ThroughputArgs, app: &App) -> Result {
    let config = Loaded::read(&app.globals, args.engine.settings()?)?.config;
    engine::check(&config)?;
    let (to_load, ui) = (config.clone(), app.ui.clone());
    if config.engine.source.kind != EngineKind::Local {
        return Err(Failure::usage("this measures the local engine; engine.kind is another one"));
    }
    let started = Instant::now();
    let started_engine = tokio::task::spawn_blocking(move || engine::start_without_text(&to_load, |text| ui.say(text)))
        .await
        .unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)));
    let (handle, device) = started_engine?;
    app.ui.say(format!("ready on {device} in {}", human::duration(started.elapsed())));
    let small = |flag: &str, value: u64| {
        u32::try_from(value).map_err(|_| Failure::usage(format!("{flag} is too large: {value}")))
    };
    let mut reports = Vec::new();
    for round in 0..args.num_warmups + args.num_runs.max(1) {
        let options = ThroughputOptions {
            input_len: small("--input-len", args.input_len)?,
            output_len: small("--output-len", args.output_len)?,
            num_prompts: small("--num-prompts", args.num_prompts)?,
            shared_prefix_len: small("--shared-prefix-len", args.shared_prefix_len)?,
            sampling: SamplingParams { temperature: args.temperature, top_p: args.top_p, ..SamplingParams::default() },
            // A warm-up must not leave the prompts of the next run in the prefix cache.
            seed: config.engine.local.seed + round,
        };
        let done = run_throughput(&handle, &options).await;
        let report = done.map_err(|err| Failure::from_error("measure the engine", &err))?;
        if round >= args.num_warmups {
            app.ui.say(format!("{:.3} s, {:.2} requests/s", report.elapsed_time, report.requests_per_second));
            reports.push(report);
        }
    }
    let stop = handle.clone();
    let stopped = tokio::task::spawn_blocking(move || stop.shutdown()).await;
    stopped.map_err(|err| Failure::from_error("stop the engine", &err))?;
    reports.sort_by(|a, b| a.elapsed_time.total_cmp(&b.elapsed_time));
    match reports.get(reports.len() / 2) {
        Some(report) => show(report, &args, app),
        None => Ok(()),
    }
}

fn show(report: &ThroughputReport, args: &ThroughputArgs, app: &App) -> Result {
    let record = serde_json::to_string(report).map_err(|err| Failure::from_error("write the figures", &err))?;
    if let Some(path) = &args.output_json {
        std::fs::write(path, format!("{record}\n"))?;
    }
    if app.ui.is_json() {
        return app.ui.data(&format!("{record}\n"));
    }
    app.ui.data(&format!(
        "Throughput: {:.2} requests/s, {:.2} total tokens/s, {:.2} output tokens/s\n\
         Total num prompt tokens: {}\nTotal num output tokens: {}\n\
         Prefill: {:.2} tokens/s in {:.2} s, decode: {:.2} tokens/s in {:.2} s, {} steps, {} preemptions\n",
        report.requests_per_second,
        report.tokens_per_second,
        report.output_tokens_per_second,
        report.total_num_tokens - report.output_num_tokens,
        report.output_num_tokens,
        report.prefill_tokens_per_second,
        report.prefill_time,
        report.decode_tokens_per_second,
        report.decode_time,
        report.num_steps,
        report.num_preemptions
    ))
}
