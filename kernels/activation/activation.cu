// out[t, i] = act(gate[t, i]) * up[t, i];  silu(g) = g / (1 + e^-g)
// gelu_tanh(g) = g / (1 + e^-2y) with y = sqrt(2/pi) * (g + 0.044715 g^3), which is 0.5 g (1 + tanh y)
// shapes:  out [num_tokens, intermediate], gate_up [num_tokens, 2 * intermediate]: gate, then up
// dtypes:  out, gate_up T (bf16 or f16); arithmetic in f32
// grid:    a thread makes 2 vectors of 8, blockDim.x vectors apart, of all tokens in one line
// limits:  intermediate % 8 == 0, num_tokens * intermediate / 8 < 2^32; rows 16-byte aligned
// cost:    reads 4*T*I bytes, writes 2*T*I; memory bound
#include "grid.cuh"
#include "vector.cuh"

// Vectors of a thread, all loaded before the first is used.
#define VECTORS 2

struct Silu {
    __device__ static float apply(float g) { return __fdividef(g, 1.0f + __expf(-g)); }
};

struct GeluTanh {
    __device__ static float apply(float g) {
        const float y = 0.7978845608f * (g + 0.044715f * g * g * g);
        return __fdividef(g, 1.0f + __expf(-2.0f * y));
    }
};

template <class Act>
__device__ __forceinline__ void act_mul(T* out, const T* gate_up, u32 num_tokens,
                                        u32 intermediate) {
    grid_wait();
    grid_launch_dependents();
    const u32 num_vectors = intermediate / VEC;
    const u32 first = blockIdx.x * (blockDim.x * VECTORS) + threadIdx.x;
    uint4 gate[VECTORS], up[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const u32 token_index = (first + i * blockDim.x) / num_vectors;
        const u32 at = (first + i * blockDim.x - token_index * num_vectors) * VEC;
        if (token_index < num_tokens) {
            const T* from = gate_up + (u64)token_index * 2 * intermediate + at;
            gate[i] = load_vector_once(from);
            up[i] = load_vector_once(from + intermediate);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const u64 vector = first + i * blockDim.x;
        if (vector < (u64)num_tokens * num_vectors) {
            float g[VEC], u[VEC];
            unpack_vector(g, gate[i]);
            unpack_vector(u, up[i]);
#pragma unroll
            for (int e = 0; e < VEC; ++e) g[e] = Act::apply(g[e]) * u[e];
            store_vector(out + vector * VEC, pack_vector(g));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(T* out, const T* gate_up, u32 num_tokens, u32 intermediate) {
    act_mul<Silu>(out, gate_up, num_tokens, intermediate);
}

extern "C" __global__ void __launch_bounds__(256)
    gelu_tanh_mul(T* out, const T* gate_up, u32 num_tokens, u32 intermediate) {
    act_mul<GeluTanh>(out, gate_up, num_tokens, intermediate);
}
