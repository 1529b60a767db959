// Reads sysfs, procfs and the cgroup into a Topology, and decides from it which cpus get a thread.
//
// Siblings are taken from the list of cpus that share a core, not from core_id, which some guests report as -1 or
// repeat from package to package. The affinity is that of the main thread, not of the caller, which may be a worker
// pinned to one cpu.
#include "topology.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace kt {
namespace {

// The content of a small file, empty if it does not exist.
std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

// First number in a file.
bool read_number(const std::string& path, long& value) {
  std::istringstream text(text_of(path));
  return static_cast<bool>(text >> value);
}

// "0-3,8,10-11" as numbers; stops at the first parse error.
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream in(text);
  for (int first; in >> first;) {
    int last = first;
    if (in.peek() == '-') in.ignore() >> last;
    for (int n = first; in && n <= last; ++n) numbers.push_back(n);
    if (in.peek() == ',') in.ignore();
  }
  return numbers;
}

std::vector<int> allowed_by_kernel() {
  for (int limit = 1024; limit <= 1 << 20; limit *= 2) {
    cpu_set_t* set = CPU_ALLOC(limit);
    const size_t bytes = CPU_ALLOC_SIZE(limit);
    CPU_ZERO_S(bytes, set);
    std::vector<int> cpus;
    if (sched_getaffinity(getpid(), bytes, set) == 0)
      for (int cpu = 0; cpu < limit; ++cpu)
        if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (!cpus.empty()) return cpus;
  }
  std::vector<int> cpus(std::max(1u, std::thread::hardware_concurrency()));
  for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  return cpus;
}

// The node of every cpu listed in sysfs.
std::map<int, int> read_nodes(const std::string& root) {
  std::map<int, int> node_of;
  const std::string folder = root + "sys/devices/system/node";
  DIR* entries = opendir(folder.c_str());
  if (!entries) return node_of;
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name.size() < 5 || name.size() > 10 || name.compare(0, 4, "node") != 0) continue;
    if (name.find_first_not_of("0123456789", 4) != std::string::npos) continue;
    const int node = std::stoi(name.substr(4));
    for (int cpu : parse_list(text_of(folder + "/" + name + "/cpulist"))) node_of[cpu] = node;
  }
  closedir(entries);
  return node_of;
}

// The lowest cpu that shares a core with `cpu`, -1 where sysfs does not say.
int read_core(const std::string& cpu_folder, int cpu) {
  for (const char* list : {"/topology/core_cpus_list", "/topology/thread_siblings_list"}) {
    const std::vector<int> siblings = parse_list(text_of(cpu_folder + list));
    if (std::find(siblings.begin(), siblings.end(), cpu) != siblings.end())
      return *std::min_element(siblings.begin(), siblings.end());
  }
  return -1;
}

