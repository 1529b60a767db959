// A pinned thread pool, one group per NUMA node, whose idle threads sleep on a futex.
//
// A Job distributes its own work: `work` is called once on every thread that joins, takes units by an atomic counter of
// the job, and returns when none is left. So the pool needs no notion of units, a thread that wakes late costs nothing,
// and a job is done when every thread that joined has returned. Several threads may run and submit jobs at once;
// workers join the oldest job that is still open. A worker index is unique within a job, not within the process: every
// caller of run() is index 0 of its own job, so scratch belongs to the job, by index.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "topology.h"

namespace kt {

struct Worker {
  int index;  // 0 ... threads - 1 within the pool; the calling thread of run() has index 0
  int group;  // NUMA group of the pool, 0 ... groups - 1
};

class Job {
 public:
  virtual ~Job() = default;
  virtual void work(const Worker& worker) = 0;

 protected:
  // Asked between units: whether to leave out those that remain, because run() was interrupted. On the thread that
  // called run() it also asks whether that is so.
  bool cancelled() const;

 private:
  friend class Pool;
  mutable std::atomic<bool> cancelled_{false};
  std::atomic<uint32_t> state_{0};  // idle, queued, awaited, done; a futex
  int32_t active_ = 0;              // threads inside work(), under the pool's lock
  bool open_ = false;               // in the queue, more threads may join; under the pool's lock
  bool has_caller_ = false;         // run(), not submit(): index 0 is taken; under the pool's lock
  Job* next_ = nullptr;             // in the queue; under the pool's lock
};

struct PoolOptions {
  int threads = 0;     // in all groups together; 0: KT_THREADS, or chosen by topology and probe
  int groups = 0;      // 0: one per NUMA node in the affinity mask; any number but that of nodes: simulated, unbound
  int spin_us = 50;    // how long an idle thread spins,
  int yield_us = 500;  // and then yields its cpu, before it sleeps
  bool pin = true;
};

// A pool does not survive fork(): threads stay with the parent. In the child run(), submit() and wait() throw, and the
// destructor does nothing.
class Pool {
 public:
  explicit Pool(const PoolOptions& options = {});
  ~Pool();  // waits for queued jobs, then ends the threads
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;  // the caller of run() included
  int groups() const;
  const std::vector<int>& cpus() const;      // cpu of each worker index; -1 where not pinned to one, as is index 0
  const std::vector<int>& group_of() const;  // group of each worker index
  int node_of(int group) const;              // NUMA node to bind memory to; -1 when simulated

  void run(Job& job);     // the caller takes part; returns when the job is done; jobs don't throw; or Interrupted
  void submit(Job& job);  // returns at once, all threads() work; the job must outlive wait()
  void wait(Job& job);    // from any thread but a worker; returns at once if never queued; or Interrupted: it runs on
  void wait_cancelled(Job& job);    // cancels it, then waits without interruption
  bool done(const Job& job) const;  // finished since it was last submitted

  // flop/s of threads pinned to these cpus that multiply at the same time for 10 ms; used by the probe.
  static double rate_on(const std::vector<int>& cpus);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kt
