// Exchanges of many hosts in rounds, in each of which a host sends to one other host and
// receives from one other.
//
// The H hosts are connected in a circulant graph: host h to h + s and h - s (mod H) for
// each of the skips s, which are H/2, half of that, and so on down to 1, each rounded up.
// There are ceil(log2 H) rounds, and at most twice as many connections of each host.
//
// J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
// arXiv:2410.14234: for any H, no reduce-scatter and no all-gather has fewer rounds, or
// fewer bytes.

#ifndef HVDTRAIN_ROUNDS_H_
#define HVDTRAIN_ROUNDS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "dtypes.h"
#include "links.h"
#include "segment.h"

namespace hvdtrain {

// Up to so many hosts are all connected, and send a message to each other one at the same
// time. A round takes the latency of the network and of the process that wakes up, and a
// message some processor time: the messages of a few hosts are faster than their rounds.
constexpr int kDirectHosts = 16;

// Whether two hosts exchange anything with each other.
bool AreConnected(int hosts, int one, int other);

// What a host sends to all others.
struct Message {
  // Of a size that all hosts know.
  Block head;
  // Returns the memory of what follows for a receiver, whose size the head tells; called
  // when this rank has the head. With more than kDirectHosts it is the same for all.
  std::function<Block(int)> body;
};

// Sends the message of this host to all others, and receives theirs. `messages`: by host.
// Returns the reason of a failure, after which the segment is lost.
std::string GatherMessages(Segment& segment, const std::string& operation, Stage stage,
                           const std::vector<Message>& messages);

// Adds up the `elements` of all hosts at `data`, and divides the sums. Each host adds up
// the block of its own number, in which it adds the sums of some hosts to those of others:
// an order that depends on the numbers of hosts alone. It sends the result to all others,
// so that all have the same bits. 16-bit values are added and sent as float32 until they
// are complete.
std::string SumInRounds(Segment& segment, const std::string& operation,
                        const Dtype& dtype, char* data, size_t elements,
                        double divisor);

}  // namespace hvdtrain

#endif  // HVDTRAIN_ROUNDS_H_
