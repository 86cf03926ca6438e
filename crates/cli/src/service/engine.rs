//! Whatever generates, by `[engine]`: the local engine, remote servers, or the
//! instant one. Loading takes long, so [`super::late::LateEngine`] stands in meanwhile.

use std::sync::Arc;

use overnight_engine::cuda::{BuildOptions, DeviceOptions, KernelCache, Parts, SearchPaths, SourceFolder, find_parts};
use overnight_engine::load::{LoadFormat, ModelSource, load_forward_on, load_on};
use overnight_engine::text::Text;
use overnight_engine::{DeviceKind, Engine, EngineConfig, EngineHandle};
use overnight_worker::generate::Generate;
use overnight_worker::instant::{InstantGenerate, PacedGenerate};
use overnight_worker::local::LocalEngine;
use overnight_worker::mapper::{Mapper, ModelLimits};
use overnight_worker::remote::{RemoteConfig, RemoteGenerate};

use super::producer;
use crate::config::{Config, EngineKind};
use crate::error::{Exit, Failure, Result};
use crate::{environment, models};

/// Every model name that jobs may use here: the configured ones and the engine's.
pub(crate) fn known_models(config: &Config) -> Vec<String> {
    let mut names: Vec<String> = config.models.iter().map(|model| model.name.clone()).collect();
    names.extend(served_names(config));
    names.sort();
    names.dedup();
    names
}

/// The names that the engine answers to; `*` when it passes any on.
pub(crate) fn served_names(config: &Config) -> Vec<String> {
    let source = &config.engine.source;
    if !source.served_model_name.is_empty() {
        return source.served_model_name.clone();
    }
    match (source.kind, &source.model) {
        (EngineKind::Local, Some(model)) => {
            vec![models::find(config, model).map_or_else(|_| model.clone(), |found| found.name)]
        }
        (EngineKind::Local, None) => Vec::new(),
        (EngineKind::Openai, Some(model)) => vec![model.clone()],
        (EngineKind::Openai | EngineKind::Instant, _) => vec!["*".to_owned()],
    }
}

/// An engine that can answer.
#[derive(Clone)]
pub(crate) struct Started {
    pub(crate) generate: Arc<dyn Generate>,
    pub(crate) mapper: Mapper,
    pub(crate) producer: String,
    /// The local engine, for its counters.
    pub(crate) handle: Option<EngineHandle>,
    /// Where the local engine computes.
    pub(crate) device: Option<DeviceKind>,
}

/// Checks before anything is opened that there is an engine to start: the model is
/// named and here, and so is the chat template.
pub(crate) fn check(config: &Config) -> Result {
    check_seed(config)?;
    if config.engine.source.kind == EngineKind::Local {
        model(config)?;
        chat_template(config)?;
        check_device(config)?;
    }
    Ok(())
}

/// Refuses a GPU that was asked for and is not there, before anything listens.
fn check_device(config: &Config) -> Result {
    if config.engine.local.device != DeviceKind::Cuda {
        return Ok(());
    }
    refuse_missing(find_parts(&device_options()))
}

fn refuse_missing(parts: Parts) -> Result {
    let refused = |what: &str, err: &dyn std::fmt::Display| {
        Failure::usage(format!("engine.device = \"cuda\", but there is {what}: {err}"))
            .code("no_gpu")
            .hint("`batch doctor` says what is missing; --device cpu runs on the CPU")
    };
    parts.device.map_err(|err| refused("no GPU to run on", &err))?;
    parts.nvrtc.map_err(|err| refused("nothing to compile its kernels with", &err))?;
    parts.cublaslt.map_err(|err| refused("no library for its matrix products", &err))?;
    Ok(())
}

/// Refuses a seed that nothing would use: only dummy weights are drawn from it.
pub(crate) fn check_seed(config: &Config) -> Result {
    let source = &config.engine.source;
    let is_used = source.kind == EngineKind::Local && source.load_format == LoadFormat::Dummy;
    if is_used || config.engine.local.seed == EngineConfig::default().seed {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "engine.seed = {} would change no answer: it draws dummy weights",
        config.engine.local.seed
    ))
    .code("flag_not_supported")
    .hint("put `seed` into the requests (`batch prepare --param seed=N`), or add --load-format dummy"))
}

/// The template of `engine.chat_template`; `None` for the model's own.
pub(crate) fn chat_template(config: &Config) -> Result<Option<String>> {
    let Some(path) = &config.engine.source.chat_template else { return Ok(None) };
    let wrong = |what: String| {
        Failure::usage(format!("could not use engine.chat_template {}: {what}", path.display()))
            .hint("it takes a file with a Jinja template, as a model's chat_template.jinja")
    };
    let source = std::fs::read_to_string(path).map_err(|err| wrong(err.to_string()))?;
    Text::check_chat_template(&source).map_err(|err| wrong(err.to_string()))?;
    Ok(Some(source))
}

