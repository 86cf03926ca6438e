//! A small file, whole, cut and damaged.

use super::*;

/// A file with one key, one array of strings and one F32 tensor of 4 elements.
fn sample() -> Vec<u8> {
    let mut f = Vec::new();
    let string = |f: &mut Vec<u8>, s: &str| {
        f.extend((s.len() as u64).to_le_bytes());
        f.extend(s.as_bytes());
    };
    f.extend(b"GGUF");
    f.extend(3u32.to_le_bytes());
    f.extend(1u64.to_le_bytes());
    f.extend(2u64.to_le_bytes());
    string(&mut f, "general.architecture");
    f.extend(8u32.to_le_bytes());
    string(&mut f, "gemma3");
    string(&mut f, "tokenizer.ggml.tokens");
    f.extend(9u32.to_le_bytes());
    f.extend(8u32.to_le_bytes());
    f.extend(2u64.to_le_bytes());
    string(&mut f, "a");
    string(&mut f, "b");
    string(&mut f, "t");
    f.extend(1u32.to_le_bytes());
    f.extend(4u64.to_le_bytes());
    f.extend(0u32.to_le_bytes());
    f.extend(0u64.to_le_bytes());
    f.resize(f.len().next_multiple_of(32), 0);
    for x in [1f32, 2.0, 3.0, 4.0] {
        f.extend(x.to_le_bytes());
    }
    f
}

fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).expect("write");
    Gguf::open(&path)
}

#[test]
fn metadata_and_tensor_are_read() {
    let gguf = open(&sample()).expect("a whole file");
    assert_eq!(gguf.require_str("general.architecture").expect("key"), "gemma3");
    assert_eq!(gguf.get("tokenizer.ggml.tokens").and_then(Value::as_strings).expect("array"), ["a", "b"]);
    let tensor = gguf.tensor("t").expect("tensor");
    assert_eq!((tensor.dims.as_slice(), tensor.ty, tensor.byte_len), (&[4u64][..], TensorType::F32, 16));
    assert_eq!(gguf.tensor_bytes(tensor).expect("bytes")[4..8], 2f32.to_le_bytes());
}

// Field report 62 (a cut file).
#[test]
fn file_cut_anywhere_is_an_error_that_names_it() {
    let whole = sample();
    for len in 0..whole.len() {
        let error = open(&whole[..len]).expect_err("cut");
        assert!(error.to_string().contains("m.gguf"), "{error}");
    }
}

#[test]
fn any_single_damaged_byte_never_panics_or_reads_outside() {
    let whole = sample();
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            if let Ok(gguf) = open(&bytes) {
                for tensor in gguf.tensors() {
                    let _ = gguf.tensor_bytes(tensor);
                }
            }
        }
    }
}

#[test]
fn type_without_a_kernel_is_refused_by_name() {
    let mut bytes = sample();
    // One dimension (u32), its length (u64), then the type.
    let head = [1u8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    let ty = bytes.windows(12).rposition(|w| w == head).expect("the tensor's dimensions") + 12;
    bytes[ty] = 13;
    let gguf = open(&bytes).expect("listed");
    let error = gguf.tensor_bytes(&gguf.tensors()[0]).expect_err("refused");
    assert!(error.to_string().contains("Q5_K"), "{error}");
}
