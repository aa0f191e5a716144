#include "connect.h"

#include "board.h"
#include "errors.h"

#include <c10/util/Exception.h>

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <system_error>

namespace deepsp {
namespace {

// Ranks that have all said that they come: longer means that one of them failed.
constexpr std::chrono::milliseconds kMeeting{20000};
constexpr size_t kMostStrangers = 64;  // that are connected at a time, beside the group's ranks
constexpr int64_t kMostAddresses = int64_t(1) << 45;  // of 2^47 that a process has

// What a rank says of itself.
struct Offer {
  Request request;
  Text<160> machine;  // empty: it has no memory to offer
  Text<48> socket;    // the name that it listens on
  Text<32> secret;    // what those who call it must know
  Text<240> why;      // why it has none
};

std::string random_word() {
  std::array<unsigned char, 12> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  std::string word;
  for (const unsigned char byte : bytes) {
    word += "0123456789abcdef"[byte >> 4];
    word += "0123456789abcdef"[byte & 15];
  }
  return word;
}

// As much as the machine has: pages come into being when they are used.
uint64_t bytes_to_offer(int64_t ranks) {
  const int64_t all = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const int64_t most = std::min(all, kMostAddresses / ranks);
  return static_cast<uint64_t>(most) / kPlaceUnit * kPlaceUnit;
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Abstract: it begins with a zero byte, and stands in no folder.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

Descriptor new_socket() {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!made) {
    fail("socket");
  }
  return made;
}

void set_timeout(const Descriptor& socket, std::chrono::milliseconds timeout) {
  const timeval time{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  if (setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) != 0 ||
      setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) != 0) {
    fail("setsockopt");
  }
}

bool is_same_user(const Descriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    fail("SO_PEERCRED");
  }
  return peer.uid == geteuid();
}

struct Hello {
  int64_t rank;
  Text<32> secret;
};

// A hello, with the sender's memory.
void send_hello(const Descriptor& socket, const Hello& hello, int file) {
  iovec content{const_cast<Hello*>(&hello), sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &file, sizeof(int));
  if (sendmsg(socket.get(), &message, MSG_NOSIGNAL) != sizeof(hello)) {
    fail("sendmsg to a peer");
  }
}

struct Greeting {
  Hello hello;
  Descriptor memory;
};

// None if something else than a hello with memory came: any process may have sent that.
std::optional<Greeting> receive_hello(const Descriptor& socket, int flags = 0) {
  Hello hello{};
  iovec content{&hello, sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int));  // one file: the padding would hold a second one
  const ssize_t got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | flags);
  if (got < 0) {
    return std::nullopt;
  }
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  int file = -1;
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&file, CMSG_DATA(header), sizeof(int));
  }
  Descriptor memory(file);
  if (got != sizeof(hello) || !memory || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return std::nullopt;
  }
  return Greeting{hello, std::move(memory)};
}

