// Hopper's matrix product: four warps, operands in shared memory (sm_90a alone).
//
// d[64 x N] += a[64 x 16] * b[16 x N] with f32 sums. A lane holds of d what mma.cuh's c describes, for N / 8
// tiles of its warp's 16 rows; warp w of the group has rows 16*w .. 16*w+15. Tiles in shared memory are
// panels of 64 columns, 128 bytes a row, rows swizzled as `paneled` places them, each panel at 1024 bytes.
#pragma once
#include "types.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of ROWS rows cut into panels.
template <int ROWS>
__device__ __forceinline__ u32 paneled(u32 row, u32 chunk) {
    return chunk / 8 * (ROWS * 128) + row * 128 + (((chunk % 8) ^ (row & 7)) << 4);
}

#if HAS_WGMMA

// A tile whose columns run along the summed dimension (Q, K): eight rows every 1024 bytes.
__device__ __forceinline__ u64 describe_rows(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// A tile whose rows run along the summed dimension (V): panels `panel_bytes` apart, eight rows every 1024.
__device__ __forceinline__ u64 describe_columns(u32 address, u32 panel_bytes) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Before the first product, and whenever registers that products use were written since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are unfinished; `d` are sums that are then complete.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");  // no use of d moves above the wait
}

// Makes this thread's writes to shared memory visible to the products; a barrier must follow.
__device__ __forceinline__ void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#if OVERNIGHT_T == 0
#define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define WGMMA_TYPES ".f32.f16.f16 "
#endif
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
#define SUMS_64(d, i) SUMS_32(d, i), SUMS_32(d, i + 32)
#define SUMS_128(d, i) SUMS_64(d, i), SUMS_64(d, i + 64)

// Both tiles in shared memory, columns along the summed dimension. `keep` false overwrites d.
__device__ __forceinline__ void wgmma_rows(float (&d)[32], u64 a, u64 b, bool keep) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, keep, 1, 1, 0, 0;\n}"
        : SUMS_32(d, 0)
        : "l"(a), "l"(b), "r"((u32)keep));
}

__device__ __forceinline__ void wgmma_rows(float (&d)[64], u64 a, u64 b, bool keep) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, keep, 1, 1, 0, 0;\n}"
        : SUMS_64(d, 0)
        : "l"(a), "l"(b), "r"((u32)keep));
}

// a in registers, as mma.cuh's a; b with rows along the summed dimension.
__device__ __forceinline__ void wgmma_columns(float (&d)[32], const u32 a[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
        : SUMS_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_columns(float (&d)[64], const u32 a[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : SUMS_64(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_columns(float (&d)[128], const u32 a[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16" WGMMA_TYPES
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
        : SUMS_128(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif  // HAS_WGMMA
