use super::*;

fn record(item: u64, outcome: OutcomeKind, line: &'static [u8]) -> ItemRecord {
    ItemRecord {
        item: ItemIndex(item),
        outcome,
        http_status: Some(200),
        error_code: (outcome != OutcomeKind::Completed).then(|| "batch_expired".to_owned()),
        attempts: 2,
        failed_tries: vec![FailedTry {
            number: 1,
            http_status: Some(503),
            code: "busy".to_owned(),
            message: "\u{2028}later".to_owned(),
        }],
        seed: Some(u64::MAX),
        usage: Usage { input_tokens: 3, cached_tokens: 1, output_tokens: 2, reasoning_tokens: 0 },
        started_at: Timestamp::from_micros(1),
        finished_at: Timestamp::from_micros(2),
        finish_reason: Some("stop".to_owned()),
        line: Bytes::from_static(line),
    }
}

fn sample() -> (Bytes, SegmentParts, Vec<ItemRecord>) {
    let head = SegmentHead {
        job: JobId::new(),
        shard: ShardIndex(2),
        epoch: Epoch(5),
        seq: 1,
        producer: "test \"engine\"".into(),
    };
    let mut writer = SegmentWriter::new(head, ItemIndex(100), 30);
    let records = vec![
        record(107, OutcomeKind::Completed, b"{\"s\":\"\\ud800 \xe2\x80\xa8 \\u0000\",\"n\":1e999}"),
        record(100, OutcomeKind::Failed, b"{\"b\":2}"),
        record(129, OutcomeKind::Expired, b"{}"),
    ];
    records.iter().for_each(|record| writer.push(record));
    let (bytes, parts) = writer.finish();
    (bytes, parts, records)
}

#[test]
fn records_read_back_whole_and_by_two_ranges() {
    let (bytes, parts, records) = sample();
    let reader = SegmentReader::open(parts.name, bytes.clone(), 3, &parts.sha256).unwrap();
    let read: Vec<_> = reader.records().map(Result::unwrap).collect();
    assert_eq!(read, records);
    assert_eq!(reader.head.producer, "test \"engine\"");
    let range = Footer::range(parts.byte_len, parts.items.count_ones());
    let tail = bytes.slice(range.start as usize..range.end as usize);
    let footer = Footer::parse(&parts.name, &tail, parts.byte_len).unwrap();
    for (span, wanted) in footer.spans.iter().zip(&records) {
        let one = bytes.slice(span.record.0 as usize..span.record.1 as usize);
        assert_eq!(&parse_record(&parts.name, &one, span).unwrap(), wanted);
    }
}

#[test]
fn every_line_of_a_segment_is_json_and_the_row_tells_its_sums() {
    let (bytes, parts, _) = sample();
    for line in bytes.strip_suffix(b"\n").unwrap().split(|&byte| byte == b'\n') {
        assert!(crate::json::is_object(line), "{}", String::from_utf8_lossy(line));
    }
    assert_eq!(parts.items.ones().collect::<Vec<_>>(), [0, 7, 29]);
    assert_eq!(parts.failed.ones().collect::<Vec<_>>(), [0, 29], "an expired item may run again too");
    assert_eq!(parts.code_counts, r#"{"batch_expired":2,"ok":1}"#);
    assert_eq!(parts.usage.input_tokens, 3, "of the completed one");
}

#[test]
fn any_changed_byte_is_found() {
    let (bytes, parts, _) = sample();
    for at in 0..bytes.len() {
        let mut changed = bytes.to_vec();
        changed[at] ^= 1;
        assert!(SegmentReader::open(parts.name, changed.into(), 3, &parts.sha256).is_err(), "byte {at}");
    }
    assert!(SegmentReader::open(parts.name, bytes.slice(..bytes.len() - 1), 3, &parts.sha256).is_err());
    assert!(SegmentReader::open(parts.name, bytes, 4, &parts.sha256).is_err(), "another number of records");
}
