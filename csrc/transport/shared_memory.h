#pragma once
// Memory that other processes of this machine can map: an anonymous file, which is gone when the
// last process that has it mapped ends, however it ends. It uses no torch.

#include <cstdint>
#include <map>
#include <optional>

namespace deepsp {

// A file descriptor, closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int get() const { return fd_; }
  int release();
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// std::system_error with the text of errno.
[[noreturn]] void raise_errno(const char* what);

// A whole file of memory, mapped. Errors are std::system_error.
class SharedMemory {
 public:
  // New memory. The system allocates a page when it is first written.
  explicit SharedMemory(uint64_t bytes);
  // Another process's.
  explicit SharedMemory(Descriptor file);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // How much of `all`, which the machine has, one rank of a group offers to the others: so much
  // that the memory of all its ranks takes at most a quarter of the addresses that are left to this
  // process's groups.
  static uint64_t bytes_to_map(uint64_t all, int64_t ranks);

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  int file() const { return file_.get(); }
  // No further process can map it through this one.
  void close_file() { file_ = Descriptor(); }
  // Faults these pages in, at a fraction of what touching them one by one costs. False: the system
  // has no memory left.
  bool populate(uint64_t place, uint64_t bytes) const;
  // Frees these pages in all processes: they read as zeros.
  void punch(uint64_t place, uint64_t bytes) const;

 private:
  void map();

  Descriptor file_;
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// The free parts of a range of places: first fit.
class FreeRanges {
 public:
  FreeRanges(uint64_t begin, uint64_t end) : free_{{begin, end}} {}

  // None if no free range is as long.
  std::optional<uint64_t> take(uint64_t bytes);
  void give(uint64_t place, uint64_t bytes);

 private:
  std::map<uint64_t, uint64_t> free_;  // begin to end; no two touch
};

}  // namespace deepsp
