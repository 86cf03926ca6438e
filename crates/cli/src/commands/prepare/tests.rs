use clap::Parser;

use super::*;

#[derive(Parser)]
struct Wrapper {
    #[command(flatten)]
    args: PrepareArgs,
}

/// What preparing `input` gives: lines, and (line, reason) of what cannot be used.
fn prepare(format: InputFormat, input: &[u8], flags: &[&str]) -> (Vec<Value>, Vec<(u64, String)>) {
    let words = ["prepare", "-", "-o", "-", "--model", "m"].iter().chain(flags);
    let args = Wrapper::try_parse_from(words).expect("flags parse").args;
    let mut preparer =
        Preparer::new(&args, args.endpoint.unwrap_or(Endpoint::ChatCompletions)).expect("arguments are valid");
    let (mut lines, mut invalid) = (Vec::new(), Vec::new());
    let mut reader = BufReader::with_capacity(7, input);
    rows::read(format, &mut reader, 1_000, &mut |row| {
        match preparer.line(&row) {
            Ok(line) => lines.push(serde_json::from_str(&line).expect("a line is JSON")),
            Err(reason) => invalid.push((row.line, reason)),
        }
        Ok(())
    })
    .expect("reading works");
    (lines, invalid)
}

fn template(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), text).expect("written");
    file
}

#[test]
fn text_lines_keep_their_physical_numbers() {
    let (lines, invalid) =
        prepare(InputFormat::Text, b"\xef\xbb\xbfone\r\n\n  \ntwo \xe2\x80\xa8 half\nbad \xff\nlast", &[]);
    let ids: Vec<&str> = lines.iter().map(|line| line["custom_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["line-000001", "line-000004", "line-000006"]);
    assert_eq!(lines[0]["body"]["messages"][0]["content"], "one");
    assert_eq!(lines[1]["body"]["messages"][0]["content"], "two \u{2028} half");
    assert_eq!(invalid, [(5, "not UTF-8 at byte 5 of the line".to_owned())]);
}

#[test]
fn csv_row_fills_the_template_and_names_the_id() {
    let file = template("{{ title }}: {{ text }}\n{{ row['a b'] }}");
    let path = file.path().to_str().unwrap();
    let input = b"id,title,text,a b\n7,\"T, one\",\"two\nlines\",x\n8,short\n7,again,text,y\n,no,id,z\n";
    let flags = ["--template", path, "--id-field", "id", "--endpoint", "/v1/completions", "--max-tokens", "2"];
    let (lines, invalid) = prepare(InputFormat::Csv, input, &flags);
    assert_eq!(lines.len(), 1);
    assert_eq!(
        lines[0],
        json!({"custom_id": "7", "method": "POST", "url": "/v1/completions",
            "body": {"model": "m", "prompt": "T, one: two\nlines\nx", "max_tokens": 2}})
    );
    assert_eq!(
        invalid,
        [
            (4, "2 cells where the head has 4".to_owned()),
            (5, "the custom id \"7\" is that of line 2".to_owned()),
            (6, "field \"id\" is empty, so it cannot be the custom id".to_owned()),
        ]
    );
}

#[test]
fn loose_json_lines_are_made_alike() {
    let input = concat!(
        "{\"text\": \"a\", \"n\": 1}\n",
        "\"only a string\"\n",
        "[1]\n",
        "{\"text\": \n",
        "{\"custom_id\": \"x\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {\"model\": \"m\", \"n\": 9007199254740993}}\n",
        "{\"custom_id\": \"y\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"model\": \"m\"}}\n",
    );
    let (lines, invalid) = prepare(InputFormat::Jsonl, input.as_bytes(), &[]);
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[1]["body"]["messages"][0]["content"], "only a string");
    assert_eq!(lines[2]["body"]["n"], 9_007_199_254_740_993_u64);
    assert_eq!(invalid.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3, 4, 6]);
    assert!(invalid[1].1.contains("column"), "{invalid:?}");
}

#[test]
fn missing_names_are_told_with_those_that_there_are() {
    let file = template("{% set own = 1 %}{{ own }}{{ line }}{{ txet }}");
    let flags = ["--template", file.path().to_str().unwrap()];
    let (lines, invalid) = prepare(InputFormat::Jsonl, b"{\"a\": 1, \"text\": \"x\"}\n", &flags);
    assert!(lines.is_empty());
    let (reason, what) = (&invalid[0].1, "the engine names it only as it was built");
    assert!(reason.starts_with("undefined value") && reason.ends_with("(the row has a, text)"), "{reason}");
    assert_eq!((reason.matches("txet").count(), reason.contains("own")), (1, false), "{what}: {reason}");
    for flags in [["--prompt-field", "nope"], ["--id-field", "nope"]] {
        let (_, invalid) = prepare(InputFormat::Jsonl, b"{\"a\": 1, \"text\": \"x\"}\n", &flags);
        assert!(invalid[0].1.starts_with("no field \"nope\" (the row has a, text)"), "{invalid:?}");
    }
}

#[test]
fn only_field_is_the_prompt_when_it_is_that_of_the_first_row() {
    let (lines, invalid) = prepare(InputFormat::Jsonl, b"{\"q\":\"a\"}\n{\"q\":\"b\"}\n{\"other\":\"c\"}\n", &[]);
    assert_eq!(lines.len(), 2);
    assert_eq!(invalid[0].0, 3);
    assert!(invalid[0].1.starts_with("no field \"q\" (the row has other)"), "{invalid:?}");
    // A number is nobody's prompt, and neither is another field than that of the others.
    let (lines, invalid) = prepare(InputFormat::Jsonl, b"{\"prompt\":\"a\"}\n{\"nope\":1}\n", &[]);
    assert_eq!((lines.len(), invalid[0].0), (1, 2));
}

#[test]
fn same_input_gives_the_same_bytes() {
    let input = b"a\nb\n";
    assert_eq!(prepare(InputFormat::Text, input, &[]).0, prepare(InputFormat::Text, input, &[]).0);
}

#[test]
fn too_long_line_is_named_and_the_next_is_read() {
    let mut input = vec![b'x'; 5_000];
    input.extend_from_slice(b"\nfine\n");
    let (lines, invalid) = prepare(InputFormat::Text, &input, &[]);
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["custom_id"], "line-000002");
    assert_eq!(invalid[0].0, 1);
}

#[test]
fn format_is_guessed_from_name_and_bytes() {
    for (name, first, format) in [
        ("a.csv", "", InputFormat::Csv),
        ("a.csv", "id;text\n", InputFormat::Semicolons),
        ("a.csv", "id;x,text\n", InputFormat::Csv),
        ("a.csv", "id\na;b\n", InputFormat::Csv),
        ("a.TSV", "", InputFormat::Tsv),
        ("a.ndjson", "", InputFormat::Jsonl),
        ("-", "  {\"a\":1}", InputFormat::Jsonl),
        ("-", "hello", InputFormat::Text),
        ("notes.txt", "{", InputFormat::Text),
    ] {
        assert_eq!(rows::guess(name, first.as_bytes()), format, "{name}");
    }
}
