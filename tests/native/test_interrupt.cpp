// Calls that are interrupted, checksums, and mapped files that lose pages.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "interrupt.h"
#include "mapped_file.h"
#include "threads.h"

using namespace kt;

namespace {

// Units of 5 ms; without an interruption it would take a minute.
class SlowJob : public Job {
 public:
  void work(const Worker&) override {
    for (; !cancelled() && next_.fetch_add(1) < units_;) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  void set_units(int units) { units_ = units, next_ = 0; }

 private:
  int units_ = 24000;
  std::atomic<int> next_{0};
};

template <class Error, class Act>
bool throws(Act&& act) {
  try {
    act();
  } catch (const Error&) {
    return true;
  }
  return false;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct CheckSet {
  explicit CheckSet(InterruptCheck check) { set_interrupt_check(check); }
  ~CheckSet() { set_interrupt_check(nullptr); }
};

struct TemporaryFile {
  explicit TemporaryFile(size_t bytes) {
    int file = mkstemp(path);
    std::vector<char> data(bytes, 7);
    if (write(file, data.data(), bytes) != (ssize_t)bytes) abort();
    close(file);
  }
  ~TemporaryFile() { unlink(path); }
  char path[32] = "/tmp/kt_mapped_XXXXXX";
};

}  // namespace

TEST(interrupted_run_ends_and_the_pool_goes_on) {
  Pool pool({.threads = 3, .groups = 1});
  SlowJob job;
  const auto start = std::chrono::steady_clock::now();
  {
    CheckSet set([] { return true; });
    CHECK(throws<Interrupted>([&] { pool.run(job); }));
  }
  CHECK(seconds_since(start) < 1);
  job.set_units(3);
  pool.run(job);
  CHECK(pool.done(job));
}

TEST(interrupted_wait_leaves_the_job_running) {
  Pool pool({.threads = 2, .groups = 1});
  SlowJob job;
  pool.submit(job);
  {
    CheckSet set([] { return true; });
    CHECK(throws<Interrupted>([&] { pool.wait(job); }));
  }
  CHECK(!pool.done(job));
  const auto start = std::chrono::steady_clock::now();
  pool.wait_cancelled(job);
  CHECK(seconds_since(start) < 1);
}

TEST(a_long_unit_after_many_short_ones_is_interrupted) {
  CheckSet set([] { return true; });
  InterruptPoll interrupted;
  const auto start = std::chrono::steady_clock::now();
  bool early = false;
  while (seconds_since(start) < 0.05) early |= interrupted();
  CHECK(!early || seconds_since(start) > 0.09);  // a thread that lost its CPU for so long may have been due
  for (int i = 0; i < 2; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    CHECK(interrupted());
    CHECK(!interrupted());
  }
}

TEST(crc32c_of_known_bytes) {
  CHECK(crc32c("123456789", 9) == 0xe3069283);
  CHECK(crc32c("", 0) == 0);
  const std::vector<char> zeros(32);
  CHECK(crc32c(zeros.data(), 32) == 0x8a9136aa);
}

TEST(crc32c_by_instruction_by_tables_and_in_parts) {
  std::vector<uint8_t> data(40000);
  uint32_t state = 1;
  for (uint8_t& byte : data) byte = (uint8_t)((state = state * 1664525 + 1013904223) >> 24);
  for (size_t begin : {0, 1, 7})
    for (size_t bytes : {0, 1, 7, 8, 4096, 12287, 12288, 12289, 24576, 39000}) {
      const uint32_t whole = crc32c_by_tables(data.data() + begin, bytes);
      CHECK(crc32c(data.data() + begin, bytes) == whole);
      const size_t part = bytes / 3;
      const uint32_t first = crc32c(data.data() + begin, part);
      CHECK(crc32c(data.data() + begin + part, bytes - part, first) == whole);
      CHECK(crc32c_combine(first, crc32c(data.data() + begin + part, bytes - part), bytes - part) == whole);
    }
  const uint32_t before = crc32c(data.data(), data.size());
  data[31111] ^= 4;
  CHECK(crc32c(data.data(), data.size()) != before);
}

TEST(a_truncated_file_is_an_error) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  TemporaryFile file(4 * page);
  MappedFile mapped(file.path);
  const Mapping* mapping = mapping_at(mapped.data() + page);
  CHECK(mapping && path_of(*mapping) == file.path);
  CHECK(!mapping_at(&page));
  check_mapping(mapping);
  CHECK(truncate(file.path, (off_t)page) == 0);
  std::vector<std::thread> readers;
  std::atomic<int> sum{0};
  for (int t = 0; t < 3; t++)
    readers.emplace_back([&] {
      for (size_t i = 0; i < mapped.size(); i += 64) sum += mapped.data()[i];
    });
  for (std::thread& reader : readers) reader.join();
  CHECK(sum == 3 * 7 * (int)(page / 64));
  CHECK(throws<DamagedFile>([&] { check_mapping(mapping); }));
}

TEST(a_write_to_a_mapping_is_an_error_and_leaves_the_file) {
  TemporaryFile file(100);
  {
    MappedFile mapped(file.path);
    const_cast<char*>(mapped.data())[50] = 1;
    CHECK(mapped.data()[50] == 1 && mapped.data()[51] == 7);
    CHECK(throws<DamagedFile>([&] { check_mapping(mapping_at(mapped.data())); }));
  }
  MappedFile again(file.path);
  CHECK(again.data()[50] == 7);
  check_mapping(mapping_at(again.data()));
}

TEST(a_mapping_is_forgotten_with_its_file) {
  TemporaryFile file(100);
  const char* data;
  {
    MappedFile mapped(file.path);
    data = mapped.data();
    CHECK(mapping_at(data));
  }
  CHECK(!mapping_at(data));
}
