//! What needs no server.

use crate::harness::{Home, items};

#[test]
fn help_is_as_agreed() {
    let home = Home::new();
    for (name, arguments) in [
        ("batch", &["--help"][..]),
        ("submit", &["submit", "-h"]),
        ("status", &["status", "-h"]),
        ("resume", &["resume", "-h"]),
        ("results", &["results", "-h"]),
        ("exit-codes", &["help", "exit-codes"]),
    ] {
        let said = home.batch(arguments).expect(0);
        assert_eq!(said.stderr, "");
        insta::assert_snapshot!(format!("help_{name}"), said.stdout);
    }
}

#[test]
fn every_command_has_help_within_100_columns() {
    let home = Home::new();
    for name in [
        "submit",
        "status",
        "resume",
        "results",
        "list",
        "show",
        "errors",
        "pause",
        "cancel",
        "retry",
        "validate",
        "prepare",
        "run",
        "serve",
        "worker",
        "models",
        "files",
        "config",
        "db",
        "bench",
        "doctor",
        "completions",
        "man",
        "version",
    ] {
        let said = home.batch(&[name, "--help"]).expect(0);
        let wide: Vec<&str> = said.stdout.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(wide.is_empty(), "{name}: {wide:?}");
    }
}

#[test]
fn help_is_searched_by_word() {
    let said = Home::new().batch(&["--help=block"]).expect(0);
    assert!(said.stdout.contains("batch serve --block-size"), "{}", said.stdout);
    assert!(!said.stdout.contains("--port"), "{}", said.stdout);
}

#[test]
fn command_of_a_later_version_says_what_to_use() {
    let home = Home::new();
    for name in ["label", "scheduler", "embed", "rerank", "kernels"] {
        let said = home.batch(&[name]).expect(2);
        assert!(said.stderr.starts_with("error: ") && said.stderr.contains("is not built yet"), "{}", said.stderr);
        assert_eq!(said.stderr.lines().count(), 1, "{}", said.stderr);
        let said = home.batch(&[name, "--json"]).expect(2);
        let error: serde_json::Value = serde_json::from_str(&said.stderr).expect("errors are JSON too");
        assert_eq!(error["error"]["code"], "not_built");
    }
}

#[test]
fn format_that_is_not_built_says_how_to_get_there() {
    let home = Home::new();
    let said = home.batch(&["results", "last", "--format", "parquet"]).expect(2);
    assert!(said.stderr.starts_with("error: --format parquet is not built: ") && said.stderr.contains("duckdb -c"));
    let said = home.batch(&["results", "last", "--format", "parquet", "--json"]).expect(2);
    let error: serde_json::Value = serde_json::from_str(&said.stderr).expect("errors are JSON too");
    assert_eq!(error["error"]["code"], "not_built");
    let said = home.batch(&["results", "last", "--format", "xml"]).expect(2);
    assert!(said.stderr.contains("jsonl"), "another word is told the known ones: {said:?}");
}

#[test]
fn flag_of_vllm_that_is_missing_is_refused_with_a_reason() {
    let said = Home::new().batch(&["serve", "--model", "m", "--tensor-parallel-size", "2"]).expect(2);
    assert!(said.stderr.contains("--tensor-parallel-size is not accepted: "), "{}", said.stderr);
}

#[test]
fn no_subcommand_is_abbreviated() {
    Home::new().batch(&["stat"]).expect(2);
}

#[test]
fn setting_out_of_range_stops_with_its_origin() {
    let home = Home::new();
    home.file("overnight.toml", "[engine]\nblock_size = 48\n");
    let said = home.batch(&["config", "show"]).expect(2);
    assert!(
        said.stderr.contains("engine.block_size = 48") && said.stderr.contains("overnight.toml:2"),
        "{}",
        said.stderr
    );
    home.file("overnight.toml", "");
    let said = home.batch_with(&[("OVERNIGHT_WORKER__LEASE_TTL", "never")], &["config", "show"]).expect(2);
    assert!(said.stderr.contains("environment OVERNIGHT_WORKER__LEASE_TTL"), "{}", said.stderr);
    let said = home.batch_with(&[("OVERNIGHT_LEASE", "1")], &["config", "show"]).expect(2);
    assert!(said.stderr.contains("unknown variable OVERNIGHT_LEASE"), "{}", said.stderr);
    let said = home.batch(&["config", "show", "--set", "api.prot=1"]).expect(2);
    assert!(said.stderr.contains("did you mean api.port?"), "{}", said.stderr);
}

