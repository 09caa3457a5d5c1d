#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace stitch_reliability {

// A T that this process shares with all that it forks later. It is unmapped by the destructor and
// not destroyed: T needs no destructor. Thread contract: as T.
template <class T>
class SharedMemory {
 public:
  SharedMemory()
      : memory_(
            ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED)
      throw std::system_error(errno, std::generic_category(), "cannot map shared memory");
    new (memory_) T();
  }
  ~SharedMemory() { ::munmap(memory_, sizeof(T)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  T* operator->() const { return static_cast<T*>(memory_); }
  T& operator*() const { return *static_cast<T*>(memory_); }

 private:
  void* const memory_;
};

}  // namespace stitch_reliability
