//! Gather of embedding rows by token id.

pub mod reference;
#[cfg(test)]
mod tests;

use crate::memory::DeviceSlice;
use crate::sources::Source;
use crate::vectors::{VEC, expect_vectors};
use crate::{Error, Function, Launch, Modules, Stream};

/// Device code.
pub const SOURCE: Source = Source::new("embedding", "embedding/embedding.cu", include_str!("embedding.cu"));

/// The kernel.
#[derive(Debug)]
pub struct Embedding {
    gather: Function,
}

impl Embedding {
    /// Errors with `Driver` when the entry point is missing.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        Ok(Self { gather: modules.function(SOURCE.name, "embedding_gather")? })
    }

    /// out `[num_tokens, hidden]` = rows `token_ids [num_tokens]` of table `[vocab, hidden]`, times
    /// `scale` (1 copies bits). Errors with `Shape` when lengths, widths or alignment do not fit.
    /// Ids are on the device and not checked: each must be a row of the table.
    #[expect(clippy::too_many_arguments, reason = "tensors, dims and scalars of the kernel, in its order")]
    pub fn gather(
        &self,
        stream: &Stream,
        out: DeviceSlice<u16>,
        table: DeviceSlice<u16>,
        token_ids: DeviceSlice<u32>,
        num_tokens: u32,
        hidden: u32,
        scale: f32,
    ) -> Result<(), Error> {
        let name = self.gather.name();
        expect_vectors(out, name, "out", num_tokens, hidden)?;
        expect_vectors(table, name, "table", 1, hidden)?;
        token_ids.expect_len(name, "token_ids", num_tokens as usize)?;
        if num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: arguments are those of embedding.cu in its order; lengths and alignment were
        // checked for these dims, ids are the caller's promise.
        unsafe {
            Launch::new(&self.gather)
                .grid(num_tokens)
                .cta((hidden / VEC).next_multiple_of(32).min(1024))
                .overlaps_previous(true)
                .arg(out)
                .arg(table)
                .arg(token_ids)
                .arg(num_tokens)
                .arg(hidden)
                .arg(scale)
                .run(stream)
        }
    }
}
