// token_ids[pairs[2 i]] = choices[pairs[2 i + 1]]: tokens that the step before has chosen
// shapes:  token_ids [num_tokens]; pairs [num, 2]; choices [rows of logits of the step before]
// dtypes:  32-bit integers
// grid:    one thread a pair
// limits:  no two pairs have the same first number
// cost:    a launch's latency

extern "C" __global__ void __launch_bounds__(256)
    feed_tokens(unsigned int* __restrict__ token_ids, const unsigned int* __restrict__ pairs,
                const unsigned int* __restrict__ choices, unsigned int num) {
    const unsigned int i = blockIdx.x * 256 + threadIdx.x;
    if (i < num) token_ids[pairs[2 * i]] = choices[pairs[2 * i + 1]];
}
