// out[i] = std * normal number i of this seed: Philox words, Box & Muller 1958
// shapes:  out [count]
// dtypes:  out T (bf16 or f16); arithmetic in f32
// grid:    a thread makes 8 numbers per pass, two counters' worth; any grid gives the same numbers
// limits:  out 16-byte aligned; count < 2^34
// cost:    writes 2*count bytes; bound by arithmetic (about 20 Philox operations a number)
#include "philox.cuh"
#include "vector.cuh"

// Two independent normal numbers from two words.
__device__ __forceinline__ void normal_pair(float* x, u32 a, u32 b, float std) {
    // In (0, 1], so that the logarithm is finite.
    const float radius = std * sqrtf(-2.0f * __logf(((float)(a >> 8) + 1.0f) * 0x1p-24f));
    float sine, cosine;
    __sincosf((float)(b >> 8) * (6.2831853f * 0x1p-24f), &sine, &cosine);
    x[0] = radius * cosine;
    x[1] = radius * sine;
}

extern "C" __global__ void fill_normal(T* __restrict__ out, u64 count, u64 seed, float std) {
    const u64 num_threads = (u64)gridDim.x * blockDim.x;
    for (u64 vector = (u64)blockIdx.x * blockDim.x + threadIdx.x; vector * VEC < count; vector += num_threads) {
        float x[VEC];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const uint4 words = philox4x32(make_uint4((u32)(2 * vector + half), 0, 0, 1), (u32)seed, (u32)(seed >> 32));
            normal_pair(x + 4 * half, words.x, words.y, std);
            normal_pair(x + 4 * half + 2, words.z, words.w, std);
        }
        if ((vector + 1) * VEC <= count) {
            store_vector(out + vector * VEC, pack_vector(x));
        } else {
            for (u32 e = 0; vector * VEC + e < count; ++e) out[vector * VEC + e] = from_float(x[e]);
        }
    }
}
