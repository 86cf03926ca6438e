//! Intake's rules as tables, at their limits, over any chunk edges and any cut
//! into pieces.

use bytes::Bytes;
use overnight_blobs::index::{self, Runs};
use overnight_blobs::sha::Sha256;
use overnight_blobs::{Blobs, ObjectName};
use overnight_store::NewShard;
use overnight_types::{Endpoint, FileId, JobId, Limits};
use proptest::prelude::*;

use super::*;
use crate::intake::findings::Finding;

fn options() -> IntakeOptions {
    IntakeOptions::new(Endpoint::ChatCompletions, KnownModels::Named(vec!["m".into(), "n".into()]))
}

fn line(custom_id: &str) -> String {
    format!(
        r#"{{"custom_id":{custom_id},"method":"POST","url":"/v1/chat/completions","body":{{"model":"m","messages":[]}}}}"#
    )
}

fn quoted(text: &str, times: usize) -> String {
    format!("\"{}\"", text.repeat(times))
}

async fn run(input: impl Into<Vec<u8>>, options: IntakeOptions) -> ValidationReport {
    validate(&Source::Memory(Bytes::from(input.into())), options, None).await.unwrap()
}

type Wanted<'a> = (&'a str, Option<u64>, Option<&'a str>);

fn found(findings: &Findings) -> Vec<Wanted<'_>> {
    findings.kept.iter().map(|kept| (kept.code.as_str(), kept.line, kept.param.as_deref())).collect()
}

// Field reports 6, 10, 12, 13, 18 and 19: one input per code, with line and param.
#[tokio::test]
async fn every_code_has_its_line_and_param() {
    let good = line("\"good\"");
    let cases: Vec<(String, Vec<Wanted<'_>>)> = vec![
        (good.clone(), vec![]),
        ("{".into(), vec![("invalid_json_line", Some(1), None)]),
        (format!("{good}\n\n[1,2]"), vec![("invalid_json_line", Some(3), None)]),
        (
            format!("{good}\n\"x\"\nnull"),
            vec![("invalid_json_line", Some(2), None), ("invalid_json_line", Some(3), None)],
        ),
        (format!("{good} x"), vec![("invalid_json_line", Some(1), None)]),
        (good.replace("{\"custom_id\"", "{\"url\":\"\",\"custom_id\""), vec![("invalid_json_line", Some(1), None)]),
        (line("1"), vec![("invalid_request", Some(1), Some("custom_id"))]),
        (line("null"), vec![("invalid_request", Some(1), Some("custom_id"))]),
        (line("\"\""), vec![("invalid_request", Some(1), Some("custom_id"))]),
        (good.replace("custom_id", "custom"), vec![("invalid_request", Some(1), Some("custom_id"))]),
        (good.replace("POST", "post"), vec![("invalid_request", Some(1), Some("method"))]),
        (good.replace("\"POST\"", "[]"), vec![("invalid_request", Some(1), Some("method"))]),
        (good.replace("chat/completions", "completions"), vec![("url_mismatch", Some(1), Some("url"))]),
        (good.replace("completions\"", "completions/\""), vec![("url_mismatch", Some(1), Some("url"))]),
        (good.replace("/v1/chat", "http://x/v1/chat"), vec![("url_mismatch", Some(1), Some("url"))]),
        (good.replace("\"url\"", "\"uri\""), vec![("url_mismatch", Some(1), Some("url"))]),
        (
            good.replace("{\"model\":\"m\",\"messages\":[]}", "\"text\""),
            vec![("invalid_request", Some(1), Some("body"))],
        ),
        (good.replace("\"body\"", "\"bod\""), vec![("invalid_request", Some(1), Some("body"))]),
        (good.replace("\"model\":\"m\",", ""), vec![("invalid_request", Some(1), Some("body.model"))]),
        (good.replace("\"model\":\"m\"", "\"model\":7"), vec![("invalid_request", Some(1), Some("body.model"))]),
        // A name is kept in rows: 1,024 bytes may be one, more may not.
        (good.replace("\"m\"", &quoted("m", 1_024)), vec![("model_not_found", Some(1), Some("body.model"))]),
        (good.replace("\"m\"", &quoted("m", 1_025)), vec![("invalid_request", Some(1), Some("body.model"))]),
        (good.replace("[]", "[],\"stream\":true"), vec![("invalid_request", Some(1), Some("body.stream"))]),
        (good.replace("[]", "[],\"stream\":0"), vec![("invalid_request", Some(1), Some("body.stream"))]),
        (good.replace("[]", "[],\"stream\":null"), vec![]),
        (good.replace("[]", "[],\"stream\":false"), vec![]),
        (
            format!("{good}\n{}", line("\"b\"").replace("\"m\"", "\"n\"")),
            vec![("model_mismatch", Some(2), Some("body.model"))],
        ),
        (format!("\n{}", good.replace("\"m\"", "\"other\"")), vec![("model_not_found", Some(2), Some("body.model"))]),
        (format!("{good}\n\n{}\n{good}", line("\"b\"")), vec![("duplicate_custom_id", Some(4), Some("custom_id"))]),
        (format!("{good}\n{}", line("\"\\u0067ood\"")), vec![("duplicate_custom_id", Some(2), Some("custom_id"))]),
        ("".into(), vec![("empty_file", None, None)]),
        ("\n \t\r\n\n".into(), vec![("empty_file", None, None)]),
        ("\u{feff}".into(), vec![("empty_file", None, None)]),
    ];
    for (input, wanted) in cases {
        let report = run(input.clone(), options()).await;
        assert_eq!(found(&report.findings), wanted, "{input}");
        assert_eq!(report.findings.total, wanted.len() as u64);
    }
}

