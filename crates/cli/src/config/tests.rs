use std::collections::BTreeSet;

use super::*;

fn file(text: &str) -> Vec<Setting> {
    parse_file(Path::new("overnight.toml"), text).expect("valid TOML")
}

fn refusal(text: &str) -> String {
    Loaded::from_settings(file(text)).expect_err("refused").to_text(false)
}

#[test]
fn no_setting_gives_the_defaults() {
    let loaded = Loaded::from_settings(Vec::new()).unwrap();
    assert_eq!(loaded.config, Config::default());
    assert_eq!(loaded.origin("worker.lease_ttl"), Origin::Default);
}

#[test]
fn default_toml_is_exactly_the_defaults() {
    let text = include_str!("../../../../config/default.toml");
    let loaded = Loaded::from_settings(file(text)).unwrap();
    assert_eq!(loaded.config, Config::default());
}

#[test]
fn default_toml_names_every_key() {
    let text = include_str!("../../../../config/default.toml");
    let mut section = String::new();
    let mut named = BTreeSet::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = format!("{name}.");
        }
        let line = line.trim_start_matches("# ");
        if let Some((key, _)) = line.split_once(" = ") {
            named.insert(format!("{section}{key}"));
        }
    }
    let missing: Vec<String> = known_keys().into_iter().filter(|key| key != "models" && !named.contains(key)).collect();
    assert!(missing.is_empty(), "config/default.toml lacks {missing:?}");
}

#[test]
fn files_in_config_are_valid() {
    for text in
        [include_str!("../../../../config/dev.toml"), include_str!("../../../../config/production.example.toml")]
    {
        Loaded::from_settings(file(text)).unwrap();
    }
}

#[test]
fn later_layer_wins_and_keeps_its_origin() {
    let mut settings = file("[worker]\nlease_ttl = \"30s\"\n");
    settings.push(Setting::flag("--set worker.lease_ttl=45s", "worker.lease_ttl", "45s"));
    let loaded = Loaded::from_settings(settings).unwrap();
    assert_eq!(loaded.config.worker.lease_ttl, std::time::Duration::from_secs(45));
    assert_eq!(loaded.origin("worker.lease_ttl").to_string(), "flag --set worker.lease_ttl=45s");
}

#[test]
fn unknown_key_names_its_line_and_the_nearest() {
    let text = refusal("[engine]\n\nblok_size = 3\n");
    assert!(text.contains("unknown setting engine.blok_size"), "{text}");
    assert!(text.contains("overnight.toml:3"), "{text}");
    assert!(text.contains("engine.block_size"), "{text}");
}

#[test]
fn wrong_type_names_key_value_and_line() {
    let text = refusal("[api]\nport = \"eight\"\n");
    assert!(text.contains("api.port = \"eight\""), "{text}");
    assert!(text.contains("u16"), "{text}");
    assert!(text.contains("overnight.toml:2"), "{text}");
}

#[test]
fn value_out_of_range_names_what_is_allowed() {
    let text = refusal("[engine]\nblock_size = 48\n");
    assert!(text.contains("engine.block_size = 48"), "{text}");
    assert!(text.contains("power of two from 8 to 256"), "{text}");
    assert!(text.contains("overnight.toml:2"), "{text}");
    let text = refusal("[worker]\nrenew_every = \"14s\"\n");
    assert!(text.contains("worker.renew_every") && text.contains("a third of lease_ttl"), "{text}");
    let text = refusal("[api]\nretry_after = \"2h\"\n");
    assert!(text.contains("api.retry_after"), "{text}");
}

#[test]
fn two_flags_that_contradict_each_other_are_both_named() {
    let settings = vec![
        Setting::flag("--max-num-seqs", "engine.max_num_seqs", 64),
        Setting::flag("--max-num-batched-tokens", "engine.max_num_batched_tokens", 32),
    ];
    let text = Loaded::from_settings(settings).expect_err("refused").to_text(false);
    assert!(text.contains("32") && text.contains("max_num_seqs = 64"), "{text}");
}

#[test]
fn database_that_is_not_built_is_refused_by_name() {
    let text = refusal("[database]\nurl = \"mysql://me:hush@x/y\"\n");
    assert!(text.contains("sqlite:///") && text.contains("postgres://"), "{text}");
    assert!(!text.contains("hush"), "a password that was meant for a server is not shown: {text}");
}

