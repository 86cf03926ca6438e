// tables[r, j] = blocks[starts[r] + j] for j < starts[r + 1] - starts[r]
// shapes:  tables [num_rows, stride] row-major; starts [num_rows + 1]; blocks [starts[num_rows]]
// dtypes:  32-bit integers
// grid:    one warp a row, 8 a CTA
// limits:  no row has more than `stride` blocks; entries past a row's blocks are left as they are
// cost:    reads and writes 4 bytes a block; a launch's latency

extern "C" __global__ void __launch_bounds__(256)
    expand_block_tables(unsigned int* __restrict__ tables, const unsigned int* __restrict__ starts,
                        const unsigned int* __restrict__ blocks, unsigned int num_rows, unsigned int stride) {
    const unsigned int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= num_rows) return;
    const unsigned int start = starts[row], num_blocks = starts[row + 1] - start;
    for (unsigned int j = lane; j < num_blocks; j += 32) {
        tables[(unsigned long long)row * stride + j] = blocks[start + j];
    }
}