#[test]
fn config_show_names_each_origin() {
    let home = Home::new();
    home.file("overnight.toml", "# mine\n[worker]\nattempts_max = 7\n");
    let variables = [("OVERNIGHT_API__PORT", "8123"), ("OVERNIGHT_DATA_DIR", "elsewhere")];
    let said = home.batch_with(&variables, &["config", "show", "--changed", "--set", "engine.block_size=32"]).expect(0);
    insta::assert_snapshot!("config_changed", said.stdout);
    let said = home.batch(&["config", "show", "--json"]).expect(0);
    let all = said.json();
    assert!(all.as_array().is_some_and(|all| all.len() > 50), "{all}");
    assert_eq!(home.batch(&["config", "get", "worker.attempts_max"]).expect(0).stdout, "7\n");
}

#[test]
fn config_set_keeps_comments_and_refuses_nonsense() {
    let home = Home::new();
    home.file("overnight.toml", "# mine\n[worker]\nattempts_max = 7 # seven\n");
    home.batch(&["config", "set", "worker.attempts_max", "9"]).expect(0);
    home.batch(&["config", "set", "api.host", "localhost"]).expect(0);
    let text = home.read("overnight.toml");
    assert!(text.contains("# mine") && text.contains("attempts_max = 9 # seven"), "{text}");
    assert!(text.contains("host = \"localhost\""), "{text}");
    home.batch(&["config", "set", "worker.attempts_max", "0"]).expect(2);
    assert_eq!(home.read("overnight.toml"), text, "a refused value changes nothing");
}

#[test]
fn invalid_line_is_shown_with_place_and_remedy() {
    let home = Home::new();
    let mut text = items(3, "m");
    text.push_str(&items(1, "m"));
    text.push_str("{broken\n");
    let name = home.file("items.jsonl", &text);
    let said = home.batch(&["validate", &name]).expect(6);
    assert_eq!(said.stdout, "");
    insta::assert_snapshot!("validate_invalid", said.stderr);
    let said = home.batch(&["validate", &name, "--json"]).expect(6);
    let report = said.json();
    assert_eq!((report["valid"].as_bool(), report["errors"]["total"].as_u64()), (Some(false), Some(2)));
    assert!(serde_json::from_str::<serde_json::Value>(&said.stderr).is_ok(), "{}", said.stderr);
}

#[test]
fn valid_file_is_counted() {
    let home = Home::new();
    let name = home.file("items.jsonl", &("\u{feff}".to_owned() + &items(3, "m") + "\n"));
    let said = home.batch(&["validate", &name]).expect(0);
    assert_eq!(said.stdout, "valid: 3 requests for /v1/completions, model m\n");
    let said = home.batch_fed(&items(2, "m"), &["validate", "-"]).expect(0);
    assert_eq!(said.stdout, "valid: 2 requests for /v1/completions, model m\n");
}

#[test]
fn prepared_lines_are_valid_and_stable() {
    let home = Home::new();
    home.file("reviews.csv", "id,text\nr1,\"good, really\"\nr2,bad\n");
    home.file("prompt.j2", "Review: {{ text }}\nLabel:");
    let arguments = [
        "prepare",
        "reviews.csv",
        "-o",
        "items.jsonl",
        "--model",
        "m",
        "--template",
        "prompt.j2",
        "--id-field",
        "id",
        "--endpoint",
        "/v1/completions",
        "--max-tokens",
        "2",
        "--temperature",
        "0",
    ];
    home.batch(&arguments).expect(0);
    let first = home.read("items.jsonl");
    insta::assert_snapshot!("prepared", first);
    home.batch(&arguments).expect(0);
    assert_eq!(home.read("items.jsonl"), first);
    home.batch(&["validate", "items.jsonl"]).expect(0);
}

