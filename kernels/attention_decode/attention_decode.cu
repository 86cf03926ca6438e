// out[r, h] = sum over t of softmax(scale * q[r, h] . k[t])[t] * v[t], t the visible tokens of row r, one query a row
// shapes:  qkv [num_tokens, (num_heads + 2*num_kv_heads) * D], row r is token r; out [num_rows, num_heads * D];
//          k_cache, v_cache [num_blocks, num_kv_heads, block_size, D]; block_tables [num_rows, block_table_stride]
// dtypes:  qkv, out, caches T; scores, sums and partials f32; offsets into the caches 64-bit
// grid:    persistent CTAs that take (chunk of a row, kv head) items from a work list, longest chunks first
// limits:  D 64, 128, 256; block_size a power of two >= 16; group <= 8 (wide: 16); chunk % 16 == 0, chunk <= 341 * WARPS
// cost:    reads 4*D bytes per token, row and kv head once; partials only for rows of several chunks; memory bound
#include "decode_slices.cuh"
#include "grid.cuh"

__device__ __forceinline__ float4 load_past_l1(const float* pointer) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}

__device__ __forceinline__ float load_past_l1_one(const float* pointer) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(pointer) : "memory");
    return value;
}

// A lane's share of the query tile: 16 heads (rows past the group are zero) by D, as mma A fragments.
// Only the first two registers of a step are used when the group fits eight rows.
template <int D, bool WIDE>
__device__ __forceinline__ void load_query(u32 q[D / 16][WIDE ? 4 : 2], const Arguments& a, const Work& w, u32 lane) {
    const u32 group = a.num_heads / a.num_kv_heads;
    const u32 row = lane / 4, column = 2 * (lane % 4);
    const u64 stride = (u64)(a.num_heads + 2 * a.num_kv_heads) * D;
    const T* source = a.qkv + w.row * stride + (u64)(w.kv_head * group + row) * D + column;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
#pragma unroll
        for (int part = 0; part < (WIDE ? 4 : 2); part++) {
            // part: column half for the narrow form; row half, then column half for the wide one.
            const int row_half = WIDE ? part & 1 : 0, column_half = WIDE ? part >> 1 : part;
            const bool real = w.valid && row + 8 * row_half < group;
            q[step][part] = real ? *(const u32*)(source + row_half * 8 * D + step * 16 + column_half * 8) : 0u;
        }
    }
}

