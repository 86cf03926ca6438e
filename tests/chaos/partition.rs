//! A worker's host is cut off, first from the database, then from the object store, and
//! healed. Packets are dropped, so nobody is told.
//!
//! Goal: the cut worker drops its shards by its own clock, another takes them over once
//! the lease is out, it comes back by itself, and the files are those of an undisturbed
//! run. Method: hosts in network namespaces; the servers stay on this machine.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use overnight_testing::objects::BUCKET;
use overnight_testing::postgres::{Database, Server};
use overnight_testing::process::free_port;
use overnight_testing::{Process, S3Server, TcpProxy};

use super::checks::{self, Whole};
use super::engine::Engine;
use super::network::Network;
use super::users::{Ended, Users};
use super::world::SETTINGS;
use crate::harness::{batch_binary, missing};
use crate::kill::input;

const NETS: [&str; 3] = ["db", "obj", "llm"];
/// As in the settings of the processes.
const LEASE: Duration = Duration::from_millis(1_500);
const PATIENCE: Duration = Duration::from_secs(60);

/// Servers here, and processes on hosts of their own.
struct Hosts {
    network: Network,
    database: Database,
    /// Ended with this.
    _server: Server,
    objects: S3Server,
    database_door: TcpProxy,
    object_store: TcpProxy,
    engine: TcpProxy,
    folder: tempfile::TempDir,
}

impl Hosts {
    async fn start() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let server = Server::start()?;
        let objects = S3Server::start(&folder.path().join("objects")).map_err(|why| missing("s3", &why)).ok()?;
        let network = Network::new(&["api", "w1", "w2"], &NETS);
        let network = network.map_err(|why| missing("netns", &format!("network namespaces (root, iproute2): {why}")));
        let network = network.ok()?;
        let llm = Engine::start(Duration::from_millis(200)).await;
        let llm: SocketAddr = llm.url.trim_start_matches("http://").parse().expect("an address");
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let proxy = async |net, target| TcpProxy::start_on(network.here(net), target).await.expect("a proxy starts");
        let database_door = proxy("db", server.address()).await;
        let object_store = proxy("obj", loopback(objects.port())).await;
        let engine = proxy("llm", llm).await;
        Some(Self {
            network,
            database: server.database(),
            _server: server,
            objects,
            database_door,
            object_store,
            engine,
            folder,
        })
    }

    fn spawn(&self, host: &str, arguments: &[&str]) -> Process {
        let mut command: Command = self.network.on_host(host);
        command.arg(batch_binary()).arg("--data-dir").arg(self.folder.path().join(host)).args(arguments);
        command.args(["--set", "engine.kind=openai", "--set"]);
        command.arg(format!("engine.base_urls=[\"http://{}\"]", self.engine.address()));
        command.envs(SETTINGS.iter().copied());
        command.env("OVERNIGHT_DATABASE__URL", self.database.url_by(self.database_door.address()));
        command.env("OVERNIGHT_OBJECTS__URL", format!("s3://{BUCKET}"));
        let address = self.object_store.address();
        command.envs(S3Server::environment_by(&address.ip().to_string(), address.port()));
        Process::spawn(host, command, &self.folder.path().join(format!("{host}.log"))).expect("batch starts")
    }

    /// Shards that a process holds by the database's word.
    fn num_held(&self, process: &Process) -> u64 {
        let statement = format!(
            "select count(*) from shards s join workers w on w.worker_id = s.owner
            where s.state = 'leased' and w.pid = {}",
            process.pid()
        );
        tokio::task::block_in_place(|| self.database.sql(&statement)).parse().expect("a count")
    }

    fn num_done(&self) -> u64 {
        let statement = "select coalesce(sum(num_done), 0) from shards";
        tokio::task::block_in_place(|| self.database.sql(statement)).parse().expect("a count")
    }
}

async fn wait_for(what: &str, process: &Process, mut is_there: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < PATIENCE, "{what} did not come\n{}", process.log_tail());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

async fn run(users: &Users, key: &str) -> Vec<Ended> {
    let running = users.clone().run(input(2_400, 3), key.to_owned(), Vec::new());
    running.await.unwrap_or_else(|why| panic!("{why}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn partition_of_a_worker_loses_nothing_and_heals() {
    let Some(hosts) = Hosts::start().await else { return };
    let port = free_port().expect("a free port").to_string();
    let door = ["serve", "--no-worker", "--insecure", "--host", "0.0.0.0", "--port", &port];
    let api = hosts.spawn("api", &door);
    let url = format!("http://{}:{port}", hosts.network.address("api", "db"));
    let cut = hosts.spawn("w1", &["worker"]);
    let other = hosts.spawn("w2", &["worker"]);
    for (process, word) in [(&api, "listening on"), (&cut, "ready: "), (&other, "ready: ")] {
        wait_for("the start", process, || process.said().contains(word)).await;
    }
    let users = Users::new(url, 4 * PATIENCE);
    let whole = Whole::of(&run(&users, "undisturbed").await[0]);
    assert!(!cut.said().contains("lost the lease"), "nothing is lost before anything is cut");

    let running = tokio::spawn({
        let users = users.clone();
        async move { run(&users, "partitioned").await }
    });
    wait_for("a lease of the worker to be cut", &cut, || hosts.num_held(&cut) > 0).await;

    hosts.network.cut("w1", "db");
    let dropped = wait_for("the local deadline", &cut, || cut.said().contains("lost the lease of a shard")).await;
    let taken = wait_for("the end of its leases", &other, || hosts.num_held(&cut) == 0).await;
    let done = hosts.num_done();
    wait_for("work elsewhere", &other, || hosts.num_done() > done).await;
    assert!(!running.is_finished(), "the job was too short to show anything");
    assert_eq!(hosts.num_held(&cut), 0, "nobody who is cut off holds anything");

    hosts.network.heal("w1", "db");
    let back = wait_for("a new lease of the healed worker", &cut, || hosts.num_held(&cut) > 0).await;

    hosts.network.cut("w1", "obj");
    // Longer than its lease, which it goes on renewing.
    tokio::time::sleep(2 * LEASE).await;
    assert!(!running.is_finished(), "the job was too short to show anything");
    hosts.network.heal("w1", "obj");
    let ended = running.await.expect("users do not panic");
    eprintln!("dropped after {dropped:?}, taken over after {:?}, back after {back:?}", dropped + taken);

    checks::files(&ended[0], &whole).unwrap_or_else(|why| panic!("{why}"));
    wait_for("the end of all work", &other, || checks::findings(&hosts.database).is_ok_and(|found| found.is_empty()))
        .await;
    drop((api, cut, other));
    assert!(hosts.objects.num_upload_pieces() == 0, "no upload is left half done");
}
