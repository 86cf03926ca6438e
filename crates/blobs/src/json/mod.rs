//! A JSON scanner that checks a value and says where it ends, without building it.
//!
//! Grammar: RFC 8259. Nothing is decoded, so number spelling, escapes, key order
//! and repeated keys stay as they are. Nesting costs one bit per level, on the
//! heap: depth is bounded by the length of the text and never by the stack.

mod string;
#[cfg(test)]
mod tests;

use string::{decode, find_special};

/// Where and why a text is not JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Byte offset in the text.
    pub at: usize,
    /// What is wrong, in words.
    pub what: &'static str,
}

/// The kind of a JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `"…"`.
    String,
    /// `1.5e3`.
    Number,
    /// `{…}`.
    Object,
    /// `[…]`.
    Array,
    /// `true`.
    True,
    /// `false`.
    False,
    /// `null`.
    Null,
}

impl Kind {
    /// With its article, for messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::String => "a string",
            Kind::Number => "a number",
            Kind::Object => "an object",
            Kind::Array => "an array",
            Kind::True | Kind::False => "a boolean",
            Kind::Null => "null",
        }
    }
}

/// One value as it stands in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Raw<'a> {
    /// Its bytes; quotes included for a string.
    pub token: &'a [u8],
    /// What it is.
    pub kind: Kind,
}

impl<'a> Raw<'a> {
    /// A string's text as UTF-8, its escapes resolved; a lone surrogate as the
    /// three bytes that UTF-8 would give it. Borrowed when there is no escape.
    /// Empty for other kinds.
    pub fn text(&self) -> std::borrow::Cow<'a, [u8]> {
        match self.kind {
            Kind::String => decode(&self.token[1..self.token.len() - 1]),
            _ => std::borrow::Cow::Borrowed(&[]),
        }
    }
}

/// Reads a text from front to back. The text must be valid UTF-8.
#[derive(Debug)]
pub struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
    nesting: Nesting,
}

