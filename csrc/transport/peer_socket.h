#pragma once
// Local sockets over which two processes of one user send each other files of memory. It uses no
// torch.

#include "shared_memory.h"

#include <chrono>
#include <optional>
#include <string>

namespace deepsp {

// A socket that listens on an abstract name, which begins with a zero byte and is in no folder.
Descriptor listen_on(const std::string& name, int backlog, std::chrono::milliseconds timeout);
// A connection to it; `rank` is for errors. An error if another user listens there.
Descriptor connect_to(const std::string& name, int64_t rank, std::chrono::milliseconds timeout);
// The next connection; none if its caller is another user, or has gone.
Descriptor accept_from(const Descriptor& listener, std::chrono::milliseconds timeout);

// The first message on a connection, from either end: the sender's rank, the word that the receiver
// has told its group only, and the sender's memory.
struct Handshake {
  int64_t rank;
  std::string secret;
  Descriptor memory;
};
void send_handshake(const Descriptor& socket, int64_t rank, const std::string& secret, int memory);
// None if anything else was received: any process may have sent that.
std::optional<Handshake> receive_handshake(const Descriptor& socket, int flags = 0);

}  // namespace deepsp
