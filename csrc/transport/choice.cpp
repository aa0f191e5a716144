#include "choice.h"

#include "c10d.h"
#include "handshake.h"

#include <torch/library.h>

#include <map>
#include <mutex>
#include <tuple>

namespace deepsp {
namespace {

struct Choice {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::string use;
  Reach reach{};
  std::shared_ptr<Mapped> mapped = nullptr;
  std::shared_ptr<Staged> staged = nullptr;
};
using Chosen = std::shared_ptr<const Choice>;

using Key = std::tuple<const void*, c10::DeviceType, c10::DeviceIndex>;
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

Chosen find(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = choices().find(key);
  return found != choices().end() && !found->second->group.expired() ? found->second : nullptr;
}

Chosen choice_of(const Group& group, c10::Device device, std::optional<std::string_view> use) {
  const Key key(group.pg.get(), device.type(), device.is_cpu() ? 0 : device.index());
  if (Chosen found = find(key)) {
    return found;
  }
  sweep();
  const char* const word = std::getenv("DEEPSP_TRANSPORT");
  Choice made{
      c10::weak_intrusive_ptr<c10d::ProcessGroup>(intrusive(group.pg)),
      std::string(use.value_or(word ? word : "auto"))};
  if (device.is_cpu()) {
    auto [reach, peers] = map_peers(group, made.use);
    made.reach = std::move(reach);
    if (!peers.empty()) {
      made.mapped = std::make_shared<Mapped>(group, std::move(peers));
      pool_watch(made.mapped);
    }
  } else {
    std::tie(made.reach, made.staged) = stage_peers(group, made.use, device);
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
  TORCH_CHECK_VALUE(
      is_transport(use.value_or("auto")),
      "expected use to be \"auto\", \"mapped\" or \"messages\", got \"", *use, "\"");
  const bool possible = device.is_cpu() ? group.point_to_point : group.done_on_device;
  if (group.alone || !possible) {
    const char* const backend = device.is_cpu() ? "gloo" : "nccl";
    const std::string tensors = device.is_cpu() ? "CPU" : c10::DeviceTypeName(device.type());
    TORCH_CHECK_VALUE(
        group.alone || use != "mapped", "expected a group whose backend for ", tensors,
        " tensors is ", backend, ", since use is \"mapped\", got group '", group.name,
        "'; use \"auto\"");
    const Reach reach = Reach::none(
        size, group.alone ? "the group has one rank"
                          : "the group's backend for " + tensors + " tensors isn't " + backend);
    return {reach.machine, reach.why};
  }
  const Chosen found = choice_of(group, device, use);
  TORCH_CHECK_VALUE(
      use.value_or(found->use) == found->use, "expected use to be what group '", group.name,
      "' has used since its first exchange, got \"", *use,
      "\"; choose before that, or make a new group");
  return {found->reach.machine, found->reach.why};
}

}  // namespace

TORCH_LIBRARY_IMPL(deepsp, CompositeExplicitAutograd, m) {
  m.impl("_transport", transport);
  m.impl("_pool_clear", clear);
  m.impl("_pool_idle_bytes", idle_bytes);
  m.impl("_pool_limit", pool_limit);
  m.impl("_pool_set_limit", pool_set_limit);
}

}  // namespace deepsp
