//! Graphs: a recorded sequence of launches that replays with one call.
//!
//! What is recorded must neither allocate nor wait, and every address in it stays what it is.

use cudarc::driver::sys;

use crate::driver::check;
use crate::{Device, Error, Stream};

/// A recorded, instantiated graph.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    device: Device,
}

// SAFETY: a graph is launched by one thread at a time; the handle itself may move.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `body` gives to `stream`. The stream is usable again after an error.
    pub fn record(stream: &Stream, body: impl FnOnce() -> Result<(), Error>) -> Result<Self, Error> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive and not recording: only this function starts that.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
        check(begun, || "begin to record a graph".to_owned())?;
        let done = body();
        let mut recorded = std::ptr::null_mut();
        // SAFETY: ends what was begun above; one handle is written.
        let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &mut recorded) };
        let recorded = Recorded(recorded);
        done?;
        check(ended, || "record a graph".to_owned())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the recorded graph is alive; the executable one is independent of it.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, recorded.0, 0) };
        check(made, || "instantiate a graph".to_owned())?;
        Ok(Self { raw, device: stream.device().clone() })
    }

    /// Moves it to the device, so that the first launch is as fast as the others.
    pub fn upload(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: both handles are alive.
        check(unsafe { sys::cuGraphUpload(self.raw, stream.raw()) }, || "upload a graph".to_owned())
    }

    /// Replays it.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: both handles are alive.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) }, || "launch a graph".to_owned())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: instantiated once, destroyed once; the driver waits for a replay in flight.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}

struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: recorded once, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::Dtype;
    use crate::fill::Fill;
    use crate::testing::bed;

    /// Field report 65.
    #[test]
    fn a_recording_that_fails_leaves_the_stream_usable() {
        let Some(bed) = bed("a_recording_that_fails_leaves_the_stream_usable", Dtype::F16) else { return };
        let fill = Fill::load(&bed.modules).expect("loaded");
        let out = bed.upload(&[0u16; 64]);
        let launch = || fill.fill_normal(&bed.stream, out.slice(), 64, 1, 1.0);
        let failed = Graph::record(&bed.stream, || {
            launch()?;
            Err(Error::shape("fill_normal", "a fault in the middle"))
        });
        assert!(matches!(failed, Err(Error::Shape { .. })), "{failed:?}");
        let zeros = bed.stream.download_now(out.slice()).expect("the stream works");
        assert!(zeros.iter().all(|&bits| bits == 0), "what was recorded has not run");
        let graph = Graph::record(&bed.stream, launch).expect("recorded");
        graph.launch(&bed.stream).expect("launched");
        let numbers = bed.stream.download_now(out.slice()).expect("downloaded");
        assert!(numbers.iter().any(|&bits| bits != 0), "the replay has run");
    }

    /// Field report 65.
    #[test]
    fn device_memory_stream_and_graph_may_go_in_any_order() {
        let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
        for order in orders {
            let name = "device_memory_stream_and_graph_may_go_in_any_order";
            let Some(bed) = bed(name, Dtype::F16) else { return };
            let fill = Fill::load(&bed.modules).expect("loaded");
            let out = bed.upload(&[0u16; 64]);
            let stream = bed.stream.clone();
            let graph =
                Graph::record(&stream, || fill.fill_normal(&stream, out.slice(), 64, 1, 1.0)).expect("recorded");
            graph.launch(&stream).expect("launched");
            drop(stream);
            let mut parts: [Option<Box<dyn std::any::Any>>; 4] =
                [Some(Box::new(bed)), Some(Box::new(fill)), Some(Box::new(out)), Some(Box::new(graph))];
            for index in order {
                drop(parts[index].take());
            }
        }
        let device = Device::open(0).expect("it was there before");
        assert!(device.memory_bytes().is_ok(), "a new context works");
    }
}
