//! Folders that are whole, and folders that are not.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::Error;
use crate::config::{DeviceKind, EngineConfig};
use crate::load::{LoadFormat, ModelSource, load_cpu, on_gpu};
use crate::model::Forward;
use crate::tiny_model::{TinyArch, TinyModel, safetensors_bytes};

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn attempt(folder: &Path) -> Result<u64, Error> {
    attempt_as(folder, LoadFormat::Auto)
}

fn attempt_as(folder: &Path, load_format: LoadFormat) -> Result<u64, Error> {
    let config = EngineConfig { num_threads: Some(1), ..EngineConfig::default() };
    let model = load_cpu(&ModelSource { path: folder.to_owned(), load_format }, &config)?;
    Ok(model.shape().weights_bytes)
}

/// A folder with a tiny model, changed by `change`.
fn folder(tiny: &TinyModel, change: impl FnOnce(&mut Value, &mut Tensors)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    tiny.write(folder.path()).expect("write");
    let (mut config, mut tensors) = (tiny.config(), tiny.tensors());
    change(&mut config, &mut tensors);
    write(folder.path(), "config.json", config.to_string().as_bytes());
    write(folder.path(), "model.safetensors", &safetensors_bytes(&tensors));
    folder
}

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(folder.join(name), bytes).expect("write");
}

#[track_caller]
fn refused(folder: &Path, words: &[&str]) {
    let error = attempt(folder).expect_err("refused").to_string();
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

fn llama() -> TinyModel {
    TinyModel::new(TinyArch::Llama)
}

// Field report 60.
#[test]
fn tied_flag_decides_also_where_a_head_is_there() {
    let own = attempt(folder(&llama(), |_, _| {}).path()).expect("own head");
    let tied = attempt(folder(&llama(), |config, _| config["tie_word_embeddings"] = json!(true)).path()).expect("tied");
    assert!(tied < own, "the head is not loaded");
}

// Field report 61.
#[test]
fn untied_model_without_a_head_is_refused_by_name() {
    let folder = folder(&llama(), |_, tensors| drop(tensors.remove("lm_head.weight")));
    refused(folder.path(), &["lm_head.weight", "tie_word_embeddings"]);
}

// Field report 61.
#[test]
fn names_without_the_prefix_are_loaded() {
    for prefix in ["", "model.language_model.", "language_model.model."] {
        let folder = folder(&TinyModel::new(TinyArch::Qwen3), |_, tensors| {
            let old = std::mem::take(tensors);
            tensors.extend(old.into_iter().map(|(name, t)| (name.replacen("model.", prefix, 1), t)));
        });
        attempt(folder.path()).expect(prefix);
    }
}

/// A folder whose weights lie in `a.safetensors` and `b.safetensors`.
fn sharded() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    llama().write_sharded(folder.path()).expect("write");
    folder
}

// Field report 62.
#[test]
fn shards_load_by_the_index_and_a_missing_one_is_named() {
    let folder = sharded();
    attempt(folder.path()).expect("whole");
    std::fs::remove_file(folder.path().join("b.safetensors")).expect("remove");
    refused(folder.path(), &["b.safetensors", "missing"]);
}

// Field report 62.
#[test]
fn tensor_in_two_shards_names_both_files() {
    let folder = sharded();
    write(folder.path(), "b.safetensors", &safetensors_bytes(&llama().tensors()));
    refused(folder.path(), &["a.safetensors", "b.safetensors", "also in"]);
}

// Field report 62.
#[test]
fn cut_file_is_named() {
    let folder = folder(&llama(), |_, _| {});
    let bytes = std::fs::read(folder.path().join("model.safetensors")).expect("read");
    for len in [0, 5, 100, bytes.len() - 1] {
        write(folder.path(), "model.safetensors", &bytes[..len]);
        refused(folder.path(), &["model.safetensors"]);
    }
}

// Field report 62.
#[test]
fn pickle_is_passed_over_beside_safetensors_and_refused_alone() {
    let folder = folder(&llama(), |_, _| {});
    write(folder.path(), "pytorch_model.bin", b"never read");
    attempt(folder.path()).expect("the safetensors");
    std::fs::remove_file(folder.path().join("model.safetensors")).expect("remove");
    refused(folder.path(), &["pytorch_model.bin", "pickle", "runs whatever code"]);
}

#[test]
fn wrong_shape_and_leftover_tensor_are_named() {
    let wrong = folder(&llama(), |config, _| config["intermediate_size"] = json!(256));
    refused(wrong.path(), &["mlp.gate_proj.weight", "[128, 64]", "[256, 64]"]);
    let bias = folder(&llama(), |_, tensors| {
        tensors.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), (vec![128], vec![0.0; 128]));
    });
    refused(bias.path(), &["self_attn.q_proj.bias"]);
}

