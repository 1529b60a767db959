// The table of weight formats: one row for each, in the order of `Codec`. format.h says what the columns mean.
//
// Included several times, each time with another KT_FORMAT(name, ...), and therefore without an include guard.
// `_core.formats()` exports the rows, from which Python builds the planner's, the GPU's and the checkpoint's tables.
// clang-format off

KT_FORMAT(bf16, .element = E::bf16)
// Plain bf16 as released, 12 bits and some patches in memory: `kt quant` writes it.
KT_FORMAT(bf16_12, .element = E::bf16_12, .plane = {8, 4}, .scales = S::high_bytes, .span = 128, .header = {{u8}},
          .written = true, .spelled = "bf16:12")
// Codes and scales are tensors of their own; `kt quant` writes all but those with zeros (GPTQ's and AWQ's). Codes and
// zeros of uint8 are stored less 128.
KT_FORMAT(int8, .element = E::int8, .plane = {8}, .scales = S::floats, .header = {{f32}}, .written = true)
KT_FORMAT(int4, .element = E::uint, .zero_point = 8, .plane = {4}, .scales = S::floats, .header = {{by_name}},
          .suffix = Suffix::group, .written = true)
KT_FORMAT(fp8, .element = E::e4m3, .plane = {8}, .scales = S::floats, .header = {{f32}}, .suffix = Suffix::block,
          .written = true)
KT_FORMAT(uint4, .element = E::uint, .plane = {4}, .scales = S::scale_and_zero, .header = {{by_name}, {u8}},
          .suffix = Suffix::group)
KT_FORMAT(uint8, .element = E::int8, .plane = {8}, .scales = S::scale_and_zero, .header = {{by_name}, {i8}},
          .suffix = Suffix::group)
KT_FORMAT(mxfp8, .element = E::e4m3, .plane = {8}, .scales = S::e8m0, .span = 32, .header = {{u8}}, .written = true)
KT_FORMAT(mxfp4, .element = E::e2m1, .plane = {4}, .scales = S::e8m0, .span = 32, .header = {{u8}}, .gguf_type = 39,
          .written = true)
KT_FORMAT(nvfp4, .element = E::e2m1, .plane = {4}, .scales = S::e4m3, .span = 32, .header = {{u8, 2}}, .written = true)
// Blocks of GGUF.
KT_FORMAT(q8_0, .element = E::int8, .plane = {8}, .scales = S::floats, .span = 32, .header = {{f16}},
          .gguf_type = 8, .block = 34, .written = true)
KT_FORMAT(q4_0, .element = E::uint, .zero_point = 8, .plane = {4}, .scales = S::floats, .span = 32, .header = {{f16}},
          .gguf_type = 2, .block = 18, .written = true)
KT_FORMAT(q4_1, .element = E::uint, .plane = {4}, .scales = S::scale_and_min, .span = 32,
          .header = {{f16}, {f16, 1, 2}}, .gguf_type = 3, .block = 20, .written = true)
KT_FORMAT(q5_0, .element = E::uint, .zero_point = 16, .plane = {4, 1}, .scales = S::floats, .span = 32,
          .header = {{f16}}, .gguf_type = 6, .block = 22, .written = true)
KT_FORMAT(q5_1, .element = E::uint, .plane = {4, 1}, .scales = S::scale_and_min, .span = 32,
          .header = {{f16}, {f16, 1, 2}}, .gguf_type = 7, .block = 24, .written = true)
KT_FORMAT(q2_k, .element = E::uint, .plane = {2}, .scales = S::q2_k, .span = 256,
          .header = {{u8, 16}, {f16, 1, 80}, {f16, 1, 82}}, .gguf_type = 10, .block = 84)
KT_FORMAT(q3_k, .element = E::uint, .zero_point = 4, .plane = {2, 1}, .scales = S::q3_k, .span = 256,
          .header = {{u8, 12, 96}, {f16, 1, 108}}, .gguf_type = 11, .block = 110)
KT_FORMAT(q4_k, .element = E::uint, .plane = {4}, .scales = S::q4_k, .span = 256,
          .header = {{f16}, {f16, 1, 2}, {u8, 12, 4}}, .gguf_type = 12, .block = 144)
KT_FORMAT(q5_k, .element = E::uint, .plane = {4, 1}, .scales = S::q4_k, .span = 256,
          .header = {{f16}, {f16, 1, 2}, {u8, 12, 4}}, .gguf_type = 13, .block = 176)
KT_FORMAT(q6_k, .element = E::uint, .zero_point = 32, .plane = {4, 2}, .scales = S::q6_k, .span = 256,
          .header = {{i8, 16, 192}, {f16, 1, 208}}, .gguf_type = 14, .block = 210)
KT_FORMAT(iq4_nl, .element = E::iq4, .plane = {4}, .scales = S::floats, .span = 32, .header = {{f16}},
          .gguf_type = 20, .block = 18)
KT_FORMAT(iq4_xs, .element = E::iq4, .plane = {4}, .scales = S::iq4_xs, .span = 256,
          .header = {{f16}, {u16, 1, 2}, {u8, 4, 4}}, .gguf_type = 23, .block = 136)
KT_FORMAT(tq2_0, .element = E::uint, .zero_point = 1, .plane = {2}, .scales = S::floats, .span = 256,
          .header = {{f16, 1, 64}}, .gguf_type = 35, .block = 66, .written = true)
// Blocks of GGUF whose codes are indices into a grid.
KT_FORMAT(tq1_0, .element = E::grid, .plane = {1}, .scales = S::grid, .span = 256,
          .header = {{u8, 16}, {u8, 4}, {f16, 1, 52}}, .gguf_type = 34, .block = 54, .written = true)
KT_FORMAT(iq1_s, .element = E::grid, .plane = {1}, .scales = S::grid, .span = 256,
          .header = {{f16}, {u16, 8, 34}}, .gguf_type = 19, .block = 50)
KT_FORMAT(iq1_m, .element = E::grid, .plane = {1}, .scales = S::grid, .span = 256,
          .header = {{u8, 16, 32}, {u16, 4, 48}}, .gguf_type = 29, .block = 56)
KT_FORMAT(iq2_xxs, .element = E::grid, .plane = {2}, .scales = S::grid, .span = 256,
          .header = {{f16}}, .gguf_type = 16, .block = 66)
KT_FORMAT(iq2_xs, .element = E::grid, .plane = {2}, .scales = S::grid, .span = 256,
          .header = {{f16}, {u8, 8, 66}}, .gguf_type = 17, .block = 74)
KT_FORMAT(iq2_s, .element = E::grid, .plane = {2}, .scales = S::grid, .span = 256,
          .header = {{f16}, {u8, 8, 66}, {u8, 8, 74}}, .gguf_type = 22, .block = 82)
KT_FORMAT(iq3_xxs, .element = E::grid, .plane = {3}, .scales = S::grid, .span = 256,
          .header = {{f16}}, .gguf_type = 18, .block = 98)
KT_FORMAT(iq3_s, .element = E::grid, .plane = {3}, .scales = S::grid, .span = 256,
          .header = {{f16}, {u8, 8, 66}, {u8, 4, 106}}, .gguf_type = 21, .block = 110)
#ifdef KT_TESTS  // the worked example of CONTRIBUTING.md
KT_FORMAT(mxint4, .element = E::uint, .zero_point = 8, .plane = {4}, .scales = S::e8m0, .span = 32, .header = {{u8}},
          .written = true)
#endif
#undef KT_FORMAT
