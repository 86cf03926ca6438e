//! Hugging Face: which files a repository has, and where each is. Plain HTTPS to the
//! documented routes; a library for it would bring its own cache layout and retries.

use serde::Deserialize;

use super::fetch::{self, Wanted};
use crate::environment;

/// Files beside weights that an engine reads.
const SMALL_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
    "chat_template.jinja",
];

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    oid: String,
}

/// The hub's address; `HF_ENDPOINT` names a mirror of it.
pub(super) fn endpoint() -> String {
    environment::text("HF_ENDPOINT")
        .map_or_else(|| "https://huggingface.co".to_owned(), |url| url.trim_end_matches('/').to_owned())
}

/// For gated repositories.
pub(super) fn token() -> Option<String> {
    environment::text("HF_TOKEN")
}

/// Where a file of a repository is.
pub(super) fn file_url(repo: &str, revision: &str, file: &str) -> String {
    format!("{}/{repo}/resolve/{revision}/{file}", endpoint())
}

/// Adds size and hash of the files that the repository lists, where they were unknown.
/// Without `wanted`, chooses what an engine needs.
pub(super) async fn list(
    http: &reqwest::Client,
    repo: &str,
    revision: &str,
    wanted: &[Wanted],
) -> Result<Vec<Wanted>, String> {
    let url = format!("{}/api/models/{repo}/tree/{revision}?recursive=true", endpoint());
    let mut request = http.get(&url);
    if let Some(token) = token() {
        request = request.bearer_auth(token);
    }
    let response = request.send().await.map_err(|err| fetch::words(&err))?;
    match response.status().as_u16() {
        200 => {}
        401 | 403 => return Err(format!("{repo} is gated or private; accept its terms there and set HF_TOKEN")),
        404 => return Err(format!("no such repository or revision: {repo} at {revision}")),
        status => return Err(format!("answered {status} for {url}")),
    }
    let entries: Vec<Entry> = response.json().await.map_err(|err| fetch::words(&err))?;
    let files: Vec<Wanted> = entries
        .into_iter()
        .filter(|entry| entry.kind == "file")
        .map(|entry| Wanted { name: entry.path, bytes: entry.size, sha256: entry.lfs.map(|lfs| lfs.oid) })
        .collect();
    if wanted.is_empty() {
        return choose(files);
    }
    wanted
        .iter()
        .map(|file| {
            let listed = files.iter().find(|listed| listed.name == file.name);
            let listed = listed.ok_or_else(|| format!("{repo} has no file {}", file.name))?;
            Ok(Wanted {
                name: file.name.clone(),
                bytes: file.bytes.or(listed.bytes),
                sha256: file.sha256.clone().or_else(|| listed.sha256.clone()),
            })
        })
        .collect()
}

/// Safetensors with what belongs to them, or the only GGUF file.
fn choose(files: Vec<Wanted>) -> Result<Vec<Wanted>, String> {
    let has = |extension: &str| files.iter().any(|file| file.name.ends_with(extension));
    if has(".safetensors") {
        return Ok(files
            .into_iter()
            .filter(|file| {
                let top = !file.name.contains('/');
                top && (file.name.ends_with(".safetensors") || SMALL_FILES.contains(&file.name.as_str()))
            })
            .collect());
    }
    let ggufs: Vec<&Wanted> = files.iter().filter(|file| file.name.ends_with(".gguf")).collect();
    match ggufs.as_slice() {
        [one] => Ok(vec![(*one).clone()]),
        [] if has(".bin") || has(".pth") => {
            Err("only pickle weights there, which are refused because loading them runs code from the file".to_owned())
        }
        [] => Err("neither safetensors nor GGUF files there".to_owned()),
        several => {
            let names: Vec<&str> = several.iter().take(8).map(|file| file.name.as_str()).collect();
            Err(format!("several GGUF files there; name one in [[models]]: {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<Wanted> {
        names.iter().map(|name| Wanted { name: (*name).to_owned(), ..Wanted::default() }).collect()
    }

    #[test]
    fn weights_are_chosen_with_what_belongs_to_them() {
        let chosen = choose(files(&[
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
        ]))
        .unwrap();
        let names: Vec<&str> = chosen.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(
            names,
            ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
        );
        assert!(choose(files(&["pytorch_model.bin"])).unwrap_err().contains("runs code"));
        assert!(choose(files(&["a.gguf", "b.gguf"])).unwrap_err().contains("a.gguf, b.gguf"));
        assert_eq!(choose(files(&["a.gguf"])).unwrap().len(), 1);
    }
}
