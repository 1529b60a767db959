// Functions of glibc 2.30 and later that libstdc++ and _core call, for a module that is linked against an older glibc
// (KT_GLIBC in CMakeLists.txt). The module does not export them: no other library uses these definitions.
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr long long second = 1'000'000'000;

long long nanoseconds(const timespec& time) { return time.tv_sec * second + time.tv_nsec; }

long long read_clock(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return nanoseconds(now);
}

}  // namespace

extern "C" {

// libstdc++ counts references without atomic instructions if this is true. It never is here.
char __libc_single_threaded = 0;

pid_t gettid() noexcept { return static_cast<pid_t>(syscall(SYS_gettid)); }

// Waits by the wall clock, as libstdc++ does without this function: an early return when that clock is set is a
// spurious wakeup, which every caller of a condition variable expects.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  const long long end = read_clock(CLOCK_REALTIME) + nanoseconds(*until) - read_clock(clock);
  const timespec wall = {static_cast<time_t>(end / second), static_cast<long>(end % second)};
  return pthread_cond_timedwait(condition, mutex, &wall);
}
}
