// token[r] = the first id of the largest logit, or the id at which the running sum of
//            exp((logits[r, id] - max) / temperature) passes uniform(seed, position) * the whole sum
// shapes:  logits [num_rows, row_stride], of which vocab_size ids count; params [num_rows];
//          stats [num_rows, ceil(vocab_size / 1024)]; tokens, status, chosen_* [num_rows]; top_* [num_rows, 20]
// dtypes:  logits T (bf16 or f16); weights f32, running sums f64
// grid:    scan: one warp a chunk of 1024 ids, 8 a CTA; pick: one warp a row; logprobs: one CTA a row
// limits:  vocab_size <= 524288, vocab_size <= row_stride, row_stride % 8 == 0; rows 16-byte aligned
// cost:    reads 2*R*V bytes once; memory bound
#include "grid.cuh"
#include "sampling_row.cuh"

// Likeliest ids that can be reported.
#define TOP_MAX 20

#define STATUS_OK 0u
#define STATUS_NOT_FINITE 1u

// Maximum and sum of weights of every chunk, of the adjusted and of the raw logits.
extern "C" __global__ void __launch_bounds__(256)
    sampling_scan(ChunkStats* __restrict__ stats, const T* __restrict__ logits,
                  const Adjustment* __restrict__ adjustments, const SampleParams* __restrict__ params, u32 num_rows,
                  u32 row_stride, u32 vocab_size) {
    grid_wait();
    grid_launch_dependents();
    const u32 lane = threadIdx.x % WARP, num_chunks = (vocab_size + CHUNK - 1) / CHUNK;
    const u32 chunk = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    if (chunk >= num_chunks) return;
    float v[LANE_IDS];
    load_chunk(v, logits + (u64)row * row_stride, chunk, lane, vocab_size);
    const SampleParams p = params[row];
    const bool has_logprobs = p.flags & FLAG_LOGPROBS, is_drawn = !is_greedy(p) && !(p.flags & FLAG_SCORE);
    ChunkStats chunk_stats = {};
    chunk_stats.raw_max = chunk_stats.max = chunk_max(v);
    if (has_logprobs) chunk_stats.raw_sum = chunk_sum(v, chunk_stats.raw_max, LOG2_E);
    if (p.num_adjustments > 0) {
        adjust_chunk(v, adjustments, p, chunk, lane);
        chunk_stats.max = chunk_max(v);
    }
    if (is_drawn) chunk_stats.sum = chunk_sum(v, chunk_stats.max, exponent_scale(p));
    if (lane == 0) stats[(u64)row * num_chunks + chunk] = chunk_stats;
}

// The first id whose value is `max`, which one of the chunk's has.
__device__ __forceinline__ u32 first_id_of(const float (&v)[LANE_IDS], float max, u32 chunk, u32 lane) {
    u32 first = ~0u;
#pragma unroll
    for (int i = LANE_IDS - 1; i >= 0; --i) {
        if (v[i] == max) first = id_of(chunk, lane, i);
    }
    return warp_min(first);
}