#[tokio::test]
async fn one_line_tells_all_its_faults_and_the_rest_is_read_on() {
    let bad = r#"{"custom_id":7,"method":"GET","url":"/x","body":{"stream":true}}"#;
    let report = run(format!("{bad}\nnot json\n{}", line("\"a\"")), options()).await;
    let params: Vec<_> =
        report.findings.kept.iter().map(|kept| (kept.line, kept.param.clone().unwrap_or_default())).collect();
    let wanted = [
        (Some(1), "custom_id"),
        (Some(1), "method"),
        (Some(1), "url"),
        (Some(1), "body.model"),
        (Some(1), "body.stream"),
        (Some(2), ""),
    ];
    assert_eq!(params, wanted.map(|(line, param)| (line, param.to_owned())));
    assert_eq!(report.requests, 3);
}

// Field reports 1, 2, 4, 8 and 17.
#[tokio::test]
async fn odd_but_sound_files_are_taken_with_physical_line_numbers() {
    let (a, b) = (line("\"a\""), line("\"b \u{2028}\u{2029}\u{85}\""));
    let report = run(format!("\u{feff}{a}\r\n\r\n \t\n{b}\r\nbad"), options()).await;
    assert_eq!(report.requests, 3);
    assert_eq!(found(&report.findings), [("invalid_json_line", Some(5), None)]);
    for sound in [format!("{a}\n{b}"), format!("{a}\r\n{b}\r\n"), format!("\u{feff}\n{a}\n\n\n{b}\n\n")] {
        let report = run(sound, options()).await;
        assert!(report.is_valid(), "{:?}", report.findings);
        assert_eq!(report.requests, 2);
    }
}

// Field report 3: nobody can guess the cause of "expected value at column 1".
#[tokio::test]
async fn mark_in_mid_file_is_named_with_its_place() {
    let a = line("\"a\"");
    let report = run(format!("{a}\n\u{feff}{}", line("\"b\"")), options()).await;
    let [Finding { line: Some(2), message, .. }] = &report.findings.kept[..] else { panic!("{:?}", report.findings) };
    assert!(message.contains("BOM") && message.contains("byte 1 of the line"), "{message}");
    assert!(message.contains(&format!("(byte {} of the file)", a.len() + 2)), "{message}");
    let inside = run(line("\"\u{feff}\""), options()).await;
    assert!(inside.is_valid(), "inside a string it is an ordinary character");
}

#[tokio::test]
async fn invalid_utf8_is_refused_with_its_byte() {
    let mut input = format!("\u{feff}{}\n", line("\"a\"")).into_bytes();
    let start = input.len();
    input.extend_from_slice(b"{\"ignored\":\"\xff\"}");
    let report = run(input, options()).await;
    let [Finding { line: Some(2), message, .. }] = &report.findings.kept[..] else { panic!("{:?}", report.findings) };
    assert_eq!(message, &format!("invalid UTF-8 at byte 13 of the line (byte {} of the file)", start + 13));
    // A mark before the first line does not move its bytes.
    let report = run(b"\xef\xbb\xbf{\"a\":\"\xff\"}".to_vec(), options()).await;
    assert!(
        report.findings.kept[0].message.contains("byte 7 of the line (byte 10 of the file)"),
        "{:?}",
        report.findings
    );
}

