//! Matrix products: the algorithm that the engine would take, beside the best of the library's.

use super::{Bench, Measured};
use crate::compile::Dtype;
use crate::gemm::store::{FORMAT, Identity};
use crate::gemm::{Gemm, Shape, WORKSPACE_BYTES, bucket};
use crate::memory::{Buffer, DeviceSlice};
use crate::module::BuildOptions;
use crate::{Device, Error};

/// Bytes of a number.
const HALF: u64 = 2;

/// The library, with the algorithms that engines on this card have kept.
pub(super) struct Products {
    gemm: Gemm,
    _workspace: Buffer<u8>,
}

impl Products {
    pub(super) fn open(device: &Device, dtype: Dtype, options: &BuildOptions) -> Result<Self, Error> {
        let workspace = Buffer::new(device, "the workspace", WORKSPACE_BYTES as usize)?;
        let mut gemm = Gemm::open(device, dtype, workspace.slice(), &options.paths)?;
        if let Some(folder) = &options.cache.0 {
            let properties = device.properties().clone();
            let (device, uuid) = (properties.name, properties.uuid);
            let identity = Identity { format: FORMAT, device, uuid, version: gemm.version(), dtype };
            gemm.set_algorithms(identity.load(folder));
        }
        Ok(Self { gemm, _workspace: workspace })
    }

    pub(super) fn version(&self) -> u64 {
        self.gemm.version()
    }
}

impl Bench {
    pub(super) fn product(&mut self, shape: Shape) -> Result<Measured, Error> {
        let [m, n, k] = [shape.m, shape.n, shape.k].map(u64::from);
        let rows = bucket(shape.m) as usize;
        let weight_bytes = HALF * n * k;
        let weights = self.turns(weight_bytes, |seed| self.normal((n * k) as usize, seed, 0.02))?;
        let weights: Vec<DeviceSlice<u16>> = weights.iter().map(Buffer::slice).collect::<Vec<_>>();
        let x = self.normal(rows * k as usize, 1, 1.0)?;
        let y = self.normal(rows * n as usize, 2, 1.0)?;
        let (y, x) = (y.slice(), x.slice());
        self.gemm.gemm.tune(&self.stream, y, x, &weights, shape)?;
        let contest = self.gemm.gemm.contest(&self.stream, y, x, &weights, shape)?;
        let results = if shape.accumulates { 2 } else { 1 };
        Ok(Measured {
            us: contest.ours_us,
            us_min: contest.ours_us_min,
            bytes: weight_bytes + HALF * (m * k + results * m * n),
            flops: 2 * m * n * k,
            best_us: Some(contest.best_us),
            num_algorithms: Some(contest.num_algorithms),
        })
    }
}
