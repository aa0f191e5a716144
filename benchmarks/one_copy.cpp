// Compares ways of moving blocks between P processes of one machine, in an all-to-all.
//
// Rank r has a private input [S, H, D] of float32. It sends heads q*H/P .. (q+1)*H/P of all rows
// to each other rank q: S pieces of H/P*D floats, one from each matrix row of H*D floats. Rank q
// ends up with one contiguous block. A rank's own block is not moved. The methods:
//
//   w  write            The sender packs straight into a shared block. Whoever comes first to the
//                       pair provides it from its own shared memory: always one copy.
//   s  write or stage   As w if the receiver has posted its block. If not, the sender packs into a
//                       staging block of its own; the receiver copies it from there later.
//   p  pull             The sender always packs into its own shared block, the receiver copies it.
//   v  process_vm_readv The sender publishes the address of its private input, the receiver pulls
//                       the rows, the sender waits until all have: its input may not change before.
//
// Shared blocks are in a memfd, and w and s leave the data there. p and v receive into private
// memory. All memory is touched before the timing starts.
//
// Build: g++ -std=c++20 -O2 -pthread one_copy.cpp -o one_copy
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

constexpr int kMaxRanks = 4, kMethods = 4, kMinRepeats = 7;
constexpr size_t kRow = 16 * 64;  // H*D: floats in one matrix row
constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB, kPage = 4096, kMemoryLimit = 6144 * kMiB;
enum Method { kWrite, kStage, kPull, kReadv };
enum When { kTogether, kEarly, kLate };  // kEarly: receivers are early; kLate: they are late
const char* const kWhenNames[] = {"together", "receiver early", "receiver late"};

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "one_copy: %s: %s\n", what, strerror(errno));
  _exit(1);
}

char* map(size_t bytes, int flags, int fd) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED) fail("mmap");
  return static_cast<char*>(p);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// A word in shared memory, alone on its cache lines. It only ever grows.
struct alignas(128) Flag {
  std::atomic<uint32_t> value{0}, sleepers{0};
};

