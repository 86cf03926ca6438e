// token[r]: as sampling.cu, among the ids that top-k, then top-p, then min-p keep. Keys order ids by
// (logit, then lower id); a filter keeps the keys from its last one up, which a search finds without
// sorting: count ids in bins of likelihood, bracket the last key between two bins, gather the few ids
// of the bracket and sort those; a bracket too full is cut into bins again.
// shapes:  logits [num_rows, row_stride], of which vocab_size ids count; params [num_rows];
//          stats [num_rows, ceil(vocab_size / 1024)] from sampling_scan; tokens, status [num_rows]
// dtypes:  logits T (bf16 or f16); weights f32, their sums 2^-40 fixed point in u64, so that no order matters
// grid:    one CTA a row, any number of warps, the same result; rows without filters leave at once
// limits:  vocab_size <= 524288, vocab_size <= row_stride, row_stride % 8 == 0; rows 16-byte aligned
// cost:    reads the chunks that can matter twice, at most 4*R*V bytes; L2 and shared atomics bound
#include "grid.cuh"
#include "sampling_row.cuh"

#define NUM_BINS 4096
// Ids of a bracket that are sorted; a power of two.
#define CANDIDATES_MAX 2048
// A search halves its range at least 500-fold a round, so f32 is used up before.
#define ROUNDS_MAX 16
// Ids less likely than e^-40 of the likeliest weigh less than rounding does, all of them together.
#define RANGE_MAX 40.0f
#define WARPS_MAX 32

#define FIXED_ONE 1099511627776.0f
#define INFINITY_F (-NEGATIVE_INFINITY)

#define STATUS_OK 0u
#define STATUS_NOT_FINITE 1u

__device__ __forceinline__ u64 to_fixed(float weight) { return (u64)(weight * FIXED_ONE); }

// The row and what was found of it.
struct Row {
    const T* logits;
    const Adjustment* adjustments;
    const SampleParams* params;
    u32 vocab_size;
    u32 num_chunks;
    // Largest adjusted logit.
    float max;
    // log2 of e over the temperature.
    float scale;
    // Keys below it are dropped: order_key << 32 | ~id.
    u64 last;

    __device__ float weight(float logit) const { return exp2_approx((logit - max) * scale); }
};

// What the threads of a CTA share.
struct Shared {
    // The one past the last takes what is out of range.
    u32 bins[NUM_BINS + 1];
    u64 candidates[CANDIDATES_MAX];
    // Weight of what is kept of each chunk.
    u64 chunk_mass[CHUNKS_MAX];
    float chunk_max[CHUNKS_MAX];
    u64 warp_low[WARPS_MAX];
    u64 warp_high[WARPS_MAX];
    u64 mass;
    u64 count_before;
    u32 first_bin;
    u32 last_bin;
    u32 num_candidates;
    u32 min_key;
    u32 max_key;
    u32 cut;
    float bound;
};
// At file scope, so that every access is known to be one of shared memory.
__shared__ Shared s;

__device__ __forceinline__ u64 key_of(float logit, u32 id) { return (u64)order_key(logit) << 32 | (u32)~id; }
__device__ __forceinline__ float logit_of(u64 key) { return from_order_key((u32)(key >> 32)); }

