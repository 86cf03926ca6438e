//! What commands say: the batch that is meant, the reason, the next step, the exit code.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{Home, Killed, LIMIT, Said, Server, answering, items};

#[test]
fn last_is_a_batch_of_the_server_that_is_asked() {
    let home = Home::new();
    home.file("in.jsonl", &items(1, "m"));
    let instant = ["--set", "engine.kind=instant"];
    let first = Server::start(&home, &instant);
    let url = home.batch(&["doctor", "--json"]).json()["port"]["found"].as_str().expect("found").to_owned();
    let port = url.rsplit(':').next().expect("a port").to_owned();
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let other = home.batch(&["submit", "in.jsonl", "--wait"]).expect(0).stdout;
    assert_eq!(first.terminate(), 0);
    // The same address, another data folder; its batch was made from another machine.
    let log = std::fs::File::create(home.path().join("second.log")).expect("a log");
    let arguments = ["serve", "--port", &port, "--data-dir", "second", "--set", "engine.kind=instant"];
    let _second = Killed(home.command(&arguments).stdin(Stdio::null()).stderr(log).spawn().expect("starts"));
    let server = format!("http://127.0.0.1:{port}");
    let elsewhere = home.path().join("elsewhere").display().to_string();
    let elsewhere = [("XDG_STATE_HOME", elsewhere.as_str())];
    // Waits for the server, which is only starting.
    let submit = ["submit", "in.jsonl", "--wait", "--server", &server];
    let here = home.batch_with(&elsewhere, &submit).expect(0).stdout;
    let shown = |id: &str| {
        let said = home.batch(&["status", id, "--json", "--server", &server]).expect(0);
        said.json()["id"].as_str().expect("an id").to_owned()
    };
    assert_ne!(here, other);
    assert_eq!(shown("last"), here.trim(), "not the batch of the other folder");
    let own = home.batch(&submit).expect(0).stdout;
    assert_eq!((shown("last"), shown("@{0}")), (own.trim().to_owned(), own.trim().to_owned()));
    let said = home.batch(&["status", "@{9}", "--server", &server]).expect(5);
    assert!(said.stderr.contains("@{9} is too far back among the 1 batch made from here"), "{said:?}");
}

