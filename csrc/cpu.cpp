// Reads the CPU's features and holds the two tables of variants: which one extends which, and which needs what.
//
// Everything here is compiled for the baseline, XGETBV included (inline assembly behind the OSXSAVE bit), so detection
// never executes an instruction that the CPU lacks. The tables are data: the features of a variant are the rows that
// carry its name or the name of a variant that it extends.
#include "cpu.h"

#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kt {
namespace {

// Bits of XCR0: the registers that the OS saves on a context switch.
constexpr uint64_t kYmm = 0x6;          // SSE and the upper halves of YMM
constexpr uint64_t kZmm = kYmm | 0xe0;  // opmask, upper halves of ZMM 0-15, ZMM 16-31
constexpr uint64_t kTiles = 0x60000;    // tile configuration, tile data

struct VariantRow {
  const char* name;
  Architecture architecture;
  const char* extends;
};

constexpr Architecture kX86 = Architecture::x86_64, kArm = Architecture::aarch64;

// Ascending preference within an architecture.
constexpr VariantRow kVariants[] = {
    {"generic", Architecture::other, ""},
    {"avx2", kX86, "generic"},
    {"avx_vnni", kX86, "avx2"},  // CPUs with AVX-512 may lack it
    {"avx512", kX86, "avx2"},
    {"avx512_vnni", kX86, "avx512"},
    {"avx512_bf16", kX86, "avx512_vnni"},
    {"amx", kX86, "avx512_bf16"},
    {"neon", kArm, "generic"},
    {"neon_bf16", kArm, "neon"},
};

struct Feature {
  const char* name;     // as in /proc/cpuinfo, where the OS lists it
  const char* variant;  // the lowest variant that needs it
  uint64_t CpuState::* word;
  int bit;
  uint64_t registers;  // XCR0 bits without which it faults
};

constexpr Feature kFeatures[] = {
    {"avx2", "avx2", &CpuState::leaf7_ebx, 5, kYmm},
    {"fma", "avx2", &CpuState::leaf1_ecx, 12, kYmm},
    {"f16c", "avx2", &CpuState::leaf1_ecx, 29, kYmm},
    {"avx_vnni", "avx_vnni", &CpuState::leaf7_1_eax, 4, kYmm},
    {"avx512f", "avx512", &CpuState::leaf7_ebx, 16, kZmm},
    {"avx512bw", "avx512", &CpuState::leaf7_ebx, 30, kZmm},
    {"avx512vl", "avx512", &CpuState::leaf7_ebx, 31, kZmm},
    {"avx512dq", "avx512", &CpuState::leaf7_ebx, 17, kZmm},
    {"avx512_vnni", "avx512_vnni", &CpuState::leaf7_ecx, 11, kZmm},
    {"avx512_bf16", "avx512_bf16", &CpuState::leaf7_1_eax, 5, kZmm},
    {"amx_tile", "amx", &CpuState::leaf7_edx, 24, kTiles},
    {"amx_bf16", "amx", &CpuState::leaf7_edx, 22, kTiles},
    {"amx_int8", "amx", &CpuState::leaf7_edx, 25, kTiles},
    {"asimd", "neon", &CpuState::hwcap, 1, 0},
    {"asimdhp", "neon", &CpuState::hwcap, 10, 0},
    {"asimddp", "neon", &CpuState::hwcap, 20, 0},
    {"bf16", "neon_bf16", &CpuState::hwcap2, 14, 0},
    {"i8mm", "neon_bf16", &CpuState::hwcap2, 13, 0},
};

struct Alias {
  const char* kt_kernel_name;
  const char* name;
};

// kt-kernel has six variants, all for x86-64; VBMI alone gives us nothing.
constexpr Alias kAliases[] = {
    {"amx", "amx"},
    {"avx512_bf16", "avx512_bf16"},
    {"avx512_vbmi", "avx512_vnni"},
    {"avx512_vnni", "avx512_vnni"},
    {"avx512_base", "avx512"},
    {"avx2", "avx2"},
};

enum class Presence { usable, disabled_by_os, absent };

Presence presence(const Feature& feature, const CpuState& cpu) {
  if (!(cpu.*feature.word >> feature.bit & 1)) return Presence::absent;
  const bool saved = (cpu.xcr0 & feature.registers) == feature.registers;
  const bool granted = feature.registers != kTiles || cpu.tiles_granted;
  return saved && granted ? Presence::usable : Presence::disabled_by_os;
}

const VariantRow* row_of(const std::string& variant) {
  for (const VariantRow& row : kVariants)
    if (variant == row.name) return &row;
  return nullptr;
}

// Whether `row` is `variant` or extends it.
bool includes(const VariantRow* row, const std::string& variant) {
  for (; row; row = row_of(row->extends))
    if (variant == row->name) return true;
  return false;
}

const char* name_of(Architecture architecture) { return architecture == kX86 ? "x86-64" : "aarch64"; }

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

[[noreturn]] void refuse(const std::string& origin, const std::string& value, const std::vector<std::string>& names) {
  throw std::runtime_error(origin + "=" + value + " names no CPU variant; expected one of " + joined(names) +
                           ", or leave " + origin + " unset to have the best one chosen");
}

#if defined(__x86_64__)
uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux 5.16 requires a process to request tile data; the permission holds for all its threads.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuState read_cpu() {
  constexpr uint32_t kOsXsave = 1u << 27, kAmxTile = 1u << 24;
  CpuState cpu;
  cpu.architecture = Architecture::x86_64;
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d)) cpu.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const uint32_t last_subleaf = a;
    cpu.leaf7_ebx = b;
    cpu.leaf7_ecx = c;
    cpu.leaf7_edx = d;
    if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu.leaf7_1_eax = a;
  }
  if (cpu.leaf1_ecx & kOsXsave) cpu.xcr0 = read_xcr0();
  if ((cpu.leaf7_edx & kAmxTile) && (cpu.xcr0 & kTiles) == kTiles) cpu.tiles_granted = request_tiles();
  return cpu;
}
#elif defined(__aarch64__)
CpuState read_cpu() {
  CpuState cpu;
  cpu.architecture = Architecture::aarch64;
  cpu.hwcap = getauxval(AT_HWCAP);
  cpu.hwcap2 = getauxval(AT_HWCAP2);
  return cpu;
}
#else
CpuState read_cpu() { return {}; }
#endif

}  // namespace