#[test]
fn row_that_cannot_be_used_is_named_and_set_aside() {
    let home = Home::new();
    home.file("rows.jsonl", "{\"text\":\"a\"}\n[1]\n{\"text\":\"b\"}\n");
    let said = home.batch(&["prepare", "rows.jsonl", "-o", "items.jsonl", "--model", "m"]).expect(6);
    assert!(said.stderr.contains("rows.jsonl:2"), "{}", said.stderr);
    assert!(!home.path().join("items.jsonl").exists(), "nothing was written");
    home.batch(&["prepare", "rows.jsonl", "-o", "items.jsonl", "--model", "m", "--on-invalid", "skip"]).expect(0);
    assert_eq!(home.read("items.jsonl").lines().count(), 2);
    assert!(home.read("items.invalid.jsonl").contains("\"line\":2"));
}

#[test]
fn refused_row_leaves_a_pipe_empty() {
    let home = Home::new();
    home.file("rows.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n[1]\n");
    let prepare = ["prepare", "rows.jsonl", "-o", "-", "--model", "m"];
    let said = home.batch(&prepare).expect(6);
    assert_eq!(said.stdout, "", "whoever reads the pipe takes nothing for the whole");
    assert!(said.stderr.contains("nothing was written"), "{said:?}");
    let said = home.batch(&[&prepare[..], &["--on-invalid", "skip"]].concat()).expect(0);
    assert_eq!(said.stdout.lines().count(), 2);
    home.file("rows.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n");
    assert_eq!(home.batch(&prepare).expect(0).stdout.lines().count(), 2);
}

#[test]
fn dry_run_sets_nothing_aside() {
    let home = Home::new();
    home.file("in.jsonl", &(items(3, "m") + "broken\n"));
    let said = home.batch(&["submit", "in.jsonl", "--on-invalid", "skip", "--dry-run"]).expect(0);
    assert!(said.stderr.contains("1 line of in.jsonl would be set aside"), "{said:?}");
    assert!(said.stderr.contains("3 requests"), "{said:?}");
    assert!(!home.path().join("in.invalid.jsonl").exists());
}

#[test]
fn seed_that_no_weights_are_drawn_from_is_refused() {
    let home = Home::new();
    home.file("in.jsonl", &items(1, "m"));
    let said =
        home.batch(&["run", "in.jsonl", "-o", "o.jsonl", "--set", "engine.kind=instant", "--seed", "42"]).expect(2);
    assert!(said.stderr.contains("engine.seed = 42") && said.stderr.contains("--param seed=N"), "{said:?}");
    let said = home.batch(&["serve", "--model", "m", "--seed", "42"]).expect(2);
    assert!(said.stderr.contains("--load-format dummy"), "{said:?}");
    assert!(!home.path().join("overnight-data").exists(), "refused before anything is made");
}

#[test]
fn paths_of_any_bytes_are_taken() {
    use std::os::unix::ffi::OsStrExt;
    let home = Home::new();
    for name in [&b"odd-\xff\xfe.jsonl"[..], b"two\nlines \x1b[31m.jsonl"] {
        let path = home.path().join(std::ffi::OsStr::from_bytes(name));
        if std::fs::write(&path, items(2, "m")).is_err() {
            eprintln!("skipped: this file system takes no such name: {name:?}");
            continue;
        }
        let run = |command: &str, more: &[&str]| -> crate::harness::Said {
            home.command(&[command]).arg(path.file_name().expect("named")).args(more).output().expect("starts").into()
        };
        assert_eq!(run("validate", &[]).expect(0).stdout, "valid: 2 requests for /v1/completions, model m\n");
        let said = run("submit", &["--dry-run"]).expect(0);
        assert!(!said.stderr.contains('\x1b') && said.stderr.lines().count() == 1, "{said:?}");
        run("run", &["-o", "out.jsonl", "--set", "engine.kind=instant"]).expect(0);
        assert_eq!(home.read("out.jsonl").lines().count(), 2);
        std::fs::write(&path, "broken\n").expect("written");
        let said = run("validate", &[]).expect(6);
        assert!(said.stderr.contains("odd-") || said.stderr.contains("two\\nlines \\u{1b}[31m.jsonl:1"), "{said:?}");
    }
}

#[test]
fn continuous_integration_gets_the_output_of_a_file() {
    let home = Home::new();
    home.file("in.jsonl", &items(2, "m"));
    let plain = home.batch(&["submit", "in.jsonl", "--dry-run"]).expect(0);
    let said = home.batch_with(&[("CI", "1"), ("TERM", "xterm")], &["submit", "in.jsonl", "--dry-run"]).expect(0);
    assert_eq!((said.stdout, said.stderr), (plain.stdout, plain.stderr));
}

