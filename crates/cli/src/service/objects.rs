//! The objects that a data folder belongs to, opened and known again at every start.
//!
//! Invariant: a start never takes an empty mount point for an empty service. The
//! object folder's id is kept beside the database; an object folder with another
//! one is refused before anything is read from it.

use std::io::Write;
use std::path::Path;

use overnight_blobs::Blobs;

use crate::config::Config;
use crate::error::{Exit, Failure, Result};

/// In the data folder: the id of the objects that its database names.
const ID_FILE: &str = "objects.id";

/// Opens the objects, making their folder at the first start.
pub(super) fn open(config: &Config, data_dir: &Path) -> Result<Blobs> {
    let url = config.objects_url()?;
    let blobs = Blobs::open(&url).map_err(|err| Failure::from_error(&format!("open the objects at {url}"), &err))?;
    know_again(&blobs, &url, data_dir)?;
    Ok(blobs)
}

/// Compares the objects' id with the one kept, or keeps it at the first start.
fn know_again(blobs: &Blobs, url: &str, data_dir: &Path) -> Result {
    let Some(id) = blobs.id() else { return Ok(()) };
    let path = data_dir.join(ID_FILE);
    let failed = |doing: &str, err: std::io::Error| Failure::from_error(&format!("{doing} {}", path.display()), &err);
    match std::fs::read_to_string(&path) {
        Ok(known) if known.trim() == id.to_string() => Ok(()),
        Ok(_) => {
            let what = format!("the objects at {url} are not those that this data folder was used with");
            let hint = format!("mount their disk; if they were replaced on purpose, remove {}", path.display());
            Err(Failure::new(Exit::Failure, what).code("objects_changed").hint(hint))
        }
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => {
            // Whole or not at all: half an id would refuse every later start.
            let new = path.with_extension("id.new");
            let whole = || {
                let mut file = std::fs::File::create(&new)?;
                file.write_all(format!("{id}\n").as_bytes())?;
                // Renamed before it is on the disk, a power cut could leave an empty file.
                file.sync_all()
            };
            whole().map_err(|err| failed("write", err))?;
            std::fs::rename(&new, &path).map_err(|err| failed("write", err))
        }
        Err(err) => Err(failed("read", err)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A reboot that did not mount the disk: the folder is there, empty.
    #[test]
    fn start_on_a_bare_mount_point_is_refused_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let [data, objects, disk] = ["data", "objects", "disk"].map(|name| dir.path().join(name));
        std::fs::create_dir(&data).unwrap();
        let start = || know_again(&Blobs::local(&objects).unwrap(), "file:///objects", &data);
        start().unwrap();
        start().unwrap();
        std::fs::rename(&objects, &disk).unwrap();
        std::fs::create_dir(&objects).unwrap();
        let failure = start().unwrap_err();
        assert!(failure.message().contains("not those"), "{}", failure.message());
        assert!(start().is_err(), "the refused start changed nothing");
        std::fs::remove_dir_all(&objects).unwrap();
        std::fs::rename(&disk, &objects).unwrap();
        start().unwrap();
        std::fs::remove_file(data.join(ID_FILE)).unwrap();
        std::fs::remove_dir_all(&objects).unwrap();
        start().unwrap();
    }
}