template <int D, int WARPS, int STAGES, bool WIDE>
__device__ __forceinline__ void attention_decode(const Arguments& a, u32 num_entries) {
    constexpr u32 ROW_BYTES = D * 2;
    constexpr u32 TILE_BYTES = SLICE * ROW_BYTES;
    constexpr int ROWS = WIDE ? 2 : 1;  // query rows a lane owns: lane / 4 and, if wide, 8 more
    constexpr int QUERY_PARTS = WIDE ? 4 : 2;
    constexpr int THREADS = WARPS * 32;
    // A second set of query registers hides the load of the next query where there is room for it.
    constexpr bool QUERY_AHEAD = D < 256;

    extern __shared__ __align__(128) u8 stages[];
    __shared__ Work ring[RING];
    __shared__ float2 max_and_sum[WARPS][16];
    __shared__ u32 free_stage[WARPS];
    __shared__ u32 finished_row;

    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 group = a.num_heads / a.num_kv_heads;
    const u32 num_items = num_entries * a.num_kv_heads;
    const u32 stages_address = shared_address(stages) + warp * STAGES * 2 * TILE_BYTES;

    auto describe = [&](u32 index) {
        Work w = {0, 0, 0, 0, 0, 0, 0, 0};
        if (index < num_items) {
            const u64 entry = index / a.num_kv_heads;
            const uint4 first = ((const uint4*)a.work)[2 * entry], second = ((const uint4*)a.work)[2 * entry + 1];
            w = Work{first.x, first.y, first.z, first.w, second.x, second.y, index % a.num_kv_heads, 1};
        }
        return w;
    };

    // The first RING items are dealt round; the rest go to whoever asks first. Thread 0 asks two items before it
    // publishes one: `queued` is a number on its way from the queue, `upcoming` an entry on its way from the list.
    const bool dealt_out = num_items <= RING * gridDim.x;
    if (threadIdx.x < RING) ring[threadIdx.x] = describe(blockIdx.x + threadIdx.x * gridDim.x);
    u32 queued = num_items;
    Work upcoming = {0, 0, 0, 0, 0, 0, 0, 0};
    if (threadIdx.x == 0 && !dealt_out) queued = RING * gridDim.x + atomicAdd(&a.counters[0], 1u);
    __syncthreads();

    Producer<D, WARPS, STAGES> producer = {};
    u32 in_flight = 0;

    u32 q[D / 16][QUERY_PARTS], q_next[D / 16][QUERY_PARTS];
    if (QUERY_AHEAD) load_query<D, WIDE>(q_next, a, ring[0], lane);

    // ldmatrix addresses: K rows are tokens, two tiles of eight; V the same, read transposed.
    const u32 k_row = (lane / 16) * 8 + lane % 8, k_half = (lane / 8) % 2;
    const u32 v_row = ((lane / 8) % 2) * 8 + lane % 8, v_half = lane / 16;

    u32 stage = 0;
    // The item before this one, if its row has several chunks, and what its counter said (thread 0): whether ours
    // was the row's last chunk is learned one item later, so that nobody waits for the counter.
    Work last = {0, 0, 0, 0, 0, 0, 0, 0};
    u32 chunks_before = 0;

    auto reduce_row = [&](const Work& w) {
        // All chunks of a row and kv head are in partial_out: merge them in chunk order.
        const u64 stride = (u64)a.num_kv_heads * group;
        const u64 first = (u64)w.partial_base * stride + w.kv_head * group;
        for (u32 index = threadIdx.x; index < group * (D / 4); index += THREADS) {
            const u32 head = index / (D / 4), column = index % (D / 4) * 4;
            float max = NEGATIVE_INFINITY, sum = 0.0f;
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            // Eight chunks are on their way at a time.
            for (u32 chunk0 = 0; chunk0 < w.num_chunks; chunk0 += 8) {
                float lse[8];
                float4 value[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u64 place = first + min(chunk0 + i, w.num_chunks - 1) * stride + head;
                    lse[i] = load_past_l1_one(a.partial_lse + place);
                    value[i] = load_past_l1(a.partial_out + place * D + column);
                }
                float highest = max;
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    if (chunk0 + i >= w.num_chunks) lse[i] = NEGATIVE_INFINITY;
                    highest = fmaxf(highest, lse[i]);
                }
                const float correction = exp2_approx(max - highest);
                max = highest;
                sum *= correction;
                total = make_float4(total.x * correction, total.y * correction, total.z * correction, total.w * correction);
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const float weight = exp2_approx(lse[i] - max);
                    sum += weight;
                    total.x += weight * value[i].x;
                    total.y += weight * value[i].y;
                    total.z += weight * value[i].z;
                    total.w += weight * value[i].w;
                }
            }
            const float inverse = 1.0f / sum;
            T* target = a.out + ((u64)w.row * a.num_heads + w.kv_head * group + head) * D + column;
            *(uint2*)target =
                make_uint2(pack2(total.x * inverse, total.y * inverse), pack2(total.z * inverse, total.w * inverse));
        }
    };

    for (u32 item = 0;; item++) {
        const Work w = ring[item % RING];
        const u32 known = item == 0 ? RING - 1 : item + RING - 2;
        const u32 base = w.begin & ~(u32)(SLICE - 1);
        const u32 slices = w.valid ? slices_of_warp<WARPS>(w, warp) : 0;

        if (QUERY_AHEAD) {
#pragma unroll
            for (int step = 0; step < D / 16; step++)
#pragma unroll
                for (int part = 0; part < QUERY_PARTS; part++) q[step][part] = q_next[step][part];
            load_query<D, WIDE>(q_next, a, ring[(item + 1) % RING], lane);
        } else {
            load_query<D, WIDE>(q, a, w, lane);
        }

        float o[D / 8][4];
        float max[ROWS], sum[ROWS];
#pragma unroll
        for (int tile = 0; tile < D / 8; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[tile][i] = 0.0f;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            max[row] = NEGATIVE_INFINITY;
            sum[row] = 0.0f;
        }

        for (u32 slice = 0;; slice++) {
            // The stage read last is free again once every lane is here; after the last slice it stays free. A warp
            // without a slice of this item comes here too: its copies must not fall behind the ring.
            __syncwarp();
            const u32 stages_wanted = slice < slices ? STAGES : STAGES - 1;
            while (in_flight < stages_wanted && producer.produce(a, ring, known, warp, lane, stages_address)) in_flight++;
            if (slice == slices) break;
            // Groups finish in order: with all stages in flight all but the oldest may be pending; with fewer, at
            // the end, wait for all.
            if (in_flight == STAGES)
                copy_async_wait<STAGES - 1>();
            else
                copy_async_wait<0>();
            __syncwarp();
            in_flight--;

            const u32 k_tile = stages_address + stage * (2 * TILE_BYTES);
            const u32 v_tile = k_tile + TILE_BYTES;
            stage = stage + 1 == STAGES ? 0 : stage + 1;

            // Scores: two tiles of eight tokens, each summed in two chains.
            float s[2][2][4];
#pragma unroll
            for (int i = 0; i < 16; i++) ((float*)s)[i] = 0.0f;
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                u32 k[4];
                load_matrix_x4(k, k_tile + swizzled<ROW_BYTES>(k_row, 2 * step + k_half));
                const u32 query[4] = {q[step][0], WIDE ? q[step][1] : 0u, WIDE ? q[step][2] : q[step][1],
                                      WIDE ? q[step][QUERY_PARTS - 1] : 0u};
                mma_16816(s[0][step % 2], query, k[0], k[1]);
                mma_16816(s[1][step % 2], query, k[2], k[3]);
            }
            float p[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int i = 0; i < 2 * ROWS; i++) p[tile][i] = s[tile][0][i] + s[tile][1][i];

            const u32 token = base + (slice * WARPS + warp) * SLICE;
            if (token < w.begin || token + SLICE > w.end) {
#pragma unroll
                for (int tile = 0; tile < 2; tile++)
#pragma unroll
                    for (int i = 0; i < 2 * ROWS; i++) {
                        const u32 position = token + tile * 8 + 2 * (lane % 4) + i % 2;
                        if (position < w.begin || position >= w.end) p[tile][i] = NEGATIVE_INFINITY;
                    }
            }

            // A slice has a visible token, so the new maximum is finite for every row.
            float correction[ROWS];
            bool changed = false;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float highest = fmaxf(fmaxf(p[0][2 * row], p[0][2 * row + 1]), fmaxf(p[1][2 * row], p[1][2 * row + 1]));
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
                highest = fmaxf(highest, max[row]);
                correction[row] = exp2_approx((max[row] - highest) * a.scale_log2);
                changed |= highest > max[row];
                max[row] = highest;
            }
            if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
                for (int row = 0; row < ROWS; row++) sum[row] *= correction[row];