#[test]
fn bench_of_a_later_version_is_named_as_such() {
    let home = Home::new();
    for name in ["serve", "batch", "latency", "tune"] {
        let said = home.batch(&["bench", name]).expect(2);
        assert!(said.stderr.contains(&format!("`bench {name}` is not built yet: ")), "{said:?}");
    }
}

#[test]
fn bench_of_kernels_without_a_gpu_says_what_the_doctor_says() {
    let home = Home::new();
    // Also where there is one.
    let no_gpu = [("CUDA_VISIBLE_DEVICES", "")];
    let said = home.batch_with(&no_gpu, &["bench", "kernels", "--json"]).expect(1);
    let error: serde_json::Value = serde_json::from_str(&said.stderr).expect("an error object");
    assert_eq!(error["error"]["code"], "gpu_not_usable", "{error}");
    assert!(error["error"]["hint"].as_str().expect("a hint").contains("batch doctor"), "{error}");
    assert_eq!(said.stdout, "");
    let doctor = home.batch_with(&no_gpu, &["doctor", "--json", "--set", "engine.device=cuda"]).expect(1).json();
    assert_eq!(doctor["gpu"]["result"], "FAIL", "{doctor}");
    assert_eq!(doctor["gpu"]["found"], error["error"]["message"]);
}

// curator#295, #231: damaged state, and what the command line advises.
#[test]
fn damaged_database_is_named_with_the_one_safe_step() {
    let home = Home::new();
    home.batch(&["db", "migrate"]).expect(0);
    let path = home.path().join("overnight-data/overnight.db");
    let sound = std::fs::read(&path).expect("made");
    let middle = sound.len() / 2;
    let torn = [&sound[..middle], &vec![0x5a; sound.len() - middle][..]].concat();
    for damaged in [b"not a database at all".repeat(100), torn] {
        std::fs::write(&path, &damaged).expect("written");
        let said = home.batch(&["db", "check"]).expect(1);
        assert!(said.stderr.contains("overnight.db"), "{said:?}");
        assert!(said.stderr.contains("cp -a ") && said.stderr.contains("overnight-data.kept"), "{said:?}");
        assert_eq!(std::fs::read(&path).expect("there"), damaged, "looking changes nothing");
    }
}

#[test]
fn server_that_is_not_there_is_exit_7_and_names_the_way_without_one() {
    let home = Home::new();
    let said = home.batch(&["list", "--server", "http://127.0.0.1:9"]).expect(7);
    assert!(said.stderr.contains("http://127.0.0.1:9") && said.stderr.contains("batch run"), "{}", said.stderr);
    let said = home.batch(&["list", "--server", "http://127.0.0.1:9", "--json"]).expect(7);
    assert_eq!(said.stdout, "");
    let error: serde_json::Value = serde_json::from_str(&said.stderr).expect("JSON");
    assert_eq!(error["error"]["code"], "server_unreachable");
}

#[test]
fn run_needs_no_server_and_repeats_nothing() {
    let home = Home::new();
    home.file("in.jsonl", &items(70, "m"));
    let arguments = ["run", "in.jsonl", "-o", "out.jsonl", "--set", "engine.kind=instant"];
    let said = home.batch(&arguments).expect(0);
    assert_eq!(said.stdout, "");
    let output = home.read("out.jsonl");
    let ids: Vec<String> = output
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["custom_id"].to_string())
        .collect();
    assert_eq!(ids, (0..70).map(|index| format!("\"c{index}\"")).collect::<Vec<_>>(), "input order");
    assert!(!home.path().join("out.errors.jsonl").exists(), "no failure, no file");
    // The same command is known: the same bytes, and no second job.
    std::fs::remove_file(home.path().join("out.jsonl")).expect("there");
    home.batch(&arguments).expect(0);
    assert_eq!(home.read("out.jsonl"), output);
    assert_eq!(std::fs::read_dir(home.path().join("overnight-data/runs")).expect("runs").count(), 1);
    // vLLM's spelling.
    let said = home.batch(&["run", "-i", "in.jsonl", "-o", "two.jsonl", "--set", "engine.kind=instant", "--json"]);
    assert_eq!(said.expect(0).json()["request_counts"]["completed"], 70);
}

