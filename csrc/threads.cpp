// The pool: a queue of open jobs under a short spinlock, and two event counts on which idle threads sleep.
//
// A job is in the queue from submission until the first thread returns from work(), which means that all its units are
// taken. Threads join under the lock and only jobs in the queue, so a thread that wakes late never touches a job that
// its owner may already have destroyed. Waking is a tree: the submitter wakes two threads, each woken thread wakes two
// more while a job is open, so a submitter pays for one system call however many threads sleep, and for none while they
// spin. Thread 0 is special: run() makes its caller index 0, submit() has no such thread, so one worker waits on an
// event count of its own and takes index 0 of submitted jobs only.
#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "futex.h"
#include "interrupt.h"
#include "kernels/table.h"
#include "memory.h"

namespace kt {
namespace {

enum JobState : uint32_t { kIdle, kQueued, kAwaited, kDone };  // awaited: queued, and a thread sleeps on it

// An event count: where idle threads wait. A waiter counts itself before it reads `open` for the last time, a submitter
// increments `open` before it reads `waiters`; both are sequentially consistent, so one of the two sees the other.
struct alignas(64) EventCount {
  FutexWord open{0};  // jobs that a waiting thread may join
  FutexWord waiters{0};
  FutexWord epoch{0};  // the futex

  void notify(int threads) {
    if (waiters.load() == 0) return;
    epoch.fetch_add(1);
    futex_wake(&epoch, threads);
  }
};

// Incremented in the child by fork(), where a pool has lost its threads; cheaper to compare than a getpid() per job.
std::atomic<uint32_t> forks{0};

uint32_t count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)registered;
  return forks.load();
}

bool set_affinity(pthread_t thread, const std::vector<int>& cpus) {
  const int limit = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(limit);
  const size_t bytes = CPU_ALLOC_SIZE(limit);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  const bool done = pthread_setaffinity_np(thread, bytes, set) == 0;
  CPU_FREE(set);
  return done;
}

// Threads started in its scope block signals: handlers belong to the program's own threads. Faults stay deliverable, so
// that a crash report names the worker that crashed.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct Pool::Impl {
  Impl(ThreadPlacement place, const PoolOptions& options);
  ~Impl() { stop(); }

  void check_process(const char* what) const;
  void enqueue(Job& job, bool with_caller);
  Job* join(bool as_submit_worker);
  void work_and_close(Job& job, const Worker& worker) noexcept;
  void finish(Job& job);
  template <class Poll>
  void wait_done(Job& job, std::chrono::microseconds spin, Poll&& poll);
  bool wait_for_work(EventCount& event);
  void worker_loop(const Worker& worker, EventCount& event);
  void stop();

  ThreadPlacement placement;
  std::vector<int> cpus, groups;
  std::chrono::microseconds spin, yield;
  const uint32_t fork_count = count_forks();

  SpinLock lock;
  Job* first = nullptr;  // the queue, oldest first: exactly the open jobs
  Job** end = &first;
  EventCount idle_workers, idle_submit_worker;
  std::atomic<bool> stopping{false};
  std::vector<std::thread> threads;
};

Pool::Impl::Impl(ThreadPlacement place, const PoolOptions& options)
    : placement(std::move(place)),
      spin(placement.oversubscribed ? 0 : options.spin_us),
      yield(placement.oversubscribed ? 0 : options.yield_us) {
  for (const WorkerPlacement& worker : placement.workers) {
    groups.push_back(worker.group);
    cpus.push_back(options.pin ? worker.cpu : -1);
  }
  const SignalsBlocked blocked;
  try {
    for (size_t i = 0; i < cpus.size(); ++i) {
      const Worker worker{static_cast<int>(i), groups[i]};
      threads.emplace_back(
          [this, worker] { worker_loop(worker, worker.index == 0 ? idle_submit_worker : idle_workers); });
      const pthread_t thread = threads.back().native_handle();
      pthread_setname_np(thread, ("kt-" + std::to_string(i)).c_str());
      const std::vector<int>& group_cpus = placement.cpus_of[static_cast<size_t>(worker.group)];
      if (!options.pin || group_cpus.empty()) continue;
      if (cpus[i] >= 0 && !set_affinity(thread, {cpus[i]})) cpus[i] = -1;
      if (cpus[i] < 0) set_affinity(thread, group_cpus);
    }
  } catch (const std::system_error& error) {
    const size_t started = threads.size();
    stop();
    throw std::runtime_error("a pool of " + std::to_string(cpus.size()) + " threads: only " + std::to_string(started) +
                             " could be started (" + error.what() + "); ask for fewer (KT_THREADS) or raise ulimit -u");
  }
}

