//! Rendered chats against goldens of transformers (goldens/text/make_chats.py).

mod fetched;

use std::path::{Path, PathBuf};

use overnight_engine::text::{ChatPrompt, TemplateError, Text};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use fetched::fetched;

#[derive(Deserialize)]
struct Case {
    /// A file of goldens/text/templates, or a fetched folder with the family's own template.
    from: String,
    messages: Vec<Value>,
    tools: Option<Value>,
    kwargs: Option<Map<String, Value>>,
    #[serde(default = "yes")]
    add_generation_prompt: bool,
    #[serde(default)]
    continue_final_message: bool,
    rendered: Option<String>,
    raises: Option<String>,
}

fn yes() -> bool {
    true
}

fn goldens() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/text")
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&std::fs::read(goldens().join("chats.json")).unwrap()).unwrap()
}

/// A folder with a tokenizer of two special tokens and nothing else.
fn write_bare(folder: &Path) {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false},
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1}, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), r#"{"bos_token": "<s>", "eos_token": "</s>"}"#).unwrap();
}

fn bare() -> Text {
    let folder = tempfile::tempdir().unwrap();
    write_bare(folder.path());
    Text::from_dir(folder.path()).unwrap()
}

#[track_caller]
fn assert_renders(text: &Text, case: &Case) {
    let rendered = text.render_chat(&ChatPrompt {
        messages: &case.messages,
        tools: case.tools.as_ref(),
        add_generation_prompt: case.add_generation_prompt,
        continue_final_message: case.continue_final_message,
        kwargs: case.kwargs.as_ref(),
    });
    match (&case.rendered, &case.raises) {
        (Some(expected), _) => assert_eq!(rendered.as_ref(), Ok(expected), "{}", case.from),
        (None, Some(part)) => {
            assert!(matches!(&rendered, Err(TemplateError::Raised(message)) if message.contains(part)), "{rendered:?}");
        }
        (None, None) => panic!("a case expects something"),
    }
}

// Field reports 39 and 40: minijinja#815; TGI#2987, llama.cpp#11402.
#[test]
fn family_constructs_and_generation_blocks_render_as_the_reference() {
    let mut num_rendered = 0;
    for case in cases().iter().filter(|case| case.from.ends_with(".jinja")) {
        let source = std::fs::read_to_string(goldens().join("templates").join(&case.from)).unwrap();
        assert_renders(&bare().with_chat_template(source).unwrap(), case);
        num_rendered += 1;
    }
    assert!(num_rendered >= 10, "{num_rendered}");
}

// Field report 40.
#[test]
fn shipped_templates_render_as_the_reference() {
    for family in ["gemma3", "qwen3", "llama3", "llama3_1", "deepseek_v3"] {
        let Some(fetched) = fetched("tokenizers", "OVERNIGHT_TEST_TOKENIZERS", family) else { continue };
        // The template and the names of special tokens come from the family's own files.
        let bare = tempfile::tempdir().unwrap();
        write_bare(bare.path());
        let config: Value =
            serde_json::from_slice(&std::fs::read(fetched.join("tokenizer_config.json")).unwrap()).unwrap();
        let name = |key: &str| config[key].as_str().or(config[key]["content"].as_str()).unwrap_or("<none>").to_owned();
        let tokenizer = std::fs::read_to_string(bare.path().join("tokenizer.json")).unwrap();
        let tokenizer = tokenizer.replace("\"<s>\"", &Value::from(name("bos_token")).to_string());
        let tokenizer = tokenizer.replace("\"</s>\"", &Value::from(name("eos_token")).to_string());
        std::fs::write(bare.path().join("tokenizer.json"), tokenizer).unwrap();
        std::fs::write(bare.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let text = Text::from_dir(bare.path()).unwrap();
        cases().iter().filter(|case| case.from == family).for_each(|case| assert_renders(&text, case));
    }
}

// Field report 40: a missing template is an error that names the remedy, not a guess.
#[test]
fn missing_template_names_the_remedy() {
    let text = bare();
    assert!(!text.has_chat_template());
    let messages = [json!({"role": "user", "content": "hi"})];
    let prompt = ChatPrompt {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    };
    let err = text.render_chat(&prompt).unwrap_err();
    assert_eq!(err, TemplateError::Missing);
    assert!(err.to_string().contains("/v1/completions") && err.to_string().contains("--chat-template"), "{err}");
}

#[test]
fn faults_of_a_template_fail_its_chat_and_nothing_else() {
    let messages = [json!({"role": "user", "content": "hi"})];
    let prompt = ChatPrompt {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    };
    let render = |source: &str| bare().with_chat_template(source.to_owned()).unwrap().render_chat(&prompt);
    assert!(matches!(render("{{ messages[0].content.nothing.further }}"), Err(TemplateError::Render(_))));
    assert!(matches!(render("{{ strftime_now('%Q') }}"), Err(TemplateError::Render(_))));
    assert!(matches!(render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), Err(TemplateError::Render(_))));
    assert_eq!(render("{{ strftime_now('%Y') | length }}"), Ok("4".to_owned()));
    assert!(matches!(bare().with_chat_template("{% for %}".to_owned()), Err(TemplateError::Parse(_))));
}
