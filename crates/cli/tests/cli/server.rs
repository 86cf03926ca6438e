//! Sessions against a real server with the instant engine.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{Home, LIMIT, Server, answering, items, serving, signal, wait, wait_until_caught};

#[test]
fn good_session_from_submit_to_results() {
    let home = Home::new();
    let server = Server::instant(&home);
    home.file("big.jsonl", &items(200, "m"));
    let id = home.batch(&["submit", "big.jsonl"]).expect(0).stdout;
    assert!(id.starts_with("batch_") && id.lines().count() == 1, "the id, nothing else: {id:?}");
    let said = home.batch(&["status", "last", "--wait", "--exit-status", "--json"]).expect(0);
    assert_eq!(said.json()["status"], "completed");
    home.batch(&["results", "last", "-o", "out.jsonl"]).expect(0);
    let output = home.read("out.jsonl");
    assert_eq!(output.lines().count(), 200);
    assert_eq!(
        home.batch(&["results", &id.trim()[..20]]).expect(0).stdout,
        output,
        "stdout, by prefix: the same bytes"
    );
    let said = home.batch(&["results", "last", "--field", "response.body.choices.0.text"]).expect(0);
    assert_eq!(said.stdout.lines().next(), Some("positive"));
    let said = home.batch(&["results", "last", "--format", "csv"]).expect(0);
    assert_eq!(said.stdout.lines().nth(1), Some("c0,200,positive,stop,"));
    let said = home.batch(&["results", "last", "--join", "big.jsonl"]).expect(0);
    let first: Value = serde_json::from_str(said.stdout.lines().next().expect("a line")).expect("JSON");
    assert_eq!((first["custom_id"].as_str(), first["input"]["prompt"].as_str()), (Some("c0"), Some("p0")));
    let said = home.batch(&["show", "last", "c7", "--json"]).expect(0);
    assert_eq!(said.json()["line"], 8);
    let said = home.batch(&["show", "last", "3", "--line", "--json"]).expect(0);
    assert_eq!(said.json()["custom_id"], "c2");
    assert_eq!(server.terminate(), 0, "a drained server exits 0");
}

