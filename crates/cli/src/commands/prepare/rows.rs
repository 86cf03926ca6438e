//! Reading rows from text lines, CSV or loose JSONL, each with its physical line.
//! A row that cannot be read is an answer like any other: nothing is skipped in silence.

use std::io::{BufRead, Read};

use serde_json::{Map, Value};

use crate::error::{Failure, Result};

/// How the input is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum InputFormat {
    /// One prompt per line; the field is `text`.
    Text,
    /// Comma-separated with a head.
    Csv,
    /// Tab-separated with a head.
    Tsv,
    /// Separated by semicolons, with a head.
    Semicolons,
    /// One JSON object or string per line.
    Jsonl,
}

/// One row, or why it is none.
#[derive(Debug)]
pub(crate) struct Row {
    /// Physical, from 1; of a CSV row its first line.
    pub(crate) line: u64,
    pub(crate) content: Result<Content, String>,
    /// The bytes, for the file of invalid rows; lossy where they are not UTF-8.
    pub(crate) raw: String,
}

/// What a row holds.
#[derive(Debug)]
pub(crate) enum Content {
    /// Fields for the template.
    Fields(Map<String, Value>),
    /// A batch line already, with its object for checking.
    BatchLine(Value),
}

/// Reads every row and hands it on; returns how many blank lines were passed over.
pub(crate) fn read(
    format: InputFormat,
    input: &mut dyn BufRead,
    line_bytes_max: u64,
    each: &mut dyn FnMut(Row) -> Result,
) -> Result<u64> {
    skip_bom(input)?;
    match format {
        InputFormat::Csv => read_separated(b',', input, each),
        InputFormat::Tsv => read_separated(b'\t', input, each),
        InputFormat::Semicolons => read_separated(b';', input, each),
        InputFormat::Text => read_lines(input, line_bytes_max, each, &|text| {
            Ok(Content::Fields(Map::from_iter([("text".to_owned(), Value::from(text))])))
        }),
        InputFormat::Jsonl => read_lines(input, line_bytes_max, each, &loose_json),
    }
}

/// Guesses from the name, then from the first bytes.
pub(crate) fn guess(name: &str, first: &[u8]) -> InputFormat {
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension).to_ascii_lowercase();
    match extension.as_str() {
        // As spreadsheets write it where the comma stands in numbers.
        "csv" if head_has_only_semicolons(first) => InputFormat::Semicolons,
        "csv" => InputFormat::Csv,
        "tsv" => InputFormat::Tsv,
        "jsonl" | "ndjson" | "json" => InputFormat::Jsonl,
        "txt" => InputFormat::Text,
        _ => {
            let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
            let opening = first.iter().find(|byte| !byte.is_ascii_whitespace());
            if opening == Some(&b'{') { InputFormat::Jsonl } else { InputFormat::Text }
        }
    }
}

fn head_has_only_semicolons(first: &[u8]) -> bool {
    let head = first.split(|&byte| byte == b'\n').next().unwrap_or_default();
    head.contains(&b';') && !head.contains(&b',')
}

fn skip_bom(input: &mut dyn BufRead) -> Result {
    if input.fill_buf()?.starts_with(b"\xef\xbb\xbf") {
        input.consume(3);
    }
    Ok(())
}

fn read_lines(
    mut input: &mut dyn BufRead,
    line_bytes_max: u64,
    each: &mut dyn FnMut(Row) -> Result,
    parse: &dyn Fn(&str) -> Result<Content, String>,
) -> Result<u64> {
    let mut blank = 0;
    let mut line = 0;
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = Read::take(&mut input, line_bytes_max + 2).read_until(b'\n', &mut bytes)?;
        if read == 0 {
            return Ok(blank);
        }
        line += 1;
        let whole = bytes.last() == Some(&b'\n');
        if !whole && bytes.len() as u64 > line_bytes_max {
            skip_line(input)?;
            let raw = String::from_utf8_lossy(&bytes[..200.min(bytes.len())]).into_owned();
            each(Row { line, content: Err(format!("longer than {line_bytes_max} bytes")), raw })?;
            continue;
        }
        let text = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        if text.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
            blank += 1;
            continue;
        }
        let raw = String::from_utf8_lossy(text).into_owned();
        let content = match std::str::from_utf8(text) {
            Ok(text) => parse(text),
            Err(err) => Err(format!("not UTF-8 at byte {} of the line", err.valid_up_to() + 1)),
        };
        each(Row { line, content, raw })?;
    }
}

fn skip_line(input: &mut dyn BufRead) -> Result {
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(());
        }
        match buffer.iter().position(|&byte| byte == b'\n') {
            Some(at) => {
                input.consume(at + 1);
                return Ok(());
            }
            None => {
                let length = buffer.len();
                input.consume(length);
            }
        }
    }
}

fn loose_json(text: &str) -> Result<Content, String> {
    let value: Value = serde_json::from_str(text).map_err(|err| format!("not JSON: {}", without_place(&err)))?;
    match value {
        Value::Object(map) if ["custom_id", "url", "body"].iter().all(|key| map.contains_key(*key)) => {
            Ok(Content::BatchLine(Value::Object(map)))
        }
        Value::Object(map) => Ok(Content::Fields(map)),
        Value::String(text) => Ok(Content::Fields(Map::from_iter([("text".to_owned(), Value::from(text))]))),
        _ => Err("neither a JSON object nor a JSON string".to_owned()),
    }
}

/// serde's message counts lines within the line; only the column means something.
fn without_place(err: &serde_json::Error) -> String {
    let text = err.to_string();
    let words = text.split(" at line ").next().unwrap_or(&text);
    format!("{words} at column {}", err.column())
}

fn read_separated(delimiter: u8, input: &mut dyn BufRead, each: &mut dyn FnMut(Row) -> Result) -> Result<u64> {
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(input);
    let heads = reader.byte_headers().map_err(|err| Failure::from_error("read the head of the CSV", &err))?.clone();
    let heads: Vec<String> = heads.iter().map(|head| String::from_utf8_lossy(head).trim().to_owned()).collect();
    if let Some(twice) = heads.iter().enumerate().find(|(index, head)| heads[..*index].contains(head)) {
        return Err(Failure::new(crate::error::Exit::InvalidInput, format!("two columns are called {:?}", twice.1)));
    }
    let mut record = csv::ByteRecord::new();
    loop {
        match reader.read_byte_record(&mut record) {
            Ok(false) => return Ok(0),
            Ok(true) => {}
            Err(err) => return Err(Failure::from_error("read the CSV", &err)),
        }
        let line = record.position().map_or(0, csv::Position::line);
        let cells: Vec<String> = record.iter().map(|cell| String::from_utf8_lossy(cell).into_owned()).collect();
        let raw = cells.join(match delimiter {
            b'\t' => "\t",
            b';' => ";",
            _ => ",",
        });
        let content = if record.len() != heads.len() {
            Err(format!("{} cells where the head has {}", record.len(), heads.len()))
        } else if let Some(at) = record.iter().position(|cell| std::str::from_utf8(cell).is_err()) {
            Err(format!("column {:?} is not UTF-8", heads[at]))
        } else {
            let fields = heads.iter().cloned().zip(cells.into_iter().map(Value::from));
            Ok(Content::Fields(fields.collect()))
        };
        each(Row { line, content, raw })?;
    }
}
