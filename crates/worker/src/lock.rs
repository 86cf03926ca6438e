//! Locks in the data folder: who uses it, and which workers of this host live.
//!
//! `overnight.lock` is held shared by `serve` and `worker` and exclusively by
//! `run`. Each worker holds `workers/{worker_id}` for as long as it lives; the
//! system drops the lock of a process that dies, so a free lock is the proof that
//! its worker is dead, and whoever starts next releases its leases at once.
//!
//! On a folder that several machines share, a file system that keeps locks to itself
//! shows another machine's as free. So each file names its machine, and only those of
//! this one are judged; the leases of others run out.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use overnight_store::Store;
use overnight_types::WorkerId;

use crate::Error;

const LOCK_FILE: &str = "overnight.lock";
const WORKERS: &str = "workers";

/// How a process wants the data folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataDirUse {
    /// Along with other servers and workers.
    Shared,
    /// Alone.
    Exclusive,
}

/// The data folder, held for as long as this lives.
#[derive(Debug)]
pub struct DataDirLock {
    _file: File,
}

impl DataDirLock {
    /// Takes the folder, which is made when it is not there.
    ///
    /// Errors with [`Error::DataDirInUse`] when another process holds it in a way
    /// that does not go together with `usage`, and with [`Error::DataDir`] when the
    /// folder or the file cannot be made.
    pub fn take(data_dir: &Path, usage: DataDirUse) -> Result<Self, Error> {
        fs::create_dir_all(data_dir).map_err(io("create", data_dir))?;
        let path = data_dir.join(LOCK_FILE);
        let file = open(&path)?;
        let taken = match usage {
            DataDirUse::Shared => file.try_lock_shared(),
            DataDirUse::Exclusive => file.try_lock(),
        };
        match taken {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::Error(source)) => Err(Error::DataDir { doing: "lock", path, source }),
            Err(TryLockError::WouldBlock) => {
                let what = match usage {
                    DataDirUse::Shared => "a `batch run` holds it alone; wait for its end or use another --data-dir",
                    DataDirUse::Exclusive => {
                        "a server or another run holds it; use `batch submit` with that server, or another --data-dir"
                    }
                };
                Err(Error::DataDirInUse { path: data_dir.to_owned(), what: what.to_owned() })
            }
        }
    }
}

/// This worker's sign of life, held for as long as this lives.
#[derive(Debug)]
pub struct WorkerLock {
    path: PathBuf,
    _file: File,
}

impl WorkerLock {
    /// Creates and locks `workers/{id}`.
    pub fn take(data_dir: &Path, id: WorkerId) -> Result<Self, Error> {
        let folder = data_dir.join(WORKERS);
        fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        let path = folder.join(id.to_string());
        // Locked before it has its name: a start that looks at the same moment would
        // otherwise lock it first, and take this worker for one that died.
        let unnamed = folder.join(format!("{id}.new"));
        let file = open(&unnamed)?;
        file.try_lock().map_err(|err| Error::DataDir { doing: "lock", path: unnamed.clone(), source: err.into() })?;
        fs::write(&unnamed, Machine::here().to_string()).map_err(io("write", &unnamed))?;
        fs::rename(&unnamed, &path).map_err(io("name", &unnamed))?;
        Ok(Self { path, _file: file })
    }
}

impl Drop for WorkerLock {
    fn drop(&mut self) {
        // A file that stays is found unlocked by the next start, which removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// What a lock file says of its machine. Containers of one machine share its boot, and
/// its locks; a machine that was started anew has its name still.
#[derive(Debug, PartialEq, Eq)]
struct Machine {
    boot: String,
    name: String,
}

impl Machine {
    fn here() -> Self {
        let read =
            |name| fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).unwrap_or_default().trim().to_owned();
        Self { boot: read("random/boot_id"), name: read("hostname") }
    }

    /// From a lock file's text; `None` in one of a release that wrote none.
    fn read(text: &str) -> Option<Self> {
        let (boot, name) = text.split_once('\n')?;
        Some(Self { boot: boot.to_owned(), name: name.trim().to_owned() })
    }

    fn is_same(&self, other: &Self) -> bool {
        (!self.boot.is_empty() && self.boot == other.boot) || self.name == other.name
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}\n{}", self.boot, self.name)
    }
}

/// Workers of this data folder and machine whose lock is free: they are dead.
pub fn dead_workers(data_dir: &Path) -> Result<Vec<WorkerId>, Error> {
    let folder = data_dir.join(WORKERS);
    if !folder.try_exists().map_err(io("read", &folder))? {
        return Ok(Vec::new());
    }
    let (mut dead, here) = (Vec::new(), Machine::here());
    for entry in fs::read_dir(&folder).map_err(io("read", &folder))? {
        let entry = entry.map_err(io("read", &folder))?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<WorkerId>().ok()) else { continue };
        // A file that vanishes here belongs to a worker that stopped in order.
        let Ok(file) = File::open(entry.path()) else { continue };
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        if Machine::read(&text).is_none_or(|machine| machine.is_same(&here)) && file.try_lock().is_ok() {
            dead.push(id);
        }
    }
    Ok(dead)
}

