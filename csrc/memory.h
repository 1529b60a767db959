// Anonymous memory for weights and workspaces: 2 MB aligned, with huge pages requested, bound to a NUMA node on
// request.
//
// Binding uses the mbind system call directly (no libnuma); where the kernel refuses, the memory is allocated unbound.
// Less than 2 MB is allocated in small pages.
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

}  // namespace kt
