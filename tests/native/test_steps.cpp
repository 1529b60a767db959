// Steps of one job: each sees all of what the one before has written, whatever threads take part; the exceptions of
// those that make them.
#include <atomic>
#include <cfenv>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "interrupt.h"
#include "steps.h"

using namespace kt;

namespace {

// Adds one to every number, a few at a time.
class AddOne : public Job {
 public:
  explicit AddOne(std::vector<int>& numbers) : numbers_(numbers) {}
  void work(const Worker&) override {
    for (size_t i; (i = next_.fetch_add(1)) < numbers_.size();) numbers_[i]++;
  }

 private:
  std::vector<int>& numbers_;
  std::atomic<size_t> next_{0};
};

}  // namespace

TEST(steps_follow_each_other) {
  for (int threads : {1, 2, 5}) {
    Pool pool({.threads = threads, .groups = 1, .pin = false});
    for (int round = 0; round < 50; round++) {
      std::vector<int> numbers(37, 0);
      std::unique_ptr<AddOne> job;
      Steps steps;
      int made = 0;
      for (int step = 0; step < 40; step++)
        steps.add([&, step]() -> Job* {
          for (int number : numbers) CHECK_EQ(number, made);
          if (step % 3 == 2) return nullptr;
          made++;
          job = std::make_unique<AddOne>(numbers);
          return job.get();
        });
      steps.add([&]() -> Job* {
        for (int number : numbers) CHECK_EQ(number, made);
        made = -1;
        return nullptr;
      });
      steps.run(pool);
      CHECK_EQ(made, -1);
    }
  }
}

TEST(steps_without_jobs) {
  Pool pool({.threads = 2, .groups = 1, .pin = false});
  Steps none, serial;
  none.run(pool);
  int made = 0;
  serial.add([&]() -> Job* { return made++, nullptr; });
  serial.run(pool);
  CHECK_EQ(made, 1);
}

TEST(steps_end_with_an_exception) {
  Pool pool({.threads = 3, .groups = 1, .pin = false});
  for (int bad : {0, 1, 4}) {
    std::vector<int> numbers(20, 0);
    std::unique_ptr<AddOne> job;
    int made = 0;
    Steps steps;
    for (int step = 0; step < 6; step++)
      steps.add([&, step]() -> Job* {
        if (step == bad) throw std::runtime_error("no step");
        made++;
        job = std::make_unique<AddOne>(numbers);
        return job.get();
      });
    bool thrown = false;
    try {
      steps.run(pool);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
    CHECK_EQ(made, bad);
  }
}

// Each step is short; together they would take a minute.
TEST(steps_end_when_they_are_interrupted) {
  for (int threads : {1, 3}) {
    Pool pool({.threads = threads, .groups = 1, .pin = false});
    std::vector<int> numbers(20, 0);
    std::unique_ptr<AddOne> job;
    int made = 0;
    Steps steps;
    for (int step = 0; step < 12000; step++)
      steps.add([&]() -> Job* {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        made++;
        job = std::make_unique<AddOne>(numbers);
        return job.get();
      });
    set_interrupt_check([] { return true; });
    const auto start = std::chrono::steady_clock::now();
    bool interrupted = false;
    try {
      steps.run(pool);
    } catch (const Interrupted&) {
      interrupted = true;
    }
    set_interrupt_check(nullptr);
    CHECK(interrupted);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
    CHECK(made < 1000);
    for (int number : numbers) CHECK(number == made || number == made - 1);  // the last step may have had no thread
  }
}

TEST(steps_have_the_default_arithmetic) {
  const int rounding = std::fegetround();
  std::fesetround(FE_UPWARD);
  Pool pool({.threads = 2, .groups = 1, .pin = false});  // threads begin with the arithmetic of this one
  std::vector<int> numbers(20, 0);
  std::unique_ptr<AddOne> job;
  Steps steps;
  for (int step = 0; step < 20; step++)
    steps.add([&]() -> Job* {
      CHECK_EQ(std::fegetround(), FE_TONEAREST);
      job = std::make_unique<AddOne>(numbers);
      return job.get();
    });
  steps.run(pool);
  CHECK_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(rounding);
}