// Meets all ranks of this machine. Those above it call this rank, it calls those below it.
class Meeting {
 public:
  Meeting(const Group& group, std::chrono::milliseconds timeout)
      : group_(group), timeout_(timeout), listener_(new_socket()) {
    offer_.machine = machine_word();
    offer_.socket = "deepsp-" + random_word();
    offer_.secret = random_word();
    socklen_t length = 0;
    const sockaddr_un address = address_of(offer_.socket.str(), length);
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener_.get(), static_cast<int>(std::min<int64_t>(group.size, 4096))) != 0) {
      fail("bind of a local socket");
    }
    set_timeout(listener_, timeout);
    memory_ = std::make_unique<SharedMemory>(bytes_to_offer(group.size));
  }

  const Offer& offer() const { return offer_; }

  void meet(const std::vector<Offer>& offers, Connection& result) {
    const std::string machine = offer_.machine.str();
    std::vector<int64_t> below, above;
    for (int64_t p = 0; p < group_.size; ++p) {
      if (p != group_.rank && offers[p].machine.str() == machine) {
        (p < group_.rank ? below : above).push_back(p);
      }
    }
    if (below.empty() && above.empty()) {
      return;
    }
    result.memory = std::move(memory_);
    const int file = result.memory->file();
    std::vector<Descriptor> called(group_.size);
    for (const int64_t p : below) {
      called[p] = new_socket();
      set_timeout(called[p], timeout_);
      socklen_t length = 0;
      const sockaddr_un address = address_of(offers[p].socket.str(), length);
      if (::connect(called[p].get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        fail(("connect to rank " + std::to_string(p)).c_str());
      }
      if (!is_same_user(called[p])) {
        throw std::runtime_error("another user answers on its socket");
      }
      send_hello(called[p], {group_.rank, offers[p].secret}, file);
    }
    serve(above, offers, file, result);
    for (const int64_t p : below) {
      std::optional<Greeting> answer = receive_hello(called[p]);
      if (!answer || answer->hello.secret.str() != offer_.secret.str() || answer->hello.rank != p) {
        throw std::runtime_error("rank " + std::to_string(p) + " doesn't answer");
      }
      add(p, std::move(answer->memory), std::move(called[p]), result);
    }
  }

 private:
  // Until all ranks above this one have called. Every process of the machine sees the socket's name
  // and may connect: a caller of another user, or one that says something else than a rank's hello,
  // is dropped, and one that says nothing keeps nobody waiting.
  void serve(
      const std::vector<int64_t>& above,
      const std::vector<Offer>& offers,
      int file,
      Connection& result) {
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    std::vector<Descriptor> callers;  // that have said nothing yet, the oldest first
    for (size_t met = 0; met < above.size();) {
      std::vector<pollfd> sockets{{listener_.get(), POLLIN, 0}};
      for (const Descriptor& caller : callers) {
        sockets.push_back({caller.get(), POLLIN, 0});
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) {
        throw std::runtime_error(
            not_met(above, result) + " within " + std::to_string(timeout_.count()) + " ms");
      }
      if (poll(sockets.data(), sockets.size(), static_cast<int>(left.count())) < 0 &&
          errno != EINTR) {
        fail("poll of a local socket");
      }
      std::vector<Descriptor> silent;
      for (size_t i = 0; i < callers.size(); ++i) {
        if (sockets[i + 1].revents == 0) {
          silent.push_back(std::move(callers[i]));
        } else if (std::optional<Greeting> greeting = receive_hello(callers[i], MSG_DONTWAIT)) {
          met += answer(std::move(callers[i]), std::move(*greeting), offers, file, result);
        }
      }
      callers = std::move(silent);
      if (sockets[0].revents != 0) {
        accept(callers);
      }
    }
  }

  void accept(std::vector<Descriptor>& callers) const {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller) {
      if (errno != ECONNABORTED && errno != EINTR && errno != EAGAIN) {
        fail("accept of the ranks above this one");
      }
    } else if (is_same_user(caller)) {
      set_timeout(caller, timeout_);
      callers.push_back(std::move(caller));
      if (callers.size() > static_cast<size_t>(group_.size) + kMostStrangers) {
        callers.erase(callers.begin());
      }
    }
  }

  // Whether the caller is a rank above this one.
  bool answer(
      Descriptor caller,
      Greeting greeting,
      const std::vector<Offer>& offers,
      int file,
      Connection& result) const {
    const int64_t rank = greeting.hello.rank;
    if (greeting.hello.secret.str() != offer_.secret.str() || rank <= group_.rank ||
        rank >= group_.size || result.neighbors[rank] != nullptr) {
      return false;
    }
    send_hello(caller, {group_.rank, offers[rank].secret}, file);
    add(rank, std::move(greeting.memory), std::move(caller), result);
    return true;
  }

  static std::string not_met(const std::vector<int64_t>& above, const Connection& result) {
    std::vector<int64_t> missing;
    std::copy_if(above.begin(), above.end(), std::back_inserter(missing), [&](int64_t p) {
      return result.neighbors[p] == nullptr;
    });
    return "no call came from " + names_of(missing);
  }

  static void add(int64_t rank, Descriptor memory, Descriptor socket, Connection& result) {
    auto neighbor = std::make_unique<Neighbor>();
    neighbor->memory = std::make_unique<SharedMemory>(std::move(memory));
    neighbor->memory->close_file();
    neighbor->socket = std::move(socket);
    result.neighbors[rank] = std::move(neighbor);
  }

  const Group& group_;
  std::chrono::milliseconds timeout_;
  Descriptor listener_;
  std::unique_ptr<SharedMemory> memory_;
  Offer offer_{};
};

