#include "choice.h"

#include "c10d.h"
#include "handshake.h"

#include <torch/library.h>

#include <map>
#include <mutex>
#include <utility>

namespace deepsp {
namespace {

struct Choice {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  Wanted wanted;
  Reach reach;
  std::shared_ptr<Mapped> mapped;
  std::shared_ptr<Staged> staged;
};
using Chosen = std::shared_ptr<const Choice>;

using Key = std::pair<const void*, c10::DeviceType>;
std::mutex mutex;
std::map<Key, Chosen>& choices() {
  static auto* const all = new std::map<Key, Chosen>;
  return *all;
}

// Closes the shared memory of groups that are gone.
void sweep() {
  std::vector<Chosen> gone;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = choices().begin(); it != choices().end();) {
      if (it->second->group.expired()) {
        gone.push_back(std::move(it->second));
        it = choices().erase(it);
      } else {
        ++it;
      }
    }
  }
  for (const Chosen& choice : gone) {
    if (choice->mapped) {
      choice->mapped->close();
    }
  }
}

#ifdef DEEPSP_CUDA
struct GpuOffer {
  Request request;
  Text<160> machine;
  Outcome allocated;
};

// All ranks of the group call this. ValueError on every rank if they want different things, or if
// they want memory that they don't reach.
void choose_for_gpus(const Group& group, const Request& request, c10::Device device, Choice& made) {
  GpuOffer mine{request, {}, {}};
  at::Tensor stage;
  if (request.wanted == Wanted::mapped) {
    mine.allocated = outcome_of([&] {
      mine.machine = machine_id();
      stage = allocate_stage(device);
    });
  }
  const std::vector<GpuOffer> offers = gather_structs(group, mine, device);
  check_requests(group, [&](int64_t p) -> const Request& { return offers[p].request; });
  if (request.wanted != Wanted::mapped) {
    const bool messages = request.wanted == Wanted::messages;
    made.reach = Reach::nobody(
        group.size, messages ? "messages are asked for"
                             : "GPUs write into each other's memory only where that is asked for, "
                               "by use=\"mapped\": it is new");
    return;
  }
  const auto check = [&](int64_t p, bool reaches, const std::string& why) {
    TORCH_CHECK_VALUE(
        reaches, "expected all ranks of group '", group.name,
        "' to reach each other's memory, since the transport is \"mapped\", but rank ", p,
        " doesn't (", why, "); use \"auto\" or \"messages\"");
  };
  for (int64_t p = 0; p < group.size; ++p) {
    check(p, offers[p].allocated.done, offers[p].allocated.why.str());
    check(
        p, offers[p].machine.str() == offers[0].machine.str(),
        "it runs on another machine than rank 0");
  }
  const Outcome outcome = outcome_of([&] { made.staged = make_staged(group, stage, device); });
  const std::vector<Outcome> outcomes = gather_structs(group, outcome, device);
  for (int64_t p = 0; p < group.size; ++p) {
    check(p, outcomes[p].done, outcomes[p].why.str());
  }
  made.reach = {std::vector<int64_t>(group.size, 0), std::vector<std::string>(group.size)};
}
#else
void choose_for_gpus(const Group& group, const Request&, c10::Device, Choice& made) {
  made.reach = Reach::nobody(group.size, "deepsp was built without CUDA");
}
#endif

Chosen find(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = choices().find(key);
  return found != choices().end() && !found->second->group.expired() ? found->second : nullptr;
}

Chosen choice_of(const Group& group, c10::Device device, std::optional<Wanted> wanted) {
  const Key key(group.pg.get(), device.type());
  if (Chosen found = find(key)) {
    return found;
  }
  sweep();
  const Request request = request_of(wanted);
  Choice made{
      c10::weak_intrusive_ptr<c10d::ProcessGroup>(intrusive(group.pg)),
      request.wanted,
      {},
      nullptr,
      nullptr};
  if (device.is_cpu()) {
    auto [reach, peers] = map_peers(group, request, timeout_of(group, device));
    made.reach = std::move(reach);
    if (!peers.empty()) {
      made.mapped = std::make_shared<Mapped>(group, std::move(peers));
      pool_watch(made.mapped);
    }
  } else {
    choose_for_gpus(group, request, device, made);
  }
  std::lock_guard<std::mutex> lock(mutex);
  return choices().emplace(key, std::make_shared<const Choice>(std::move(made))).first->second;
}

}  // namespace

std::shared_ptr<Mapped> mapped_of(const Group& group) {
  return group.point_to_point && !group.alone ? choice_of(group, at::kCPU, std::nullopt)->mapped
                                              : nullptr;
}

std::shared_ptr<Staged> staged_of(const Group& group, c10::Device device) {
  // A graph replays the kernels, not the count of exchanges; and ranks can't agree during a
  // capture.
  return group.done_on_device && !group.alone && !capturing(device)
             ? choice_of(group, device, std::nullopt)->staged
             : nullptr;
}

namespace {

void clear() {
  sweep();
  pool_clear();
}

int64_t idle_bytes() {
  pool_trim();
  return pool_idle_bytes();
}

// For each rank: the lowest rank it shares memory with, and the reason if it shares none.
std::tuple<std::vector<int64_t>, std::vector<std::string>> transport(
    int64_t rank,
    int64_t size,
    std::string_view group_name,
    std::optional<std::string_view> use,
    at::Device device) {
  const Group group = resolve_group("transport", group_name, rank, size, device);
  std::optional<Wanted> wanted;
  if (use.has_value()) {
    wanted = parse_wanted(std::string(*use), "use");
  }
  const bool possible = device.is_cpu() ? group.point_to_point : group.done_on_device;
  if (group.alone || !possible) {
    const char* const backend = device.is_cpu() ? "gloo" : "nccl";
    const std::string tensors = device.is_cpu() ? "CPU" : c10::DeviceTypeName(device.type());
    TORCH_CHECK_VALUE(
        group.alone || wanted != Wanted::mapped, "expected a group whose backend for ", tensors,
        " tensors is ", backend, ", since use is \"mapped\", got group '", group.name,
        "'; use \"auto\"");
    const Reach reach = Reach::nobody(
        size, group.alone ? "the group has one rank"
                          : "the group's backend for " + tensors + " tensors isn't " + backend);
    return {reach.machine, reach.why};
  }
  const Chosen found = choice_of(group, device, wanted);
  TORCH_CHECK_VALUE(
      !wanted.has_value() || *wanted == found->wanted, "expected use to be what group '",
      group.name, "' has used since its first exchange, got \"", use.value_or(""),
      "\"; choose before that, or make a new group");
  return {found->reach.machine, found->reach.why};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("transport", transport);
  m.impl("pool_clear", clear);
  m.impl("pool_idle_bytes", idle_bytes);
}

}  // namespace deepsp
