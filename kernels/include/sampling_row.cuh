// A row of logits as the sampling kernels see it: chunks of 1024 ids, one warp a chunk.
#pragma once
#include "philox.cuh"
#include "reduce.cuh"
#include "vector.cuh"

// Ids that a warp holds at once, and of each lane.
#define CHUNK 1024
#define LANE_IDS 32
// Chunks of a row, at most: the vocabulary is not larger than 524,288 ids.
#define CHUNKS_MAX 512

#define LOG2_E 1.4426950408889634f
// Below it the likeliest id is taken.
#define GREEDY_BELOW 1e-5f

#define FLAG_LOGPROBS 1u
#define FLAG_SCORE 2u
#define USE_MASKED 0x80000000u
#define USE_PENALIZED 0x40000000u

// What to do with a row.
struct SampleParams {
    u64 seed;
    // Output position, from 0.
    u32 position;
    u32 flags;
    float temperature;
    float top_p;
    float min_p;
    // 0 keeps all.
    u32 top_k;
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;
    // Likeliest ids to report, with FLAG_LOGPROBS.
    u32 num_logprobs;
    // The token to score, with FLAG_SCORE.
    u32 score_token;
    // The row's adjustments: ascending ids; those of one id apply in their order.
    u32 adjustments_start;
    u32 num_adjustments;
    u32 reserved;
};
static_assert(sizeof(SampleParams) == 64, "as on the host");

// What changes an id's logit before the choice.
struct Adjustment {
    u32 id;
    // USE_MASKED; USE_PENALIZED for ids of the prompt or output; times in the output.
    u32 use;
    float bias;
};
static_assert(sizeof(Adjustment) == 12, "as on the host");

// What the scan leaves of a chunk. Sums of weights are relative to the maximum beside them.
struct ChunkStats {
    float max;
    float sum;
    float raw_max;
    float raw_sum;
};
static_assert(sizeof(ChunkStats) == 16, "as on the host");

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7f800000u); }

__device__ __forceinline__ bool is_greedy(const SampleParams& params) { return params.temperature < GREEDY_BELOW; }

__device__ __forceinline__ bool has_top_k(const SampleParams& params, u32 vocab_size) {
    return params.top_k > 0 && params.top_k < vocab_size;
}

// Whether sampling_filter makes the choice.
__device__ __forceinline__ bool is_filtered(const SampleParams& params, u32 vocab_size) {
    const bool has_filter = has_top_k(params, vocab_size) || params.top_p < 1.0f || params.min_p > 0.0f;
    return has_filter && !is_greedy(params) && !(params.flags & FLAG_SCORE);
}

// log2 of e over the temperature: weights are 2^((logit - max) * it).
__device__ __forceinline__ float exponent_scale(const SampleParams& params) {
    return 1.0f / params.temperature * LOG2_E;
}

// The larger, or NaN when either is: a broken row must show.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b);
#endif
}

// Id of a lane's value `i`: groups of 8 neighbours, a warp's 256 after one another.
__device__ __forceinline__ u32 id_of(u32 chunk, u32 lane, int i) {
    return chunk * CHUNK + (i / VEC) * (WARP * VEC) + lane * VEC + i % VEC;
}

// Ids past the vocabulary become -inf, whatever lies there.
__device__ __forceinline__ void load_chunk(float (&v)[LANE_IDS], const T* logits, u32 chunk, u32 lane,
                                           u32 vocab_size) {
    uint4 vectors[LANE_IDS / VEC];
#pragma unroll
    for (int j = 0; j < LANE_IDS / VEC; ++j) {
        const u32 id = id_of(chunk, lane, j * VEC);
        vectors[j] = id < vocab_size ? load_vector_once(logits + id) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < LANE_IDS / VEC; ++j) unpack_vector(v + j * VEC, vectors[j]);
    if ((chunk + 1) * CHUNK > vocab_size) {
#pragma unroll
        for (int i = 0; i < LANE_IDS; ++i) {
            if (id_of(chunk, lane, i) >= vocab_size) v[i] = NEGATIVE_INFINITY;
        }
    }
}

// The first of the row's adjustments whose id is not below `id`; the warp searches together.
__device__ __forceinline__ u32 first_adjustment(const Adjustment* adjustments, u32 num, u32 id, u32 lane) {
    u32 low = 0, high = num;
    while (low < high) {
        const u32 stride = (high - low + WARP - 1) / WARP;
        const u32 at = low + lane * stride;
        const u32 num_below = __popc(__ballot_sync(ALL_LANES, at < high && adjustments[at].id < id));
        if (num_below == 0) break;
        high = min(high, low + num_below * stride);
        low += (num_below - 1) * stride + 1;
    }
    return low;
}