void Pool::Impl::stop() {
  stopping.store(true);
  for (EventCount* event : {&idle_workers, &idle_submit_worker}) {
    event->epoch.fetch_add(1);
    futex_wake(&event->epoch, INT_MAX);
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

void Pool::Impl::check_process(const char* what) const {
  if (forks.load(std::memory_order_relaxed) != fork_count)
    throw std::runtime_error(std::string(what) +
                             " on a pool that was made before fork(): its threads stayed in the "
                             "parent; make a new pool in the child, or start the child with spawn");
}

void Pool::Impl::enqueue(Job& job, bool with_caller) {
  uint32_t before = job.state_.load();
  if (before == kQueued || before == kAwaited || !job.state_.compare_exchange_strong(before, kQueued))
    throw std::logic_error("a job was submitted again before it was done; wait() for it first");
  job.cancelled_.store(false, std::memory_order_relaxed);
  const std::scoped_lock locked(lock);
  job.active_ = with_caller ? 1 : 0;
  job.has_caller_ = with_caller;
  job.open_ = true;
  job.next_ = nullptr;
  *end = &job;
  end = &job.next_;
  idle_workers.open.fetch_add(1);
  if (!with_caller) idle_submit_worker.open.fetch_add(1);
}

// The oldest job that this thread may join, or null.
Job* Pool::Impl::join(bool as_submit_worker) {
  const EventCount& event = as_submit_worker ? idle_submit_worker : idle_workers;
  if (event.open.load() == 0) return nullptr;
  const std::scoped_lock locked(lock);
  Job* job = first;
  while (job && as_submit_worker && job->has_caller_) job = job->next_;
  if (job) ++job->active_;
  return job;
}

// Runs a job that the calling thread has joined. The first thread to return closes the job, the last one finishes it.
void Pool::Impl::work_and_close(Job& job, const Worker& worker) noexcept {
  job.work(worker);
  bool last;
  {
    const std::scoped_lock locked(lock);
    if (job.open_) {
      Job** link = &first;
      while (*link != &job) link = &(*link)->next_;
      *link = job.next_;
      if (end == &job.next_) end = link;
      job.open_ = false;
      idle_workers.open.fetch_sub(1);
      if (!job.has_caller_) idle_submit_worker.open.fetch_sub(1);
    }
    last = --job.active_ == 0;
  }
  if (last) finish(job);
}

// After the exchange the owner may destroy the job.
void Pool::Impl::finish(Job& job) {
  FutexWord* const word = &job.state_;
  if (word->exchange(kDone) == kAwaited) futex_wake(word, INT_MAX);
}

// Calls poll ten times a second.
template <class Poll>
void Pool::Impl::wait_done(Job& job, std::chrono::microseconds spin_limit, Poll&& poll) {
  const auto is_over = [&] {
    const uint32_t state = job.state_.load(std::memory_order_acquire);
    return state == kDone || state == kIdle;
  };
  if (spin_until(is_over, spin_limit)) return;
  while (!is_over()) {
    uint32_t expected = kQueued;
    job.state_.compare_exchange_strong(expected, kAwaited);
    futex_wait(job.state_, kAwaited, std::chrono::milliseconds(100));
    poll();
  }
}

// Spins for an open job, then sleeps until notified. Returns whether it slept, or was about to.
bool Pool::Impl::wait_for_work(EventCount& event) {
  const auto should_wake = [&] { return event.open.load() > 0 || stopping.load(); };
  if (spin_until(should_wake, spin) || yield_until(should_wake, yield)) return false;
  event.waiters.fetch_add(1);
  const uint32_t seen = event.epoch.load();
  if (!should_wake()) futex_wait(event.epoch, seen);
  event.waiters.fetch_sub(1);
  return true;
}

void Pool::Impl::worker_loop(const Worker& worker, EventCount& event) {
  while (true) {
    bool was_asleep = false;
    Job* job;
    while (!(job = join(worker.index == 0))) {
      if (stopping.load()) return;
      was_asleep = wait_for_work(event);
    }
    if (was_asleep) event.notify(2);
    work_and_close(*job, worker);
  }
}

namespace {

// Every thread of a pool multiplies at the same time; each records its own rate.
class RateJob : public Job {
 public:
  RateJob(const KernelTable& table, size_t threads, size_t bytes) : table_(table), rates_(threads) {
    for (size_t i = 0; i < threads; ++i) scratch_.emplace_back(bytes);
  }

  void work(const Worker& worker) override {
    const size_t i = static_cast<size_t>(worker.index);
    arrived_.fetch_add(1);
    while (arrived_.load() < rates_.size()) sched_yield();
    rates_[i] = table_.rate(Rate::panels, 0.010, scratch_[i].data(), scratch_[i].size());
  }

  double sum() const {
    double all = 0;
    for (double rate : rates_) all += rate;
    return all;
  }

 private:
  const KernelTable& table_;
  std::vector<double> rates_;
  std::vector<Buffer> scratch_;
  std::atomic<size_t> arrived_{0};
};

// A positive count from KT_THREADS, 0 where it is not set.
int threads_from_environment() {
  const char* text = std::getenv("KT_THREADS");
  if (!text || !*text) return 0;
  char* wait_for_work = nullptr;
  errno = 0;
  const long value = std::strtol(text, &wait_for_work, 10);
  if (errno || *wait_for_work || value < 1 || value > INT_MAX)
    throw std::runtime_error("KT_THREADS=" + std::string(text) + ": expected a positive number of threads; unset it " +
                             "to have the count chosen");
  return static_cast<int>(value);
}

}  // namespace

// Scratch of about half an L2: siblings share it, and it must hold the data of both.
double Pool::rate_on(const std::vector<int>& cpus) {
  ThreadPlacement placement;
  for (int cpu : cpus) placement.workers.push_back({0, cpu});
  placement.cpus_of = {cpus};
  const size_t l2 = topology().l2, kilobyte = 1024;
  RateJob job(kernels(), cpus.size(), l2 ? std::clamp(l2 / 2, 512 * kilobyte, 2048 * kilobyte) : 1024 * kilobyte);
  Impl pool(std::move(placement), {.spin_us = 0, .yield_us = 0});
  pool.enqueue(job, false);
  pool.idle_workers.notify(2);
  pool.idle_submit_worker.notify(1);
  pool.wait_done(job, {}, [] {});
  return job.sum();
}

Pool::Pool(const PoolOptions& options) {
  if (options.threads < 0 || options.groups < 0 || options.spin_us < 0)
    throw std::invalid_argument("a pool needs threads, groups and spin_us of 0 or more; 0 threads or groups: chosen");
  const Topology& machine = topology();
  const int given = options.threads ? options.threads : threads_from_environment();
  std::vector<int> cpus;
  if (given) {
    for (const Cpu& cpu : machine.cpus) cpus.push_back(cpu.id);
  } else {
    static const std::vector<int> probed = useful_cpus(machine, rate_on);
    cpus = probed;
  }
  const int chosen = std::min(static_cast<int>(cpus.size()), machine.thread_limit());
  const int threads = given ? given : std::max(chosen, options.groups);
  const int groups = options.groups ? options.groups : std::min(threads, static_cast<int>(machine.nodes.size()));
  if (groups > threads)
    throw std::invalid_argument("a pool of " + std::to_string(threads) + " threads cannot have " +
                                std::to_string(groups) + " groups; ask for at least one thread per group");
  impl_ = std::make_unique<Impl>(place_threads(machine, cpus, threads, groups), options);
}

Pool::~Pool() {
  if (forks.load() != impl_->fork_count) (void)impl_.release();
}

int Pool::threads() const { return static_cast<int>(impl_->cpus.size()); }
int Pool::groups() const { return static_cast<int>(impl_->placement.node_of.size()); }
const std::vector<int>& Pool::cpus() const { return impl_->cpus; }
const std::vector<int>& Pool::group_of() const { return impl_->groups; }
int Pool::node_of(int group) const { return impl_->placement.node_of.at(static_cast<size_t>(group)); }

namespace {

// The job that this thread runs. A signal handler may run another one meanwhile.
struct Caller {
  const Job* job = nullptr;
  InterruptPoll poll;
};
thread_local Caller* caller = nullptr;

}  // namespace

bool Job::cancelled() const {
  if (cancelled_.load(std::memory_order_relaxed)) return true;
  if (!caller || caller->job != this || !caller->poll()) return false;
  cancelled_.store(true, std::memory_order_relaxed);
  return true;
}

void Pool::run(Job& job) {
  impl_->check_process("run()");
  Caller own{&job, {}};
  Caller* const outer = std::exchange(caller, &own);
  try {
    impl_->enqueue(job, true);
  } catch (...) {
    caller = outer;
    throw;
  }
  impl_->idle_workers.notify(2);
  impl_->work_and_close(job, {0, 0});
  // Units taken by other threads are as short as this thread's.
  impl_->wait_done(job, 4 * impl_->spin, [&] { (void)job.cancelled(); });
  caller = outer;
  if (job.cancelled_.load(std::memory_order_relaxed)) throw Interrupted();
}

void Pool::submit(Job& job) {
  impl_->check_process("submit()");
  impl_->enqueue(job, false);
  impl_->idle_workers.notify(2);
  impl_->idle_submit_worker.notify(1);
}

void Pool::wait(Job& job) {
  impl_->check_process("wait()");
  InterruptPoll interrupted;
  impl_->wait_done(job, impl_->spin, [&] {
    if (interrupted()) throw Interrupted();
  });
}

void Pool::wait_cancelled(Job& job) {
  impl_->check_process("wait()");
  job.cancelled_.store(true, std::memory_order_relaxed);
  impl_->wait_done(job, impl_->spin, [] {});
}

bool Pool::done(const Job& job) const { return job.state_.load(std::memory_order_acquire) == kDone; }

}  // namespace kt
