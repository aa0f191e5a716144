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

// The first message on a connection, from either end: the sender's rank, the word that the receiver
// has told its group only, the name of an earlier connection to the receiver (empty: there is
// none), and the sender's memory.
struct Handshake {
  int64_t rank;
  std::string secret;
  std::string connection;
  Descriptor memory;
};
void send_handshake(
    const Descriptor& socket,
    int64_t rank,
    const std::string& secret,
    const std::string& connection,
    int memory);
// None if anything else was received: any process may have sent that.
std::optional<Handshake> receive_handshake(const Descriptor& socket, int flags = 0);

// "boot_id": alike for all processes until the next boot; "uuid": a new one at each call.
std::string random_word(const std::string& name);

// A connection to another process, which closes when that process ends, or has left all groups that
// use it. Its name is alike at both ends.
struct Connection {
  Descriptor socket;
  std::string name;

  bool is_closed() const;
};
using SharedConnection = std::shared_ptr<const Connection>;
// A word that no other process has.
std::string process_word();
// An open one to the process of that word, as some group uses it; null: there is none.
SharedConnection find_connection(const std::string& process);
// From here on it is found, as long as it is used.
SharedConnection use_connection(const std::string& process, Connection made);

}  // namespace deepsp
