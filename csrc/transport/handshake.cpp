#include "handshake.h"

#include "c10d.h"
#include "peer_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <stdexcept>

namespace deepsp {

bool is_transport(std::string_view use) {
  return use == "auto" || use == "mapped" || use == "messages";
}

Reach Reach::none(int64_t size, const std::string& why) {
  Reach reach{std::vector<int64_t>(size), std::vector<std::string>(size, why)};
  std::iota(reach.machine.begin(), reach.machine.end(), 0);
  return reach;
}

// ------------------------------------------------------------------- offers

namespace {

using Clock = std::chrono::steady_clock;

// All ranks have made their offers when one waits so long: a longer wait means that one failed.
constexpr std::chrono::milliseconds kMostWait{20000};
constexpr size_t kMostStrangers = 64;  // callers at a time, beside the group's ranks
constexpr uint64_t kLeastOffer = uint64_t(64) << 20;
constexpr const char* kMessages = "messages are asked for";

// What a rank tells the others before the handshakes.
struct Offer {
  Text<40> use;
  Text<160> host;     // machine_id()
  Text<160> machine;  // the same; empty: it offers no memory
  Text<40> process;   // process_word()
  Text<48> socket;    // the name that it listens on
  Text<32> secret;    // what a caller must send
  Text<240> why;      // why it offers none
};

// Ranks may share memory if they have the same: kernel, network namespace and user.
std::string machine_id() {
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) != 0) {
    raise_errno("/proc/self/ns/net");
  }
  std::string id = random_word("boot_id") + "/" + std::to_string(network.st_ino) + "/" +
                   std::to_string(geteuid());
  // For tests: ranks with different words count as on different machines.
  if (const char* other = std::getenv("DEEPSP_TEST_MACHINE")) {
    id += std::string("/") + other;
  }
  return id;
}

// Every rank's offer. ValueError unless all ranks ask for the same.
std::vector<Offer> gather_offers(const Group& group, const Offer& mine, c10::Device device) {
  const std::vector<Offer> offers = gather_structs(group, mine, device);
  const std::string first = offers[0].use.str();
  for (int64_t p = 0; p < group.size; ++p) {
    const std::string use = offers[p].use.str();
    TORCH_CHECK_VALUE(
        is_transport(use),
        "expected DEEPSP_TRANSPORT to be \"auto\", \"mapped\" or \"messages\", got \"", use,
        "\" on rank ", p, " of group '", group.name, "'; set it alike on every rank, or unset it");
  }
  for (int64_t p = 1; p < group.size; ++p) {
    const std::string use = offers[p].use.str();
    TORCH_CHECK_VALUE(
        use == first, "expected all ranks of group '", group.name,
        "' to use the same transport, got ", first, " on rank 0 and ", use, " on rank ", p,
        "; set DEEPSP_TRANSPORT, or the argument of deepsp.transport, alike on every rank");
  }
  return offers;
}

