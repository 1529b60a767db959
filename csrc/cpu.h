// Which CPU variants this machine can run, by CPUID and by the features that the operating system has enabled.
//
// A feature counts only if the OS saves its registers (XCR0) and, for AMX, grants the tile permission (arch_prctl);
// detection requests that permission. The names are the rows of cmake/isas.cmake. Each variant needs all features of
// the ones before it: generic, avx2, avx512, avx512_bf16, amx.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kt {

// Results of CPUID, XGETBV and arch_prctl. Tests construct their own.
struct CpuState {
  bool x86_64 = false;
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;  // subleaf 0
  uint32_t leaf7_1_eax = 0;                              // subleaf 1
  uint64_t xcr0 = 0;                                     // 0 where the OS does not use XSAVE
  bool tiles_granted = false;
};

const CpuState& cpu_state();  // of this process, read once

// The variants that exist, in ascending order of preference.
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