// Chooses the tokens of rows without filters. A lane looks after a run of neighbouring chunks.
extern "C" __global__ void __launch_bounds__(128)
    sampling_pick(u32* __restrict__ tokens, u32* __restrict__ status, const ChunkStats* __restrict__ stats,
                  const T* __restrict__ logits, const Adjustment* __restrict__ adjustments,
                  const SampleParams* __restrict__ params, u32 num_rows, u32 row_stride, u32 vocab_size) {
    grid_wait();
    grid_launch_dependents();
    const u32 lane = threadIdx.x % WARP, num_chunks = (vocab_size + CHUNK - 1) / CHUNK;
    const u32 row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= num_rows) return;
    const SampleParams p = params[row];
    if (is_filtered(p, vocab_size)) return;
    stats += (u64)row * num_chunks;
    logits += (u64)row * row_stride;
    const u32 per_lane = (num_chunks + WARP - 1) / WARP;
    const u32 start = min(lane * per_lane, num_chunks), end = min(start + per_lane, num_chunks);
    float max = NEGATIVE_INFINITY, raw_max = NEGATIVE_INFINITY;
    for (u32 chunk = start; chunk < end; ++chunk) {
        max = max_or_nan(max, stats[chunk].max);
        raw_max = max_or_nan(raw_max, stats[chunk].raw_max);
    }
    max = from_order_key(warp_max(order_key(max)));
    raw_max = from_order_key(warp_max(order_key(raw_max)));
    const bool is_scored = p.flags & FLAG_SCORE;
    if (!is_finite(raw_max) || !(is_scored || is_finite(max))) {
        if (lane == 0) {
            // A valid id, because the next step may look it up before the host has seen the status.
            tokens[row] = 0;
            status[row] = STATUS_NOT_FINITE;
        }
        return;
    }
    u32 token = p.score_token;
    if (!is_scored) {
        float v[LANE_IDS];
        u32 chunk = ~0u;
        double left = 0.0;
        const float scale = is_greedy(p) ? 0.0f : exponent_scale(p);
        if (is_greedy(p)) {
            for (u32 at = end; at > start; --at) {
                if (stats[at - 1].max == max) chunk = at - 1;
            }
            chunk = warp_min(chunk);
        } else {
            double sum = 0.0;
            for (u32 at = start; at < end; ++at) {
                sum += (double)stats[at].sum * (double)exp2_approx((stats[at].max - max) * scale);
            }
            const double running = warp_running_sum(sum, lane);
            const double target =
                philox_uniform(p.seed, p.position) * __shfl_sync(ALL_LANES, running, WARP - 1);
            double before = __shfl_up_sync(ALL_LANES, running, 1);
            if (lane == 0) before = 0.0;
            // Rounding may leave the target at the very end.
            u32 lanes = __ballot_sync(ALL_LANES, target < running && sum > 0.0);
            if (lanes == 0) lanes = 1u << (31 - __clz(__ballot_sync(ALL_LANES, sum > 0.0)));
            const u32 winner = __ffs(lanes) - 1;
            left = target - before;
            for (u32 at = start; at < end; ++at) {
                const double weight =
                    (double)stats[at].sum * (double)exp2_approx((stats[at].max - max) * scale);
                if (!(weight > 0.0)) continue;
                chunk = at;
                if (left < weight || at + 1 == end) break;
                // The last chunk that weighs anything keeps what rounding left over.
                bool has_later = false;
                for (u32 later = at + 1; later < end; ++later) has_later |= stats[later].sum > 0.0f;
                if (!has_later) break;
                left -= weight;
            }
            chunk = __shfl_sync(ALL_LANES, chunk, winner);
            left = __shfl_sync(ALL_LANES, left, winner);
        }
        load_chunk(v, logits, chunk, lane, vocab_size);
        adjust_chunk(v, adjustments, p, chunk, lane);
        token = is_greedy(p) ? first_id_of(v, max, chunk, lane) : walk_chunk(v, chunk, lane, max, scale, left);
    }
    if (lane == 0) {
        tokens[row] = token;
        status[row] = STATUS_OK;
    }
}

// The likeliest id after `last` in (likelier, lower id) order as order_key << 32 | ~id; 0 for none.
__device__ __forceinline__ u64 best_below(const float (&v)[LANE_IDS], u64 last, u32 chunk, u32 lane) {
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < LANE_IDS; ++i) {
        const u64 key = (u64)order_key(v[i]) << 32 | (u32)~id_of(chunk, lane, i);
        if (key < last && key > best) best = key;
    }
    return warp_max(best);
}