fn model(config: &Config) -> Result<models::Found> {
    let Some(name) = &config.engine.source.model else {
        return Err(Failure::usage("no model is named").hint(
            "add --model NAME (`batch models list` shows names), or engine.kind = \"openai\" for servers that run already",
        ));
    };
    models::find(config, name)
}

/// Starts the engine that `[engine]` names; `stage` is told what is being done.
/// Blocks for as long as loading takes.
pub(crate) fn start(config: &Config, stage: impl Fn(&str)) -> Result<Started> {
    match config.engine.source.kind {
        EngineKind::Local => start_local(config, stage),
        EngineKind::Openai => start_remote(config),
        EngineKind::Instant => Ok(Started {
            generate: match config.engine.source.instant_items_per_s {
                0 => Arc::new(InstantGenerate::default()),
                rate => Arc::new(PacedGenerate::new(rate)),
            },
            mapper: Mapper::remote(None),
            producer: producer("instant engine"),
            handle: None,
            device: None,
        }),
    }
}

fn start_local(config: &Config, stage: impl Fn(&str)) -> Result<Started> {
    let found = model(config)?;
    let template = chat_template(config)?;
    stage(&format!("loading {}", found.path.display()));
    // A model that takes long, for tests of what happens meanwhile.
    fail::fail_point!("service::model_loading");
    let source = ModelSource { path: found.path.clone(), load_format: config.engine.source.load_format };
    let fail = |doing: &str| {
        let doing = format!("{doing} {}", found.path.display());
        move |err: overnight_engine::Error| not_loaded(&doing, &err)
    };
    let loaded = load_on(&source, &config.engine.local, &device_options()).map_err(fail("load the model"))?;
    let (device, device_kind) = (loaded.device, loaded.device_kind);
    stage("starting the engine");
    let vocab_size = loaded.forward.shape().vocab_size;
    let architecture = loaded.forward.shape().architecture.clone();
    let text = match template {
        None => loaded.text,
        Some(template) => {
            let text = Arc::into_inner(loaded.text).expect("nobody else has the text of a model just loaded");
            let text = text.with_chat_template(template);
            Arc::new(text.map_err(|err| Failure::from_error("use engine.chat_template", &err))?)
        }
    };
    let handle =
        Engine::start(loaded.forward, Some(text.clone()), &config.engine.local).map_err(fail("start the engine on"))?;
    let names = served_names(config);
    let limits = ModelLimits {
        max_model_len: handle.limits().max_model_len,
        vocab_size,
        max_logprobs: config.engine.local.max_logprobs,
    };
    Ok(Started {
        mapper: Mapper::local(text, names.clone(), limits),
        producer: producer(&format!("{architecture} {} on {device}", found.name)),
        generate: Arc::new(LocalEngine::new(handle.clone(), names)),
        handle: Some(handle),
        device: Some(device_kind),
    })
}

/// The engine did not start; says what helps, to whoever starts it and in the doctor.
fn not_loaded(doing: &str, err: &overnight_engine::Error) -> Failure {
    Failure::from_error(doing, err).code("model_not_loaded").hint(remedy(err))
}

fn remedy(err: &overnight_engine::Error) -> &'static str {
    use overnight_engine::Error;
    use overnight_kernels::Error as Gpu;
    match err {
        Error::Read { .. } | Error::Model { .. } | Error::Text { .. } => {
            "look at the model's files; `batch models pull` fetches them again"
        }
        Error::Unsupported(_) => "take another model or setting, as said",
        Error::Config { .. } => "correct the setting, as said",
        Error::Busy(_) => "`nvidia-smi` lists who uses the GPU, a running `batch serve` among them",
        Error::Device { source: Gpu::Library { .. }, .. } => "install it as said, or use --device cpu",
        Error::Device { source: Gpu::OutOfMemory { .. }, .. } => {
            "change the settings in the order said; --device cpu does without a GPU"
        }
        Error::Device { .. } => "the GPU or its driver failed: `nvidia-smi` and `dmesg` tell more; or use --device cpu",
        _ => "this is a fault of the engine: `batch collect-env` gathers what a report needs",
    }
}

/// The local engine for prompts of token ids alone: no tokenizer is read. Gives the device's name too.
pub(crate) fn start_without_text(config: &Config, stage: impl Fn(&str)) -> Result<(EngineHandle, String)> {
    let found = model(config)?;
    stage(&format!("loading {}", found.path.display()));
    let source = ModelSource { path: found.path.clone(), load_format: config.engine.source.load_format };
    let fail = |doing: &str| {
        let doing = format!("{doing} {}", found.path.display());
        move |err: overnight_engine::Error| not_loaded(&doing, &err)
    };
    let loaded = load_forward_on(&source, &config.engine.local, &device_options());
    let (forward, device) = loaded.map_err(fail("load the model"))?;
    stage("starting the engine");
    let handle = Engine::start(forward, None, &config.engine.local).map_err(fail("start the engine on"))?;
    Ok((handle, device))
}

