//! `batch files`: what is stored on the server.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use overnight_types::Timestamp;
use serde_json::Value;

use crate::client::download::{self, Target};
use crate::error::{Exit, Failure, Result};
use crate::output::table::Column;
use crate::output::{Field, human, plain};
use crate::{App, outputs};

/// Arguments of `batch files`.
#[derive(Debug, Args)]
pub(crate) struct FilesArgs {
    #[command(subcommand)]
    command: FilesCommand,
}

#[derive(Debug, Subcommand)]
enum FilesCommand {
    /// List files, newest first
    List {
        /// Only this purpose, for example batch or batch_output
        #[arg(long)]
        purpose: Option<String>,
        /// Most files to show
        #[arg(long, default_value = "100", value_parser = human::parse_count)]
        limit: u64,
    },
    /// Upload a file
    Upload {
        /// The file
        path: PathBuf,
        /// What it is for
        #[arg(long, default_value = "batch")]
        purpose: String,
    },
    /// Download a file
    Get {
        /// Its id, file-…
        id: String,
        /// Where to; - is stdout
        #[arg(short = 'o', long = "output-file", value_name = "PATH", default_value = "-")]
        output_file: PathBuf,
        /// Go on with an interrupted download
        #[arg(long)]
        resume: bool,
    },
    /// Delete a file; what a batch needs stays until that batch has ended
    Rm {
        /// Its id, file-…
        id: String,
    },
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("FILE"), cell: |file, _| plain(&file["id"]) },
    Field {
        column: Column::right("SIZE"),
        cell: |file, people| match file["bytes"].as_u64() {
            Some(bytes) if people => human::bytes(bytes),
            _ => plain(&file["bytes"]),
        },
    },
    Field { column: Column::shrink("PURPOSE"), cell: |file, _| plain(&file["purpose"]) },
    Field {
        column: Column::left("CREATED"),
        cell: |file, people| match file["created_at"].as_i64() {
            Some(at) if people => human::relative(at, Timestamp::now()),
            Some(at) => human::absolute(at),
            None => String::new(),
        },
    },
    Field { column: Column::shrink("NAME"), cell: |file, _| plain(&file["filename"]) },
];

pub(crate) async fn run(args: FilesArgs, app: &App) -> Result {
    let client = app.client()?;
    match args.command {
        FilesCommand::List { purpose, limit } => {
            if !(1..=10_000).contains(&limit) {
                return Err(Failure::usage(format!("--limit must be within 1…10,000: {limit}")));
            }
            let mut query = vec![("limit", limit.to_string())];
            query.extend(purpose.map(|purpose| ("purpose", purpose)));
            let page = client.get("/v1/files", &query).await?;
            let files = page["data"].as_array().cloned().unwrap_or_default();
            app.ui.rows(&files, COLUMNS)?;
            if page["has_more"] == Value::Bool(true) {
                app.ui.say("there are more; raise --limit");
            }
            Ok(())
        }
        FilesCommand::Upload { path, purpose } => {
            let file = client.upload(&path, &file_name(&path), &purpose).await?;
            show_one(&file, app)
        }
        FilesCommand::Get { id, output_file, resume } => {
            outputs::check(&[&output_file], &[])?;
            let object = client.get(&format!("/v1/files/{}", checked(&id)?), &[]).await?;
            let target = Target::new(&output_file, resume)?;
            if app.ui.is_json() && target.is_stdout() {
                return Err(Failure::usage("--json and the bytes of a file do not share stdout").hint("add -o PATH"));
            }
            download::file(&client, &app.ui, &object, target).await?;
            let mut record = object;
            record["output"] = Value::from(output_file.to_string_lossy());
            app.ui.json_record(&record).map(drop)
        }
        FilesCommand::Rm { id } => {
            let id = checked(&id)?;
            // What is not there needs no question.
            client.get(&format!("/v1/files/{id}"), &[]).await?;
            app.ui.confirm(&format!("delete {id}"))?;
            let gone = client.delete(&format!("/v1/files/{id}")).await?;
            if app.ui.is_json() {
                return app.ui.data(&format!("{gone}\n"));
            }
            app.ui.say(format!("deleted {id}"));
            Ok(())
        }
    }
}

fn show_one(file: &Value, app: &App) -> Result {
    if app.ui.format.is_none() && app.ui.fields.is_none() {
        return app.ui.data(&format!("{}\n", plain(&file["id"])));
    }
    app.ui.record(file, COLUMNS, || format!("{}\n", plain(&file["id"])))
}

/// An id that may stand in a path of the API.
fn checked(id: &str) -> Result<&str> {
    if id.starts_with("file-") && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Ok(id);
    }
    Err(Failure::new(Exit::Usage, format!("not an id of a file: {id}")).hint("`batch files list` shows them"))
}

/// The last component, for the server; made UTF-8.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "upload.jsonl".to_owned(), |name| name.to_string_lossy().into_owned())
}
