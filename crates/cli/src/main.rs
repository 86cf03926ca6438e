//! The one binary `batch`: reads the command line, runs one command, maps what it
//! ended with to an exit code. Holds no rules of its own; those of durable work are
//! in `worker`, those of the wire in `api`.
//!
//! Start with [`run`], one match over the commands; each lives in `commands/`.

mod args;
mod batches;
mod client;
mod commands;
mod config;
mod environment;
mod error;
mod host;
mod interrupts;
mod logging;
mod models;
mod output;
mod outputs;
mod progress;
mod remedy;
mod service;
mod state;
mod usage;
mod validation;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::{Cli, Command, Globals};
use crate::client::Client;
use crate::error::{Exit, Failure, Result};
use crate::interrupts::Interrupts;
use crate::output::Ui;

/// What every command gets.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) globals: Globals,
    pub(crate) ui: Ui,
    pub(crate) interrupts: Interrupts,
}

impl App {
    /// A client of the server that is meant.
    pub(crate) fn client(&self) -> Result<Client> {
        Client::new(&self.globals)
    }
}

/// How long an engine may take to end the step it is in.
const ENGINE_END: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    #[cfg(feature = "failpoints")]
    let _scenario = service::crash::arm();
    let words: Vec<std::ffi::OsString> = std::env::args_os().collect();
    if let Some(code) = usage::answer_help_topics(&words) {
        return code;
    }
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(err) => return usage::report(&err, &words),
    };
    let app = App { ui: Ui::new(&cli.globals), globals: cli.globals, interrupts: Interrupts::default() };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(err) => return ExitCode::from(finish(&app.ui, Err(err.into()))),
    };
    let ended = runtime.block_on(run_or_interrupted(cli.command, &app));
    // A read of stdin that never ends must not keep the process.
    runtime.shutdown_background();
    let has_ended = overnight_engine::shut_down_all(ENGINE_END);
    let code = finish(&app.ui, ended);
    if !has_ended {
        tracing::warn!("the engine did not end in time");
        // Unloading the driver under a thread that is inside it would crash, or wait for ever.
        overnight_engine::exit_at_once(code);
    }
    ExitCode::from(code)
}

/// A command that waits for Ctrl-C by itself says its own words first; whatever else is
/// under way by then (a download, say) ends here.
async fn run_or_interrupted(command: Command, app: &App) -> Result {
    tokio::select! {
        biased;
        ended = run(command, app) => ended,
        () = after_the_command(&app.interrupts) => Err(Failure::new(Exit::Interrupted, "interrupted")),
    }
}

/// Resolves at Ctrl-C, one look later than the command sees it: a signal that comes between
/// the looks of both must not take the command's own words from it.
async fn after_the_command(interrupts: &Interrupts) {
    interrupts.wait().await;
    tokio::task::yield_now().await;
}

async fn run(command: Command, app: &App) -> Result {
    match command {
        Command::Submit(args) => Box::pin(commands::submit::run(args, app)).await,
        Command::Status(args) => commands::status::run(args, app).await,
        Command::Resume(args) => commands::resume::run(args, app).await,
        Command::Results(args) => Box::pin(commands::results::run(args, app)).await,
        Command::List(args) => commands::list::run(args, app).await,
        Command::Show(args) => commands::show::run(args, app).await,
        Command::Errors(args) => commands::errors::run(args, app).await,
        Command::Logs(args) => commands::logs::run(args, app).await,
        Command::Pause(args) => commands::pause::run(args, app).await,
        Command::Cancel(args) => commands::cancel::run(args, app).await,
        Command::Retry(args) => commands::retry::run(args, app).await,
        Command::Validate(args) => commands::validate::run(args, app).await,
        Command::Prepare(args) => commands::prepare::run(args, app),
        Command::Run(args) => Box::pin(commands::run::run(args, app)).await,
        Command::Serve(args) => Box::pin(commands::serve::run(args, app)).await,
        Command::Worker(args) => Box::pin(commands::worker::run(args, app)).await,
        Command::Models(args) => commands::models::run(args, app).await,
        Command::Files(args) => commands::files::run(args, app).await,
        Command::Config(args) => commands::config::run(args, app),
        Command::Db(args) => commands::db::run(args, app).await,
        Command::Bench(args) => Box::pin(commands::bench::run(args, app)).await,
        Command::Doctor(args) => Box::pin(commands::doctor::run(args, app)).await,
        Command::CollectEnv => Box::pin(commands::collect_env::run(app)).await,
        Command::Completions(args) => commands::completions::run(args, app),
        Command::Man(args) => commands::man::run(args, app),
        Command::Version => commands::version::run(app),
    }
}

/// Says what went wrong, if anything did; the exit code.
fn finish(ui: &Ui, ended: Result) -> u8 {
    let failure = match ended {
        Ok(()) => return Exit::Success as u8,
        Err(failure) => failure,
    };
    if !failure.is_silent(ui.is_json()) {
        let text = if ui.is_json() { failure.to_json() + "\n" } else { failure.to_text(ui.color_err) };
        // With stderr closed there is nobody to tell; the exit code still says it.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    }
    failure.exit as u8
}
