// out[t, h] = table[token_ids[t], h] * scale
// shapes:  out [num_tokens, hidden], table [vocab, hidden] row-major; token_ids [num_tokens]
// dtypes:  out, table T (bf16 or f16); scale f32, the product is rounded once
// grid:    one CTA per token; a thread copies 16 bytes per pass
// limits:  hidden % 8 == 0; every id is a row of the table; rows 16-byte aligned
// cost:    reads 2*T*H bytes, writes 2*T*H; memory bound
#include "grid.cuh"
#include "vector.cuh"

extern "C" __global__ void embedding_gather(T* __restrict__ out, const T* __restrict__ table,
                                            const u32* token_ids, u32 num_tokens, u32 hidden,
                                            float scale) {
    grid_wait();
    grid_launch_dependents();
    const u64 token_index = blockIdx.x;
    if (token_index >= num_tokens) return;
    const T* from = table + (u64)token_ids[token_index] * hidden;
    T* to = out + token_index * hidden;
    for (u32 at = threadIdx.x * VEC; at < hidden; at += blockDim.x * VEC) {
        uint4 vector = load_vector_once(from + at);
        if (scale != 1.0f) {
            float x[VEC];
            unpack_vector(x, vector);
#pragma unroll
            for (int e = 0; e < VEC; ++e) x[e] *= scale;
            vector = pack_vector(x);
        }
        store_vector(to + at, vector);
    }
}
