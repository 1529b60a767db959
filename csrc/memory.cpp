// Maps, aligns, advises and binds memory.
//
// The policy is "preferred", not "bind": with the latter a node that runs full invokes the OOM killer while other nodes
// have free memory, whereas a slice on the wrong node is merely slow.
#include "memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

constexpr int kPreferred = 1;  // MPOL_PREFERRED
constexpr size_t kWordBits = 8 * sizeof(unsigned long);

// Sets the bit of the node; false where the mask is too short: the kernel reads one bit less than the length passed.
bool set_node(unsigned long* mask, size_t words, int node) {
  const size_t n = static_cast<size_t>(node);
  if (n + 1 >= words * kWordBits) return false;
  mask[n / kWordBits] = 1ul << n % kWordBits;
  return true;
}

void prefer_node(char* data, size_t bytes, int node) {
  constexpr size_t words = 16;
  unsigned long mask[words] = {};
  if (set_node(mask, words, node)) syscall(SYS_mbind, data, bytes, kPreferred, mask, words * kWordBits, 0);
}

uintptr_t page_bytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }

// Of every page that the range touches; whether the kernel knows the advice.
bool advise(const char* data, size_t bytes, int advice) {
  const uintptr_t page = page_bytes(), first = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes + page - 1) / page * page;
  return !bytes || madvise(reinterpret_cast<void*>(first), end - first, advice) == 0;
}

}  // namespace

void populate(char* data, size_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  advise(data, bytes, kPopulateWrite);
}

void populate_read(const char* data, size_t bytes) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14
  if (advise(data, bytes, kPopulateRead)) return;
  volatile char sink = 0;  // an older kernel, or a page that cannot be read: touch each
  for (size_t at = 0; at < bytes; at += page_bytes()) sink = data[at];
  if (bytes) sink = data[bytes - 1];
  (void)sink;
}

PreferNode::PreferNode(int node) {
  unsigned long mask[kWords] = {};
  if (node < 0 || !set_node(mask, kWords, node)) return;
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, mask_, kWords * kWordBits, nullptr, 0) != 0) return;
  if (syscall(SYS_set_mempolicy, kPreferred, mask, kWords * kWordBits) == 0) mode_ = mode;
}

PreferNode::~PreferNode() {
  if (mode_ >= 0) syscall(SYS_set_mempolicy, mode_, mask_, kWords * kWordBits);
}

void move_to_node(const char* data, size_t bytes, int node) {
  if (node < 0 || !bytes) return;
  constexpr size_t kBatch = 512;
  constexpr int kMove = 2;  // MPOL_MF_MOVE
  const uintptr_t page = page_bytes(), begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + bytes;
  void* pages[kBatch];
  int status[kBatch], nodes[kBatch];
  for (uintptr_t at = begin; at < end;) {
    size_t count = 0;
    for (; count < kBatch && at < end; at += page) pages[count++] = reinterpret_cast<void*>(at);
    if (syscall(SYS_move_pages, 0, count, pages, nullptr, status, 0) != 0) return;  // asks where they are
    size_t elsewhere = 0;
    for (size_t i = 0; i < count; ++i)
      if (status[i] >= 0 && status[i] != node) pages[elsewhere++] = pages[i];
    std::fill_n(nodes, elsewhere, node);
    if (elsewhere && syscall(SYS_move_pages, 0, elsewhere, pages, nodes, status, kMove) < 0) return;
  }
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
