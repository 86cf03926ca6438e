//! Where commands write: never over what they read, and never found out at the end.

use crate::harness::{Home, Server, items};

const INSTANT: [&str; 2] = ["--set", "engine.kind=instant"];

/// Every name that the input could be written under by mistake.
fn names_of(home: &Home, input: &str) -> Vec<String> {
    let path = home.path();
    std::fs::hard_link(path.join(input), path.join("hard")).expect("linked");
    std::os::unix::fs::symlink(input, path.join("soft")).expect("linked");
    std::fs::create_dir_all(path.join("sub")).expect("made");
    vec![
        input.to_owned(),
        format!("sub/../{input}"),
        "hard".to_owned(),
        "soft".to_owned(),
        path.join(input).display().to_string(),
    ]
}

#[test]
fn input_is_never_replaced_by_its_answers() {
    let home = Home::new();
    let text = items(2, "m");
    home.file("in.jsonl", &text);
    home.file("T.j2", "{{ text }}");
    for output in names_of(&home, "in.jsonl") {
        let run = [&["run", "in.jsonl", "-o", &output][..], &INSTANT].concat();
        // No server is asked: what is refused is refused before.
        let submit = ["submit", "in.jsonl", "--results", &output, "--server", "http://127.0.0.1:9"];
        let prepare = ["prepare", "in.jsonl", "-o", &output, "--model", "m"];
        let template = ["prepare", "other", "--template", "in.jsonl", "-o", &output, "--model", "m"];
        let join = ["results", "last", "--join", "in.jsonl", "-o", &output, "--server", "http://127.0.0.1:9"];
        for arguments in [&run[..], &submit, &prepare, &template, &join] {
            let said = home.batch(arguments).expect(2);
            assert!(said.stderr.contains("it would be replaced"), "{arguments:?}: {said:?}");
            assert_eq!(home.read("in.jsonl"), text, "{arguments:?}");
        }
        let said = home.batch(&[&run[..], &["--json"]].concat()).expect(2);
        assert!(said.stderr.contains("\"output_is_input\""), "{said:?}");
    }
    assert!(!home.path().join("overnight-data").exists(), "refused before anything is made");
    // By the name of what goes beside the output, too.
    home.file("out.errors.jsonl", &text);
    home.batch(&[&["run", "out.errors.jsonl", "-o", "out.jsonl"][..], &INSTANT].concat()).expect(2);
    assert_eq!(home.read("out.errors.jsonl"), text);
    home.file("out.invalid.jsonl", &text);
    home.batch(&["prepare", "out.invalid.jsonl", "-o", "out.jsonl", "--model", "m", "--on-invalid", "skip"]).expect(2);
    assert_eq!(home.read("out.invalid.jsonl"), text);
}

#[test]
fn file_that_stdin_is_counts_as_input() {
    let home = Home::new();
    let text = items(2, "m");
    home.file("in.jsonl", &text);
    let stdin = std::fs::File::open(home.path().join("in.jsonl")).expect("there");
    let arguments = [&["run", "-", "-o", "in.jsonl"][..], &INSTANT].concat();
    let said: crate::harness::Said = home.command(&arguments).stdin(stdin).output().expect("starts").into();
    assert!(said.expect(2).stderr.contains("the file that stdin is"));
    assert_eq!(home.read("in.jsonl"), text);
}

#[test]
fn output_that_cannot_be_written_stops_before_the_work() {
    let home = Home::new();
    home.file("in.jsonl", &items(2, "m"));
    std::fs::create_dir(home.path().join("folder")).expect("made");
    for output in ["no/such/out.jsonl", "folder", "/proc/out.jsonl"] {
        for arguments in [
            &[&["run", "in.jsonl", "-o", output][..], &INSTANT].concat()[..],
            &["submit", "in.jsonl", "--results", output, "--server", "http://127.0.0.1:9"],
            &["results", "last", "-o", output, "--server", "http://127.0.0.1:9"],
            &["files", "get", "file-1", "-o", output, "--server", "http://127.0.0.1:9"],
            &["prepare", "in.jsonl", "-o", output, "--model", "m"],
        ] {
            let said = home.batch(arguments).expect(2);
            assert!(said.stderr.contains(&format!("could not write {output}")), "{arguments:?}: {said:?}");
        }
    }
    assert!(!home.path().join("overnight-data").exists(), "nothing was computed");
}

#[test]
fn results_do_not_replace_a_file_that_is_their_input() {
    let home = Home::new();
    let _server = Server::instant(&home);
    let text = items(2, "m");
    home.file("in.jsonl", &text);
    home.batch(&["submit", "in.jsonl", "--wait"]).expect(0);
    let said = home.batch(&["results", "last", "-o", "in.jsonl"]).expect(2);
    assert!(said.stderr.contains("in.jsonl is the input of this batch"), "{said:?}");
    assert_eq!(home.read("in.jsonl"), text);
    home.batch(&["results", "last", "-o", "out.jsonl"]).expect(0);
    home.batch(&["results", "last", "-o", "out.jsonl"]).expect(0);
}

#[test]
fn lines_that_are_set_aside_lie_beside_the_output_in_one_form() {
    let home = Home::new();
    std::fs::create_dir(home.path().join("data")).expect("made");
    home.file("data/in.jsonl", &(items(2, "m") + "broken\n"));
    home.file("data/rows.jsonl", "{\"text\":\"a\"}\nbroken\n");
    let run = [&["run", "data/in.jsonl", "-o", "run.jsonl", "--on-invalid", "skip"][..], &INSTANT].concat();
    home.batch(&run).expect(0);
    let prepare = ["prepare", "data/rows.jsonl", "-o", "items.jsonl", "--model", "m", "--on-invalid", "skip"];
    home.batch(&prepare).expect(0);
    for (name, line) in [("run.invalid.jsonl", 3), ("items.invalid.jsonl", 2)] {
        let row: serde_json::Value = serde_json::from_str(&home.read(name)).expect("one line");
        assert_eq!(row.as_object().expect("an object").keys().collect::<Vec<_>>(), ["line", "reasons", "text"]);
        assert_eq!((&row["line"], &row["text"]), (&line.into(), &"broken".into()), "{name}");
        assert!(row["reasons"][0]["code"].is_string() && row["reasons"][0]["message"].is_string(), "{row}");
    }
    let others = std::fs::read_dir(home.path().join("data")).expect("there").count();
    assert_eq!(others, 2, "nothing is put beside the input");
}
