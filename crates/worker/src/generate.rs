//! The one interface to whatever generates: the local engine, a remote
//! OpenAI-compatible server, or a scripted one in tests.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
pub use overnight_engine::request::{Class, RequestId, TokenOutput};
use overnight_types::Endpoint;
use tokio::sync::mpsc;

/// What goes in.
#[derive(Debug, Clone)]
pub struct Request {
    /// From [`RequestId::next`]; outputs carry it.
    pub id: RequestId,
    /// Online requests go before job items.
    pub class: Class,
    /// The work.
    pub input: Input,
}

/// The work of a request. Only the mapper chooses the form.
#[derive(Debug, Clone)]
pub enum Input {
    /// For the local engine. Its `id` and `class` equal the request's.
    Tokens(Box<overnight_engine::Request>),
    /// For a remote engine: the item's body, byte for byte.
    Body {
        /// The route.
        endpoint: Endpoint,
        /// A JSON object.
        json: Bytes,
    },
}

/// What comes back, tagged with the request's id.
#[derive(Debug, Clone)]
pub enum Output {
    /// The engine has taken a job's request up: what has not begun is not started once its job
    /// is paused or cancelled, and the time limit of a token request counts from now. Before its
    /// other outputs; a second one says nothing new.
    Begun {
        /// Whose.
        id: RequestId,
    },
    /// From the local engine; the last one has `finish` set.
    Tokens(TokenOutput),
    /// From a remote engine; the only output of its request.
    Response {
        /// Whose.
        id: RequestId,
        /// HTTP status.
        status: u16,
        /// A JSON object, or whatever the server sent.
        body: Bytes,
        /// From `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// The last output of a request that got no answer.
    Failed {
        /// Whose.
        id: RequestId,
        /// Why.
        failure: Failure,
    },
}

impl Output {
    /// Whose output this is.
    pub fn id(&self) -> RequestId {
        match self {
            Output::Tokens(tokens) => tokens.id,
            Output::Begun { id } | Output::Response { id, .. } | Output::Failed { id, .. } => *id,
        }
    }

    /// Whether no further output of the request follows.
    pub fn is_last(&self) -> bool {
        match self {
            Output::Begun { .. } => false,
            Output::Tokens(tokens) => tokens.finish.is_some(),
            Output::Response { .. } | Output::Failed { .. } => true,
        }
    }
}

/// Why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The request itself is refused: an HTTP 4xx outcome.
    Refused {
        /// HTTP status, 400…499.
        status: u16,
        /// Stable code.
        code: String,
        /// The field at fault.
        param: Option<String>,
        /// What is wrong.
        message: String,
    },
    /// The engine or server is in trouble, not the item: the shard goes back, no attempt is counted.
    EngineTrouble {
        /// In words.
        message: String,
    },
    /// This try failed and another may not (a connection cut in mid-answer): counted as an attempt.
    Transient {
        /// Stable code.
        code: String,
        /// In words.
        message: String,
    },
    /// The request ran past its time limit.
    Timeout,
    /// Cancelled by [`Generate::cancel`].
    Cancelled,
}

/// Where the engine stands.
#[derive(Debug, Clone, PartialEq)]
pub enum EngineState {
    /// Not ready yet; the stage in words.
    Starting(String),
    /// Can answer.
    Ready,
    /// Cannot answer until rebuilt; why.
    Poisoned(String),
    /// Has work and ends no step; since when. It may go on, or its process is given up.
    Stalled(String),
}

/// A snapshot for health, renewal and status pages.
#[derive(Debug, Clone)]
pub struct EngineStatus {
    /// Where it stands.
    pub state: EngineState,
    /// Names it answers to; `["*"]` when it passes any name on.
    pub models: Vec<String>,
    /// Requests in the running step.
    pub num_running: u32,
    /// Requests that wait.
    pub num_waiting: u32,
    /// Most requests that run at once; the window is a multiple of it.
    pub max_num_seqs: u32,
    /// Share of KV blocks in use, 0…1.
    pub kv_cache_usage: f32,
    /// When a step (or a remote answer) last ended; renewal goes by it.
    pub last_progress: Instant,
    /// Tokens generated since the start.
    pub generation_tokens: u64,
    /// Prompt tokens computed since the start.
    pub prompt_tokens: u64,
}

impl EngineStatus {
    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.num_running == 0 && self.num_waiting == 0
    }
}

/// Where outputs go. One message holds the outputs of one engine step. Unbounded
/// on purpose: an engine thread must never wait for a reader; what is in it is
/// bounded by the requests in flight, which the window bounds.
pub type OutputSender = mpsc::UnboundedSender<Vec<Output>>;

/// The submission failed as a whole; nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("engine does not take requests: {0}")]
pub struct NotAccepting(pub String);

/// Whatever generates.
#[async_trait]
pub trait Generate: std::fmt::Debug + Send + Sync + 'static {
    /// Takes requests; every one gets exactly one last output on `outputs`, also
    /// when refused. Waits for room in the submission queue.
    async fn submit(&self, requests: Vec<Request>, outputs: OutputSender) -> Result<(), NotAccepting>;

    /// Asks to stop a request; unknown and finished ids do nothing. Its last output still comes.
    fn cancel(&self, ids: &[RequestId]);

    /// Where it stands.
    fn status(&self) -> EngineStatus;

    /// How often the engine broke down under its requests since the start. A lease under
    /// which that happens counts as a crash, as the worker's own death would. An engine in
    /// another process never counts: whatever becomes of it, it is not this worker's work
    /// that is suspect.
    fn num_breakdowns(&self) -> u32 {
        0
    }
}
