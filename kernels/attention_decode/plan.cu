// work = the chunks of all rows, longest first; rows are cut at multiples of chunk, short tails stay with the chunk before
// shapes:  work [num_chunks_max] of Work; work_count [1]; context_lens [num_rows]
// dtypes:  u32
// grid:    one CTA of PLAN_THREADS threads, a thread per row and pass
// limits:  chunk >= 64; chunks of all rows < 2^32; a row of length 0 has none; of more than num_chunks_max nothing is
//          listed and work_count is PLAN_OVERFLOW
// cost:    two passes over the lengths, 32 bytes written per chunk; latency bound, once per step and window
#include "decode_work.cuh"
#include "grid.cuh"

#define PLAN_THREADS 1024
#define PLAN_BUCKETS 64

// Gives each lane that wants one a place in its bucket, with one atomic per bucket and warp.
__device__ __forceinline__ u32 take_place(u32* cursor, u32 bucket, bool wants) {
    const u32 lane = threadIdx.x % 32;
    const u32 same = __match_any_sync(0xffffffffu, wants ? bucket : PLAN_BUCKETS);
    const u32 leader = __ffs(same) - 1;
    u32 first = 0;
    if (wants && lane == leader) first = atomicAdd(&cursor[bucket], __popc(same));
    return __shfl_sync(0xffffffffu, first, leader) + __popc(same & ((1u << lane) - 1));
}

// Gives each lane `count` places in a row of a counter, with one atomic per warp.
__device__ __forceinline__ u32 take_places(u32* cursor, u32 count) {
    const u32 lane = threadIdx.x % 32;
    u32 through = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 before = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += before;
    }
    u32 first = 0;
    if (lane == 31 && through != 0) first = atomicAdd(cursor, through);
    return __shfl_sync(0xffffffffu, first, 31) + through - count;
}

// Lists the chunks of all rows, longest first to within a 64th. A tail of less than half a chunk stays with the
// chunk before it. One CTA of PLAN_THREADS threads; the order inside a bucket varies, and no result depends on it.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) attention_decode_plan(
    u32* work, u32* work_count, const u32* context_lens, u32 num_rows, u32 num_chunks_max, u32 chunk, u32 window) {
    __shared__ u32 cursor[PLAN_BUCKETS];
    __shared__ u32 partial_cursor;
    __shared__ bool overflows;
    grid_wait();
    grid_launch_dependents();
    const u32 thread = threadIdx.x;
    const u32 longest = chunk + chunk / 2;
    if (thread < PLAN_BUCKETS) cursor[thread] = 0;
    if (thread == 0) partial_cursor = 0;
    __syncthreads();

    auto bucket_of = [&](u32 length) { return (longest - length) * PLAN_BUCKETS / longest; };
    auto list = [&](u32 place, u32 row, u32 begin, u32 end, u32 index, u32 num_chunks, u32 partial_base) {
        ((uint4*)work)[2 * (u64)place] = make_uint4(row, begin, end, index);
        ((uint4*)work)[2 * (u64)place + 1] = make_uint4(num_chunks, partial_base, 0, 1);
    };
    // Two passes over the same cut: the first counts each bucket, the second writes.
    for (int pass = 0; pass < 2; pass++) {
        for (u32 row0 = 0; row0 < num_rows; row0 += PLAN_THREADS) {
            const u32 row = row0 + thread;
            const u32 length = row < num_rows ? context_lens[row] : 0;
            const u32 start = (window != 0 && length > window) ? length - window : 0;
            const u32 first = start / chunk;
            u32 last = length == 0 ? 0 : (length - 1) / chunk;
            if (last > first && length - last * chunk < chunk / 2) last--;
            const u32 num_chunks = length == 0 ? 0 : last - first + 1;
            const u32 first_end = num_chunks > 1 ? (first + 1) * chunk : length;
            // Whole chunks of a row stand together, so that they run and are merged at about the same time.
            const bool first_whole = num_chunks > 1 && first_end - start == chunk;
            const bool last_whole = num_chunks > 1 && length - last * chunk == chunk;
            const u32 between = num_chunks > 2 ? num_chunks - 2 : 0;
            const u32 whole = between + first_whole + last_whole;

            const u32 whole_place = take_places(&cursor[bucket_of(chunk)], whole);
            const u32 first_place = take_place(cursor, bucket_of(first_end - start), num_chunks > 0 && !first_whole);
            const u32 last_place = take_place(cursor, bucket_of(length - last * chunk), num_chunks > 1 && !last_whole);
            if (pass == 0) continue;
            const u32 partial_base = take_places(&partial_cursor, num_chunks > 1 ? num_chunks : 0);
            for (u32 i = 0; i < num_chunks; i++) {
                const bool is_first = i == 0, is_last = i == num_chunks - 1;
                const u32 place = is_first && !first_whole            ? first_place
                                  : is_last && !is_first && !last_whole ? last_place
                                                                        : whole_place + i - !first_whole;
                list(place, row, is_first ? start : (first + i) * chunk, is_last ? length : (first + i + 1) * chunk, i,
                     num_chunks, partial_base);
            }
        }
        __syncthreads();
        if (pass == 0 && thread < 32) {
            u32 total = 0;
            for (u32 part = 0; part < PLAN_BUCKETS; part += 32) {
                const u32 count = cursor[part + thread];
                u32 through = count;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const u32 before = __shfl_up_sync(0xffffffffu, through, step);
                    if (thread >= step) through += before;
                }
                cursor[part + thread] = total + through - count;
                total += __shfl_sync(0xffffffffu, through, 31);
            }
            if (thread == 0) {
                // Whoever reads the list stops at this count: a part of it would be a wrong answer.
                overflows = total > num_chunks_max;
                work_count[0] = overflows ? PLAN_OVERFLOW : total;
            }
        }
        __syncthreads();
        if (overflows) return;
    }
}
