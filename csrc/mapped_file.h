// Files mapped read-only, and what happens when their pages are lost or written.
//
// A file that another program truncates, or a disk that cannot be read, makes an access to the mapping fault with
// SIGBUS, which ends the process. The handler here knows our mappings: it marks the mapping as damaged and maps zeros
// in place of the rest of it, so that the access goes on; the call that read them checks the mark when it has finished
// and throws, as does every later call. A write to a mapping, which torch cannot refuse, is a SIGSEGV: it goes to a
// private copy of the page, the file stays as it is, and the next call throws. Signals anywhere else go to the handler
// that was there before.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace kt {

// Of a file whose contents are not what was stored: shorter, unreadable, changed in memory, or with a wrong checksum.
struct DamagedFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Mapping;  // an entry of the table that the handler reads

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // all of it; throws std::system_error
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
  Mapping* mapping_ = nullptr;
};

// The mapping that holds this address, or null; valid while the MappedFile is.
const Mapping* mapping_at(const void* address);
const std::string& path_of(const Mapping& mapping);
void check_mapping(
    const Mapping* mapping);  // throws DamagedFile if pages of it were lost or written; null: nothing to check

}  // namespace kt
