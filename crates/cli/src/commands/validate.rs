//! `batch validate`: every problem of a file of requests, without a server.

use std::ffi::OsString;

use clap::Args;
use overnight_types::Endpoint;
use serde_json::Value;

use crate::App;
use crate::commands::prepare::parse_endpoint;
use crate::error::{Exit, Failure, Result};
use crate::output::human;
use crate::validation::{self, Input};

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
    let input = Input::open(&args.file).await?;
    let endpoint = validation::endpoint(&input, args.endpoint)?;
    let shown = usize::try_from(args.max_errors).unwrap_or(usize::MAX).max(1);
    let kept = if app.ui.is_json() { 1_000 } else { shown };
    let report = validation::check(&input, endpoint, kept).await?;
    let record = validation::to_json(&report);
    if app.ui.is_json() {
        app.ui.data(&format!("{record}\n"))?;
        if report.is_valid() {
            return Ok(());
        }
        let total = record["errors"]["total"].as_u64().unwrap_or(0);
        return Err(Failure::new(Exit::InvalidInput, format!("{} problems in {}", human::count(total), input.label)));
    }
    if !report.is_valid() {
        return Err(validation::failure(&input, &report, shown));
    }
    let model = report.model.as_deref().map_or(Value::Null, Value::from);
    app.ui.data(&format!(
        "valid: {} requests for {endpoint}, model {}\n",
        human::count(report.requests),
        crate::output::escape(model.as_str().unwrap_or("–"))
    ))?;
    app.ui.say(format!("next: batch submit {} --watch", input.label));
    Ok(())
}
