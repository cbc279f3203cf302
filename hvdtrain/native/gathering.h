// The gathering of parts of tensors from all ranks: through a Segment within a host, and
// between ranks at the same place of other hosts through its Links.

#ifndef HVDTRAIN_GATHERING_H_
#define HVDTRAIN_GATHERING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cursor.h"
#include "reduction.h"
#include "segment.h"

namespace hvdtrain {

// The exchange of parts of tensors: each rank copies its parts to all others.
struct Gathering {
  std::string name;
  uint64_t signature;
  std::function<std::string()> describe;
  size_t element_bytes;
  // For each rank of the job the parts that it sends: inputs of this rank's, outputs of
  // all.
  std::vector<std::vector<Piece>> pieces;
};

// Copies the parts of all ranks; blocks until all of them take part. Hosts have the same
// number of ranks. A rank that has joined is a mismatch: its parts are missing.
Report Allgather(Segment& segment, const Gathering& gathering);

}  // namespace hvdtrain

#endif  // HVDTRAIN_GATHERING_H_
