// The TCP connections of a rank to one rank of each other host.
//
// The ranks of a number within their hosts are connected to each other: each of them
// reduces another part of the tensors.

#ifndef HVDTRAIN_LINKS_H_
#define HVDTRAIN_LINKS_H_

#include <cstddef>
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
  // Called once, when all of `in` has been received: returns one more block.
  std::function<Block()> more;
};

class Links {
 public:
  // `sockets` are connected, one for each host; that of this host is -1. Closes them at
  // the end. `ranks` are those at the other ends.
  Links(int host, std::vector<int> sockets, std::vector<int> ranks);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  int host() const { return host_; }
  int hosts() const { return sockets_.size(); }

  // Blocks until all of `transfers`, one for each host, are complete. Returns the reason
  // if a rank has ended, a rank of this host has failed, or the others have not come in
  // time. Those that have not sent anything are the missing ranks of `operation`.
  std::string Exchange(std::vector<Transfer> transfers, Segment& segment,
                       const std::string& operation);

  // Ends the exchanges of the other hosts: this rank will take part in no more.
  void Close();

  // How many reductions all ranks of this host have taken part in since they joined.
  uint32_t idle_rounds = 0;

 private:
  class Progress;
  std::string Missing(const std::vector<Progress>& progress, int ranks_per_host) const;

  const int host_;
  const std::vector<int> sockets_, ranks_;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_LINKS_H_
