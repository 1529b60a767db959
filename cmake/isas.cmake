# The one list of CPU variants: name, source file under csrc/kernels/, compiler flags; ascending preference.
#
# A new variant is one file and two rows: this one, and its features in csrc/cpu.cpp.
set(avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)

kt_isa(generic     isa_generic.cpp)
kt_isa(avx2        isa_avx2.cpp        -mavx2 -mfma -mf16c)
kt_isa(avx512      isa_avx512.cpp      ${avx512})
kt_isa(avx512_bf16 isa_avx512_bf16.cpp ${avx512} -mavx512bf16 -mavx512vnni)
kt_isa(amx         isa_amx.cpp         ${avx512} -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8)
