// The part of a reduction that is between hosts: the comparison of what the ranks have
// called, and the sums over hosts. A rank adds up its part of the tensors together with
// the ranks of other hosts that have the same local rank.
//
// The order of a sum does not depend on time. It is that of the hosts, but for a ring:
// see Ring. One host computes each element and sends it to all others, or, for small
// tensors, all compute the same: all ranks get the same bits.

#ifndef HVDTRAIN_HOSTS_H_
#define HVDTRAIN_HOSTS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dtypes.h"
#include "links.h"
#include "ring.h"
#include "segment.h"

namespace hvdtrain {

// What the ranks of one host have called. Sent as it is: hosts have one architecture.
struct Call {
  uint64_t signature;
  uint64_t elements;
  uint32_t dtype;
  uint32_t is_mean;
  uint32_t active;    // ranks that have not joined
  uint32_t has_differences;  // between ranks of the host
  uint32_t idle_rounds;      // see Links; 0 unless all have joined
  // The rank of the job that was the last of the host to join, and when.
  int32_t last_joined;
  int64_t joined_at;
};

// How hosts add up their sums.
enum class Way {
  // Each sends all to each other host, with its call: one message to each.
  kGather,
  // Each adds up a block, whose values all others send to it with their calls. The sums
  // are a second message to each other host.
  kScatter,
  // The same in windows, each of which takes two messages after the calls.
  kScatterWindows,
  // In windows, after the calls, in a ring.
  kRing,
};

class Hosts {
 public:
  // `name` is that of the reduction, in messages.
  Hosts(Segment& segment, const std::string& name);

  // Exchanges the calls of all hosts. `sums`, this rank's part of the tensors, is sent as
  // well where SendsSums(mine), which saves a message. Returns the reason of a failure.
  std::string ExchangeCalls(const Call& mine, char* sums);

  // Whether a host with this call sends sums with it.
  bool SendsSums(const Call& call) const;

  // Whether the tensors of a call go in windows, after the calls: they are more than a
  // slot.
  bool IsLarge(const Call& call) const;

  // Number of ranks of the job that have not joined.
  int active() const;

  // The call of the first host that has such a rank.
  const Call& first_active() const;

  // Whether ranks that have not joined have called something else than others.
  bool have_differences() const;

  // The rank that was the last to join, once all have.
  int last_joined() const;

  // Adds up the `elements` of all hosts at `data`, which are this rank's part or a window
  // of it, and divides the sums. Returns the reason of a failure.
  std::string Sum(const Dtype& dtype, char* data, size_t elements, double divisor);

  // Sends a text to all other hosts, and returns theirs, by host.
  std::string ExchangeTexts(const std::string& mine, std::vector<std::string>* texts);

 private:
  int count() const { return calls_.size(); }
  // The way of the elements of a call: the same on all ranks.
  Way WayOf(const Call& call) const;
  // What a host with this call sends to `host` with it, of sums at `data`.
  Block Sent(const Call& call, int host, char* data) const;
  std::string SumBlocks(const Dtype& dtype, char* data, size_t elements, double divisor,
                        bool are_received);
  std::string SumInRing(const Dtype& dtype, char* data, size_t elements, double divisor);
  std::string Exchange(std::vector<Transfer> transfers, Stage stage);

  Segment& segment_;
  const std::string& name_;
  const int host_;
  std::vector<Call> calls_;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_HOSTS_H_