/// What a GPU needs from this machine's environment.
pub(crate) fn device_options() -> DeviceOptions {
    let cache = environment::xdg("XDG_CACHE_HOME", ".cache").map(|folder| folder.join("overnight").join("kernels"));
    let paths = |names: &[&str]| names.iter().filter_map(|name| environment::path(name)).collect();
    DeviceOptions {
        ordinal: 0,
        build: BuildOptions {
            paths: SearchPaths {
                toolkits: paths(&["CUDA_HOME", "CUDA_PATH"]),
                python: paths(&["VIRTUAL_ENV", "CONDA_PREFIX"]),
                folders: Vec::new(),
            },
            sources: SourceFolder(environment::path("OVERNIGHT_KERNEL_DIR")),
            cache: KernelCache(cache),
            num_threads: 0,
        },
    }
}

fn start_remote(config: &Config) -> Result<Started> {
    let source = &config.engine.source;
    let names = Some(served_names(config)).filter(|names| names.iter().all(|name| name != "*"));
    let remote = RemoteConfig {
        urls: source.base_urls.clone(),
        api_key: remote_key(config)?,
        models: names.clone().unwrap_or_default(),
        request_timeout: config.worker.request_timeout_remote,
        ..RemoteConfig::default()
    };
    let generate = RemoteGenerate::new(remote).map_err(|err| Failure::from_error("set up the remote engine", &err))?;
    Ok(Started {
        generate: Arc::new(generate),
        mapper: Mapper::remote(names),
        producer: producer(&format!("remote engine at {}", source.base_urls.join(", "))),
        handle: None,
        device: None,
    })
}

fn remote_key(config: &Config) -> Result<Option<String>> {
    let source = &config.engine.source;
    if let Some(key) = &source.api_key {
        return Ok(Some(key.expose().to_owned()));
    }
    let Some(path) = &source.api_key_file else { return Ok(None) };
    let text = std::fs::read_to_string(path).map_err(|err| {
        Failure::new(Exit::Usage, format!("could not read engine.api_key_file {}: {err}", path.display()))
    })?;
    Ok(Some(text.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use overnight_engine::cuda::DeviceProperties;

    use super::*;

    /// A machine with a GPU and with those of its libraries.
    fn parts(has_nvrtc: bool, has_cublaslt: bool) -> Parts {
        let missing = |library| overnight_kernels::Error::Library { library, what: "tried nothing".to_owned() };
        let found = || ("13.0".to_owned(), "/usr/lib/it.so".into());
        let properties = DeviceProperties {
            name: "a card".to_owned(),
            uuid: String::new(),
            compute_capability: (9, 0),
            num_sms: 1,
            memory_bytes: 0,
            shared_bytes_max: 0,
            l2_bytes: 0,
            memory_clock_khz: 0,
            memory_bus_bits: 0,
            driver_version: 13_000,
        };
        Parts {
            device: Ok(properties),
            nvrtc: if has_nvrtc { Ok(found()) } else { Err(missing("libnvrtc.so.13")) },
            cublaslt: if has_cublaslt { Ok(found()) } else { Err(missing("libcublasLt.so.13")) },
        }
    }

    #[test]
    fn what_helps_depends_on_what_failed() {
        use overnight_engine::Error;
        let gpu = |source| Error::Device { stage: "could not start".to_owned(), source };
        let memory = overnight_kernels::Error::OutOfMemory {
            what: "weights".to_owned(),
            asked_bytes: 2,
            free_bytes: 1,
            total_bytes: 3,
        };
        let library = overnight_kernels::Error::Library { library: "libnvrtc.so.13", what: "gone".to_owned() };
        let wrong = Error::Model { path: "/m".into(), what: "it is torn".to_owned() };
        for (err, word) in [
            (wrong, "model's files"),
            (gpu(library), "install it"),
            (gpu(memory), "in the order said"),
            (gpu(overnight_kernels::Error::shape("gemm", "odd")), "nvidia-smi"),
            (Error::Busy("all of it".to_owned()), "batch serve"),
        ] {
            let text = not_loaded("load it", &err).to_text(false);
            assert!(text.contains(word), "{text}");
            assert_eq!(text.contains("files"), word == "model's files", "no other blames the files: {text}");
        }
    }

    #[test]
    fn a_gpu_without_its_libraries_is_refused_before_anything_listens() {
        refuse_missing(parts(true, true)).expect("it is whole");
        for (parts, library) in [(parts(false, true), "libnvrtc.so.13"), (parts(true, false), "libcublasLt.so.13")] {
            let text = refuse_missing(parts).expect_err("a library is missing").to_text(false);
            assert!(text.contains(library) && text.contains("--device cpu"), "{text}");
        }
    }
}
