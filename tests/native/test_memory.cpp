// Buffers: alignment, zero fill, moves, and requests that cannot be met.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

#include "check.h"
#include "memory.h"

using namespace kt;

namespace {

constexpr size_t kMega = size_t{1} << 20;

bool aligned(const Buffer& buffer, size_t to) { return reinterpret_cast<uintptr_t>(buffer.data()) % to == 0; }

}  // namespace

TEST(memory_nothing_is_fine) {
  const Buffer none, zero(0);
  CHECK(!none);
  CHECK(!zero);
  CHECK_EQ(zero.size(), 0u);
}

TEST(memory_is_aligned_zero_and_writable_to_the_last_byte) {
  for (size_t bytes : {size_t{1}, size_t{4097}, 2 * kMega - 1, 2 * kMega, 2 * kMega + 1, 7 * kMega + 123}) {
    const Buffer buffer(bytes);
    CHECK_EQ(buffer.size(), bytes);
    CHECK(aligned(buffer, bytes >= 2 * kMega ? 2 * kMega : 4096));
    CHECK_EQ(static_cast<int>(buffer.data()[0]), 0);
    CHECK_EQ(static_cast<int>(buffer.data()[bytes - 1]), 0);
    buffer.data()[0] = 1;
    buffer.data()[bytes - 1] = 2;
  }
}

TEST(memory_is_populated_as_it_is) {
  const Buffer buffer(5 * kMega);
  buffer.data()[kMega] = 3;
  populate(buffer.data() + 100, 4 * kMega + 7);
  populate(buffer.data(), 0);
  CHECK_EQ(static_cast<int>(buffer.data()[kMega]), 3);
  for (size_t at : {size_t{0}, size_t{100}, 3 * kMega, 5 * kMega - 1}) CHECK_EQ(static_cast<int>(buffer.data()[at]), 0);
  buffer.data()[3 * kMega] = 1;
}

TEST(memory_is_given_whatever_the_node) {
  for (int node : {-1, 0, 1, 900, 5000}) {
    const Buffer buffer(3 * kMega, node);
    buffer.data()[3 * kMega - 1] = 7;
    CHECK_EQ(static_cast<int>(buffer.data()[3 * kMega - 1]), 7);
  }
}

TEST(memory_is_read_in_and_placed_as_it_is) {
  const Buffer buffer(5 * kMega);
  buffer.data()[kMega] = 3;
  for (int node : {-1, 0, 1, 900, 5000}) {
    const PreferNode prefer(node);
    populate_read(buffer.data() + 100, 4 * kMega + 7);
    move_to_node(buffer.data() + 100, 4 * kMega + 7, node);  // of a node that does not exist: nothing moves
    move_to_node(buffer.data(), 0, node);
    CHECK_EQ(static_cast<int>(buffer.data()[kMega]), 3);
    CHECK_EQ(static_cast<int>(buffer.data()[2 * kMega]), 0);
  }
}

TEST(memory_preference_of_a_thread_ends_with_its_scope) {
  const auto policy = [] {
    int mode = -1;
    return syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 ? mode : -1;
  };
  const int before = policy();
  {
    const PreferNode prefer(0);
    if (before >= 0) CHECK_EQ(policy(), 1);  // MPOL_PREFERRED; some containers refuse both calls
  }
  CHECK_EQ(policy(), before);
}

TEST(memory_moves) {
  Buffer a(4 * kMega);
  a.data()[5] = 42;
  char* const data = a.data();
  Buffer b(std::move(a));
  CHECK(!a);
  CHECK_EQ(a.size(), 0u);
  CHECK(b.data() == data);
  Buffer c(100);
  c = std::move(b);
  CHECK(!b);
  CHECK_EQ(b.size(), 0u);
  CHECK_EQ(c.size(), 4 * kMega);
  CHECK_EQ(static_cast<int>(c.data()[5]), 42);
  Buffer& same = c;
  c = std::move(same);
  CHECK(c.data() == data);
}

TEST(memory_refuses_what_does_not_fit) {
  for (size_t bytes : {SIZE_MAX, SIZE_MAX / 2, size_t{1} << 60}) {
    bool refused = false;
    try {
      const Buffer buffer(bytes);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
}

TEST(memory_can_be_taken_and_given_back_many_times) {
  for (int i = 0; i < 2000; ++i) {
    const Buffer buffer(64 * kMega);  // 128 GB in all: a leak would show
    buffer.data()[0] = 1;
  }
}
