//! `batch completions`: a script for a shell, on stdout.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::App;
use crate::args::Cli;
use crate::error::Result;

/// Arguments of `batch completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell, for example: batch completions bash > /etc/bash_completion.d/batch
    shell: Shell,
}

pub(crate) fn run(args: CompletionsArgs, app: &App) -> Result {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "batch", &mut script);
    let record = serde_json::json!({"shell": args.shell.to_string(), "script": String::from_utf8_lossy(&script)});
    if app.ui.json_record(&record)? {
        return Ok(());
    }
    app.ui.bytes(&script)
}
