// Tensor core products of one warp and the shared memory loads that feed them.
//
// mma_16816: c[16 x 8] += a[16 x 16] * b[16 x 8], f32 sums. With group = lane / 4 and pair = lane % 4:
//   a[0] row group,     columns 2*pair, +1        a[2] the same row, columns +8
//   a[1] row group + 8, columns 2*pair, +1        a[3] the same row, columns +8
//   b0   rows 2*pair, +1 of column group          b1   rows +8
//   c[0], c[1] row group, columns 2*pair, +1      c[2], c[3] row group + 8
#pragma once
#include "types.cuh"

__device__ __forceinline__ void mma_16816(float c[4], const u32 a[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
#if OVERNIGHT_T == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
#else
    // sm_75 multiplies eight columns at a time; the fragments of both halves have the same shape.
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Four 8x8 matrices of 16-bit elements; lanes 8*i .. 8*i+7 give the row addresses of matrix i.
// A lane then holds, of each matrix, row lane / 4, columns 2 * (lane % 4) and +1.
__device__ __forceinline__ void load_matrix_x4(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 r[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of ROW_BYTES-byte rows. The exclusive-or
// spreads one column of eight rows over all banks, so that load_matrix and row-wise copies never conflict.
template <int ROW_BYTES>
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) {
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}
