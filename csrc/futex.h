// Waiting primitives, from short to long waits: a pause, a spin with a time limit, a spinlock, a futex.
//
// All use std::atomic, so that ThreadSanitizer sees the ordering; a futex system call only puts threads to sleep and
// wakes them, and every woken thread checks its word again.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kt {

using FutexWord = std::atomic<uint32_t>;
static_assert(sizeof(FutexWord) == 4 && FutexWord::is_always_lock_free, "a futex is four bytes");

inline void futex_wait(FutexWord& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void futex_wait(FutexWord& word, uint32_t seen, std::chrono::milliseconds limit) {
  const timespec time{limit.count() / 1000, limit.count() % 1000 * 1000000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
}

// The kernel uses the address as a key and does not read it, so the word may already be destroyed.
inline void futex_wake(FutexWord* word, int threads) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until `ready` or until the time limit; the clock is read once in 16 iterations.
template <class Ready>
bool spin_until(Ready ready, std::chrono::microseconds limit) {
  if (ready()) return true;
  if (limit.count() <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      relax();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Yields the cpu until `ready` or until the time limit. On an idle cpu this notices within microseconds, like a spin
// and far sooner than a sleeping thread; on a busy one the other threads run.
template <class Ready>
bool yield_until(Ready ready, std::chrono::microseconds limit) {
  if (limit.count() <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    sched_yield();
    if (ready()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Held for a few instructions; yields in case the holder was preempted.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.exchange(true, std::memory_order_acquire);) do {
        if (++spins < 1000)
          relax();
        else
          sched_yield();
      } while (held_.load(std::memory_order_relaxed));
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

}  // namespace kt
