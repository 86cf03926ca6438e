//! What the documents tell people to type, typed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Home, Said};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate lies two folders deep").to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|err| panic!("{path}: {err}"))
}

/// Runs a line in bash, in the home's folder, with our `batch` on PATH.
fn shell(home: &Home, line: &str) -> Said {
    let folder = Path::new(env!("CARGO_BIN_EXE_batch")).parent().expect("it lies in a folder").to_owned();
    let path = format!("{}:/usr/bin:/bin", folder.display());
    let mut command = Command::new("bash");
    command.args(["-c", line]).env_clear().env("PATH", path).env("HOME", home.path()).current_dir(home.path());
    command.output().expect("bash starts").into()
}

#[test]
fn command_of_the_example_makes_the_committed_file() {
    let home = Home::new();
    let readme = read("jobs/README.md");
    let command = readme.split('`').find(|text| text.starts_with("batch prepare ")).expect("the command is there");
    std::fs::create_dir_all(home.path().join("jobs/examples")).expect("made");
    for name in ["reviews.csv", "reviews.j2"] {
        home.file(&format!("jobs/examples/{name}"), &read(&format!("jobs/examples/{name}")));
    }
    shell(&home, command).expect(0);
    assert!(home.read("jobs/examples/reviews.jsonl") == read("jobs/examples/reviews.jsonl"), "byte for byte");
    // What the base model cannot do is not asked of it.
    shell(&home, "batch validate jobs/examples/reviews.jsonl --endpoint /v1/completions").expect(0);
}

#[test]
fn commands_of_the_documents_exist_with_their_flags() {
    let home = Home::new();
    let mut tried = 0;
    for document in ["README.md", "docs/operations.md", "tests/demo.sh"] {
        for line in read(document).lines() {
            let line = line.trim().split(" #").next().unwrap_or_default().trim().trim_end_matches('&').trim();
            if !line.starts_with("batch ") {
                continue;
            }
            let line = line.replace("$(date +%F)", "today");
            let said = shell(&home, &format!("{line} --help"));
            assert_eq!(said.code, 0, "{document}: {line}: {said:?}");
            tried += 1;
        }
    }
    assert!(tried >= 6, "{tried} commands were found");
    for name in ["jobs/examples/reviews.jsonl", "docs/operations.md", "docs/performance.md", "config/README.md"] {
        assert!(root().join(name).is_file(), "{name} is named by README.md");
    }
    assert!(read("README.md").contains("batch submit jobs/examples/reviews.jsonl"));
}

#[test]
fn tests_that_the_field_reports_name_exist() {
    let mut code = String::new();
    let mut folders = vec![root().join("crates"), root().join("tests"), root().join("kernels")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
            let path = entry.expect("read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                code.push_str(&std::fs::read_to_string(path).expect("UTF-8"));
            }
        }
    }
    let reports = read("docs/field-reports.md");
    let is_test = |name: &&str| {
        name.matches('_').count() > 1 && !name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
    };
    let named: Vec<&str> = reports.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 50, "{} tests are named", named.len());
    let missing: Vec<&str> = named.into_iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert_eq!(missing, Vec::<&str>::new(), "docs/field-reports.md names tests that are not there");
    let cut: Vec<&str> = reports.split('`').skip(1).step_by(2).filter(|name| name.contains('…')).collect();
    assert_eq!(cut, Vec::<&str>::new(), "a name that is cut cannot be looked for");
}

#[test]
fn demo_without_a_compiler_says_what_it_would_install_and_installs_nothing() {
    let home = Home::new();
    let bin = home.path().join("bin");
    std::fs::create_dir_all(&bin).expect("made");
    for tool in ["bash", "dirname", "mkdir", "id"] {
        let found = ["/usr/bin", "/bin"].iter().map(|folder| Path::new(folder).join(tool)).find(|path| path.exists());
        std::os::unix::fs::symlink(found.expect("a usual tool"), bin.join(tool)).expect("linked");
    }
    let demo = |variables: &[(&str, &str)]| -> Said {
        let mut command = Command::new("bash");
        command.arg(root().join("tests/demo.sh")).env_clear().env("PATH", &bin).env("HOME", home.path());
        command.envs(variables.iter().copied()).stdin(std::process::Stdio::null());
        command.output().expect("bash starts").into()
    };
    let said = demo(&[]).expect(1);
    assert!(said.stderr.contains("a C compiler is missing") && said.stderr.contains("YES=1 make demo"), "{said:?}");
    std::os::unix::fs::symlink("/bin/true", bin.join("cc")).expect("linked");
    let said = demo(&[]).expect(1);
    assert!(said.stderr.contains("cargo is missing") && said.stderr.contains("rustup"), "{said:?}");
}
