#include "mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>

namespace kt {

enum class Damage : uint8_t { none, lost, written };

// A handler may read an entry at any time, so entries are never freed, only used again.
struct Mapping {
  std::atomic<uintptr_t> begin{0}, end{0};  // both 0: unused
  std::atomic<Damage> damage{Damage::none};
  int file = -1;     // open as long as it is mapped
  std::string path;  // written while unused, as is the file
  Mapping* next = nullptr;
};

namespace {

std::atomic<Mapping*> mappings{nullptr};
std::mutex adding;
struct sigaction previous_bus, previous_segv;

Mapping* find(uintptr_t address) {
  for (Mapping* m = mappings.load(std::memory_order_acquire); m; m = m->next)
    if (address >= m->begin.load(std::memory_order_acquire) && address < m->end.load(std::memory_order_acquire))
      return m;
  return nullptr;
}

// Zeros from the page on to the end of the mapping.
bool map_zeros(const Mapping& mapping, uintptr_t page) {
  return mmap((void*)page, mapping.end.load() - page, PROT_READ,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

// A copy of one page that this process alone sees.
bool map_private(const Mapping& mapping, uintptr_t page, size_t bytes) {
  return mmap((void*)page, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, mapping.file,
              (off_t)(page - mapping.begin.load())) != MAP_FAILED;
}

// Only calls that are safe in a signal handler: atomics, and mmap, which is a bare system call.
void on_fault(int number, siginfo_t* info, void* context) {
  // Another handler that saw the fault first (faulthandler) raises the signal again, without the address; the access
  // itself faults once more when this one returns.
  if (info->si_code == SI_TKILL && info->si_pid == getpid()) return;
  const uintptr_t address = (uintptr_t)info->si_addr;
  const bool lost = number == SIGBUS, written = number == SIGSEGV && info->si_code == SEGV_ACCERR;
  Mapping* mapping = info->si_code > 0 && (lost || written) ? find(address) : nullptr;
  if (mapping) {
    const int saved = errno;
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t page = address & ~((uintptr_t)bytes - 1);
    const bool mapped = lost ? map_zeros(*mapping, page) : map_private(*mapping, page, bytes);
    mapping->damage.store(lost ? Damage::lost : Damage::written);
    errno = saved;
    if (mapped) return;
  }
  const struct sigaction& previous = lost ? previous_bus : previous_segv;
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(number);
  signal(number, SIG_DFL);  // the access faults again and ends the process, as without this handler
}

void install_handlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous_bus);
  sigaction(SIGSEGV, &action, &previous_segv);
}

Mapping* add(const char* data, size_t size, int file, const std::string& path) {
  const std::lock_guard lock(adding);
  static const bool installed = (install_handlers(), true);
  (void)installed;
  Mapping* m = mappings.load();
  while (m && m->end.load()) m = m->next;
  const bool fresh = !m;
  if (fresh) m = new Mapping;
  m->path = path;
  m->file = file;
  m->damage.store(Damage::none);
  m->begin.store((uintptr_t)data);
  m->end.store((uintptr_t)data + size);
  if (fresh) {
    m->next = mappings.load();
    mappings.store(m, std::memory_order_release);
  }
  return m;
}

[[noreturn]] void throw_errno(const std::string& path) {
  throw std::system_error(errno, std::generic_category(), path);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw_errno(path);
  struct stat status = {};
  if (fstat(file, &status)) {
    const int error = errno;
    close(file);
    throw std::system_error(error, std::generic_category(), path);
  }
  size_ = (size_t)status.st_size;
  void* data = size_ ? mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  if (data == MAP_FAILED) {
    const int error = size_ ? errno : ENODATA;
    close(file);
    throw std::system_error(error, std::generic_category(), path);
  }
  data_ = (const char*)data;
  mapping_ = add(data_, size_, file, path);
}

MappedFile::~MappedFile() {
  {
    const std::lock_guard lock(adding);
    close(mapping_->file);
    mapping_->end.store(0);
    mapping_->begin.store(0);
  }
  munmap((void*)data_, size_);
}

const Mapping* mapping_at(const void* address) { return find((uintptr_t)address); }

const std::string& path_of(const Mapping& mapping) { return mapping.path; }

void check_mapping(const Mapping* mapping) {
  const Damage damage = mapping ? mapping->damage.load() : Damage::none;
  if (damage == Damage::lost)
    throw DamagedFile(mapping->path +
                      ": given a file of which pages could not be read, expected it to stay as it was opened; it was "
                      "truncated or its disk fails: restore it and start again");
  if (damage == Damage::written)
    throw DamagedFile(mapping->path +
                      ": given mapped memory that this process has changed, expected the contents of the file; open it "
                      "again, and copy what is to be changed");
}

}  // namespace kt
