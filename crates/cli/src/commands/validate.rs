//! `batch validate`: every problem of a file of requests, without a server.

use std::ffi::OsString;

use clap::Args;
use overnight_types::Endpoint;

use crate::App;
use crate::commands::prepare::parse_endpoint;
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::validation::{self, Bodies, Door, Input};

/// Arguments of `batch validate`.
#[derive(Debug, Args)]
pub(crate) struct ValidateArgs {
    /// A file of requests; - is stdin
    file: OsString,
    /// What the lines must be for [default: the url of the first line]
    #[arg(long, value_parser = parse_endpoint)]
    endpoint: Option<Endpoint>,
    /// Most problems to show
    #[arg(long, default_value = "20", value_parser = human::parse_count)]
    max_errors: u64,
}

pub(crate) async fn run(args: ValidateArgs, app: &App) -> Result {
    let bodies = Bodies::of(&Loaded::read(&app.globals, Vec::new())?.config);
    let input = Input::open(&args.file).await?;
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let shown = usize::try_from(args.max_errors).unwrap_or(usize::MAX).max(1);
    let kept = if app.ui.is_json() { 1_000 } else { shown };
    let report = validation::check(&input, endpoint, kept, bodies).await?;
    if app.ui.is_json() {
        app.ui.data(&format!("{}\n", report.to_json(Some(bodies.unchecked()))))?;
        if report.is_clean() {
            return Ok(());
        }
        let total = human::counted(report.findings.total + report.num_body_findings, "problem");
        return Err(Failure::new(Exit::InvalidInput, format!("{total} in {}", input.label)));
    }
    if !report.is_clean() {
        return Err(validation::failure(&input, &report, shown, Door::Validate));
    }
    app.ui.data(&format!(
        "valid: {} for {endpoint}, model {}\n",
        human::counted(report.requests, "request"),
        crate::output::escape(report.model.as_deref().unwrap_or("–"))
    ))?;
    app.ui.say(format!("not checked: {}", bodies.unchecked()));
    if !input.is_stdin() {
        app.ui.say(format!("next: batch submit {} --watch", input.label));
    }
    Ok(())
}
