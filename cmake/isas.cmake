# The one list of CPU variants: name, architecture, source file under csrc/kernels/, compiler flags; ascending preference.
#
# A new variant is one file and two rows: this one, and its features in csrc/cpu.cpp.
#
# -mavx512f implies -mavx2, which is named for the sake of hosts that have AVX2 and no AVX-512: an emulated variant gets
# those of its flags that the host runs.
set(avx512 -mavx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)

kt_isa(generic     any     isa_generic.cpp)
kt_isa(avx2        x86_64  isa_avx2.cpp        -mavx2 -mfma -mf16c)
kt_isa(avx_vnni    x86_64  isa_avx_vnni.cpp    -mavx2 -mfma -mf16c -mavxvnni)
kt_isa(avx512      x86_64  isa_avx512.cpp      ${avx512})
kt_isa(avx512_vnni x86_64  isa_avx512_vnni.cpp ${avx512} -mavx512vnni)
kt_isa(avx512_bf16 x86_64  isa_avx512_bf16.cpp ${avx512} -mavx512vnni -mavx512bf16)
kt_isa(amx         x86_64  isa_amx.cpp         ${avx512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8)
kt_isa(neon        aarch64 isa_neon.cpp        -march=armv8.2-a+fp16+dotprod)
kt_isa(neon_bf16   aarch64 isa_neon_bf16.cpp   -march=armv8.2-a+fp16+dotprod+bf16+i8mm)
