//! Processes of this binary for measurements: servers and workers on one data folder,
//! database and object store, each killed when dropped.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use overnight_store::{FileQuery, JobQuery, Store};

use crate::client::Client;
use crate::config::{Loaded, Setting, path_text};
use crate::environment;
use crate::error::{Exit, Failure, Result};
use crate::host;
use crate::output::human;
use crate::service::database::{Database, Opening};

/// The model that a measurement's requests ask for.
const MODEL: &str = "instant";
/// Newest jobs of a database that are looked at before a measurement.
const JOBS_LOOKED_AT: u32 = 100;
/// A server that does not answer within this time never will.
const START_MAX: Duration = Duration::from_secs(30);

/// Where state and bytes are kept, and what every process is told.
#[derive(Debug, Clone)]
pub(super) struct Site {
    data_dir: PathBuf,
    database: Option<String>,
    /// `key=value` pairs for `--set`.
    settings: Vec<String>,
    /// Addresses, which may hold a password: every user of the machine can read a command line.
    environment: Vec<(&'static str, String)>,
}

impl Site {
    /// On a data folder of its own, with a database and an object store elsewhere when given.
    pub(super) fn new(data_dir: PathBuf, database: Option<&str>, objects: Option<&str>) -> Self {
        let settings = vec!["engine.kind=instant".to_owned(), "log.filter=warn".to_owned()];
        let urls = [("OVERNIGHT_DATABASE__URL", database), ("OVERNIGHT_OBJECTS__URL", objects)];
        let environment = urls.into_iter().filter_map(|(name, url)| Some((name, url?.to_owned()))).collect();
        Self { data_dir, database: database.map(str::to_owned), settings, environment }
    }

    /// Refuses a database with work of others: the engine of a measurement would answer it.
    pub(super) async fn require_no_others(&self) -> Result {
        let Some(url) = &self.database else { return Ok(()) };
        let settings = vec![Setting::flag("--database", "database.url", url.as_str())];
        let database = Database::of(&Loaded::from_settings(settings)?.config)?;
        if database.schema().await.map_err(|err| Failure::from_error(&format!("read {database}"), &err))?.found == 0 {
            return Ok(());
        }
        let store = database.open(Opening::Look).await?;
        let newest = JobQuery { limit: JOBS_LOOKED_AT, ..JobQuery::default() };
        let looked = async {
            Ok((
                store.list_jobs(newest).await?.rows,
                store.list_files(FileQuery { limit: 1, ..FileQuery::default() }).await?.rows,
            ))
        };
        let looked: std::result::Result<_, overnight_store::Error> = looked.await;
        store.close().await;
        let (jobs, files) = looked.map_err(|err| Failure::from_error(&format!("read {database}"), &err))?;
        let is_own = |job: &overnight_store::Job| job.model.as_deref() == Some(MODEL);
        if jobs.iter().all(is_own) && (files.is_empty() || !jobs.is_empty()) {
            return Ok(());
        }
        Err(Failure::usage(format!("{database} holds batches or files that are no measurement's"))
            .hint("give --database an empty one: the engine of a measurement would answer whatever waits there"))
    }

    /// The same with another setting.
    pub(super) fn with(mut self, setting: String) -> Self {
        self.settings.push(setting);
        self
    }

    /// The database, once a process of this site has made it.
    pub(super) async fn store(&self) -> Result<Arc<dyn Store>> {
        let mut settings = vec![Setting::flag("--dir", "data_dir", path_text(&self.data_dir)?)];
        settings.extend(self.database.as_deref().map(|url| Setting::flag("--database", "database.url", url)));
        // Of these alone, as the processes: neither a file nor a variable of a real installation.
        let config = Loaded::from_settings(settings)?.config;
        Database::of(&config)?.open(Opening::Look).await
    }

    fn spawn(&self, words: &[&str]) -> Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).arg("--data-dir").arg(&self.data_dir);
        // Only what is measured is configured, and no database of a real installation is met.
        command.args(["--config", "/dev/null"]).stdin(Stdio::null()).stdout(Stdio::null());
        for (name, _) in environment::with_prefix("OVERNIGHT_") {
            command.env_remove(name);
        }
        command.env_remove("DATABASE_URL").env_remove("RUST_LOG");
        command.envs(self.environment.iter().map(|(name, url)| (name, url)));
        for setting in &self.settings {
            command.args(["--set", setting]);
        }
        Ok(command.spawn()?)
    }
}

/// A process, killed when dropped.
#[derive(Debug)]
pub(super) struct Process(Child);

impl Process {
    /// A worker of its own.
    pub(super) fn worker(site: &Site) -> Result<Self> {
        site.spawn(&["worker"]).map(Self)
    }

    /// Its process id.
    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The most memory that it has had, bytes; `None` where the system does not say.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        host::peak_memory(self.0.id())
    }

    /// Ends it at once, as `kill -9` does.
    pub(super) fn kill(&mut self) -> Result {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that answers.
#[derive(Debug)]
pub(super) struct Server {
    process: Process,
    site: Site,
    words: Vec<&'static str>,
    port: u16,
    /// Its address.
    pub(super) url: String,
}

impl Server {
    /// Starts `batch serve`, with a worker of its own or without, and waits for its answer.
    pub(super) async fn start(site: &Site, has_worker: bool) -> Result<Self> {
        let mut words = vec!["serve"];
        if !has_worker {
            words.push("--no-worker");
        }
        let process = Self::spawn(site, &words, 0)?;
        let mut server = Self { process, site: site.clone(), words, port: 0, url: String::new() };
        server.wait_ready().await?;
        Ok(server)
    }

    fn spawn(site: &Site, words: &[&'static str], port: u16) -> Result<Process> {
        // The card of a dead process must not be taken for that of the new one.
        let _ = std::fs::remove_file(site.data_dir.join("server.json"));
        let port = port.to_string();
        site.spawn(&[words, &["--port", &port]].concat()).map(Process)
    }

    async fn wait_ready(&mut self) -> Result {
        let start = Instant::now();
        while start.elapsed() < START_MAX {
            if let Some(status) = self.process.0.try_wait()? {
                return Err(Failure::new(Exit::Failure, format!("the server ended at its start: {status}")));
            }
            if let Some(url) = host::live_server(&self.site.data_dir) {
                self.port = url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0);
                self.url = url;
                if self.client()?.get("/version", &[]).await.is_ok() {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Failure::new(Exit::TimedOut, format!("the server did not answer within {}", human::duration(START_MAX))))
    }

    /// A client of it.
    pub(super) fn client(&self) -> Result<Client> {
        Client::at(self.url.clone(), None)
    }

    /// Kills it as `kill -9` does.
    pub(super) fn kill(&mut self) -> Result {
        self.process.kill()
    }

    /// Starts it again under the same address.
    pub(super) async fn restart(&mut self) -> Result {
        self.process = Self::spawn(&self.site, &self.words, self.port)?;
        self.wait_ready().await
    }

    /// The most memory that it has had, bytes.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        self.process.peak_memory()
    }
}