// The ranks of a machine reach each other, unless the handshakes of one of them failed.
Reach reach_of(const std::vector<Offer>& offers, const std::vector<Outcome>& outcomes) {
  const auto size = static_cast<int64_t>(offers.size());
  Reach reach = Reach::none(size, "");
  for (int64_t p = 0; p < size; ++p) {
    const std::string machine = offers[p].machine.str();
    if (machine.empty()) {
      reach.why[p] = offers[p].why.str();
    } else {
      int64_t first = p, others = 0;
      for (int64_t q = size - 1; q >= 0; --q) {
        if (offers[q].machine.str() == machine) {
          first = q;
          others += q != p;
          if (!outcomes[q].done) {
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
  }
  return reach;
}

// ValueError unless all ranks reach each other.
void check_mapped(const Group& group, const Reach& reach) {
  for (int64_t p = 0; p < group.size; ++p) {
    TORCH_CHECK_VALUE(
        reach.reaches(p, 0), "expected all ranks of group '", group.name,
        "' to reach each other's memory, since the transport is \"mapped\", but ranks 0 and ", p,
        " don't", reach.why[p].empty() ? std::string() : " (" + reach.why[p] + ")",
        "; use \"auto\", which sends messages where memory can't be reached");
  }
}

// ------------------------------------------------------------------- handshakes

// As much as the machine has, if addresses allow: the system allocates a page when it is first
// written.
uint64_t bytes_to_offer(int64_t ranks) {
  const int64_t all = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const uint64_t bytes = SharedMemory::bytes_to_map(static_cast<uint64_t>(all), ranks);
  if (bytes < kLeastOffer) {
    throw std::runtime_error("the memory of other groups takes this process's addresses");
  }
  return bytes / kPlaceUnit * kPlaceUnit;
}

// Exchanges handshakes with all ranks of this machine: calls those below this rank, and answers
// those above it.
class Handshakes {
 public:
  Handshakes(const Group& group, std::chrono::milliseconds timeout)
      : group_(group), timeout_(timeout), peers_(group.size), known_(group.size) {
    offer_.process = process_word();
    offer_.machine = machine_id();
    offer_.socket = "deepsp-" + random_word("uuid");
    offer_.secret = random_word("uuid");
    const auto backlog = static_cast<int>(std::min<int64_t>(group.size, 4096));
    listener_ = listen_on(offer_.socket.str(), backlog, timeout);
    memory_ = std::make_unique<SharedMemory>(bytes_to_offer(group.size));
  }

  const Offer& offer() const { return offer_; }

  void run(const std::vector<Offer>& offers) {
    const std::string machine = offer_.machine.str();
    std::vector<Descriptor> called(group_.size);
    std::vector<int64_t> above;
    for (int64_t p = 0; p < group_.size; ++p) {
      if (p == group_.rank || offers[p].machine.str() != machine) {
        continue;
      }
      known_[p] = find_connection(offers[p].process.str());
      if (p > group_.rank) {
        above.push_back(p);
      } else {
        called[p] = connect_to(offers[p].socket.str(), p, timeout_);
        send_handshake(called[p], p, offers[p]);
      }
    }
    answer_all(above, offers);
    for (int64_t p = 0; p < group_.rank; ++p) {
      if (called[p]) {
        auto answer = receive_handshake(called[p]);
        if (!answer || answer->secret != offer_.secret.str() || answer->rank != p) {
          throw std::runtime_error("rank " + std::to_string(p) + " doesn't answer");
        }
        add(std::move(*answer), std::move(called[p]), offers[p]);
      }
    }
  }

  // This rank's memory, too.
  Peers take_peers() {
    memory_->close_file();
    peers_[group_.rank] = std::make_unique<Peer>(Peer{std::move(memory_), {}});
    return std::move(peers_);
  }

 private:
  // Until all ranks above this one have called. Every process of the machine sees the socket's name
  // and may connect: a caller of another user, or one that sends anything else than a rank's
  // handshake, is dropped, and one that sends nothing delays no rank.
  void answer_all(const std::vector<int64_t>& above, const std::vector<Offer>& offers) {
    const auto deadline = Clock::now() + timeout_;
    std::vector<Descriptor> callers;  // that have sent nothing yet, the oldest first
    for (size_t answered = 0; answered < above.size();) {
      std::vector<pollfd> sockets{{listener_.get(), POLLIN, 0}};
      for (const Descriptor& caller : callers) {
        sockets.push_back({caller.get(), POLLIN, 0});
      }
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) {
        std::vector<int64_t> missing;
        std::copy_if(above.begin(), above.end(), std::back_inserter(missing), [&](int64_t p) {
          return peers_[p] == nullptr;
        });
        throw std::runtime_error(
            "no call came from " + list_ranks(missing) + " within " +
            std::to_string(timeout_.count()) + " ms");
      }
      if (poll(sockets.data(), sockets.size(), static_cast<int>(left.count())) < 0 &&
          errno != EINTR) {
        raise_errno("poll of a local socket");
      }
      std::vector<Descriptor> silent;
      for (size_t i = 0; i < callers.size(); ++i) {
        if (sockets[i + 1].revents == 0) {
          silent.push_back(std::move(callers[i]));
        } else if (auto handshake = receive_handshake(callers[i], MSG_DONTWAIT)) {
          answered += answer(std::move(*handshake), std::move(callers[i]), offers);
        }
      }
      callers = std::move(silent);
      if (sockets[0].revents != 0) {
        if (Descriptor caller = accept_from(listener_, timeout_)) {
          callers.push_back(std::move(caller));
        }
        if (callers.size() > static_cast<size_t>(group_.size) + kMostStrangers) {
          callers.erase(callers.begin());
        }
      }
    }
  }

  // Whether the caller is a rank above this one.
  bool answer(Handshake handshake, Descriptor caller, const std::vector<Offer>& offers) {
    const int64_t rank = handshake.rank;
    if (handshake.secret != offer_.secret.str() || rank <= group_.rank || rank >= group_.size ||
        peers_[rank] != nullptr) {
      return false;
    }
    send_handshake(caller, rank, offers[rank]);
    add(std::move(handshake), std::move(caller), offers[rank]);
    return true;
  }

  void send_handshake(const Descriptor& socket, int64_t p, const Offer& offer) const {
    const std::string known = known_[p] ? known_[p]->name : "";
    deepsp::send_handshake(socket, group_.rank, offer.secret.str(), known, memory_->file());
  }

  void add(Handshake handshake, Descriptor socket, const Offer& offer) {
    auto memory = std::make_unique<SharedMemory>(std::move(handshake.memory));
    memory->close_file();
    SharedConnection connection = std::move(known_[handshake.rank]);
    // If both ranks know the same one, both close this one; else both keep it. The caller names it.
    if (!connection || connection->name != handshake.connection) {
      const Offer& caller = handshake.rank > group_.rank ? offer : offer_;
      connection = use_connection(offer.process.str(), {std::move(socket), caller.secret.str()});
    }
    peers_[handshake.rank] = std::make_unique<Peer>(Peer{std::move(memory), std::move(connection)});
  }

  const Group& group_;
  std::chrono::milliseconds timeout_;
  Peers peers_;
  std::vector<SharedConnection> known_;  // by rank: an earlier one; null: none
  Descriptor listener_;
  std::unique_ptr<SharedMemory> memory_;
  Offer offer_{};
};

}  // namespace

std::pair<Reach, Peers> map_peers(const Group& group, const std::string& use) {
  const bool messages = use == "messages";
  std::optional<Handshakes> handshakes;
  Offer mine{};
  if (group.size > kMostMembers) {
    mine.why = "the group has more than " + std::to_string(kMostMembers) + " ranks";
  } else if (!messages) {
    const Outcome made = outcome_of(
        [&] { handshakes.emplace(group, std::min(timeout_of(group, at::kCPU), kMostWait)); });
    if (made.done) {
      mine = handshakes->offer();
    } else {
      mine.why = made.why;
    }
  }
  mine.use = use;
  outcome_of([&] { mine.host = machine_id(); });
  const std::vector<Offer> offers = gather_offers(group, mine, at::kCPU);
  pool_share(std::count_if(offers.begin(), offers.end(), [&](const Offer& offer) {
    return offer.host.str() == mine.host.str();
  }));
  if (messages) {
    return {Reach::none(group.size, kMessages), Peers()};
  }
  const Outcome outcome = outcome_of([&] {
    if (handshakes) {
      handshakes->run(offers);
    }
  });
  Reach reach = reach_of(offers, gather_structs(group, outcome));
  if (use == "mapped") {
    check_mapped(group, reach);
  }
  const bool shares = reach.why[group.rank].empty();
  return {std::move(reach), shares ? handshakes->take_peers() : Peers()};
}

#ifdef DEEPSP_CUDA
std::pair<Reach, std::shared_ptr<Staged>> stage_peers(
    const Group& group, const std::string& use, c10::Device device) {
  Offer mine{};
  mine.use = use;
  at::Tensor stage;
  if (use == "mapped") {
    const Outcome made = outcome_of([&] {
      stage = allocate_stage(device);
      mine.machine = machine_id();
    });
    mine.why = made.why;
  }
  const std::vector<Offer> offers = gather_offers(group, mine, device);
  if (use != "mapped") {
    return {
        Reach::none(
            group.size, use == "messages"
                            ? kMessages
                            : "GPUs write into each other's memory only where that is asked for, "
                              "by use=\"mapped\": it is new"),
        nullptr};
  }
  check_mapped(group, reach_of(offers, std::vector<Outcome>(group.size, {true, {}})));
  std::shared_ptr<Staged> staged;
  const Outcome outcome = outcome_of([&] { staged = make_staged(group, stage, device); });
  Reach reach = reach_of(offers, gather_structs(group, outcome, device));
  check_mapped(group, reach);
  return {std::move(reach), std::move(staged)};
}
#else
std::pair<Reach, std::shared_ptr<Staged>> stage_peers(
    const Group& group, const std::string&, c10::Device) {
  return {Reach::none(group.size, "deepsp was built without CUDA"), nullptr};
}
#endif

}  // namespace deepsp