// "48K", "2048K", "32M" in bytes.
size_t parse_size(const std::string& text) {
  std::istringstream in(text);
  size_t value = 0;
  char unit = 0;
  if (!(in >> value)) return 0;
  in >> unit;
  return value << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

void read_caches(const std::string& cpu_folder, Topology& t) {
  for (int index = 0; index < 16; ++index) {
    const std::string cache = cpu_folder + "/cache/index" + std::to_string(index);
    long level = 0;
    if (!read_number(cache + "/level", level)) continue;
    if (text_of(cache + "/type").compare(0, 11, "Instruction") == 0) continue;
    const size_t size = parse_size(text_of(cache + "/size"));
    if (level == 1) t.l1d = size;
    if (level == 2) t.l2 = size;
    if (level == 3) t.l3 = size;
    if (level != 2) continue;
    const std::vector<int> sharers = parse_list(text_of(cache + "/shared_cpu_list"));
    const auto shares = [&](const Cpu& c) { return std::find(sharers.begin(), sharers.end(), c.id) != sharers.end(); };
    t.l2_sharers = std::max(1, static_cast<int>(std::count_if(t.cpus.begin(), t.cpus.end(), shares)));
  }
}

bool read_hypervisor(const std::string& root) {
  if (!text_of(root + "sys/hypervisor/type").empty()) return true;
  std::ifstream info(root + "proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.compare(0, 5, "flags") == 0) return (line + " ").find(" hypervisor ") != std::string::npos;
  return false;
}

// cpus' worth of time that one cgroup folder grants, 0 for no limit; v2 has one file for it, v1 two.
double quota_of(const std::string& folder) {
  double quota = 0, period = 0;
  std::istringstream v2(text_of(folder + "/cpu.max"));
  if (v2 >> quota >> period) return quota > 0 && period > 0 ? quota / period : 0;
  long v1_quota = 0, v1_period = 0;
  if (read_number(folder + "/cpu.cfs_quota_us", v1_quota) && read_number(folder + "/cpu.cfs_period_us", v1_period))
    return v1_quota > 0 && v1_period > 0 ? static_cast<double>(v1_quota) / static_cast<double>(v1_period) : 0;
  return 0;
}

// The lowest limit from this process's cgroup up to the root. A container may name a path that only the host can see;
// missing folders count as unlimited.
double read_quota(const std::string& root) {
  double tightest = 0;
  std::ifstream groups(root + "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v1 = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    if (!v1 && !controllers.empty()) continue;
    std::string path = line.substr(second + 1);
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const double quota = quota_of(root + "sys/fs/cgroup" + (v1 ? "/cpu" : "") + path);
      if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return tightest;
}

std::vector<Cpu> selected_cpus(const Topology& t, const std::vector<int>& cpus) {
  std::vector<Cpu> selected;
  for (const Cpu& cpu : t.cpus)
    if (std::find(cpus.begin(), cpus.end(), cpu.id) != cpus.end()) selected.push_back(cpu);
  return selected;
}

std::vector<int> nodes_among(const std::vector<Cpu>& cpus) {
  std::vector<int> nodes;
  for (const Cpu& cpu : cpus) nodes.push_back(cpu.node);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  return nodes;
}

// One cpu of every core first, then the second of each, and so on; ascending within a round.
std::vector<int> cores_first(const std::vector<Cpu>& cpus) {
  std::map<int, int> seen;
  std::vector<std::pair<int, int>> rounds;
  for (const Cpu& cpu : cpus) rounds.emplace_back(seen[cpu.core]++, cpu.id);
  std::sort(rounds.begin(), rounds.end());
  std::vector<int> order;
  for (const auto& [round, id] : rounds) order.push_back(id);
  return order;
}

// Of each node's cpus, those whose position `keep` accepts; keep(position, cpus of the node).
template <class Keep>
std::vector<int> of_each_node(const Topology& t, Keep keep) {
  std::map<int, size_t> size, position;
  for (const Cpu& cpu : t.cpus) ++size[cpu.node];
  std::vector<int> kept;
  for (const Cpu& cpu : t.cpus)
    if (keep(position[cpu.node]++, size[cpu.node])) kept.push_back(cpu.id);
  return kept;
}

}  // namespace

int Topology::thread_limit() const {
  const int all = static_cast<int>(cpus.size());
  return quota > 0 ? std::min(all, std::max(1, static_cast<int>(std::ceil(quota)))) : all;
}

Topology read_topology(const std::string& root, std::vector<int> allowed) {
  const std::string base = root.empty() || root.back() != '/' ? root + "/" : root;
  if (allowed.empty()) allowed = allowed_by_kernel();
  std::sort(allowed.begin(), allowed.end());
  allowed.erase(std::unique(allowed.begin(), allowed.end()), allowed.end());

  Topology t;
  const auto cpu_folder = [&](int cpu) { return base + "sys/devices/system/cpu/cpu" + std::to_string(cpu); };
  const std::map<int, int> node_of = read_nodes(base);
  t.siblings_listed = true;
  std::vector<int> cores;
  for (int id : allowed) {
    const auto node = node_of.find(id);
    const int core = read_core(cpu_folder(id), id);
    t.siblings_listed &= core >= 0;
    t.cpus.push_back({id, core >= 0 ? core : id, node == node_of.end() ? 0 : node->second});
    cores.push_back(t.cpus.back().core);
  }
  std::sort(cores.begin(), cores.end());
  t.cores = static_cast<int>(std::unique(cores.begin(), cores.end()) - cores.begin());
  t.nodes = nodes_among(t.cpus);
  read_caches(cpu_folder(allowed.front()), t);
  t.hypervisor = read_hypervisor(base);
  t.quota = read_quota(base);
  return t;
}

const Topology& topology() {
  static const Topology t = read_topology();
  return t;
}

std::vector<int> useful_cpus(const Topology& t, const AggregateRate& rate) {
  std::vector<int> all;
  for (const Cpu& cpu : t.cpus) all.push_back(cpu.id);
  std::vector<std::vector<int>> candidates;
  if (t.cores < static_cast<int>(all.size())) {
    std::vector<int> one_per_core = cores_first(t.cpus);
    one_per_core.resize(static_cast<size_t>(t.cores));
    std::sort(one_per_core.begin(), one_per_core.end());
    candidates = {one_per_core};
  } else if (t.hypervisor || !t.siblings_listed) {
    candidates = {of_each_node(t, [](size_t i, size_t) { return i % 2 == 0; }),
                  of_each_node(t, [](size_t i, size_t n) { return i < (n + 1) / 2; })};
  }
  // Under a quota the measurement would be throttled, and the quota decides the count anyway.
  const bool cut = t.thread_limit() < static_cast<int>(all.size());
  if (all.size() <= 2 || candidates.empty() || cut) return all;

  // All cpus are measured before and after: the first run includes the ramp-up of the clocks.
  double reference = rate(all);
  std::vector<double> rates;
  for (const auto& candidate : candidates) rates.push_back(rate(candidate));
  reference = std::max(reference, rate(all));
  const size_t best = static_cast<size_t>(std::max_element(rates.begin(), rates.end()) - rates.begin());
  return rates[best] > 1.05 * reference ? candidates[best] : all;
}

ThreadPlacement place_threads(const Topology& t, const std::vector<int>& cpus, int threads, int groups) {
  const std::vector<Cpu> selected = selected_cpus(t, cpus);
  const std::vector<int> nodes = nodes_among(selected);
  const bool real = groups == static_cast<int>(nodes.size());
  const size_t count = static_cast<size_t>(groups);

  ThreadPlacement placement;
  std::vector<std::vector<Cpu>> members(count);
  for (size_t i = 0; i < selected.size(); ++i) {
    const auto node = std::lower_bound(nodes.begin(), nodes.end(), selected[i].node) - nodes.begin();
    members[real ? static_cast<size_t>(node) : i * count / selected.size()].push_back(selected[i]);
  }
  std::vector<size_t> share(count, 1);
  for (int left = threads - groups; left > 0; --left) {
    size_t least_loaded = 0;  // the group with the fewest threads per cpu once it has one more
    const auto load = [&](size_t g) {
      return static_cast<double>(share[g] + 1) / static_cast<double>(std::max<size_t>(members[g].size(), 1));
    };
    for (size_t g = 1; g < count; ++g)
      if (load(g) < load(least_loaded)) least_loaded = g;
    ++share[least_loaded];
  }
  const bool cut = t.thread_limit() < static_cast<int>(t.cpus.size());
  for (size_t g = 0; g < count; ++g) {
    const std::vector<int> order = cores_first(members[g]);
    const bool fits = share[g] <= order.size();
    for (size_t i = 0; i < share[g]; ++i)
      placement.workers.push_back({static_cast<int>(g), fits && !cut && (g > 0 || i > 0) ? order[i] : -1});
    placement.oversubscribed |= !fits;
    placement.node_of.push_back(real ? nodes[g] : -1);
    placement.cpus_of.push_back(order);
  }
  return placement;
}

}  // namespace kt