// Ranks of one machine that all reach each other; where one of them failed, none does.
Reach reach_of(
    const Group& group, const std::vector<Offer>& offers, const std::vector<Outcome>& outcomes) {
  Reach reach{{}, std::vector<std::string>(group.size)};
  for (int64_t p = 0; p < group.size; ++p) {
    reach.machine.push_back(p);
    if (offers[p].request.wanted == Wanted::messages) {
      reach.why[p] = "messages are asked for";
      continue;
    }
    const std::string machine = offers[p].machine.str();
    if (machine.empty()) {
      reach.why[p] = offers[p].why.str();
      continue;
    }
    int64_t first = -1, others = 0;
    for (int64_t q = 0; q < group.size; ++q) {
      if (offers[q].machine.str() == machine) {
        first = first < 0 ? q : first;
        others += q != p;
        if (!outcomes[q].done && reach.why[p].empty()) {
          reach.why[p] = "rank " + std::to_string(q) + ": " + outcomes[q].why.str();
        }
      }
    }
    if (others == 0) {
      reach.why[p] = "no other rank of the group runs on its machine";
    } else if (reach.why[p].empty()) {
      reach.machine[p] = first;
    }
  }
  return reach;
}

// ValueError unless everybody reaches everybody.
void check_mapped(const Group& group, const Reach& reach) {
  for (int64_t p = 0; p < group.size; ++p) {
    TORCH_CHECK_VALUE(
        reach.reaches(p, 0), "expected all ranks of group '", group.name,
        "' to reach each other's memory, since the transport is \"mapped\", but ranks 0 and ", p,
        " don't", reach.why[p].empty() ? std::string() : " (" + reach.why[p] + ")",
        "; use \"auto\", which sends messages where memory can't be reached");
  }
}

}  // namespace

Connection connect(const Group& group, const Request& request, std::chrono::milliseconds timeout) {
  const Wanted wanted = request.wanted;
  Connection result;
  result.neighbors.resize(group.size);
  std::unique_ptr<Meeting> meeting;
  Offer mine{};
  if (wanted != Wanted::messages && group.size <= kMostMembers) {
    const Outcome made = outcome_of(
        [&] { meeting = std::make_unique<Meeting>(group, std::min(timeout, kMeeting)); });
    if (made.done) {
      mine = meeting->offer();
    } else {
      mine.why = made.why;
    }
  }
  mine.request = request;
  const std::vector<Offer> offers = all_say(group, mine);
  check_requests(group, [&](int64_t p) -> const Request& { return offers[p].request; });
  std::vector<Outcome> outcomes(group.size, {true, {}});
  if (wanted != Wanted::messages) {
    outcomes = all_say(group, outcome_of([&] {
                         if (meeting) {
                           meeting->meet(offers, result);
                         }
                       }));
  }
  result.reach = reach_of(group, offers, outcomes);
  if (wanted == Wanted::mapped) {
    check_mapped(group, result.reach);
  }
  for (int64_t p = 0; p < group.size; ++p) {
    if (!result.reach.reaches(group.rank, p)) {
      result.neighbors[p].reset();
    }
  }
  if (!result.reach.why[group.rank].empty()) {
    result.memory.reset();
  }
  if (result.memory) {
    result.memory->close_file();
  }
  return result;
}

bool has_left(const Neighbor& neighbor) {
  pollfd socket{neighbor.socket.get(), POLLIN | POLLRDHUP, 0};
  return poll(&socket, 1, 0) > 0 && (socket.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

}  // namespace deepsp
