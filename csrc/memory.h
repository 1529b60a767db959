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

}  // namespace kt
