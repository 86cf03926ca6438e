//! Every command under `--json`: stdout is one JSON value when it succeeds, stderr is one
//! error object when it fails, and neither holds anything else. The commands are those
//! that the help lists, so a new one without a case here fails.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::harness::{Home, Said, Server, answering, items, serving};

/// Commands that run until they are stopped: only their refusal is looked at.
const SERVING: [&str; 2] = ["serve", "worker"];

/// The words after `Commands:` in a help text, `help` left out.
fn subcommands(home: &Home, path: &[&str]) -> Vec<String> {
    let help = home.batch(&[path, &["--help"]].concat()).expect(0).stdout;
    let list = help.split_once("Commands:\n").map_or("", |(_, rest)| rest);
    let lines = list.lines().take_while(|line| line.starts_with("  "));
    // Continued descriptions are indented further.
    let names = lines.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

fn leaves(home: &Home) -> BTreeSet<String> {
    let mut leaves = BTreeSet::new();
    for name in subcommands(home, &[]) {
        match subcommands(home, &[&name]) {
            inner if inner.is_empty() => drop(leaves.insert(name)),
            inner => leaves.extend(inner.into_iter().map(|inner| format!("{name} {inner}"))),
        }
    }
    leaves
}

#[track_caller]
fn assert_good(arguments: &[&str], said: &Said) -> Value {
    assert_eq!(said.code, 0, "{arguments:?}: {said:?}");
    assert!(!said.stdout.contains('\x1b'), "{arguments:?}: {said:?}");
    assert_eq!(said.stderr, "", "{arguments:?} talks");
    let value = said.json();
    assert!(value.is_object() || value.is_array(), "{arguments:?}: {value}");
    value
}

#[track_caller]
fn assert_bad(arguments: &[&str], code: i32, said: &Said) -> Value {
    assert_eq!(said.code, code, "{arguments:?}: {said:?}");
    let error: Value = serde_json::from_str(&said.stderr)
        .unwrap_or_else(|err| panic!("{arguments:?}: stderr is not JSON ({err}): {said:?}"));
    let keys: Vec<&String> = error["error"].as_object().expect("an error object").keys().collect();
    assert_eq!(keys, ["code", "message", "hint", "request_id"], "{arguments:?}");
    assert_ne!(error["error"]["message"], "", "{arguments:?}");
    error
}

#[test]
fn json_is_pure_for_every_command() {
    let home = Home::new();
    let bad_url =
        answering("400 Bad Request", r#"{"error":{"message":"no","type":"x","param":null,"code":"too_odd"}}"#);
    let server = Server::instant(&home);
    home.file("in.jsonl", &items(3, "m"));
    home.file("rows.txt", "a\nb\n");
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let file = home.batch(&["files", "upload", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    let other = home.batch(&["files", "upload", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    let good: &[&[&str]] = &[
        &["submit", "in.jsonl"],
        &["submit", "in.jsonl", "--wait"],
        &["submit", "in.jsonl", "--wait", "--results", "-"],
        &["submit", "in.jsonl", "--wait", "--results", "r.jsonl"],
        &["submit", "in.jsonl", "--dry-run"],
        &["status"],
        &["status", "last", "--wait"],
        &["status", "last", "--watch"],
        &["resume", "--all-interrupted"],
        &["results", "last"],
        &["results", "last", "-o", "out.jsonl"],
        &["results", "last", "--only", "failed"],
        &["results", "last", "--field", "response.body.choices.0.text"],
        &["results", "last", "--join", "in.jsonl"],
        &["results", "last", "--order", "completion"],
        &["results", "last", "--follow"],
        &["list"],
        &["show", "last", "c0"],
        &["errors", "last"],
        &["validate", "in.jsonl"],
        &["prepare", "rows.txt", "-o", "p.jsonl", "--model", "m"],
        &["prepare", "rows.txt", "-o", "p.jsonl", "--model", "m", "--dry-run"],
        &["run", "in.jsonl", "-o", "run.jsonl", "--set", "engine.kind=instant", "--data-dir", "own"],
        &["models", "list"],
        &["models", "show", "gemma-3-270m"],
        &["files", "list"],
        &["files", "upload", "in.jsonl"],
        &["files", "get", &file, "-o", "copy"],
        &["files", "rm", &other, "--yes"],
        &["config", "show"],
        &["config", "get", "api.port"],
        &["config", "path"],
        &["config", "set", "worker.attempts_max", "7"],
        &["db", "migrate"],
        &["db", "check"],
        &["db", "backup", "copy.db"],
        &["db", "vacuum"],
        &["db", "forget-objects"],
        &["logs"],
        &["logs", "last", "--level", "warn"],
        &["collect-env"],
        &["bench", "durable", "--items", "50"],
        &["completions", "bash"],
        &["man", "man"],
        &["version"],
    ];
    for arguments in good {
        assert_good(arguments, &home.batch(&[arguments, &["--json"][..]].concat()));
    }
    assert_eq!(home.read("out.jsonl").lines().count(), 3);
    let lines = home.batch(&["results", "last", "--json"]).json();
    assert_eq!((lines.as_array().map(Vec::len), &lines[2]["custom_id"]), (Some(3), &Value::from("c2")));
    let answers = home.batch(&["results", "last", "--json", "--field", "response.body.choices.0.text"]).json();
    assert_eq!(answers, serde_json::json!(["positive", "positive", "positive"]));

    let bad: &[(&[&str], i32)] = &[
        (&["submit", "missing.jsonl"], 5),
        (&["status", "batch_0000000000000000000000000000dead"], 5),
        (&["resume", "last"], 1),
        (&["results", "@{99}"], 5),
        (&["results", "last", "--format", "csv"], 2),
        (&["list", "--server", "http://127.0.0.1:9"], 7),
        (&["show", "last", "nobody"], 5),
        (&["errors", "@{99}"], 5),
        (&["pause", "last"], 1),
        (&["cancel", "last", "--yes"], 1),
        (&["retry", "last"], 2),
        (&["retry", "last", "--failed"], 1),
        (&["validate", "missing.jsonl"], 5),
        (&["prepare", "missing.txt", "-o", "p.jsonl", "--model", "m"], 5),
        (&["prepare", "rows.txt", "-o", "-", "--model", "m"], 2),
        (&["run", "in.jsonl", "-o", "-", "--set", "engine.kind=instant"], 2),
        (&["run", "in.jsonl", "-o", "x.jsonl", "--set", "engine.kind=instant"], 1),
        (&["serve"], 2),
        (&["worker"], 2),
        (&["models", "pull", "no-such-model"], 5),
        (&["models", "show", "nothing"], 5),
        (&["models", "rm", "nothing"], 5),
        (&["files", "get", "file-00000000000000000000000000000000", "-o", "x"], 5),
        (&["files", "get", &file], 2),
        (&["files", "rm", &file], 2),
        (&["config", "get", "nothing"], 5),
        (&["config", "set", "nothing", "1"], 2),
        (&["db", "backup", "copy.db"], 2),
        (&["bench", "throughput"], 2),
        (&["bench", "kernels", "--family", "nothing"], 2),
        (&["bench", "fleet", "--workers", "1"], 2),
        (&["bench", "serve"], 2),
        (&["doctor", "--model", "nothing"], 1),
        (&["doctor", "--live", "http://127.0.0.1:9"], 1),
        (&["completions", "nothing"], 2),
        (&["nonsense"], 2),
        (&["logs", "--follow"], 2),
        (&["logs", "--data-dir", "nowhere"], 5),
        (&["db", "vacuum", "--data-dir", "nowhere"], 5),
        (&["db", "forget-objects", "--data-dir", "nowhere"], 5),
    ];
    for (arguments, code) in bad {
        assert_bad(arguments, *code, &home.batch(&[arguments, &["--json"][..]].concat()));
    }

    let tried: Vec<&[&str]> = good.iter().copied().chain(bad.iter().map(|(arguments, _)| *arguments)).collect();
    let missing: Vec<String> = leaves(&home)
        .into_iter()
        .filter(|leaf| {
            let words: Vec<&str> = leaf.split(' ').collect();
            !tried.iter().any(|arguments| arguments.starts_with(&words))
        })
        .collect();
    assert_eq!(missing, Vec::<String>::new(), "commands without a case here");
    assert!(SERVING.iter().all(|name| leaves(&home).contains(*name)), "the help was read");
    drop(server);

    // Exits that people know from the summary: programs get an error object.
    let kind = format!("engine.base_urls=[\"{bad_url}\"]");
    let _server = Server::start(&home, &["--set", "engine.kind=openai", "--set", &kind]);
    let said = home.batch(&["submit", "in.jsonl", "--wait", "--json"]);
    assert_eq!(assert_bad(&["submit --wait"], 3, &said)["error"]["code"], "requests_failed");
    assert_eq!(said.json()["request_counts"]["failed"], 3);
    let said = home.batch(&["status", "last", "--wait", "--json"]);
    assert_bad(&["status --wait"], 3, &said);
    let own = ["run", "in.jsonl", "-o", "y.jsonl", "--set", "engine.kind=openai", "--set", &kind, "--data-dir", "own2"];
    assert_bad(&["run"], 3, &home.batch(&[&own[..], &["--json"]].concat()));
}

#[test]
fn waiting_that_is_given_up_is_told_in_json_too() {
    let home = Home::new();
    let url = serving(|_| {
        let batch = r#"{"id":"batch_00000000000000000000000000000001","status":"in_progress","paused_at":null,
            "request_counts":{"total":2,"completed":0,"failed":0}}"#;
        Some(("200 OK".to_owned(), batch.to_owned()))
    });
    let id = "batch_00000000000000000000000000000001";
    let said = home.batch(&["status", id, "--wait", "--timeout", "300ms", "--json", "--server", &url]);
    assert_eq!(said.stdout, "");
    assert_eq!(assert_bad(&["status --wait"], 124, &said)["error"]["code"], "timed_out");
    let ended = serving(|_| {
        let batch = r#"{"id":"batch_00000000000000000000000000000001","status":"expired","paused_at":null,
            "request_counts":{"total":2,"completed":0,"failed":0}}"#;
        Some(("200 OK".to_owned(), batch.to_owned()))
    });
    let said = home.batch(&["status", id, "--exit-status", "--json", "--server", &ended]);
    assert_eq!(assert_bad(&["status --exit-status"], 8, &said)["error"]["code"], "batch_not_completed");
}