// Calls visit(x, first_id) for the four vectors of a lane in order of ids: x[e] is the adjusted logit of
// first_id + e, or -inf where it is no id or its key is below row.last. All loads are under way before
// the first call. Chunks with nothing to check have a loop of their own. Neither is unrolled further,
// because that compiles for half a minute.
template <class Visit>
__device__ __forceinline__ void for_each_vector(const Row& row, u32 chunk, u32 lane, Visit visit) {
    uint4 vectors[LANE_IDS / VEC];
#pragma unroll
    for (int j = 0; j < LANE_IDS / VEC; ++j) {
        const u32 id = id_of(chunk, lane, j * VEC);
        vectors[j] = id < row.vocab_size ? load_vector_once(row.logits + id) : make_uint4(0, 0, 0, 0);
    }
    const SampleParams& p = *row.params;
    if (p.num_adjustments == 0 && row.last == 0 && (chunk + 1) * CHUNK <= row.vocab_size) {
#pragma unroll 1
        for (int j = 0; j < LANE_IDS / VEC; j += 2) {
            float x[VEC];
            unpack_vector(x, vectors[0]);
            visit(x, id_of(chunk, lane, j * VEC));
            unpack_vector(x, vectors[1]);
            visit(x, id_of(chunk, lane, (j + 1) * VEC));
            vectors[0] = vectors[2];
            vectors[1] = vectors[3];
        }
        return;
    }
    const Adjustment* adjustments = row.adjustments + p.adjustments_start;
    u32 at = p.num_adjustments ? first_adjustment(adjustments, p.num_adjustments, chunk * CHUNK, lane) : 0;
    const float bound = logit_of(row.last);
    const u32 bound_id = ~(u32)row.last;
#pragma unroll 1
    for (u32 j = 0; j < LANE_IDS / VEC; ++j) {
        const u32 first_id = chunk * CHUNK + j * (WARP * VEC) + lane * VEC;
        float x[VEC];
        unpack_vector(x, vectors[0]);
        vectors[0] = vectors[1];
        vectors[1] = vectors[2];
        vectors[2] = vectors[3];
        for (; at < p.num_adjustments; ++at) {
            const Adjustment adjustment = adjustments[at];
            if (adjustment.id >= chunk * CHUNK + (j + 1) * (WARP * VEC)) break;
            const u32 mine = adjustment.id - first_id;
            float logit = 0.0f;
#pragma unroll
            for (int e = 0; e < VEC; ++e) logit = e == mine ? x[e] : logit;
            logit = adjusted(logit, adjustment, p);
#pragma unroll
            for (int e = 0; e < VEC; ++e) x[e] = e == mine ? logit : x[e];
        }
        if (first_id + VEC > row.vocab_size) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) x[e] = first_id + e < row.vocab_size ? x[e] : NEGATIVE_INFINITY;
        }
        if (row.last != 0) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (x[e] < bound || (x[e] == bound && first_id + e > bound_id)) x[e] = NEGATIVE_INFINITY;
            }
        }
        visit(x, first_id);
    }
}

// Turns two numbers into their sums over the threads below this one. Two barriers.
__device__ __forceinline__ void cta_running_sums(u64& low, u64& high) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const u64 low_running = warp_running_sum(low, lane), high_running = warp_running_sum(high, lane);
    if (lane == WARP - 1) {
        s.warp_low[warp] = low_running;
        s.warp_high[warp] = high_running;
    }
    __syncthreads();
    const bool is_below = lane < num_warps && lane < warp;
    low = warp_sum(is_below ? s.warp_low[lane] : 0ull) + low_running - low;
    high = warp_sum(is_below ? s.warp_high[lane] : 0ull) + high_running - high;
    __syncthreads();
}

// Sums s.chunk_mass into s.mass. Ends with a barrier.
__device__ __forceinline__ void sum_chunk_mass(u32 num_chunks) {
    __syncthreads();
    if (threadIdx.x < WARP) {
        u64 mass = 0;
        for (u32 chunk = threadIdx.x; chunk < num_chunks; chunk += WARP) mass += s.chunk_mass[chunk];
        mass = warp_sum(mass);
        if (threadIdx.x == 0) s.mass = mass;
    }
    __syncthreads();
}

// The likelier of two keys for the lower place, or for the higher one.
__device__ __forceinline__ u64 ordered_of(u64 mine, u64 other, bool wants_likelier) {
    return (mine > other) == wants_likelier ? mine : other;
}

