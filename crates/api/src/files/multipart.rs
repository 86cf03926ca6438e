//! A `multipart/form-data` reader that holds one network frame and one delimiter.
//!
//! Owns the splitting of parts (RFC 7578 over RFC 2046); yields each part's name and
//! file name and then its bytes as they come. Invariant: memory is bounded by the
//! largest frame of the body plus the header limit, whatever the sender's pace.
//! Does not know which fields a form has, nor where the bytes go.

use axum::body::{Body, BodyDataStream};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use memchr::memmem;

/// Most bytes of one part's headers.
const HEADERS_BYTES_MAX: usize = 16 << 10;
/// Most bytes before the first delimiter.
const PREAMBLE_BYTES_MAX: usize = 64 << 10;
/// Most bytes of white space after a delimiter.
const PADDING_BYTES_MAX: usize = 1 << 10;

/// Why a form cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FormError {
    /// The connection broke or the length did not hold.
    #[error("the upload ended early")]
    Truncated,
    /// Not multipart, or not as its own boundary says.
    #[error("the body is not valid multipart/form-data: {0}")]
    Malformed(&'static str),
}

/// The headers of a part, as far as forms use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// The field.
    pub(crate) name: String,
    /// The last path component of the file name, when there is one.
    pub(crate) filename: Option<String>,
}

/// The boundary that a `Content-Type` names.
pub(crate) fn boundary_of(content_type: &str) -> Result<String, FormError> {
    let mut pieces = content_type.splitn(2, ';');
    if !pieces.next().unwrap_or("").trim().eq_ignore_ascii_case("multipart/form-data") {
        return Err(FormError::Malformed("the Content-Type must be multipart/form-data"));
    }
    let boundary = parameter(pieces.next().unwrap_or(""), "boundary");
    let boundary = boundary.filter(|text| {
        (1..=70).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
    });
    boundary.ok_or(FormError::Malformed("the Content-Type names no usable boundary"))
}

/// Reads the parts of one body, in order.
#[derive(Debug)]
pub(crate) struct Multipart {
    body: BodyDataStream,
    /// Of `\r\n--boundary`; the body is read as if it began with `\r\n`.
    delimiter: memmem::Finder<'static>,
    buffer: BytesMut,
    body_ended: bool,
    in_part: bool,
    in_preamble: bool,
    form_ended: bool,
}

impl Multipart {
    /// A reader at the body's start.
    pub(crate) fn new(body: Body, boundary: &str) -> Self {
        Self {
            body: body.into_data_stream(),
            delimiter: memmem::Finder::new(format!("\r\n--{boundary}").as_bytes()).into_owned(),
            buffer: BytesMut::from(&b"\r\n"[..]),
            body_ended: false,
            in_part: true,
            in_preamble: true,
            form_ended: false,
        }
    }

