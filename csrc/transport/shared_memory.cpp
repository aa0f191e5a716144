#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

namespace deepsp {

static constexpr uint64_t kMostAddresses = uint64_t(1) << 46;  // of 2^47 that a process has
static std::atomic<uint64_t> mapped_bytes{0};

void raise_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

int Descriptor::release() {
  return std::exchange(fd_, -1);
}

SharedMemory::SharedMemory(uint64_t bytes)
    : file_(memfd_create("deepsp", MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes_(bytes) {
  if (!file_) {
    raise_errno("memfd_create");
  }
  // Seal the size, so that no process can truncate a mapped file (SIGBUS).
  if (ftruncate(file_.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    raise_errno("memfd_create");
  }
  map();
}

SharedMemory::SharedMemory(Descriptor file) : file_(std::move(file)) {
  struct stat seen{};
  if (fstat(file_.get(), &seen) != 0) {
    raise_errno("fstat of a peer's memory");
  }
  bytes_ = static_cast<uint64_t>(seen.st_size);
  map();
}

void SharedMemory::map() {
  void* const mapped =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (mapped == MAP_FAILED) {
    raise_errno("mmap of shared memory");
  }
  data_ = static_cast<char*>(mapped);
  // A core dump would hold the whole mapping, written or not: the size of the machine's memory.
  if (madvise(data_, bytes_, MADV_DONTDUMP) != 0) {
    munmap(std::exchange(data_, nullptr), bytes_);
    raise_errno("madvise of shared memory");
  }
  mapped_bytes += bytes_;
  madvise(data_, bytes_, MADV_HUGEPAGE);  // if the system allows it for shared memory
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
    mapped_bytes -= bytes_;
  }
}

uint64_t SharedMemory::bytes_to_map(uint64_t all, int64_t ranks) {
  const uint64_t left = kMostAddresses - std::min<uint64_t>(mapped_bytes, kMostAddresses);
  return std::min(all, left / 4 / static_cast<uint64_t>(ranks));
}

bool SharedMemory::populate(uint64_t place, uint64_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  return madvise(data_ + place, bytes, MADV_POPULATE_WRITE) == 0 ||
         (errno != ENOMEM && errno != EHWPOISON);
#else
  return true;
#endif
}

void SharedMemory::punch(uint64_t place, uint64_t bytes) const {
  madvise(data_ + place, bytes, MADV_REMOVE);
}

std::optional<uint64_t> FreeRanges::take(uint64_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [begin, end] = *it;
    if (end - begin >= bytes) {
      free_.erase(it);
      if (end - begin > bytes) {
        free_.emplace(begin + bytes, end);
      }
      return begin;
    }
  }
  return std::nullopt;
}

void FreeRanges::give(uint64_t place, uint64_t bytes) {
  uint64_t end = place + bytes;
  auto next = free_.lower_bound(place);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->second == place) {
      before->second = end;
      return;
    }
  }
  free_.emplace(place, end);
}

}  // namespace deepsp
