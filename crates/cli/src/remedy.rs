//! What to do about requests that ended without an answer, by their code. A refusal of
//! the request itself is the same at every try, so no retry is advised for it.

/// Most characters of a message that are shown.
const MESSAGE_CHARS_MAX: usize = 300;

/// One group of failures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) count: u64,
    /// HTTP status of the first one.
    pub(crate) status: Option<u64>,
    /// Words of the first one.
    pub(crate) message: String,
}

/// Whether another try can end otherwise while file and server stay as they are.
pub(crate) fn can_change(status: Option<u64>) -> bool {
    !status.is_some_and(|status| (400..500).contains(&status) && !matches!(status, 404 | 408 | 409 | 425 | 429 | 499))
}

/// What to do, in words; `again` is the command that runs this group again.
pub(crate) fn of(code: &str, status: Option<u64>, again: &str) -> String {
    match code {
        "chat_template_missing" => format!(
            "the model has no chat template: make the lines with `batch prepare --endpoint /v1/completions`, or start the engine with --chat-template FILE and then: {again}"
        ),
        "context_length_exceeded" => {
            format!("shorten the prompts, or start the engine with a larger --max-model-len and then: {again}")
        }
        _ if can_change(status) => format!("run again: {again}"),
        _ => "correct these lines and submit them anew: the same request is refused each time".to_owned(),
    }
}

/// The start of an engine's words, on one line.
pub(crate) fn shown(message: &str) -> String {
    let line = crate::output::escape(message);
    match line.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_is_advised_only_where_it_can_help() {
        let again = "batch retry b --error-code c";
        for (code, status) in [("unknown_parameter", Some(400)), ("too_odd", Some(422)), ("http_413", Some(413))] {
            assert!(!of(code, status, again).contains(again), "{code}");
        }
        for (code, status) in [("expired", None), ("engine_unavailable", Some(503)), ("rate_limit", Some(429))] {
            assert_eq!(of(code, status, again), format!("run again: {again}"), "{code}");
        }
        let template = of("chat_template_missing", Some(400), again);
        assert!(template.contains("--endpoint /v1/completions") && template.ends_with(again), "{template}");
    }
}
