// The part of a reduction that is between hosts: the comparison of what the ranks have
// called, and the sums over hosts. A rank adds up its part of the tensors together with
// the ranks of other hosts that have the same local rank.
//
// The order of a sum does not depend on time. It is that of the hosts, but for a ring and
// for rounds: see Ring and SumInRounds. One host computes each element and sends it to all
// others, or, for small tensors, all compute the same: all ranks get the same bits.

#ifndef HVDTRAIN_HOSTS_H_
#define HVDTRAIN_HOSTS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "call.h"
#include "dtypes.h"
#include "links.h"
#include "ring.h"
#include "segment.h"

namespace hvdtrain {

// How hosts add up their sums.
enum class Way {
  // Each sends all to all others, with its call.
  kGather,
  // Each adds up a block, whose values all others send to it with their calls. The sums
  // are a second message to each other host.
  kScatter,
  // The same in windows, each of which takes two messages after the calls.
  kScatterWindows,
  // In windows, after the calls, in a ring.
  kRing,
  // Scattered and gathered in rounds, in windows after the calls, where not all hosts are
  // connected.
  kRounds,
};

// What a rank waits for after its call.
std::string ExchangeOf(const std::string& operation);

class Hosts {
 public:
  // `name` is that of the reduction, in messages.
  Hosts(Segment& segment, const std::string& name);

  // Exchanges the calls of all hosts. `sums`, this rank's part of the tensors, is sent as
  // well where SendsSums(mine), which saves a message. Returns the reason of a failure.
  std::string ExchangeCalls(const HostCall& mine, char* sums);

  // The calls of all hosts, once they have been exchanged.
  const JobCall& job_call() const { return job_call_; }

  // Whether a host with this call sends sums with it.
  bool SendsSums(const HostCall& call) const;

  // Whether the tensors of a call go in windows, after the calls.
  bool IsInWindows(const HostCall& call) const;

  // Adds up the `elements` of all hosts at `data`, which are this rank's part or a window
  // of it, and divides the sums. Returns the reason of a failure.
  std::string Sum(const Dtype& dtype, char* data, size_t elements, double divisor);

  // Sends a text to all other hosts, and returns theirs, by host.
  std::string ExchangeTexts(const std::string& mine, std::vector<std::string>* texts);

 private:
  int count() const { return calls_.size(); }
  std::string ExchangeCallsOfHosts(const HostCall& mine, char* sums);
  JobCall Conclude() const;
  // Publishes `job_call_` to the ranks of this host without links.
  std::string Publish();
  // The way of the elements of a call: the same on all ranks.
  Way WayOf(const HostCall& call) const;
  // What a host with this call sends to `host` with it, of sums at `data`.
  Block Sent(const HostCall& call, int host, char* data) const;
  std::string SumBlocks(const Dtype& dtype, char* data, size_t elements, double divisor,
                        bool are_received);
  std::string SumInRing(const Dtype& dtype, char* data, size_t elements, double divisor);
  std::string Exchange(std::vector<Transfer> transfers, Stage stage);

  Segment& segment_;
  const std::string& name_;
  const int host_;
  std::vector<HostCall> calls_;
  JobCall job_call_{};
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_HOSTS_H_
