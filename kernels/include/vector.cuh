// Loads and stores of eight elements, 16 bytes, at once. Pointers are 16-byte aligned.
#pragma once
#include "types.cuh"

// Elements of a vector.
#define VEC 8

// Data that a kernel reads more than once, or that it also writes.
__device__ __forceinline__ uint4 load_vector(const T* from) {
    return *reinterpret_cast<const uint4*>(from);
}

// Data that is read once: keeps out of L1. Not by the read-only path, which wants data that nobody
// writes while the kernel lives: with programmatic dependent launch that begins before the kernel
// that writes it has ended.
__device__ __forceinline__ uint4 load_vector_once(const T* from) {
    uint4 vector;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(from));
    return vector;
}

__device__ __forceinline__ void store_vector(T* to, uint4 vector) {
    *reinterpret_cast<uint4*>(to) = vector;
}

__device__ __forceinline__ void unpack_vector(float* x, uint4 vector) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const float2 both = to_float2(words[pair]);
        x[2 * pair] = both.x;
        x[2 * pair + 1] = both.y;
    }
}

__device__ __forceinline__ uint4 pack_vector(const float* x) {
    return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
}
