//! The command tree and the flags that every command has.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands;
use crate::output::Format;
use crate::output::human;

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum ColorWhen {
    /// On a terminal, unless NO_COLOR is set or TERM is dumb.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Flags with the same spelling on every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    #[cfg_attr(
        doc,
        expect(rustdoc::broken_intra_doc_links, reason = "[api] is a section of the config, shown as it is")
    )]
    /// Address of the server [default: http:// and the host and port of [api]]
    #[arg(long, global = true, env = "BATCH_SERVER", value_name = "URL", hide_env_values = true)]
    pub(crate) server: Option<String>,
    /// Read the API key from this file (BATCH_API_KEY is accepted too)
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Write one JSON object or array to stdout and nothing else; errors are JSON too
    #[arg(long, global = true, conflicts_with = "output")]
    pub(crate) json: bool,
    /// How records are written to stdout
    #[arg(long, global = true, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
    /// Show only these fields, dotted and comma-separated; without a value: list them
    #[arg(long, global = true, value_name = "A,B", num_args = 0..=1, default_missing_value = "")]
    pub(crate) fields: Option<String>,
    /// Say less; twice: only errors
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) quiet: u8,
    /// Say more; twice: everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// When to colour
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", hide_possible_values = true)]
    pub(crate) color: ColorWhen,
    /// Do not colour
    #[arg(long, global = true)]
    pub(crate) no_color: bool,
    /// Do not show progress
    #[arg(long, global = true)]
    pub(crate) no_progress: bool,
    /// Never ask; fail and name the flag instead
    #[arg(long, global = true)]
    pub(crate) no_input: bool,
    /// Answer questions with yes
    #[arg(short = 'y', long, global = true)]
    pub(crate) yes: bool,
    /// Give up waiting after this long (exit 124)
    #[arg(long, global = true, value_name = "DURATION", value_parser = human::parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Read only this configuration file
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) config: Option<PathBuf>,
    /// Where database, objects and logs are kept [default: ./overnight-data]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Set any configuration key, for example engine.block_size=32
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Durable batch inference: a file of prompts in, a file of answers out, whatever crashes in between.
#[derive(Debug, Parser)]
#[command(
    name = "batch",
    version,
    propagate_version = false,
    max_term_width = 100,
    after_help = "First steps:\n  batch models pull gemma-3-270m\n  batch serve --model gemma-3-270m\n  batch submit items.jsonl --watch\n\n`batch help exit-codes` lists the exit codes; `--help=all` and `--help=WORD` search the flags."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) globals: Globals,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Upload a file of requests and start a batch
    Submit(commands::submit::SubmitArgs),
    /// Show one batch, or the newest ones
    Status(commands::status::StatusArgs),
    /// Continue a paused batch, or re-open an ended one for its unfinished and failed requests
    Resume(commands::resume::ResumeArgs),
    /// Write the results of a batch, also while it runs
    Results(commands::results::ResultsArgs),
    /// List batches
    List(commands::list::ListArgs),
    /// Show one request: input, output, error, timings
    Show(commands::show::ShowArgs),
    /// Group the failures of a batch by code, with one example each
    Errors(commands::errors::ErrorsArgs),
    /// Show what the services of this data folder logged
    Logs(commands::logs::LogsArgs),
    /// Start nothing new; what runs finishes
    Pause(commands::pause::PauseArgs),
    /// Stop a batch; finished results are kept
    Cancel(commands::cancel::CancelArgs),
    /// Run only some requests again: failed, expired, some ids or one error code
    Retry(commands::retry::RetryArgs),
    /// Check a file of requests; needs no server
    Validate(commands::validate::ValidateArgs),
    /// Make a file of requests from text lines, CSV or loose JSONL
    Prepare(commands::prepare::PrepareArgs),
    /// Run a file in one process without a server; resumable
    Run(commands::run::RunArgs),
    /// Run the server: API, worker and engine
    Serve(commands::serve::ServeArgs),
    /// Run a worker and its engine without the API
    Worker(commands::worker::WorkerArgs),
    /// List, pull and remove models
    Models(commands::models::ModelsArgs),
    /// List, upload and fetch files on the server
    Files(commands::files::FilesArgs),
    /// Show where each setting comes from; change one
    Config(commands::config::ConfigArgs),
    /// Migrate, check, back up or shrink the database
    Db(commands::db::DbArgs),
    /// Measure the durable path or the engine
    Bench(commands::bench::BenchArgs),
    /// Check this machine, one line per check
    Doctor(commands::doctor::DoctorArgs),
    /// Print what a bug report should say of this machine and this binary
    CollectEnv,
    /// Print a completion script
    Completions(commands::completions::CompletionsArgs),
    /// Write man pages
    Man(commands::man::ManArgs),
    /// Show the version
    Version,
}
