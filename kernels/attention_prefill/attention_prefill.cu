// out[i, h] = sum over t of softmax(scale * q[i, h] . k[t])[t] * v[t], t <= position of i, t > position - window
// shapes:  qkv [num_tokens, (num_heads + 2*num_kv_heads) * D]; out [num_tokens, num_heads * D]; k_cache, v_cache
//          [num_blocks, num_kv_heads, block_size, D]; block_tables [num_rows, block_table_stride]; cu_seqlens
//          [num_rows + 1]; context_lens [num_rows], this step's tokens included; tiles [num_tiles, 2] = row, query
// dtypes:  qkv, out, caches T; scores and sums f32; offsets into the caches 64-bit
// grid:    (num_kv_heads, num_tiles): a CTA takes TILE_ROWS rows of (query token, head of the group), tokens outer
// limits:  D 64, 128, 256; block_size a power of two >= 16; group <= TILE_ROWS; window 0 means none
// cost:    4*D flop per visible (query, key, head); reads K and V once per tile; compute bound
#include "types.cuh"
#include "async_copy.cuh"
#include "grid.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

struct Arguments {
    T* out;
    const T* qkv;
    const T* k_cache;
    const T* v_cache;
    const u32* block_tables;
    u32 block_table_stride;
    const u32* cu_seqlens;
    const u32* context_lens;
    const u32* tiles;
    u32 num_heads, num_kv_heads, block_size;
    float scale_log2;  // scale * log2(e)
    u32 window;
};