#[test]
fn stdin_to_stdout_in_one_line() {
    let home = Home::new();
    let _server = Server::instant(&home);
    let said = home.batch_fed(&items(5, "m"), &["submit", "-", "--wait", "--results", "-"]).expect(0);
    assert_eq!(said.stdout.lines().count(), 5, "{said:?}");
    assert!(said.stdout.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{said:?}");
}

#[test]
fn piped_stdout_holds_data_only() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(3, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let said = home.batch(&["list"]).expect(0);
    let cells: Vec<&str> = said.stdout.trim_end_matches('\n').split('\t').collect();
    assert_eq!(cells.len(), 8, "{said:?}");
    assert_eq!((cells[1], cells[2], cells[3]), ("completed", "3/3", "0"));
    assert!(cells[0].len() == 38 && cells[4].ends_with('Z'), "full ids and absolute times: {said:?}");
    let said = home.batch(&["list", "--output", "id"]).expect(0);
    assert_eq!(said.stdout.trim(), cells[0]);
    let said = home.batch(&["list", "--fields", "status,request_counts.total"]).expect(0);
    assert_eq!(said.stdout, "completed\t3\n");
}

#[test]
fn failed_requests_are_exit_3_and_grouped() {
    let home = Home::new();
    let url = answering(
        "400 Bad Request",
        r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"too_odd"}}"#,
    );
    let kind = format!("engine.base_urls=[\"{url}\"]");
    let _server = Server::start(&home, &["--set", "engine.kind=openai", "--set", &kind]);
    home.file("in.jsonl", &items(4, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(3);
    home.batch(&["status", "last"]).expect(0);
    home.batch(&["status", "last", "--exit-status"]).expect(3);
    home.batch(&["results", "last", "-o", "out.jsonl"]).expect(0);
    assert_eq!(home.read("out.jsonl"), "");
    assert_eq!(home.read("out.errors.jsonl").lines().count(), 4);
    let said = home.batch(&["errors", "last", "--json"]).expect(0);
    assert_eq!(said.json()[0]["count"], 4, "{said:?}");
    let said = home.batch(&["retry", "last", "--error-code", "too_odd", "--ids", "c1,c2", "--dry-run"]).expect(0);
    assert!(said.stderr.contains("2 would run: requests that did not complete and ended with too_odd"), "{said:?}");
    home.batch(&["retry", "last", "--ids", "nobody", "--dry-run"]).expect(5);
    let said = home.batch(&["resume", "last"]).expect(0);
    assert!(said.stderr.contains("0 kept; 4 failed and 0 unfinished will run"), "{said:?}");
    home.batch(&["status", "last", "--wait"]).expect(3);
    // The same in one process.
    let arguments =
        ["run", "in.jsonl", "-o", "two.jsonl", "--set", "engine.kind=openai", "--set", &kind, "--data-dir", "own"];
    home.batch(&arguments).expect(3);
    assert_eq!(home.read("two.errors.jsonl").lines().count(), 4);
    // To stdout, the failures go to a file that the summary names.
    let arguments = ["run", "in.jsonl", "-o", "-", "--set", "engine.kind=openai", "--set", &kind, "--data-dir", "own"];
    let said = home.batch(&arguments).expect(3);
    assert_eq!(said.stdout, "");
    assert!(said.stderr.contains("0 answers in stdout · 4 without an answer in in.errors.jsonl"), "{said:?}");
    assert_eq!(home.read("in.errors.jsonl").lines().count(), 4);
}

#[test]
fn batch_that_failed_is_exit_8_with_its_reason() {
    let home = Home::new();
    let urls = format!("engine.base_urls=[\"{}\"]", answering("200 OK", "{}"));
    let names = "engine.served_model_name=[\"only\"]";
    let _server = Server::start(&home, &["--set", "engine.kind=openai", "--set", &urls, "--set", names]);
    home.file("in.jsonl", &items(2, "other"));
    let said = home.batch(&["submit", "in.jsonl", "--wait"]).expect(8);
    assert!(said.stderr.contains("model_not_found"), "{said:?}");
    home.batch(&["resume", "last"]).expect(6);
}

#[test]
fn key_is_asked_for_with_exit_4() {
    let home = Home::new();
    home.file("keys", "sk-right\n");
    home.file("wrong", "sk-wrong\n");
    let _server = Server::start(&home, &["--set", "engine.kind=instant", "--api-key-file", "keys"]);
    let said = home.batch(&["list"]).expect(4);
    assert!(said.stderr.contains("BATCH_API_KEY"), "{said:?}");
    home.batch(&["list", "--api-key-file", "wrong"]).expect(4);
    home.batch(&["list", "--api-key-file", "keys"]).expect(0);
    home.batch_with(&[("BATCH_API_KEY", "sk-right")], &["list"]).expect(0);
}

#[test]
fn what_is_not_there_is_exit_5() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.batch(&["status", "batch_0000000000000000000000000000dead"]).expect(5);
    home.batch(&["status", "0193456789ab"]).expect(5);
    home.batch(&["status", "last"]).expect(5);
    home.batch(&["submit", "missing.jsonl"]).expect(5);
    let said = home.batch(&["status"]).expect(0);
    assert!(said.stderr.contains("batch submit"), "the first steps: {said:?}");
}

/// A paused batch never ends: waiting for it can only be given up.
fn paused(home: &Home) -> String {
    home.file("in.jsonl", &items(20_000, "m"));
    let id = home.batch(&["submit", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    home.batch(&["pause", &id]);
    id
}

#[test]
fn waiting_past_the_limit_is_exit_124_and_ctrl_c_130() {
    let home = Home::new();
    // Nobody runs anything here.
    let _server = Server::start(&home, &["--no-worker", "--set", "engine.kind=instant"]);
    let id = paused(&home);
    let said = home.batch(&["status", &id, "--wait", "--timeout", "300ms"]).expect(124);
    assert!(said.stderr.contains("batch status batch_"), "{said:?}");
    let mut child = home
        .command(&["status", &id, "--watch"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut stderr = std::io::BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut line).expect("the first progress line");
    assert!(line.starts_with("batch_") && !line.contains('\r'), "{line:?}");
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(wait(&mut child), 130);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stderr, &mut rest).expect("stderr ends");
    assert!(rest.contains("still running on the server; \"batch status batch_"), "{rest:?}");
}

#[test]
fn cancel_asks_and_resume_runs_the_rest() {
    let home = Home::new();
    let server = Server::start(&home, &["--no-worker", "--set", "engine.kind=instant"]);
    let id = paused(&home);
    let said = home.batch(&["cancel", &id]).expect(2);
    assert!(said.stderr.contains("--yes"), "{said:?}");
    home.batch(&["cancel", &id, "--yes"]).expect(0);
    home.batch(&["status", &id, "--wait"]).expect(8);
    drop(server);
    let _server = Server::instant(&home);
    home.batch(&["resume", &id, "--wait"]).expect(0);
    assert_eq!(home.batch(&["results", &id]).expect(0).stdout.lines().count(), 20_000);
}

#[test]
fn bad_lines_are_left_out_on_demand() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &(items(3, "m") + "broken\n"));
    home.batch(&["submit", "in.jsonl"]).expect(6);
    let said = home.batch(&["submit", "in.jsonl", "--on-invalid", "skip", "--wait"]).expect(0);
    assert!(said.stderr.contains("in.invalid.jsonl"), "{said:?}");
    assert_eq!(home.batch(&["results", "last"]).expect(0).stdout.lines().count(), 3);
    assert!(home.read("in.invalid.jsonl").contains("invalid_json_line"));
}

