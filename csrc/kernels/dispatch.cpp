// Chooses the kernel table: once, by what the build holds, what the CPU and OS run and what the environment asks for.
//
// isas.h is written by CMake from the one list in cmake/isas.cmake: a KT_ISA_ROW(name) per variant of this build, and a
// KT_ISA_EMULATED(name) per variant that was compiled against software intrinsics (KT_EMULATE=ON), so that any machine
// can test it. An emulated variant runs anywhere but is never chosen by itself: it is slower than `generic`.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpu.h"
#include "table.h"

namespace kt {

#define KT_ISA_ROW(name) extern const KernelTable kernels_##name;
#include "isas.h"
#undef KT_ISA_ROW

namespace {

struct Row {
  const char* name;
  const KernelTable* table;
};

constexpr Row kRows[] = {
#define KT_ISA_ROW(name) {#name, &kernels_##name},
#include "isas.h"
#undef KT_ISA_ROW
};

// The first entry keeps the list from being empty.
constexpr const char* kEmulated[] = {
    "",
#define KT_ISA_EMULATED(name) #name,
#include "isas.h"
#undef KT_ISA_EMULATED
};

bool emulated(const std::string& name) {
  return std::find(std::begin(kEmulated), std::end(kEmulated), name) != std::end(kEmulated);
}

const KernelTable* table_of(const std::string& name) {
  for (const Row& row : kRows)
    if (name == row.name) return row.table;
  return nullptr;
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = [] {
    static std::deque<std::string> missing;  // Variant points into it, so it must not move its strings
    std::vector<Variant> found;
    for (const std::string& name : variant_names()) {
      missing.push_back(missing_features(name));
      const KernelTable* table = table_of(name);
      const bool native = table && !emulated(name) && missing.back().empty();
      found.push_back({name.c_str(), table, native, emulated(name), missing.back().c_str()});
    }
    return found;
  }();
  return all;
}

const Variant& best() {
  const Variant* chosen = nullptr;
  for (const Variant& variant : variants())
    if (variant.native) chosen = &variant;
  if (!chosen)
    throw std::runtime_error("this build has no CPU variant for " + cpu_name() + "; build it with `generic`");
  return *chosen;
}

std::string state_of(const Variant& variant) {
  const std::string missing = variant.missing;
  if (variant.native) return "native";
  if (variant.emulated) return "emulated" + (missing.empty() ? "" : "; " + cpu_name() + " lacks " + missing);
  if (variant.table) return cpu_name() + " lacks " + missing;
  return "not in this build" + (missing.empty() ? "" : "; " + cpu_name() + " lacks " + missing);
}

void report(const Variant& chosen, const std::string& asked) {
  static const bool once = [&] {
    for (const std::string& line : feature_report()) std::fprintf(stderr, "kt: cpu feature %s\n", line.c_str());
    for (const Variant& variant : variants())
      std::fprintf(stderr, "kt: cpu variant %s: %s%s\n", variant.name, state_of(variant).c_str(),
                   &variant != &chosen ? ""
                   : asked.empty()     ? "; chosen, the best native one"
                                       : "; chosen, asked for");
    return true;
  }();
  (void)once;
}

// A pointer, because gcc 13 takes a reference from a call with temporaries for a dangling one.
const Variant* find(const std::string& name, const std::string& origin) {
  std::string usable;
  for (const Variant& variant : variants()) {
    if (variant.native || variant.emulated) {
      if (name == variant.name) return &variant;
      usable += (usable.empty() ? "" : ", ") + std::string(variant.name);
    }
  }
  for (const Variant& variant : variants())
    if (name == variant.name)
      throw std::runtime_error("CPU variant \"" + name + "\"" + origin + " cannot run: " + state_of(variant) +
                               "; use one of " + usable + ", or none to have the best chosen (" + best().name + ")");
  throw std::runtime_error("no CPU variant is called \"" + name + "\"; use one of " + usable);
}

}  // namespace

int variant_count() { return static_cast<int>(variants().size()); }

const Variant& variant(int index) { return variants().at(static_cast<size_t>(index)); }

const KernelTable& kernels(const char* name) { return *find(name, "")->table; }

const KernelTable& choose_kernels() {
  const std::string asked = requested_variant();
  const Variant* chosen = asked.empty() ? &best() : find(asked, " (asked for by KT_ISA or KT_KERNEL_CPU_VARIANT)");
  if (debug_log()) report(*chosen, asked);
  return *chosen->table;
}

const KernelTable& kernels() {
  static const KernelTable& chosen = choose_kernels();
  return chosen;
}

}  // namespace kt