// WARPS warps, each with ROW_TILES * 16 query rows; KEYS keys a step, two steps in shared memory. The products are
// Hopper's where WGMMA, then with ROW_TILES 1 and warps in groups of four; else those of one warp.
template <int D, int WARPS, int ROW_TILES, int KEYS, bool WGMMA>
__device__ __forceinline__ void attention_prefill(const Arguments& a) {
    constexpr int THREADS = WARPS * 32;
    constexpr u32 TILE_ROWS = WARPS * ROW_TILES * 16;
    constexpr u32 ROW_BYTES = D * 2;
    constexpr u32 CHUNKS = D / 8;                   // 16-byte chunks of a row
    constexpr u32 ROWS_A_PASS = THREADS / CHUNKS;   // rows that all threads copy at once
    constexpr u32 KEY_BYTES = KEYS * ROW_BYTES;     // K or V of one step
    constexpr u32 GROUPS = KEYS / 16;               // runs of 16 keys, each inside one block
    constexpr u32 UNIT_ROWS = WGMMA ? 64 : ROW_TILES * 16;  // rows that are multiplied together
    static_assert(KEYS % ROWS_A_PASS == 0 && TILE_ROWS % ROWS_A_PASS == 0, "whole passes");
    static_assert(!WGMMA || (ROW_TILES == 1 && WARPS % 4 == 0), "whole groups of four warps");

    extern __shared__ __align__(1024) u8 shared[];
    const u32 q_address = shared_address(shared);
    const u32 kv_address = q_address + TILE_ROWS * ROW_BYTES;  // stage s: K at 2*s*KEY_BYTES, V after it

    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 kv_head = blockIdx.x;
    const u32 row = a.tiles[2 * blockIdx.y], first_query = a.tiles[2 * blockIdx.y + 1];
    const u32 group = a.num_heads / a.num_kv_heads;
    const u32 row_start = a.cu_seqlens[row];
    const u32 query_len = a.cu_seqlens[row + 1] - row_start;
    const u32 context_len = a.context_lens[row];
    const u32 tokens = min(TILE_ROWS / group, query_len - first_query);
    const u32 first_position = context_len - query_len + first_query;
    const u32 key_end = first_position + tokens;
    const u32 key_begin = (a.window != 0 && first_position + 1 > a.window) ? first_position + 1 - a.window : 0;
    const u32 first_key = key_begin / KEYS * KEYS;
    const u32 steps = (key_end - first_key + KEYS - 1) / KEYS;
    const u64 qkv_stride = (u64)(a.num_heads + 2 * a.num_kv_heads) * D;

    // Queries: row r is token r / group, head r % group. Rows past the last token become zero.
    const u32 copy_row = thread / CHUNKS, copy_chunk = thread % CHUNKS;
    {
        const T* source = a.qkv + (u64)(row_start + first_query) * qkv_stride + (u64)kv_head * group * D + copy_chunk * 8;
#pragma unroll
        for (u32 r = copy_row; r < TILE_ROWS; r += ROWS_A_PASS) {
            const u32 token = r / group, head = r % group;
            const bool real = token < tokens;
            copy_async_16(q_address + paneled<TILE_ROWS>(r, copy_chunk),
                          source + (real ? token * qkv_stride + head * D : 0), real);
        }
    }

    // Keys: lane i % GROUPS of each warp looks up the block of run i, one step ahead of the copies.
    const u32* const table = a.block_tables + (u64)row * a.block_table_stride;
    const u32 shift = 31 - __clz(a.block_size);
    const u32 first_page = key_begin >> shift, last_page = (key_end - 1) >> shift;
    auto look_up = [&](u32 step) {
        const u32 page = (first_key + step * KEYS + lane % GROUPS * 16) >> shift;
        return __ldg(table + min(max(page, first_page), last_page));
    };
    auto copy_keys = [&](u32 step, u32 blocks) {
        const u32 key0 = first_key + step * KEYS;
        const u32 k_target = kv_address + (step & 1) * 2 * KEY_BYTES;
        const bool whole = key0 >= key_begin && key0 + KEYS <= key_end;
#pragma unroll
        for (u32 i = 0; i < KEYS / ROWS_A_PASS; i++) {
            const u32 r = i * ROWS_A_PASS + copy_row;
            const u32 key = key0 + r;
            const u32 block = __shfl_sync(0xffffffffu, blocks, r / 16);
            const u64 offset =
                (((u64)block * a.num_kv_heads + kv_head) * a.block_size + (key & (a.block_size - 1))) * D + copy_chunk * 8;
            // Slots of keys that no query here sees may hold anything, and 0 * NaN is NaN: they become zero.
            const bool visible = whole || (key >= key_begin && key < key_end);
            const u32 place = paneled<KEYS>(r, copy_chunk);
            copy_async_16(k_target + place, a.k_cache + offset, visible);
            copy_async_16(k_target + KEY_BYTES + place, a.v_cache + offset, visible);
        }
    };

    u32 blocks_next = look_up(0);
    copy_keys(0, blocks_next);
    copy_async_commit();
    blocks_next = look_up(1);

    float o[ROW_TILES][D / 8][4];
    float highest[ROW_TILES][2], sum[ROW_TILES][2];
    u32 position[ROW_TILES][2];
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
        for (int tile = 0; tile < D / 8; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[t][tile][i] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            highest[t][half] = NEGATIVE_INFINITY;
            sum[t][half] = 0.0f;
            position[t][half] = first_position + (warp * ROW_TILES * 16 + t * 16 + half * 8 + lane / 4) / group;
        }
    }
    const u32 unit_row = warp * ROW_TILES * 16 / UNIT_ROWS * UNIT_ROWS;
    const u32 unit_low = first_position + unit_row / group;
    const u32 unit_high = first_position + (unit_row + UNIT_ROWS - 1) / group;
    const bool idle = unit_row / group >= tokens;

    const float slack = WGMMA ? 8.0f / a.scale_log2 : 0.0f;

    // ldmatrix rows: Q 16 rows by two chunks; K two tiles of eight keys by two chunks; V read transposed.
    const u32 q_row = warp * ROW_TILES * 16 + lane % 16, q_half = lane / 16;
    const u32 k_row = (lane / 16) * 8 + lane % 8, k_half = (lane / 8) % 2;
    const u32 v_row = lane % 16, v_half = lane / 16;

    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<0>();
#if HAS_WGMMA
        if (WGMMA) wgmma_publish();
