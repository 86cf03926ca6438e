//! Remote stores that are slow, torn, refusing, killed or not there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, ObjectStoreExt};
use overnight_types::{FileId, chain};

use super::address::Address;
use super::own_store::{OwnStore, eventually};
use super::proxy::Proxy;
use super::{Options, Unmarked, connect};
use crate::store_tests::pattern;
use crate::test_stores::{self, BUCKET, s3_environment, service, setting};
use crate::{Blobs, Error, ObjectName};

/// What happens to a request, by its method and query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The store answers this status and does nothing.
    Status(u16),
    /// The store does it, and the answer is lost.
    Lost,
}

/// Faults for the next requests whose `METHOD query` starts with a text, each once.
#[derive(Debug, Clone, Default)]
struct Faults {
    due: Arc<Mutex<BTreeMap<String, Vec<Fault>>>>,
    num_hit: Arc<AtomicU32>,
}

impl Faults {
    fn next(&self, start: &str, faults: &[Fault]) {
        self.due.lock().unwrap().insert(start.to_owned(), faults.to_vec());
    }

    fn take(&self, request: &str) -> Option<Fault> {
        let mut due = self.due.lock().unwrap();
        let (_, faults) = due.iter_mut().find(|(start, faults)| request.starts_with(*start) && !faults.is_empty())?;
        self.num_hit.fetch_add(1, SeqCst);
        Some(faults.remove(0))
    }

    async fn open(&self, url: &str, options: &Options) -> Blobs {
        let (driver, remote) = connect(&Address::parse(url).unwrap(), options, Arc::new(self.clone())).unwrap();
        Blobs::over_remote(driver, remote, options).await.unwrap_or_else(|err| panic!("{}", chain(&err)))
    }
}

impl HttpConnector for Faults {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Faulty { inner, faults: self.clone() }))
    }
}

#[derive(Debug)]
struct Faulty {
    inner: HttpClient,
    faults: Faults,
}

#[async_trait]
impl HttpService for Faulty {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let shown = format!("{} {}", request.method(), request.uri().query().unwrap_or_default());
        match self.faults.take(&shown) {
            None => self.inner.execute(request).await,
            Some(Fault::Status(status)) => {
                let mut answer = HttpResponse::new(Bytes::from_static(b"<Error><Code>SlowDown</Code></Error>").into());
                *answer.status_mut() = status.try_into().unwrap();
                Ok(answer)
            }
            Some(Fault::Lost) => {
                self.inner.execute(request).await?;
                Err(HttpError::new(HttpErrorKind::Interrupted, std::io::Error::other("the answer was lost")))
            }
        }
    }
}

/// A store on moto with faults; `None` where moto is not there.
async fn faulty() -> Option<(Faults, Blobs)> {
    let endpoint = service("s3", "OVERNIGHT_TEST_S3_MOTO")?;
    let (faults, retry_for) = (Faults::default(), Duration::from_secs(3));
    let options = Options { environment: s3_environment(&endpoint), retry_for, ..Options::default() };
    let blobs = faults.open(&test_stores::new_url("s3"), &options).await;
    Some((faults, blobs))
}

/// Unfinished uploads below the store's prefix, by moto's own list of them.
async fn num_uploads(blobs: &Blobs) -> usize {
    let endpoint = setting("OVERNIGHT_TEST_S3_MOTO").unwrap();
    let prefix = blobs.remote().unwrap().prefix.to_string();
    let listed =
        tokio::task::spawn_blocking(move || http_get(&endpoint, &format!("/{BUCKET}?uploads&prefix={prefix}")));
    let listed = listed.await.unwrap();
    assert!(listed.contains("<ListMultipartUploadsResult"), "{listed}");
    listed.matches("<Upload>").count()
}

