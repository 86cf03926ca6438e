// y[t, h] = x[t, h] * rsqrt(mean over h of x[t, h]^2 + eps) * (weight[h] + weight_offset)
// shapes:  x, out, residual [num_rows, hidden] row-major; weight [hidden]; row_index [num_rows] or null
// dtypes:  x, out, residual, weight T (bf16 or f16); sums and products in f32
// grid:    blockDim.x threads a row, blockDim.y rows a CTA; a thread keeps up to 2 vectors in registers
// limits:  hidden % 8 == 0, hidden <= 16 * blockDim.x, blockDim.x a multiple of 32; rows 16-byte aligned
// cost:    rms_norm moves 4*T*H bytes, post_add_rms_norm 8*T*H; memory bound
#include "grid.cuh"
#include "reduce.cuh"
#include "vector.cuh"

// Vectors that a thread keeps of a row.
#define VECTORS 2

// Where this thread's vector `i` of a row starts.
__device__ __forceinline__ u32 vector_at(int i) { return (threadIdx.x + i * blockDim.x) * VEC; }

// Vectors stay packed: half the registers, so twice the rows in flight.
__device__ __forceinline__ void load_row(uint4 (&row)[VECTORS], const T* from, u32 hidden) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        row[i] = vector_at(i) < hidden ? load_vector(from + vector_at(i)) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void load_row_once(uint4 (&row)[VECTORS], const T* from, u32 hidden) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        row[i] = vector_at(i) < hidden ? load_vector_once(from + vector_at(i)) : make_uint4(0, 0, 0, 0);
    }
}

// rsqrt(mean square + eps) of the row, in all of its threads.
__device__ __forceinline__ float inverse_rms(const uint4 (&row)[VECTORS], u32 hidden, float eps, float* partial) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float x[VEC];
        unpack_vector(x, row[i]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum += x[e] * x[e];
    }
    return rsqrtf(row_sum(sum, partial) / (float)hidden + eps);
}

// x * scale * (weight + weight_offset) of one vector.
__device__ __forceinline__ void scaled(float (&y)[VEC], uint4 x, uint4 weight, float scale, float weight_offset) {
    float w[VEC];
    unpack_vector(w, weight);
    unpack_vector(y, x);
#pragma unroll
    for (int e = 0; e < VEC; ++e) y[e] *= scale * (w[e] + weight_offset);
}

__device__ __forceinline__ void store_scaled(T* to, const uint4 (&row)[VECTORS], const uint4 (&weight)[VECTORS],
                                             u32 hidden, float scale, float weight_offset) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float y[VEC];
        scaled(y, row[i], weight[i], scale, weight_offset);
        if (vector_at(i) < hidden) store_vector(to + vector_at(i), pack_vector(y));
    }
}

// The row of this thread. Rows past the last do the last one's work again and store nothing, so that
// barriers see all threads.
__device__ __forceinline__ u32 row_of_thread() { return blockIdx.x * blockDim.y + threadIdx.y; }

#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
// An SM of these holds 2,048 threads: 32 registers each let it have all of them.
#define FULL_SM __launch_bounds__(1024, 2)
#else
#define FULL_SM __launch_bounds__(1024)
#endif

extern "C" __global__ void FULL_SM
    rms_norm(T* out, const T* x, const T* __restrict__ weight,
             const u32* __restrict__ row_index, u32 num_rows, u32 hidden, float eps, float weight_offset) {
    __shared__ float partial[WARP * WARP];
    uint4 w[VECTORS], row[VECTORS];
    // Weights are constant: they load while the kernel before still runs.
    load_row(w, weight, hidden);
    grid_wait();
    grid_launch_dependents();
    const u32 to_row = row_of_thread(), last_row = min(to_row, num_rows - 1);
    load_row_once(row, x + (u64)(row_index ? row_index[last_row] : last_row) * hidden, hidden);
    const float scale = inverse_rms(row, hidden, eps, partial);
    if (to_row < num_rows) store_scaled(out + (u64)to_row * hidden, row, w, hidden, scale, weight_offset);
}

// residual += norm(x, post_weight); out = norm(residual, weight)
__device__ __forceinline__ void norm_add_norm(T* __restrict__ out, T* __restrict__ residual, const T* __restrict__ x,
                                              const T* __restrict__ post_weight, const T* __restrict__ weight,
                                              u32 num_rows, u32 hidden, float eps, float weight_offset) {
    __shared__ float partial[2][WARP * WARP];
    uint4 w[VECTORS], post[VECTORS], row[VECTORS], sum[VECTORS];
    load_row(w, weight, hidden);
    load_row(post, post_weight, hidden);
    grid_wait();
    grid_launch_dependents();
    const u32 row_index = row_of_thread();
    const u64 offset = (u64)min(row_index, num_rows - 1) * hidden;
    load_row_once(row, x + offset, hidden);
    load_row(sum, residual + offset, hidden);
    const float post_scale = inverse_rms(row, hidden, eps, partial[0]);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float y[VEC], r[VEC];
        scaled(y, row[i], post[i], post_scale, weight_offset);
        unpack_vector(r, sum[i]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) r[e] += y[e];
        // Rounded here: the norm sees what later layers will read.
        sum[i] = pack_vector(r);
        if (row_index < num_rows && vector_at(i) < hidden) store_vector(residual + offset + vector_at(i), sum[i]);
    }
    const float scale = inverse_rms(sum, hidden, eps, partial[1]);
    if (row_index < num_rows) store_scaled(out + offset, sum, w, hidden, scale, weight_offset);
}

extern "C" __global__ void __launch_bounds__(1024)
    post_add_rms_norm(T* out, T* residual, const T* x, const T* post_weight, const T* weight, u32 num_rows,
                      u32 hidden, float eps, float weight_offset) {
    norm_add_norm(out, residual, x, post_weight, weight, num_rows, hidden, eps, weight_offset);
}
