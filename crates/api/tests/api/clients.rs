//! The official JavaScript client against a server of this process. The Python one runs
//! against the real `batch serve` in the system tests.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, OnceLock};

use overnight_testing::ScriptedGenerate;
use overnight_testing::service::MODEL;
use overnight_worker::generate::Generate;

use crate::server::Server;
use crate::words::{Words, mapper};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate lies two folders deep").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "what must be there is said by whoever runs the tests")]
async fn official_javascript_client_runs_the_whole_cycle() {
    let node = ["/usr/bin/node", "/usr/local/bin/node"].map(PathBuf::from).into_iter().find(|path| path.exists());
    let installed = root().join("target/clients/node_modules/openai/package.json").exists();
    let Some(node) = node.filter(|_| installed) else {
        let required = std::env::var("OVERNIGHT_TEST_REQUIRE").unwrap_or_default();
        let detail = "node, and target/clients with the openai package; tests/setup.sh installs that";
        assert!(!required.split(',').any(|word| word == "clients"), "this test needs {detail}");
        eprintln!("skipped: this test needs {detail}");
        return;
    };
    let engine: Arc<dyn Generate> = Arc::new(Words::default());
    let server = Server::with(ScriptedGenerate::echo(), |state| {
        state.generate = Some(Arc::clone(&engine));
        state.mapper = Arc::new(OnceLock::from(mapper()));
    })
    .await;
    let worker = server.service.start_parts(Some((engine, mapper()))).await;
    let address = server.listen().await;
    let script = "openai_client.mjs";
    let output = tokio::process::Command::new(&node)
        .arg(root().join("tests/clients").join(script))
        .args([&format!("http://{address}/v1"), MODEL])
        .stdin(Stdio::null())
        .output()
        .await
        .expect("the client starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script} failed:\n{out}\n{err}");
    assert!(out.trim_end().starts_with("ok "), "{out}");
    worker.shutdown(std::time::Duration::from_secs(5)).await;
}