#[test]
fn split_makes_batches_of_at_most_n() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(25, "m"));
    let said = home.batch(&["submit", "in.jsonl", "--split", "10", "--wait"]).expect(0);
    assert_eq!(said.stdout.lines().count(), 3, "{said:?}");
    let said = home.batch(&["list", "--fields", "request_counts.total"]).expect(0);
    assert_eq!(said.stdout, "5\n10\n10\n", "newest first");
}

#[test]
fn same_key_submits_once() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(2, "m"));
    let submit = ["submit", "in.jsonl", "--idempotency-key", "k"];
    let first = home.batch(&submit).expect(0).stdout;
    let again = home.batch(&submit).expect(0).stdout;
    assert_eq!(first, again, "the first batch is returned");
    assert_eq!(home.batch(&["list", "--output", "id"]).expect(0).stdout.lines().count(), 1);
    let inputs = ["files", "list", "--purpose", "batch", "--output", "id"];
    assert_eq!(home.batch(&inputs).expect(0).stdout.lines().count(), 1, "one upload");
    // Another file under the same key is refused, and its upload does not stay.
    home.file("in.jsonl", &items(3, "m"));
    let said = home.batch(&submit).expect(1);
    assert!(said.stderr.contains("--idempotency-key"), "{said:?}");
    assert_eq!(home.batch(&inputs).expect(0).stdout.lines().count(), 1, "nothing is left");
    // Without a key each submit is a batch of its own.
    home.batch(&["submit", "in.jsonl"]).expect(0);
    home.batch(&["submit", "in.jsonl"]).expect(0);
    assert_eq!(home.batch(&["list", "--output", "id"]).expect(0).stdout.lines().count(), 3);
}

