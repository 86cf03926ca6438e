//! `batch logs` on what real services wrote.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::harness::{Home, Server, items, signal, wait};

#[test]
fn log_of_a_batch_is_found_while_the_server_runs_and_after_its_end() {
    let home = Home::new();
    let server = Server::instant(&home);
    home.file("in.jsonl", &items(3, "m"));
    let id = home.batch(&["submit", "in.jsonl", "--wait"]).expect(0).stdout.trim().to_owned();
    let said = home.batch(&["logs", "-n", "1k"]).expect(0);
    assert!(said.stdout.contains(" INFO overnight ") && said.stdout.contains("listening on http://"), "{said:?}");
    let said = home.batch(&["logs", "--search", "listening on", "--output", "jsonl"]).expect(0);
    assert_eq!(said.stdout.lines().count(), 1, "{said:?}");
    assert_eq!(said.json()["level"], "INFO");
    let said = home.batch(&["logs", "--search", "listening on", "--until", "1h"]).expect(0);
    assert_eq!(said.stdout, "", "nothing is that old");
    assert_eq!(server.terminate(), 0);
    let of_batch = home.batch(&["logs", &id, "--output", "jsonl"]).expect(0).stdout;
    assert!(of_batch.lines().count() > 0 && of_batch.lines().all(|line| line.contains(&id)), "{of_batch}");
    assert_eq!(home.batch(&["logs", "last", "--output", "jsonl"]).expect(0).stdout, of_batch, "by name");
    let said = home.batch(&["logs", "-n", "1"]).expect(0);
    assert!(said.stdout.contains("stopped; nothing that was finished is lost"), "the newest line: {said:?}");
}

#[test]
fn log_is_followed_until_ctrl_c() {
    let home = Home::new();
    let server = Server::instant(&home);
    let mut child = home
        .command(&["logs", "--follow"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut next_with = |text: &str| lines.by_ref().map(|line| line.expect("a line")).find(|line| line.contains(text));
    assert!(next_with("listening on").is_some(), "what is there");
    assert_eq!(server.terminate(), 0);
    assert!(next_with("nothing that was finished is lost").is_some(), "what came later");
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(wait(&mut child), 130);
}

#[test]
fn no_log_is_kept_where_the_limit_is_nothing() {
    let home = Home::new();
    let _server = Server::start(&home, &["--set", "engine.kind=instant", "--set", "log.files_bytes_max=0"]);
    let said = home.batch(&["logs"]).expect(5);
    assert!(said.stderr.contains("no log files in") && said.stderr.contains("--data-dir"), "{said:?}");
}
