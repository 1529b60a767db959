// Maps, aligns, advises and binds memory.
//
// The policy is "preferred", not "bind": with the latter a node that runs full invokes the OOM killer while other nodes
// have free memory, whereas a slice on the wrong node is merely slow.
#include "memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

namespace kt {
namespace {

size_t mapped_bytes(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + unit - 1) / unit * unit;
}

char* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

// mmap aligns to pages only: maps 2 MB more and unmaps both ends.
char* map_huge(size_t bytes) {
  char* p = map(bytes + kHugePage);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage,
               after = kHugePage - before;
  if (before) munmap(p, before);
  if (after) munmap(p + before + bytes, after);
  madvise(p + before, bytes, MADV_HUGEPAGE);  // a hint; kernels without it give small pages
  return p + before;
}

void prefer_node(char* data, size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr size_t bits = 8 * sizeof(unsigned long), words = 16;
  unsigned long mask[words] = {};
  const size_t n = static_cast<size_t>(node);
  if (n + 1 >= words * bits) return;  // the kernel reads one bit less than the length passed to it
  mask[n / bits] = 1ul << n % bits;
  syscall(SYS_mbind, data, bytes, kPreferred, mask, words * bits, 0);
}

}  // namespace

void populate(char* data, size_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes + page - 1) / page * page;
  if (bytes) madvise(reinterpret_cast<void*>(first), end - first, kPopulateWrite);
}

Buffer::Buffer(size_t bytes, int node) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const size_t length = mapped_bytes(bytes);
  data_ = bytes >= kHugePage ? map_huge(length) : map(length);
  if (node >= 0) prefer_node(data_, length, node);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, mapped_bytes(size_));
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));  // the old memory of this buffer is unmapped with it
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  return *this;
}

}  // namespace kt
