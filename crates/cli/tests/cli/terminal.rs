//! What a person sees: a pseudo-terminal stands in for theirs.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::harness::{Home, Server, answering, items, signal, silent, wait};

/// Starts a command on a terminal 80 columns wide; returns it and our end.
fn on_terminal(home: &Home, arguments: &[&str], variables: &[(&str, &str)]) -> (Child, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    grantpt(&ours).expect("granted");
    unlockpt(&ours).expect("unlocked");
    let name = ptsname(&ours, Vec::new()).expect("it has a name");
    let size = rustix::termios::Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&ours, size).expect("sized");
    let theirs = || -> OwnedFd {
        File::options().read(true).write(true).open(name.to_str().expect("UTF-8")).expect("the other end opens").into()
    };
    let mut command = home.command(arguments);
    command.env("TERM", "xterm").envs(variables.iter().copied());
    let child = command
        .stdin(Stdio::from(theirs()))
        .stdout(Stdio::from(theirs()))
        .stderr(Stdio::from(theirs()))
        .spawn()
        .expect("batch starts");
    (child, File::from(ours))
}

/// Reads until `wanted` shows, or the other end closes.
fn read_until(terminal: &mut File, wanted: &str) -> String {
    let mut seen = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match terminal.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(read) => seen.extend_from_slice(&piece[..read]),
        }
        if String::from_utf8_lossy(&seen).contains(wanted) {
            break;
        }
    }
    String::from_utf8_lossy(&seen).into_owned()
}

#[test]
fn progress_is_one_line_redrawn_in_place() {
    let home = Home::new();
    let urls = format!("engine.base_urls=[\"{}\"]", silent());
    let _server = Server::start(&home, &["--set", "engine.kind=openai", "--set", &urls]);
    home.file("in.jsonl", &items(2_000, "m"));
    let id = home.batch(&["submit", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    let (mut child, mut terminal) = on_terminal(&home, &["status", &id, "--watch=50ms"], &[]);
    let seen = read_until(&mut terminal, "ETA");
    assert!(seen.contains("\r\x1b[2Kbatch_"), "redrawn in place: {seen:?}");
    assert!(seen.contains("/2,000 0% · 0 failed") || seen.contains("0/2,000"), "{seen:?}");
    assert!(seen.contains("ETA –"), "no estimate before there is data: {seen:?}");
    signal(&child, rustix::process::Signal::INT);
    let rest = read_until(&mut terminal, "to look again");
    assert!(rest.contains("still running on the server"), "{rest:?}");
    assert_eq!(wait(&mut child), 130);
}

#[test]
fn table_fits_80_columns_with_glyph_and_word() {
    let home = Home::new();
    let _server = Server::instant(&home);
    home.file("in.jsonl", &items(3, "a-model-with-quite-a-long-name"));
    let name = "a name that is longer than any terminal of eighty columns could ever show to anybody";
    home.batch(&["submit", "in.jsonl", "--wait", "--name", name]).expect(0);
    let (mut child, mut terminal) = on_terminal(&home, &["list"], &[("NO_COLOR", "1")]);
    let seen = read_until(&mut terminal, "\u{0}");
    assert_eq!(wait(&mut child), 0);
    assert!(seen.contains("✓ completed"), "{seen}");
    assert!(seen.lines().all(|line| line.chars().count() <= 80), "{seen}");
    assert!(!seen.contains('\x1b'), "no colour under NO_COLOR: {seen:?}");
}

#[test]
fn dumb_terminal_gets_plain_lines() {
    let home = Home::new();
    let _server = Server::start(&home, &["--no-worker", "--set", "engine.kind=instant"]);
    home.file("in.jsonl", &items(20, "m"));
    let id = home.batch(&["submit", "in.jsonl"]).expect(0).stdout.trim().to_owned();
    let (mut child, mut terminal) = on_terminal(&home, &["status", &id, "--watch"], &[("TERM", "dumb")]);
    let seen = read_until(&mut terminal, "\n");
    assert!(seen.contains("batch_") && !seen.contains('\x1b'), "{seen:?}");
    signal(&child, rustix::process::Signal::INT);
    read_until(&mut terminal, "to look again");
    assert_eq!(wait(&mut child), 130);
}

#[test]
fn progress_line_tells_how_full_the_kv_cache_is_and_the_card_the_place_in_the_queue() {
    let home = Home::new();
    // One answer for the batch and for the server's health.
    let body = r#"{"id":"batch_01934567890abcdef0123456789abcde","status":"in_progress","paused_at":null,
        "request_counts":{"total":4,"completed":1,"failed":0},"kv_cache_usage":0.716,
        "queue_position":1200,"created_at":1700000000,"expires_at":1700086400}"#;
    let server = answering("200 OK", body);
    let watch = ["status", "01934567890abcdef0123456789abcde", "--wait", "--timeout", "300ms", "--server", &server];
    let said = home.batch(&watch).expect(124);
    assert!(said.stderr.contains("in_progress  1/4 25% · 0 failed · KV 72% · ETA –"), "{said:?}");
    let said = home.batch(&["status", watch[1], "--output", "table", "--server", &server]).expect(0);
    assert!(said.stdout.contains("  queue      place 1,200\n"), "{said:?}");
}