#endif
        // This step's keys are there for all, and all are done with the step before, whose place is next.
        __syncthreads();
        if (step + 1 < steps) {
            copy_keys(step + 1, blocks_next);
            copy_async_commit();
            blocks_next = look_up(step + 2);
        }
        const u32 key0 = first_key + step * KEYS;
        const bool below = a.window != 0 && key0 + KEYS + a.window <= unit_low + 1;
        if (idle || key0 > unit_high || below) continue;  // nothing in this step is for these rows

        const u32 k_tile = kv_address + (step & 1) * 2 * KEY_BYTES;
        const u32 v_tile = k_tile + KEY_BYTES;
        float s[ROW_TILES][KEYS / 8][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[t][tile][i] = 0.0f;
#if HAS_WGMMA
        if constexpr (WGMMA) {
            float(&sums)[KEYS / 2] = *(float(*)[KEYS / 2])&s;
            wgmma_fence();
#pragma unroll
            for (int depth = 0; depth < D / 16; depth++) {
                // 64 columns a panel, 32 bytes a step inside it.
                const u32 q = q_address + depth / 4 * (TILE_ROWS * 128) + unit_row * 128 + depth % 4 * 32;
                const u32 k = k_tile + depth / 4 * (KEYS * 128) + depth % 4 * 32;
                wgmma_rows(sums, describe_rows(q), describe_rows(k), depth > 0);
            }
            wgmma_commit();
            wgmma_wait<0>(sums);
        }
#endif
        if constexpr (!WGMMA) {
#pragma unroll
            for (int depth = 0; depth < D / 16; depth++) {
                u32 q[ROW_TILES][4];
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++)
                    load_matrix_x4(q[t], q_address + paneled<TILE_ROWS>(q_row + 16 * t, 2 * depth + q_half));
#pragma unroll
                for (int pair = 0; pair < KEYS / 16; pair++) {
                    u32 k[4];
                    load_matrix_x4(k, k_tile + paneled<KEYS>(k_row + 16 * pair, 2 * depth + k_half));
#pragma unroll
                    for (int t = 0; t < ROW_TILES; t++) {
                        mma_16816(s[t][2 * pair], q[t], k[0], k[1]);
                        mma_16816(s[t][2 * pair + 1], q[t], k[2], k[3]);
                    }
                }
            }
        }

        if (key0 + KEYS > unit_low + 1 || (a.window != 0 && key0 + a.window <= unit_high)) {
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32 key = key0 + tile * 8 + 2 * (lane % 4) + i % 2;
                        const u32 at = position[t][i / 2];
                        if (key > at || (a.window != 0 && key + a.window <= at)) s[t][tile][i] = NEGATIVE_INFINITY;
                    }
        }

#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float max = s[t][0][2 * half];
#pragma unroll
                for (int tile = 0; tile < KEYS / 8; tile++)
                    max = fmaxf(max, fmaxf(s[t][tile][2 * half], s[t][tile][2 * half + 1]));
                max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
                max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
                // With WGMMA the shift follows the maximum only when it grew by more than 2^8: weights stay below
                // 256, the quotient is the same, and most steps need no rescaling. Each row decides for itself.
                float correction = 1.0f;
                if (max > highest[t][half] + slack) {
                    correction = exp2_approx((highest[t][half] - max) * a.scale_log2);
                    highest[t][half] = max;
                }
                // A row may have seen no key yet (window): any finite shift then leaves its weights zero.
                const float shift_by = highest[t][half] == NEGATIVE_INFINITY ? 0.0f : highest[t][half] * a.scale_log2;
                if (!WGMMA || __any_sync(0xffffffffu, correction != 1.0f)) {
#pragma unroll
                    for (int tile = 0; tile < D / 8; tile++) {
                        o[t][tile][2 * half] *= correction;
                        o[t][tile][2 * half + 1] *= correction;
                    }
                }
                float total = sum[t][half] * correction;
#pragma unroll
                for (int tile = 0; tile < KEYS / 8; tile++)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        s[t][tile][i] = exp2_approx(s[t][tile][i] * a.scale_log2 - shift_by);
                        total += s[t][tile][i];
                    }
                sum[t][half] = total;
            }

#if HAS_WGMMA
        if constexpr (WGMMA) {
            u32 p[KEYS / 16][4];
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; pair++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    p[pair][i] = pack2(s[0][2 * pair + i / 2][i % 2 * 2], s[0][2 * pair + i / 2][i % 2 * 2 + 1]);
            float(&sums)[D / 2] = *(float(*)[D / 2])&o;
            wgmma_fence();
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; pair++)
                wgmma_columns(sums, p[pair], describe_columns(v_tile + pair * 2048, KEYS * 128));
            wgmma_commit();
            wgmma_wait<0>(sums);
        }