// Field reports 14, 15 and 16.
#[tokio::test]
async fn any_custom_id_that_is_a_string_works() {
    let long = format!("\"{}\"", "x".repeat(10_000));
    let ids = [
        "\" \"",
        "\"a\"",
        "\"A\"",
        "\"a \"",
        "\"\u{1f600}\"",
        "\"\\n\"",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"\\ud801\"",
        "\"\\udc00\"",
        "\"\\ufffd\"",
        "\"1\"",
        "\"null\"",
        "\"\u{2028}\"",
        "\"\\\"\"",
        "\"..\\/..\\/etc\"",
        &long,
    ];
    let input: Vec<String> = ids.iter().map(|id| line(id)).collect();
    let report = run(input.join("\n"), options()).await;
    assert!(report.is_valid(), "{:?}", report.findings);
    assert_eq!(report.requests, ids.len() as u64);
    // Equal as decoded text: each of these is the same id in another spelling.
    for (one, other) in [("\"\\ud83d\\ude00\"", "\"\u{1f600}\""), ("\"\\ud800\"", "\"\\uD800\""), ("\"\\/\"", "\"/\"")]
    {
        let report = run(format!("{}\n{}", line(one), line(other)), options()).await;
        assert_eq!(found(&report.findings), [("duplicate_custom_id", Some(2), Some("custom_id"))], "{one} {other}");
    }
}

#[tokio::test]
async fn body_is_not_judged() {
    let body = r#"{"model":"m","n":9007199254740993,"n":1e999,"x":"\ud800\u0000","messages":"not even a list"}"#;
    let input = line("\"a\"").replace(r#"{"model":"m","messages":[]}"#, body);
    assert!(run(input, options()).await.is_valid());
}

#[tokio::test]
async fn typed_parse_of_bodies_is_reported_apart() {
    struct NoMessages;
    impl BodyCheck for NoMessages {
        fn check(&self, _: Endpoint, body: &[u8]) -> Result<(), BodyFault> {
            let empty = memchr::memmem::find(body, b"\"messages\":[]").is_some();
            let fault = BodyFault { code: None, param: Some("messages".into()), message: "empty".into() };
            if empty { Err(fault) } else { Ok(()) }
        }
    }
    let input = format!("{}\n\n{}", line("\"a\"").replace("[]", "[{}]"), line("\"b\""));
    let report = validate(&Source::Memory(input.into()), options(), Some(&NoMessages)).await.unwrap();
    assert!(report.is_valid(), "a batch with such a line runs; the request gets its 400");
    assert_eq!(report.num_body_findings, 1);
    assert_eq!((report.body_findings[0].line, report.body_findings[0].fault.param.as_deref()), (3, Some("messages")));
}

// Field report 5, and the limits of section 11 at N and N + 1.
#[tokio::test]
async fn limits_take_n_and_refuse_one_more() {
    let a = line("\"a\"");
    for (over, wanted) in [(0, vec![]), (1, vec![("invalid_json_line", Some(1), None)])] {
        let limits = Limits { line_bytes_max: a.len() as u64 - over, ..Limits::default() };
        let report = run(format!("{a}\r\n"), IntakeOptions { limits, ..options() }).await;
        assert_eq!(found(&report.findings), wanted);
        if over == 1 {
            assert!(report.findings.kept[0].message.contains(&(a.len() - 1).to_string()), "the limit is named");
        }
    }
    let three = format!("{a}\n{}\n{}", line("\"b\""), line("\"c\""));
    for (limit, wanted) in [(3, vec![]), (2, vec![("too_many_tasks", None, None)])] {
        let limits = Limits { job_items_max: Some(limit), ..Limits::default() };
        let report = run(three.clone(), IntakeOptions { limits, ..options() }).await;
        assert_eq!(found(&report.findings), wanted);
    }
    for (num_errors, kept) in [(1_000, 1_000), (1_001, 1_000)] {
        let report = run("x\n".repeat(num_errors), options()).await;
        let findings = &report.findings;
        assert_eq!((findings.kept.len(), findings.total), (kept, num_errors as u64));
        assert_eq!(findings.counts.values().sum::<u64>(), findings.total);
    }
}

#[tokio::test]
async fn line_over_the_limit_costs_no_other_line() {
    let limits = Limits { line_bytes_max: 200, ..Limits::default() };
    let input = format!("{}\n{}\n{}", line("\"a\""), "x".repeat(5_000_000), line("\"b\""));
    let report = run(input, IntakeOptions { limits, ..options() }).await;
    assert_eq!(found(&report.findings), [("invalid_json_line", Some(2), None)]);
    assert_eq!(report.requests, 3);
}

#[tokio::test]
async fn input_that_changed_or_vanished_is_told_apart_from_its_lines() {
    let blobs = Blobs::memory();
    let name = ObjectName::file(FileId::new());
    let bytes = Bytes::from(format!("{}\nbad", line("\"a\"")));
    blobs.put(&name, bytes.clone()).await.unwrap();
    let expected = Expected { bytes: bytes.len() as u64, sha256: Sha256::of(&bytes) };
    let cases = [
        (Some(expected), vec![("invalid_json_line", Some(2), None)]),
        (Some(Expected { sha256: [0; 32], ..expected }), vec![("input_modified", None, None)]),
        (Some(Expected { bytes: 3, ..expected }), vec![("input_modified", None, None)]),
    ];
    let source = Source::Object(blobs.clone(), name);
    for (expected, wanted) in cases {
        let report = validate(&source, IntakeOptions { expected, ..options() }, None).await.unwrap();
        assert_eq!(found(&report.findings), wanted);
    }
    blobs.delete(&name).await.unwrap();
    let report = validate(&source, options(), None).await.unwrap();
    assert_eq!(found(&report.findings), [("input_modified", None, None)]);
}

#[tokio::test]
async fn input_without_permission_is_said_so() {
    let err = overnight_blobs::Error::Denied {
        doing: "read",
        name: "files/x".into(),
        source: std::io::Error::from(std::io::ErrorKind::PermissionDenied).into(),
    };
    let findings = unreadable(err.into()).unwrap();
    assert_eq!(found(&findings), [("input_no_permissions", None, None)]);
}

#[tokio::test]
async fn file_of_this_machine_validates_as_its_object_would() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.jsonl");
    let input: String = (0..30_000).map(|i| line(&format!("\"{i}\"")) + "\n").collect::<String>() + "bad";
    assert!(input.len() > 2 << 20, "more than one read");
    std::fs::write(&path, &input).unwrap();
    let from_file = validate(&Source::Path(path.clone()), options(), None).await.unwrap();
    assert_eq!(from_file, run(input, options()).await);
    assert_eq!(from_file.requests, 30_001);
    assert!(validate(&Source::Path(path.with_extension("no")), options(), None).await.is_err());
}

