//! `batch version`.

use crate::App;
use crate::error::Result;

pub(crate) fn run(app: &App) -> Result {
    let version = env!("CARGO_PKG_VERSION");
    if app.ui.is_json() {
        let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        let object = serde_json::json!({"version": version, "target": target, "profile": profile});
        return app.ui.data(&format!("{object}\n"));
    }
    app.ui.data(&format!("batch {version}\n"))
}
