#pragma once
// What is on its way into a buffer, and waiting for it.

#include "group.h"

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace c10d {
class Work;
}

namespace deepsp {

using Work = std::shared_ptr<c10d::Work>;
class Mapped;

// How blocks lie in the buffer of a heads_to_seq: packed, one after another by rank; apart, the
// same of each tensor, one after another; in rows, each tensor's blocks side by side, token by
// token; in batches, sequence by sequence.
enum class Order { packed, apart, rows, batches };

// An exchange that is on its way into a buffer, and all that must live until it
// has arrived. It belongs to the buffer's block (pool.h), or is found by its storage
// (flight_table.h), so a buffer that nobody waits for takes it along when it goes.
struct Flight {
  // Declared before the works, which must end before what they send goes.
  std::vector<at::Tensor> holds;  // what is being sent
  // What is done when a rank's messages have arrived, by rank.
  std::vector<std::function<void()>> on_arrival;
  // heads_to_seq: this rank's own block lies in these inputs, not in the buffer; an undefined one
  // does lie in the buffer.
  std::vector<at::Tensor> own;
  Order order = Order::packed;
  // Point to point: one entry an exchange, its works by source rank.
  std::vector<std::vector<Work>> receives;
  std::vector<Work> sends;
  // From ranks that write into the buffer: as which exchange of theirs.
  std::shared_ptr<Mapped> mapped;
  uint64_t exchange = 0;
  // Any other backend.
  Work collective;
  bool together = false;  // all blocks arrive at once, by a collective
  // On a GPU: where it was launched. What is sent and received is then the backend's, too, until it
  // has arrived, so that nobody need wait.
  std::optional<c10::Stream> stream;
  bool done_on_device = false;  // the group's
  // On a GPU: nothing is on its way any more, or ever was; only the stream is of interest.
  bool local = false;
  // Waited for, and so without `own`: to be waited for no more.
  bool landed = false;
  // Which exchange it is, for errors: set when it is launched.
  std::string what;

  Flight() = default;
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  // Waits on the CPU, if nobody has: what is on its way must not write into memory
  // that somebody else has by then, nor leave the group halfway.
  ~Flight();

  void wait_receive(int64_t source);
  void wait_sends();
  void wait_all();
  // Waits for one exchange of messages with all ranks. An error names every rank whose block hasn't
  // come.
  void wait_naming_all();

 private:
  // `from`: whose block it is that arrives, -1: any.
  void wait(Work& work, int64_t from = -1);
  void wait_mapped(int64_t source);
  bool failed_ = false;  // a wait threw: the group is broken
};

// Whether anomaly mode looks at what ops return, or DEEPSP_DEBUG=1: what is launched then lands at
// once.
bool watched();
// It looks for NaN in whole buffers, between blocks and behind them, too.
void clear_if_watched(const at::Tensor& buffer);

// A buffer has been made, for what will be launched into it. On a GPU, what is made of it on
// another stream comes after what this one does then.
void made_here(const at::Tensor& buffer);

// Of what is done, takes what owns the buffer that it has filled: its work, and what was sent. Null
// where it isn't done.
std::unique_ptr<Flight> let_go_if_done(Flight& flight);
// Whether the current stream's work is captured in a graph: nothing may be asked of a device then.
bool capturing(c10::Device device);

// Ties `flight`, or the work of any other backend, to the buffer that it fills. When watched()
// holds, a work lands here at once; a flight's caller has waited for it before.
void launch_into(const at::Tensor& buffer, std::unique_ptr<Flight> flight);
void launch_into(
    const Group& group, const at::Tensor& buffer, const Work& work, const at::Tensor& sent);
// The flight into the buffer, null where nothing is on its way.
std::unique_ptr<Flight> flight_into(const at::Tensor& buffer);
// Waits, if nobody has, and takes the buffer.
std::unique_ptr<Flight> land(const at::Tensor& buffer);
// From now on flight_into(buffer) raises: a buffer is waited for once.
void mark_landed(const at::Tensor& buffer, const Flight& flight);
// Whether all blocks of the buffer arrive, or have arrived, at once.
bool travels_together(const at::Tensor& buffer);
// How blocks lie in it, on their way or landed; packed where nothing was on its way.
Order order_of(const at::Tensor& buffer);
// Whether it was marked so.
bool has_landed(const at::Tensor& buffer);

}  // namespace deepsp
