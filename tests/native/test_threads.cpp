// The pool under load: many submitters, jobs destroyed right after they end, several pools, sleep, pinning, fork.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "threads.h"

using namespace kt;
using check::contains;
using check::thrown;

namespace {

// Counts every unit once and records the threads that worked.
class Count : public Job {
 public:
  explicit Count(int units, int weight = 0) : units_(units), weight_(weight), hits_(static_cast<size_t>(units)) {}

  void work(const Worker& me) override {
    {
      const std::scoped_lock lock(mutex_);
      CHECK(indexes_.insert(me.index).second);  // no thread joins twice, no two threads share an index
    }
    for (int unit; (unit = next_.fetch_add(1)) < units_;) {
      for (volatile int i = 0; i < weight_;) i = i + 1;
      ++hits_[static_cast<size_t>(unit)];  // not atomic: the pool must order it before the caller's read
    }
  }

  bool complete() const {
    return std::all_of(hits_.begin(), hits_.end(), [](int h) { return h == 1; });
  }
  const std::set<int>& indexes() const { return indexes_; }

 private:
  const int units_, weight_;
  std::atomic<int> next_{0};
  std::vector<int> hits_;
  std::mutex mutex_;
  std::set<int> indexes_;
};

// Every thread of the pool must join before any may return.
class Assembly : public Job {
 public:
  explicit Assembly(int expected) : expected_(expected), seen_(static_cast<size_t>(expected)) {}

  void work(const Worker& me) override {
    Seen& entry = seen_[static_cast<size_t>(me.index)];
    entry.group = me.group;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) == 1) entry.cpu = sched_getcpu();
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    entry.name = name;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    entry.quiet = sigismember(&blocked, SIGINT) && !sigismember(&blocked, SIGSEGV);
    arrived_.fetch_add(1);
    while (arrived_.load() < expected_) sched_yield();
  }

  struct Seen {
    int group = -1, cpu = -1;
    std::string name;
    bool quiet = false;
  };
  const std::vector<Seen>& seen() const { return seen_; }

 private:
  const int expected_;
  std::vector<Seen> seen_;
  std::atomic<int> arrived_{0};
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  double seconds = 0;
  for (const timeval& t : {usage.ru_utime, usage.ru_stime})
    seconds += static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  return seconds;
}

PoolOptions threads(int count, int groups = 0) {
  PoolOptions options;
  options.threads = count;
  options.groups = groups;
  return options;
}

void run_many(Pool& pool, int callers, int jobs) {
  std::vector<std::thread> all;
  for (int c = 0; c < callers; ++c)
    all.emplace_back([&pool, jobs, c] {
      for (int j = 0; j < jobs; ++j) {
        Count job(1 + (c * 7 + j * 3) % 40, 200);
        pool.run(job);
        CHECK(job.complete());
        CHECK(job.indexes().count(0));
      }
    });
  for (std::thread& thread : all) thread.join();
}

}  // namespace

TEST(pool_runs_every_unit_once) {
  for (int count : {1, 2, 3, 8}) {
    Pool pool(threads(count));
    CHECK_EQ(pool.threads(), count);
    for (int units : {0, 1, 2, 100, 5000}) {
      Count job(units, 50);
      CHECK(!pool.done(job));
      pool.run(job);
      CHECK(pool.done(job));
      CHECK(job.complete());
      pool.wait(job);
    }
  }
}

TEST(pool_jobs_of_many_callers) {
  Pool pool(threads(4));
  run_many(pool, 8, 250);
}

TEST(pool_two_pools_at_once) {
  Pool a(threads(3)), b(threads(4));
  std::thread other([&] { run_many(b, 4, 150); });
  run_many(a, 4, 150);
  other.join();
}

