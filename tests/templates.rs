//! A chat template that the operator names stands in for the model's own.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::harness::batch_binary;
use crate::kill::tiny_model;

fn run(folder: &Path, template: &str) -> Output {
    Command::new(batch_binary())
        .current_dir(folder)
        .args(["--data-dir", "data", "run", "input.jsonl", "-o", "out.jsonl", "--model", "tiny", "--chat-template"])
        .args([template, "--max-model-len", "256"])
        .output()
        .expect("batch starts")
}

fn num_prompt_tokens(folder: &Path) -> u64 {
    let text = std::fs::read_to_string(folder.join("out.jsonl")).expect("the run wrote its file");
    let line: Value = serde_json::from_str(text.trim()).expect("one line");
    line["response"]["body"]["usage"]["prompt_tokens"].as_u64().expect("prompt tokens")
}

// Field report 40 (engine): the remedy that a missing template's error names is there.
#[test]
fn chats_are_rendered_with_the_template_that_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    tiny_model(folder);
    let line = json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 0}});
    std::fs::write(folder.join("input.jsonl"), format!("{line}\n")).expect("input is written");
    std::fs::write(folder.join("short.jinja"), "{{ messages[0].content }}").expect("written");
    std::fs::write(folder.join("long.jinja"), "{{ messages[0].content }} and a good deal more").expect("written");
    std::fs::write(folder.join("broken.jinja"), "{% for %}").expect("written");
    let ended = run(folder, "short.jinja");
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
    let short = num_prompt_tokens(folder);
    // Another template is another run, not the answers of the last one.
    assert_eq!(run(folder, "long.jinja").status.code(), Some(0));
    assert!(num_prompt_tokens(folder) > short + 4, "{short}");
    for (template, says) in [("broken.jinja", "does not parse"), ("missing.jinja", "No such file")] {
        let refused = run(folder, template);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains(template) && said.contains(says), "{said}");
    }
}
