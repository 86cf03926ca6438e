//! What an upload holds at most, counted at the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, PutPayload, PutResult, Result};
use overnight_types::FileId;

use super::{Options, PARTS_MAX, Remote};
use crate::store_tests::pattern;
use crate::{Blobs, ObjectName};

/// Memory that takes its time for a part, and counts the parts under way.
#[derive(Debug, Default)]
struct Counting {
    inner: InMemory,
    under_way: AtomicUsize,
    most: AtomicUsize,
    num_aborts: AtomicUsize,
}

#[async_trait]
impl MultipartStore for Counting {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.inner.create_multipart(path).await
    }

    async fn put_part(&self, path: &Path, id: &MultipartId, index: usize, data: PutPayload) -> Result<PartId> {
        let now = self.under_way.fetch_add(1, SeqCst) + 1;
        self.most.fetch_max(now, SeqCst);
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.under_way.fetch_sub(1, SeqCst);
        self.inner.put_part(path, id, index, data).await
    }

    async fn complete_multipart(&self, path: &Path, id: &MultipartId, parts: Vec<PartId>) -> Result<PutResult> {
        self.inner.complete_multipart(path, id, parts).await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        self.num_aborts.fetch_add(1, SeqCst);
        self.inner.abort_multipart(path, id).await
    }
}

async fn counted() -> (Arc<Counting>, Blobs) {
    // One memory, as driver and for parts.
    let inner = InMemory::new();
    let counting = Arc::new(Counting { inner: inner.clone(), ..Counting::default() });
    let remote = Remote::new(counting.clone(), "p".into(), "memory".to_owned());
    let blobs = Blobs::over_remote(Arc::new(inner), remote, &Options::default()).await.unwrap();
    (counting, blobs.with_piece_bytes(1_000))
}

async fn write(blobs: &Blobs, bytes: &[u8]) -> ObjectName {
    let name = ObjectName::file(FileId::new());
    let mut writer = blobs.writer(&name).await.unwrap();
    writer.append(bytes).await.unwrap();
    writer.finish().await.unwrap();
    name
}

#[tokio::test]
async fn an_upload_has_two_parts_under_way_and_all_together_a_fixed_number() {
    let (counting, blobs) = counted().await;
    let bytes = pattern(9_500);
    let name = write(&blobs, &bytes).await;
    assert_eq!(counting.most.load(SeqCst), 2);
    assert!(blobs.read(&name).await.unwrap() == bytes);
    let writes = (0..2 * PARTS_MAX).map(|_| write(&blobs, &bytes));
    let names = futures::future::join_all(writes).await;
    assert_eq!(counting.most.load(SeqCst), PARTS_MAX);
    for name in names {
        assert!(blobs.read(&name).await.unwrap() == bytes);
    }
    assert_eq!(counting.num_aborts.load(SeqCst), 0);
}

#[tokio::test]
async fn what_fits_into_a_part_is_written_by_one_call() {
    let (counting, blobs) = counted().await;
    for len in [0, 1, 999] {
        let name = write(&blobs, &pattern(len)).await;
        assert!(blobs.read(&name).await.unwrap() == pattern(len));
    }
    assert_eq!(counting.most.load(SeqCst), 0);
}
