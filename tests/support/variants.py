"""What tests know of the CPU variants besides what the core says of them."""

from __future__ import annotations

ROUNDING = ("avx512_bf16", "amx", "neon_bf16")  # variants that hold activations in bf16
# Variants whose float kernels are compiled from the source of another one's. Where they are emulated, which is slow,
# only tests of what differs run them: of int8 products, and of the choice of a variant.
FLOATS_OF_ANOTHER = ("avx_vnni", "avx512_vnni")
TESTS_OF_ALL = ("test_w8a8", "test_w8a8_few", "test_w8a8_codes", "test_variants")
