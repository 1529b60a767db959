// Which CPU variants this machine can run, by the features of the CPU that the operating system has enabled.
//
// x86-64: CPUID; a feature counts only if the OS saves its registers (XCR0) and, for AMX, grants the tile permission
// (arch_prctl), which detection requests. aarch64: the feature words that the kernel passes to every process (AT_HWCAP,
// AT_HWCAP2), which hold what both CPU and kernel support. The names are the rows of cmake/isas.cmake. A variant has an
// architecture and extends another variant, whose features it needs too: generic, avx2, avx512, avx512_vnni,
// avx512_bf16, amx is one chain, generic, neon, neon_bf16 the other, and avx_vnni extends avx2.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kt {

enum class Architecture : uint8_t { other, x86_64, aarch64 };

// What detection reads: CPUID, XGETBV and arch_prctl on x86-64, the auxiliary vector on aarch64. Tests construct their
// own.
struct CpuState {
  Architecture architecture = Architecture::other;
  uint64_t leaf1_ecx = 0;
  uint64_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;  // subleaf 0
  uint64_t leaf7_1_eax = 0;                              // subleaf 1
  uint64_t xcr0 = 0;                                     // 0 where the OS does not use XSAVE
  bool tiles_granted = false;
  uint64_t hwcap = 0, hwcap2 = 0;
};

const CpuState& cpu_state();  // of this process, read once

// The variants that exist, those of an architecture in ascending order of preference.
const std::vector<std::string>& variant_names();

// Comma-separated features that `variant` needs and the machine lacks ("avx512_bf16, amx_tile (OS)"); empty: it runs.
// "(OS)" marks features that the CPU has and the operating system has not enabled. An unknown name throws
// std::runtime_error.
std::string missing_features(const std::string& variant, const CpuState& cpu = cpu_state());

// The variant requested by the environment (KT_ISA, or KT_KERNEL_CPU_VARIANT with kt-kernel's six names mapped), empty
// if none is. An unknown name throws std::runtime_error with the names that exist.
std::string requested_variant();

// One line per feature, for KT_LOG=debug.
std::vector<std::string> feature_report(const CpuState& cpu = cpu_state());

// Brand string or architecture name.
std::string cpu_name();

// KT_LOG=debug or KT_KERNEL_DEBUG=1: report on stderr which variant is chosen and why.
bool debug_log();

}  // namespace kt
