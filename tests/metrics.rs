//! `/metrics` of the real server: names, types and form are what scrapers and boards expect,
//! and the counts move with the work.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::harness::{Service, is_terminal};
use crate::kill::{FAST, input, tiny_model};

const PATIENCE: Duration = Duration::from_secs(120);

/// The engine's metrics, with names and types as read off a running vLLM 0.22.1. A change here
/// breaks boards and alerts of operators: docs/operations.md tells what is left out, and why.
const ENGINE: &[(&str, &str)] = &[
    ("vllm:cache_config_info", "gauge"),
    ("vllm:e2e_request_latency_seconds", "histogram"),
    ("vllm:generation_tokens_total", "counter"),
    ("vllm:inter_token_latency_seconds", "histogram"),
    ("vllm:iteration_tokens_total", "histogram"),
    ("vllm:kv_cache_usage_perc", "gauge"),
    ("vllm:num_preemptions_total", "counter"),
    ("vllm:num_requests_running", "gauge"),
    ("vllm:num_requests_waiting", "gauge"),
    ("vllm:prefix_cache_hits_total", "counter"),
    ("vllm:prefix_cache_queries_total", "counter"),
    ("vllm:prompt_tokens_by_source_total", "counter"),
    ("vllm:prompt_tokens_cached_total", "counter"),
    ("vllm:prompt_tokens_total", "counter"),
    ("vllm:request_decode_time_seconds", "histogram"),
    ("vllm:request_generation_tokens", "histogram"),
    ("vllm:request_inference_time_seconds", "histogram"),
    ("vllm:request_max_num_generation_tokens", "histogram"),
    ("vllm:request_params_max_tokens", "histogram"),
    ("vllm:request_params_n", "histogram"),
    ("vllm:request_prefill_kv_computed_tokens", "histogram"),
    ("vllm:request_prefill_time_seconds", "histogram"),
    ("vllm:request_prompt_tokens", "histogram"),
    ("vllm:request_queue_time_seconds", "histogram"),
    ("vllm:request_success_total", "counter"),
    ("vllm:request_time_per_output_token_seconds", "histogram"),
    ("vllm:time_to_first_token_seconds", "histogram"),
];

/// Our own, in the same way.
const SERVICE: &[(&str, &str)] = &[
    ("batch_batches", "gauge"),
    ("batch_checkpoint_seconds", "histogram"),
    ("batch_database_bytes", "gauge"),
    ("batch_database_up", "gauge"),
    ("batch_db_write_seconds", "histogram"),
    ("batch_disk_free_bytes", "gauge"),
    ("batch_engine_breakdowns_total", "counter"),
    ("batch_engine_ready", "gauge"),
    ("batch_lease_expired_total", "counter"),
    ("batch_lease_lost_total", "counter"),
    ("batch_leases_total", "counter"),
    ("batch_queue_oldest_seconds", "gauge"),
    ("batch_request_outcomes_total", "counter"),
    ("batch_requests", "gauge"),
    ("batch_requests_reexecuted_total", "counter"),
    ("batch_resume_total", "counter"),
    ("batch_retries_total", "counter"),
    ("batch_segment_bytes_total", "counter"),
    ("batch_segments_total", "counter"),
    ("batch_shards", "gauge"),
    ("batch_upload_bytes_total", "counter"),
    ("batch_workers_live", "gauge"),
    ("batch_workers_ready", "gauge"),
    ("build_info", "gauge"),
    ("http_request_duration_seconds", "histogram"),
    ("http_requests_total", "counter"),
];

/// Upper bounds as vLLM has them, for two of each kind.
const BOUNDS: &[(&str, &str)] = &[
    (
        "vllm:time_to_first_token_seconds",
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560 +Inf",
    ),
    (
        "vllm:inter_token_latency_seconds",
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 +Inf",
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 +Inf",
    ),
    ("vllm:iteration_tokens_total", "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 +Inf"),
    ("vllm:request_prompt_tokens", "1 2 5 10 20 50 100 200 500 +Inf"),
];

#[derive(Debug, Default)]
struct Page {
    types: BTreeMap<String, String>,
    /// By name and labels as they stand.
    samples: BTreeMap<String, f64>,
    /// Upper bounds by histogram, in order.
    bounds: BTreeMap<String, Vec<String>>,
}

impl Page {
    async fn of(service: &Service) -> Self {
        let answer = reqwest::get(format!("{}/metrics", service.url)).await.expect("it answers");
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/plain; version=0.0.4");
        Self::parse(&answer.text().await.expect("text"))
    }

