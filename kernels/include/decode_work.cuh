// The work list of decode attention: written by plan.cu, read by attention_decode.cu.
#pragma once
#include "types.cuh"

// In place of the count when a list had no room for all chunks; nothing is listed then.
#define PLAN_OVERFLOW 0xffffffffu

// One entry of the work list; an item is an entry and a kv head. Chunks are cut at multiples of `chunk` in
// absolute positions, so an answer depends on its row alone.
struct __align__(16) Work {
    u32 row;
    u32 begin;         // first visible token of the chunk
    u32 end;           // one past its last
    u32 chunk_index;   // its place among the row's chunks
    u32 num_chunks;    // 1: no partials
    u32 partial_base;  // the row's first place in partial_out, in entries
    u32 kv_head;       // in the list unused; filled in by the CTA
    u32 valid;         // likewise
};
static_assert(sizeof(Work) == 32, "Work is eight words in host code too");