void set_flag(Flag& f, uint32_t value) {
  f.value.store(value);
  if (f.sleepers.load() != 0)
    syscall(SYS_futex, &f.value, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
}

// Waits until the flag is at least `least`; returns what it is then.
uint32_t wait_flag(Flag& f, uint32_t least) {
  uint32_t seen;
  for (int i = 0; i < 440; ++i) {
    if ((seen = f.value.load(std::memory_order_acquire)) >= least) return seen;
    if (i < 400) __builtin_ia32_pause();
    else sched_yield();
  }
  f.sleepers.fetch_add(1);
  while ((seen = f.value.load()) < least)
    syscall(SYS_futex, &f.value, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  f.sleepers.fetch_sub(1);
  return seen;
}

// What a pair's flag says, on top of 8 * the number of the exchange.
enum Phase : uint32_t {
  kPosted = 1,      // the receiver has provided its block
  kClaimed = 2,     // the sender came first and packs into its own block
  kInReceiver = 3,  // the data is in the receiver's block
  kInSender = 4,    // the data is in the sender's block
  kPublished = 5,   // the sender's input may be read
  kPulled = 6,      // the receiver has read it
};

// What all ranks of a case share, besides the blocks.
struct Control {
  Flag pair[kMaxRanks][kMaxRanks];  // [sender][receiver]
  Flag barrier;
  std::atomic<int> arrived{0};
  std::atomic<bool> stop{false}, readv_ok{true};
  std::atomic<uint64_t> sent{0}, staged{0};  // blocks of method s
  double seconds[kMaxRanks];                 // of the last exchange
  pid_t pid[kMaxRanks];
  const float* input[kMaxRanks];  // an address in the process of that rank
  int repeats;                    // the results, from rank 0
  double min_ms[kMethods], median_ms[kMethods];
};

struct Case {
  int ranks, cores;
  When when;
  size_t bytes;  // sent by one rank in total, before rounding to whole rows
  size_t piece() const { return kRow / ranks; }  // floats of a row that are for one rank
  size_t rows() const { return bytes / (piece() * sizeof(float) * (ranks - 1)); }
  size_t block() const { return rows() * piece() * sizeof(float); }
  size_t padded() const { return (block() + kPage - 1) / kPage * kPage; }
  size_t shared() const { return 2 * size_t(ranks) * ranks * padded(); }  // own blocks stay holes
  size_t memory() const {  // inputs, private outputs, receivers' blocks and senders' blocks
    return ranks * (rows() * kRow * sizeof(float) + 3 * (ranks - 1) * padded());
  }
};

class Rank {
 public:
  // Maps the blocks in this very process and touches those it will use, because the page tables
  // of shared memory are not inherited by a fork.
  Rank(const Case& c, Control* control, int fd, int rank) : c_(c), ctl_(control), rank_(rank) {
    shared_ = map(c.shared(), MAP_SHARED, fd);
    for (int i = 0; i < c.ranks; ++i)
      for (char* b : {receivers(rank, i), receivers(i, rank), senders(rank, i), senders(i, rank)})
        for (char* page = b; i != rank && page < b + c.padded(); page += kPage)
          *static_cast<volatile char*>(page) = 0;
    output_ = map(c.ranks * c.padded(), MAP_PRIVATE | MAP_ANONYMOUS, -1);
    const size_t n = c.rows() * kRow;
    input_ = reinterpret_cast<float*>(map(n * sizeof(float), MAP_PRIVATE | MAP_ANONYMOUS, -1));
    for (size_t i = 0; i < n; ++i) input_[i] = element(rank, i);
    ctl_->pid[rank] = getpid();
    ctl_->input[rank] = input_;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // the peers may read this process
    barrier();
    for (int peer = 0; peer < c.ranks; ++peer) {
      float x;
      iovec to{&x, sizeof x}, from{const_cast<float*>(ctl_->input[peer]), sizeof x};
      if (process_vm_readv(ctl_->pid[peer], &to, 1, &from, 1, 0) != sizeof x)
        ctl_->readv_ok = false;
    }
  }

  void run(double budget) {
    // Each method comes right after each other one equally often.
    constexpr int order[4][kMethods] = {{0, 1, 3, 2}, {1, 2, 0, 3}, {2, 3, 1, 0}, {3, 0, 2, 1}};
    std::vector<double> times[kMethods];
    double begin = 0;
    for (int round = 0;; ++round) {
      const bool first = round == 0;  // checked, not timed
      if (round == 1) begin = now();
      if (rank_ == 0 && round > kMinRepeats && now() - begin > budget) ctl_->stop = true;
      barrier();
      if (ctl_->stop) break;
      for (int m : order[round % 4]) {
        if (m == kReadv && !ctl_->readv_ok) continue;
        if (first) poison();
        barrier();
        const double start = now();
        exchange(Method(m));
        ctl_->seconds[rank_] = now() - start;
        if (first) check(Method(m));
        barrier();
        if (rank_ == 0 && !first)
          times[m].push_back(*std::max_element(ctl_->seconds, ctl_->seconds + c_.ranks));
      }
    }
    for (int m = 0; m < kMethods && !times[m].empty(); ++m) {
      const size_t n = times[m].size();
      std::sort(times[m].begin(), times[m].end());
      ctl_->repeats = int(n);
      ctl_->min_ms[m] = 1e3 * times[m][0];
      ctl_->median_ms[m] = 1e3 * (times[m][(n - 1) / 2] + times[m][n / 2]) / 2;
    }
  }

 private:
  static float element(int rank, size_t i) {
    return float((uint32_t(i) * 2654435761u + uint32_t(rank) * 2654478393u) >> 8);
  }
  // The pair's block in the memory of the receiver, and in that of the sender.
  char* receivers(int from, int to) { return shared_ + (to * c_.ranks + from) * c_.padded(); }
  char* senders(int from, int to) {
    return shared_ + c_.shared() / 2 + (from * c_.ranks + to) * c_.padded();
  }
  // Overwrites all that may hold a received block.
  void poison() {
    for (int i = 0; i < c_.ranks; ++i)
      for (char* b : {receivers(i, rank_), senders(rank_, i), output_ + i * c_.padded()})
        if (i != rank_) memset(b, 0xAB, c_.padded());
  }
  void barrier() {
    const uint32_t next = ctl_->barrier.value.load() + 1;
    if (ctl_->arrived.fetch_add(1) + 1 < c_.ranks) return void(wait_flag(ctl_->barrier, next));
    ctl_->arrived = 0;
    set_flag(ctl_->barrier, next);
  }
  void late_if(When when) const {
    const timespec t{0, 2'000'000};
    if (c_.when == when && rank_ == 0) nanosleep(&t, nullptr);
  }
  void pack(char* to, int peer) const {
    const size_t bytes = c_.piece() * sizeof(float);
    const float* from = input_ + peer * c_.piece();
    for (size_t i = 0; i < c_.rows(); ++i, from += kRow, to += bytes) memcpy(to, from, bytes);
  }
  void pull_rows(char* to, int peer) {
    const size_t bytes = c_.piece() * sizeof(float);
    const float* from = ctl_->input[peer] + rank_ * c_.piece();
    for (size_t left = c_.rows(); left > 0;) {
      const size_t n = std::min<size_t>(1024, left);
      for (size_t i = 0; i < n; ++i, from += kRow) rows_[i] = {const_cast<float*>(from), bytes};
      iovec local{to, n * bytes};
      if (process_vm_readv(ctl_->pid[peer], &local, 1, rows_, n, 0) != ssize_t(n * bytes))
        fail("process_vm_readv");
      left -= n;
      to += n * bytes;
    }
  }
  // One exchange: start (post, then pack or publish for all peers), then wait for all blocks.
  // Afterwards received_[q] is where the block from rank q lies.
  void exchange(Method method) {
    const int n = c_.ranks;
    const uint32_t base = 8 * ++exchange_;
    late_if(kLate);
    for (int k = 1; k < n && (method == kWrite || method == kStage); ++k) {
      auto& flag = ctl_->pair[(rank_ + n - k) % n][rank_].value;
      uint32_t seen = flag.load();  // post, unless the sender was first
      if (seen < base) flag.compare_exchange_strong(seen, base + kPosted);
    }
    late_if(kEarly);  // only rank 0's sending is late
    for (int k = 1; k < n; ++k) {
      const int to = (rank_ + k) % n;
      Flag& flag = ctl_->pair[rank_][to];
      if (method == kReadv) set_flag(flag, base + kPublished);
      if (method == kReadv) continue;
      // The sender's own block is used for p, and where the receiver has not posted.
      uint32_t seen = flag.value.load();
      const bool own = method == kPull || (seen < base &&
          flag.value.compare_exchange_strong(seen, base + kClaimed));
      pack(own ? senders(rank_, to) : receivers(rank_, to), to);
      set_flag(flag, base + (own ? kInSender : kInReceiver));
      if (method != kStage) continue;
      ctl_->sent.fetch_add(1, std::memory_order_relaxed);
      ctl_->staged.fetch_add(own, std::memory_order_relaxed);
    }
    for (int k = 1; k < n; ++k) {
      const int from = (rank_ + n - k) % n;
      Flag& flag = ctl_->pair[from][rank_];
      const uint32_t seen = wait_flag(flag, base + (method == kReadv ? kPublished : kInReceiver));
      const bool in_sender = seen == base + kInSender;
      char *const mine = receivers(from, rank_), *const theirs = senders(from, rank_);
      char* const output = output_ + from * c_.padded();
      received_[from] = method == kPull || method == kReadv ? output
                        : method == kWrite && in_sender     ? theirs : mine;
      if (method == kReadv) {
        pull_rows(output, from);
        set_flag(flag, base + kPulled);
      } else if (in_sender && method != kWrite) {
        memcpy(received_[from], theirs, c_.block());
      }
    }
    // The start of v is over only here. It cannot wait for this before it pulls, since the peers
    // would do the same and all would wait for ever.
    for (int k = 1; k < n && method == kReadv; ++k)
      wait_flag(ctl_->pair[rank_][(rank_ + k) % n], base + kPulled);
  }

  void check(Method method) const {
    for (int from = 0; from < c_.ranks; ++from) {
      const size_t piece = c_.piece(), n = from == rank_ ? 0 : c_.rows() * piece;
      const float* x = reinterpret_cast<const float*>(received_[from]);
      for (size_t i = 0; i < n; ++i)
        if (x[i] != element(from, i / piece * kRow + rank_ * piece + i % piece)) {
          fprintf(stderr, "wrong data, method %c, %d to %d\n", "wspv"[method], from, rank_);
          _exit(1);
        }
    }
  }

  const Case c_;
  Control* const ctl_;
  const int rank_;
  uint32_t exchange_ = 0;
  char *shared_, *output_;
  float* input_;
  char* received_[kMaxRanks] = {};
  iovec rows_[1024];
};

// Runs the ranks of a case as processes and prints its row. Rank r is bound to CPU number
// r % cores of `cpus`, or if `loose` to the first `cores` of them.
void run_case(const Case& c, const std::vector<int>& cpus, bool loose, double budget) {
  void* p = map(sizeof(Control), MAP_SHARED | MAP_ANONYMOUS, -1);
  const int fd = memfd_create("blocks", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(c.shared())) != 0) fail("shared memory");
  Control* ctl = new (p) Control{};
  fflush(stdout);
  for (int r = 0; r < c.ranks; ++r) {
    const pid_t child = fork();
    if (child < 0) fail("fork");
    if (child > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // ends with the parent, which ends when any rank fails
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < c.cores; ++i)
      if (loose || i == r % c.cores) CPU_SET(cpus[i], &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) fail("sched_setaffinity");
    Rank(c, ctl, fd, r).run(budget);
    _exit(0);
  }
  for (int r = 0, status = 0; r < c.ranks; ++r)
    if (wait(&status) < 0 || status != 0) fail("a rank failed");
  printf("| %d | %d | %s | %.4g | %d |", c.ranks, c.cores, kWhenNames[c.when],
         double(c.bytes) / kMiB, ctl->repeats);
  const double* t = ctl->median_ms;  // 0 for v where the system does not permit it
  for (int m = 0; m < kMethods; ++m) printf(" %.3f / %.3f |", ctl->min_ms[m], t[m]);
  for (int m = 1; m < kMethods; ++m) printf(" %.2f |", t[m] / t[kWrite]);
  printf(" %.0f%% |\n", 100.0 * double(ctl->staged) / double(ctl->sent));
  close(fd);
  munmap(p, sizeof(Control));
}

int main(int argc, char** argv) {
  double budget = 0.5;
  bool quick = false, loose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick") quick = true;
    else if (arg == "--loose") loose = true;
    else if (arg == "--seconds" && i + 1 < argc) budget = atof(argv[++i]);
    else {
      fputs("usage: one_copy [--seconds X] [--quick] [--loose]\n"
            "  --seconds X  for a case, all methods together (0.5); never fewer than 7 repeats\n"
            "  --quick      sizes up to 2 MiB and 0.02 s for a case: to check the data\n"
            "  --loose      let the ranks move between the cores, instead of one core each\n",
            arg == "--help" ? stdout : stderr);
      return arg == "--help" ? 0 : 2;
    }
  }
  if (quick) budget = std::min(budget, 0.02);
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) fail("sched_getaffinity");
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);

  puts("Milliseconds of one exchange on its slowest rank, min / median; ratios are of medians.\n"
       "MiB is what one rank sends in all. In \"receiver early\" rank 0 sleeps 2 ms after it has\n"
       "posted its blocks and before it packs or publishes, in \"receiver late\" before both; the\n"
       "sleep is in the times. \"s staged\": the blocks of s that took two copies.\n\n"
       "| P | cores | when | MiB | repeats | w write | s write or stage | p pull | v readv |"
       " s/w | p/w | v/w | s staged |\n|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
  for (int ranks : {2, 4})
    for (int cores : {1, 2})
      for (When when : {kTogether, kEarly, kLate})
        for (size_t bytes : {64 * kKiB, 512 * kKiB, 2 * kMiB, 16 * kMiB, 128 * kMiB, 512 * kMiB}) {
          const Case c{ranks, cores, when, bytes};
          if (when != kTogether && bytes != 512 * kKiB && bytes != 16 * kMiB) continue;
          if (cores > int(cpus.size()) || (quick && bytes > 2 * kMiB)) continue;
          if (c.memory() <= kMemoryLimit) run_case(c, cpus, loose, budget);
          else printf("| %d | %d | %s | %zu | over 6 GiB: skipped |\n", ranks, cores,
                      kWhenNames[when], bytes / kMiB);
        }
}
