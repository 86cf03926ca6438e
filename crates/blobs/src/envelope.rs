//! Reads the envelope of one input line: `custom_id`, `method`, `url`, `body`, and
//! of the body only `model` and `stream`, each as the bytes that stand in the line.
//!
//! Whether the values are right is intake's to judge; this says what is there.
//! Keys are compared as decoded text. Unknown keys are passed over.

use std::fmt;

use crate::json::{Fault, Kind, Raw, Scanner};

/// What a line holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// The user's id, a token to be echoed.
    pub custom_id: Option<Raw<'a>>,
    /// Should be `"POST"`.
    pub method: Option<Raw<'a>>,
    /// Should be the job's endpoint.
    pub url: Option<Raw<'a>>,
    /// The request body, untouched.
    pub body: Option<Raw<'a>>,
    /// The last `model` in an object body.
    pub model: Option<Raw<'a>>,
    /// The last `stream` in an object body.
    pub stream: Option<Raw<'a>>,
}

/// Why a line has no envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFault {
    /// Not UTF-8 from this byte of the line on.
    NotUtf8 {
        /// Offset in the line.
        at: usize,
    },
    /// Not JSON.
    Syntax(Fault),
    /// JSON, but not an object.
    NotAnObject(Kind),
    /// An envelope key appears twice.
    RepeatedKey {
        /// Offset of the second one in the line.
        at: usize,
        /// Which.
        key: &'static str,
    },
}

impl LineFault {
    /// Offset in the line, where there is one.
    pub fn at(&self) -> Option<usize> {
        match self {
            LineFault::NotUtf8 { at } | LineFault::RepeatedKey { at, .. } => Some(*at),
            LineFault::Syntax(fault) => Some(fault.at),
            LineFault::NotAnObject(_) => None,
        }
    }
}

impl fmt::Display for LineFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LineFault::NotUtf8 { at } => write!(f, "invalid UTF-8 at byte {} of the line", at + 1),
            LineFault::Syntax(fault) => {
                write!(f, "not valid JSON at byte {} of the line: {}", fault.at + 1, fault.what)
            }
            LineFault::NotAnObject(kind) => write!(f, "the line must be a JSON object, found {}", kind.as_str()),
            LineFault::RepeatedKey { at, key } => {
                write!(f, "the key {key:?} appears a second time at byte {} of the line", at + 1)
            }
        }
    }
}

impl From<Fault> for LineFault {
    fn from(fault: Fault) -> Self {
        LineFault::Syntax(fault)
    }
}

impl<'a> Envelope<'a> {
    /// Reads one line's content. The whole line is checked to be one JSON value
    /// in valid UTF-8, also in the parts that are passed over.
    pub fn parse(line: &'a [u8]) -> Result<Self, LineFault> {
        if let Err(err) = std::str::from_utf8(line) {
            return Err(LineFault::NotUtf8 { at: err.valid_up_to() });
        }
        let mut scanner = Scanner::new(line);
        if scanner.peek() != Some(b'{') {
            let kind = scanner.value()?.kind;
            scanner.end()?;
            return Err(LineFault::NotAnObject(kind));
        }
        let mut envelope = Self { custom_id: None, method: None, url: None, body: None, model: None, stream: None };
        fields(&mut scanner, |scanner, key, at| {
            let (name, slot) = match key {
                b"custom_id" => ("custom_id", &mut envelope.custom_id),
                b"method" => ("method", &mut envelope.method),
                b"url" => ("url", &mut envelope.url),
                b"body" => {
                    if envelope.body.is_some() {
                        return Err(LineFault::RepeatedKey { at, key: "body" });
                    }
                    let (body, model, stream) = read_body(scanner, line)?;
                    (envelope.body, envelope.model, envelope.stream) = (Some(body), model, stream);
                    return Ok(());
                }
                _ => return Ok(scanner.value().map(|_| ())?),
            };
            if slot.is_some() {
                return Err(LineFault::RepeatedKey { at, key: name });
            }
            *slot = Some(scanner.value()?);
            Ok(())
        })?;
        scanner.end()?;
        Ok(envelope)
    }
}