// Field report 10: over the whole file, across runs.
#[tokio::test]
async fn duplicates_are_found_across_runs_with_both_lines() {
    let mut lines: Vec<String> = (0..50).map(|i| line(&format!("\"{i}\""))).collect();
    lines[40] = line("\"3\"");
    lines[45] = line("\"\\u0033\"");
    lines[49] = line("\"44\"");
    for run_items_max in [1, 2, 7, 50, 51] {
        let report = run(lines.join("\n"), IntakeOptions { run_items_max, ..options() }).await;
        let wanted = [41, 46, 50].map(|line| ("duplicate_custom_id", Some(line), Some("custom_id")));
        assert_eq!(found(&report.findings), wanted, "{run_items_max}");
        assert!(report.findings.kept[0].message.contains("in line 4"), "{:?}", report.findings.kept[0]);
        assert!(report.findings.kept[1].message.contains("in line 4"), "the first line, not the one before");
    }
}

#[tokio::test]
async fn many_duplicates_are_all_counted_and_the_first_are_kept() {
    let input = (0..3_000).map(|i| line(&format!("\"{}\"", i % 500))).collect::<Vec<_>>().join("\n");
    let report = run(input, options()).await;
    assert_eq!((report.findings.total, report.findings.kept.len()), (2_500, 1_000));
    let lines: Vec<_> = report.findings.kept.iter().map(|kept| kept.line.unwrap()).collect();
    assert_eq!(lines, (501..1_501).collect::<Vec<_>>());
}

// Two ids may have one hash and be different: the lines decide.
#[tokio::test]
async fn equal_hashes_alone_are_no_duplicate() {
    let input = [line("\"a\""), line("\"b\""), line("\"b\""), line("\"a\"")].join("\n");
    let source = Source::Memory(input.clone().into());
    let mut pass = Pass::new(JobId::new(), options());
    let piece = pass.read_piece(&source, None).await.unwrap();
    let twins = index::Twins { kept: (1..4).map(|later| index::Twin { later, first: 0, hash: 5 }).collect(), total: 3 };
    let duplicates = duplicates::verify(&source, &piece.shards, twins, &Limits::default()).await.unwrap();
    let findings = pass.finish(&KnownModels::Any, duplicates);
    assert_eq!(found(&findings), [3, 4].map(|line| ("duplicate_custom_id", Some(line), Some("custom_id"))));
    assert!(findings.kept[0].message.contains("in line 2"), "{:?}", findings.kept[0]);
}