#pragma unroll
                for (int tile = 0; tile < D / 8; tile++)
#pragma unroll
                    for (int i = 0; i < 2 * ROWS; i++) o[tile][i] *= correction[i / 2];
            }
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int i = 0; i < 2 * ROWS; i++) {
                    p[tile][i] = exp2_approx((p[tile][i] - max[i / 2]) * a.scale_log2);
                    sum[i / 2] += p[tile][i];
                }
            const u32 weights[4] = {pack2(p[0][0], p[0][1]), WIDE ? pack2(p[0][2], p[0][3]) : 0u,
                                    pack2(p[1][0], p[1][1]), WIDE ? pack2(p[1][2], p[1][3]) : 0u};
#pragma unroll
            for (int tile = 0; tile < D / 8; tile += 2) {
                u32 v[4];
                load_matrix_x4_transposed(v, v_tile + swizzled<ROW_BYTES>(v_row, tile + v_half));
                mma_16816(o[tile], weights, v[0], v[1]);
                mma_16816(o[tile + 1], weights, v[2], v[3]);
            }
        }

        // The stage before `stage` is not in flight: it carries this warp's sums to the others.
        const u32 spare = stage == 0 ? STAGES - 1 : stage - 1;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
            if (lane % 4 == 0) max_and_sum[warp][lane / 4 + 8 * row] = make_float2(max[row], sum[row]);
        }
        if (lane == 0) free_stage[warp] = spare;
        if (slices > 0) {
            __syncwarp();  // every lane has read the stage
            float* const exchange = (float*)(stages + (warp * STAGES + spare) * 2 * TILE_BYTES);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const u32 head = lane / 4 + 8 * row;
                if (head < group) {
#pragma unroll
                    for (int tile = 0; tile < D / 8; tile++)
                        *(float2*)(exchange + head * D + ((tile ^ (lane / 4)) * 8) + 2 * (lane % 4)) =
                            make_float2(o[tile][2 * row], o[tile][2 * row + 1]);
                }
            }
        }
        if (threadIdx.x == 0) {
            finished_row = last.valid && chunks_before + 1 == last.num_chunks;
            if (finished_row) __threadfence();  // the other CTAs' partials, before anyone here reads them
            if (item > 0) ring[(item - 1) % RING] = upcoming;
        }
        __syncthreads();

        if (finished_row) {
            reduce_row(last);
            if (threadIdx.x == 0) a.counters[2 + last.row * a.num_kv_heads + last.kv_head] = 0;
        }
        if (!w.valid) break;
        for (u32 index = threadIdx.x; index < group * (D / 4); index += THREADS) {
            const u32 head = index / (D / 4), column = index % (D / 4) * 4;
            float highest = NEGATIVE_INFINITY;
#pragma unroll
            for (int other = 0; other < WARPS; other++) highest = fmaxf(highest, max_and_sum[other][head].x);
            float total_sum = 0.0f;
            float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int other = 0; other < WARPS; other++) {
                const float2 state = max_and_sum[other][head];
                if (state.y != 0.0f) {  // a NaN passes on; zero is a warp without a slice
                    const float weight = exp2_approx((state.x - highest) * a.scale_log2);
                    const float* exchange = (const float*)(stages + (other * STAGES + free_stage[other]) * 2 * TILE_BYTES);
                    const float4 part = *(const float4*)(exchange + head * D + (((column / 8) ^ (head % 8)) * 8) + column % 8);
                    total_sum += weight * state.y;
                    value.x += weight * part.x;
                    value.y += weight * part.y;
                    value.z += weight * part.z;
                    value.w += weight * part.w;
                }
            }
            const float inverse = 1.0f / total_sum;
            value = make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
            const u32 head_index = w.kv_head * group + head;
            if (w.num_chunks == 1) {
                T* target = a.out + ((u64)w.row * a.num_heads + head_index) * D + column;
                *(uint2*)target = make_uint2(pack2(value.x, value.y), pack2(value.z, value.w));
            } else {
                const u64 place = (u64)(w.partial_base + w.chunk_index) * a.num_heads + head_index;
                *(float4*)(a.partial_out + place * D + column) = value;
                if (column == 0) a.partial_lse[place] = highest * a.scale_log2 + __log2f(total_sum);
            }
        }
        last = w;
        last.valid = w.num_chunks > 1;
        // The partials above are written and the exchanged sums are read.
        __syncthreads();
        if (threadIdx.x == 0) {
            if (last.valid) {
                __threadfence();
                chunks_before = atomicAdd(&a.counters[2 + w.row * a.num_kv_heads + w.kv_head], 1u);
            }
            upcoming = describe(queued);
            if (!dealt_out) queued = RING * gridDim.x + atomicAdd(&a.counters[0], 1u);
        }
    }

    // The last CTA to leave makes the queue ready for the next launch.
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&a.counters[1], 1u) + 1 == gridDim.x) {
            a.counters[0] = 0;
            a.counters[1] = 0;
        }
    }
}

