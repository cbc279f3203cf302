// The part of a reduction that is between hosts: what their ranks have called, and the
// sums of the parts that the ranks of a number have.

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

  // Exchanges the calls of all hosts and, with those whose ranks agree, the sums of the
  // first chunk; `elements` of it. Returns the reason of a failure.
  std::string ExchangeCalls(const Call& mine);

  // By host. The same on all ranks of the job.
  const std::vector<Call>& calls() const { return calls_; }

  // Of all hosts.
  int active() const;

  // The call of a rank that has not joined; there is one.
  const Call& any() const;

  // Whether ranks that have not joined have called something else than others.
  bool differ() const;

  // The rank that was the last to join, once all have.
  int last_joined() const;

  // Adds what all hosts have in this rank's part of the chunk, and distributes the sums:
  // the same elements of the segment's result on all hosts. Returns the reason of a
  // failure.
  std::string Sum(const Dtype& dtype, size_t elements, int divisor);

  // Sends a text to all other hosts, and returns theirs, by host.
  std::string ExchangeTexts(const std::string& mine, std::vector<std::string>* texts);

 private:
  int count() const { return calls_.size(); }
  // The part of a chunk that `host` adds up for this rank's number.
  Range PartOf(int host, size_t elements, size_t element_bytes) const;
  Block PartIn(char* chunk, int host, size_t elements, size_t element_bytes) const;
  // Of the first chunk.
  size_t FirstElements(const Call& call) const;
  std::string Exchange(std::vector<Transfer> transfers);

  Segment& segment_;
  const std::string& name_;
  const int host_;
  std::vector<Call> calls_;
  // What other hosts have sent of this rank's part.
  std::vector<std::vector<char>> received_;
  bool has_first_chunk_ = false;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_HOSTS_H_
