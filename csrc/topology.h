// The machine as this process may use it: NUMA nodes, physical cores and hyperthread siblings, caches, quota.
//
// Read from sysfs and restricted to the cgroup's cpuset and the affinity mask (sched_getaffinity honours both).
// Containers show any part of sysfs or none: missing files mean one node and one core per cpu, never an error. Thread
// placement is here too, as functions from a Topology to a list of cpus, so that tests can use synthetic machines.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace kt {

struct Cpu {
  int id;
  int core;  // physical core: the lowest cpu id among its siblings, so unique over packages
  int node;  // NUMA node
};

struct Topology {
  std::vector<Cpu> cpus;           // allowed ones, ascending by id
  std::vector<int> nodes;          // NUMA nodes that have an allowed cpu, ascending
  int cores = 0;                   // distinct physical cores among `cpus`
  size_t l1d = 0, l2 = 0, l3 = 0;  // bytes of one instance as seen by the first allowed cpu; 0 where unknown
  int l2_sharers = 1;              // allowed cpus that share one L2
  bool siblings_listed = false;    // sysfs says which cpus share a core
  bool hypervisor = false;         // a guest: siblings may be hidden
  double quota = 0;                // cpus' worth of time that the cgroup grants (cpu.max); 0: no limit

  int thread_limit() const;  // allowed cpus, limited by the quota (rounded up)
};

// `root` is "/" on a real machine; tests pass a synthetic tree. `allowed` empty: ask the kernel.
Topology read_topology(const std::string& root = "/", std::vector<int> allowed = {});
const Topology& topology();  // of this process at first use

// Combined multiplication rate of threads pinned to these cpus, in any unit.
using AggregateRate = std::function<double(const std::vector<int>& cpus)>;

// The cpus to run a thread on each, ascending. Two hyperthreads of a core may multiply slower than one alone, and
// guests often hide which cpus share a core. So where siblings are listed or possible and there are more than two cpus,
// `rate` is measured: all cpus are used unless one per core (listed, or guessed as every other cpu or the first half of
// each node) is 5 % faster.
std::vector<int> useful_cpus(const Topology& topology, const AggregateRate& rate);

// Placement of a worker. Index 0 is the thread that calls run(); its cpu is left free for it.
struct WorkerPlacement {
  int group;
  int cpu;  // -1: may move among the cpus of its group
};

struct ThreadPlacement {
  std::vector<WorkerPlacement> workers;   // by worker index, group after group
  std::vector<int> node_of;               // NUMA node of each group; -1 where groups do not follow nodes
  std::vector<std::vector<int>> cpus_of;  // cpus of each group
  bool oversubscribed = false;            // more threads than cpus: spinning would take cpus from working threads
};

// Places `threads` workers on `cpus` in `groups` groups: one group per node where their numbers are equal, otherwise
// simulated groups that divide the cpus evenly. Distinct cores are taken before siblings, and a group gets threads in
// proportion to its cpus. Threads may move inside their group where there are more of them than cpus, and under a
// quota, because another container may be busy on any fixed cpu. Needs 1 <= groups <= threads and at least one cpu.
ThreadPlacement place_threads(const Topology& topology, const std::vector<int>& cpus, int threads, int groups);

}  // namespace kt
