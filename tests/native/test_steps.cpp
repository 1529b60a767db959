// Steps of one job: each sees all of what the one before has written, whatever threads take part; the exceptions of
// those that make them.
#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.h"
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