    /// Reads the text format 0.0.4 and keeps its rules, as `promtool check metrics` does.
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let (mut family, mut helped) = (String::new(), BTreeSet::new());
        assert!(text.ends_with('\n'), "the last line ends");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').expect("a name and a help text");
                assert!(!help.is_empty() && helped.insert(name.to_owned()), "one help text per metric: {line}");
                continue;
            }
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a name and a type");
                assert!(is_name(name), "{name}");
                assert!(helped.contains(name), "help stands before the type: {name}");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                let known = page.types.insert(name.to_owned(), kind.to_owned());
                assert_eq!(known, None, "one type per metric, its samples together: {name}");
                name.clone_into(&mut family);
                continue;
            }
            page.sample(line, &family);
        }
        page
    }

    fn sample(&mut self, line: &str, family: &str) {
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
        let (name, labels) = match series.split_once('{') {
            None => (series, BTreeMap::new()),
            Some((name, labels)) => (name, read_labels(labels.strip_suffix('}').expect("labels end"))),
        };
        let suffix = name.strip_prefix(family).unwrap_or_else(|| panic!("{name} stands under {family}"));
        match self.types[family].as_str() {
            "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}"),
            "counter" => {
                assert!(suffix.is_empty() && name.ends_with("_total") && value >= 0.0, "{line}");
            }
            _ => assert_eq!(suffix, "", "{line}"),
        }
        if suffix == "_bucket" {
            self.bounds.entry(family.to_owned()).or_default().push(labels["le"].clone());
        }
        assert_eq!(self.samples.insert(series.to_owned(), value), None, "a series stands once: {series}");
    }

    /// The sum over a metric's series whose labels hold `part`.
    fn sum(&self, name: &str, part: &str) -> f64 {
        let of_name = |series: &str| series.split('{').next() == Some(name) && series.contains(part);
        self.samples.iter().filter(|(series, _)| of_name(series)).map(|(_, value)| value).sum()
    }

    /// Every histogram's buckets rise, and the last one is its count.
    fn check_histograms(&self) {
        for (name, _) in self.types.iter().filter(|(_, kind)| *kind == "histogram") {
            let mut last = BTreeMap::<String, f64>::new();
            let prefix = format!("{name}_bucket{{");
            let mut buckets: Vec<(String, f64, f64)> = Vec::new();
            for (series, &value) in self.samples.iter().filter(|(series, _)| series.starts_with(&prefix)) {
                let (labels, bound) = series.rsplit_once("le=\"").expect("a bound");
                let bound = bound.trim_end_matches("\"}").replace("+Inf", "inf");
                buckets.push((labels.to_owned(), bound.parse().expect("a number"), value));
            }
            buckets.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
            assert!(!buckets.is_empty(), "{name} has buckets");
            for (labels, bound, value) in buckets {
                let before = last.insert(labels.clone(), value).unwrap_or(0.0);
                assert!(value >= before, "{labels} falls at {bound}");
                if bound.is_infinite() {
                    let rest = labels.strip_prefix(&prefix).expect("the name").trim_end_matches(',');
                    let series =
                        if rest.is_empty() { format!("{name}_count") } else { format!("{name}_count{{{rest}}}") };
                    assert_eq!(self.samples.get(&series), Some(&value), "{series}");
                }
            }
        }
    }
}

fn is_name(name: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || byte == b':';
    name.bytes().next().is_some_and(is_first) && name.bytes().all(|byte| is_first(byte) || byte.is_ascii_digit())
}

fn read_labels(text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    for pair in text.split("\",").filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once("=\"").unwrap_or_else(|| panic!("no label: {pair}"));
        let is_new = labels.insert(name.to_owned(), value.trim_end_matches('"').to_owned()).is_none();
        assert!(is_new && is_name(name) && !name.contains(':'), "{text}");
    }
    labels
}

