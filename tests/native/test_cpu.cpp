// CPU variants: feature levels on synthetic CPUs, requests by the environment, and the choice of a table.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iterator>
#include <string>

#include "check.h"
#include "cpu.h"
#include "kernels/table.h"

using namespace kt;
using check::contains;
using check::thrown;

namespace {

constexpr const char* kAsks[] = {"KT_ISA", "KT_KERNEL_CPU_VARIANT", "KT_LOG", "KT_KERNEL_DEBUG"};

// Sets variables for a test and restores them.
class Environment {
 public:
  Environment() {
    for (const char* name : kAsks) {
      const char* value = std::getenv(name);
      before_.push_back(value ? value : "");
      unsetenv(name);
    }
  }
  ~Environment() {
    for (size_t i = 0; i < before_.size(); ++i) set(kAsks[i], before_[i]);
  }
  static void set(const char* name, const std::string& value) {
    value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
  }

 private:
  std::vector<std::string> before_;
};

constexpr uint64_t kYmm = 0x7, kZmm = 0xe7, kTiles = 0x600e7;

// Sapphire Rapids under a Linux that granted everything.
CpuState sapphire_rapids() {
  CpuState cpu;
  cpu.architecture = Architecture::x86_64;
  cpu.leaf1_ecx = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
  cpu.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  cpu.leaf7_ecx = 1u << 11;
  cpu.leaf7_edx = 1u << 22 | 1u << 24 | 1u << 25;
  cpu.leaf7_1_eax = 1u << 4 | 1u << 5;
  cpu.xcr0 = kTiles;
  cpu.tiles_granted = true;
  return cpu;
}

// Neoverse-V1: NEON with dot products, bf16 and i8mm.
CpuState neoverse_v1() {
  CpuState cpu;
  cpu.architecture = Architecture::aarch64;
  cpu.hwcap = 1u << 1 | 1u << 10 | 1u << 20;
  cpu.hwcap2 = 1u << 13 | 1u << 14;
  return cpu;
}

const char* const kX86Names[] = {"avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
const char* const kArmNames[] = {"neon", "neon_bf16"};

const Variant* variant_called(const std::string& name) {
  for (int i = 0; i < variant_count(); ++i)
    if (name == variant(i).name) return &variant(i);
  return nullptr;
}

}  // namespace

TEST(cpu_full_machine_lacks_nothing) {
  for (const char* name : kX86Names) CHECK_EQ(missing_features(name, sapphire_rapids()), "");
  for (const char* name : kArmNames) CHECK_EQ(missing_features(name, neoverse_v1()), "");
  CHECK_EQ(variant_names().size(), 1 + std::size(kX86Names) + std::size(kArmNames));
}

TEST(cpu_names_what_is_missing) {
  CpuState cpu = sapphire_rapids();
  cpu.leaf7_1_eax = 0;  // Skylake-X with tiles, which does not exist
  CHECK_EQ(missing_features("avx512", cpu), "");
  CHECK_EQ(missing_features("avx512_bf16", cpu), "avx512_bf16");
  CHECK_EQ(missing_features("amx", cpu), "avx512_bf16");
  cpu = sapphire_rapids();
  cpu.leaf7_ecx = 0;
  CHECK_EQ(missing_features("avx512", cpu), "");
  CHECK_EQ(missing_features("avx512_vnni", cpu), "avx512_vnni");
  CHECK_EQ(missing_features("avx512_bf16", cpu), "avx512_vnni");

  cpu = sapphire_rapids();
  cpu.leaf7_ebx &= ~(1u << 31);
  CHECK_EQ(missing_features("avx2", cpu), "");
  CHECK_EQ(missing_features("avx512", cpu), "avx512vl");

  cpu.leaf1_ecx &= ~(1u << 29);
  CHECK_EQ(missing_features("avx2", cpu), "f16c");
  CHECK_EQ(missing_features("generic", cpu), "");

  cpu = sapphire_rapids();  // Alder Lake: no AVX-512, neither in the CPU nor saved by the OS
  cpu.leaf7_ebx = 1u << 5, cpu.leaf7_ecx = cpu.leaf7_edx = 0, cpu.leaf7_1_eax = 1u << 4, cpu.xcr0 = kYmm;
  CHECK_EQ(missing_features("avx_vnni", cpu), "");
  CHECK(contains(missing_features("avx512", cpu), "avx512f"));
  cpu.leaf7_1_eax = 0;  // Rocket Lake without AVX-512, or Zen 3
  CHECK_EQ(missing_features("avx_vnni", cpu), "avx_vnni");
  CHECK_EQ(missing_features("avx2", cpu), "");

  cpu = neoverse_v1();
  cpu.hwcap2 = 0;  // Neoverse-N1
  CHECK_EQ(missing_features("neon", cpu), "");
  CHECK_EQ(missing_features("neon_bf16", cpu), "bf16, i8mm");
  cpu.hwcap &= ~(1u << 20);  // Cortex-A72
  CHECK_EQ(missing_features("neon", cpu), "asimddp");
  CHECK_EQ(missing_features("generic", cpu), "");
}

TEST(cpu_registers_must_be_saved_by_the_os) {
  CpuState cpu = sapphire_rapids();
  cpu.xcr0 = kZmm;
  CHECK_EQ(missing_features("avx512_bf16", cpu), "");
  CHECK_EQ(missing_features("amx", cpu), "amx_tile (OS), amx_bf16 (OS), amx_int8 (OS)");
  cpu.xcr0 = kYmm;
  CHECK_EQ(missing_features("avx2", cpu), "");
  CHECK(contains(missing_features("avx512", cpu), "avx512f (OS)"));
  cpu.xcr0 = 0;
  CHECK_EQ(missing_features("avx2", cpu), "avx2 (OS), fma (OS), f16c (OS)");

  cpu = sapphire_rapids();
  cpu.tiles_granted = false;
  CHECK(contains(missing_features("amx", cpu), "amx_tile (OS)"));
  CHECK_EQ(missing_features("avx512_bf16", cpu), "");
}

TEST(cpu_variants_of_other_architectures_are_missing_the_architecture) {
  for (const CpuState& cpu : {sapphire_rapids(), neoverse_v1(), CpuState{}}) {
    CHECK_EQ(missing_features("generic", cpu), "");
    if (cpu.architecture != Architecture::x86_64)
      for (const char* name : kX86Names) CHECK_EQ(missing_features(name, cpu), "x86-64");
    if (cpu.architecture != Architecture::aarch64)
      for (const char* name : kArmNames) CHECK_EQ(missing_features(name, cpu), "aarch64");
  }
  CHECK_EQ(feature_report(CpuState{}).size(), 1u);
  CHECK_EQ(feature_report(sapphire_rapids()).size(), 13u);
  CHECK_EQ(feature_report(neoverse_v1()).size(), 5u);
}

TEST(cpu_of_this_machine) {
#if defined(__x86_64__)
  CHECK(cpu_state().architecture == Architecture::x86_64);
#elif defined(__aarch64__)
  CHECK(cpu_state().architecture == Architecture::aarch64);
  CHECK(!contains(missing_features("neon"), "asimd,"));  // part of the architecture
#else
  CHECK(cpu_state().architecture == Architecture::other);
#endif
  CHECK_EQ(missing_features("generic"), "");
  CHECK(!cpu_name().empty());
  CHECK(contains(thrown([] { missing_features("avx1024"); }), "expected one of generic, avx2"));
}

TEST(cpu_environment_asks_for_a_variant) {
  const Environment environment;
  CHECK_EQ(requested_variant(), "");
  setenv("KT_ISA", "avx512", 1);
  CHECK_EQ(requested_variant(), "avx512");
  setenv("KT_KERNEL_CPU_VARIANT", "amx", 1);
  CHECK_EQ(requested_variant(), "avx512");  // KT_ISA wins
  setenv("KT_ISA", "", 1);
  CHECK_EQ(requested_variant(), "amx");
  const char* const mapped[][2] = {{"amx", "amx"},
                                   {"avx512_bf16", "avx512_bf16"},
                                   {"avx512_vbmi", "avx512_vnni"},
                                   {"avx512_vnni", "avx512_vnni"},
                                   {"avx512_base", "avx512"},
                                   {"avx2", "avx2"}};
  for (const auto& [given, expected] : mapped) {
    setenv("KT_KERNEL_CPU_VARIANT", given, 1);
    CHECK_EQ(requested_variant(), expected);
  }
}

TEST(cpu_unknown_names_are_refused) {
  const Environment environment;
  setenv("KT_KERNEL_CPU_VARIANT", "avx512_base2", 1);
  const std::string alias_error = thrown([] { requested_variant(); });
  CHECK(contains(alias_error, "KT_KERNEL_CPU_VARIANT=avx512_base2"));
  CHECK(contains(alias_error, "avx512_vnni"));
  setenv("KT_ISA", "AVX2", 1);
  const std::string isa_error = thrown([] { requested_variant(); });
  CHECK(contains(isa_error, "KT_ISA=AVX2"));
  CHECK(contains(isa_error, "generic, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx, neon, neon_bf16"));
  CHECK(contains(thrown([] { choose_kernels(); }), "KT_ISA=AVX2"));
}

TEST(dispatch_lists_every_variant_in_order) {
  CHECK_EQ(variant_count(), static_cast<int>(variant_names().size()));
  for (int i = 0; i < variant_count(); ++i) {
    const Variant& v = variant(i);
    CHECK_EQ(std::string(v.name), variant_names()[static_cast<size_t>(i)]);
    CHECK_EQ(std::string(v.missing), missing_features(v.name));
    CHECK(!(v.native && v.emulated));
    if (v.native) CHECK_EQ(std::string(v.missing), "");
    for (int p = 0; (v.native || v.emulated) && p < kPrecisions; ++p)
      if (const KernelTable* table = v.table(static_cast<Precision>(p))) {
        CHECK_EQ(std::string(table->name), v.name);
        CHECK(table->precision == static_cast<Precision>(p));
      }
    if (v.native || v.emulated) CHECK(v.table(Precision::bf16) != nullptr);
  }
  CHECK(variant_called("generic")->native);
}

TEST(dispatch_takes_the_best_native_variant_by_itself) {
  const Environment environment;
  std::string best;
  for (int i = 0; i < variant_count(); ++i)
    if (variant(i).native) best = variant(i).name;
  CHECK_EQ(std::string(choose_kernels().name), best);
}

TEST(dispatch_obeys_kt_isa_or_says_what_is_missing) {
  const Environment environment;
  for (int i = 0; i < variant_count(); ++i) {
    const Variant& v = variant(i);
    setenv("KT_ISA", v.name, 1);
    if (v.native || v.emulated) {
      CHECK_EQ(std::string(choose_kernels().name), v.name);
      CHECK_EQ(&kernels(v.name), v.table(Precision::bf16));
      continue;
    }
    const std::string error = thrown([] { choose_kernels(); });
    CHECK(contains(error, v.name));
    CHECK(contains(error, "KT_ISA"));
    CHECK(contains(error, v.missing));
    CHECK(contains(error, "use one of generic"));
    CHECK(contains(thrown([&] { kernels(v.name); }), "cannot run"));
  }
  CHECK(contains(thrown([] { kernels("sse9"); }), "no CPU variant is called \"sse9\""));
}

TEST(dispatch_knows_which_variants_are_exact) {
  const Environment environment;
  CHECK_EQ(&kernels("generic", Precision::f64), variant_called("generic")->table(Precision::f64));
  for (Precision precision : {Precision::f32, Precision::f64}) {
    std::string best, have;
    for (int i = 0; i < variant_count(); ++i) {
      const Variant& v = variant(i);
      if (!v.native && !v.emulated) continue;
      if (v.table(precision)) have += (have.empty() ? "" : ", ") + std::string(v.name);
      if (v.table(precision) && v.native) best = v.name;
    }
    CHECK_EQ(std::string(choose_kernels(precision).name), best);
    CHECK(choose_kernels(precision).precision == precision);
    for (int i = 0; i < variant_count(); ++i) {
      const Variant& v = variant(i);
      if (v.table(precision) || (!v.native && !v.emulated)) continue;
      const std::string error = thrown([&] { kernels(v.name, precision); });
      CHECK(contains(error, std::string("has no kernels of precision ") + name_of(precision)));
      CHECK(contains(error, "these have: " + have));
    }
  }
}

TEST(dispatch_debug_log_says_why) {
  int ends[2];
  if (pipe(ends) != 0) return;
  const pid_t child = fork();  // the report is printed once a process, so a process of its own
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    for (const char* name : kAsks) unsetenv(name);
    setenv("KT_LOG", "debug", 1);
    choose_kernels();
    choose_kernels();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) text.append(part, static_cast<size_t>(n));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  for (const std::string& name : variant_names()) {
    const std::string line = "kt: cpu variant " + name + ": ";
    CHECK(contains(text, line));
    CHECK_EQ(text.find(line), text.rfind(line));
  }
  CHECK(contains(text, "chosen, the best native one"));
}