#[test]
fn secrets_are_never_shown() {
    let loaded = Loaded::from_settings(file(
        "[engine]\nkind = \"openai\"\nbase_urls = [\"http://a\"]\napi_key = \"hush\"\n[api]\napi_keys = [\"quiet\"]\n\
         [webhook]\nurl = \"https://a/?key=still\"\nsecrets = [\"whsec_mute\"]\n",
    ))
    .unwrap();
    let shown: String = loaded.shown().iter().map(|setting| format!("{} {}\n", setting.key, setting.value)).collect();
    assert!(["hush", "quiet", "still", "mute"].iter().all(|secret| !shown.contains(secret)), "{shown}");
    assert!(shown.contains("engine.api_key \"***\""), "{shown}");
    let text = refusal("[api]\napi_keys = \"quiet\"\n[webhook]\nsecrets = \"mute\"\n");
    assert!(!text.contains("quiet") && !text.contains("mute"), "{text}");
    let text = refusal("[webhook]\nurl = \"https://a/?key=still\"\n");
    assert!(text.contains("webhook.secrets_file") && !text.contains("still"), "{text}");
}

#[test]
fn human_units_are_taken_where_a_number_is_wanted() {
    let loaded =
        Loaded::from_settings(file("[engine]\nkv_cache_memory_bytes = \"2GiB\"\nmax_model_len = \"4k\"\n")).unwrap();
    assert_eq!(loaded.config.engine.local.kv_cache_memory_bytes, Some(2 << 30));
    assert_eq!(loaded.config.engine.local.max_model_len, Some(4_000));
}

#[test]
fn broken_toml_names_its_line() {
    let failure = parse_file(Path::new("x.toml"), "[api]\nport = = 1\n").expect_err("refused");
    assert!(failure.to_text(false).contains("x.toml:2"), "{}", failure.to_text(false));
}

#[test]
fn keys_of_the_engine_source_are_its_fields() {
    let value = serde_json::to_value(EngineSource::default()).unwrap();
    let fields: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(fields, EngineSource::KEYS.iter().collect::<Vec<_>>());
}

#[test]
fn database_path_is_read_from_its_url() {
    for (url, path) in [
        ("sqlite:///a/b.db", Some("/a/b.db")),
        ("sqlite:a.db", Some("a.db")),
        ("sqlite:///a.db?mode=rwc", Some("/a.db")),
        ("postgres://x", None),
    ] {
        assert_eq!(sqlite_path(url), path, "{url}");
    }
}

/// The URL of a file is used as if it were given, a wrong one is named without its password,
/// and two URLs are refused.
#[test]
fn database_url_may_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("url");
    let read = |text: &str, more: &str| {
        std::fs::write(&path, text).unwrap();
        let settings = file(&format!("[database]\nurl_file = \"{}\"\n{more}", path.display()));
        let mut loaded = Loaded::from_settings(settings)?;
        loaded.read_database_url()?;
        Ok::<_, Failure>(loaded.config.database.url.unwrap())
    };
    let url = read("postgres://me:hush@db/jobs\n", "").unwrap();
    assert_eq!(url.expose(), "postgres://me:hush@db/jobs");
    assert!(!format!("{url:?}").contains("hush"));
    for (text, more, told) in [
        ("postgres://me:hush@db:port/jobs", "", "database.url_file"),
        ("mysql://me:hush@db/jobs", "", "sqlite:///ABSOLUTE/PATH.db"),
        ("", "", "sqlite:///ABSOLUTE/PATH.db"),
        ("postgres://me:hush@db/jobs", "url = \"sqlite:///x.db\"\n", "give one of them"),
    ] {
        let refused = read(text, more).expect_err("refused").to_text(false);
        assert!(refused.contains(told) && !refused.contains("hush"), "{refused}");
    }
    std::fs::remove_file(&path).unwrap();
    let mut gone = Loaded::from_settings(file(&format!("[database]\nurl_file = \"{}\"\n", path.display()))).unwrap();
    let refused = gone.read_database_url().expect_err("refused").to_text(false);
    assert!(refused.contains("No such file"), "{refused}");
}
