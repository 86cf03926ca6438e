//! What a command ends with when it does not succeed: an exit code, what went
//! wrong, where, and what to do. Nothing here prints; `main` does, once.

use std::fmt::Write as _;

use crate::output::escape;

/// The exit codes; `batch help exit-codes` prints this table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// It worked.
    Success = 0,
    /// Failure without a better code.
    Failure = 1,
    /// Wrong usage: flags, arguments or settings.
    Usage = 2,
    /// The job finished, but some requests failed.
    RequestsFailed = 3,
    /// The server wants an API key.
    Auth = 4,
    /// No such thing.
    NotFound = 5,
    /// The input is not valid.
    InvalidInput = 6,
    /// The server cannot be reached.
    Unreachable = 7,
    /// The job failed, expired or was cancelled.
    JobFailed = 8,
    /// The engine hangs, or broke down and could not be built anew.
    EngineBroken = 9,
    /// Waited until the time limit.
    TimedOut = 124,
    /// Interrupted by Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// Every code with its meaning, for `batch help exit-codes`.
    pub(crate) const TABLE: &'static [(Exit, &'static str)] = &[
        (Exit::Success, "success"),
        (Exit::Failure, "failure without a better code"),
        (Exit::Usage, "wrong usage"),
        (
            Exit::RequestsFailed,
            "finished, but some requests failed (only with --exit-status or --wait; always for `batch run`)",
        ),
        (Exit::Auth, "authentication needed"),
        (Exit::NotFound, "not found"),
        (Exit::InvalidInput, "input invalid"),
        (Exit::Unreachable, "server not reachable"),
        (Exit::JobFailed, "the batch failed, expired or was cancelled (only with --exit-status or --wait)"),
        (
            Exit::EngineBroken,
            "the engine hangs, or broke down and could not be built anew; finished work is kept, start again",
        ),
        (Exit::TimedOut, "waited until the time limit"),
        (Exit::Interrupted, "interrupted; the batch goes on on the server, and the command says so"),
    ];

    /// The stable word that stands as `error.code` in JSON when nothing closer is known.
    const fn code(self) -> &'static str {
        match self {
            Exit::Success => "ok",
            Exit::Failure => "failed",
            Exit::Usage => "usage",
            Exit::RequestsFailed => "requests_failed",
            Exit::Auth => "authentication_needed",
            Exit::NotFound => "not_found",
            Exit::InvalidInput => "invalid_input",
            Exit::Unreachable => "server_unreachable",
            Exit::JobFailed => "batch_not_completed",
            Exit::EngineBroken => "engine_broken",
            Exit::TimedOut => "timed_out",
            Exit::Interrupted => "interrupted",
        }
    }
}

/// The end of a command that did not succeed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    silent: bool,
    refusal: bool,
    /// Apart, so that a result stays small.
    said: Box<Said>,
}

#[derive(Debug, Default)]
struct Said {
    code: Option<String>,
    message: String,
    notes: Vec<String>,
    hint: Option<String>,
    request_id: Option<String>,
}

/// What every command returns.
pub(crate) type Result<T = (), E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure in words: lower case, no full stop.
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            silent: false,
            refusal: false,
            said: Box::new(Said { message: message.into(), ..Said::default() }),
        }
    }

    /// Wrong usage.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// Failure without a better code, from an error and its sources.
    pub(crate) fn from_error(doing: &str, err: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(Exit::Failure, format!("could not {doing}: {}", overnight_types::chain(err)))
    }

    /// People were shown the outcome already, so they get the exit code alone; under
    /// `--json`, where nothing was shown, the message goes out as any other error does.
    pub(crate) fn shown(exit: Exit, message: impl Into<String>) -> Self {
        Self { silent: true, ..Self::new(exit, message) }
    }

    /// A reader that went away (`| head -1`): a quiet success.
    pub(crate) fn closed_pipe() -> Self {
        Self::shown(Exit::Success, "")
    }

    /// Whether stderr stays as it is.
    pub(crate) fn is_silent(&self, json: bool) -> bool {
        self.silent && (self.exit == Exit::Success || !json)
    }

    /// The same with another exit code.
    pub(crate) fn exit(self, exit: Exit) -> Self {
        Self { exit, ..self }
    }

    /// The server answered that it did nothing.
    pub(crate) fn refusal(self) -> Self {
        Self { refusal: true, ..self }
    }

    /// Whether the server answered that it did nothing.
    pub(crate) fn is_refusal(&self) -> bool {
        self.refusal
    }

    /// Whether the server or we gave it this code.
    pub(crate) fn has_code(&self, code: &str) -> bool {
        self.said.code.as_deref() == Some(code)
    }

    /// A stable word for programs.
    pub(crate) fn code(mut self, code: impl Into<String>) -> Self {
        self.said.code = Some(code.into());
        self
    }

    /// What to do; printed last.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.said.hint = Some(hint.into());
        self
    }

    /// One more line, with its own mark (`--> file:line`, `|  text`, `= note`).
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.said.notes.push(note.into());
        self
    }

    /// The server's request id.
    pub(crate) fn request_id(mut self, id: Option<String>) -> Self {
        self.said.request_id = id;
        self
    }

    /// What to do, where somebody said so.
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.said.hint.as_deref()
    }

    /// The message alone.
    pub(crate) fn message(&self) -> &str {
        &self.said.message
    }

    /// For a terminal or a log: several lines, the most important last.
    pub(crate) fn to_text(&self, color: bool) -> String {
        let (red, bold, end) = if color { ("\x1b[31;1m", "\x1b[1m", "\x1b[0m") } else { ("", "", "") };
        let mut text = format!("{red}error:{end} {bold}{}{end}\n", escape(&self.said.message));
        for note in &self.said.notes {
            let _ = writeln!(text, "  {}", escape(note));
        }
        if let Some(id) = &self.said.request_id {
            let _ = writeln!(text, "  = request id: {}", escape(id));
        }
        if let Some(hint) = &self.said.hint {
            let _ = writeln!(text, "  = help: {}", escape(hint));
        }
        text
    }

    /// For `--json`: one object on one line.
    pub(crate) fn to_json(&self) -> String {
        let code = self.said.code.clone().unwrap_or_else(|| self.exit.code().to_owned());
        let mut hint = self.said.hint.clone();
        if !self.said.notes.is_empty() {
            let notes = self.said.notes.join("\n");
            hint = Some(hint.map_or(notes.clone(), |hint| format!("{notes}\n{hint}")));
        }
        serde_json::json!({"error": {
            "code": code, "message": self.said.message, "hint": hint, "request_id": self.said.request_id,
        }})
        .to_string()
    }
}

impl From<std::io::Error> for Failure {
    fn from(err: std::io::Error) -> Self {
        if err.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::closed_pipe();
        }
        Self::new(Exit::Failure, err.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_user_cannot_reach_the_terminal_as_control() {
        let failure = Failure::new(Exit::NotFound, "no such file: \x1b[31mred\x07").hint("look\x1b]0;x\x07 again");
        let text = failure.to_text(false);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
        assert!(text.ends_with("again\n"), "the help comes last: {text}");
    }

    #[test]
    fn json_form_always_has_all_four_keys() {
        let value: serde_json::Value =
            serde_json::from_str(&Failure::usage("no").to_json()).expect("our own JSON reads back");
        let error = value["error"].as_object().expect("an object");
        assert_eq!(error.keys().collect::<Vec<_>>(), ["code", "message", "hint", "request_id"]);
    }
}
