// Synthetic machines: two sockets with hyperthreads, eight nodes, containers that hide sysfs, masks, quotas; and thread
// placement.
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>

#include "check.h"
#include "topology.h"

using namespace kt;
namespace fs = std::filesystem;

namespace {

// A root folder that lives as long as the test.
class Tree {
 public:
  Tree() {
    char name[] = "/tmp/kt_topology_XXXXXX";
    root_ = mkdtemp(name);
  }
  ~Tree() { fs::remove_all(root_); }
  Tree(const Tree&) = delete;

  void put(const std::string& path, const std::string& text) const {
    const fs::path file = fs::path(root_) / path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void cpu(int id, const std::string& siblings) const {
    put("sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/core_cpus_list", siblings);
  }
  void cache(int cpu, int index, int level, const char* type, const char* size, const std::string& sharers) const {
    const std::string folder =
        "sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    put(folder + "level", std::to_string(level));
    put(folder + "type", type);
    put(folder + "size", size);
    put(folder + "shared_cpu_list", sharers);
  }
  void node(int id, const std::string& cpus) const {
    put("sys/devices/system/node/node" + std::to_string(id) + "/cpulist", cpus);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

std::vector<int> range(int first, int last) {
  std::vector<int> numbers(static_cast<size_t>(last - first));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Two sockets of 8 cores; cpu c and c + 16 share a core, as Linux numbers them on bare metal.
void two_sockets(const Tree& tree) {
  for (int cpu = 0; cpu < 32; ++cpu) tree.cpu(cpu, std::to_string(cpu % 16) + "," + std::to_string(cpu % 16 + 16));
  tree.node(0, "0-7,16-23");
  tree.node(1, "8-15,24-31");
  tree.cache(0, 0, 1, "Data", "48K", "0,16");
  tree.cache(0, 1, 1, "Instruction", "32K", "0,16");
  tree.cache(0, 2, 2, "Unified", "2048K", "0,16");
  tree.cache(0, 3, 3, "Unified", "105M", "0-7,16-23");
  tree.put("proc/cpuinfo", "processor : 0\nflags\t\t: fpu avx2 avx512f");
}

std::string shown(const std::vector<int>& numbers) {
  std::string text;
  for (int n : numbers) text += std::to_string(n) + " ";
  return text;
}

// Topology of `cpus` cpus on one node with nothing known about siblings.
Topology guest(int cpus) {
  const Tree tree;
  tree.put("proc/cpuinfo", "flags : fpu hypervisor avx2");
  return read_topology(tree.root(), range(0, cpus));
}

}  // namespace

TEST(topology_two_sockets_with_hyperthreads) {
  const Tree tree;
  two_sockets(tree);
  const Topology t = read_topology(tree.root(), range(0, 32));
  CHECK_EQ(t.cpus.size(), 32u);
  CHECK_EQ(t.cores, 16);
  CHECK_EQ(shown(t.nodes), "0 1 ");
  CHECK_EQ(t.cpus[17].core, 1);
  CHECK_EQ(t.cpus[17].node, 0);
  CHECK_EQ(t.cpus[25].core, 9);
  CHECK_EQ(t.cpus[25].node, 1);
  CHECK_EQ(t.l1d, 48u << 10);
  CHECK_EQ(t.l2, 2u << 20);
  CHECK_EQ(t.l3, 105u << 20);
  CHECK_EQ(t.l2_sharers, 2);
  CHECK(t.siblings_listed);
  CHECK(!t.hypervisor);
  CHECK_EQ(t.thread_limit(), 32);
}

TEST(topology_restricted_affinity) {
  const Tree tree;
  two_sockets(tree);
  const Topology t = read_topology(tree.root() + "/", {25, 9, 10, 9});
  CHECK_EQ(t.cpus.size(), 3u);
  CHECK_EQ(t.cpus[0].id, 9);
  CHECK_EQ(t.cores, 2);
  CHECK_EQ(shown(t.nodes), "1 ");
  CHECK_EQ(t.l2, 0u);  // the synthetic tree has caches of cpu 0 only
  CHECK_EQ(read_topology(tree.root(), {0, 1}).l2_sharers, 1);
}

TEST(topology_eight_nodes_one_without_cpus) {
  const Tree tree;
  for (int n = 0; n < 8; ++n) tree.node(n, std::to_string(4 * n) + "-" + std::to_string(4 * n + 3));
  tree.node(8, "");  // memory only: CXL or HBM in flat mode
  tree.put("sys/devices/system/node/possible", "0-8");
  for (int cpu = 0; cpu < 32; ++cpu)
    tree.put("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
             std::to_string(cpu));
  const Topology t = read_topology(tree.root(), range(0, 32));
  CHECK_EQ(t.nodes.size(), 8u);
  CHECK_EQ(t.cores, 32);
  CHECK_EQ(t.cpus[31].node, 7);
  const ThreadPlacement s = place_threads(t, range(0, 32), 32, 8);
  CHECK_EQ(s.node_of.size(), 8u);
  CHECK_EQ(s.node_of[7], 7);
  CHECK_EQ(s.workers[0].cpu, -1);
  for (size_t i = 1; i < 32; ++i) {
    CHECK_EQ(s.workers[i].cpu, static_cast<int>(i));
    CHECK_EQ(s.workers[i].group, static_cast<int>(i / 4));
  }
}

TEST(topology_nothing_to_read) {
  const Tree tree;
  const Topology t = read_topology(tree.root(), {3, 5, 6});
  CHECK_EQ(t.cores, 3);
  CHECK_EQ(shown(t.nodes), "0 ");
  CHECK(!t.siblings_listed);
  CHECK_EQ(t.l2, 0u);
  CHECK_EQ(t.l2_sharers, 1);
  CHECK_EQ(t.quota, 0.0);
  CHECK_EQ(read_topology("/no/such/folder", {0}).cpus.size(), 1u);
}

TEST(topology_broken_files) {
  const Tree tree;
  tree.node(0, "garbage");
  tree.put("sys/devices/system/node/nodeX/cpulist", "0-3");
  tree.cpu(0, "7-9");  // does not list itself
  tree.cpu(1, "-");
  tree.cache(0, 0, 2, "Unified", "much", "");
  tree.put("proc/self/cgroup", "no colons here\n0::/a/b");
  tree.put("sys/fs/cgroup/a/cpu.max", "lots");
  const Topology t = read_topology(tree.root(), {0, 1});
  CHECK_EQ(t.cores, 2);
  CHECK_EQ(t.cpus[0].node, 0);
  CHECK_EQ(t.l2, 0u);
  CHECK_EQ(t.quota, 0.0);
}

TEST(topology_cgroup_quota) {
  const Tree tree;
  tree.put("proc/self/cgroup", "0::/pod/box");
  tree.put("sys/fs/cgroup/pod/box/cpu.max", "max 100000");
  CHECK_EQ(read_topology(tree.root(), range(0, 16)).quota, 0.0);
  tree.put("sys/fs/cgroup/pod/cpu.max", "650000 100000");
  Topology t = read_topology(tree.root(), range(0, 16));
  CHECK_EQ(t.quota, 6.5);
  CHECK_EQ(t.thread_limit(), 7);
  tree.put("sys/fs/cgroup/cpu.max", "50000 100000");  // the lowest on the way up counts
  t = read_topology(tree.root(), range(0, 16));
  CHECK_EQ(t.thread_limit(), 1);
  const Tree v1;
  v1.put("proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/docker/1234\n0::/");
  v1.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000");  // the container sees its own folder as the root
  v1.put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK_EQ(read_topology(v1.root(), range(0, 16)).thread_limit(), 3);
  v1.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  CHECK_EQ(read_topology(v1.root(), range(0, 16)).thread_limit(), 16);
}

TEST(topology_of_this_machine) {
  const Topology& t = topology();
  CHECK(!t.cpus.empty());
  CHECK(!t.nodes.empty());
  CHECK(t.cores >= 1 && t.cores <= static_cast<int>(t.cpus.size()));
  CHECK(t.thread_limit() >= 1);
}

TEST(probe_keeps_all_cpus_unless_half_is_faster) {
  const Topology t = guest(8);
  int asked = 0;
  const auto by_count = [&](double half) {
    return [&asked, half](const std::vector<int>& cpus) { return ++asked, cpus.size() == 8 ? 100.0 : half; };
  };
  CHECK_EQ(useful_cpus(t, by_count(104)).size(), 8u);
  CHECK_EQ(asked, 4);
  CHECK_EQ(useful_cpus(t, by_count(106)).size(), 4u);
}

TEST(probe_finds_the_pairing_that_a_guest_hides) {
  const Topology t = guest(8);
  const auto cores_of = [](auto core) {
    return [core](const std::vector<int>& cpus) {
      std::set<int> busy;
      for (int cpu : cpus) busy.insert(core(cpu));
      return static_cast<double>(busy.size()) - 0.05 * static_cast<double>(cpus.size());
    };
  };
  CHECK_EQ(shown(useful_cpus(t, cores_of([](int cpu) { return cpu / 2; }))), "0 2 4 6 ");
  CHECK_EQ(shown(useful_cpus(t, cores_of([](int cpu) { return cpu % 4; }))), "0 1 2 3 ");
  CHECK_EQ(useful_cpus(t, cores_of([](int cpu) { return cpu; })).size(), 8u);
}

TEST(probe_is_not_run_where_it_cannot_help) {
  const auto never = [](const std::vector<int>&) { return CHECK(false), 0.0; };
  CHECK_EQ(useful_cpus(guest(2), never).size(), 2u);
  const Tree metal;  // siblings listed, none share
  for (int cpu = 0; cpu < 8; ++cpu) metal.cpu(cpu, std::to_string(cpu));
  CHECK_EQ(useful_cpus(read_topology(metal.root(), range(0, 8)), never).size(), 8u);
  Topology cut = guest(8);
  cut.quota = 3;
  CHECK_EQ(useful_cpus(cut, never).size(), 8u);
}

TEST(probe_uses_listed_siblings) {
  const Tree tree;
  two_sockets(tree);
  const Topology t = read_topology(tree.root(), range(0, 32));
  const auto half_is_better = [](const std::vector<int>& cpus) { return cpus.size() == 16 ? 2.0 : 1.0; };
  CHECK_EQ(shown(useful_cpus(t, half_is_better)), shown(range(0, 16)));
}

TEST(placement_follows_nodes_and_takes_cores_before_siblings) {
  const Tree tree;
  two_sockets(tree);
  const Topology t = read_topology(tree.root(), range(0, 32));
  const ThreadPlacement s = place_threads(t, range(0, 32), 20, 2);
  CHECK_EQ(s.workers.size(), 20u);
  CHECK_EQ(shown(s.node_of), "0 1 ");
  std::vector<int> cpus;
  for (const WorkerPlacement& worker : s.workers) cpus.push_back(worker.cpu);
  CHECK_EQ(shown(cpus), "-1 1 2 3 4 5 6 7 16 17 8 9 10 11 12 13 14 15 24 25 ");
  CHECK(!s.oversubscribed);
}

TEST(placement_shares_threads_by_cpus) {
  const Tree tree;
  two_sockets(tree);
  const std::vector<int> allowed{0, 1, 2, 3, 4, 5, 8, 9};
  const ThreadPlacement s = place_threads(read_topology(tree.root(), allowed), allowed, 8, 2);
  CHECK_EQ(s.workers[5].group, 0);
  CHECK_EQ(s.workers[6].group, 1);
  CHECK_EQ(s.workers[7].cpu, 9);
}

TEST(placement_simulates_groups) {
  const Topology t = guest(8);
  const ThreadPlacement s = place_threads(t, range(0, 8), 8, 4);
  CHECK_EQ(shown(s.node_of), "-1 -1 -1 -1 ");
  for (size_t i = 0; i < 8; ++i) CHECK_EQ(s.workers[i].group, static_cast<int>(i / 2));
  CHECK_EQ(s.workers[7].cpu, 7);
  const ThreadPlacement empty = place_threads(guest(2), range(0, 2), 4, 4);  // groups without a cpu of their own
  CHECK_EQ(empty.workers[3].group, 3);
  CHECK_EQ(empty.workers[3].cpu, -1);
  const Tree tree;
  two_sockets(tree);
  const ThreadPlacement one = place_threads(read_topology(tree.root(), range(0, 32)), range(0, 32), 32, 1);
  CHECK_EQ(shown(one.node_of), "-1 ");  // one group over two nodes has no node
}

TEST(placement_leaves_threads_free_when_crowded_or_cut) {
  Topology t = guest(4);
  const ThreadPlacement oversubscribed = place_threads(t, range(0, 4), 6, 1);
  CHECK(oversubscribed.oversubscribed);
  for (const WorkerPlacement& worker : oversubscribed.workers) CHECK_EQ(worker.cpu, -1);
  t.quota = 2;
  const ThreadPlacement cut = place_threads(t, range(0, 4), 2, 1);
  CHECK(!cut.oversubscribed);
  CHECK_EQ(cut.workers[1].cpu, -1);
  CHECK_EQ(cut.cpus_of[0].size(), 4u);
}
