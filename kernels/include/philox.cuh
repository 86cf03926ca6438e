// A counter-based random generator: the same key and counter give the same numbers.
// Philox4x32-10 of Salmon, Moraes, Dror & Shaw, Parallel Random Numbers: As Easy as
// 1, 2, 3, SC 2011, section 3.3.
#pragma once
#include "types.cuh"

__device__ __forceinline__ uint4 philox4x32(uint4 counter, u32 key_low, u32 key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 low = (u64)0xD2511F53u * counter.x, high = (u64)0xCD9E8D57u * counter.z;
        counter = make_uint4((u32)(high >> 32) ^ counter.y ^ key_low, (u32)high,
                             (u32)(low >> 32) ^ counter.w ^ key_high, (u32)low);
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// In [0, 1) with 53 random bits, what a request with this seed draws for output token `position`.
__device__ __forceinline__ double philox_uniform(u64 seed, u32 position) {
    const uint4 words = philox4x32(make_uint4(position, 0, 0, 0), (u32)seed, (u32)(seed >> 32));
    const u64 bits = ((u64)words.x << 32 | words.y) >> 11;
    return (double)bits * (1.0 / 9007199254740992.0);
}