// Sorts the first `num` candidates, likeliest first; places up to the next power of two are overwritten.
// Bitonic (Batcher, Sorting Networks and their Applications, 1968): distances up to 32 within a warp, which
// keeps 64 keys in registers, longer ones through shared memory.
__device__ __forceinline__ void sort_candidates(u32 num) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    u32 log_size = 6;
    while (1u << log_size < num) ++log_size;
    const u32 size = 1u << log_size;
    for (u32 at = num + threadIdx.x; at < size; at += blockDim.x) s.candidates[at] = 0;
    __syncthreads();
    for (u32 log_run = 6; log_run <= log_size; ++log_run) {
        for (u32 log_distance = log_run; log_distance-- > 6;) {
            for (u32 at = threadIdx.x; at < size / 2; at += blockDim.x) {
                const u32 left = at >> log_distance << (log_distance + 1) | (at & ((1u << log_distance) - 1));
                const u32 right = left | 1u << log_distance;
                const u64 a = s.candidates[left], b = s.candidates[right];
                if ((a < b) == ((left >> log_run & 1) == 0)) {
                    s.candidates[left] = b;
                    s.candidates[right] = a;
                }
            }
            __syncthreads();
        }
        for (u32 start = warp * 2 * WARP; start < size; start += num_warps * 2 * WARP) {
            const u32 left = start + lane, right = left + WARP;
            u64 a = s.candidates[left], b = s.candidates[right];
            // Runs shorter than 64 all at the first time.
            for (u32 run = log_run == 6 ? 1 : 6; run <= 6; ++run) {
                const u32 log = run == 6 ? log_run : run;
                const bool a_falls = (left >> log & 1) == 0, b_falls = (right >> log & 1) == 0;
                if (run == 6) {
                    const u64 upper = ordered_of(a, b, a_falls);
                    b = ordered_of(a, b, !a_falls);
                    a = upper;
                }
                for (u32 distance = min(1u << run, 2u * WARP) / 2; distance > 0; distance /= 2) {
                    if (distance == WARP) continue;
                    const bool is_lower = !(lane & distance);
                    a = ordered_of(a, __shfl_xor_sync(ALL_LANES, a, distance), is_lower == a_falls);
                    b = ordered_of(b, __shfl_xor_sync(ALL_LANES, b, distance), is_lower == b_falls);
                }
            }
            s.candidates[left] = a;
            s.candidates[right] = b;
        }
        __syncthreads();
    }
}

// The key of the `num`-th id, in order of ids, among those whose logit is `logit`.
__device__ __noinline__ u64 key_of_tie(const Row row, float logit, u64 num) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    for (u32 chunk = warp; chunk < row.num_chunks; chunk += num_warps) {
        u32 count = 0;
        if (s.chunk_max[chunk] >= logit) {
            for_each_vector(row, chunk, lane, [&](const float (&x)[VEC], u32) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) count += x[e] == logit;
            });
        }
        count = warp_sum(count);
        if (lane == 0) s.bins[chunk] = count;
    }
    __syncthreads();
    if (warp == 0) {
        u32 chunk = 0, left = (u32)num - 1;
        while (chunk + 1 < row.num_chunks && left >= s.bins[chunk]) left -= s.bins[chunk++];
        // One more than the id.
        u32 found = 0;
        for_each_vector(row, chunk, lane, [&](const float (&x)[VEC], u32 first_id) {
            u32 count = 0;
#pragma unroll
            for (int e = 0; e < VEC; ++e) count += x[e] == logit;
            const u32 running = warp_running_sum(count, lane);
            u32 before = running - count;
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                if (x[e] == logit && before++ == left) found = first_id + e + 1;
            }
            // Wraps once passed, and then equals no count.
            left -= __shfl_sync(ALL_LANES, running, WARP - 1);
        });
        found = warp_max(found);
        if (lane == 0) s.candidates[0] = key_of(logit, found - 1);
    }
    __syncthreads();
    return s.candidates[0];
}