// Field report: vllm run_batch uploaded its input once per try.
#[test]
fn one_submit_uploads_its_file_once() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let home = Home::new();
    home.file("in.jsonl", &items(2, "m"));
    let uploads = std::sync::Arc::new(AtomicU32::new(0));
    let creates = std::sync::Arc::new(AtomicU32::new(0));
    let counted = (uploads.clone(), creates.clone());
    let url = serving(move |line| {
        let (status, body) = if line.starts_with("POST /v1/files") {
            counted.0.fetch_add(1, Ordering::Relaxed);
            ("200 OK", r#"{"id":"file-00000000000000000000000000000001"}"#)
        } else if counted.1.fetch_add(1, Ordering::Relaxed) < 2 {
            ("503 Service Unavailable", r#"{"error":{"message":"later","code":"unavailable"}}"#)
        } else {
            ("200 OK", r#"{"id":"batch_00000000000000000000000000000001","status":"validating"}"#)
        };
        Some((status.to_owned(), body.to_owned()))
    });
    home.batch(&["submit", "in.jsonl", "--server", &url]).expect(0);
    assert_eq!(creates.load(Ordering::Relaxed), 3, "the create was tried again");
    assert_eq!(uploads.load(Ordering::Relaxed), 1, "the upload was not");
}

#[test]
fn line_is_found_whatever_blank_lines_lie_before_it() {
    let home = Home::new();
    let _server = Server::instant(&home);
    let mut text = "\n".repeat(400);
    for (index, line) in items(600, "m").lines().enumerate() {
        text.push_str(line);
        text.push_str(if index % 2 == 0 { "\n" } else { "\n \n" });
    }
    home.file("in.jsonl", &text);
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let lines: Vec<&str> = text.split('\n').collect();
    for wanted in [1, 250, 401, 402, 403, 404, 899, 900, 901, 1_299, 1_300, 1_301, 9_000] {
        let line = lines.get(wanted - 1).filter(|line| !line.trim().is_empty());
        let said = home.batch(&["show", "last", &wanted.to_string(), "--line", "--json"]);
        match line {
            None => assert_eq!(said.code, 5, "{wanted}: {said:?}"),
            Some(line) => {
                let id = &serde_json::from_str::<Value>(line).expect("JSON")["custom_id"];
                assert_eq!(&said.expect(0).json()["custom_id"], id, "line {wanted}");
            }
        }
    }
    assert_eq!(home.batch(&["show", "last", "401", "--json"]).expect(0).json()["custom_id"], "c0", "no such custom id");
    home.batch(&["show", "last", "nobody"]).expect(5);
}

#[test]
fn failures_of_an_earlier_round_do_not_lie_beside_repaired_results() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(2, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let failure = "{\"id\":\"batch_req_1\",\"custom_id\":\"a\",\"response\":null,\"error\":{}}\n";
    home.file("out.errors.jsonl", failure);
    home.file("other.errors.jsonl", failure);
    home.batch(&["results", "last", "-o", "out.jsonl"]).expect(0);
    assert!(!home.path().join("out.errors.jsonl").exists());
    assert!(home.path().join("other.errors.jsonl").exists(), "only what belongs to this output");
    // Somebody's own file under that name is never removed.
    home.file("mine.errors.jsonl", "{\"custom_id\":\"a\"}\n");
    let said = home.batch(&["results", "last", "-o", "mine.jsonl"]).expect(0);
    assert!(home.path().join("mine.errors.jsonl").exists());
    assert!(said.stderr.contains("mine.errors.jsonl is no file of failures"), "{}", said.stderr);
    // Nor is a pipe read, which would never end.
    let pipe = home.path().join("pipe.errors.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo starts").success());
    home.batch(&["results", "last", "-o", "pipe.jsonl"]).expect(0);
    assert!(pipe.exists());
}

#[test]
fn batch_that_no_worker_can_run_says_why() {
    let home = Home::new();
    let _server = Server::start(&home, &["--no-worker", "--set", "engine.kind=instant"]);
    home.file("in.jsonl", &items(2, "m"));
    let id = home.batch(&["submit", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    let start = Instant::now();
    let batch = loop {
        let batch = home.batch(&["status", &id, "--json"]).expect(0).json();
        if batch["status"] == "in_progress" {
            break batch;
        }
        assert!(start.elapsed() < LIMIT, "{batch}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let reason = batch["waiting_for"].as_str().unwrap_or_default();
    assert!(reason.contains("batch worker"), "{batch}");
}

#[test]
fn ctrl_c_ends_a_run_that_still_reads_its_input() {
    let home = Home::new();
    let mut child = home
        .command(&["run", "-", "-o", "out.jsonl", "--set", "engine.kind=instant"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    // Its input never ends while we hold it.
    let input = child.stdin.take().expect("a pipe");
    wait_until_caught(&mut child, rustix::process::Signal::INT);
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(wait(&mut child), 130);
    drop(input);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("a pipe"), &mut said).expect("stderr ends");
    assert!(said.contains("the same command starts it"), "{said:?}");
}

#[test]
fn ctrl_c_ends_a_download_that_follows_the_waiting() {
    let home = Home::new();
    home.file("in.jsonl", &items(2, "m"));
    let (reached, download) = std::sync::mpsc::channel();
    let batch = r#"{"id":"batch_00000000000000000000000000000001","status":"completed","paused_at":null,
        "request_counts":{"total":2,"completed":2,"failed":0},"output_file_id":"file-00000000000000000000000000000002"}"#;
    let url = serving(move |line| {
        let body = match line {
            line if line.contains("/content") => {
                reached.send(()).expect("the test waits");
                return None;
            }
            line if line.contains("/v1/batches") => batch,
            line if line.contains("000002") => r#"{"id":"file-00000000000000000000000000000002","bytes":5}"#,
            _ => r#"{"id":"file-00000000000000000000000000000001"}"#,
        };
        Some(("200 OK".to_owned(), body.to_owned()))
    });
    let mut child = home
        .command(&["submit", "in.jsonl", "--wait", "--results", "out.jsonl", "--server", &url])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    download.recv_timeout(LIMIT).expect("the download is asked for");
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(wait(&mut child), 130);
    assert!(!home.path().join("out.jsonl").exists());
}

#[test]
fn interrupted_download_goes_on_with_equal_bytes() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(2_000, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    home.batch(&["results", "last", "-o", "whole.jsonl"]).expect(0);
    let whole = home.read("whole.jsonl");
    let batch = home.batch(&["status", "last", "--json"]).expect(0).json();
    let file = batch["output_file_id"].as_str().expect("published");
    // What a kill leaves: bytes, and the notes of some of them.
    home.file("out.jsonl.partial", &whole[..5_000]);
    home.file("out.jsonl.partial.json", &format!(r#"{{"file_id":"{file}","bytes":4000}}"#));
    home.batch(&["results", "last", "-o", "out.jsonl", "--resume"]).expect(0);
    assert!(home.read("out.jsonl") == whole, "the bytes are equal");
    assert!(!home.path().join("out.jsonl.partial").exists());
}

#[test]
fn run_refuses_a_data_folder_that_a_server_holds() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(2, "m"));
    let said = home.batch(&["run", "in.jsonl", "-o", "out.jsonl", "--set", "engine.kind=instant"]).expect(1);
    assert!(said.stderr.contains("batch submit") && said.stderr.contains("--data-dir"), "{said:?}");
}