    /// The next part; what is left of the part before it (or of the preamble) is
    /// skipped. `None` after the last one.
    pub(crate) async fn next_part(&mut self) -> Result<Option<Part>, FormError> {
        let mut num_skipped = 0;
        while let Some(chunk) = self.chunk().await? {
            num_skipped += chunk.len();
            if self.in_preamble && num_skipped > PREAMBLE_BYTES_MAX {
                return Err(FormError::Malformed("its boundary does not occur where the body starts"));
            }
        }
        self.in_preamble = false;
        if self.form_ended || self.last_delimiter_follows().await? {
            self.form_ended = true;
            return Ok(None);
        }
        let end = loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if self.buffer.len() > HEADERS_BYTES_MAX {
                return Err(FormError::Malformed("the headers of a part are too long"));
            }
            self.fill().await?;
        };
        if end > HEADERS_BYTES_MAX {
            return Err(FormError::Malformed("the headers of a part are too long"));
        }
        // Without any header the blank line follows at once; then there is no field name either.
        let headers = self.buffer.split_to(end + 4);
        self.in_part = true;
        part_of(&headers[..end]).map(Some)
    }

    /// After a delimiter: consumes its line. True when it is the closing one.
    async fn last_delimiter_follows(&mut self) -> Result<bool, FormError> {
        while self.buffer.len() < 2 {
            self.fill().await?;
        }
        if self.buffer.starts_with(b"--") {
            return Ok(true);
        }
        // Keeps the line end, so that a header block always ends with an empty line.
        loop {
            if let Some(end) = memmem::find(&self.buffer, b"\r\n") {
                if !self.buffer[..end].iter().all(|byte| matches!(byte, b' ' | b'\t')) {
                    return Err(FormError::Malformed("a boundary is not followed by a line end"));
                }
                let _ = self.buffer.split_to(end);
                return Ok(false);
            }
            if self.buffer.len() > PADDING_BYTES_MAX {
                return Err(FormError::Malformed("a boundary is not followed by a line end"));
            }
            self.fill().await?;
        }
    }

    /// More bytes of the part; `None` at its end. Never empty.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, FormError> {
        while self.in_part {
            if let Some(at) = self.delimiter.find(&self.buffer) {
                let bytes = self.buffer.split_to(at).freeze();
                let _ = self.buffer.split_to(self.delimiter.needle().len());
                self.in_part = false;
                return Ok(Some(bytes).filter(|bytes| !bytes.is_empty()));
            }
            // The tail may be the start of a delimiter whose rest is still to come.
            let sure = self.buffer.len().saturating_sub(self.delimiter.needle().len() - 1);
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            self.fill().await?;
        }
        Ok(None)
    }

    /// Reads and drops what is left of the body, at most `bytes_max` of it.
    pub(crate) async fn drain(&mut self, bytes_max: usize) {
        let mut num_read = 0;
        while num_read < bytes_max {
            match self.body.next().await {
                Some(Ok(chunk)) => num_read += chunk.len(),
                Some(Err(_)) | None => return,
            }
        }
    }

    async fn fill(&mut self) -> Result<(), FormError> {
        if self.body_ended {
            return Err(match self.in_preamble {
                true => FormError::Malformed("its boundary does not occur in the body"),
                false => FormError::Truncated,
            });
        }
        match self.body.next().await {
            Some(Ok(chunk)) => self.buffer.extend_from_slice(&chunk),
            Some(Err(_)) => return Err(FormError::Truncated),
            None => self.body_ended = true,
        }
        Ok(())
    }
}

fn part_of(headers: &[u8]) -> Result<Part, FormError> {
    for line in headers.split(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        let Some((name, value)) = line.split_once(':') else { continue };
        if !name.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
        if !kind.trim().eq_ignore_ascii_case("form-data") {
            return Err(FormError::Malformed("a part is not form-data"));
        }
        let name = parameter(parameters, "name").ok_or(FormError::Malformed("a part has no name"))?;
        let filename = match parameter(parameters, "filename*") {
            Some(extended) => Some(decode_extended(&extended)),
            None => parameter(parameters, "filename"),
        };
        return Ok(Part { name, filename: filename.as_deref().map(last_component) });
    }
    Err(FormError::Malformed("a part has no Content-Disposition"))
}

/// The value of one `;`-separated parameter, unquoted.
fn parameter(text: &str, wanted: &str) -> Option<String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([';', ' ', '\t', '\r']);
        let (name, after) = rest.split_once('=')?;
        let (value, after) = match after.trim_start().strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after;
    }
}

/// Reads up to the closing quote. `\"` and `\\` are escapes; so are browsers' `%22`, `%0D`, `%0A`.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => {
                let value = value.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n");
                return Some((value, &text[at + 1..]));
            }
            '\\' if text[at + 1..].starts_with(['"', '\\']) => value.push(chars.next()?.1),
            char => value.push(char),
        }
    }
    None
}

/// `UTF-8''name%20here` (RFC 8187); other charsets are taken as UTF-8.
fn decode_extended(text: &str) -> String {
    let encoded = text.splitn(3, '\'').nth(2).unwrap_or(text);
    crate::body::percent_decode(encoded)
}