// Log probabilities of the chosen token and the likeliest ones, by the raw logits at temperature 1,
// and the chosen one's rank from 1. Only rows with FLAG_LOGPROBS and finite logits are written.
extern "C" __global__ void __launch_bounds__(256)
    sampling_logprobs(float* __restrict__ chosen_logprobs, u32* __restrict__ chosen_ranks,
                      u32* __restrict__ top_ids, float* __restrict__ top_logprobs, const u32* __restrict__ tokens,
                      const u32* __restrict__ status, const ChunkStats* __restrict__ stats,
                      const T* __restrict__ logits, const SampleParams* __restrict__ params, u32 num_rows,
                      u32 row_stride, u32 vocab_size) {
    // Of each chunk the order_key of the largest value not yet reported.
    __shared__ u32 largest[CHUNKS_MAX];
    __shared__ u32 num_before;
    grid_wait();
    grid_launch_dependents();
    const u32 row = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const SampleParams p = params[row];
    if (!(p.flags & FLAG_LOGPROBS) || status[row] != STATUS_OK) return;
    const u32 num_chunks = (vocab_size + CHUNK - 1) / CHUNK, num_warps = blockDim.x / WARP;
    stats += (u64)row * num_chunks;
    logits += (u64)row * row_stride;
    for (u32 chunk = threadIdx.x; chunk < num_chunks; chunk += blockDim.x) {
        largest[chunk] = order_key(stats[chunk].raw_max);
    }
    if (threadIdx.x == 0) num_before = 0;
    __syncthreads();
    const u32 token = tokens[row];
    const float chosen = to_float(logits[token]);
    float v[LANE_IDS];
    if (warp > 0) {
        u32 num = 0;
        for (u32 chunk = warp - 1; chunk < num_chunks; chunk += num_warps - 1) {
            if (stats[chunk].raw_max < chosen) continue;
            load_chunk(v, logits, chunk, lane, vocab_size);
#pragma unroll
            for (int i = 0; i < LANE_IDS; ++i) {
                num += v[i] > chosen || (v[i] == chosen && id_of(chunk, lane, i) < token);
            }
        }
        num = warp_sum(num);
        if (lane == 0) atomicAdd(&num_before, num);
    } else {
        u32 max_key = 0;
        for (u32 chunk = lane; chunk < num_chunks; chunk += WARP) max_key = max(max_key, largest[chunk]);
        const float max = from_order_key(warp_max(max_key));
        double sum = 0.0;
        for (u32 chunk = lane; chunk < num_chunks; chunk += WARP) {
            sum += (double)stats[chunk].raw_sum * (double)exp2_approx((stats[chunk].raw_max - max) * LOG2_E);
        }
        sum = __shfl_sync(ALL_LANES, warp_running_sum(sum, lane), WARP - 1);
        const double log_sum = (double)max + log(sum);
        if (lane == 0) chosen_logprobs[row] = (float)((double)chosen - log_sum);
        const u32 num_top = min(min(p.num_logprobs, vocab_size), (u32)TOP_MAX);
        u64 last = ~0ull;
        for (u32 rank = 0; rank < num_top; ++rank) {
            // Equal maxima: the lower chunk has the lower ids.
            u64 best = 0;
            for (u32 chunk = lane; chunk < num_chunks; chunk += WARP) {
                const u64 key = (u64)largest[chunk] << 32 | ~chunk;
                best = key > best ? key : best;
            }
            const u32 chunk = ~(u32)warp_max(best);
            load_chunk(v, logits, chunk, lane, vocab_size);
            last = best_below(v, last, chunk, lane);
            if (lane == 0) {
                top_ids[(u64)row * TOP_MAX + rank] = ~(u32)last;
                top_logprobs[(u64)row * TOP_MAX + rank] =
                    (float)((double)from_order_key((u32)(last >> 32)) - log_sum);
            }
            const u64 next = best_below(v, last, chunk, lane);
            // Every lane has read what lane 0 now replaces.
            __syncwarp();
            if (lane == 0) largest[chunk] = (u32)(next >> 32);
            __syncwarp();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) chosen_ranks[row] = num_before + 1;
}
