// Copies from global to shared memory that complete in the background (sm_80 and later).
// Before sm_80 a copy is a plain load and store, done when the call returns; commit and wait are empty.
#pragma once
#include "types.cuh"

// Copies 16 bytes past L1. With `valid` false nothing is read and the destination becomes zero;
// `source` must then still be an address of mapped memory.
__device__ __forceinline__ void copy_async_16(u32 shared, const void* source, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    const u32 bytes = valid ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
#else
    uint4 value = make_uint4(0, 0, 0, 0);
    if (valid) value = *(const uint4*)source;
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's committed groups are unfinished. Other threads see the
// data only after a barrier.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
