// Programmatic dependent launch: what a kernel and the one before it may overlap.
// Without the launch attribute, and before sm_90, both calls do nothing.
#pragma once

// Waits until the kernels before this one have finished and their writes are visible.
// Nothing that another kernel writes may be touched before it.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start its CTAs as soon as all of this grid's have called it or ended.
// Safe at any place, because the next kernel waits for our end before it reads.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
