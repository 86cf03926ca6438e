//! Help topics, search in help, wrong usage, and what is not built yet, said in one sentence each.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::Cli;
use crate::error::{Exit, Failure};

/// Commands of the full tree that later versions bring, and what to use until then.
const NOT_BUILT: &[(&str, &str)] = &[
    ("label", "make the items with `batch prepare` and a template, then `batch submit`"),
    ("scheduler", "start `batch submit` or `batch run` from cron or a systemd timer"),
    ("embed", "generation is built; embeddings are not"),
    ("rerank", "generation is built; reranking is not"),
    ("kernels", "kernels are compiled at the first start on a GPU and kept in the user's cache folder"),
];

/// The same for `batch bench`.
const BENCH_NOT_BUILT: &[(&str, &str)] = &[
    ("latency", "`batch bench throughput` measures the engine, `batch bench durable` the durable path"),
    ("serve", "`batch bench throughput` measures the engine without the server before it"),
    ("batch", "`batch bench durable` measures a whole batch, from upload to published file"),
    ("kernels", "`batch bench throughput` measures the engine as a whole, with --device cuda on a GPU"),
    ("tune", "`batch bench throughput` shows the effect of --max-num-seqs and --max-num-batched-tokens"),
];

/// Flags of vLLM's that do not exist here: why, or what to use instead.
const REFUSED_FLAGS: &[(&str, &str)] = &[
    ("--kv-cache-dtype", "the KV cache has the type of the weights on a GPU, and f16 or f32 on the CPU"),
    ("--quantization", "quantization is read from the model file"),
    (
        "--tensor-parallel-size",
        "one process drives one GPU or CPU; run `batch worker` on more machines when Postgres is built",
    ),
    ("--pipeline-parallel-size", "one process drives one GPU or CPU"),
    ("--data-parallel-size", "one process drives one GPU or CPU"),
    ("--reasoning-parser", "reasoning is not split from the answer yet"),
    ("--swap-space", "preempted sequences prefill again; nothing is swapped"),
    ("--enable-lora", "adapters are not built"),
    ("--lora-modules", "adapters are not built"),
    ("--speculative-config", "speculative decoding is not built"),
    ("--scheduling-policy", "items run in the order of priority, deadline and age; `batch submit --priority` sets it"),
    ("--async-scheduling", "the scheduler always works ahead"),
    ("--uds", "only TCP is served"),
    ("--root-path", "put a reverse proxy in front"),
    ("--ssl-keyfile", "put a reverse proxy in front for TLS"),
    ("--ssl-certfile", "put a reverse proxy in front for TLS"),
    ("--disable-log-stats", "use --stats-interval 0"),
    ("--enable-log-requests", "prompts are never logged"),
    ("--enable-log-outputs", "outputs are never logged"),
    ("--max-log-len", "prompts are never logged"),
    ("--trust-remote-code", "model repositories run no code here"),
    ("--tokenizer", "the tokenizer is read from the model's folder or GGUF file"),
];

/// Values of the full tree that are not built: flag, value, and what to do instead.
const VALUES_NOT_BUILT: &[(&str, &str, &str)] = &[(
    "--format",
    "parquet",
    "write --format jsonl or csv, then: duckdb -c \"copy (from 'out.jsonl') to 'out.parquet'\"",
)];

/// Answers `batch help exit-codes`, `--help=all` and `--help=WORD` before the
/// command line is parsed; `None` when it is neither.
pub(crate) fn answer_help_topics(words: &[OsString]) -> Option<ExitCode> {
    let words: Vec<&str> = words.iter().skip(1).filter_map(|word| word.to_str()).collect();
    if words == ["help", "exit-codes"] {
        let table = Exit::TABLE.iter().map(|(exit, meaning)| format!("{:>4}  {meaning}\n", *exit as u8));
        return Some(print(&table.collect::<String>()));
    }
    if words.len() == 3 && words.iter().filter(|word| **word != "--json").eq(&["help", "exit-codes"]) {
        let table: Vec<serde_json::Value> = Exit::TABLE
            .iter()
            .map(|(exit, meaning)| serde_json::json!({"code": *exit as u8, "meaning": meaning}))
            .collect();
        return Some(print(&format!("{}\n", serde_json::Value::Array(table))));
    }
    let wanted = words.iter().find_map(|word| word.strip_prefix("--help="))?;
    let mut text = String::new();
    search(&mut Cli::command(), "batch", wanted, &mut text);
    if text.is_empty() {
        text = format!("no flag or command mentions {wanted:?}\n");
    }
    Some(print(&text))
}