// Penalties, then bias, then the mask. Keskar et al., CTRL, 2019, section 4.1; OpenAI API
// reference, presence_penalty and frequency_penalty.
__device__ __forceinline__ float adjusted(float logit, const Adjustment& adjustment, const SampleParams& params) {
    if (adjustment.use & USE_PENALIZED) {
        const u32 num_output = adjustment.use & (USE_PENALIZED - 1);
        logit = logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        if (num_output > 0) {
            // Not contracted, so that the bits are the CPU's.
            logit -= __fadd_rn(__fmul_rn(params.frequency_penalty, (float)num_output), params.presence_penalty);
        }
    }
    logit += adjustment.bias;
    return adjustment.use & USE_MASKED ? NEGATIVE_INFINITY : logit;
}

// Applies the row's adjustments to a chunk. Rows without any pay one comparison.
__device__ __forceinline__ void adjust_chunk(float (&v)[LANE_IDS], const Adjustment* adjustments,
                                             const SampleParams& params, u32 chunk, u32 lane) {
    const u32 num = params.num_adjustments;
    if (num == 0) return;
    adjustments += params.adjustments_start;
    for (u32 at = first_adjustment(adjustments, num, chunk * CHUNK, lane); at < num; ++at) {
        const Adjustment adjustment = adjustments[at];
        const u32 within = adjustment.id - chunk * CHUNK;
        if (within >= CHUNK) break;
        if (within / VEC % WARP != lane) continue;
        // Registers have no run-time index: the value is picked out, changed once and put back.
        const int mine = within / (WARP * VEC) * VEC + within % VEC;
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_IDS; ++i) logit = i == mine ? v[i] : logit;
        logit = adjusted(logit, adjustment, params);
#pragma unroll
        for (int i = 0; i < LANE_IDS; ++i) v[i] = i == mine ? logit : v[i];
    }
    __syncwarp();
}

// The largest value of a chunk, in every lane; NaN when there is one.
__device__ __forceinline__ float chunk_max(const float (&v)[LANE_IDS]) {
    float max = v[0];
#pragma unroll
    for (int i = 1; i < LANE_IDS; ++i) max = max_or_nan(max, v[i]);
    return from_order_key(warp_max(order_key(max)));
}

// The sum of 2^((v - max) * scale), in every lane.
__device__ __forceinline__ float chunk_sum(const float (&v)[LANE_IDS], float max, float scale) {
    // A chunk of nothing but -inf weighs nothing.
    const float base = max == NEGATIVE_INFINITY ? 0.0f : max;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_IDS; ++i) sum += exp2_approx((v[i] - base) * scale);
    return warp_sum(sum);
}

// One more than the id at which the running sum of weights, in order of ids over the lanes' vectors,
// passes `left`; 0 when it does not, and then the sum is taken off. -inf weighs nothing. `last` becomes
// one more than this lane's last id with a weight.
__device__ __forceinline__ u32 walk_vector(const float (&x)[VEC], u32 first_id, u32 lane, float max, float scale,
                                           double& left, u32& last) {
    float weights[VEC];
    double sum = 0.0;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        weights[e] = exp2_approx((x[e] - max) * scale);
        sum += (double)weights[e];
        if (weights[e] > 0.0f) last = first_id + e + 1;
    }
    const double running = warp_running_sum(sum, lane);
    double before = __shfl_up_sync(ALL_LANES, running, 1);
    if (lane == 0) before = 0.0;
    const u32 passed = __ballot_sync(ALL_LANES, left < running);
    if (!passed) {
        left -= __shfl_sync(ALL_LANES, running, WARP - 1);
        return 0;
    }
    u32 picked = 0;
    double mine = left - before;
    bool is_found = false;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        if (!is_found && weights[e] > 0.0f) picked = first_id + e + 1;
        mine -= (double)weights[e];
        is_found |= mine < 0.0;
    }
    return __shfl_sync(ALL_LANES, picked, __ffs(passed) - 1);
}

// The id of a chunk that walk_vector finds; the last id with a weight when rounding keeps the sum short.
__device__ __forceinline__ u32 walk_chunk(const float (&v)[LANE_IDS], u32 chunk, u32 lane, float max, float scale,
                                          double left) {
    u32 picked = 0, last = 0;
#pragma unroll
    for (int j = 0; j < LANE_IDS / VEC; ++j) {
        float x[VEC];
#pragma unroll
        for (int e = 0; e < VEC; ++e) x[e] = v[j * VEC + e];
        if (!picked) picked = walk_vector(x, id_of(chunk, lane, j * VEC), lane, max, scale, left, last);
    }
    return (picked ? picked : warp_max(last)) - 1;
}