/// Releases at once the leases of dead workers on this host, so that a restart
/// waits for no lease to run out. Returns how many leases came free.
///
/// A worker is known to be dead when its lock file is there and free. One that is
/// recorded on this host but has no lock file here may live in another data folder,
/// so its leases are left to run out.
pub async fn release_dead(store: &dyn Store, data_dir: &Path, host: &str) -> Result<u32, Error> {
    let dead = dead_workers(data_dir)?;
    if dead.is_empty() {
        return Ok(0);
    }
    let recorded = store.list_workers_on_host(host).await.map_err(Error::store("list the workers of this host"))?;
    let released = store.release_leases_of_dead(&dead).await.map_err(Error::store("release leases of dead workers"))?;
    for id in &dead {
        if recorded.iter().any(|worker| worker.id == *id) {
            store.remove_worker(*id).await.map_err(Error::store("remove a dead worker"))?;
        }
        let _ = fs::remove_file(data_dir.join(WORKERS).join(id.to_string()));
    }
    if released > 0 {
        tracing::info!(
            leases = released,
            workers = dead.len(),
            "released the leases of workers that died on this host"
        );
    }
    Ok(released)
}

fn open(path: &Path) -> Result<File, Error> {
    OpenOptions::new().create(true).truncate(false).write(true).read(true).open(path).map_err(io("open", path))
}

fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::DataDir { doing, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_takes_the_folder_alone_and_servers_share_it() {
        let dir = tempfile::tempdir().unwrap();
        let server = DataDirLock::take(dir.path(), DataDirUse::Shared).unwrap();
        let worker = DataDirLock::take(dir.path(), DataDirUse::Shared).unwrap();
        let err = DataDirLock::take(dir.path(), DataDirUse::Exclusive).unwrap_err();
        assert!(err.to_string().contains("batch submit") && err.to_string().contains("--data-dir"), "{err}");
        drop((server, worker));
        let _run = DataDirLock::take(dir.path(), DataDirUse::Exclusive).unwrap();
        assert!(DataDirLock::take(dir.path(), DataDirUse::Shared).is_err());
    }

    /// A lock that is free here may be held on the machine that its file names.
    #[test]
    fn worker_of_another_machine_is_not_taken_for_dead() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(WORKERS);
        fs::create_dir_all(&folder).unwrap();
        let here = Machine::here();
        let other = "0b0c\nanother-machine\n".to_owned();
        let rebooted = format!("0b0c\n{}\n", here.name);
        let container = format!("{}\nanother-name\n", here.boot);
        let mut wanted = Vec::new();
        for (text, is_judged) in [(other, false), (rebooted, true), (container, true), (String::new(), true)] {
            let id = WorkerId::new();
            fs::write(folder.join(id.to_string()), text).unwrap();
            wanted.extend(is_judged.then_some(id));
        }
        let mut dead = dead_workers(dir.path()).unwrap();
        dead.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(dead, wanted);
        let lock = WorkerLock::take(dir.path(), WorkerId::new()).unwrap();
        let text = fs::read_to_string(&lock.path).unwrap();
        assert_eq!(Machine::read(&text), Some(here));
    }

    // Servers that start at once, as after a reboot: one looks at the other's file in the
    // moment between its making and its lock.
    #[test]
    fn start_that_looks_at_another_start_neither_fails_it_nor_takes_it_for_dead() {
        let dir = tempfile::tempdir().unwrap();
        let id = WorkerId::new();
        fs::create_dir_all(dir.path().join(WORKERS)).unwrap();
        let looked_at = open(&dir.path().join(WORKERS).join(id.to_string())).unwrap();
        looked_at.try_lock().unwrap();
        let _lock = WorkerLock::take(dir.path(), id).unwrap();
        drop(looked_at);
        assert_eq!(dead_workers(dir.path()).unwrap(), []);
        assert_eq!(fs::read_dir(dir.path().join(WORKERS)).unwrap().count(), 1, "no file but its own");
    }

    #[test]
    fn only_a_worker_without_its_lock_counts_as_dead() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(dead_workers(dir.path()).unwrap(), []);
        let (live, dead) = (WorkerId::new(), WorkerId::new());
        let lock = WorkerLock::take(dir.path(), live).unwrap();
        fs::write(dir.path().join(WORKERS).join(dead.to_string()), b"").unwrap();
        fs::write(dir.path().join(WORKERS).join("README"), b"").unwrap();
        assert_eq!(dead_workers(dir.path()).unwrap(), [dead]);
        drop(lock);
        assert_eq!(dead_workers(dir.path()).unwrap(), [dead], "a worker that stopped in order leaves no file");
    }
}