// The last key kept of those from row.last up. By count: `target` keys are kept. By mass: the fewest
// whose weights reach `target`. No key sought is below `low`. Sets `has_mass` when s.chunk_mass holds
// the weights of what is kept.
__device__ __forceinline__ u64 last_kept(const Row& row, bool by_mass, u64 target, float low,
                                      bool& has_mass) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    const u32 bins_per_thread = NUM_BINS / blockDim.x;
    float high = row.max;
    // Count or mass of the ids above `high`.
    u64 above = 0;
    has_mass = false;
    for (u32 round = 0; round < ROUNDS_MAX; ++round) {
        // Half a bin short, so that rounding leaves `low` in the last one.
        const float bins_per_unit = ((float)NUM_BINS - 0.5f) / fmaxf(high - low, 1e-30f);
        for (u32 bin = threadIdx.x; bin < NUM_BINS; bin += blockDim.x) s.bins[bin] = 0;
        if (threadIdx.x == 0) {
            // Rounding may have the target reached already: then the likeliest of the range is the last.
            s.first_bin = s.last_bin = above >= target ? 0 : NUM_BINS;
            s.num_candidates = 0;
            s.min_key = ~0u;
            s.max_key = 0;
            s.cut = ~0u;
        }
        __syncthreads();
        for (u32 chunk = warp; chunk < row.num_chunks; chunk += num_warps) {
            if (s.chunk_max[chunk] < low) continue;
            for_each_vector(row, chunk, lane, [&](const float (&x)[VEC], u32) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    const float bin = x[e] > high ? (float)NUM_BINS : (high - x[e]) * bins_per_unit;
                    atomicAdd(&s.bins[min((u32)bin, (u32)NUM_BINS)], 1u);
                }
            });
        }
        __syncthreads();

        // Bounds of the running count or mass at each bin: a weight lies between those of its bin's edges.
        u64 sum_low = 0, sum_high = 0;
        const u32 start = threadIdx.x * bins_per_thread;
        const float units_per_bin = 1.0f / bins_per_unit;
        u64 lows[NUM_BINS / 512], highs[NUM_BINS / 512];
#pragma unroll
        for (u32 k = 0; k < NUM_BINS / 512; ++k) {
            lows[k] = highs[k] = 0;
            if (k < bins_per_thread) {
                const u32 bin = start + k, count = s.bins[bin];
                lows[k] = highs[k] = count;
                if (by_mass && count > 0) {
                    // A ten-thousandth wider than rounding can make them.
                    highs[k] = (u64)count * (to_fixed(row.weight(high - (float)bin * units_per_bin) * 1.0001f) + 1);
                    lows[k] = (u64)count * to_fixed(row.weight(high - (float)(bin + 1) * units_per_bin) * 0.9999f);
                }
                sum_low += lows[k];
                sum_high += highs[k];
            }
        }
        cta_running_sums(sum_low, sum_high);
        sum_low += above;
        sum_high += above;