/// Goal: names and types are the lists above, no more and no less; the counts are those of the
/// job that ran. Field reports vllm#13218, #27133, #18354 and production-stack#989.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_known_names_and_move_with_the_work() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny", "--max-model-len", "500"];
    let mut service = Service::start(&folder.path().join("data"), &args, FAST);
    service.wait_ready(PATIENCE).await;
    let before = Page::of(&service).await;
    let listed: BTreeMap<String, String> =
        ENGINE.iter().chain(SERVICE).map(|&(name, kind)| (name.to_owned(), kind.to_owned())).collect();
    assert_eq!(before.types, listed);
    before.check_histograms();
    for (name, bounds) in BOUNDS {
        assert_eq!(before.bounds[*name].join(" "), *bounds, "{name}");
    }
    assert!(before.samples.keys().all(|series| !series.starts_with("vllm:") || series.contains("model_name=\"tiny\"")));
    assert_eq!(before.sum("vllm:generation_tokens_total", ""), 0.0);

    let bytes = input(300, 4);
    let num_bytes = bytes.len() as f64;
    let file = service.upload("input.jsonl", bytes).await;
    let id = service.create(&file, "/v1/completions").await;
    let batch = service.wait_batch(&id, PATIENCE, is_terminal).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    let after = Page::of(&service).await;
    after.check_histograms();
    assert_eq!(after.types, listed, "work brings no new metric");
    // Every 97th has an empty prompt and never reaches the engine; equal prompts run once.
    let num_run = after.sum("vllm:request_success_total", "length");
    assert!((1.0..=297.0).contains(&num_run), "{num_run}");
    for name in
        ["e2e_request_latency_seconds", "request_queue_time_seconds", "request_params_n", "time_to_first_token_seconds"]
    {
        assert_eq!(after.sum(&format!("vllm:{name}_count"), ""), num_run, "{name}");
    }
    assert_eq!(after.sum("vllm:request_generation_tokens_sum", ""), 4.0 * num_run);
    assert_eq!(after.sum("vllm:generation_tokens_total", ""), 4.0 * num_run);
    assert_eq!(after.sum("vllm:inter_token_latency_seconds_count", ""), 3.0 * num_run);
    let prompt_tokens = after.sum("vllm:prompt_tokens_total", "");
    assert!(prompt_tokens >= num_run, "{prompt_tokens}");
    assert_eq!(after.sum("vllm:prompt_tokens_by_source_total", ""), prompt_tokens);
    assert_eq!(after.sum("vllm:request_prompt_tokens_sum", ""), prompt_tokens);
    assert_eq!(after.sum("batch_request_outcomes_total", "code=\"ok\""), 297.0);
    assert_eq!(after.sum("batch_request_outcomes_total", ""), 300.0);
    assert_eq!(after.sum("batch_upload_bytes_total", ""), num_bytes);
    let num_segments = after.sum("batch_segments_total", "");
    assert!(num_segments >= 1.0);
    assert_eq!(after.sum("batch_checkpoint_seconds_count", ""), num_segments);
    assert_eq!(after.sum("batch_db_write_seconds_count", ""), num_segments);
    assert!(after.sum("batch_leases_total", "") >= 1.0);
    assert_eq!(after.sum("http_requests_total", "handler=\"/v1/files\",method=\"POST\",status=\"200\""), 1.0);
    assert!(after.samples.keys().all(|series| !series.contains(&id) && !series.contains("item-")));
}

/// A batch that cannot end while it is held shows among the gauges, which are at most a few seconds old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gauges_tell_the_batches_that_have_not_ended() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = tiny_model(folder.path());
    let args = ["--model", model.to_str().expect("UTF-8"), "--served-model-name", "tiny", "--max-num-seqs", "1"];
    let mut service = Service::start(&folder.path().join("data"), &args, FAST);
    service.wait_ready(PATIENCE).await;
    let file = service.upload("input.jsonl", input(3_000, 400)).await;
    let id = service.create(&file, "/v1/completions").await;
    let running = |batch: &serde_json::Value| batch["request_counts"]["completed"].as_u64() > Some(0);
    service.wait_batch(&id, PATIENCE, running).await;
    let end = Instant::now() + PATIENCE;
    loop {
        let page = Page::of(&service).await;
        let seen = page.sum("batch_requests", "") == 3_000.0 && page.sum("batch_requests", "completed") >= 1.0;
        // Between two requests none runs for a moment.
        let runs = page.sum("vllm:num_requests_running", "") == 1.0;
        if seen && runs && page.sum("batch_shards", "leased") >= 1.0 {
            assert_eq!(page.sum("batch_batches", "in_progress"), 1.0);
            assert_eq!(page.sum("batch_workers_live", ""), 2.0, "the engine's worker and the lifecycle's");
            assert!(page.sum("batch_queue_oldest_seconds", "") > 0.0);
            assert!(page.sum("vllm:kv_cache_usage_perc", "") > 0.0);
            return;
        }
        assert!(Instant::now() < end, "the gauges do not show the batch: {:?}", page.samples);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