/// A plain GET: moto checks no signature.
fn http_get(endpoint: &str, target: &str) -> String {
    use std::io::{Read, Write};
    let host = endpoint.strip_prefix("http://").unwrap();
    let mut connection = std::net::TcpStream::connect(host).unwrap();
    write!(connection, "GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer
}

async fn num_records(blobs: &Blobs) -> usize {
    let folder = blobs.remote().unwrap().path(".overnight-uploads");
    blobs.driver().list(Some(&folder)).try_collect::<Vec<_>>().await.unwrap().len()
}

/// Two full parts and a byte.
fn three_parts() -> Vec<u8> {
    pattern((10 << 20) + 1)
}

#[tokio::test]
async fn refusals_that_pass_are_waited_for() {
    let Some((faults, blobs)) = faulty().await else { return };
    let name = ObjectName::file(FileId::new());
    faults.next("PUT ", &[Fault::Status(503), Fault::Lost, Fault::Status(500)]);
    blobs.put(&name, Bytes::from_static(b"x")).await.unwrap();
    faults.next("GET ", &[Fault::Status(429), Fault::Lost]);
    assert_eq!(blobs.read(&name).await.unwrap(), "x");
    assert_eq!(faults.num_hit.load(SeqCst), 5);
}

// A segment or published file is named by what it holds: written twice it is the same.
#[tokio::test]
async fn end_of_an_upload_whose_answer_was_lost_is_found_by_its_object() {
    let Some((faults, blobs)) = faulty().await else { return };
    let (name, bytes) = (ObjectName::file(FileId::new()), three_parts());
    // The end is done, and refused when it is asked for again: there is no such upload then.
    faults.next("POST uploadId", &[Fault::Lost, Fault::Status(400)]);
    let mut writer = blobs.writer(&name).await.unwrap();
    writer.append(&bytes).await.unwrap();
    assert_eq!(num_records(&blobs).await, 1, "it is recorded before its first part");
    writer.finish().await.unwrap();
    assert_eq!(faults.num_hit.load(SeqCst), 2);
    assert!(blobs.read(&name).await.unwrap() == bytes);
    assert_eq!((num_uploads(&blobs).await, num_records(&blobs).await), (0, 0));
}

#[tokio::test]
async fn upload_that_fails_is_aborted_however_often_it_takes() {
    let Some((faults, blobs)) = faulty().await else { return };
    let name = ObjectName::file(FileId::new());
    let mut writer = blobs.writer(&name).await.unwrap();
    writer.append(&three_parts()).await.unwrap();
    faults.next("POST uploadId", &[Fault::Status(400)]);
    // The first tries to abort fail: a lost answer is not asked for again by the driver.
    faults.next("DELETE uploadId", &[Fault::Status(400), Fault::Status(403)]);
    let err = writer.finish().await.unwrap_err();
    assert!(chain(&err).contains("400"), "{}", chain(&err));
    eventually("uploads", 0, async || num_uploads(&blobs).await).await;
    eventually("records", 0, async || num_records(&blobs).await).await;
    assert_eq!(faults.num_hit.load(SeqCst), 3);
    assert_eq!(blobs.size(&name).await.unwrap(), None);
}

#[tokio::test]
async fn dropped_and_aborted_uploads_leave_no_part() {
    let Some((_, blobs)) = faulty().await else { return };
    for is_dropped in [true, false] {
        let mut writer = blobs.writer(&ObjectName::file(FileId::new())).await.unwrap();
        writer.append(&three_parts()).await.unwrap();
        assert_eq!(num_uploads(&blobs).await, 1);
        match is_dropped {
            true => drop(writer),
            false => writer.abort().await.unwrap(),
        }
        eventually("uploads", 0, async || num_uploads(&blobs).await).await;
        // A part that was on its way may still arrive: then the sweep aborts once more.
        blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::ZERO).await.unwrap();
        assert_eq!((num_uploads(&blobs).await, num_records(&blobs).await), (0, 0));
    }
}

// Nobody lists uploads for every S3 dialect: our own records find what a kill left.
#[tokio::test]
async fn uploads_of_killed_writers_are_swept_once_they_are_old() {
    let Some((_, blobs)) = faulty().await else { return };
    let mut writer = blobs.writer(&ObjectName::file(FileId::new())).await.unwrap();
    writer.append(&three_parts()).await.unwrap();
    // As kill -9 would: the writer's own clean-up never runs.
    std::mem::forget(writer);
    assert_eq!(
        blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::from_secs(3_600)).await.unwrap(),
        0,
        "a young one may be in use"
    );
    assert_eq!(num_uploads(&blobs).await, 1);
    assert_eq!(blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::ZERO).await.unwrap(), 1);
    assert_eq!((num_uploads(&blobs).await, num_records(&blobs).await), (0, 0));
    assert_eq!(blobs.sweep_leftovers(overnight_types::Timestamp::now(), Duration::ZERO).await.unwrap(), 0);
}