impl<'a> Scanner<'a> {
    /// At the start of a text that is valid UTF-8.
    pub fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0, nesting: Nesting::default() }
    }

    /// Byte offset of what comes next.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Passes over white space and gives the next byte without taking it.
    #[inline]
    pub fn peek(&mut self) -> Option<u8> {
        while let Some(&byte) = self.text.get(self.at) {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// Takes the next byte if it is this one, after white space.
    #[inline]
    pub fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    /// A fault at what comes next.
    pub fn fault(&self, what: &'static str) -> Fault {
        let rest = &self.text[self.at..];
        let what = match rest {
            [] => "the text ends too early",
            _ if rest.starts_with(crate::lines::BOM) => {
                "a byte order mark (BOM, U+FEFF) may stand only at the start of the file"
            }
            [b'\'', ..] => "strings need double quotes",
            _ if rest.starts_with(b"NaN") || rest.starts_with(b"Infinity") => "NaN and Infinity are not JSON",
            _ => what,
        };
        Fault { at: self.at, what }
    }

    /// Takes a string; its token with both quotes.
    #[inline]
    pub fn string(&mut self, what: &'static str) -> Result<&'a [u8], Fault> {
        if self.peek() != Some(b'"') {
            return Err(self.fault(what));
        }
        let start = self.at;
        self.at += 1;
        loop {
            self.at = find_special(self.text, self.at);
            match self.text.get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(&self.text[start..self.at]);
                }
                Some(b'\\') => self.escape()?,
                Some(_) => return Err(Fault { at: self.at, what: "a control character in a string must be escaped" }),
                None => return Err(Fault { at: start, what: "a string is not closed" }),
            }
        }
    }

    /// Takes any value.
    pub fn value(&mut self) -> Result<Raw<'a>, Fault> {
        let first = self.peek();
        let start = self.at;
        let kind = match first {
            Some(b'"') => {
                let token = self.string("expected a value")?;
                return Ok(Raw { token, kind: Kind::String });
            }
            Some(b'{') => Kind::Object,
            Some(b'[') => Kind::Array,
            Some(b't') => Kind::True,
            Some(b'f') => Kind::False,
            Some(b'n') => Kind::Null,
            _ => Kind::Number,
        };
        self.skip()?;
        Ok(Raw { token: &self.text[start..self.at], kind })
    }

    /// Nothing but white space may follow.
    pub fn end(&mut self) -> Result<(), Fault> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.fault("the value is followed by more text")),
        }
    }

    fn skip(&mut self) -> Result<(), Fault> {
        debug_assert_eq!(self.nesting.depth, 0);
        self.nesting.depth = 0;
        loop {
            if self.open_value()? {
                continue;
            }
            // A value is complete: close what it closes.
            loop {
                let Some(in_object) = self.nesting.top() else { return Ok(()) };
                if self.take(b',') {
                    if in_object {
                        self.key()?;
                    }
                    break;
                }
                let close = if in_object { b'}' } else { b']' };
                if !self.take(close) {
                    return Err(self.fault(if in_object { "expected `,` or `}`" } else { "expected `,` or `]`" }));
                }
                self.nesting.pop();
            }
        }
    }

    /// Takes a scalar or an empty container (`false`), or enters a container (`true`).
    fn open_value(&mut self) -> Result<bool, Fault> {
        match self.peek() {
            Some(b'"') => self.string("").map(|_| false),
            Some(b'{') => {
                self.at += 1;
                if self.take(b'}') {
                    return Ok(false);
                }
                self.nesting.push(true);
                self.key().map(|()| true)
            }
            Some(b'[') => {
                self.at += 1;
                if self.take(b']') {
                    return Ok(false);
                }
                self.nesting.push(false);
                Ok(true)
            }
            Some(b't') => self.word(b"true"),
            Some(b'f') => self.word(b"false"),
            Some(b'n') => self.word(b"null"),
            Some(b'-' | b'0'..=b'9') => self.number().map(|()| false),
            _ => Err(self.fault("expected a value")),
        }
    }

    fn key(&mut self) -> Result<(), Fault> {
        self.string("expected a key in double quotes")?;
        self.colon()
    }

    /// Takes the colon after a key.
    pub fn colon(&mut self) -> Result<(), Fault> {
        if self.take(b':') { Ok(()) } else { Err(self.fault("expected `:` after a key")) }
    }

    fn word(&mut self, word: &'static [u8]) -> Result<bool, Fault> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.fault("expected a value"));
        }
        self.at += word.len();
        Ok(false)
    }

    fn number(&mut self) -> Result<(), Fault> {
        let start = self.at;
        let bad = |at| Fault { at, what: "not a JSON number" };
        self.at += usize::from(self.text[self.at] == b'-');
        let int = self.digits();
        if int == 0 || (int > 1 && self.text[self.at - int] == b'0') {
            return Err(if self.text[start..].starts_with(b"-Infinity") { self.fault("") } else { bad(start) });
        }
        if self.text.get(self.at) == Some(&b'.') {
            self.at += 1;
            if self.digits() == 0 {
                return Err(bad(start));
            }
        }
        if matches!(self.text.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.text.get(self.at), Some(b'+' | b'-')));
            if self.digits() == 0 {
                return Err(bad(start));
            }
        }
        Ok(())
    }

    fn digits(&mut self) -> usize {
        let num = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += num;
        num
    }

    fn escape(&mut self) -> Result<(), Fault> {
        let start = self.at;
        match self.text.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => {
                let hex = self.text.get(start + 2..start + 6);
                if !hex.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)) {
                    return Err(Fault { at: start, what: "`\\u` needs four hexadecimal digits" });
                }
                self.at += 6;
            }
            _ => return Err(Fault { at: start, what: "not a JSON escape" }),
        }
        Ok(())
    }
}

/// Whether bytes are one JSON object in valid UTF-8.
pub fn is_object(text: &[u8]) -> bool {
    let object = || {
        std::str::from_utf8(text).ok()?;
        let mut scanner = Scanner::new(text);
        let kind = scanner.value().ok()?.kind;
        scanner.end().ok()?;
        Some(kind == Kind::Object)
    };
    object().unwrap_or(false)
}

/// A bit per open container: set for an object.
#[derive(Debug, Default)]
struct Nesting {
    bits: Vec<u64>,
    depth: usize,
}

impl Nesting {
    fn push(&mut self, object: bool) {
        let (word, bit) = (self.depth / 64, self.depth % 64);
        if word == self.bits.len() {
            self.bits.push(0);
        }
        self.bits[word] = self.bits[word] & !(1 << bit) | u64::from(object) << bit;
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth -= 1;
    }

    fn top(&self) -> Option<bool> {
        let index = self.depth.checked_sub(1)?;
        Some(self.bits[index / 64] >> (index % 64) & 1 == 1)
    }
}
