//! Writes the tiny checkpoints of the goldens: `write_tiny FOLDER`, one folder in it for each.

use overnight_testing::tiny_model::golden_cases;

fn main() -> std::io::Result<()> {
    let folder = std::env::args_os().nth(1).ok_or_else(|| std::io::Error::other("usage: write_tiny FOLDER"))?;
    for (name, model) in golden_cases() {
        model.write(&std::path::Path::new(&folder).join(name))?;
    }
    Ok(())
}