#[tokio::test]
async fn torn_answer_is_read_on_from_where_it_broke() {
    let Some(endpoint) = service("s3", "OVERNIGHT_TEST_S3_MOTO") else { return };
    let proxy = Proxy::before(&endpoint).await;
    let options = Options { environment: s3_environment(&proxy.endpoint), ..Options::default() };
    let blobs = Blobs::open(&test_stores::new_url("s3"), &options).await.unwrap();
    let (name, bytes) = (ObjectName::file(FileId::new()), pattern(5 << 20));
    blobs.put(&name, bytes.clone().into()).await.unwrap();
    proxy.cut_after(1 << 20);
    assert!(blobs.read(&name).await.unwrap() == bytes);
    assert_eq!(proxy.num_cuts(), 1);
    proxy.cut_after(3 << 20);
    let streamed: Vec<Bytes> = blobs.stream(&name, 0..5 << 20).try_collect().await.unwrap();
    assert!(streamed.concat() == bytes);
    assert_eq!(proxy.num_cuts(), 2);
}

// A lease is 15 s: a call that is tried again beyond it works for somebody else.
#[tokio::test]
async fn store_that_is_away_is_given_up_within_the_time_for_retries() {
    let Some(endpoint) = service("s3", "OVERNIGHT_TEST_S3_MOTO") else { return };
    let proxy = Proxy::before(&endpoint).await;
    let retry_for = Duration::from_secs(1);
    let options = Options { environment: s3_environment(&proxy.endpoint), retry_for, ..Options::default() };
    let url = test_stores::new_url("s3");
    let mut blobs = Blobs::open(&url, &options).await.unwrap();
    let name = ObjectName::file(FileId::new());
    blobs.put(&name, Bytes::from_static(b"x")).await.unwrap();
    proxy.hold(true);
    blobs = blobs.with_limit(Duration::from_millis(300));
    let started = Instant::now();
    let err = blobs.read(&name).await.unwrap_err();
    assert!(matches!(err, Error::TimedOut { .. }), "{}", chain(&err));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    proxy.hold(false);
    // Nobody listens there.
    let away = Options { environment: s3_environment("http://127.0.0.1:9"), retry_for, ..Options::default() };
    let started = Instant::now();
    let err = Blobs::open(&url, &away).await.unwrap_err();
    assert_eq!(err.class(), overnight_types::Class::Transient);
    let text = chain(&err);
    assert!(text.contains("no connection to http://127.0.0.1:9") && text.contains("endpoint"), "{text}");
    assert!(started.elapsed() < Duration::from_secs(6), "{:?}", started.elapsed());
}

#[tokio::test]
async fn store_killed_in_mid_upload_and_mid_read_goes_on_when_it_is_back() {
    let Some(mut store) = OwnStore::start().await else { return };
    let blobs = Blobs::open(&format!("s3://{BUCKET}/p"), &store.options()).await.unwrap();
    let (name, bytes) = (ObjectName::file(FileId::new()), three_parts());
    let mut writer = blobs.writer(&name).await.unwrap();
    writer.append(&bytes[..6 << 20]).await.unwrap();
    store.kill();
    let rest = bytes[6 << 20..].to_vec();
    // Written while nobody listens: the driver tries again until the store is back.
    let writing = tokio::spawn(async move {
        writer.append(&rest).await?;
        writer.finish().await
    });
    store.restart().await;
    assert_eq!(writing.await.unwrap().unwrap().bytes, bytes.len() as u64);
    let mut pieces = blobs.stream(&name, 0..bytes.len() as u64);
    let mut read = pieces.try_next().await.unwrap().unwrap().to_vec();
    store.kill();
    let reading = tokio::spawn(async move { pieces.try_collect::<Vec<_>>().await });
    store.restart().await;
    read.extend(reading.await.unwrap().unwrap().concat());
    assert!(read == bytes);
}