#[test]
fn sizes_that_cannot_be_are_named() {
    for (key, value) in [
        ("num_attention_heads", 0u64),
        ("num_key_value_heads", 0),
        ("hidden_size", 0),
        ("num_hidden_layers", 0),
        ("intermediate_size", 1 << 40),
        ("max_position_embeddings", 0),
    ] {
        let with = folder(&llama(), |config, _| {
            config[key] = json!(value);
            config.as_object_mut().expect("an object").remove("head_dim");
        });
        refused(with.path(), &[key, &value.to_string()]);
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let with = |key: &str, value: Value| folder(&llama(), |config, _| config[key] = value);
    refused(with("architectures", json!(["FooForCausalLM"])).path(), &["FooForCausalLM", "Qwen3ForCausalLM"]);
    refused(with("hidden_act", json!("gelu")).path(), &["hidden_act", "gelu"]);
    refused(with("attention_bias", json!(true)).path(), &["attention_bias"]);
    refused(with("quantization_config", json!({"quant_method": "gptq"})).path(), &["gptq"]);
    // Field report 57.
    refused(with("rope_scaling", json!({"rope_type": "longrope", "factor": 2.0})).path(), &["longrope"]);
    refused(with("final_logit_softcapping", json!(30.0)).path(), &["final_logit_softcapping"]);
}

#[test]
fn dummy_weights_need_only_the_configuration() {
    let folder = folder(&llama(), |_, _| {});
    std::fs::remove_file(folder.path().join("model.safetensors")).expect("remove");
    attempt_as(folder.path(), LoadFormat::Dummy).expect("random weights");
    refused(folder.path(), &["no *.safetensors"]);
}

/// A library that a start on a GPU needs and that is not there.
fn missing_library() -> Error {
    let what = "tried nothing: install it".to_owned();
    let source = overnight_kernels::Error::Library { library: "libnvrtc.so.13", what };
    Error::Device { stage: "could not build the kernels".to_owned(), source }
}

fn lost_device() -> Error {
    let what = "launch".to_owned();
    let source = overnight_kernels::Error::Driver { what, status: "gone".to_owned(), is_sticky: true };
    Error::Device { stage: "could not fill weights".to_owned(), source }
}

const WAIT: Duration = Duration::from_millis(1);

#[test]
fn auto_takes_the_cpu_when_the_gpu_cannot_be_used_and_only_then() {
    let busy = || Error::Busy("all of it".to_owned());
    let auto = |load: fn() -> Result<u32, Error>| on_gpu(DeviceKind::Auto, WAIT, || Ok(()), |()| load());
    assert_eq!(auto(|| Ok(7)).expect("a usable GPU"), Some(7));
    let none = on_gpu(DeviceKind::Auto, WAIT, || Err::<(), _>(missing_library()), |()| Ok(7));
    assert_eq!(none.expect("no driver is no failure"), None);
    assert_eq!(auto(|| Err(missing_library())).expect("no NVRTC is none either"), None);
    let held = on_gpu(DeviceKind::Auto, WAIT, || Ok(()), |()| Err::<u32, _>(busy()));
    assert_eq!(held.expect("nor is memory that others hold"), None);
    let no_type = || Err(Error::NoDtype("Gemma 3 in float16".to_owned()));
    assert_eq!(auto(no_type).expect("nor a card too old for the model's numbers"), None);
    // What a process that ends lets go is there at the second look.
    let mut looks = 0;
    let late = on_gpu(
        DeviceKind::Auto,
        WAIT,
        || Ok(()),
        |()| {
            looks += 1;
            if looks == 1 { Err(busy()) } else { Ok(7) }
        },
    );
    assert_eq!((late.expect("free by then"), looks), (Some(7), 2));
    // A GPU that fails, and a model that is wrong, are not hidden behind a slower device.
    auto(|| Err(lost_device())).expect_err("the device failed");
    auto(|| Err(Error::Unsupported("head_dim 96".to_owned()))).expect_err("the model does not fit the kernels");
    let cpu = on_gpu(DeviceKind::Cpu, WAIT, || -> Result<(), _> { panic!("it is not looked for") }, |()| Ok(7));
    assert_eq!(cpu.expect("asked for"), None);
}

#[test]
fn a_gpu_that_was_asked_for_fails_and_the_words_name_the_cpu() {
    let words = |error: Error| error.to_string();
    let cuda = |load: fn() -> Result<u32, Error>| on_gpu(DeviceKind::Cuda, WAIT, || Ok(()), |()| load()).map_err(words);
    let no_library = cuda(|| Err(missing_library())).expect_err("asked for");
    assert!(no_library.contains("could not build the kernels") && no_library.contains("--device cpu"), "{no_library}");
    let no_driver = on_gpu(DeviceKind::Cuda, WAIT, || Err::<(), _>(missing_library()), |()| Ok(7)).map_err(words);
    assert!(no_driver.expect_err("asked for").contains("--device cpu"));
    assert_eq!(cuda(|| Err(lost_device())), Err("could not fill weights".to_owned()), "no missing library");
}
