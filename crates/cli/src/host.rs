//! This machine and this process: the server's card in the data folder, the host's
//! name, memory and disk.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What a running server writes into its data folder, so that commands started
/// there find it.
#[derive(Debug, Serialize, Deserialize)]
struct ServerCard {
    pid: i32,
    url: String,
}

/// Keeps the card while the server runs.
#[derive(Debug)]
pub(crate) struct ServerCardGuard {
    path: PathBuf,
}

fn card_path(data_dir: &Path) -> PathBuf {
    data_dir.join("server.json")
}

/// Writes the card; it goes when the guard does.
pub(crate) fn announce(data_dir: &Path, url: &str) -> std::io::Result<ServerCardGuard> {
    let path = card_path(data_dir);
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let card = serde_json::to_string(&ServerCard { pid, url: url.to_owned() })?;
    let fresh = path.with_extension(format!("{pid}.new"));
    std::fs::write(&fresh, card)?;
    std::fs::rename(&fresh, &path)?;
    Ok(ServerCardGuard { path })
}

impl Drop for ServerCardGuard {
    fn drop(&mut self) {
        // Only our own: another server of the same folder may have written it since.
        let ours = read_card(&self.path).is_some_and(|card| card.pid == i32::try_from(std::process::id()).unwrap_or(0));
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn read_card(path: &Path) -> Option<ServerCard> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// The address of a server that runs on this data folder.
pub(crate) fn live_server(data_dir: &Path) -> Option<String> {
    let card = read_card(&card_path(data_dir))?;
    let pid = rustix::process::Pid::from_raw(card.pid)?;
    rustix::process::test_kill_process(pid).is_ok().then_some(card.url)
}

/// The machine's name.
pub(crate) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Most memory that a process had at once, bytes; Linux only.
pub(crate) fn peak_memory(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes free for this user where `path` (or its nearest parent that exists) lies.
pub(crate) fn free_disk(path: &Path) -> Result<u64, String> {
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
    let stat =
        rustix::fs::statvfs(there).map_err(|err| format!("could not ask {} for its room: {err}", there.display()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_found_by_its_card_and_forgotten_at_its_end() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(live_server(folder.path()), None);
        let guard = announce(folder.path(), "http://127.0.0.1:1").unwrap();
        assert_eq!(live_server(folder.path()).as_deref(), Some("http://127.0.0.1:1"));
        drop(guard);
        assert_eq!(live_server(folder.path()), None);
    }

    #[test]
    fn card_of_a_dead_server_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(card_path(folder.path()), r#"{"pid": 2147483646, "url": "http://x"}"#).unwrap();
        assert_eq!(live_server(folder.path()), None);
    }
}
