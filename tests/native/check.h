// The test harness of the native core in one header: TEST registers, CHECK records, main runs what the arguments match.
//
// A failed CHECK is reported and the test goes on, so one run shows everything that is wrong; an exception that leaves
// a test fails it. `kt_tests pool idle` runs the tests whose name contains one of the words, `kt_tests --list` prints
// the names. main is weak because every test file carries one: any set of them links into a runnable program.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace kt::check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> failures{0};  // of the test that is running; jobs check from several threads

struct Registration {
  Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  failures.fetch_add(1);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  fail(file, line, out.str());
}

// What `action` throws, as text; empty when it returns.
template <class Action>
std::string thrown(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline bool run(const Test& test) {
  using Clock = std::chrono::steady_clock;
  failures = 0;
  const auto start = Clock::now();
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("exception: ") + error.what());
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("%s %-56s %7.3f s\n", failures ? "FAIL" : "ok  ", test.name, seconds);
  std::fflush(stdout);
  return failures == 0;
}

inline int main(int argc, char** argv) {
  int ran = 0, failed = 0;
  for (const Test& test : tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strstr(test.name, argv[i]) != nullptr;
    if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
      std::puts(test.name);
    } else if (wanted) {
      ++ran;
      failed += !run(test);
    }
  }
  if (ran) std::printf("%d tests, %d failed\n", ran, failed);
  return failed != 0;
}

}  // namespace kt::check

#define TEST(name)                                                              \
  static void test_##name();                                                    \
  static const kt::check::Registration registration_##name{#name, test_##name}; \
  static void test_##name()

#define CHECK(condition) ((condition) ? void() : kt::check::fail(__FILE__, __LINE__, "CHECK failed: " #condition))

#define CHECK_EQ(a, b) kt::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

__attribute__((weak)) int main(int argc, char** argv) { return kt::check::main(argc, argv); }
