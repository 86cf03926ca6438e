//! What this machine remembers between commands: the batches it made, newest last,
//! so that `last` and `@{1}` mean something. Losing the file loses only that.

use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::environment;

/// How many batches are remembered.
const KEPT: usize = 200;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Made {
    server: String,
    id: String,
}

/// Remembers a batch made at `server`. Trouble here never fails a command.
pub(crate) fn remember(server: &str, id: &str) {
    let Some(path) = path() else { return };
    let mut made = read();
    made.push(Made { server: server.to_owned(), id: id.to_owned() });
    let from = made.len().saturating_sub(KEPT);
    let text: String =
        made[from..].iter().filter_map(|made| serde_json::to_string(made).ok()).map(|line| line + "\n").collect();
    let write = || -> std::io::Result<()> {
        let folder = path.parent().expect("the path has a file name");
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.persist(&path).map_err(|err| err.error)?;
        Ok(())
    };
    if let Err(err) = write() {
        tracing::debug!("could not remember the batch in {}: {err}", path.display());
    }
}

/// The batches made at `server`, newest first.
pub(crate) fn all_of(server: &str) -> Vec<String> {
    read().into_iter().rev().filter(|made| made.server == server).map(|made| made.id).collect()
}

/// The batch made `back` batches ago at any server, for what is asked of none; 0 is the newest.
pub(crate) fn recall_any(back: usize) -> Option<String> {
    read().into_iter().rev().nth(back).map(|made| made.id)
}

fn read() -> Vec<Made> {
    let text = path().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn path() -> Option<PathBuf> {
    Some(environment::xdg("XDG_STATE_HOME", ".local/state")?.join("overnight").join("batches.jsonl"))
}
