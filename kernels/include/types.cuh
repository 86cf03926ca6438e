// The 16-bit element type of a compilation and its conversions, without any toolkit header.
// OVERNIGHT_T picks the type: 0 is bfloat16 (sm_80 and later), 1 is IEEE half (sm_75 and later).
// `T` is opaque on purpose: arithmetic happens in f32, so every kernel converts by name.
#pragma once

#ifndef OVERNIGHT_T
#error "define OVERNIGHT_T: 0 for bf16, 1 for f16"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && OVERNIGHT_T == 0
#error "bf16 needs sm_80 or later; compile with OVERNIGHT_T=1 for this device"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "fixed widths");

struct __align__(2) T {
    u16 bits;
};
static_assert(sizeof(T) == 2, "T is 16 bits");

// A slot of this value in a slot mapping means padding: nothing is written for the token.
#define PAD_SLOT (-1)

#define NEGATIVE_INFINITY (__int_as_float(0xff800000))

__device__ __forceinline__ float to_float(T x) {
#if OVERNIGHT_T == 0
    return __uint_as_float((u32)x.bits << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ T from_float(float x) {
    T y;
#if OVERNIGHT_T == 0
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}

// Two elements as they lie in memory: .x is the first (low half), .y the second.
__device__ __forceinline__ float2 to_float2(u32 packed) {
    T low, high;
    low.bits = (u16)(packed & 0xffffu);
    high.bits = (u16)(packed >> 16);
    return make_float2(to_float(low), to_float(high));
}

__device__ __forceinline__ u32 pack2(float first, float second) {
#if OVERNIGHT_T == 0
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
#else
    return (u32)from_float(first).bits | ((u32)from_float(second).bits << 16);
#endif
}

// 2^x to about two units in the last place; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