type Body<'a> = (Raw<'a>, Option<Raw<'a>>, Option<Raw<'a>>);

fn read_body<'a>(scanner: &mut Scanner<'a>, line: &'a [u8]) -> Result<Body<'a>, LineFault> {
    if scanner.peek() != Some(b'{') {
        return Ok((scanner.value()?, None, None));
    }
    let start = scanner.at();
    let (mut model, mut stream) = (None, None);
    fields(scanner, |scanner, key, _| {
        let value = scanner.value()?;
        match key {
            b"model" => model = Some(value),
            b"stream" => stream = Some(value),
            _ => {}
        }
        Ok(())
    })?;
    Ok((Raw { token: &line[start..scanner.at()], kind: Kind::Object }, model, stream))
}

/// Goes through an object whose brace comes next; `on_field` takes each value.
fn fields<'a>(
    scanner: &mut Scanner<'a>,
    mut on_field: impl FnMut(&mut Scanner<'a>, &[u8], usize) -> Result<(), LineFault>,
) -> Result<(), LineFault> {
    scanner.take(b'{');
    if scanner.take(b'}') {
        return Ok(());
    }
    loop {
        scanner.peek();
        let at = scanner.at();
        let token = scanner.string("expected a key in double quotes")?;
        scanner.colon()?;
        on_field(scanner, &Raw { token, kind: Kind::String }.text(), at)?;
        if scanner.take(b'}') {
            return Ok(());
        }
        if !scanner.take(b',') {
            return Err(scanner.fault("expected `,` or `}`").into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelope_holds_the_bytes_of_the_line() {
        let line = br#" {"x":[1], "custom_id":"a\u0041","method":"POST","url":"/v1/x","body": {"model":"m","n":9007199254740993,"n":1e999,"s":"\ud800"} } "#;
        let envelope = Envelope::parse(line).unwrap();
        assert_eq!(envelope.custom_id.unwrap().token, br#""a\u0041""#);
        assert_eq!(envelope.body.unwrap().token, br#"{"model":"m","n":9007199254740993,"n":1e999,"s":"\ud800"}"#);
        assert_eq!(&*envelope.model.unwrap().text(), b"m");
        assert_eq!(envelope.stream, None);
    }

    #[test]
    fn keys_are_compared_as_decoded_text() {
        let envelope = Envelope::parse(br#"{"custom\u005fid":"x","body":{"mode\u006c":"m"}}"#).unwrap();
        assert_eq!(&*envelope.custom_id.unwrap().text(), b"x");
        assert_eq!(&*envelope.model.unwrap().text(), b"m");
        let twice = Envelope::parse(br#"{"custom_id":"x","custom\u005fid":"y"}"#);
        assert_eq!(twice, Err(LineFault::RepeatedKey { at: 17, key: "custom_id" }));
    }

    // Field reports 3, 6 and 8.
    #[test]
    fn fault_says_where_and_why() {
        let message = |line: &[u8]| Envelope::parse(line).unwrap_err().to_string();
        assert_eq!(message(b"[1,2]"), "the line must be a JSON object, found an array");
        assert_eq!(message(b"\"x\""), "the line must be a JSON object, found a string");
        assert_eq!(message(b"null"), "the line must be a JSON object, found null");
        assert_eq!(message(b"{\"a\":\"\xff\"}"), "invalid UTF-8 at byte 7 of the line");
        assert_eq!(message(b"{\"ignored\":\"\xed\xa0\x80\"}"), "invalid UTF-8 at byte 13 of the line");
        assert_eq!(message(b"{\"a\" 1}"), "not valid JSON at byte 6 of the line: expected `:` after a key");
        assert_eq!(message(b"{\"a\":1"), "not valid JSON at byte 7 of the line: the text ends too early");
        assert!(message("\u{feff}{}".as_bytes()).contains("(BOM, U+FEFF)"));
        assert!(message(b"{\"body\":{},\"body\":{}}").contains("\"body\" appears a second time"));
    }
}
