// The copies of decode attention: a warp walks items and their slices ahead of the arithmetic.
#pragma once
#include "async_copy.cuh"
#include "decode_work.cuh"
#include "mma.cuh"

// Tokens that one warp loads and multiplies at a time: one side of an mma tile, and the smallest block.
#define SLICE 16
// Work items a CTA knows ahead, so that its copies run on across the end of an item.
#define RING 4

struct Arguments {
    T* out;
    const T* qkv;
    const T* k_cache;
    const T* v_cache;
    const u32* block_tables;
    u32 block_table_stride;
    const u32* work;
    float* partial_out;
    float* partial_lse;
    u32* counters;
    u32 num_heads, num_kv_heads, block_size;
    float scale_log2;  // scale * log2(e)
};

// How many slices of an item a warp has; slice j of warp w is the item's slice j * WARPS + w.
template <int WARPS>
__device__ __forceinline__ u32 slices_of_warp(const Work& w, u32 warp) {
    const u32 total = (w.end - (w.begin & ~(u32)(SLICE - 1)) + SLICE - 1) / SLICE;
    return total > warp ? (total - warp + WARPS - 1) / WARPS : 0;
}

// The warp's side of the copies: walks items and slices ahead of the arithmetic.
template <int D, int WARPS, int STAGES>
struct Producer {
    static constexpr u32 ROW_BYTES = D * 2;
    static constexpr u32 TILE_BYTES = SLICE * ROW_BYTES;
    static constexpr u32 CHUNKS = D / 8;  // 16-byte chunks of a row

    u32 next_item;        // ordinal of the item to enter after this one
    u32 slice, slices;    // this warp's next slice of the present item and how many it has
    u32 base, begin, end; // first token of the item rounded down to a slice; its bounds
    u32 kv_head;
    u32 blocks, blocks_next;  // lane j: cache block of this warp's slice j, of this item and of the next
    bool next_loaded, finished;
    u32 stage;            // where the next slice goes

    __device__ __forceinline__ u32 load_blocks(const Arguments& a, const Work& w, u32 warp, u32 lane) {
        const u32 first = w.begin & ~(u32)(SLICE - 1);
        const u32 token = first + (lane * WARPS + warp) * SLICE;
        if (token >= w.end) return 0;
        return __ldg(a.block_tables + (u64)w.row * a.block_table_stride + token / a.block_size);
    }

    // Moves on to the next item, whose description must be in the ring (ordinals up to `known` are).
    __device__ __forceinline__ void enter(const Arguments& a, const Work* ring, u32 known, u32 warp, u32 lane) {
        const Work& w = ring[next_item % RING];
        next_item++;
        if (!w.valid) {
            finished = true;
            return;
        }
        blocks = next_loaded ? blocks_next : load_blocks(a, w, warp, lane);
        begin = w.begin;
        end = w.end;
        base = begin & ~(u32)(SLICE - 1);
        kv_head = w.kv_head;
        slice = 0;
        slices = slices_of_warp<WARPS>(w, warp);
        next_loaded = next_item <= known;
        if (next_loaded) {
            const Work& next = ring[next_item % RING];
            blocks_next = next.valid ? load_blocks(a, next, warp, lane) : 0;
        }
    }

    // Starts the copy of one more slice. False when nothing is left or the next item is not known yet.
    __device__ __forceinline__ bool produce(
        const Arguments& a, const Work* ring, u32 known, u32 warp, u32 lane, u32 stages_address) {
        while (slice == slices) {
            if (finished || next_item > known) return false;
            enter(a, ring, known, warp, lane);
        }
        const u32 token = base + (slice * WARPS + warp) * SLICE;
        const u32 block = __shfl_sync(0xffffffffu, blocks, slice);
        const u64 offset =
            (((u64)block * a.num_kv_heads + kv_head) * a.block_size + (token & (a.block_size - 1))) * D + lane * 8;
        const u32 target = stages_address + stage * (2 * TILE_BYTES);
        const T* k = a.k_cache + offset;
        const T* v = a.v_cache + offset;
        if (token >= begin && token + SLICE <= end) {
#pragma unroll
            for (int i = 0; i < SLICE * (int)CHUNKS / 32; i++) {
                const u32 place = swizzled<ROW_BYTES>((i * 32 + lane) / CHUNKS, (i * 32 + lane) % CHUNKS);
                copy_async_16(target + place, k + i * 256);
            }
#pragma unroll
            for (int i = 0; i < SLICE * (int)CHUNKS / 32; i++) {
                const u32 place = swizzled<ROW_BYTES>((i * 32 + lane) / CHUNKS, (i * 32 + lane) % CHUNKS);
                copy_async_16(target + TILE_BYTES + place, v + i * 256);
            }
        } else {
            // Tokens outside the chunk become zero: their slots may hold anything, and 0 * NaN is NaN.
#pragma unroll
            for (int i = 0; i < SLICE * (int)CHUNKS / 32; i++) {
                const u32 place = swizzled<ROW_BYTES>((i * 32 + lane) / CHUNKS, (i * 32 + lane) % CHUNKS);
                const u32 position = token + (i * 32 + lane) / CHUNKS;
                const bool visible = position >= begin && position < end;
                copy_async_16(target + place, k + i * 256, visible);
                copy_async_16(target + TILE_BYTES + place, v + i * 256, visible);
            }
        }
        copy_async_commit();
        slice++;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return true;
    }
};