/// What is after the last `/` or `\`, without control characters.
fn last_component(path: &str) -> String {
    let last = path.rsplit(['/', '\\']).next().unwrap_or(path);
    last.chars().filter(|char| !char.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body_of(bytes: &[u8], cuts: &[usize]) -> Body {
        let mut pieces: Vec<Result<Bytes, std::io::Error>> = Vec::new();
        let mut start = 0;
        for &cut in cuts.iter().chain(std::iter::once(&bytes.len())) {
            pieces.push(Ok(Bytes::copy_from_slice(&bytes[start..cut])));
            start = cut;
        }
        Body::from_stream(futures::stream::iter(pieces))
    }

    type Parts = Vec<(String, Option<String>, Vec<u8>)>;

    async fn read(bytes: &[u8], cuts: &[usize]) -> Result<Parts, FormError> {
        let mut form = Multipart::new(body_of(bytes, cuts), "B");
        let mut parts = Vec::new();
        while let Some(part) = form.next_part().await? {
            let mut content = Vec::new();
            while let Some(chunk) = form.chunk().await? {
                assert!(!chunk.is_empty());
                content.extend_from_slice(&chunk);
            }
            parts.push((part.name, part.filename, content));
        }
        Ok(parts)
    }

    const FORM: &[u8] = b"preamble\r\n--B\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
        --B  \r\nContent-Type: x/y\r\ncontent-disposition: form-data; filename=\"a\\\"b.jsonl\"; name=file\r\n\r\n\
        {\"a\":1}\r\n--b\r\n\r\n--\r\n--B--\r\nepilogue";

    #[tokio::test]
    async fn form_reads_the_same_wherever_the_network_cuts_it() {
        let whole = read(FORM, &[]).await.unwrap();
        assert_eq!(whole[0], ("purpose".to_owned(), None, b"batch".to_vec()));
        assert_eq!(whole[1].1.as_deref(), Some("a\"b.jsonl"));
        assert_eq!(whole[1].2, b"{\"a\":1}\r\n--b\r\n\r\n--");
        for first in 0..FORM.len() {
            assert_eq!(read(FORM, &[first]).await.as_ref(), Ok(&whole), "cut at {first}");
        }
        let every: Vec<usize> = (1..FORM.len()).collect();
        assert_eq!(read(FORM, &every).await.as_ref(), Ok(&whole), "byte by byte");
    }

    #[tokio::test]
    async fn every_truncated_form_is_an_error() {
        let end = memmem::find(FORM, b"--B--").unwrap() + 4;
        for length in 0..end {
            assert!(read(&FORM[..length], &[]).await.is_err(), "first {length} bytes");
        }
    }

    #[tokio::test]
    async fn part_without_name_or_with_endless_headers_is_refused() {
        let nameless = b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--";
        assert!(matches!(read(nameless, &[]).await, Err(FormError::Malformed(_))));
        let bare = b"--B\r\n\r\nx\r\n--B--";
        assert!(matches!(read(bare, &[]).await, Err(FormError::Malformed(_))));
        let endless = [b"--B\r\nX: ".to_vec(), vec![b'x'; HEADERS_BYTES_MAX + 10]].concat();
        assert_eq!(read(&endless, &[]).await, Err(FormError::Malformed("the headers of a part are too long")));
        let glued = b"--Bx\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--B--";
        assert!(matches!(read(glued, &[]).await, Err(FormError::Malformed(_))));
    }

    #[test]
    fn file_name_is_the_last_path_component() {
        for (header, name) in [
            ("form-data; name=\"f\"; filename=\"C:\\dir\\in.jsonl\"", "in.jsonl"),
            ("form-data; name=\"f\"; filename=\"../../etc/in.jsonl\"", "in.jsonl"),
            ("form-data; name=\"f\"; filename=\"日本 語;=.jsonl\"", "日本 語;=.jsonl"),
            ("form-data; name=\"f\"; filename=\"a%22b%0A.jsonl\"", "a\"b.jsonl"),
            ("form-data; name=\"f\"; filename=x; filename*=UTF-8''%e2%82%ac%20.jsonl", "€ .jsonl"),
            ("form-data; name=\"f\"; filename=plain.jsonl", "plain.jsonl"),
        ] {
            let part = part_of(format!("Content-Disposition: {header}").as_bytes()).unwrap();
            assert_eq!(part.filename.as_deref(), Some(name), "{header}");
        }
    }

    #[test]
    fn content_type_must_name_a_usable_boundary() {
        assert_eq!(boundary_of("multipart/form-data; boundary=\"a b\"").as_deref(), Ok("a b"));
        assert_eq!(boundary_of("Multipart/Form-Data;charset=x; boundary=xyz").as_deref(), Ok("xyz"));
        for wrong in
            ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=a"]
        {
            assert!(boundary_of(wrong).is_err(), "{wrong}");
        }
    }
}
