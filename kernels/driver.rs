//! Statuses of the driver as errors.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::Error;

/// Ok, or the error with the status's name. `what` completes "could not …".
pub(crate) fn check(status: CUresult, what: impl FnOnce() -> String) -> Result<(), Error> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(Error::Driver { what: what(), status: status_text(status), is_sticky: is_sticky(status) }),
    }
}

/// Name and sentence of a status.
pub(crate) fn status_text(status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: both functions only write the address of a static string to a pointer of ours,
        // and leave null where they do not know the status.
        unsafe {
            if get(status, &mut text) != CUresult::CUDA_SUCCESS || text.is_null() {
                return format!("status {}", status as u32);
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    format!("{} ({})", text(sys::cuGetErrorName), text(sys::cuGetErrorString))
}

/// Statuses after which the context stays broken (CUDA driver API, "Error handling": a kernel
/// faulted or the device is gone).
pub(crate) fn is_sticky(status: CUresult) -> bool {
    use CUresult::*;
    matches!(
        status,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_SYSTEM_NOT_READY
            | CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faulting_kernel_is_sticky_and_a_refused_argument_is_not() {
        assert!(is_sticky(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert!(!is_sticky(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert!(!is_sticky(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    }
}