// Warps of a CTA and slices of each in shared memory; mod.rs holds the same table.
#if __CUDA_ARCH__ >= 800
#define SPLIT_64 4, 6
#define SPLIT_128 4, 3
#define SPLIT_256 2, 3
#else
// 64 KiB of shared memory and no background copies: two stages, fewer warps.
#define SPLIT_64 4, 2
#define SPLIT_128 2, 2
#define SPLIT_256 1, 2
#endif

#define ATTENTION_DECODE(...) ATTENTION_DECODE_EXPANDED(__VA_ARGS__)
#define ATTENTION_DECODE_EXPANDED(NAME, D, WARPS, STAGES, WIDE)                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attention_decode_##NAME(                            \
        T* out, const T* qkv, const T* k_cache, const T* v_cache, const u32* block_tables, u32 block_table_stride,  \
        const u32* context_lens, const u32* work, const u32* work_count, float* partial_out, float* partial_lse,    \
        u32* counters, u32 num_rows, u32 num_heads, u32 num_kv_heads, u32 block_size, u32 chunk, float scale,       \
        u32 window) {                                                                                               \
        grid_wait();                                                                                                \
        grid_launch_dependents();                                                                                   \
        const Arguments a = {out,         qkv,      k_cache,   v_cache,      block_tables, block_table_stride, work, \
                             partial_out, partial_lse, counters, num_heads, num_kv_heads, block_size,               \
                             scale * 1.4426950408889634f};                                                          \
        const u32 num_entries = *work_count;                                                                        \
        /* A fault of the host, which counts the chunks: no answer is better than a wrong one. */                   \
        if (num_entries == PLAN_OVERFLOW) asm volatile("trap;");                                                    \
        attention_decode<D, WARPS, STAGES, WIDE>(a, num_entries);                                                   \
    }

// A compilation may ask for one head dim only.
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 64
ATTENTION_DECODE(64, 64, SPLIT_64, false)
ATTENTION_DECODE(64_wide, 64, SPLIT_64, true)
#endif
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 128
ATTENTION_DECODE(128, 128, SPLIT_128, false)
ATTENTION_DECODE(128_wide, 128, SPLIT_128, true)
#endif
#if !defined(OVERNIGHT_HEAD_DIM) || OVERNIGHT_HEAD_DIM == 256
ATTENTION_DECODE(256, 256, SPLIT_256, false)
ATTENTION_DECODE(256_wide, 256, SPLIT_256, true)
#endif