// input_unavailable would end every item: a lost bucket must not look like lost inputs.
#[tokio::test]
async fn vanished_bucket_is_trouble_of_the_store_and_not_a_missing_object() {
    let Some(store) = OwnStore::start().await else { return };
    let blobs = Blobs::open(&format!("s3://{BUCKET}/p"), &store.options()).await.unwrap();
    let (name, other) = (ObjectName::file(FileId::new()), ObjectName::file(FileId::new()));
    blobs.put(&name, Bytes::from_static(b"x")).await.unwrap();
    assert!(matches!(blobs.read(&other).await, Err(Error::Missing { .. })));
    let [bucket, elsewhere] = [BUCKET, "elsewhere"].map(|folder| store.dir.path().join(folder));
    std::fs::rename(&bucket, &elsewhere).unwrap();
    for is_made_anew in [false, true] {
        if is_made_anew {
            std::fs::create_dir(&bucket).unwrap();
        }
        let outcomes = [
            blobs.read(&name).await.map(drop),
            blobs.read_range(&name, 0..1).await.map(drop),
            blobs.size(&name).await.map(drop),
        ];
        for outcome in outcomes {
            let err = outcome.unwrap_err();
            assert!(matches!(err, Error::Unavailable { .. }), "made anew: {is_made_anew}: {}", chain(&err));
        }
    }
    std::fs::remove_dir_all(&bucket).unwrap();
    std::fs::rename(&elsewhere, &bucket).unwrap();
    assert_eq!(blobs.read(&name).await.unwrap(), "x");
    assert!(matches!(blobs.read(&other).await, Err(Error::Missing { .. })));
}

