//! Block tables from the packed form that a step uploads to the padded one that attention reads.

#[cfg(test)]
mod tests;

use crate::sources::Source;
use crate::{DeviceSlice, Error, Function, Launch, Modules, Stream};

/// The family's source.
pub const SOURCE: Source = Source::new("block_tables", "block_tables/block_tables.cu", include_str!("block_tables.cu"));

/// The family's kernels.
#[derive(Debug)]
pub struct BlockTables {
    expand: Function,
}

impl BlockTables {
    /// From the loaded modules.
    pub fn load(modules: &Modules) -> Result<Self, Error> {
        Ok(Self { expand: modules.function("block_tables", "expand_block_tables")? })
    }

    /// Writes tables `[num_rows, stride]` from blocks of all rows after each other and starts
    /// `[num_rows + 1]`, rising from 0. Entries past a row's blocks keep what they are. The caller
    /// keeps rows at `stride` blocks; zero rows do nothing. Errors with `Shape` when a slice is
    /// too short.
    pub fn expand(
        &self,
        stream: &Stream,
        tables: DeviceSlice<u32>,
        starts: DeviceSlice<u32>,
        blocks: DeviceSlice<u32>,
        num_rows: u32,
        stride: u32,
    ) -> Result<(), Error> {
        let name = self.expand.name();
        tables.expect_len(name, "tables", num_rows as usize * stride as usize)?;
        starts.expect_len(name, "starts", num_rows as usize + 1)?;
        // SAFETY: tables and starts are long enough (checked above); starts rise to the length of
        // `blocks` and rows have at most `stride` blocks, as the caller has built them.
        unsafe {
            Launch::new(&self.expand)
                .grid(num_rows.div_ceil(8))
                .cta(256)
                .arg(tables)
                .arg(starts)
                .arg(blocks)
                .arg(num_rows)
                .arg(stride)
                .run(stream)
        }
    }
}
