// The part of a reduction that is between hosts: the comparison of what the ranks have
// called, and the sums over hosts. A rank adds up its part of the tensors together with
// the ranks of other hosts that have the same local rank.

#ifndef HVDTRAIN_HOSTS_H_
#define HVDTRAIN_HOSTS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "links.h"
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

// The elements [first, second) of a chunk.
using Range = std::pair<size_t, size_t>;

// Part `number` of `parts` of a range. Different parts share no cache line.
Range Part(Range range, int number, int parts, size_t element_bytes);

class Hosts {
 public:
  // `name` is that of the reduction, in messages.
  Hosts(Segment& segment, const std::string& name);

  // Exchanges the calls of all hosts. A host whose ranks agree sends its sums of the
  // first chunk as well, which saves a message. Returns the reason of a failure.
  std::string ExchangeCalls(const Call& mine);

  // Number of ranks of the job that have not joined.
  int active() const;

  // The call of the first host that has such a rank.
  const Call& first_active() const;

  // Whether ranks that have not joined have called something else than others.
  bool have_differences() const;

  // The rank that was the last to join, once all have.
  int last_joined() const;

  // Adds the results of all hosts in this rank's part of a chunk, divides the sums, and
  // writes them to the result of every host. Returns the reason of a failure.
  std::string Sum(const Dtype& dtype, size_t elements, double divisor);

  // Sends a text to all other hosts, and returns theirs, by host.
  std::string ExchangeTexts(const std::string& mine, std::vector<std::string>* texts);

 private:
  int count() const { return calls_.size(); }
  // The elements that `host` adds up, of the part that this rank's group reduces.
  Range PartOf(int host, size_t elements, size_t element_bytes) const;
  Block PartIn(char* chunk, int host, size_t elements, size_t element_bytes) const;
  // Number of elements of the first chunk that a host with this call sends.
  size_t FirstElements(const Call& call) const;
  std::string Exchange(std::vector<Transfer> transfers);

  Segment& segment_;
  const std::string& name_;
  const int host_;
  std::vector<Call> calls_;
  bool has_first_chunk_ = false;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_HOSTS_H_
