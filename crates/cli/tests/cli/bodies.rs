//! What is told of bodies and of failures before and after the work.

use serde_json::Value;

use crate::harness::{Home, Server, answering, items};

/// Three lines, two of them with a fault that every model refuses.
fn faulty() -> String {
    let (spelt, range) = ("\"temperture\":1,\"max_tokens\":1", "\"max_tokens\":-1");
    let mut lines: Vec<String> = items(3, "m").lines().map(str::to_owned).collect();
    lines[1] = lines[1].replace("\"max_tokens\":1", spelt);
    lines[2] = lines[2].replace("\"max_tokens\":1", range);
    lines.join("\n") + "\n"
}

// Decision 0008: a misspelt parameter is seen in the evening.
#[test]
fn faults_of_bodies_are_told_before_anything_runs() {
    let home = Home::new();
    home.file("in.jsonl", &faulty());
    let said = home.batch(&["validate", "in.jsonl"]).expect(6);
    insta::assert_snapshot!("validate_bodies", said.stderr);
    let said = home.batch(&["validate", "in.jsonl", "--json"]).expect(6);
    let report = said.json();
    assert_eq!((&report["valid"], &report["body_errors"]["total"]), (&false.into(), &2.into()), "{report}");
    assert_eq!(report["body_errors"]["data"][0]["param"], "temperture");
    assert!(report["unchecked"].as_str().is_some_and(|text| text.contains("no model is loaded")), "{report}");
    // The batch would run, so it is sent; with a word of warning.
    let said = home.batch(&["submit", "in.jsonl", "--dry-run"]).expect(0);
    assert!(said.stderr.contains("warning: 2 of 3 requests would end with HTTP 400"), "{said:?}");
    assert!(said.stderr.contains("line 2: unknown parameter: temperture (unknown_parameter)"), "{said:?}");
    // A remote engine takes bodies as they are.
    let said = home.batch(&["validate", "in.jsonl", "--set", "engine.kind=instant"]).expect(0);
    assert!(said.stderr.contains("not checked: bodies"), "{said:?}");
    let said = home.batch(&["run", "in.jsonl", "-o", "out.jsonl", "--set", "engine.kind=instant"]).expect(0);
    assert!(!said.stderr.contains("warning"), "{said:?}");
}

#[test]
fn run_says_why_requests_failed_and_what_helps() {
    let home = Home::new();
    home.file("in.jsonl", &items(3, "m"));
    for (status, code, help) in [
        ("400 Bad Request", "too_odd", "the same request is refused each time"),
        ("400 Bad Request", "chat_template_missing", "--endpoint /v1/completions"),
        ("404 Not Found", "model_gone", "run again: the same command with --retry-failed"),
    ] {
        let body = format!(r#"{{"error":{{"message":"because","type":"x","param":null,"code":"{code}"}}}}"#);
        let urls = format!("engine.base_urls=[\"{}\"]", answering(status, body.leak()));
        let run =
            ["run", "in.jsonl", "-o", "out.jsonl", "--data-dir", code, "--set", "engine.kind=openai", "--set", &urls];
        let said = home.batch(&run).expect(3);
        assert!(said.stderr.contains(&format!("  3 {code}: because\n")), "{said:?}");
        assert!(said.stderr.contains(help), "{code}: {said:?}");
        assert_eq!(said.stderr.contains("--retry-failed"), code != "too_odd", "{said:?}");
        let again = home.batch(&[&run[..], &["--json"]].concat()).expect(3).json();
        assert_eq!(again["error_codes"][code], 3, "{again}");
    }
}

#[test]
fn errors_advise_no_retry_that_must_fail_again() {
    let home = Home::new();
    let body = r#"{"error":{"message":"no","type":"x","param":null,"code":"too_odd"}}"#;
    let urls = format!("engine.base_urls=[\"{}\"]", answering("400 Bad Request", body));
    let _server = Server::start(&home, &["--set", "engine.kind=openai", "--set", &urls]);
    home.file("in.jsonl", &items(2, "m"));
    let said = home.batch(&["submit", "in.jsonl", "--wait"]).expect(3);
    assert!(said.stderr.contains("next: batch errors") && !said.stderr.contains("retry"), "{said:?}");
    let said = home.batch(&["errors", "last"]).expect(0);
    assert!(said.stderr.contains("too_odd: correct these lines") && !said.stderr.contains("batch retry"), "{said:?}");
    assert_eq!(home.batch(&["errors", "last", "--json"]).expect(0).json()[0]["retry"], Value::Null);
    // What is asked for and not there names what there is.
    let said = home.batch(&["retry", "last", "--error-code", "nope"]).expect(5);
    assert!(said.stderr.contains("its codes: too_odd"), "{said:?}");
    home.batch(&["retry", "last", "--ids", "nobody"]).expect(5);
}

/// A folder of a model, as `prepare` looks at it.
fn model(home: &Home, template: Option<&str>) {
    std::fs::create_dir_all(home.path().join("base")).expect("made");
    let config = serde_json::json!({"chat_template": template}).to_string();
    home.file("base/tokenizer_config.json", &config);
}

#[test]
fn lines_are_for_an_endpoint_that_the_model_can_answer() {
    let home = Home::new();
    home.file("rows.txt", "a\n");
    let url = |more: &[&str]| {
        let all = [&["prepare", "rows.txt", "-o", "-", "--model", "./base"][..], more].concat();
        let said = home.batch(&all).expect(0);
        let line: Value = serde_json::from_str(&said.stdout).expect("one line");
        (line["url"].as_str().expect("a url").to_owned(), said.stderr)
    };
    let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
    assert_eq!(url(&[]).0, chat, "of a model that is not here nothing is known");
    model(&home, None);
    let (chosen, said) = url(&[]);
    assert!(chosen == completions && said.contains("no chat template"), "{said}");
    let (chosen, said) = url(&["--endpoint", chat]);
    assert!(chosen == chat && said.contains("warning: ./base has no chat template"), "{said}");
    home.file("T.jinja", "{{ messages }}");
    assert_eq!(url(&["--set", "engine.chat_template=T.jinja"]).0, chat);
    home.batch(&["prepare", "rows.txt", "-o", "-", "--model", "./base", "--system", "be kind"]).expect(2);
    model(&home, Some("{{ messages }}"));
    assert_eq!(url(&[]), (chat.to_owned(), "1 line in -\n".to_owned()));
}