fn print(text: &str) -> ExitCode {
    // A reader that closes the pipe has seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Lists flags whose group, name or text holds the word; `all` lists every one.
fn search(command: &mut clap::Command, path: &str, wanted: &str, text: &mut String) {
    command.build();
    let word = wanted.to_lowercase();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && (path == "batch" || !arg.is_global_set())) {
        let name = match (arg.get_long(), arg.get_short()) {
            (Some(long), _) => format!("--{long}"),
            (None, Some(short)) => format!("-{short}"),
            (None, None) => arg.get_id().as_str().to_uppercase(),
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let group = arg.get_help_heading().unwrap_or_default();
        let hit = [name.as_str(), help.as_str(), group].iter().any(|text| text.to_lowercase().contains(&word));
        if word == "all" || hit {
            text.push_str(&format!("{path} {name}\n    {help}\n"));
        }
    }
    for inner in command.get_subcommands_mut().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help") {
        let path = format!("{path} {}", inner.get_name());
        search(inner, &path, wanted, text);
    }
}

/// Prints what clap found wrong (or the help that was asked for) and gives the exit code.
pub(crate) fn report(err: &clap::Error, words: &[OsString]) -> ExitCode {
    if matches!(err.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // A reader that closes the pipe has seen enough.
        let _ = err.print();
        return ExitCode::SUCCESS;
    }
    let json = words.iter().any(|word| word == "--json");
    let failure = not_built(err, words).or_else(|| value_not_built(err)).or_else(|| refused_flag(err));
    match failure {
        Some(failure) => {
            let text = if json { failure.to_json() + "\n" } else { failure.to_text(false) };
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        None if json => {
            let text = err.render().to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            let failure = Failure::usage(first).hint("`batch help` lists the commands");
            let _ = std::io::stderr().write_all((failure.to_json() + "\n").as_bytes());
        }
        None => {
            let _ = err.print();
        }
    }
    ExitCode::from(Exit::Usage as u8)
}

fn context(err: &clap::Error, kind: ContextKind) -> Option<&str> {
    match err.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

fn not_built(err: &clap::Error, words: &[OsString]) -> Option<Failure> {
    let name = context(err, ContextKind::InvalidSubcommand)?;
    // `bench serve` is another thing than `serve`.
    let of_bench = words.iter().any(|word| word == "bench");
    let known = if of_bench { BENCH_NOT_BUILT } else { NOT_BUILT };
    let (name, instead) = known.iter().find(|(known, _)| *known == name)?;
    let name = if of_bench { format!("bench {name}") } else { (*name).to_owned() };
    Some(Failure::usage(format!("`{name}` is not built yet: {instead}")).code("not_built"))
}

fn value_not_built(err: &clap::Error) -> Option<Failure> {
    if err.kind() != ErrorKind::InvalidValue {
        return None;
    }
    let flag = context(err, ContextKind::InvalidArg)?.split(' ').next()?;
    let value = context(err, ContextKind::InvalidValue)?;
    let (flag, value, instead) =
        VALUES_NOT_BUILT.iter().find(|(known, refused, _)| *known == flag && *refused == value)?;
    Some(Failure::usage(format!("{flag} {value} is not built: {instead}")).code("not_built"))
}

fn refused_flag(err: &clap::Error) -> Option<Failure> {
    if err.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let flag = context(err, ContextKind::InvalidArg)?;
    let flag = flag.split(['=', ' ']).next().unwrap_or(flag);
    let (flag, why) = REFUSED_FLAGS.iter().find(|(known, _)| *known == flag)?;
    Some(Failure::usage(format!("{flag} is not accepted: {why}")).code("flag_not_supported"))
}
