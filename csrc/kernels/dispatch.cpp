// Chooses the kernel table of a precision: once, by what the build holds, what the CPU and OS run and what the
// environment asks for.
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

#define KT_ISA_ROW(name) extern const KernelTables kernels_##name;
#include "isas.h"
#undef KT_ISA_ROW

namespace {

struct Row {
  const char* name;
  const KernelTables* tables;
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

const KernelTables* tables_of(const std::string& name) {
  for (const Row& row : kRows)
    if (name == row.name) return row.tables;
  return nullptr;
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = [] {
    static std::deque<std::string> missing;  // Variant points into it, so it must not move its strings
    std::vector<Variant> list;
    for (const std::string& name : variant_names()) {
      missing.push_back(missing_features(name));
      const KernelTables* tables = tables_of(name);
      const bool native = tables && !emulated(name) && missing.back().empty();
      list.push_back({name.c_str(), tables, native, emulated(name), missing.back().c_str()});
    }
    return list;
  }();
  return all;
}

const Variant& best(Precision precision) {
  const Variant* chosen = nullptr;
  for (const Variant& variant : variants())
    if (variant.native && variant.table(precision)) chosen = &variant;
  if (!chosen)
    throw std::runtime_error("this build has no CPU variant for " + cpu_name() + "; build it with `generic`");
  return *chosen;
}

std::string state_of(const Variant& variant) {
  const std::string missing = variant.missing;
  if (variant.native) return "native";
  if (variant.emulated) return "emulated" + (missing.empty() ? "" : "; " + cpu_name() + " lacks " + missing);
  if (variant.tables) return cpu_name() + " lacks " + missing;
  return "not in this build" + (missing.empty() ? "" : "; " + cpu_name() + " lacks " + missing);
}

void report(const Variant& chosen, const std::string& requested, Precision precision) {
  const std::string kind = precision == Precision::bf16 ? "" : std::string(" with ") + name_of(precision);
  static const bool once = [&] {
    for (const std::string& line : feature_report()) std::fprintf(stderr, "kt: cpu feature %s\n", line.c_str());
    for (const Variant& variant : variants())
      std::fprintf(stderr, "kt: cpu variant %s: %s%s%s\n", variant.name, state_of(variant).c_str(),
                   &variant != &chosen ? ""
                   : requested.empty() ? "; chosen, the best native one"
                                       : "; chosen, asked for",
                   &variant != &chosen ? "" : kind.c_str());
    return true;
  }();
  (void)once;
}

// A pointer, because gcc 13 takes a reference from a call with temporaries for a dangling one.
const Variant* find_variant(const std::string& name, const std::string& origin, Precision precision) {
  std::string usable;
  const Variant* match = nullptr;
  for (const Variant& variant : variants()) {
    if (!variant.native && !variant.emulated) continue;
    if (name == variant.name) match = &variant;
    if (variant.table(precision)) usable += (usable.empty() ? "" : ", ") + std::string(variant.name);
  }
  if (match && match->table(precision)) return match;
  if (match)
    throw std::runtime_error("CPU variant \"" + name + "\"" + origin + " has no kernels of precision " +
                             name_of(precision) + "; these have: " + usable +
                             "; or name none to have the best chosen (" + best(precision).name + ")");
  for (const Variant& variant : variants())
    if (name == variant.name)
      throw std::runtime_error("CPU variant \"" + name + "\"" + origin + " cannot run: " + state_of(variant) +
                               "; use one of " + usable + ", or none to have the best chosen (" + best(precision).name +
                               ")");
  throw std::runtime_error("no CPU variant is called \"" + name + "\"; use one of " + usable);
}

template <Precision precision>
const KernelTable& chosen_once() {
  static const KernelTable& chosen = choose_kernels(precision);
  return chosen;
}

}  // namespace

int variant_count() { return static_cast<int>(variants().size()); }

const Variant& variant(int index) { return variants().at(static_cast<size_t>(index)); }

const KernelTable& kernels(const char* name, Precision precision) {
  return *find_variant(name, "", precision)->table(precision);
}

const KernelTable& choose_kernels(Precision precision) {
  const std::string requested = requested_variant();
  const Variant* chosen = requested.empty()
                              ? &best(precision)
                              : find_variant(requested, " (asked for by KT_ISA or KT_KERNEL_CPU_VARIANT)", precision);
  if (debug_log()) report(*chosen, requested, precision);
  return *chosen->table(precision);
}

const KernelTable& kernels(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return chosen_once<Precision::f32>();
    case Precision::f64:
      return chosen_once<Precision::f64>();
    case Precision::bf16:
      break;
  }
  return chosen_once<Precision::bf16>();
}

}  // namespace kt
