// The sum of a large tensor over hosts, each of which sends to the next one alone.

#ifndef HVDTRAIN_RING_H_
#define HVDTRAIN_RING_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "links.h"

namespace hvdtrain {

// The elements [first, second) of a chunk, or of what a rank adds up with its peers.
using Range = std::pair<size_t, size_t>;

// Part `number` of `parts` of a range. Parts begin at multiples of two cache lines from
// the range's start: in a slot, which begins at one, no two share a line.
Range Part(Range range, int number, int parts, size_t element_bytes);

// The tensor has a block for each host. In the first H-1 steps of H hosts, each sends a
// block, and adds its own values to the one that it receives, which it sends in the next
// step. Then it has the sum of one block, and in H-1 more steps the sums go round. Each
// host sends 2 (H-1)/H of the bytes, the least that is possible.
//
// A block is received in fragments. Each is sent on as soon as it has been added, so that
// a host receives, adds and sends at the same time.
//
// The values of a block are added in the order of hosts from the block's own on, round
// to the one before it, by one host each: all get the same bits in every run.
class Ring {
 public:
  // Reduces `elements` at `data`. `fragment` is memory for what is received.
  Ring(int host, int hosts, const Dtype& dtype, char* data, size_t elements,
       double divisor, Block fragment);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // For Links::Exchange, which must end before this object does.
  std::vector<Transfer> Transfers();

 private:
  // The block that is sent in a step. The one that is received is sent in the next.
  Range Sent(int step) const;
  bool has_sums(int step) const { return step >= hosts_ - 1; }
  // Adds the fragment that has been received, if there is one, and returns the next.
  std::vector<Block> Receive();
  void Add();

  const int host_, hosts_;
  const Dtype& dtype_;
  char* const data_;
  const size_t elements_;
  const double divisor_;
  const Block fragment_;
  // Of the fragment that is being received.
  int step_ = 0;
  Range received_{0, 0};
  // Bytes that may be sent.
  size_t ready_ = 0;
};

}  // namespace hvdtrain

#endif  // HVDTRAIN_RING_H_
