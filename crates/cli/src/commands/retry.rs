//! `batch retry`: a selective resume.

use clap::Args;
use serde_json::{Value, json};

use crate::App;
use crate::batches;
use crate::client::{Client, ids, wait};
use crate::commands::errors;
use crate::error::{Exit, Failure, Result};
use crate::output::{human, plain};
use crate::progress::{Counts, short_id};
use crate::state;

/// Arguments of `batch retry`.
#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    /// A batch that has ended
    id: String,
    /// Requests that failed
    #[arg(long)]
    failed: bool,
    /// Requests that the window's end left undone
    #[arg(long)]
    expired: bool,
    /// These custom ids, comma-separated
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    ids: Vec<String>,
    /// Requests that ended with this code; may be given several times
    #[arg(long, value_name = "CODE")]
    error_code: Vec<String>,
    /// Leave the old batch alone and make a new one from those lines
    #[arg(long)]
    new_batch: bool,
    /// The new window, for example 24h
    #[arg(long, value_name = "DURATION", value_parser = super::submit::window)]
    window: Option<String>,
    /// Only say what would run
    #[arg(short = 'n', long)]
    dry_run: bool,
}

pub(crate) async fn run(args: RetryArgs, app: &App) -> Result {
    let nothing_chosen = !args.failed && !args.expired && args.ids.is_empty() && args.error_code.is_empty();
    if nothing_chosen {
        return Err(Failure::usage("say which requests run again")
            .hint("--failed, --expired, --ids A,B or --error-code CODE; `batch errors ID` lists the codes"));
    }
    let client = app.client()?;
    let id = ids::resolve(&client, &args.id).await?;
    let before = client.get(&format!("/v1/batches/{id}"), &[]).await?;
    if !wait::is_terminal(&Counts::of(&before).status) {
        return Err(Failure::new(Exit::Failure, format!("{} has not ended yet", short_id(&id)))
            .code("batch_busy")
            .hint(format!("batch status {} --wait, then retry", wait::lookup_id(&id))));
    }
    let mut outcomes = Vec::new();
    if args.failed {
        outcomes.push("errored");
    }
    if args.expired {
        outcomes.push("expired");
    }
    let mut body = json!({
        "outcomes": outcomes, "error_codes": args.error_code, "custom_ids": args.ids, "new_batch": args.new_batch,
    });
    let path = format!("/v1/batches/{id}/retry");
    let mut question = body.clone();
    question["dry_run"] = Value::Bool(true);
    // The server chooses, so only it can say how many; it also names an id that it does not know.
    let plan = match client.post(&path, &question, None).await {
        Ok(plan) => plan,
        Err(failure) => return Err(explained(failure, &args, &id, &client).await),
    };
    let num = human::count(plan["will_run"].as_u64().unwrap_or(0));
    if args.dry_run {
        app.ui.summary(format!("{num} would run: {}; nothing was changed", chosen(&args)));
        let mut record = before.clone();
        record["will_run"] = plan["will_run"].clone();
        return app.ui.record(&record, batches::COLUMNS, || batches::card(&before));
    }
    if let Some(window) = &args.window {
        body["completion_window"] = Value::from(window.as_str());
    }
    let batch = client.post(&path, &body, None).await?;
    let new_id = plain(&batch["id"]);
    if new_id != id {
        state::remember(client.base(), &new_id);
    }
    app.ui.summary(format!("{num} will run: {}", chosen(&args)));
    app.ui.record(&batch, batches::COLUMNS, || batches::card(&batch))?;
    app.ui.say(format!("next: batch status {} --watch", wait::lookup_id(&new_id)));
    Ok(())
}

/// A custom id or a code that the batch does not have is a thing not found; the codes that
/// there are help more than the news that this one is not.
async fn explained(failure: Failure, args: &RetryArgs, id: &str, client: &Client) -> Failure {
    if failure.has_code("not_found") {
        return failure.exit(Exit::NotFound);
    }
    if !failure.has_code("nothing_to_resume") || args.error_code.is_empty() {
        return failure;
    }
    let Ok(groups) = errors::groups(client, id).await else { return failure };
    let codes: Vec<&str> = groups.keys().map(String::as_str).take(20).collect();
    let hint = match codes.is_empty() {
        true => "every request of it succeeded".to_owned(),
        false => format!("its codes: {}", codes.join(", ")),
    };
    failure.exit(Exit::NotFound).hint(hint)
}

/// The choice in words: requests that meet every condition.
fn chosen(args: &RetryArgs) -> String {
    let outcome = match (args.failed, args.expired) {
        (true, true) => "failed or expired",
        (true, false) => "failed",
        (false, true) => "expired",
        (false, false) => "did not complete",
    };
    let mut text = format!("requests that {outcome}");
    if !args.error_code.is_empty() {
        text.push_str(&format!(" and ended with {}", args.error_code.join(" or ")));
    }
    if !args.ids.is_empty() {
        text.push_str(&format!(" and are among the {} named", human::count(args.ids.len() as u64)));
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn several_conditions_are_told_as_and() {
        let words = ["batch", "retry", "last", "--failed", "--error-code", "too_odd", "--ids", "a,b"];
        let Command::Retry(args) = Cli::parse_from(words).command else { panic!("retry is retry") };
        assert_eq!(chosen(&args), "requests that failed and ended with too_odd and are among the 2 named");
    }
}