#pragma unroll
        for (u32 k = 0; k < NUM_BINS / 512; ++k) {
            if (k < bins_per_thread) {
                // Exactly one thread sees each sum cross the target.
                if (sum_high < target && sum_high + highs[k] >= target) {
                    s.first_bin = start + k;
                    s.count_before = sum_high;
                }
                if (sum_low < target && sum_low + lows[k] >= target) s.last_bin = start + k;
                sum_low += lows[k];
                sum_high += highs[k];
            }
        }
        __syncthreads();
        const u32 first_bin = s.first_bin, last_bin = min(s.last_bin, (u32)NUM_BINS - 1);
        // All of the range is kept, and nothing below it counts.
        if (first_bin == NUM_BINS) return max(row.last, (u64)order_key(low) << 32);

        // What lies above the bracket is kept; what lies in it is gathered. Being below the number of a
        // bin means an earlier one, so nothing has to be converted.
        const float kept_below = (float)first_bin, gathered_below = (float)(last_bin + 1);
        for (u32 chunk = warp; chunk < row.num_chunks; chunk += num_warps) {
            float mass = 0.0f;
            if (s.chunk_max[chunk] >= low) {
                u32 min_key = ~0u, max_key = 0;
                for_each_vector(row, chunk, lane, [&](const float (&x)[VEC], u32 first_id) {
                    u32 gathered = 0;
#pragma unroll
                    for (int e = 0; e < VEC; ++e) {
                        const float bin = (high - x[e]) * bins_per_unit, weight = row.weight(x[e]);
                        const bool is_kept = bin < kept_below;
                        mass += is_kept ? weight : 0.0f;
                        gathered |= !is_kept && bin < gathered_below ? 1u << e : 0;
                    }
                    if (!__any_sync(ALL_LANES, gathered)) return;
                    const u32 count = __popc(gathered), running = warp_running_sum(count, lane);
                    u32 at = 0;
                    if (lane == WARP - 1) at = atomicAdd(&s.num_candidates, running);
                    at = __shfl_sync(ALL_LANES, at, WARP - 1) + running - count;
#pragma unroll 1
                    for (; gathered; gathered &= gathered - 1) {
                        const int mine = __ffs(gathered) - 1;
                        float logit = 0.0f;
#pragma unroll
                        for (int e = 0; e < VEC; ++e) logit = e == mine ? x[e] : logit;
                        const u64 key = key_of(logit, first_id + mine);
                        if (at < CANDIDATES_MAX) s.candidates[at] = key;
                        ++at;
                        min_key = min(min_key, (u32)(key >> 32));
                        max_key = max(max_key, (u32)(key >> 32));
                    }
                    __syncwarp();
                });
                min_key = warp_min(min_key);
                max_key = warp_max(max_key);
                if (lane == 0 && max_key > 0) {
                    atomicMin(&s.min_key, min_key);
                    atomicMax(&s.max_key, max_key);
                }
                __syncwarp();
            }
            mass = warp_sum(mass);
            if (lane == 0) s.chunk_mass[chunk] = to_fixed(mass);
        }
        sum_chunk_mass(row.num_chunks);
        above = by_mass ? s.mass : s.count_before;
        const u32 num = s.num_candidates;
        if (num <= CANDIDATES_MAX) {
            sort_candidates(num);
            const u32 per_thread = CANDIDATES_MAX / blockDim.x, from = threadIdx.x * per_thread;
            u64 running = 0, unused = 0;
            for (u32 k = 0; k < per_thread && from + k < num; ++k) {
                running += by_mass ? to_fixed(row.weight(logit_of(s.candidates[from + k]))) : 1;
            }
            cta_running_sums(running, unused);
            running += above;
            for (u32 k = 0; k < per_thread && from + k < num; ++k) {
                const u64 before = running;
                running += by_mass ? to_fixed(row.weight(logit_of(s.candidates[from + k]))) : 1;
                // Exactly one key reaches the target; the first one, should rounding be there before it.
                if (running >= target && (before < target || from + k == 0)) s.cut = from + k;
            }
            __syncthreads();
            const u32 cut = min(s.cut, num - 1);
            for (u32 at = threadIdx.x; at <= cut; at += blockDim.x) {
                const u64 key = s.candidates[at];
                atomicAdd(&s.chunk_mass[~(u32)key / CHUNK], to_fixed(row.weight(logit_of(key))));
            }
            const u64 last = s.candidates[cut];
            has_mass = true;
            __syncthreads();
            return last;
        }
        high = from_order_key(s.max_key);
        low = from_order_key(s.min_key);
        if (s.max_key == s.min_key) {
            u64 num_kept = target - above;
            if (by_mass) {
                const u64 weight = to_fixed(row.weight(high));
                num_kept = target <= above ? 1 : weight == 0 ? num : (target - above + weight - 1) / weight;
            }
            num_kept = num_kept < 1 ? 1 : num_kept > num ? num : num_kept;
            return key_of_tie(row, high, num_kept);
        }
        __syncthreads();
    }
    return max(row.last, (u64)order_key(low) << 32);
}

