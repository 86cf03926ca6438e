//! Turns ids into text one at a time without ever splitting a character.

use std::sync::Arc;

use super::{Text, TextError};

/// The state of one output's text. Between calls it keeps at most the bytes of one
/// unfinished character.
#[derive(Debug)]
pub struct Detokenizer {
    text: Arc<Text>,
    skip_special: bool,
    pending: Vec<u8>,
    /// Of `pending`, bytes that belong to the prompt: never shown by themselves.
    from_prompt: usize,
    whole: Option<WholeWindow>,
}

/// For decoders that are not a table of bytes: decodes a short window twice and gives out the difference.
#[derive(Debug)]
struct WholeWindow {
    ids: Vec<u32>,
    /// Ids of `ids` whose text has been given out.
    num_shown: usize,
}

/// Ids kept as context for decoders whose text of a token depends on its left neighbours.
const WINDOW_CONTEXT: usize = 6;
/// Ids after which text that still ends inside a character is given out as it is.
const WINDOW_MAX: usize = 64;

impl Detokenizer {
    pub(super) fn new(text: Arc<Text>, prompt: &[u32], skip_special: bool) -> Self {
        let whole = text.decodes_whole().then(|| {
            let ids = prompt[prompt.len().saturating_sub(WINDOW_CONTEXT)..].to_vec();
            WholeWindow { num_shown: ids.len(), ids }
        });
        let pending = if whole.is_none() { unfinished_tail(&text, prompt, skip_special) } else { Vec::new() };
        Self { text, skip_special, from_prompt: pending.len(), pending, whole }
    }

    /// The text that this id completes, often a whole word, sometimes nothing.
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if self.whole.is_some() {
            return self.push_whole(id);
        }
        let bytes = self.text.piece(id)?;
        if self.skip_special && self.text.is_special(id) {
            return Ok(String::new());
        }
        if self.pending.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            return Ok(text.to_owned());
        }
        self.pending.extend_from_slice(bytes);
        Ok(self.take_finished())
    }

    /// The output has ended: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        if let Some(window) = &mut self.whole {
            let (shown, ids) = (window.num_shown, std::mem::take(&mut window.ids));
            window.num_shown = 0;
            let before = self.text.decode(&ids[..shown], self.skip_special).unwrap_or_default();
            let after = self.text.decode(&ids, self.skip_special).unwrap_or_default();
            return after.get(before.len()..).unwrap_or_default().to_owned();
        }
        let only_prompt = self.pending.len() == self.from_prompt;
        let rest = std::mem::take(&mut self.pending);
        self.from_prompt = 0;
        if only_prompt { String::new() } else { String::from_utf8_lossy(&rest).into_owned() }
    }

    /// Bytes of this output that wait for the rest of their character.
    pub(super) fn num_pending(&self) -> usize {
        match &self.whole {
            Some(window) => usize::from(window.num_shown < window.ids.len()),
            None => self.pending.len() - self.from_prompt,
        }
    }

    /// Moves everything but an unfinished last character out of `pending`.
    fn take_finished(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut at = 0;
        loop {
            match std::str::from_utf8(&self.pending[at..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    at = self.pending.len();
                    break;
                }
                Err(err) => {
                    let valid_end = at + err.valid_up_to();
                    text.push_str(std::str::from_utf8(&self.pending[at..valid_end]).expect("checked up to here"));
                    at = valid_end;
                    let Some(bad) = err.error_len() else { break };
                    // What the prompt left unfinished and nobody finished was never this output's.
                    if at + bad > self.from_prompt {
                        text.push(char::REPLACEMENT_CHARACTER);
                    }
                    at += bad;
                }
            }
        }
        self.pending.drain(..at);
        self.from_prompt = self.from_prompt.saturating_sub(at);
        text
    }

    fn push_whole(&mut self, id: u32) -> Result<String, TextError> {
        self.text.check(id)?;
        let window = self.whole.as_mut().expect("the caller checked");
        window.ids.push(id);
        let before = self.text.decode(&window.ids[..window.num_shown], self.skip_special)?;
        let after = self.text.decode(&window.ids, self.skip_special)?;
        let unfinished = after.ends_with(char::REPLACEMENT_CHARACTER);
        if (unfinished && window.ids.len() - window.num_shown < WINDOW_MAX) || after.len() <= before.len() {
            return Ok(String::new());
        }
        let new = after.get(before.len()..).unwrap_or_default().to_owned();
        let drop = window.num_shown.saturating_sub(WINDOW_CONTEXT);
        window.ids.drain(..drop);
        window.num_shown = window.ids.len();
        Ok(new)
    }
}

/// The bytes at the prompt's end that begin a character and do not finish it: at most three.
fn unfinished_tail(text: &Text, prompt: &[u32], skip_special: bool) -> Vec<u8> {
    let mut tail: Vec<u8> = Vec::new();
    for &id in prompt.iter().rev() {
        if skip_special && text.is_special(id) {
            continue;
        }
        let Ok(bytes) = text.piece(id) else { break };
        tail.splice(0..0, bytes.iter().copied());
        if tail.len() >= 4 {
            break;
        }
    }
    let lead = tail.iter().rposition(|byte| *byte & 0b1100_0000 != 0b1000_0000);
    let Some(lead) = lead.filter(|lead| tail.len() - lead < 4) else { return Vec::new() };
    match std::str::from_utf8(&tail[lead..]) {
        Err(err) if err.error_len().is_none() => tail.split_off(lead),
        _ => Vec::new(),
    }
}