#[test]
fn run_with_invalid_input_writes_nothing() {
    let home = Home::new();
    home.file("in.jsonl", &(items(2, "m") + "nonsense\n"));
    let said = home.batch(&["run", "in.jsonl", "-o", "out.jsonl", "--set", "engine.kind=instant"]).expect(6);
    assert!(said.stderr.contains("in.jsonl:3"), "{}", said.stderr);
    assert!(!home.path().join("out.jsonl").exists());
}

#[test]
fn model_that_is_not_here_is_exit_5_with_the_command_that_fetches_it() {
    let home = Home::new();
    let said = home.batch(&["serve", "--model", "gemma-3-270m"]).expect(5);
    assert!(said.stderr.contains("batch models pull gemma-3-270m"), "{}", said.stderr);
    home.batch(&["serve"]).expect(2);
}

#[test]
fn door_open_to_others_needs_a_key() {
    let said = Home::new().batch(&["serve", "--host", "0.0.0.0", "--set", "engine.kind=instant"]).expect(2);
    assert!(said.stderr.contains("--insecure") && said.stderr.contains("--api-key-file"), "{}", said.stderr);
}

#[test]
fn completions_load_and_man_pages_are_written() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish"] {
        let said = home.batch(&["completions", shell]).expect(0);
        assert!(said.stdout.contains("submit"), "{shell}");
    }
    let script = home.batch(&["completions", "bash"]).stdout;
    home.file("batch.bash", &script);
    for shell in ["zsh", "fish"] {
        home.file(&format!("batch.{shell}"), &home.batch(&["completions", shell]).stdout);
    }
    // `man --warnings` reads a page and says what is wrong with it.
    home.batch(&["man", "man"]).expect(0);
    for (program, arguments) in [
        ("bash", &["-n", "batch.bash"][..]),
        ("zsh", &["-n", "batch.zsh"]),
        ("fish", &["--no-execute", "batch.fish"]),
        ("man", &["--warnings", "-l", "man/batch-submit.1"]),
    ] {
        let checks = std::process::Command::new(program).args(arguments).current_dir(home.path()).output();
        match checks {
            Ok(said) => assert!(said.status.success() && said.stderr.is_empty(), "{program}: {said:?}"),
            Err(err) => eprintln!("skipped: {program} does not start: {err}"),
        }
    }
    assert!(home.read("man/batch-submit.1").starts_with(".ie"), "roff");
}

#[test]
fn database_commands_make_check_and_copy() {
    let home = Home::new();
    home.batch(&["db", "check"]).expect(5);
    home.batch(&["db", "migrate"]).expect(0);
    let said = home.batch(&["db", "check", "--json"]).expect(0);
    assert_eq!(said.json()["findings"], serde_json::json!([]));
    home.batch(&["db", "backup", "copy.db"]).expect(0);
    assert!(home.path().join("copy.db").is_file());
    home.batch(&["db", "backup", "copy.db"]).expect(2);
}

#[test]
fn doctor_says_what_it_found() {
    let home = Home::new();
    let said = home.batch(&["doctor", "--json"]);
    let checks = said.json();
    assert_eq!(checks["configuration"]["result"], "PASS", "{checks}");
    assert_eq!(checks["objects"]["result"], "PASS", "{checks}");
    assert!(!home.path().join("overnight-data").exists(), "looking makes nothing");
}

#[test]
fn output_that_cannot_be_written_is_named() {
    let home = Home::new();
    home.file("rows.txt", "a\n");
    let said = home.batch(&["prepare", "rows.txt", "-o", "/dev/full", "--model", "m"]).expect(1);
    assert!(said.stderr.contains("/dev/full"), "{}", said.stderr);
}

#[test]
fn closed_pipe_is_a_quiet_success() {
    let home = Home::new();
    let program = env!("CARGO_BIN_EXE_batch");
    let script = format!("set -o pipefail; '{program}' config show --json | head -c 1 >/dev/null; echo $?");
    let output = home.command(&[]).get_program().to_owned();
    drop(output);
    let said =
        std::process::Command::new("bash").args(["-c", &script]).current_dir(home.path()).output().expect("bash");
    assert_eq!(String::from_utf8_lossy(&said.stdout), "0\n");
    assert_eq!(String::from_utf8_lossy(&said.stderr), "");
}
