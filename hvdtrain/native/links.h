// The TCP connections of a rank to one rank of each other host, or of some of them: see
// rounds.h.
//
// Ranks with the same local rank are connected. Each of these groups reduces another part
// of the tensors.

#ifndef HVDTRAIN_LINKS_H_
#define HVDTRAIN_LINKS_H_

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "segment.h"

namespace hvdtrain {

struct Block {
  char* data;
  size_t bytes;
};

// What is sent to a host and received from it at the same time.
struct Transfer {
  std::vector<Block> out, in;
  // Called each time that all of `in` has been received: returns what to receive next,
  // nothing at the end.
  std::function<std::vector<Block>()> then_receive;
  // How many bytes of `out` may be sent, which `then_receive` may increase; nullptr: all.
  const size_t* ready = nullptr;
};

// What is exchanged, which decides what can be said about a rank that is late.
enum class Stage {
  kCalls,
  // All ranks have called: a rank that is late has ended, is slow, or waits itself.
  kSums,
  // The same where a rank sends what it has received: it may wait for another host.
  kRelayedCalls,
  kRelayedSums,
};

// The stage of what is sent on.
Stage Relayed(Stage stage);

class Links {
 public:
  // `sockets` are connected to the ranks `ranks` of the job, by host: -1 for this host
  // and those that are not connected to it. The destructor closes the sockets.
  Links(int host, std::vector<int> sockets, std::vector<int> ranks);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int hosts() const { return sockets_.size(); }

  // Blocks until all of `transfers`, one for each host, are complete. Returns the reason,
  // after which the segment is lost, if a connection has ended, a rank of this host has
  // reported a failure, or no bytes of `operation` have arrived or left in time. A rank
  // of this host that was killed is found by the next barrier instead, whose time counts
  // from its start.
  std::string Exchange(std::vector<Transfer> transfers, Segment& segment,
                       const std::string& operation, Stage stage);

  // Memory for what `host` sends, kept from one reduction to the next.
  Block Buffer(int host, size_t bytes);

  // The same for this rank's sums.
  Block Window(size_t bytes);

  // Ends the exchanges of the other hosts: this rank will take part in no more.
  void Close();

  // Number of reductions since all ranks of this host have joined.
  uint32_t idle_rounds = 0;

 private:
  class Progress;
  std::string Run(std::vector<Transfer> transfers, Segment& segment,
                  const std::string& operation, Stage stage);
  // Sends and receives what is possible without blocking, at the hosts that have
  // `events`. Returns the reason if a connection has ended.
  std::string Advance(std::vector<Progress>& progress,
                      const std::vector<pollfd>& events) const;
  // Waits for events that the exchange can use; returns whether there are any.
  bool Wait(const std::vector<Progress>& progress, std::vector<pollfd>& events,
            bool is_spinning) const;
  // Why the exchange cannot go on, if there is a reason.
  std::string Failure(const std::vector<Progress>& progress,
                      const Segment& segment) const;
  // The first host that has acknowledged nothing for so long; hosts() if there is none.
  int Silent(const std::vector<Progress>& progress, uint32_t milliseconds) const;
  void Warn(const std::vector<Progress>& progress, const Segment& segment,
            const std::string& operation, Stage stage) const;
  std::string Late(const std::vector<Progress>& progress, const Segment& segment,
                   const std::string& operation, Stage stage) const;
  void CloseSockets() const;
  // The reason where the connection to a host has ended with this errno, or 0. Names the
  // ranks of other connections that have ended as well: a rank that has lost another one
  // closes its own, so that the first to be noticed may not be the lost one.
  std::string Ended(int host, int error) const;
  // The end of a message about a host that does not acknowledge, with its address.
  std::string Unreachable(int host) const;
  bool HasEnded(int host) const;
  // The ranks of the hosts for which `is_one` is true.
  template <typename Condition>
  std::string Ranks(const std::vector<Progress>& progress, Condition is_one) const;
  // The ranks that have not called; empty after the calls.
  std::string Missing(const std::vector<Progress>& progress, int ranks_per_host,
                      Stage stage) const;
  // What an exchange waits for when no rank is missing.
  std::string Waiting(const std::vector<Progress>& progress, int ranks_per_host,
                      Stage stage) const;

  const int host_, process_;
  const std::vector<int> sockets_, ranks_;
  std::vector<std::vector<char>> buffers_;
  std::vector<char> window_;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_LINKS_H_
