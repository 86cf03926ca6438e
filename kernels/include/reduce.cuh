// Reductions over a warp or over a row of warps. Orders are fixed: equal inputs give equal bits.
#pragma once
#include "types.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu

// Every lane gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, x);
#else
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, mask));
    return x;
#endif
}

__device__ __forceinline__ u32 warp_min(u32 x) { return ~warp_max(~x); }

__device__ __forceinline__ u32 warp_sum(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL_LANES, x);
#else
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
#endif
}

__device__ __forceinline__ u64 warp_max(u64 x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, x, mask);
        x = x > other ? x : other;
    }
    return x;
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// Sum over this lane and those below it.
template <class N>
__device__ __forceinline__ N warp_running_sum(N x, u32 lane) {
#pragma unroll
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        const N below = __shfl_up_sync(ALL_LANES, x, distance);
        if (lane >= distance) x += below;
    }
    return x;
}

// Sum over the threads of a row, blockDim.x of them, of which a CTA has blockDim.y rows.
// `partial` holds blockDim.y * 32 numbers and is free for another call after a barrier.
__device__ __forceinline__ float row_sum(float x, float* partial) {
    x = warp_sum(x);
    if (blockDim.x == WARP) return x;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    float* row = partial + threadIdx.y * WARP;
    if (lane == 0) row[warp] = x;
    __syncthreads();
    return warp_sum(lane < num_warps ? row[lane] : 0.0f);
}

// Unsigned order of the keys is the order of the numbers; a positive NaN comes above all.
__device__ __forceinline__ u32 order_key(float x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_order_key(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