TEST(pool_jobs_die_right_after_run) {
  // Short jobs at the same stack address, with pauses that let workers fall asleep and wake late.
  PoolOptions options = threads(6);
  options.spin_us = 5;
  Pool pool(options);
  for (int i = 0; i < 3000; ++i) {
    {
      Count job(1 + i % 4);
      pool.run(job);
      CHECK(job.complete());
    }
    char ruins[sizeof(Count)];
    std::fill(std::begin(ruins), std::end(ruins), static_cast<char>(0xdd));
    __asm__ volatile("" : : "r"(ruins) : "memory");
    if (i % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(60));
  }
}

TEST(pool_wakes_every_thread) {
  Pool pool(threads(9, 3));
  for (int round = 0; round < 20; ++round) {
    Assembly job(9);
    pool.run(job);  // returns only if all nine joined
    CHECK_EQ(job.seen()[8].group, 2);
    if (round % 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(pool_submit_and_wait_from_other_threads) {
  for (int count : {1, 4}) {
    Pool pool(threads(count));
    for (int round = 0; round < 100; ++round) {
      Count job(30, 100);
      pool.wait(job);  // never submitted: nothing to wait for
      std::thread([&] { pool.submit(job); }).join();
      std::thread first([&] { pool.wait(job); }), second([&] { pool.wait(job); });
      first.join();
      second.join();
      CHECK(pool.done(job));
      CHECK(job.complete());
    }
  }
}

TEST(pool_submitted_jobs_use_every_thread) {
  Pool pool(threads(4));
  Assembly job(4);
  pool.submit(job);
  pool.wait(job);
  for (int i = 0; i < 4; ++i) CHECK_EQ(job.seen()[static_cast<size_t>(i)].name, "kt-" + std::to_string(i));
}

TEST(pool_submissions_queue_up) {
  Pool pool(threads(3));
  std::vector<std::unique_ptr<Count>> jobs;
  for (int i = 0; i < 300; ++i) {
    jobs.push_back(std::make_unique<Count>(20, 50));
    pool.submit(*jobs.back());
    if (i % 10 == 0) {
      Count between(20);
      pool.run(between);
      CHECK(between.complete());
    }
  }
  for (auto job = jobs.rbegin(); job != jobs.rend(); ++job) {
    pool.wait(**job);
    CHECK((*job)->complete());
  }
}

TEST(pool_job_can_be_used_again_but_not_twice_at_once) {
  class Gate : public Job {
   public:
    std::atomic<bool> open{false};
    void work(const Worker&) override {
      while (!open.load()) sched_yield();
    }
  } job;
  Pool pool(threads(2));
  pool.submit(job);
  CHECK(contains(thrown([&] { pool.submit(job); }), "before it was done"));
  CHECK(contains(thrown([&] { pool.run(job); }), "before it was done"));
  CHECK(!pool.done(job));
  job.open = true;
  pool.wait(job);
  pool.run(job);
  CHECK(pool.done(job));
}

TEST(pool_jobs_may_run_jobs) {
  struct Outer : Job {
    explicit Outer(Pool& p) : pool(p) {}
    void work(const Worker&) override {
      while (left.fetch_sub(1) > 0) {
        Count inner(10);
        pool.run(inner);
        CHECK(inner.complete());
      }
    }
    Pool& pool;
    std::atomic<int> left{50};
  };
  Pool pool(threads(4));
  Outer job(pool);
  pool.run(job);
}

TEST(pool_destructor_waits_for_submitted_jobs) {
  for (int round = 0; round < 50; ++round) {
    std::vector<std::unique_ptr<Count>> jobs;
    {
      Pool pool(threads(1 + round % 4));
      for (int i = 0; i < 10; ++i) {
        jobs.push_back(std::make_unique<Count>(25, 100));
        pool.submit(*jobs.back());
      }
    }
    for (const auto& job : jobs) CHECK(job->complete());
  }
}

TEST(pool_idle_costs_nothing) {
  Pool pool(threads(16)), other(threads(4));
  run_many(pool, 2, 50);
  run_many(other, 2, 50);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  CHECK(cpu_seconds() - before < 0.01);
}

TEST(pool_pins_its_workers) {
  const Topology& machine = topology();
  const int count = static_cast<int>(machine.cpus.size());
  Pool pool(threads(count));
  Assembly job(count);
  pool.submit(job);
  pool.wait(job);
  CHECK_EQ(pool.cpus()[0], -1);
  CHECK_EQ(pool.cpus().size(), static_cast<size_t>(count));
  std::set<int> distinct;
  for (size_t i = 1; i < pool.cpus().size(); ++i) {
    CHECK_EQ(job.seen()[i].group, pool.group_of()[i]);
    CHECK(job.seen()[i].quiet);
    if (machine.thread_limit() < count) continue;  // under a quota no thread is pinned
    CHECK_EQ(job.seen()[i].cpu, pool.cpus()[i]);
    CHECK(pool.cpus()[i] != machine.cpus[0].id);
    distinct.insert(pool.cpus()[i]);
  }
  if (machine.thread_limit() == count) CHECK_EQ(distinct.size(), pool.cpus().size() - 1);

  PoolOptions loose = threads(count);
  loose.pin = false;
  const Pool free(loose);
  for (int cpu : free.cpus()) CHECK_EQ(cpu, -1);
}

TEST(pool_more_threads_than_cpus) {
  const int count = 3 * static_cast<int>(topology().cpus.size()) + 1;
  Pool pool(threads(count));
  for (int cpu : pool.cpus()) CHECK_EQ(cpu, -1);
  Assembly all(count);
  pool.run(all);
  run_many(pool, 4, 50);
}

TEST(pool_groups) {
  Pool pool(threads(6, 3));
  CHECK_EQ(pool.groups(), 3);
  std::vector<int> size(3);
  for (int group : pool.group_of()) ++size[static_cast<size_t>(group)];
  for (int group = 0; group < 3; ++group) {
    CHECK_EQ(size[static_cast<size_t>(group)], 2);
    if (topology().nodes.size() != 3) CHECK_EQ(pool.node_of(group), -1);
  }
  PoolOptions only_groups;
  only_groups.groups = 5;
  CHECK(Pool(only_groups).threads() >= 5);
  CHECK(contains(thrown([] { Pool(threads(2, 3)); }), "2 threads cannot have 3 groups"));
  CHECK(contains(thrown([] { Pool(threads(-1)); }), "0 or more"));
}

TEST(pool_default_threads_and_kt_threads) {
  const char* set = std::getenv("KT_THREADS");
  const std::string before = set ? set : "";
  unsetenv("KT_THREADS");
  const Pool chosen;
  CHECK(chosen.threads() >= 1 && chosen.threads() <= topology().thread_limit());
  CHECK_EQ(chosen.groups(), std::min(chosen.threads(), static_cast<int>(topology().nodes.size())));
  setenv("KT_THREADS", "5", 1);
  CHECK_EQ(Pool().threads(), 5);
  CHECK_EQ(Pool(threads(2)).threads(), 2);  // an explicit count overrides KT_THREADS
  for (const char* bad : {"0", "-3", "many", "4x", "99999999999"}) {
    setenv("KT_THREADS", bad, 1);
    CHECK(contains(thrown([] { Pool(); }), std::string("KT_THREADS=") + bad));
  }
  before.empty() ? unsetenv("KT_THREADS") : setenv("KT_THREADS", before.c_str(), 1);
}

TEST(pool_probe_measures_all_its_cpus_together) {
  std::vector<int> cpus;
  for (const Cpu& cpu : topology().cpus) cpus.push_back(cpu.id);
  CHECK(Pool::rate_on(cpus) > 0);
  CHECK(Pool::rate_on({cpus.back()}) > 0);
}

TEST(pool_after_fork) {
  auto pool = std::make_unique<Pool>(threads(3));
  run_many(*pool, 1, 5);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a deadlock ends here
    Count job(3);
    const bool refused = contains(thrown([&] { pool->run(job); }), "fork()") &&
                         contains(thrown([&] { pool->submit(job); }), "fork()") &&
                         contains(thrown([&] { pool->wait(job); }), "fork()");
    pool.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  run_many(*pool, 1, 5);  // the parent's pool still works
}