// Leaves the weights of what row.last and `min_weight` keep in s.chunk_mass, summed in s.mass.
__device__ __noinline__ void weigh_kept(const Row row, float min_weight) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    for (u32 chunk = warp; chunk < row.num_chunks; chunk += num_warps) {
        float mass = 0.0f;
        if (row.weight(s.chunk_max[chunk]) >= min_weight && s.chunk_max[chunk] >= s.bound) {
            for_each_vector(row, chunk, lane, [&](const float (&x)[VEC], u32) {
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    const float weight = row.weight(x[e]);
                    mass += weight >= min_weight ? weight : 0.0f;
                }
            });
        }
        mass = warp_sum(mass);
        if (lane == 0) s.chunk_mass[chunk] = to_fixed(mass);
    }
    sum_chunk_mass(row.num_chunks);
}

// A logit that the `num` likeliest ids are not below: with as many chunks, the num-th of their maxima.
__device__ __forceinline__ float bound_of_likeliest(const Row& row, u32 num) {
    if (num > row.num_chunks) return NEGATIVE_INFINITY;
    const u32 lane = threadIdx.x % WARP, num_warps = blockDim.x / WARP;
    for (u32 chunk = threadIdx.x / WARP; chunk < row.num_chunks; chunk += num_warps) {
        const float max = s.chunk_max[chunk];
        u32 rank = 0;
        for (u32 other = lane; other < row.num_chunks; other += WARP) {
            rank += s.chunk_max[other] > max || (s.chunk_max[other] == max && other < chunk);
        }
        if (warp_sum(rank) + 1 == num && lane == 0) s.bound = max;
    }
    __syncthreads();
    const float bound = s.bound;
    __syncthreads();
    return bound;
}

// Warp 0: the id at which the running sum of kept weights passes `random` of the whole.
__device__ __forceinline__ u32 pick(const Row& row, float min_weight, double random, u32 lane) {
    const u32 per_lane = (row.num_chunks + WARP - 1) / WARP;
    const u32 start = min(lane * per_lane, row.num_chunks), end = min(start + per_lane, row.num_chunks);
    u64 sum = 0;
    for (u32 chunk = start; chunk < end; ++chunk) sum += s.chunk_mass[chunk];
    const u64 running = warp_running_sum(sum, lane);
    // Rounding must not reach the end; the likeliest id weighs 1, so there is one.
    const u64 total = __shfl_sync(ALL_LANES, running, WARP - 1);
    const u64 drawn = (u64)(random * (double)total), target = drawn < total ? drawn : total - 1;
    const u32 winner = __ffs(__ballot_sync(ALL_LANES, target < running)) - 1;
    u64 left = target - (running - sum);
    u32 chunk = start;
    while (chunk + 1 < end && left >= s.chunk_mass[chunk]) left -= s.chunk_mass[chunk++];
    chunk = __shfl_sync(ALL_LANES, chunk, winner);
    left = __shfl_sync(ALL_LANES, left, winner);
    double rest = (double)left / (double)FIXED_ONE;
    // One more than an id; 0 for none. `last` is the last one that can be picked.
    u32 picked = 0, last = 0;
    for_each_vector(row, chunk, lane, [&](float (&x)[VEC], u32 first_id) {
        if (picked) return;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if (!(row.weight(x[e]) >= min_weight)) x[e] = NEGATIVE_INFINITY;
        }
        picked = walk_vector(x, first_id, lane, row.max, row.scale, rest, last);
    });
    return (picked ? picked : warp_max(last)) - 1;
}

