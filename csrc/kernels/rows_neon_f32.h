// 5 to 12 rows of f32 activations by 8 outputs of bf16 weights, in assembly for aarch64: gcc 12 keeps some of so many
// accumulators in memory, which costs a fifth of the speed (docs/log.md).
//
// v0-v23 are the sums, two vectors a row; v24-v27 the weights of two k, widened by permutations with the zeros of v31;
// v28-v30 two k of a row in turn. Sums are added in the order of rows_by_columns, so their bits are the same.
#pragma once

#include "kernels/rows.h"

namespace kt {
namespace {

#ifdef KT_NEON

// Arguments as in rows_by_columns. The assembler leaves out rows beyond `rows`.
template <int rows>
inline void f32_rows_by_8(const char* a, int tile_rows, const char* b, int k_tiles, bool accumulate, Prefetch prefetch,
                          float* c) {
  static_assert(rows <= 12);
  int64_t tiles = k_tiles, steps, lines;
  const int64_t skip = (int64_t)(tile_rows - 1) * kTileK * 4;
  asm volatile(
      ".macro kt_load m, v, w, x, k\n"
      ".if %c[rows] > \\m\n"
      "ldr q\\v, [%[c], #(\\m * 128)]; ldr q\\w, [%[c], #(\\m * 128 + 16)]\n"
      ".endif\n.endm\n"
      ".macro kt_store m, v, w, x, k\n"
      ".if %c[rows] > \\m\n"
      "str q\\v, [%[c], #(\\m * 128)]; str q\\w, [%[c], #(\\m * 128 + 16)]\n"
      ".endif\n.endm\n"
      ".macro kt_zero m, v, w, x, k\n"
      "movi v\\v\\().4s, #0; movi v\\w\\().4s, #0\n"
      ".endm\n"
      ".macro kt_add m, v, w, x, k\n"
      ".if %c[rows] > \\m\n"
      "ldr d\\x, [%[a], #(\\m * 128 + \\k * 4)]\n"
      "fmla v\\v\\().4s, v24.4s, v\\x\\().s[0]; fmla v\\w\\().4s, v25.4s, v\\x\\().s[0]\n"
      "fmla v\\v\\().4s, v26.4s, v\\x\\().s[1]; fmla v\\w\\().4s, v27.4s, v\\x\\().s[1]\n"
      ".endif\n.endm\n"
      ".macro kt_rows do, k\n"
      "\\do 0, 0, 1, 28, \\k; \\do 1, 2, 3, 29, \\k; \\do 2, 4, 5, 30, \\k\n"
      "\\do 3, 6, 7, 28, \\k; \\do 4, 8, 9, 29, \\k; \\do 5, 10, 11, 30, \\k\n"
      "\\do 6, 12, 13, 28, \\k; \\do 7, 14, 15, 29, \\k; \\do 8, 16, 17, 30, \\k\n"
      "\\do 9, 18, 19, 28, \\k; \\do 10, 20, 21, 29, \\k; \\do 11, 22, 23, 30, \\k\n"
      ".endm\n"
      ".macro kt_two_k k\n"
      "ldr q26, [%[b], #(\\k * 32)]; ldr q27, [%[b], #(\\k * 32 + 16)]\n"
      "trn1 v24.8h, v31.8h, v26.8h; trn1 v25.8h, v31.8h, v27.8h\n"
      "trn2 v26.8h, v31.8h, v26.8h; trn2 v27.8h, v31.8h, v27.8h\n"
      "kt_rows kt_add, \\k\n"
      ".endm\n"
      "movi v31.4s, #0; cbz %w[accumulate], 1f\n"
      "kt_rows kt_load, 0\n"
      "b 2f\n"
      "1: kt_rows kt_zero, 0\n"
      "2: mov %[lines], %[line_count]; cbz %[lines], 4f\n"
      "3: prfm pldl2keep, [%[ahead]]; add %[ahead], %[ahead], #64; subs %[lines], %[lines], #1; b.ne 3b\n"
      "4: mov %[steps], #8\n"
      "5: kt_two_k 0\n"
      "kt_two_k 2\n"
      "add %[a], %[a], #16; add %[b], %[b], #128; subs %[steps], %[steps], #1; b.ne 5b\n"
      "add %[a], %[a], %[skip]; add %[b], %[b], #1024; subs %[tiles], %[tiles], #1; b.ne 2b\n"
      "kt_rows kt_store, 0\n"
      ".purgem kt_load; .purgem kt_store; .purgem kt_zero; .purgem kt_add; .purgem kt_rows; .purgem kt_two_k\n"
      : [a] "+r"(a), [b] "+r"(b), [tiles] "+r"(tiles), [ahead] "+r"(prefetch.at), [steps] "=&r"(steps),
        [lines] "=&r"(lines)
      : [c] "r"(c), [skip] "r"(skip), [line_count] "r"((int64_t)prefetch.lines), [accumulate] "r"(accumulate),
        [rows] "i"(rows)
      : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
        "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
        "v31");
}

#endif

}  // namespace
}  // namespace kt
