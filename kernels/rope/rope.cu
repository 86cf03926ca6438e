// q, k = rotate(norm(q), norm(k)) by the token's position; cache[slot] = k, v
// shapes:  qkv [num_tokens, (num_heads + 2*num_kv_heads) * D], heads q then k then v, rows contiguous;
//          k_cache, v_cache [num_blocks, num_kv_heads, block_size, D]; slot_mapping, positions [num_tokens];
//          q_weight, k_weight [D] or null (no norm); rope [max_position, D], D/2 cosines then D/2 sines
// dtypes:  qkv, caches, weights T; rope f32; slots i32, PAD_SLOT writes nothing; arithmetic f32, rounded once
// grid:    D/16 lanes per head, 256 threads; lane i holds elements 8*i.. of both halves, 16 bytes an access
// limits:  D 64, 128, 256; num_tokens * heads < 2^32; q_weight and k_weight both null or neither; q in place
// cost:    reads (H + 2*KV)*D*2 + D*4 bytes a token, writes the same less the table; memory bound
#include "grid.cuh"
#include "types.cuh"

struct __align__(16) Eight {
    u32 pair[4];
};

__device__ __forceinline__ void unpack(float x[8], const Eight& packed) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = to_float2(packed.pair[i]);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
    }
}

__device__ __forceinline__ Eight pack(const float x[8]) {
    Eight packed;
#pragma unroll
    for (int i = 0; i < 4; i++) packed.pair[i] = pack2(x[2 * i], x[2 * i + 1]);
    return packed;
}

template <int D>
__device__ __forceinline__ void norm_and_rotate(
    float low[8], float high[8], const T* weight, const float* angles, u32 lane, float eps, float weight_offset) {
    if (weight != nullptr) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += low[i] * low[i] + high[i] * high[i];
#pragma unroll
        for (int step = D / 32; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float factor = rsqrtf(sum * (1.0f / D) + eps);
        float low_weight[8], high_weight[8];
        unpack(low_weight, *(const Eight*)(weight + 8 * lane));
        unpack(high_weight, *(const Eight*)(weight + D / 2 + 8 * lane));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            low[i] *= factor * (low_weight[i] + weight_offset);
            high[i] *= factor * (high_weight[i] + weight_offset);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 cosine = *(const float4*)(angles + 8 * lane + 4 * half);
        const float4 sine = *(const float4*)(angles + D / 2 + 8 * lane + 4 * half);
        const float c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
        const float s[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = low[4 * half + i], b = high[4 * half + i];
            low[4 * half + i] = a * c[i] - b * s[i];
            high[4 * half + i] = b * c[i] + a * s[i];
        }
    }
}

template <int D>
__device__ __forceinline__ void qk_norm_rope_kv_write(
    T* qkv, T* k_cache, T* v_cache, const int* slot_mapping, const u32* positions, const T* q_weight,
    const T* k_weight, const float* rope, u32 num_tokens, u32 num_heads, u32 num_kv_heads, u32 block_size, float eps,
    float weight_offset) {
    constexpr u32 LANES = D / 16;
    const u32 heads = num_heads + 2 * num_kv_heads;
    const u32 unit = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    const bool active = unit < num_tokens * heads;
    // Idle lanes of the last CTA work on head 0 of token 0 without storing: the shuffles need whole warps.
    const u32 token_index = active ? unit / heads : 0;
    const u32 head_index = active ? unit % heads : 0;

    T* const source = qkv + ((u64)token_index * heads + head_index) * D;
    const Eight low_bits = *(const Eight*)(source + 8 * lane);
    const Eight high_bits = *(const Eight*)(source + D / 2 + 8 * lane);
    const int slot = slot_mapping[token_index];
    const float* const angles = rope + (u64)positions[token_index] * D;

    float low[8], high[8];
    unpack(low, low_bits);
    unpack(high, high_bits);
    const bool is_q = head_index < num_heads;
    const bool is_v = head_index >= num_heads + num_kv_heads;
    norm_and_rotate<D>(low, high, is_q ? q_weight : k_weight, angles, lane, eps, weight_offset);
    if (!active) return;

    T* target = source;
    if (!is_q) {
        if (slot < 0) return;
        const u32 kv_head = head_index - num_heads - (is_v ? num_kv_heads : 0);
        const u32 block = (u32)slot / block_size, offset = (u32)slot % block_size;
        target = (is_v ? v_cache : k_cache) + (((u64)block * num_kv_heads + kv_head) * block_size + offset) * D;
    }
    *(Eight*)(target + 8 * lane) = is_v ? low_bits : pack(low);
    *(Eight*)(target + D / 2 + 8 * lane) = is_v ? high_bits : pack(high);
}

#define QK_NORM_ROPE_KV_WRITE(D)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_kv_write_##D(                                    \
        T* qkv, T* k_cache, T* v_cache, const int* slot_mapping, const u32* positions, const T* q_weight,           \
        const T* k_weight, const float* rope, u32 num_tokens, u32 num_heads, u32 num_kv_heads, u32 block_size,      \
        float eps, float weight_offset) {                                                                           \
        grid_wait();                                                                                                \
        grid_launch_dependents();                                                                                   \
        qk_norm_rope_kv_write<D>(qkv, k_cache, v_cache, slot_mapping, positions, q_weight, k_weight, rope,          \
                                 num_tokens, num_heads, num_kv_heads, block_size, eps, weight_offset);              \
    }

QK_NORM_ROPE_KV_WRITE(64)
QK_NORM_ROPE_KV_WRITE(128)
QK_NORM_ROPE_KV_WRITE(256)