// Chooses the tokens of rows with top-k, top-p or min-p.
extern "C" __global__ void __launch_bounds__(1024, 1)
    sampling_filter(u32* __restrict__ tokens, u32* __restrict__ status, const ChunkStats* __restrict__ stats,
                    const T* __restrict__ logits, const Adjustment* __restrict__ adjustments,
                    const SampleParams* __restrict__ params, u32 num_rows, u32 row_stride, u32 vocab_size) {
    grid_wait();
    grid_launch_dependents();
    const u32 row_index = blockIdx.x;
    const SampleParams& p = params[row_index];
    if (row_index >= num_rows || !is_filtered(p, vocab_size)) return;
    Row row;
    row.vocab_size = vocab_size;
    row.num_chunks = (vocab_size + CHUNK - 1) / CHUNK;
    row.logits = logits + (u64)row_index * row_stride;
    row.adjustments = adjustments;
    row.params = &p;
    row.scale = exponent_scale(p);
    row.last = 0;
    stats += (u64)row_index * row.num_chunks;

    if (threadIdx.x == 0) {
        s.min_key = s.max_key = 0;
        s.bound = NEGATIVE_INFINITY;
    }
    __syncthreads();
    u32 max_key = 0, raw_max_key = 0;
    for (u32 chunk = threadIdx.x; chunk < row.num_chunks; chunk += blockDim.x) {
        s.chunk_max[chunk] = stats[chunk].max;
        max_key = max(max_key, order_key(stats[chunk].max));
        raw_max_key = max(raw_max_key, order_key(stats[chunk].raw_max));
    }
    max_key = warp_max(max_key);
    raw_max_key = warp_max(raw_max_key);
    if (threadIdx.x % WARP == 0) {
        atomicMax(&s.max_key, max_key);
        atomicMax(&s.min_key, raw_max_key);
    }
    __syncthreads();
    row.max = from_order_key(s.max_key);
    if (!is_finite(row.max) || !is_finite(from_order_key(s.min_key))) {
        if (threadIdx.x == 0) {
            // A valid id, because the next step may look it up before the host has seen the status.
            tokens[row_index] = 0;
            status[row_index] = STATUS_NOT_FINITE;
        }
        return;
    }
    for (u32 chunk = threadIdx.x; chunk < row.num_chunks; chunk += blockDim.x) {
        s.chunk_mass[chunk] = to_fixed(stats[chunk].sum * row.weight(stats[chunk].max));
    }
    sum_chunk_mass(row.num_chunks);

    const float lowest = row.max - RANGE_MAX * LOG2_E / row.scale;
    const bool is_top_k = has_top_k(p, vocab_size), is_top_p = p.top_p < 1.0f;
    const u32 num_kept = is_top_k ? p.top_k : vocab_size;
    bool has_mass = false;
    // One loop for both, so that the search is compiled once.
    for (u32 filter = is_top_k ? 0 : 1; filter < (is_top_p ? 2 : 1); ++filter) {
        const bool by_mass = filter == 1;
        u64 target = num_kept;
        float low = lowest;
        if (by_mass) {
            const double mass = (double)p.top_p * (double)s.mass;
            target = mass < 1.0 ? 1 : (u64)mass;
            // Less likely ids than this, all together, weigh less than what may be left out.
            const float rare = (1.0f - p.top_p) * ((float)s.mass / FIXED_ONE) / (float)num_kept * 0.5f;
            const float range = fminf(RANGE_MAX, fmaxf(-logf(rare), 0.01f));
            low = fmaxf(low, row.max - range * LOG2_E / row.scale);
            if (row.last != 0) low = fmaxf(low, logit_of(row.last));
        } else {
            low = fmaxf(low, bound_of_likeliest(row, num_kept));
        }
        row.last = last_kept(row, by_mass, target, low, has_mass);
        if (is_top_p && !by_mass) {
            if (threadIdx.x == 0) s.bound = logit_of(row.last);
            __syncthreads();
            if (has_mass) sum_chunk_mass(row.num_chunks);
            else weigh_kept(row, 0.0f);
        }
    }
    // min-p drops weights that the searches had to count.
    if (p.min_p > 0.0f || !has_mass) {
        if (threadIdx.x == 0) s.bound = row.last ? logit_of(row.last) : NEGATIVE_INFINITY;
        __syncthreads();
        weigh_kept(row, p.min_p);
    }
    if (threadIdx.x < WARP) {
        const u32 token = pick(row, p.min_p, philox_uniform(p.seed, p.position), threadIdx.x);
        if (threadIdx.x == 0) {
            tokens[row_index] = token;
            status[row_index] = STATUS_OK;
        }
    }
}