const CpuState& cpu_state() {
  static const CpuState state = read_cpu();
  return state;
}

const std::vector<std::string>& variant_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const VariantRow& row : kVariants) list.push_back(row.name);
    return list;
  }();
  return names;
}

std::string missing_features(const std::string& variant, const CpuState& cpu) {
  const VariantRow* row = row_of(variant);
  if (!row)
    throw std::runtime_error("no CPU variant is called \"" + variant + "\"; expected one of " +
                             joined(variant_names()));
  if (row->architecture == Architecture::other) return {};
  if (row->architecture != cpu.architecture) return name_of(row->architecture);
  std::vector<std::string> missing;
  for (const Feature& feature : kFeatures) {
    if (!includes(row, feature.variant)) continue;
    const Presence status = presence(feature, cpu);
    if (status == Presence::absent) missing.push_back(feature.name);
    if (status == Presence::disabled_by_os) missing.push_back(std::string(feature.name) + " (OS)");
  }
  return joined(missing);
}

std::string requested_variant() {
  const std::string name = environment("KT_ISA");
  if (!name.empty()) {
    if (!row_of(name)) refuse("KT_ISA", name, variant_names());
    return name;
  }
  const std::string kt_kernel_name = environment("KT_KERNEL_CPU_VARIANT");
  if (kt_kernel_name.empty()) return {};
  std::vector<std::string> known;
  for (const Alias& alias : kAliases) {
    if (kt_kernel_name == alias.kt_kernel_name) return alias.name;
    known.push_back(alias.kt_kernel_name);
  }
  refuse("KT_KERNEL_CPU_VARIANT", kt_kernel_name, known);
}

std::vector<std::string> feature_report(const CpuState& cpu) {
  std::vector<std::string> lines;
  for (const Feature& feature : kFeatures) {
    if (row_of(feature.variant)->architecture != cpu.architecture) continue;
    const Presence status = presence(feature, cpu);
    lines.push_back(std::string(feature.name) + ": " +
                    (status == Presence::usable           ? "yes"
                     : status == Presence::disabled_by_os ? "in the CPU, not enabled by the operating system"
                                                          : "no"));
  }
  if (lines.empty()) lines.push_back("x86-64 or aarch64: no");
  return lines;
}

std::string cpu_name() {
#if defined(__x86_64__)
  uint32_t words[12] = {};
  bool known = true;
  for (uint32_t i = 0; i < 3; ++i) {
    uint32_t* w = words + 4 * i;
    known = known && __get_cpuid(0x80000002u + i, w, w + 1, w + 2, w + 3);
  }
  char brand[sizeof words + 1] = {};
  std::memcpy(brand, words, sizeof words);
  const std::string name = brand;
  const size_t first = name.find_first_not_of(' '), last = name.find_last_not_of(' ');
  if (known && first != std::string::npos) return name.substr(first, last - first + 1);
#endif
  utsname machine{};
  return uname(&machine) == 0 ? machine.machine : "unknown CPU";
}

bool debug_log() { return environment("KT_LOG") == "debug" || environment("KT_KERNEL_DEBUG") == "1"; }

}  // namespace kt
