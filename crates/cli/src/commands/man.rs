//! `batch man`: one page per command.

use std::path::PathBuf;

use clap::{Args, CommandFactory};

use crate::App;
use crate::args::Cli;
use crate::error::Result;

/// Arguments of `batch man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write batch.1, batch-submit.1 … to; made when missing
    dir: PathBuf,
}

pub(crate) fn run(args: ManArgs, app: &App) -> Result {
    std::fs::create_dir_all(&args.dir)?;
    clap_mangen::generate_to(Cli::command(), &args.dir)?;
    app.ui.say(format!(
        "man pages are in {}; read one with `man -l {}/batch.1`",
        args.dir.display(),
        args.dir.display()
    ));
    app.ui.json_record(&serde_json::json!({"folder": args.dir.display().to_string()})).map(drop)
}
