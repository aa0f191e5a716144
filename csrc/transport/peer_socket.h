#pragma once
// Local sockets over which two processes of one user send each other files of memory. It uses no
// torch.

#include "shared_memory.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace deepsp {

// A socket that listens on an abstract name, which begins with a zero byte and is in no folder.
Descriptor listen_on(const std::string& name, int backlog, std::chrono::milliseconds timeout);
// A connection to it; `rank` is for errors. An error if another user listens there.
Descriptor connect_to(const std::string& name, int64_t rank, std::chrono::milliseconds timeout);
// The next connection; none if its caller is another user, or has gone.
Descriptor accept_from(const Descriptor& listener, std::chrono::milliseconds timeout);

// The first message on a connection, from either end: the sender's rank, whether it has kept an
// earlier connection to the receiver, the word that the receiver has told its group only, and the
// sender's memory.
struct Handshake {
  int64_t rank;
  bool connected;
  std::string secret;
  Descriptor memory;
};
void send_handshake(
    const Descriptor& socket, int64_t rank, bool connected, const std::string& secret, int memory);
// None if anything else was received: any process may have sent that.
std::optional<Handshake> receive_handshake(const Descriptor& socket, int flags = 0);

// "boot_id": alike for all processes until the next boot; "uuid": a new one at each call.
std::string random_word(const std::string& name);

// A connection tells two processes when the other one ends. They keep it as long as both live, so
// that both have the same ones, and use it for all groups that both are in.
using Connection = std::shared_ptr<const Descriptor>;
// A word that no other process has.
std::string process_word();
// One to the process of that word; null: there is none, or it has closed.
Connection find_connection(const std::string& process);
Connection keep_connection(const std::string& process, Descriptor socket);
bool is_closed(const Connection& connection);

}  // namespace deepsp