/// Runs a pass that is saved and taken up again after each piece, as by kills.
async fn run_in_pieces(job: JobId, input: &Bytes, options: &IntakeOptions) -> (Findings, Vec<NewShard>, Bytes) {
    let (source, blobs) = (Source::Memory(input.clone()), Blobs::memory());
    let mut saved: Option<(u64, String)> = None;
    let (mut shards, mut written) = (Vec::new(), Vec::new());
    loop {
        let (offset, notes) = saved.as_ref().map_or((0, None), |(offset, notes)| (*offset, Some(notes.as_str())));
        let mut pass = Pass::resume(job, options.clone(), offset, notes).unwrap();
        let mut piece = pass.read_piece(&source, None).await.unwrap();
        shards.append(&mut piece.shards);
        let run = index::encode_run(&mut piece.entries);
        if piece.at_end {
            let out = ObjectName::index(job);
            let runs = Runs { blobs: &blobs, written, last: &piece.entries };
            let twins = index::merge(runs, Some((&blobs, out)), 1_000).await.unwrap();
            let duplicates = duplicates::verify(&source, &shards, twins, &options.limits).await.unwrap();
            let findings = pass.finish(&options.models, duplicates);
            assert_eq!(pass.num_shards() as usize, shards.len());
            return (findings, shards, blobs.read(&out).await.unwrap());
        }
        let name = ObjectName::intake_run(job, written.len() as u32);
        written.push((name, run.len() as u64));
        blobs.put(&name, run).await.unwrap();
        pass.add_run(0);
        saved = Some((pass.offset(), pass.save()));
    }
}

// Killed after each piece and going on, whatever the pieces: the same errors,
// shards and index.
#[tokio::test]
async fn intake_that_is_killed_after_each_piece_ends_the_same() {
    let mut lines: Vec<String> = (0..200).map(|i| line(&format!("\"{}\"", i % 190))).collect();
    lines[5] = "bad".into();
    lines[60] = String::new();
    lines[150] = line("\"x\"").replace("\"m\"", "\"n\"");
    let input = Bytes::from(format!("\u{feff}{}", lines.join("\r\n")));
    let limits = Limits { shard_items_max: 16, small_shard_items_max: 4, small_file_shards: 8, ..Limits::default() };
    let expected = Some(Expected { bytes: input.len() as u64, sha256: Sha256::of(&input) });
    let options = IntakeOptions { limits, expected, ..options() };
    let job = JobId::new();
    let whole = run_in_pieces(job, &input, &options).await;
    assert_eq!(whole.0.counts[&IntakeCode::DuplicateCustomId], 9);
    for (run_items_max, piece_bytes_max) in [(1, u64::MAX), (3, u64::MAX), (1_000, 1), (1_000, 700), (40, 5_000)] {
        let pieces = IntakeOptions { run_items_max, piece_bytes_max, ..options.clone() };
        assert_eq!(run_in_pieces(job, &input, &pieces).await, whole, "{run_items_max} items, {piece_bytes_max} bytes");
    }
}

#[test]
fn notes_of_another_place_are_not_taken() {
    let pass = Pass::new(JobId::new(), options());
    let notes = pass.save();
    assert!(Pass::resume(JobId::new(), options(), 0, Some(&notes)).is_some());
    assert!(Pass::resume(JobId::new(), options(), 5, Some(&notes)).is_none());
    assert!(Pass::resume(JobId::new(), options(), 5, None).is_none());
    assert!(Pass::resume(JobId::new(), options(), 0, Some("{}")).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Chunk edges anywhere, also inside a character: the same result.
    #[test]
    fn chunk_edges_change_nothing(
        picks in proptest::collection::vec(0usize..9, 0..20),
        chunk_bytes in 1u64..60,
    ) {
        let lines = [
            line("\"a\""), line("\"\u{1f600}\u{2028}\""), line("\"a\""), "".into(), " \t".into(), "bad\u{feff}".into(),
            line("\"\\ud800\""), line("7"), line("\"z\"").replace("\"m\"", "\"n\""),
        ];
        let input: Vec<&str> = picks.iter().map(|pick| lines[*pick].as_str()).collect();
        let mut input = format!("\u{feff}{}", input.join("\r\n")).into_bytes();
        input.extend_from_slice(b"\n\xe2\x82");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let whole = run(input.clone(), options()).await;
            let blobs = Blobs::memory().with_piece_bytes(chunk_bytes);
            let name = ObjectName::file(FileId::new());
            blobs.put(&name, input.into()).await.unwrap();
            let chunked = validate(&Source::Object(blobs, name), options(), None).await.unwrap();
            assert_eq!(chunked, whole);
        });
    }
}
