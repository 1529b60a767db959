// Anonymous memory for weights and workspaces: 2 MB aligned, with huge pages requested, bound to a NUMA node on
// request; and the NUMA node of pages that other code allocated, those of a mapped file for example.
//
// Binding uses system calls directly (no libnuma); where the kernel refuses, the memory stays where it is. Less than
// 2 MB is allocated in small pages.
#pragma once

#include <cstddef>

namespace kt {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, int node = -1);  // zero-filled lazily by the kernel; throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  char* data() const { return data_; }   // null for 0 bytes
  size_t size() const { return size_; }  // as requested
  explicit operator bool() const { return data_ != nullptr; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

constexpr size_t kHugePage = size_t{2} << 20;

// Maps and clears the pages of a range now, on the calling thread; otherwise the first write to each does. Several
// threads that first write to the same huge page each clear one, and all but one are thrown away: so a thread takes
// whole huge pages. A hint: kernels before Linux 5.14 leave it to the first write.
void populate(char* data, size_t bytes);

// Maps the pages of a range for reading now, on the calling thread; pages of a file are read if they are not cached.
void populate_read(const char* data, size_t bytes);

// While it exists, pages that the calling thread allocates are on `node` if that has room; -1: no change. This is the
// policy that pages of a file mapping follow: they belong to the page cache, which asks the thread that reads them in,
// and mbind() on a shared mapping of a file has no effect on it.
class PreferNode {
 public:
  explicit PreferNode(int node);
  ~PreferNode();
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;

 private:
  static constexpr size_t kWords = 16;  // 1024 nodes
  int mode_ = -1;                       // that it replaced; -1: none
  unsigned long mask_[kWords] = {};
};

// Moves pages that begin in the range and lie on another node to `node`; -1: none. Pages that other processes have
// mapped too stay where they are, as do pages that are not mapped by this process yet. mbind(MPOL_MF_MOVE) would do the
// same, but it splits the mapping at both ends of the range, and a process may have 65530 of them.
void move_to_node(const char* data, size_t bytes, int node);

}  // namespace kt