#endif
        if constexpr (!WGMMA) {
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; pair++) {
                u32 p[ROW_TILES][4];
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        p[t][i] = pack2(s[t][2 * pair + i / 2][i % 2 * 2], s[t][2 * pair + i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int tile = 0; tile < D / 8; tile += 2) {
                    u32 v[4];
                    load_matrix_x4_transposed(v, v_tile + paneled<KEYS>(v_row + 16 * pair, tile + v_half));
#pragma unroll
                    for (int t = 0; t < ROW_TILES; t++) {
                        mma_16816(o[t][tile], p[t], v[0], v[1]);
                        mma_16816(o[t][tile + 1], p[t], v[2], v[3]);
                    }
                }
            }
        }
    }

    // A warp's own query rows hold its answers on the way out, so that stores are 16 bytes wide.
    if (WGMMA)
        __syncthreads();  // the products of a group read the rows of all its warps
    else
        __syncwarp();
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[t][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float inverse = 1.0f / total;
            const u32 r = warp * ROW_TILES * 16 + t * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int tile = 0; tile < D / 8; tile++)
                *(u32*)(shared + paneled<TILE_ROWS>(r, tile) + lane % 4 * 4) =
                    pack2(o[t][tile][2 * half] * inverse, o[t][tile][2 * half + 1] * inverse);
        }
    __syncwarp();
    T* const target = a.out + ((u64)(row_start + first_query) * a.num_heads + kv_head * group) * D;
#pragma unroll
    for (u32 i = 0; i < ROW_TILES * 16 * CHUNKS / 32; i++) {
        const u32 r = warp * ROW_TILES * 16 + (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const u32 token = r / group, head = r % group;
        if (token < tokens)
            *(uint4*)(target + ((u64)token * a.num_heads + head) * D + chunk * 8) =
                *(const uint4*)(shared + paneled<TILE_ROWS>(r, chunk));
    }
}

#define ATTENTION_PREFILL(...) ATTENTION_PREFILL_EXPANDED(__VA_ARGS__)
#define ATTENTION_PREFILL_EXPANDED(D, WARPS, ROW_TILES, KEYS, CTAS, WGMMA)                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS) attention_prefill_##D(                           \
        T* out, const T* qkv, const T* k_cache, const T* v_cache, const u32* block_tables, u32 block_table_stride,  \
        const u32* cu_seqlens, const u32* context_lens, const u32* tiles, u32 num_tiles, u32 num_heads,             \
        u32 num_kv_heads, u32 block_size, float scale, u32 window) {                                                \
        grid_wait();                                                                                                \
        grid_launch_dependents();                                                                                   \
        const Arguments a = {out,        qkv,          k_cache, v_cache,   block_tables, block_table_stride,        \
                             cu_seqlens, context_lens, tiles,   num_heads, num_kv_heads, block_size,                \
                             scale * 1.4426950408889634f, window};                                                  \
        attention_prefill<D, WARPS, ROW_TILES, KEYS, WGMMA>(a);                                                     \
    }

// Warps of a CTA, row tiles of a warp, keys of a step, CTAs of an SM; mod.rs holds the same table.
#if HAS_WGMMA
#define SPLIT_64 8, 1, 64, 2, true
#define SPLIT_128 8, 1, 64, 2, true
#define SPLIT_256 8, 1, 64, 1, true
#elif __CUDA_ARCH__ >= 800
#define SPLIT_64 4, 2, 64, 2, false
#define SPLIT_128 4, 2, 64, 2, false
#define SPLIT_256 4, 1, 32, 2, false
#else
#define SPLIT_64 4, 1, 64, 1, false
#define SPLIT_128 4, 1, 32, 1, false
#define SPLIT_256 4, 1, 16, 1, false
#endif

// A compilation may ask for one head dim only.
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 64
ATTENTION_PREFILL(64, SPLIT_64)
#endif
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 128
ATTENTION_PREFILL(128, SPLIT_128)
#endif
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 256
ATTENTION_PREFILL(256, SPLIT_256)
#endif
