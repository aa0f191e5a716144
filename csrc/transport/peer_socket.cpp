#include "peer_socket.h"

#include "../common/drop_if.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace deepsp {
namespace {

// A handshake as it is sent; its file is sent beside it.
struct Message {
  int64_t rank;
  char secret[32];
  char connection[32];
};

Descriptor new_socket() {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!made) {
    raise_errno("socket");
  }
  return made;
}

// Calls bind or connect.
int with_address(
    int (*call)(int, const sockaddr*, socklen_t),
    const Descriptor& socket,
    const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return call(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
}

void set_timeout(const Descriptor& socket, std::chrono::milliseconds timeout) {
  const timeval time{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  if (setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) != 0 ||
      setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) != 0) {
    raise_errno("setsockopt");
  }
}

bool is_same_user(const Descriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    raise_errno("SO_PEERCRED");
  }
  return peer.uid == geteuid();
}

// A message with room for one file: any more would be a second one.
struct Envelope {
  iovec content;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  explicit Envelope(Message* message) : content{message, sizeof(*message)} {
    header.msg_iov = &content;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = CMSG_LEN(sizeof(int));
  }
};

}  // namespace

Descriptor listen_on(const std::string& name, int backlog, std::chrono::milliseconds timeout) {
  Descriptor listener = new_socket();
  if (with_address(&bind, listener, name) != 0 || listen(listener.get(), backlog) != 0) {
    raise_errno("bind of a local socket");
  }
  set_timeout(listener, timeout);
  return listener;
}

Descriptor connect_to(const std::string& name, int64_t rank, std::chrono::milliseconds timeout) {
  Descriptor socket = new_socket();
  set_timeout(socket, timeout);
  if (with_address(&connect, socket, name) != 0) {
    raise_errno(("connect to rank " + std::to_string(rank)).c_str());
  }
  if (!is_same_user(socket)) {
    throw std::runtime_error("another user answers on its socket");
  }
  return socket;
}

Descriptor accept_from(const Descriptor& listener, std::chrono::milliseconds timeout) {
  Descriptor caller(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!caller) {
    if (errno != ECONNABORTED && errno != EINTR && errno != EAGAIN) {
      raise_errno("accept of a peer");
    }
  } else if (is_same_user(caller)) {
    set_timeout(caller, timeout);
    return caller;
  }
  return {};
}

void send_handshake(
    const Descriptor& socket,
    int64_t rank,
    const std::string& secret,
    const std::string& connection,
    int memory) {
  Message message{rank, {}, {}};
  secret.copy(message.secret, sizeof(message.secret) - 1);
  connection.copy(message.connection, sizeof(message.connection) - 1);
  Envelope envelope(&message);
  cmsghdr* const header = CMSG_FIRSTHDR(&envelope.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory, sizeof(int));
  if (sendmsg(socket.get(), &envelope.header, MSG_NOSIGNAL) != sizeof(message)) {
    raise_errno("sendmsg to a peer");
  }
}

std::optional<Handshake> receive_handshake(const Descriptor& socket, int flags) {
  Message message{};
  Envelope envelope(&message);
  const ssize_t got = recvmsg(socket.get(), &envelope.header, MSG_CMSG_CLOEXEC | flags);
  if (got < 0) {
    return std::nullopt;
  }
  cmsghdr* const header = CMSG_FIRSTHDR(&envelope.header);
  int file = -1;
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&file, CMSG_DATA(header), sizeof(int));
  }
  Descriptor memory(file);
  if (got != sizeof(message) || !memory ||
      (envelope.header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return std::nullopt;
  }
  const auto word = [](const char (&text)[32]) { return std::string(text, strnlen(text, 32)); };
  return Handshake{message.rank, word(message.secret), word(message.connection), std::move(memory)};
}

std::string random_word(const std::string& name) {
  std::string word;
  if (!std::getline(std::ifstream("/proc/sys/kernel/random/" + name), word)) {
    throw std::runtime_error("expected /proc to be mounted, got no /proc/sys/kernel/random");
  }
  return word;
}

static std::mutex mutex;
static std::multimap<std::string, std::weak_ptr<const Connection>> used;  // by process

bool Connection::is_closed() const {
  pollfd polled{socket.get(), POLLIN | POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0 && (polled.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

std::string process_word() {
  static std::pair<pid_t, std::string> word;  // a forked child needs another one
  std::lock_guard<std::mutex> lock(mutex);
  if (word.first != getpid()) {
    word = {getpid(), random_word("uuid")};
  }
  return word.second;
}

SharedConnection find_connection(const std::string& process) {
  std::lock_guard<std::mutex> lock(mutex);
  drop_if(used, [](const auto& connection) { return connection.expired(); });
  for (auto [it, end] = used.equal_range(process); it != end; ++it) {
    if (SharedConnection found = it->second.lock(); found && !found->is_closed()) {
      return found;
    }
  }
  return nullptr;
}

SharedConnection use_connection(const std::string& process, Connection made) {
  std::lock_guard<std::mutex> lock(mutex);
  auto connection = std::make_shared<const Connection>(std::move(made));
  used.emplace(process, connection);
  return connection;
}

}  // namespace deepsp
