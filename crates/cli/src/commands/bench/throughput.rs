//! `batch bench throughput`: the engine alone, requests of equal length all at once,
//! with the words and JSON keys of `vllm bench throughput`.

use clap::Args;
use overnight_engine::SamplingParams;
use overnight_engine::bench::{ThroughputOptions, ThroughputReport, run_throughput};

use crate::App;
use crate::config::Loaded;
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
    let config = Loaded::read(&app.globals, args.engine.settings()?)?.config;
    engine::check(&config)?;
    let (to_load, ui) = (config.clone(), app.ui.clone());
    let started = tokio::task::spawn_blocking(move || engine::start(&to_load, |text| ui.say(text)))
        .await
        .unwrap_or_else(|err| Err(Failure::from_error("load the model", &err)))?;
    let Some(handle) = started.handle else {
        return Err(Failure::usage("this measures the local engine; engine.kind is another one"));
    };
    let small = |flag: &str, value: u64| {
        u32::try_from(value).map_err(|_| Failure::usage(format!("{flag} is too large: {value}")))
    };
    let mut report = None;
    for round in 0..=args.num_warmups {
        let options = ThroughputOptions {
            input_len: small("--input-len", args.input_len)?,
            output_len: small("--output-len", args.output_len)?,
            num_prompts: small("--num-prompts", args.num_prompts)?,
            shared_prefix_len: small("--shared-prefix-len", args.shared_prefix_len)?,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            // A warm-up must not leave the prompts of the next run in the prefix cache.
            seed: config.engine.local.seed + round,
        };
        let done = run_throughput(&handle, &options).await;
        report = Some(done.map_err(|err| Failure::from_error("measure the engine", &err))?);
    }
    let stop = handle.clone();
    let stopped = tokio::task::spawn_blocking(move || stop.shutdown()).await;
    stopped.map_err(|err| Failure::from_error("stop the engine", &err))?;
    match report {
        Some(report) => show(&report, &args, app),
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
