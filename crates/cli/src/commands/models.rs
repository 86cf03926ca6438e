//! `batch models`: what is known, what is here, fetching and removing.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::App;
use crate::config::Loaded;
use crate::error::{Exit, Failure, Result};
use crate::models::{self, pull};
use crate::output::table::Column;
use crate::output::{Field, human, plain};

/// Arguments of `batch models`.
#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    #[command(subcommand)]
    command: ModelsCommand,
}

#[derive(Debug, Subcommand)]
enum ModelsCommand {
    /// Models that have a name here, and which of them are pulled
    List,
    /// Fetch a model: a name of the list, or OWNER/NAME of Hugging Face
    Pull {
        /// Its name
        name: String,
    },
    /// Where a model is, its files and terms
    Show {
        /// Its name
        name: String,
    },
    /// Remove a pulled model
    Rm {
        /// Its name
        name: String,
    },
}

const COLUMNS: &[Field] = &[
    Field { column: Column::left("MODEL"), cell: |model, _| plain(&model["id"]) },
    Field {
        column: Column::left("STATE"),
        cell: |model, people| match (model["state"].as_str().unwrap_or_default(), people) {
            ("pulled", true) => "✓ pulled".to_owned(),
            ("configured", true) => "✓ configured".to_owned(),
            (state, true) => format!("○ {state}"),
            (state, false) => state.to_owned(),
        },
    },
    Field {
        column: Column::right("SIZE"),
        cell: |model, people| match model["bytes"].as_u64() {
            Some(bytes) if people => human::bytes(bytes),
            Some(bytes) => bytes.to_string(),
            None => String::new(),
        },
    },
    Field { column: Column::shrink("ABOUT"), cell: |model, _| plain(&model["about"]) },
];

pub(crate) async fn run(args: ModelsArgs, app: &App) -> Result {
    let loaded = Loaded::read(&app.globals, Vec::new())?;
    let config = &loaded.config;
    match args.command {
        ModelsCommand::List => app.ui.rows(&known(config), COLUMNS),
        ModelsCommand::Show { name } => {
            let model =
                known(config).into_iter().find(|model| model["id"] == name.as_str()).ok_or_else(|| not_known(&name))?;
            app.ui.card(&model, COLUMNS, || {
                ["id", "state", "path", "source", "about", "licence"]
                    .iter()
                    .filter(|key| !model[**key].is_null())
                    .map(|key| format!("{key:<8} {}\n", crate::output::escape(&plain(&model[*key]))))
                    .collect()
            })
        }
        ModelsCommand::Pull { name } => {
            app.interrupts.listen()?;
            let (model, was_here) = tokio::select! {
                pulled = pull::pull(config, &app.ui, &name) => pulled?,
                () = app.interrupts.wait() => {
                    let text = "stopped; the same command goes on where it was";
                    app.ui.summary(text);
                    return Err(Failure::shown(Exit::Interrupted, text));
                }
            };
            let path = models::find(config, &name)?.path;
            app.ui.summary(if was_here {
                format!("{name} is here already")
            } else {
                let bytes: u64 = model.files.iter().filter_map(|file| file.bytes).sum();
                format!("{name}: {} from {}, hashes compared", human::bytes(bytes), model.source)
            });
            if app.ui.format.is_none() && app.ui.fields.is_none() {
                app.ui.data(&format!("{}\n", path.display()))?;
            } else {
                let record = json!({"id": name, "state": "pulled", "path": path.display().to_string(),
                    "source": model.source, "files": model.files});
                app.ui.record(&record, COLUMNS, String::new)?;
            }
            app.ui.say(match models::not_served(&path) {
                Some(why) => format!("the engine here cannot serve it: {why}"),
                None => {
                    format!("next: batch serve --model {name}   or   batch run IN.jsonl -o OUT.jsonl --model {name}")
                }
            });
            Ok(())
        }
        ModelsCommand::Rm { name } => {
            if models::pulled(config, &name).is_none() {
                return Err(not_known(&name));
            }
            let folder = models::folder(config, &name);
            app.ui.confirm(&format!("remove {}", folder.display()))?;
            std::fs::remove_dir_all(&folder)?;
            app.ui.say(format!("removed {name}"));
            let record = json!({"id": name, "state": "removed", "path": folder.display().to_string()});
            app.ui.json_record(&record).map(drop)
        }
    }
}

fn not_known(name: &str) -> Failure {
    Failure::new(Exit::NotFound, format!("no such model here: {name}")).hint("`batch models list` shows them")
}

fn known(config: &crate::config::Config) -> Vec<Value> {
    let mut rows: Vec<Value> = Vec::new();
    for entry in models::entries(config) {
        let here = models::pulled(config, &entry.name);
        let state = match (&entry.path, &here) {
            (Some(_), _) => "configured",
            (None, Some(_)) => "pulled",
            (None, None) => "not pulled",
        };
        let path = entry.path.clone().or_else(|| here.as_ref().map(|_| models::folder(config, &entry.name)));
        let bytes: u64 = entry.files.iter().filter_map(|file| file.bytes).sum();
        rows.push(
            json!({"id": entry.name, "state": state, "bytes": (bytes > 0).then_some(bytes), "about": entry.about,
            "licence": entry.licence, "path": path.map(|path| path.display().to_string()),
            "source": here.map(|here| here.source)}),
        );
    }
    for model in models::all_pulled(config) {
        if rows.iter().all(|row| row["id"] != model.name.as_str()) {
            let bytes: u64 = model.files.iter().filter_map(|file| file.bytes).sum();
            let path = models::folder(config, &model.name).display().to_string();
            rows.push(json!({"id": model.name, "state": "pulled", "bytes": bytes, "about": null, "licence": null,
                "path": path, "source": model.source}));
        }
    }
    rows
}