#[test]
fn submit_that_waits_does_so_for_a_server_that_starts() {
    let home = Home::new();
    home.file("in.jsonl", &items(1, "m"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let server = format!("http://{address}");
    let submit = home
        .command(&["submit", "in.jsonl", "--wait", "--server", &server])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let port = address.port().to_string();
    let mut serve = home.command(&["serve", "--port", &port, "--set", "engine.kind=instant"]);
    let serve = Killed(serve.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts"));
    let said: Said = submit.wait_with_output().expect("ends").into();
    said.expect(0);
    drop(serve);
    // Who does not wait for the batch does not wait for a server; nor is one elsewhere waited for.
    let said = home.batch(&["submit", "in.jsonl", "--server", &server]).expect(7);
    assert!(!said.stderr.contains("waiting for a server"), "{said:?}");
    let limit = ["--timeout", "300ms"];
    let said = home.batch(&[&["submit", "in.jsonl", "--wait", "--server", &server][..], &limit].concat()).expect(7);
    assert!(said.stderr.contains("waiting for a server"), "{said:?}");
}

#[test]
fn cancelled_batch_does_not_look_finished() {
    let home = Home::new();
    let _server = Server::start(&home, &["--no-worker", "--set", "engine.kind=instant"]);
    home.file("in.jsonl", &items(3, "m"));
    home.batch(&["submit", "in.jsonl"]).expect(0);
    let start = Instant::now();
    while home.batch(&["status", "last", "--json"]).expect(0).json()["status"] != "in_progress" {
        assert!(start.elapsed() < LIMIT, "intake does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    home.batch(&["cancel", "last", "--yes"]).expect(0);
    home.batch(&["status", "last", "--wait"]).expect(8);
    let said = home.batch(&["list"]).expect(0);
    assert!(said.stdout.contains("\tcancelled\t0/3\t0\t"), "{said:?}");
    let said = home.batch(&["status", "last", "--output", "table"]).expect(0);
    assert!(said.stdout.contains("0/3 0% · 0 failed · 3 not run"), "{said:?}");
}

#[test]
fn refused_submit_leaves_nothing_on_the_server() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(2, "m"));
    for window in ["1s", "3x", "31d"] {
        let said = home.batch(&["submit", "in.jsonl", "--window", window]).expect(2);
        assert!(said.stderr.contains("from 5m to 30d"), "{said:?}");
    }
    // What only the server knows to refuse.
    let name = "x".repeat(10_000);
    home.batch(&["submit", "in.jsonl", "--metadata", &format!("k={name}")]).expect(6);
    assert_eq!(home.batch(&["files", "list", "--output", "id"]).expect(0).stdout, "");
}

#[test]
fn answer_of_a_server_that_cannot_is_told_with_its_code() {
    let home = Home::new();
    let body = r#"{"error":{"message":"too full to take more","type":"server_error","param":null,"code":"disk_full"}}"#;
    let url = answering("503 Service Unavailable", body);
    let said = home.batch(&["list", "--server", &url]).expect(1);
    assert!(said.stderr.contains("the server answered 503 disk_full: too full to take more"), "{said:?}");
    assert!(said.stderr.contains("help: it passes"), "{said:?}");
    let url = answering("500 Internal Server Error", r#"{"error":{"message":"no","code":"internal_error"}}"#);
    let said = home.batch(&["list", "--server", &url]).expect(1);
    assert!(said.stderr.contains("500 internal_error") && !said.stderr.contains("help"), "{said:?}");
}

#[test]
fn failed_batch_says_why_in_a_pipe_too() {
    let home = Home::new();
    let batch = r#"{"id":"batch_00000000000000000000000000000001","status":"failed","paused_at":null,
        "request_counts":{"total":0,"completed":0,"failed":0},
        "errors":{"total":1,"data":[{"code":"invalid_json_line","line":3,"message":"not JSON","param":null}]}}"#;
    let url = answering("200 OK", batch);
    let id = "batch_00000000000000000000000000000001";
    let said = home.batch(&["status", id, "--server", &url]).expect(0);
    assert_eq!(said.stdout.lines().count(), 1, "{said:?}");
    assert!(said.stderr.contains("line 3: not JSON (invalid_json_line)"), "{said:?}");
    let said = home.batch(&["results", id, "--server", &url]).expect(8);
    assert!(said.stderr.contains("batch errors batch_"), "{said:?}");
}

#[test]
fn one_request_is_shown_whole_in_a_pipe() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(1, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let said = home.batch(&["show", "last", "c0"]).expect(0);
    assert!(said.stdout.contains("input:\n") && said.stdout.contains("output:\n"), "{said:?}");
    let said = home.batch(&["models", "show", "gemma-3-270m"]).expect(0);
    assert!(said.stdout.contains("licence"), "{said:?}");
}

#[test]
fn fields_keep_the_shape_and_slips_are_named() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(1, "m"));
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let said = home.batch(&["status", "last", "--json", "--fields", "status"]).expect(0);
    assert_eq!(said.json(), serde_json::json!({"status": "completed"}), "one record is one object");
    let said = home.batch(&["list", "--json", "--fields", "status"]).expect(0);
    assert_eq!(said.json(), serde_json::json!([{"status": "completed"}]));
    for command in [&["status", "last"][..], &["list"]] {
        let said = home.batch(&[command, &["--fields", "nope"]].concat()).expect(2);
        assert!(said.stderr.contains("no field \"nope\""), "{said:?}");
    }
    let said = home.batch(&["list", "--fields", "status,usage.nope"]).expect(0);
    assert!(said.stderr.contains("no record has the field \"usage.nope\""), "{said:?}");
    let said = home.batch(&["results", "last", "--field", "no.such"]).expect(0);
    assert!(said.stderr.contains("no line has the field \"no.such\""), "{said:?}");
}

#[test]
fn next_steps_lead_somewhere() {
    let home = Home::new();
    let server = Server::instant(&home);
    let said = home.batch_fed(&items(1, "m"), &["validate", "-"]).expect(0);
    assert!(!said.stderr.contains("next:"), "stdin cannot be submitted again: {said:?}");
    let said = home.batch_fed("", &["validate", "-"]).expect(6);
    assert!(!said.stderr.contains("help:"), "{said:?}");
    home.file("in.jsonl", &items(1, "m"));
    let said = home.batch(&["submit", "in.jsonl", "--results", "out.jsonl"]).expect(0);
    assert!(said.stderr.contains("1 answer in out.jsonl\n") && !said.stderr.contains("next:"), "{said:?}");
    let said = home.batch(&["list", "--set", "nope=1"]).expect(2);
    assert!(!said.stderr.contains("did you mean"), "{said:?}");
    let said = home.batch(&["list", "--server", "ftp://x"]).expect(2);
    assert!(said.stderr.contains("http://HOST:PORT"), "{said:?}");
    let codes = home.batch(&["help", "exit-codes", "--json"]).expect(0).json();
    assert_eq!(codes[0], serde_json::json!({"code": 0, "meaning": "success"}));
    let said = home.batch(&["validate", "/dev/null"]).expect(2);
    assert!(said.stderr.contains("batch validate -"), "{said:?}");
    for command in ["get", "rm"] {
        home.batch(&["files", command, "file-00000000000000000000000000000000"]).expect(5);
    }
    drop(server);
}

#[test]
fn file_of_another_encoding_is_named_as_such() {
    let home = Home::new();
    let wide: Vec<u8> =
        std::iter::once(0xfeff).chain(items(1, "m").encode_utf16()).flat_map(u16::to_le_bytes).collect();
    std::fs::write(home.path().join("wide.jsonl"), wide).expect("written");
    let said = home.batch(&["validate", "wide.jsonl"]).expect(6);
    assert!(said.stderr.contains("iconv -f UTF-16 -t UTF-8 wide.jsonl"), "{said:?}");
    assert!(said.stderr.lines().all(|line| line.chars().count() < 200), "{said:?}");
    std::fs::copy(home.path().join("wide.jsonl"), home.path().join("wide.txt")).expect("copied");
    let said = home.batch(&["prepare", "wide.txt", "-o", "out.jsonl", "--model", "m"]).expect(6);
    assert!(said.stderr.contains("iconv -f UTF-16"), "{said:?}");
}

#[test]
fn table_of_semicolons_is_read_as_one() {
    let home = Home::new();
    home.file("in.csv", "id;text\na;\"x; y\"\n");
    let prepare = ["prepare", "in.csv", "-o", "-", "--model", "m", "--id-field", "id"];
    let said = home.batch(&prepare).expect(0);
    let line: Value = serde_json::from_str(&said.stdout).expect("one line");
    assert_eq!((&line["custom_id"], &line["body"]["messages"][0]["content"]), (&"a".into(), &"x; y".into()));
    assert!(said.stderr.contains("semicolons"), "{said:?}");
    home.batch(&[&prepare[..], &["--format", "csv"]].concat()).expect(6);
}

#[test]
fn gpu_that_is_not_there_is_refused_before_anything_is_made() {
    let home = Home::new();
    let found = home.batch(&["doctor", "--json", "--set", "engine.device=cuda"]).json();
    if found["gpu"]["result"] == "PASS" {
        return eprintln!("skipped: this machine has a GPU");
    }
    std::fs::create_dir(home.path().join("m")).expect("made");
    for command in ["serve", "worker"] {
        let said = home.batch(&[command, "--model", "./m", "--device", "cuda"]).expect(2);
        assert!(said.stderr.starts_with("error: ") && said.stderr.contains("batch doctor"), "{said:?}");
    }
    assert!(!home.path().join("overnight-data").exists());
}

#[test]
fn run_ends_its_progress_at_the_end() {
    let home = Home::new();
    home.file("in.jsonl", &items(50, "m"));
    let said = home.batch(&["run", "in.jsonl", "-o", "out.jsonl", "--set", "engine.kind=instant"]).expect(0);
    let lines: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with("batch_")).collect();
    assert!(lines.last().is_some_and(|line| line.contains("completed  50/50 100%")), "{said:?}");
    assert!(lines.windows(2).all(|two| two[0] != two[1]), "no line stands twice: {said:?}");
}