#[tokio::test]
async fn wrong_key_and_wrong_bucket_say_what_to_do_and_show_no_secret() {
    let mut cases = Vec::new();
    if let Some(endpoint) = service("s3", "OVERNIGHT_TEST_S3_FS") {
        let options = |name: &str, value: &str| {
            let mut environment = s3_environment(&endpoint);
            environment.retain(|(known, _)| known != name);
            environment.push((name.to_owned(), value.to_owned()));
            Options { environment, ..Options::default() }
        };
        cases.push((test_stores::new_url("s3"), options("AWS_SECRET_ACCESS_KEY", "hunter2"), "403"));
        cases.push((test_stores::new_url("s3"), options("AWS_ACCESS_KEY_ID", "GKnobody"), "the store answered"));
        cases.push(("s3://nobodys/p".to_owned(), options("AWS_REGION", "us-east-1"), "correct objects.url"));
        // It speaks no TLS.
        let https = options("AWS_ENDPOINT_URL", &endpoint.replace("http://", "https://"));
        cases.push((
            test_stores::new_url("s3"),
            Options { retry_for: Duration::from_millis(200), ..https },
            "SSL_CERT_FILE",
        ));
    }
    if let Some(endpoint) = service("azurite", "OVERNIGHT_TEST_AZURITE") {
        let mut environment = test_stores::azurite_environment(&endpoint);
        cases.push((
            "az://nobodys/p".to_owned(),
            Options { environment: environment.clone(), ..Options::default() },
            "correct objects.url",
        ));
        environment.retain(|(name, _)| name != "AZURE_STORAGE_ACCOUNT_KEY");
        environment.push(("AZURE_STORAGE_ACCOUNT_KEY".to_owned(), "aHVudGVyMg==".to_owned()));
        cases.push((test_stores::new_url("az"), Options { environment, ..Options::default() }, "AZURE_STORAGE_"));
    }
    for (url, options, words) in cases {
        let err = Blobs::open(&url, &options).await.unwrap_err();
        let text = chain(&err);
        assert!(text.contains(words), "{url}: {text}");
        assert_eq!(err.class(), overnight_types::Class::Transient, "an operator mends it: {text}");
        let shown = format!("{text} {err:?} {options:?}");
        for secret in ["hunter2", "aHVudGVyMg", "GKnobody"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}

#[tokio::test]
async fn store_without_a_mark_is_refused_where_the_database_names_objects() {
    for (name, url, mut options) in test_stores::services() {
        options.unmarked = Unmarked::IsFine;
        let looked_at = Blobs::open(&url, &options).await.unwrap();
        assert_eq!(looked_at.id(), None, "{name}: looking leaves nothing");
        options.unmarked = Unmarked::IsWrong;
        let err = Blobs::open(&url, &options).await.unwrap_err();
        assert!(matches!(err, Error::NotOurs { .. }) && err.to_string().contains(&url), "{name}: {err}");
        options.unmarked = Unmarked::IsNew;
        let id = Blobs::open(&url, &options).await.unwrap().id().unwrap();
        options.unmarked = Unmarked::IsWrong;
        let again = Blobs::open(&url, &options).await.unwrap();
        assert_eq!(again.id(), Some(id), "{name}");
        assert!(again.is_known_as(id).await.unwrap() && !again.is_known_as(uuid::Uuid::now_v7()).await.unwrap());
    }
}

// Without conditional writes: both marks stay, and either tells the store again.
#[tokio::test]
async fn two_first_users_at_once_both_know_the_store_again() {
    for (name, url, options) in test_stores::services() {
        let opened = futures::future::join_all((0..4).map(|_| Blobs::open(&url, &options))).await;
        let opened: Vec<Blobs> = opened.into_iter().map(Result::unwrap).collect();
        let last = Blobs::open(&url, &options).await.unwrap();
        let missing = ObjectName::file(FileId::new());
        for blobs in &opened {
            assert!(last.is_known_as(blobs.id().unwrap()).await.unwrap(), "{name}");
            assert!(matches!(blobs.read(&missing).await, Err(Error::Missing { .. })), "{name}: its own mark is there");
        }
    }
}

// An operator copies DATA_DIR/objects to a bucket: the folder's mark comes along.
#[tokio::test]
async fn copied_folder_is_known_again_by_its_mark() {
    for (name, url, options) in test_stores::services() {
        let id = uuid::Uuid::now_v7();
        let (driver, remote) =
            connect(&Address::parse(&url).unwrap(), &options, Arc::new(ReqwestConnector::default())).unwrap();
        driver.put(&remote.path(".overnight-objects"), format!("{id}\n").into()).await.unwrap();
        let opened = Blobs::open(&url, &Options { unmarked: Unmarked::IsWrong, ..options }).await.unwrap();
        assert_eq!(opened.id(), Some(id), "{name}");
    }
}

#[tokio::test]
async fn plain_endpoint_is_taken_only_on_purpose() {
    let environment = vec![("AWS_ENDPOINT_URL".to_owned(), "http://127.0.0.1:9".to_owned())];
    let options = Options { environment, ..Options::default() };
    let err = Blobs::open("s3://b/p", &options).await.unwrap_err().to_string();
    assert!(err.contains("AWS_ALLOW_HTTP=true"), "{err}");
    let wrong = vec![("AWS_ALLOW_HTTP".to_owned(), "perhaps".to_owned())];
    let options = Options { environment: wrong, ..Options::default() };
    let err = Blobs::open("s3://b/p", &options).await.unwrap_err().to_string();
    assert!(err.contains("perhaps"), "{err}");
}

// No emulator speaks the form of Google's API that the driver uses: options only.
#[test]
fn google_store_is_set_up_by_its_variables() {
    let key = r#"{"type":"authorized_user","client_id":"a","client_secret":"hunter2","refresh_token":"r"}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key.json");
    std::fs::write(&path, key).unwrap();
    let environment = vec![("GOOGLE_APPLICATION_CREDENTIALS".to_owned(), path.display().to_string())];
    let options = Options { environment, ..Options::default() };
    let address = Address::parse("gs://nightly/a").unwrap();
    let (driver, remote) = connect(&address, &options, Arc::new(ReqwestConnector::default())).unwrap();
    assert!(driver.to_string().contains("nightly"), "{driver}");
    assert_eq!(remote.path("files/x").as_ref(), "a/files/x");
    let wrong = vec![("GOOGLE_APPLICATION_CREDENTIALS".to_owned(), "/not/there.json".to_owned())];
    let refused = connect(&address, &Options { environment: wrong, ..options }, Arc::new(ReqwestConnector::default()));
    let err = refused.map(drop).unwrap_err().to_string();
    assert!(err.contains("/not/there.json"), "{err}");
}
